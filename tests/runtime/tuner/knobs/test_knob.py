"""The set of all knobs of a job: what is available, offered, applied, and what it needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.undo import Undo
from zerowatch.runtime.tuner.knobs.knob import KnobSet, ReadableKnob, SwitchKnob
from zerowatch.runtime.tuner.policy.knob_registry import SPECS
from zerowatch.runtime.tuner.policy.policy_types import Value

BATCH, BUCKET, GC = "micro_batch_samples", "reduce_bucket_size", "python_gc"


class Knob(ReadableKnob):
    def __init__(
        self,
        name: str,
        value: Value,
        options: Sequence[Value] = (),
        *,
        reason: str | None = None,
        needs: int | None = None,
    ) -> None:
        self.spec = SPECS[name]
        self._value, self._options = value, options
        self._reason, self._needs = reason, needs

    def unsupported_reason(self) -> str | None:
        return self._reason

    def get(self) -> Value:
        return self._value

    def options(self) -> Sequence[Value]:
        return self._options

    def memory_bytes(self, value: Value) -> int | None:
        return None if self._needs is None else self._needs * int(value or 0)


class Switch(SwitchKnob):
    spec = SPECS["balance"]

    def __init__(self) -> None:
        self.is_on = False

    def get(self) -> bool:
        return self.is_on

    def _switch(self, *, on: bool) -> Undo:
        before, self.is_on = self.is_on, on
        return lambda: setattr(self, "is_on", before)


@pytest.fixture
def knobs() -> KnobSet:
    """Two knobs that the job has, and one that it does not have."""
    return KnobSet(
        [
            Knob(BATCH, 4, (2, 4, 8), needs=10),
            Knob(BUCKET, 100, (50, 100), reason="not at stage 0", needs=7),
            Knob(GC, "automatic", ("automatic",)),
        ]
    )


def test_values_are_those_of_the_knobs_that_the_job_has(knobs: KnobSet) -> None:
    assert knobs.values() == {BATCH: 4, GC: "automatic"}


def test_a_knob_with_one_value_is_not_offered_and_the_log_says_so_once(
    knobs: KnobSet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    offered = [knobs.options() for _ in range(2)]

    assert offered == [{BATCH: (2, 4, 8)}] * 2
    assert caplog.messages == [
        "reduce_bucket_size is not tuned: not at stage 0",
        "python_gc is not tuned: it has only one value here",
    ]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({BATCH: 8}, None),
        ({BATCH: 4, BUCKET: 50}, "reduce_bucket_size: not at stage 0"),
        ({BUCKET: 50}, "reduce_bucket_size: not at stage 0"),
        ({BATCH: 8, BUCKET: 50}, None),
        ({"zoo": 1, BATCH: 8, "ant": 2}, "there is no knob ant, zoo"),
    ],
    ids=["available", "unchanged otherwise", "missing alone", "another one changes", "unknown"],
)
def test_a_target_is_refused_if_it_changes_nothing_that_the_job_has(
    target: dict[str, Value], reason: str | None, knobs: KnobSet
) -> None:
    assert knobs.unsupported_reason(target) == reason


@pytest.mark.parametrize(
    ("target", "is_applied"),
    [
        ({}, True),
        ({BATCH: 4}, True),
        ({BATCH: 8}, False),
        ({BATCH: 4, BUCKET: 3}, True),
        ({BATCH: 4, "zoo": 1}, False),
    ],
)
def test_a_target_is_applied_if_the_available_knobs_have_its_values(
    target: dict[str, Value], is_applied: bool, knobs: KnobSet
) -> None:
    assert knobs.all_applied(target) is is_applied


def test_the_need_of_a_target_is_summed_over_the_available_knobs_that_know_it(
    knobs: KnobSet,
) -> None:
    both = KnobSet([Knob(BATCH, 4, needs=10), Knob(BUCKET, 100, needs=3), Knob(GC, "automatic")])

    assert knobs.memory_bytes({BATCH: 8, BUCKET: 5, GC: "x"}) == 80
    assert both.memory_bytes({BATCH: 8, BUCKET: 5}) == 95
    assert both.memory_bytes({BUCKET: 5}) == 15


def test_a_switch_is_on_or_off_and_nothing_else() -> None:
    switch = Switch()

    undo = switch.set(True)
    was_on = switch.is_on
    undo()

    assert (was_on, switch.is_on, switch.options()) == (True, False, (False, True))
    with pytest.raises(ZerowatchError, match="balance is True or False, got 1"):
        switch.set(1)
