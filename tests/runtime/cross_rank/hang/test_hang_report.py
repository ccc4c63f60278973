"""Tests of the report of a hang, from constructed data and with real stacks.

Covers `missing_ranks.py`.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.hangs import CALL, KEY, call, evidence, peer

from zerowatch.runtime.cross_rank.hang.hang_evidence import RankSetSummary
from zerowatch.runtime.cross_rank.hang.hang_report import (
    report_text,
    summary,
    write_flight_recorder_dump,
    write_report,
)

SUMMARIES = {
    "a sequence that was left before": (
        replace(evidence([call()], [peer(1, 1234)]), divergence="rank 1 left the sequence"),
        f"rank 1 left the sequence; all known members have arrived at {CALL}, which does not end; "
        "all known ranks are alive",
    ),
    "a stopped rank": (
        evidence([call()], [peer(1, 1233, age_seconds=33.0)]),
        f"rank 1 has not arrived at {CALL}; it has sent no heartbeat for at least 33 s",
    ),
    "a late rank that lives": (
        evidence([call()], [peer(1, 1234), peer(2, 1230), peer(3, 1234)]),
        f"rank 2 has not arrived at {CALL}; it is alive",
    ),
    "several, the longest silent first": (
        evidence(
            [call()], [peer(1, 1233), peer(2, 1233, age_seconds=40.0), peer(3, 0, age_seconds=None)]
        ),
        f"ranks 2, 1, 3 have not arrived at {CALL}; rank 2 has sent no heartbeat for at least 40 s",
    ),
    "a peer with one heartbeat only": (
        evidence([call()], [peer(1, 1233, age_seconds=None)]),
        f"rank 1 has not arrived at {CALL}; it has sent one heartbeat only",
    ),
    "very many": (
        evidence([call()], [peer(rank, 0, age_seconds=50.0) for rank in range(1, 1001)]),
        f"ranks 1, 2, 3, 4, 5, 6, 7, 8 and 992 more have not arrived at {CALL}; "
        "rank 1 has sent no heartbeat for at least 50 s",
    ),
    "the first of several calls": (
        evidence([call(1233, in_flight=False), call(1234), call(1235)], [peer(1, 1233)]),
        f"rank 1 has not arrived at {CALL}; it is alive",
    ),
    "behind a call whose end was not recorded": (
        evidence([call(7), call(1234)], [peer(1, 1233)]),
        f"rank 1 has not arrived at {CALL}; it is alive",
    ),
    "all arrived, one silent": (
        evidence([call()], [peer(1, 1234), peer(2, 1234, age_seconds=50.0)]),
        f"all known members have arrived at {CALL}, which does not end; "
        "rank 2 has sent no heartbeat for at least 50 s",
    ),
    "all arrived, all alive": (
        evidence([call()], [peer(1, 1234)]),
        f"all known members have arrived at {CALL}, which does not end; all known ranks are alive",
    ),
    "point to point": (
        evidence([call(0, op="recv")], [peer(1, 5)]),
        "rank 0 waits in recv of group dp (64 MiB, backward), whose other end is not known; "
        "all known ranks are alive",
    ),
    "others wait for this rank": (
        evidence([call(in_flight=False)], [peer(1, 1235), peer(2, 1235), peer(3, 1234)]),
        "rank 0 (this one) has not arrived at collective number 1235 of group dp, where ranks "
        "1, 2 wait; it is in backward and in no collective, at load (data.py:12)",
    ),
    "no peer waits": (
        evidence([call(in_flight=False)], [peer(1, 1234)]),
        "rank 0 (this one) makes no progress: it is in backward and in no collective, "
        "at load (data.py:12)",
    ),
    "nothing known of the others": (
        evidence([call()], None),
        f"rank 0 waits in {CALL}; nothing is known of the other ranks: they are not compared, or "
        "the c10d store does not respond",
    ),
    "announced": (
        evidence([call()], [peer(1, 1233)], is_announced=True),
        f"rank 1 has not arrived at {CALL}; it is alive; "
        "another rank announced the hang before this rank reached its own limit",
    ),
}


@pytest.mark.parametrize("case", SUMMARIES)
def test_the_summary_names_the_missing_ranks_and_the_collective(case: str) -> None:
    found, expected = SUMMARIES[case]

    assert summary(found) == expected


def test_of_two_groups_the_one_with_a_silent_rank_is_named() -> None:
    other = "1-ffffffff"
    found = evidence(
        [call(5, key=other, role="tp"), call()], [peer(1, 0), peer(2, 9, age_seconds=44.0)]
    )
    rank_sets = {
        KEY: RankSetSummary(key=KEY, role="dp", members=(0, 2), issued=1234),
        other: RankSetSummary(key=other, role="tp", members=(0, 1), issued=5),
    }

    said = summary(replace(found, rank_sets=rank_sets))

    assert said.startswith(f"rank 2 has not arrived at {CALL}")


def test_a_report_starts_with_the_summary_and_lists_peers_and_the_last_32_calls() -> None:
    calls = [call(number, in_flight=False, seconds=0.5) for number in range(1, 1234)] + [call()]
    found = evidence(calls, [peer(1, 1233, age_seconds=33.0), peer(2, 1234, pause="eval")])

    lines = report_text(found).splitlines()

    assert lines[0] == summary(found)
    assert "rank 0 on node-0, 2001-09-09 01:46:40 UTC" in lines
    assert "last step that ended: 77; phase: backward" in lines
    assert "no progress for 33.2 s; limit 30.0 s, expected pauses left out" in lines
    assert f"  {CALL}: rank 0 waits for rank 1" in lines
    assert f"  rank 1 on node-1: 33.0 s; dp ({KEY}) 1233" in lines
    assert f"  rank 2 on node-2: 1.0 s, in eval; dp ({KEY}) 1234" in lines
    listed = [line for line in lines if line.startswith(f"  dp ({KEY})")]
    assert len(listed) == 32
    assert listed[-1] == (
        f"  dp ({KEY}) 1234 all_reduce 64 MiB float32 backward: in flight 33.000000 s"
    )


def test_a_call_in_flight_is_listed_however_many_came_after_it() -> None:
    calls = [call(1)] + [call(number, in_flight=False) for number in range(2, 100)]

    text = report_text(evidence(calls, [peer(1, 99)], issued=99))

    assert f"dp ({KEY}) 1 all_reduce 64 MiB float32 backward: in flight" in text


@contextmanager
def blocked_in(function: Callable[[threading.Event], object]) -> Any:
    """Have another thread stand in a function while the test goes on."""
    release = threading.Event()
    thread = threading.Thread(target=function, args=(release,), name="blocked-thread")
    thread.start()
    try:
        yield
    finally:
        release.set()
        thread.join()


def wait_for_release(release: threading.Event) -> None:
    secret = "a hidden local"
    release.wait()
    del secret


def test_a_written_report_ends_with_the_stacks_and_is_for_its_owner_only(tmp_path: Path) -> None:
    found = evidence([call()], [peer(1, 1233)])

    with blocked_in(wait_for_release):
        path = write_report(tmp_path / "runs" / "one", found)
    assert path is not None
    write_flight_recorder_dump(path, b'{"entries": []}')

    assert path == tmp_path / "runs" / "one" / "hang-rank-0-1.txt"
    text = path.read_text()
    assert text.startswith(report_text(found)[:200])
    assert "in wait_for_release" in text
    assert "blocked-thread" in text
    assert "a hidden local" not in text
    dump = path.with_suffix(".flight.json")
    assert dump.read_bytes() == b'{"entries": []}'
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, dump)] == [0o600, 0o600]


def test_a_run_keeps_at_most_five_reports_of_a_rank(tmp_path: Path) -> None:
    found = evidence([], None)

    written = [write_report(tmp_path, found) for _ in range(6)]

    names = [f"hang-rank-0-{number}.txt" for number in range(1, 6)]
    assert [path and path.name for path in written] == [*names, None]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
