"""Tests of the order in which memory savings are applied."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.memory_saving import FakeMemorySaving

from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.oom_recovery.escalation import EscalationPolicy, rebuild_changes
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import MicroBatchPlanner
from zerowatch.runtime.trainer.window.window_agreement import LocalBatches


def test_memory_savings_are_applied_in_order_and_skipped_if_they_have_no_effect() -> None:
    activation_checkpointing, buckets, rebuild = (
        EngineChange.ACTIVATION_CHECKPOINTING,
        EngineChange.MINIMAL_BUCKETS,
        EngineChange.REBUILD,
    )
    called = []

    def saving(change: EngineChange, has_effect: bool) -> FakeMemorySaving:
        return FakeMemorySaving(change, lambda: called.append(change) or has_effect)

    policy = EscalationPolicy(
        [saving(rebuild, True), saving(activation_checkpointing, True), saving(buckets, False)]
    )

    applied = [policy.apply_next(lambda value: value) for _ in range(3)]

    assert applied == [activation_checkpointing, rebuild, None]
    assert called == [activation_checkpointing, buckets, rebuild]
    assert policy.applied == [activation_checkpointing, rebuild]


def test_a_step_with_an_effect_on_another_rank_counts_as_applied() -> None:
    policy = EscalationPolicy([FakeMemorySaving(EngineChange.MINIMAL_BUCKETS, lambda: False)])

    assert policy.apply_next(lambda _: 1) is EngineChange.MINIMAL_BUCKETS


STAGE_2: dict[str, Any] = {"zero_optimization": {"stage": 2}}
STAGE_3: dict[str, Any] = {"zero_optimization": {"stage": 3}}
TO_HOST = {"device": "cpu", "pin_memory": True}
OFFLOADS: list[dict[str, Any]] = [
    {"zero_optimization": {"offload_optimizer": TO_HOST}},
    {"zero_optimization": {"stage": 3, "offload_param": TO_HOST}},
]


@pytest.mark.parametrize(
    ("config", "world_size", "on_host", "changes"),
    [
        ({}, 2, True, [STAGE_2, STAGE_3]),
        ({}, 2, False, [STAGE_2, STAGE_3, *OFFLOADS]),
        ({}, 1, False, OFFLOADS),
        (STAGE_2, 2, True, [STAGE_3]),
        (STAGE_3, 2, True, []),
    ],
)
def test_rebuilds_go_to_higher_stages_of_several_ranks_and_then_from_the_device_to_the_host(
    config: dict[str, Any], world_size: int, on_host: bool, changes: list[dict[str, Any]]
) -> None:
    assert rebuild_changes(config, world_size, on_host=on_host) == changes


BATCHES = LocalBatches(samples=[12, 12], micro_batch_samples=[8, 8], length=100)


def escalated(planner: MicroBatchPlanner, *savings: FakeMemorySaving, next_size: int) -> str | None:
    return EscalationPolicy(savings).escalate(
        planner, BATCHES, failing_size=8, next_size=next_size, all_max=lambda value: value
    )


def planner_with_a_failure() -> MicroBatchPlanner:
    planner = MicroBatchPlanner()
    planner.on_out_of_memory(BATCHES, 11, 8)
    return planner


def test_smaller_micro_batches_are_tried_before_memory_savings() -> None:
    planner = planner_with_a_failure()
    buckets = FakeMemorySaving(EngineChange.MINIMAL_BUCKETS, lambda: True)

    assert escalated(planner, buckets, next_size=3) == "micro-batches of 3"
    assert planner.limits.bound(100) == 3
    assert planner.limits.failing == {7: 8}  # lengths from 65 to 128


def test_after_a_memory_saving_the_sizes_that_failed_may_be_tried_again() -> None:
    planner = planner_with_a_failure()
    buckets = FakeMemorySaving(EngineChange.MINIMAL_BUCKETS, lambda: True)

    assert escalated(planner, buckets, next_size=0) == "smaller buckets and less prefetching"
    assert planner.limits.bound(100) == 8
    assert planner.limits.failing == {}


def test_without_a_memory_saving_nothing_is_changed() -> None:
    planner = planner_with_a_failure()

    assert escalated(planner, next_size=0) is None
    assert planner.limits.failing == {7: 11}
