"""A rank's step times: medians, without blocking, eval, checkpoints and warm-up."""

from __future__ import annotations

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog.labels import COMPARED_PHASES, PHASES
from zerowatch.runtime.cross_rank.stragglers import (
    MAX_STEPS,
    MIN_STEPS,
    WARM_UP_STEPS,
    StepTimeSampler,
    compared_rank_set,
)

MS = 1_000_000


def by_phase(**milliseconds: float) -> list[int]:
    return [round(milliseconds.get(phase, 0) * MS) for phase in PHASES]


@pytest.fixture
def sampler() -> StepTimeSampler:
    made = StepTimeSampler()
    for _ in range(WARM_UP_STEPS):
        made.add(by_phase(forward=9000), by_phase())
    return made


def test_the_warm_up_steps_are_skipped(sampler: StepTimeSampler) -> None:
    assert sampler.drain() is None


def test_step_times_are_medians_of_the_steps(sampler: StepTimeSampler) -> None:
    for forward in (10, 12, 500) * 3:
        sampler.add(by_phase(forward=forward, other=1), by_phase())

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.num_steps == 9
    assert step_times.step_seconds == pytest.approx(0.013)
    assert dict(zip(COMPARED_PHASES, step_times.busy_seconds, strict=True))[
        "forward"
    ] == pytest.approx(0.012)
    assert step_times.deviation_seconds[COMPARED_PHASES.index("forward")] == pytest.approx(0.002)


def test_time_blocked_by_collectives_is_not_busy(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(backward=10, optimizer=2), by_phase(backward=7, optimizer=3))

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.busy_seconds == pytest.approx((0.0, 0.0, 0.003, 0.0))
    assert step_times.step_seconds == pytest.approx(0.012)


def test_evaluation_and_checkpoints_are_no_part_of_a_step(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(forward=5, eval=1000, checkpoint=500), by_phase())

    step_times = sampler.drain()

    assert step_times is not None and step_times.step_seconds == pytest.approx(0.005)


def test_steps_are_drained_once(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(forward=5), by_phase())
    sampler.drain()

    assert sampler.drain() is None


def test_long_steps_are_kept_until_they_are_enough_for_a_median(sampler: StepTimeSampler) -> None:
    drained = []
    for number in range(2 * MIN_STEPS):
        sampler.add(by_phase(forward=number), by_phase())
        drained.append(sampler.drain())

    assert [index for index, step_times in enumerate(drained) if step_times] == [7, 15]
    assert drained[15] is not None and drained[15].num_steps == MIN_STEPS
    assert drained[15].step_seconds == pytest.approx(0.0115)


def test_of_very_many_steps_the_last_are_kept(sampler: StepTimeSampler) -> None:
    for milliseconds in range(2 * MAX_STEPS):
        sampler.add(by_phase(forward=milliseconds), by_phase())

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.num_steps == MAX_STEPS
    assert step_times.step_seconds == pytest.approx((1.5 * MAX_STEPS - 0.5) / 1000)


@pytest.mark.parametrize(
    ("roles", "compared"),
    [
        (("dp", "world"), "dp"),
        (("world", "tp"), "world"),
        (("world", "pp", "tp"), "tp"),
        (("world", "pp", "dp"), "dp"),
        (("world", "pp"), None),
        (("other",), None),
    ],
)
def test_the_step_times_of_pipeline_stages_are_not_compared(
    roles: tuple[str, ...], compared: str | None
) -> None:
    rank_sets = [FakeGroup((0, 1), role=role).rank_set for role in roles]

    found = compared_rank_set(rank_sets)

    assert (found and found.role) == compared
