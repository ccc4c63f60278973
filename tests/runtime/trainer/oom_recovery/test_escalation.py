"""Tests of the order in which memory savings are applied."""

from __future__ import annotations

from fakes.memory_saving import FakeMemorySaving

from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.oom_recovery.escalation import EscalationPolicy


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
