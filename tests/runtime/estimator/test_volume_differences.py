"""Tests of `volume_check.py` on one rank: which steps are compared, and which are logged."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.steps import collective, step

from zerowatch.errors import DsConfigError
from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import GenerationTotals, StepRecord
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.estimator import volume_check as module
from zerowatch.runtime.estimator.step_estimate import EstimatedCollective, StepEstimate
from zerowatch.runtime.estimator.volume_check import (
    STEPS_AFTER_CHANGE,
    STEPS_TO_REPORT,
    WARM_UP_STEPS,
    WireVolumeCheck,
)

MEASURED, PREDICTED, REFERENCE, RATIO = "measured", "predicted", "reference", "ratio"


class Engine(SimpleNamespace):
    """Can be referenced weakly, as patches can."""


def estimate(calls: int, *, reference_wire_bytes: float = 1000.0) -> StepEstimate:
    """As many calls of an all_reduce as given, each of 1000 bytes, 500 on the wire."""
    estimated = EstimatedCollective(
        op="all_reduce",
        group="dp",
        group_size=2,
        dtype="fp32",
        purpose="gradients",
        calls=calls,
        payload_bytes=1000 * calls,
        wire_bytes=500.0 * calls,
    )
    memory: Any = None
    return StepEstimate(
        stage=0,
        collectives=(estimated,),
        reference_wire_bytes=reference_wire_bytes,
        memory=memory,
        exact=True,
        assumptions=(),
        remarks=(),
    )


class Rank:
    """A rank that has passed the warm-up, and whose engine has an estimate of 4 calls per step."""

    def __init__(self) -> None:
        self.estimated = estimate(4)
        self.num_estimates = 0
        self.recorder = Recorder()
        self.engine = Engine(global_steps=0, config={}, optimizer=Engine())
        self.check = WireVolumeCheck(self.engine, self.recorder, FailOpen(), logs_differences=True)
        self.number = 0

    def of_engine(self, engine: object, micro_batches: int) -> StepEstimate:
        assert engine is self.engine
        self.num_estimates += 1
        return self.estimated

    def run(self, num_steps: int, calls: int = 4, **changes: Any) -> None:
        for _ in range(num_steps):
            self.number += 1
            self.engine.global_steps = self.number
            self.check.add(self.record(calls, **changes))

    def record(self, calls: int, **changes: Any) -> StepRecord:
        plain = step(self.number, all_reduce=collective(calls=calls, seconds=None))
        return replace(plain, **changes)

    def values(self) -> dict[str, float]:
        values = self.recorder.snapshot().values
        wire = {key[0]: value for key, value in values[communication.COMM_STEP_WIRE_BYTES].items()}
        return {**wire, RATIO: values[communication.COMM_VOLUME_RATIO][()]}


class AtOnce:
    """A thread that runs as it starts."""

    def __init__(self, target: Any, args: Any, **_: Any) -> None:
        self.start = lambda: target(*args)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Rank:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module.threading, "Thread", AtOnce)
    monkeypatch.setattr(module, "estimate_data_parallel", lambda *given: made.of_engine(*given))
    made = Rank()
    return made


def test_of_the_steps_of_a_second_each_is_compared_and_the_last_is_published(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.run(WARM_UP_STEPS)
    numbers = range(rank.number + 1, rank.number + 5)
    records = [replace(rank.record(calls=5), step=number) for number in numbers]

    rank.check.add(*records[:3], replace(rank.record(calls=4), step=numbers[3]))

    assert rank.values()["measured"] == rank.values()["predicted"]
    assert caplog.text.count("collectives differ from the estimate") == 1


def test_measured_and_predicted_bytes_and_their_ratio_to_the_reference_are_published(
    rank: Rank,
) -> None:
    rank.run(WARM_UP_STEPS + 1, calls=5)

    assert rank.values() == {MEASURED: 2500, PREDICTED: 2000, REFERENCE: 1000, RATIO: 2.5}
    assert rank.check.ratio() == 2.5


def test_steps_of_the_warm_up_are_not_compared(rank: Rank) -> None:
    rank.run(WARM_UP_STEPS)

    assert rank.num_estimates == 0
    assert rank.check.ratio() is None


def test_where_nothing_has_to_be_sent_there_is_no_ratio(rank: Rank) -> None:
    rank.estimated = estimate(0, reference_wire_bytes=0.0)

    rank.run(WARM_UP_STEPS + 1)

    assert rank.check.ratio() is None
    assert communication.COMM_VOLUME_RATIO not in rank.recorder.snapshot().values


def test_a_lasting_difference_is_logged_once_after_the_third_step(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.run(WARM_UP_STEPS)

    rank.run(STEPS_TO_REPORT - 1, calls=5)
    before = len(caplog.records)
    rank.run(3, calls=5)

    (line,) = (record.message for record in caplog.records)
    assert before == 0
    assert f"step {WARM_UP_STEPS + STEPS_TO_REPORT}: " in line
    assert "all_reduce 5 calls of 5000 bytes, estimated 4 calls of 4000 bytes" in line


def test_an_operation_that_is_missing_is_logged_as_none(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.run(WARM_UP_STEPS + STEPS_TO_REPORT, collectives={})

    assert "all_reduce none, estimated 4 calls of 4000 bytes" in caplog.text


def test_only_the_rank_that_logs_differences_logs_them(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.check = WireVolumeCheck(rank.engine, rank.recorder, FailOpen(), logs_differences=False)

    rank.run(WARM_UP_STEPS + STEPS_TO_REPORT, calls=5)

    assert rank.values()[MEASURED] == 2500
    assert caplog.records == []


def test_differences_that_are_not_consecutive_are_not_logged(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.run(WARM_UP_STEPS)

    for _ in range(3):
        rank.run(STEPS_TO_REPORT - 1, calls=5)
        rank.run(1)

    assert caplog.records == []


@pytest.mark.parametrize(
    ("extra", "level"), [(2, logging.INFO), (3, logging.WARNING), (-3, logging.WARNING)]
)
def test_a_difference_of_at_most_one_percent_of_the_bytes_is_no_warning(
    rank: Rank, caplog: pytest.LogCaptureFixture, extra: int, level: int
) -> None:
    rank.estimated = estimate(200)

    rank.run(WARM_UP_STEPS + STEPS_TO_REPORT, calls=200 + extra)

    assert [record.levelno for record in caplog.records] == [level]


def test_steps_with_collectives_besides_training_are_not_compared(rank: Rank) -> None:
    silent = GenerationTotals(
        calls=1,
        sequences=1,
        tokens=1,
        seconds=0.1,
        collectives=0,
        gathers=0,
        gathered_bytes=0,
        peak_bytes={},
    )
    generated = {"forward": 0.5, "generate": 0.5}
    rank.run(WARM_UP_STEPS)

    rank.run(1, phase_seconds={"forward": 0.5, "eval": 0.5})
    rank.run(1, phase_seconds=generated)
    rank.run(1, phase_seconds=generated, generation=replace(silent, collectives=1))
    ratio_before = rank.check.ratio()
    rank.run(1, phase_seconds=generated, generation=silent)

    assert ratio_before is None
    assert rank.check.ratio() == 2.0


@pytest.mark.parametrize("change", ["ds config", "patched method"])
def test_after_a_change_steps_are_compared_with_a_new_estimate_after_a_while(
    rank: Rank, change: str
) -> None:
    rank.run(WARM_UP_STEPS + 2)
    rank.estimated = estimate(8)
    if change == "ds config":
        rank.engine.config = {"changed": True}
    else:
        rank.engine.allreduce_gradients = Engine()

    rank.run(STEPS_AFTER_CHANGE + 1)
    before = rank.values()[PREDICTED], rank.num_estimates
    rank.run(1)

    assert before == (2000, 1)
    assert (rank.values()[PREDICTED], rank.num_estimates) == (4000, 2)


def test_a_difference_of_a_patched_engine_is_not_logged(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.engine.optimizer.allreduce_bucket = Engine()

    rank.run(WARM_UP_STEPS + STEPS_TO_REPORT, calls=1)

    assert caplog.records == []
    assert rank.values()[MEASURED] == 500


def test_another_engine_is_compared_after_its_own_warm_up(rank: Rank) -> None:
    rank.run(WARM_UP_STEPS + 1)
    rank.engine = Engine(global_steps=0, config={}, optimizer=Engine())
    rank.check.rebind_engine(rank.engine)

    rank.run(WARM_UP_STEPS)
    before = rank.num_estimates
    rank.run(2)

    assert (before, rank.num_estimates) == (1, 2)


def test_an_engine_is_estimated_if_it_is_data_parallel_and_its_ds_config_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimate_of_engine(engine: object, micro_batches: int) -> StepEstimate:
        if engine == "newer":
            raise DsConfigError("an unknown value")
        return estimate(micro_batches)

    monkeypatch.setattr(module, "is_data_parallel", lambda engine: engine != "pipeline")
    monkeypatch.setattr(module, "estimate_of_engine", estimate_of_engine)

    found = [
        module.estimate_data_parallel(engine, 2) for engine in ("plain", "newer", "pipeline", None)
    ]

    assert found == [estimate(2), None, None, None]
