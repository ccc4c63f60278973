from __future__ import annotations

from zerowatch.runtime.memory.sliding_max import WINDOW_SECONDS, SlidingMax


def test_a_peak_stays_for_a_minute_and_then_the_next_highest_counts() -> None:
    now = [0.0]
    peak = SlidingMax(lambda: now[0])

    seen = []
    for time, value in ((0, 5.0), (10, 9.0), (20, 3.0), (30, 4.0), (10 + WINDOW_SECONDS + 1, 2.0)):
        now[0] = time
        seen.append(peak.add(value))

    assert seen == [5.0, 9.0, 9.0, 9.0, 4.0]
