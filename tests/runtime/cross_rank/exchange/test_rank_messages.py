"""Tests of the encoding of reports and results: they decode, and other text is rejected."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from zerowatch.runtime.cross_rank.divergence import Divergence
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    EMPTY_CALL_REPORT,
    EMPTY_RESULT,
    CallReport,
    CompareResult,
    RankReport,
    SequenceHash,
    decode_report,
    decode_result,
    encode_report,
    encode_result,
    signature,
)
from zerowatch.runtime.cross_rank.rank_figures import NUM_FIGURES, Figures
from zerowatch.runtime.cross_rank.stragglers import StepTimeReference, StepTimes, Straggler

STEP_TIMES = StepTimes(
    num_steps=7,
    step_seconds=0.25,
    busy_seconds=(0.1, 0.2, 0.3, 0.4),
    deviation_seconds=(0.0, 0.1, 0.0, 0.2),
)
DIVERGENCE = Divergence(sequence=5, issued={0: "barrier", 17: "reduce"}, diverged=(17,))


def some_calls(chance: random.Random) -> CallReport:
    timed, issued = chance.randrange(40), chance.randrange(40)
    durations = [chance.choice((chance.random(), float("nan"))) for _ in range(timed)]
    return CallReport(
        first_timed=chance.randrange(10**9),
        durations=np.array(durations, np.float32),
        first_issued=chance.randrange(10**9),
        signatures=np.array([chance.getrandbits(32) for _ in range(issued)], np.uint32),
        prefix_hash=chance.choice(
            (None, SequenceHash(since=chance.randrange(100), crc=chance.getrandbits(32)))
        ),
    )


def some_figures(chance: random.Random) -> Figures:
    values = [chance.choice((chance.random(), float("nan"))) for _ in range(NUM_FIGURES)]
    return np.array(values, np.float32)


def same(one: CallReport, other: CallReport) -> bool:
    return (
        (one.first_timed, one.first_issued, one.prefix_hash)
        == (other.first_timed, other.first_issued, other.prefix_hash)
        and np.array_equal(one.durations, other.durations, equal_nan=True)
        and np.array_equal(one.signatures, other.signatures)
    )


def test_a_report_decodes_as_it_was_encoded(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        original = RankReport(
            calls={f"group {n}": some_calls(chance) for n in range(chance.randrange(4))},
            names={chance.getrandbits(32): "all_reduce of 4 bytes (float32)"},
            step_times={chance.randrange(1000): STEP_TIMES},
            divergences=chance.choice(({}, {"group 0": DIVERGENCE})),
            figures={rank: some_figures(chance) for rank in range(chance.randrange(3))},
        )

        decoded = decode_report(encode_report(original))

        assert decoded.calls.keys() == original.calls.keys()
        assert all(same(original.calls[key], decoded.calls[key]) for key in original.calls)
        assert decoded.figures.keys() == original.figures.keys()
        for rank, expected in original.figures.items():
            assert np.array_equal(decoded.figures[rank], expected, equal_nan=True)
        assert (decoded.names, decoded.step_times, decoded.divergences) == (
            original.names,
            original.step_times,
            original.divergences,
        )


def test_a_report_of_nothing_new_is_short() -> None:
    text = encode_report(RankReport(calls={"a group": EMPTY_CALL_REPORT}))

    assert len(text) < 100
    assert same(decode_report(text).calls["a group"], EMPTY_CALL_REPORT)


def test_the_figures_of_a_block_of_ranks_take_fifty_bytes_each(seed: int) -> None:
    chance = np.random.default_rng(seed)
    figures = {rank: chance.random(NUM_FIGURES, np.float32) for rank in range(64)}
    empty = len(encode_report(RankReport(calls={})))

    assert len(encode_report(RankReport(calls={}, figures=figures))) - empty < 64 * 54


def test_figures_of_another_version_are_ignored_and_the_rest_is_read() -> None:
    report = RankReport(calls={"g": EMPTY_CALL_REPORT}, figures={1: np.zeros(3, np.float32)})
    with_three = zlib.decompress(encode_report(report)).replace(
        f'"figures":[{NUM_FIGURES},'.encode(), b'"figures":[3,'
    )

    decoded = decode_report(zlib.compress(with_three))

    assert decoded.figures == {}
    assert decoded.calls.keys() == {"g"}


def test_a_report_without_figures_is_that_of_the_version_before() -> None:
    report = RankReport(calls={"g": EMPTY_CALL_REPORT})

    assert b"figures" not in zlib.decompress(encode_report(report))


def test_a_result_decodes_as_it_was_encoded() -> None:
    original = CompareResult(
        first_call=12,
        min_durations=np.array([0.5, np.nan, 0.25], np.float32),
        reference=StepTimeReference(step_seconds=0.5, busy_seconds=(0.1, 0.2, 0.0, 0.4)),
        stragglers=(Straggler(rank=3, phase="forward", seconds=0.05, score=0.2),),
        divergence=DIVERGENCE,
    )

    decoded = decode_result(encode_result(original))

    assert np.array_equal(decoded.min_durations, original.min_durations, equal_nan=True)
    assert (decoded.first_call, decoded.reference, decoded.stragglers, decoded.divergence) == (
        12,
        original.reference,
        original.stragglers,
        DIVERGENCE,
    )


def test_an_empty_result_decodes_as_empty() -> None:
    decoded = decode_result(encode_result(EMPTY_RESULT))

    assert (
        len(decoded.min_durations),
        decoded.reference,
        decoded.stragglers,
        decoded.divergence,
    ) == (
        0,
        None,
        (),
        None,
    )


@pytest.mark.parametrize("unpack", [decode_report, decode_result])
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
        zlib.compress(
            b'{"sections":[],"names":[],"paces":[],"divergences":[],"figures":[%d,[1]]}\nabcd'
            % NUM_FIGURES
        ),
        zlib.compress(b'{"sections":[],"names":[],"paces":[],"divergences":[],"figures":[]}\n'),
        zlib.compress(b'{"first":null,"reference":null,"stragglers":[],"divergence":null}\n'),
        zlib.compress(b'{"first":1,"reference":null,"stragglers":[],"divergence":null}\nabc'),
        zlib.compress(b'{"first":1,"reference":7,"stragglers":[],"divergence":null}\n'),
        zlib.compress(b'{"first":1,"reference":null,"stragglers":[{}],"divergence":null}\n'),
    ],
)
def test_other_text_is_rejected(unpack, text: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(text)


def test_a_damaged_message_is_rejected_or_still_decodes(seed: int) -> None:
    chance = random.Random(seed)
    report = RankReport(calls={"g": some_calls(chance)}, step_times={1: STEP_TIMES})
    good = zlib.decompress(encode_report(report))
    refused = 0
    for _ in range(300):
        at = chance.randrange(len(good))
        damaged = good[:at] + bytes([chance.randrange(256)]) + good[at + chance.randrange(3) :]
        try:
            decode_report(zlib.compress(damaged))
        except ValueError:
            refused += 1

    assert refused > 100


def test_calls_that_cannot_be_of_one_collective_have_different_signatures() -> None:
    original = {
        signature("all_reduce", "float32", 4),
        signature("all_reduce", "float32", 8),
        signature("all_reduce", "bfloat16", 4),
        signature("all_gather", "float32", 4),
    }

    assert len(original) == 4


def test_a_hash_is_the_same_however_the_calls_were_split() -> None:
    signatures = np.arange(10, dtype=np.uint32)

    at_once = SequenceHash(since=1, crc=0).extended(signatures)
    in_pieces = SequenceHash(since=1, crc=0).extended(signatures[:3]).extended(signatures[3:])

    assert at_once == in_pieces
    assert at_once != SequenceHash(since=1, crc=0).extended(signatures[::-1].copy())
