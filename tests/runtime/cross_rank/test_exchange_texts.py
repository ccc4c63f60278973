"""Reports and verdicts as they travel: what is packed is read again, and rubbish is refused."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from zerowatch.runtime.cross_rank import call_report, compare_result
from zerowatch.runtime.cross_rank.call_report import (
    NOTHING_NEW,
    CallReport,
    RankReport,
    SequenceHash,
    StepTimes,
)
from zerowatch.runtime.cross_rank.compare_result import NO_RESULT, CompareResult
from zerowatch.runtime.cross_rank.divergence import Divergence
from zerowatch.runtime.cross_rank.stragglers import StepTimeReference, Straggler

PACE = StepTimes(
    steps=7, step_seconds=0.25, busy=(0.1, 0.2, 0.3, 0.4), deviation=(0.0, 0.1, 0.0, 0.2)
)
DIVERGENCE = Divergence(sequence=5, issued={0: "barrier", 17: "reduce"}, named=(17,))


def some_section(chance: random.Random) -> CallReport:
    timed, issued = chance.randrange(40), chance.randrange(40)
    durations = [chance.choice((chance.random(), float("nan"))) for _ in range(timed)]
    return CallReport(
        first_timed=chance.randrange(10**9),
        durations=np.array(durations, np.float32),
        first_issued=chance.randrange(10**9),
        signatures=np.array([chance.getrandbits(32) for _ in range(issued)], np.uint32),
        history=chance.choice(
            (None, SequenceHash(since=chance.randrange(100), crc=chance.getrandbits(32)))
        ),
    )


def same(one: CallReport, other: CallReport) -> bool:
    return (
        (one.first_timed, one.first_issued, one.history)
        == (other.first_timed, other.first_issued, other.history)
        and np.array_equal(one.durations, other.durations, equal_nan=True)
        and np.array_equal(one.signatures, other.signatures)
    )


def test_a_report_reads_as_it_was_written() -> None:
    chance = random.Random(3)
    for _ in range(100):
        told = RankReport(
            sections={f"group {n}": some_section(chance) for n in range(chance.randrange(4))},
            names={chance.getrandbits(32): "all_reduce of 4 bytes (float32)"},
            paces={chance.randrange(1000): PACE},
            divergences=chance.choice(({}, {"group 0": DIVERGENCE})),
        )

        read = call_report.decode(call_report.encode(told))

        assert read.sections.keys() == told.sections.keys()
        assert all(same(told.sections[key], read.sections[key]) for key in told.sections)
        assert (read.names, read.paces, read.divergences) == (
            told.names,
            told.paces,
            told.divergences,
        )


def test_a_report_of_nothing_new_is_short() -> None:
    text = call_report.encode(RankReport(sections={"a group": NOTHING_NEW}))

    assert len(text) < 100
    assert same(call_report.decode(text).sections["a group"], NOTHING_NEW)


def test_a_verdict_reads_as_it_was_written() -> None:
    told = CompareResult(
        first=12,
        least=np.array([0.5, np.nan, 0.25], np.float32),
        reference=StepTimeReference(step_seconds=0.5, busy=(0.1, 0.2, 0.0, 0.4)),
        stragglers=(Straggler(rank=3, phase="forward", seconds=0.05, score=0.2),),
        divergence=DIVERGENCE,
    )

    read = compare_result.decode(compare_result.encode(told))

    assert np.array_equal(read.least, told.least, equal_nan=True)
    assert (read.first, read.reference, read.stragglers, read.divergence) == (
        12,
        told.reference,
        told.stragglers,
        DIVERGENCE,
    )


def test_a_verdict_of_nothing_reads_as_nothing() -> None:
    read = compare_result.decode(compare_result.encode(NO_RESULT))

    assert (len(read.least), read.reference, read.stragglers, read.divergence) == (
        0,
        None,
        (),
        None,
    )


@pytest.mark.parametrize("unpack", [call_report.decode, compare_result.decode])
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff",
        zlib.compress(b""),
        zlib.compress(b"no json"),
        zlib.compress(b"[]\n"),
        zlib.compress(b"{}\n"),
        zlib.compress(
            b'{"sections":[["g",1,5,1,0,null]],"names":[],"paces":[],"divergences":[]}\n'
        ),
        zlib.compress(
            b'{"sections":[["g","x",0,1,0,null]],"names":[],"paces":[],"divergences":[]}'
        ),
        zlib.compress(b'{"sections":[],"names":[],"paces":[],"divergences":[["g",{"issued":[]}]]}'),
        zlib.compress(b'{"sections":[["g"]],"names":[],"paces":[],"divergences":[]}\n'),
        zlib.compress(b'{"first":null,"reference":null,"stragglers":[],"divergence":null}\n'),
        zlib.compress(b'{"first":1,"reference":null,"stragglers":[],"divergence":null}\nabc'),
        zlib.compress(b'{"first":1,"reference":7,"stragglers":[],"divergence":null}\n'),
        zlib.compress(b'{"first":1,"reference":null,"stragglers":[{}],"divergence":null}\n'),
    ],
)
def test_what_is_none_is_refused(unpack, text: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(text)


def test_a_damaged_text_is_refused_or_still_one() -> None:
    chance = random.Random(5)
    report = RankReport(sections={"g": some_section(chance)}, paces={1: PACE})
    good = zlib.decompress(call_report.encode(report))
    refused = 0
    for _ in range(300):
        at = chance.randrange(len(good))
        damaged = good[:at] + bytes([chance.randrange(256)]) + good[at + chance.randrange(3) :]
        try:
            call_report.decode(zlib.compress(damaged))
        except ValueError:
            refused += 1

    assert refused > 100


def test_calls_that_do_not_belong_together_have_different_signatures() -> None:
    told = {
        call_report.signature("all_reduce", "float32", 4),
        call_report.signature("all_reduce", "float32", 8),
        call_report.signature("all_reduce", "bfloat16", 4),
        call_report.signature("all_gather", "float32", 4),
    }

    assert len(told) == 4


def test_a_history_is_the_same_however_it_was_cut() -> None:
    signatures = np.arange(10, dtype=np.uint32)

    at_once = SequenceHash(since=1, crc=0).extended(signatures)
    in_pieces = SequenceHash(since=1, crc=0).extended(signatures[:3]).extended(signatures[3:])

    assert at_once == in_pieces
    assert at_once != SequenceHash(since=1, crc=0).extended(signatures[::-1].copy())
