"""The table of XID errors: after which the node is drained, and what a log line says."""

from __future__ import annotations

import pytest

from zerowatch.metrics.xid_errors import BY_NUMBER, XIDS, describe

# By NVIDIA's catalog these ask for a reset of the GPU or a restart of the machine, the others not.
DRAIN = {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 149, 155, 156, 158}
CAUSES = {
    "script": {13, 31, 43, 69, 137},
    "driver": {119, 120},
    "memory of the GPU": {48, 63, 64, 92, 94, 95, 140},
    "GPU": {46, 54, 62, 109, 110, 143, 156, 158},
    "link or PCIe": {32, 74, 79, 136, 144, 145, 146, 147, 148, 149, 150, 155},
    "another error": {45, 154},
}


def test_the_errors_are_listed_once_in_the_order_of_their_numbers():
    numbers = [xid.number for xid in XIDS]

    assert numbers == sorted(set(numbers))
    assert list(BY_NUMBER) == numbers


def test_the_node_is_drained_after_errors_that_need_a_reset():
    assert {xid.number for xid in XIDS if xid.drain} == DRAIN


@pytest.mark.parametrize("cause", CAUSES)
def test_errors_have_their_usual_cause(cause):
    assert {xid.number for xid in XIDS if xid.cause == cause} == CAUSES[cause]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (79, "The GPU fell off the PCIe bus; drain the node"),
        (43, "A process stopped after a fault of its own; cause: script"),
        (999, "not in our table; see NVIDIA's Xid catalog"),
    ],
)
def test_a_log_line_says_what_happened_and_what_to_do(number, text):
    assert describe(number) == text
