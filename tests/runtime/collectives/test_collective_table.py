"""Tests of the table of collectives: bytes on the wire, and which calls the ranks vote about."""

from __future__ import annotations

import pytest

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.collective_table import (
    OPERATIONS,
    POINT_TO_POINT,
    SYMMETRIC,
    Guard,
    guarded_methods,
    wire_factor,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("op", "backend", "factor"),
    [
        ("all_reduce", "nccl", 2 * 4 / 5),
        ("all_gather", "nccl", 4 / 5),
        ("reduce_scatter", "nccl", 4 / 5),
        ("reduce_scatter", "gloo", 2 * 4 / 5),
        ("reduce", "nccl", 4 / 5),
        ("broadcast", "nccl", 4 / 5),
        ("all_to_all", "nccl", 4 / 5),
        ("gather", "nccl", 4 / 25),
        ("scatter", "nccl", 4 / 25),
        ("send", "nccl", 1),
        ("recv", "nccl", 0),
        ("barrier", "nccl", 0),
    ],
)
def test_five_ranks_send_this_much_per_payload_byte(op: str, backend: str, factor: float) -> None:
    assert wire_factor(op, backend, 5) == pytest.approx(factor)


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_rank_sends_nothing_and_two_send_something(op: str) -> None:
    assert wire_factor(op, "gloo", 1) == 0
    assert (wire_factor(op, "gloo", 2) > 0) == (op not in ("recv", "barrier"))


@pytest.mark.parametrize(
    ("payload_bytes", "num_segments"),
    [
        (0, 6),  # at least two of each of three ranks
        (6 * MIB, 6),
        (6 * MIB + 1, 9),
        (9 * MIB, 9),
        (9 * MIB + 1, 12),
    ],
)
def test_gloos_reduce_cuts_its_payload_into_segments_of_one_mib(
    payload_bytes: int, num_segments: int
) -> None:
    expected = 1 - 2 / num_segments + 2 / 9

    assert wire_factor("reduce", "gloo", 3, payload_bytes) == pytest.approx(expected)


def test_each_label_has_one_row() -> None:
    assert sorted(row.label for row in OPERATIONS) == sorted(OPS)


def test_members_of_symmetric_operations_send_and_receive_the_same() -> None:
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"} == SYMMETRIC
    assert {"send", "recv"} == POINT_TO_POINT


def test_ranks_vote_before_these_methods_while_another_engine_is_made() -> None:
    assert sorted(guarded_methods(Guard.REBUILD)) == [
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "monitored_barrier",
        "new_group",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    ]


def test_ranks_vote_before_two_more_in_a_window_that_may_run_out_of_memory() -> None:
    rebuild, oom = set(guarded_methods(Guard.REBUILD)), set(guarded_methods(Guard.OOM))

    assert oom - rebuild == {"inference_all_reduce", "all_gather_base"}
    assert rebuild - oom == {"new_group"}
