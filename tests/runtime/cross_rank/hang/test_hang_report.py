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

from zerowatch.runtime.cross_rank.hang.hang_evidence import HangEvidence, RankSetSummary
from zerowatch.runtime.cross_rank.hang.hang_report import (
    report_text,
    summary,
    write_flight_recorder_dump,
    write_report,
)


def unrecorded(own: int, others: list[tuple[int, int, int]]) -> HangEvidence:
    """Return evidence of rank 0 after step 77, given its unseen calls since then.

    The others are given by rank, last step and unseen calls.
    """
    peers = [
        replace(peer(rank, 0), step=step, unseen={KEY: number}) for rank, step, number in others
    ]
    found = evidence([], peers, issued=0)
    rank_sets = {KEY: replace(found.rank_sets[KEY], unseen=own)}
    return replace(found, rank_sets=rank_sets)


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
    "some members are unknown": (
        replace(
            evidence([call()], [peer(1, 1234)]),
            rank_sets={KEY: RankSetSummary(key=KEY, role="dp", members=(0, 1, 2, 3), issued=1234)},
        ),
        f"all 2 known ones of 4 members have arrived at {CALL}, which does not end; "
        "all known ranks are alive",
    ),
    "point to point": (
        evidence([call(0, op="recv")], [peer(1, 5)]),
        "rank 0 waits in recv of group dp (64 MiB, backward), whose other end is not known; "
        "all known ranks are alive",
    ),
    "others wait for this rank": (
        evidence([call(in_flight=False)], [peer(1, 1235), peer(2, 1235), peer(3, 1234)]),
        "rank 0 has not arrived at collective number 1235 of group dp, where ranks "
        "1, 2 wait; it is in backward and in no recorded collective, at load (data.py:12)",
    ),
    "no peer waits": (
        evidence([call(in_flight=False)], [peer(1, 1234)]),
        "rank 0 makes no progress: it is in backward and in no recorded collective, "
        "at load (data.py:12)",
    ),
    "a late rank at a call that no wrapper sees": (
        unrecorded(1, [(1, 77, 1), (2, 77, 0)]),
        "rank 2 has not arrived at an unrecorded collective of group dp (such as one of DDP); it "
        "is alive; rank 0 is in backward, at load (data.py:12)",
    ),
    "others wait for this rank at such a call": (
        unrecorded(0, [(1, 77, 1), (2, 77, 0)]),
        "rank 0 has not arrived at an unrecorded collective of group dp (such as one "
        "of DDP), where rank 1 waits; it is in backward and in no recorded collective, at load "
        "(data.py:12)",
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


@pytest.mark.parametrize(
    ("age_seconds", "interval_seconds", "said"),
    [
        (3.0, 0.0, "it is alive"),
        (3.6, 0.0, "it has sent no heartbeat for at least 4 s"),
        (13.0, 10.0, "it is alive"),
        (13.6, 10.0, "it has sent no heartbeat for at least 14 s"),
    ],
)
def test_a_rank_is_silent_if_its_heartbeat_is_three_seconds_overdue(
    age_seconds: float, interval_seconds: float, said: str
) -> None:
    beat = replace(peer(1, 1233, age_seconds=age_seconds), interval_seconds=interval_seconds)
    found = evidence([call()], [beat])

    assert summary(found) == f"rank 1 has not arrived at {CALL}; {said}"


def lines_of(text: str, first: str) -> list[str]:
    """Return the lines from one that starts so up to the next empty line."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(first))
    return lines[start : lines.index("", start)]


def test_a_report_lists_who_waits_for_whom() -> None:
    rank_sets = {
        KEY: RankSetSummary(key=KEY, role="dp", members=(0, 1, 2, 3), issued=1234),
        "other": RankSetSummary(key="other", role="tp", members=(0, 4), issued=6),
    }
    others = [peer(1, 1233), peer(2, 1235), peer(3, 1236), replace(peer(4, 0), issued={"other": 7})]
    found = replace(evidence([call()], others), rank_sets=rank_sets)

    assert lines_of(report_text(found), "Missing ranks:") == [
        "Missing ranks:",
        f"  {CALL}: rank 0 waits for rank 1",
        "  collective number 1235 of group dp: ranks 2, 3 wait for rank 0",
        "  collective number 7 of group tp: rank 4 waits for rank 0",
    ]


def test_a_report_without_missing_ranks_does_not_mention_any() -> None:
    assert "Missing ranks" not in report_text(evidence([call()], [peer(1, 1234)]))


def test_a_report_lists_the_64_ranks_that_are_silent_for_longest_and_this_one() -> None:
    others = [peer(rank, 1234, age_seconds=float(rank)) for rank in range(1, 68)]

    lines = lines_of(report_text(evidence([call()], others)), "Other ranks")

    assert lines[0] == ("Other ranks (seconds without a heartbeat; number of the last collective):")
    assert [int(line.split()[1]) for line in lines[1:65]] == list(range(67, 3, -1))
    assert lines[65:] == [
        "  and 3 more, silent for less long",
        f"  this rank: dp ({KEY}) 1234",
    ]
    lines = lines_of(report_text(evidence([call()], others[:64])), "Other ranks")
    assert len(lines) == 66


def test_a_report_lists_a_rank_with_one_heartbeat_and_one_that_shares_no_group() -> None:
    alone = replace(peer(1, 0, age_seconds=None), issued={"of another group": 5})

    lines = lines_of(report_text(evidence([], [alone])), "Other ranks")

    assert lines[1] == (
        "  rank 1 on node-1: one heartbeat only; no collective in a group of this rank"
    )


def test_a_report_says_if_nothing_is_known_of_the_others_and_if_there_are_no_calls() -> None:
    text = report_text(evidence([], None))

    assert lines_of(text, "Other ranks") == [
        "Other ranks: nothing is known; they are not compared, or the c10d store does not respond."
    ]
    assert lines_of(text, "Last collectives")[1:] == ["  none"]


def test_a_call_is_listed_with_its_state_and_seconds() -> None:
    calls = [
        call(4, in_flight=False, seconds=0.25),
        call(0, op="send", in_flight=False, seconds=None, payload_bytes=100),
        call(5, is_own=True, seconds=1.5, payload_bytes=8),
    ]

    assert lines_of(report_text(evidence(calls, None)), "Last collectives")[1:] == [
        f"  dp ({KEY}) 4 all_reduce 64 MiB float32 backward: done 0.250000 s",
        f"  dp ({KEY}) p2p send 100 bytes float32 backward: done",
        f"  dp ({KEY}) 5 all_reduce 8 bytes float32 backward: in flight 1.500000 s "
        "(zerowatch's own)",
    ]


def test_of_very_many_calls_in_flight_the_first_32_and_the_last_32_are_listed() -> None:
    calls = [call(number) for number in range(1, 101)]

    lines = lines_of(report_text(evidence(calls, None)), "Last collectives")[1:]

    assert [int(line.split()[2]) for line in lines] == [*range(1, 33), *range(69, 101)]


def test_the_threads_are_named_with_the_numbers_in_their_stacks() -> None:
    this = threading.current_thread()

    lines = lines_of(report_text(evidence([], None)), "Python stacks")

    assert f"  0x{this.ident:016x} {this.name}" in lines


def test_the_stacks_come_after_the_text_and_a_dump_that_is_no_json_is_a_pickle(
    tmp_path: Path,
) -> None:
    found = evidence([call()], [peer(1, 1233)])

    path = write_report(tmp_path, found)
    assert path is not None
    for _ in range(2):  # the second one is not written over the first
        write_flight_recorder_dump(path, b"\x80pickled")

    text = path.read_text()
    assert text.index("Python stacks") < text.index("most recent call first")
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "hang-rank-0-1.flight.pickle",
        "hang-rank-0-1.txt",
    ]
