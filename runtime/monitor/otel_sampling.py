"""Which steps leave a trace, and under which ids: the same on all ranks, without asking them."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

# A step is slow that takes longer than so many times the median of the last ones.
SLOW_RATIO = 2.0
REMEMBERED_STEPS, LEAST_STEPS = 101, 10
# Slow steps are rare; where they are not, so many are traced at once and then one in so long.
SLOW_AT_ONCE, SECONDS_PER_SLOW = 20, 5.0


def trace_id_of(run_id: str, step: int) -> int:
    """Return the id of a step's trace. All ranks come to the same."""
    return _hash(f"{run_id}/{step}", 16)


def span_id_of(run_id: str, step: int, rank: int, *, life: str) -> int:
    """Return the id of a rank's root in that trace.

    `life` tells the steps of a run apart that bear one number, as after a restart.
    """
    return _hash(f"{run_id}/{step}/{rank}/{life}", 8)


def is_sampled(trace_id: int, every_steps: int) -> bool:
    """Whether a trace is one in `every_steps`, by chance and alike on all ranks."""
    return trace_id % 2**64 % every_steps == 0


def _hash(text: str, num_bytes: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1  # 0 means that there is none


class SlowSteps:
    """Tells slow steps by this rank's own last ones."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: deque[float] = deque()
        self._sorted: list[float] = []
        self._allowed = float(SLOW_AT_ONCE)
        self._counted_at = now()

    def is_slow(self, seconds: float) -> bool:
        """Whether a step was slow against those before it; remembers it."""
        known = len(self._sorted)
        slow = known >= LEAST_STEPS and seconds > SLOW_RATIO * self._sorted[known // 2]
        self._last.append(seconds)
        insort(self._sorted, seconds)
        if len(self._last) > REMEMBERED_STEPS:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        return slow

    def may_trace(self) -> bool:
        """Whether one more slow step may leave a trace; counts it if so."""
        now = self._now()
        earned = (now - self._counted_at) / SECONDS_PER_SLOW
        self._allowed = min(SLOW_AT_ONCE, self._allowed + earned)
        self._counted_at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True
