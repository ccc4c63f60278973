"""Order in which memory savings are applied."""

from __future__ import annotations

from fakes.escalation_step import FakeEscalationStep

from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.oom_recovery.escalation import EscalationPolicy


def test_steps_are_applied_in_order_and_skipped_if_they_have_no_effect() -> None:
    checkpointing, buckets, rebuild = (
        EngineChange.ACTIVATION_CHECKPOINTING,
        EngineChange.MINIMAL_BUCKETS,
        EngineChange.REBUILD,
    )
    called = []

    def step(change: EngineChange, has_effect: bool) -> FakeEscalationStep:
        return FakeEscalationStep(change, lambda: called.append(change) or has_effect)

    policy = EscalationPolicy(
        [step(rebuild, True), step(checkpointing, True), step(buckets, False)]
    )

    applied = [policy.apply_next(lambda value: value) for _ in range(3)]

    assert applied == [checkpointing, rebuild, None]
    assert called == [checkpointing, buckets, rebuild]
    assert policy.applied == [checkpointing, rebuild]


def test_a_step_with_an_effect_on_another_rank_counts_as_applied() -> None:
    policy = EscalationPolicy([FakeEscalationStep(EngineChange.MINIMAL_BUCKETS, lambda: False)])

    assert policy.apply_next(lambda _: 1) is EngineChange.MINIMAL_BUCKETS
