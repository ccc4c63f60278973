"""The knobs as data, and the numerics that each needs."""

from __future__ import annotations

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from zerowatch.metrics.catalog.tuner import SYMPTOMS
from zerowatch.runtime.tuner.policy.knob_registry import KNOBS, SPECS, required_numerics
from zerowatch.runtime.tuner.policy.policy_types import JobFacts, ModelTraits, Numerics

BITWISE, REASSOCIATION, STATISTICAL, UNRESTRICTED = Numerics
PLAIN = ModelTraits()


def facts(ranks: int = 4, traits: ModelTraits = PLAIN) -> JobFacts:
    return JobFacts(
        world_size=ranks,
        backend="gloo",
        gradient_bytes=4000,
        parameter_bytes=4000,
        traits=traits,
    )


def test_a_knob_is_listed_once():
    assert len(SPECS) == len(KNOBS)


@pytest.mark.parametrize(
    ("knob", "now", "value", "needs"),
    [
        ("micro_batch_samples", 4, 8, True),
        ("micro_batch_samples", 4, 2, False),
        ("zero_stage", 2, 1, True),
        ("zero_stage", 2, 3, False),
        ("activation_checkpointing", True, False, True),
        ("activation_checkpointing", False, True, False),
        ("overlap_comm", False, True, True),
        ("gradient_compression", None, "int8", True),
        ("gradient_compression", "int8", None, False),
        ("gradient_compression", "int8", "bf16", False),
        ("batch_samples", 32, 64, True),
        ("python_gc", "automatic", "between_steps", False),
        ("reduce_scatter", False, True, False),
    ],
)
def test_a_change_needs_memory_if_the_opposite_frees_memory(knob, now, value, needs):
    assert SPECS[knob].needs_memory(now, value) is needs


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
class TestEveryKnob:
    def test_has_triggers_of_existing_symptoms(self, spec):
        assert spec.triggers
        assert set(spec.triggers) <= set(SYMPTOMS)

    def test_has_triggers_within_its_domain(self, spec):
        for trigger in spec.triggers.values():
            if isinstance(trigger, tuple):
                assert isinstance(spec.domain, tuple)
                assert set(trigger) <= set(spec.domain)
            else:
                assert isinstance(spec.domain, str) or spec.domain == (0, 1, 2, 3)

    def test_has_a_description(self, spec):
        assert spec.description

    def test_has_a_key_that_deepspeed_reads(self, spec):
        fields = DeepSpeedZeroConfig.model_fields
        known = {*fields, *(field.alias for field in fields.values())}

        if spec.ds_key and spec.ds_key[0] == "zero_optimization":
            assert spec.ds_key[1] in known

    def test_needs_its_numerics_in_a_plain_job(self, spec):
        assert required_numerics([spec.name], facts()) == spec.numerics


@pytest.mark.parametrize(
    ("knob", "value", "has"),
    [
        ("gradient_compression", None, True),
        ("gradient_compression", "fp16", False),
        ("reduce_bucket_size", 1 << 20, True),
        ("reduce_bucket_size", -1, False),
        ("micro_batch_samples", True, False),
    ],
)
def test_a_knob_has_the_values_of_its_domain(knob, value, has):
    assert SPECS[knob].has(value) is has


@pytest.mark.parametrize(
    ("knob", "job", "numerics"),
    [
        pytest.param("reduce_bucket_size", facts(2), BITWISE, id="two ranks add up in any order"),
        pytest.param("reduce_bucket_size", facts(4), REASSOCIATION, id="four do not"),
        pytest.param("micro_batch_samples", facts(2), REASSOCIATION, id="a mean is cut otherwise"),
        pytest.param(
            "micro_batch_samples",
            facts(traits=ModelTraits(dropout=True)),
            STATISTICAL,
            id="other pieces drop other values",
        ),
        pytest.param(
            "micro_batch_samples",
            facts(traits=ModelTraits(batch_statistics=True)),
            STATISTICAL,
            id="other pieces have other statistics",
        ),
        pytest.param(
            "balance",
            facts(traits=ModelTraits(loss_decomposable=False)),
            STATISTICAL,
            id="other pieces hold other pairs",
        ),
        pytest.param(
            "micro_batch_samples",
            facts(traits=ModelTraits(expert_capacity=True)),
            None,
            id="experts drop other tokens",
        ),
        pytest.param("balance", facts(traits=ModelTraits(expert_capacity=True)), None, id="so too"),
        pytest.param(
            "reduce_bucket_size",
            facts(traits=ModelTraits(dropout=True, expert_capacity=True)),
            REASSOCIATION,
            id="sums over the ranks know nothing of it",
        ),
        pytest.param("zero_stage", facts(2), REASSOCIATION, id="another stage, other sums"),
        pytest.param("activation_checkpointing", facts(), BITWISE, id="the same worked out twice"),
        pytest.param("gradient_compression", facts(2), STATISTICAL, id="gradients are rounded"),
        pytest.param("batch_samples", facts(2), UNRESTRICTED, id="another training"),
    ],
)
def test_the_required_numerics_depend_on_the_job(knob, job, numerics):
    assert required_numerics([knob], job) == numerics


def test_several_knobs_need_the_loosest_of_their_numerics():
    assert required_numerics(["python_gc", "zero_stage"], facts()) == REASSOCIATION
    assert required_numerics([], facts()) == BITWISE


def test_a_knob_that_is_not_allowed_excludes_all():
    experts = facts(traits=ModelTraits(expert_capacity=True))

    assert required_numerics(["python_gc", "balance"], experts) is None


@pytest.mark.parametrize("numerics", Numerics)
def test_numerics_have_the_names_of_the_setting(numerics):
    assert Numerics.of_setting(numerics.setting) is numerics


@pytest.mark.parametrize(
    ("knob", "steps"), [("python_gc", 2), ("prefetch_bucket_size", 3), ("zero_stage", 3)]
)
def test_knobs_that_zero_3_traces_again_settle_later(knob, steps):
    assert SPECS[knob].settle_steps == steps
