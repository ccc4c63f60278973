"""Tests of the changes that are proposed against the symptoms, and of their order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerowatch.runtime.tuner.policy.diagnose import diagnose
from zerowatch.runtime.tuner.policy.knob_registry import SPECS
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import (
    JobFacts,
    ModelTraits,
    Numerics,
    Symptom,
    Value,
)
from zerowatch.runtime.tuner.policy.proposals import TunerInput, propose, relaxations

BITWISE, REASSOCIATION, STATISTICAL, UNRESTRICTED = Numerics
SIZE = 10_000_000 * 4

BUSY = MetricsDelta(
    phase_ratios={"forward": 0.3, "backward": 0.6, "optimizer": 0.1},
    exposed_ratio=0.05,
    comm_ratio=0.05,
    cause_ratios={"bandwidth": 0.05},
    coverage=1.0,
    on_cpu=False,
    device_utilization=0.95,
    headroom_ratio=0.3,
    device_headroom_ratio=0.3,
    world_size=2,
)
SLOW_LINK = replace(
    BUSY,
    exposed_ratio=0.8,
    comm_ratio=0.8,
    cause_ratios={"bandwidth": 0.45, "redundancy": 0.33, "latency": 0.02},
)
MANY_CALLS = replace(BUSY, exposed_ratio=0.5, comm_ratio=0.5, cause_ratios={"latency": 0.5})
SHORT_OF_MEMORY = replace(BUSY, oom_risk=0.7)
MEMORY_TO_SPARE = {"headroom_ratio": 0.6, "device_headroom_ratio": 0.6}

START = {
    "micro_batch_samples": 4,
    "activation_checkpointing": False,
    "reduce_bucket_size": 1 << 22,
    "python_gc": "automatic",
    "use_multi_rank_bucket_allreduce": True,
    "asynchronous_reduction": False,
    "balance": False,
    "gradient_compression": None,
    "zero_stage": 2,
    "offload_optimizer": False,
    "batch_samples": 32,
}
BEST = {**START, "micro_batch_samples": 16, "gradient_compression": "int8"}
OPTIONS = {
    "micro_batch_samples": tuple(range(1, 17)),
    "activation_checkpointing": (False, True),
    "reduce_bucket_size": tuple(1 << n for n in range(16, 30)),
    "python_gc": ("automatic", "between_steps"),
    "use_multi_rank_bucket_allreduce": (False, True),
    "asynchronous_reduction": (False, True),
    "balance": (False, True),
    "gradient_compression": (None, "bf16", "int8", "fp8"),
    "zero_stage": (0, 1, 2, 3),
    "offload_optimizer": (False, True),
    "batch_samples": (32, 64, 128),
}
STAGE_3 = {
    **START,
    "zero_stage": 3,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "offload_param": False,
}
STAGE_3_OPTIONS = {
    **OPTIONS,
    "prefetch_bucket_size": (0, *(1 << n for n in range(16, 30))),
    "param_persistence_threshold": (0, *(1 << n for n in range(10, 24))),
    "offload_param": (False, True),
}
FACTS = JobFacts(world_size=2, backend="gloo", gradient_bytes=SIZE, parameter_bytes=SIZE)


def tuner_input(reading: MetricsDelta = SLOW_LINK, **others: object) -> TunerInput:
    given = {
        "configuration": START,
        "options": OPTIONS,
        "facts": FACTS,
        "numerics": REASSOCIATION,
        "allows_rebuild": False,
        "symptoms": diagnose(reading),
        "reading": reading,
        "samples_per_rank": 16,
        **others,
    }
    return TunerInput(**given)


def at_stage_3(reading: MetricsDelta, **others: object) -> TunerInput:
    return tuner_input(reading, configuration=STAGE_3, options=STAGE_3_OPTIONS, **others)


def tried(given: TunerInput) -> list[dict[str, Value]]:
    return [dict(proposal.changes) for proposal in propose(given)]


def of_knob(given: TunerInput, knob: str) -> list[Value]:
    return [changes[knob] for changes in tried(given) if knob in changes]


@pytest.mark.parametrize("reading", [SLOW_LINK, SHORT_OF_MEMORY])
def test_a_pause_follows_each_value_that_was_judged(reading):
    pauses = []
    found = propose(tuner_input(reading), lambda: pauses.append(1))

    assert len(pauses) >= len(found) > 0
    assert found == propose(tuner_input(reading))


def test_without_symptoms_nothing_is_proposed():
    assert tried(tuner_input(BUSY)) == []


def test_on_a_slow_link_the_largest_micro_batch_comes_first_then_smaller_ones():
    assert of_knob(tuner_input(), "micro_batch_samples") == [16, 8, 6]
    assert tried(tuner_input())[0] == {"micro_batch_samples": 16}


def test_the_gain_is_predicted():
    first = propose(tuner_input())[0]

    assert first.predicted_gain > 1.0
    assert (first.apply_mode, first.numerics, first.symptom.name) == (
        "live",
        REASSOCIATION,
        "comm_bandwidth",
    )
    assert first.reason == SPECS["micro_batch_samples"].description


@pytest.mark.parametrize("stage", [0, 1])
def test_below_stage_2_the_gain_of_larger_micro_batches_is_not_predicted(stage):
    below = tuner_input(configuration={**START, "zero_stage": stage})

    larger = [one for one in propose(below) if "micro_batch_samples" in one.changes]

    assert [one.changes["micro_batch_samples"] for one in larger] == [16, 8, 6]
    assert {one.predicted_gain for one in larger} == {None}


def test_unpredicted_changes_come_after_predicted_ones():
    order = tried(tuner_input())

    assert order.index({"micro_batch_samples": 6}) < order.index({"asynchronous_reduction": True})
    assert {"reduce_bucket_size": 1 << 24} in order
    assert {"reduce_bucket_size": 1 << 20} in order


def test_latency_proposes_larger_buckets_and_no_smaller_ones():
    assert of_knob(tuner_input(MANY_CALLS), "reduce_bucket_size") == [1 << 24]


def test_excluded_values_are_not_proposed():
    excluded = tuner_input(excluded={("micro_batch_samples", 16), ("reduce_bucket_size", 1 << 20)})

    assert of_knob(excluded, "micro_batch_samples") == [8, 6]
    assert of_knob(excluded, "reduce_bucket_size") == [1 << 24]


def test_values_that_are_no_option_are_not_proposed():
    options = {**OPTIONS, "micro_batch_samples": (4, 5)}
    without = {knob: value for knob, value in options.items() if knob != "reduce_bucket_size"}

    order = tried(tuner_input(options=without))

    assert not [changes for changes in order if "micro_batch_samples" in changes]
    assert not [changes for changes in order if "reduce_bucket_size" in changes]


@pytest.mark.parametrize("bucket", [1 << 24, 500_000_000])
def test_after_one_bucket_for_all_gradients_the_next_size_is_several(bucket):
    whole = tuner_input(configuration={**START, "reduce_bucket_size": bucket})

    assert {"reduce_bucket_size": 1 << 21} in tried(whole)
    assert {"asynchronous_reduction": True, "reduce_bucket_size": 1 << 21} in tried(whole)


def test_a_small_predicted_loss_is_dropped():
    whole = tuner_input(configuration={**START, "reduce_bucket_size": 1 << 24})

    (smaller,) = [one for one in propose(whole) if [*one.changes] == ["reduce_bucket_size"]]

    assert smaller.predicted_gain is None


@pytest.mark.parametrize(("on_cpu", "found"), [(True, False), (False, True)])
def test_a_cpu_has_no_streams_to_overlap_on(on_cpu, found):
    given = tuner_input(
        replace(SLOW_LINK, on_cpu=on_cpu),
        configuration={**START, "overlap_comm": False},
        options={**OPTIONS, "overlap_comm": (False, True)},
    )

    assert ({"overlap_comm": True} in tried(given)) is found


class TestNumerics:
    @pytest.mark.parametrize("numerics", Numerics)
    def test_nothing_looser_than_the_setting_is_proposed(self, numerics):
        found = propose(tuner_input(numerics=numerics, allows_rebuild=True))

        assert found
        assert all(proposal.numerics <= numerics for proposal in found)

    def test_bitwise_allows_another_order_of_sums_on_two_ranks_only(self):
        four = replace(FACTS, world_size=4)

        assert {"asynchronous_reduction": True} in tried(tuner_input(numerics=BITWISE))
        assert tried(tuner_input(numerics=BITWISE, facts=four)) == []

    def test_statistical_proposes_compression_the_smallest_type_first(self):
        forms = of_knob(tuner_input(numerics=STATISTICAL), "gradient_compression")

        assert forms == ["int8", "fp8", "bf16"]

    def test_unrestricted_proposes_twice_the_batch(self):
        assert of_knob(tuner_input(numerics=UNRESTRICTED), "batch_samples") == [64]

    def test_micro_batches_do_not_change_with_expert_capacity(self):
        experts = replace(FACTS, traits=ModelTraits(expert_capacity=True))

        assert (
            of_knob(tuner_input(facts=experts, numerics=UNRESTRICTED), "micro_batch_samples") == []
        )

    def test_with_dropout_micro_batches_change_under_statistical_only(self):
        drops = replace(FACTS, traits=ModelTraits(dropout=True))

        assert of_knob(tuner_input(facts=drops), "micro_batch_samples") == []
        assert of_knob(tuner_input(facts=drops, numerics=STATISTICAL), "micro_batch_samples")


class TestRebuild:
    def test_needs_the_setting(self):
        assert of_knob(tuner_input(), "zero_stage") == []

    def test_goes_to_the_stage_that_sends_least(self):
        found = propose(tuner_input(allows_rebuild=True))

        assert found[0].changes == {"zero_stage": 0}
        assert found[0].apply_mode == "rebuild"

    def test_is_not_proposed_for_a_small_gain(self):
        little = replace(SLOW_LINK, exposed_ratio=0.21, cause_ratios={"bandwidth": 0.05})

        found = tuner_input(
            little, configuration={**START, "micro_batch_samples": 16}, allows_rebuild=True
        )

        assert of_knob(found, "zero_stage") == []

    def test_switches_off_what_has_no_effect_at_the_new_stage(self):
        offloads = {**STAGE_3, "offload_param": True, "asynchronous_reduction": False}
        given = tuner_input(
            SLOW_LINK, configuration=offloads, options=STAGE_3_OPTIONS, allows_rebuild=True
        )

        assert {"zero_stage": 1, "offload_param": False} in tried(given)

    def test_an_end_of_offloading_is_predicted_by_its_time(self):
        reading = replace(SLOW_LINK, offload_ratio=0.1, **MEMORY_TO_SPARE)
        offloads = {**START, "offload_optimizer": True}
        given = tuner_input(reading, configuration=offloads, allows_rebuild=True)

        assert {"offload_optimizer": False} in tried(given)
        assert of_knob(replace(given, allows_rebuild=False), "offload_optimizer") == []


class TestMemoryPressure:
    def test_proposes_only_what_frees_memory(self):
        order = tried(tuner_input(SHORT_OF_MEMORY, allows_rebuild=True))

        assert order == [
            {"micro_batch_samples": 2},
            {"activation_checkpointing": True},
            {"reduce_bucket_size": 1 << 20},
            {"zero_stage": 3},
            {"offload_optimizer": True},
        ]

    def test_proposes_no_rebuild_without_the_setting(self):
        order = tried(tuner_input(SHORT_OF_MEMORY))

        assert [*order[-1]] == ["reduce_bucket_size"]

    def test_continues_below_excluded_values(self):
        given = tuner_input(SHORT_OF_MEMORY, excluded={("micro_batch_samples", 2)})

        assert tried(given)[0] == {"micro_batch_samples": 1}

    def test_starts_with_buckets_no_larger_than_all_gradients(self):
        default = {**START, "reduce_bucket_size": 1 << 29}

        given = tuner_input(SHORT_OF_MEMORY, configuration=default)

        assert of_knob(given, "reduce_bucket_size") == [1 << 23]

    def test_at_stage_3_reduces_prefetching(self):
        order = tried(at_stage_3(SHORT_OF_MEMORY, allows_rebuild=True))

        assert {"prefetch_bucket_size": 1 << 21} in order
        assert {"offload_param": True} in order

    def test_offloads_parameters_together_with_stage_3(self):
        configuration = {**START, "offload_param": False}
        given = tuner_input(
            SHORT_OF_MEMORY,
            configuration=configuration,
            options=STAGE_3_OPTIONS,
            allows_rebuild=True,
        )

        assert {"offload_param": True, "zero_stage": 3} in tried(given)

    def test_respects_the_numerics_setting(self):
        order = tried(tuner_input(SHORT_OF_MEMORY, numerics=BITWISE))

        assert order == [{"activation_checkpointing": True}, {"reduce_bucket_size": 1 << 20}]

    def test_with_little_memory_left_but_no_risk_leaves_out_only_what_needs_memory(self):
        little = {"oom_risk": 0.0, "headroom_ratio": 0.07, "device_headroom_ratio": 0.07}
        savings = tried(tuner_input(SHORT_OF_MEMORY, allows_rebuild=True))
        usual = tried(tuner_input(allows_rebuild=True))

        order = tried(tuner_input(replace(SLOW_LINK, **little), allows_rebuild=True))

        assert order[: len(savings)] == savings
        rest = order[len(savings) :]
        assert rest == [each for each in usual if each in rest]
        assert {"use_multi_rank_bucket_allreduce": False} in rest
        assert not any(changes.get("micro_batch_samples", 0) > 4 for changes in order)
        assert not any("asynchronous_reduction" in changes for changes in order)

    def test_with_little_memory_left_a_change_that_also_saves_time_is_not_only_a_saving(self):
        little = {"oom_risk": 0.0, "headroom_ratio": 0.07, "device_headroom_ratio": 0.07}

        found = propose(tuner_input(replace(SLOW_LINK, **little)))

        smaller = [one for one in found if one.changes == {"reduce_bucket_size": 1 << 20}]
        assert [one.symptom.name for one in smaller] == ["comm_bandwidth"]

    def test_precedes_all_other_symptoms(self):
        both = replace(SLOW_LINK, oom_risk=0.9)

        assert tried(tuner_input(both)) == tried(tuner_input(SHORT_OF_MEMORY))


class TestFromHistory:
    def test_is_tried_first_as_one_change(self):
        given = tuner_input(remembered=BEST, numerics=STATISTICAL)

        first = propose(given)[0]

        assert first.changes == {"micro_batch_samples": 16, "gradient_compression": "int8"}
        assert first.numerics == STATISTICAL
        assert first.predicted_gain is None  # it was measured

    def test_may_lose_a_little_if_it_ends_compression(self):
        exact = {**BEST, "gradient_compression": None}
        given = tuner_input(BUSY, configuration=BEST, remembered=exact, numerics=STATISTICAL)

        first = propose(given)[0]

        assert first.changes == {"gradient_compression": None}
        assert first.relaxes

    def test_is_dropped_if_the_numerics_setting_forbids_it(self):
        assert tried(tuner_input(remembered=BEST)) == tried(tuner_input())

    def test_is_not_proposed_if_it_is_in_use(self):
        assert tried(tuner_input(remembered=START)) == tried(tuner_input())

    def test_is_proposed_even_without_symptoms(self):
        given = tuner_input(BUSY, remembered={**START, "micro_batch_samples": 2})

        assert tried(given) == [{"micro_batch_samples": 2}]

    def test_leaves_out_values_that_are_no_longer_options(self):
        given = tuner_input(
            remembered={**START, "micro_batch_samples": 16, "optimizer_state_offload": True}
        )

        assert tried(given)[0] == {"micro_batch_samples": 16}


class TestOtherSymptoms:
    def test_a_straggler_gets_fewer_samples(self):
        slow = replace(BUSY, straggler_score=0.2)

        assert tried(tuner_input(slow)) == [{"python_gc": "between_steps"}, {"balance": True}]

    def test_a_host_bound_job_gets_later_collections_and_larger_micro_batches(self):
        waits = replace(BUSY, device_utilization=0.4)

        order = tried(tuner_input(waits))

        assert {"python_gc": "between_steps"} in order
        assert of_knob(tuner_input(waits), "micro_batch_samples") == [16, 8, 6]

    def test_unpredicted_changes_come_in_the_order_of_the_registry(self):
        waits = replace(BUSY, device_utilization=0.4, cause_ratios={})

        knobs = [next(iter(proposal.changes)) for proposal in propose(tuner_input(waits))]

        assert knobs[0] == "micro_batch_samples"
        assert knobs == sorted(knobs, key=list(SPECS).index)

    def test_data_loading_has_no_knob(self):
        late = replace(BUSY, phase_ratios={"data": 0.3, "backward": 0.7})

        assert tried(tuner_input(late)) == []

    def test_idle_memory_alone_proposes_nothing(self):
        assert tried(tuner_input(replace(BUSY, **MEMORY_TO_SPARE))) == []

    def test_nothing_is_predicted_from_incomplete_communication_figures(self):
        blind = replace(SLOW_LINK, coverage=0.5)
        symptoms = [Symptom(name="comm_bandwidth", ratio=0.5, evidence={})]

        found = propose(tuner_input(blind, symptoms=symptoms))

        assert found
        assert all(proposal.predicted_gain is None for proposal in found)


class TestRelaxations:
    def given(self, reading: MetricsDelta, **others: object) -> TunerInput:
        return tuner_input(reading, configuration=BEST, numerics=STATISTICAL, **others)

    def test_compression_ends_on_a_fast_link(self):
        fast = replace(BUSY, exposed_ratio=0.01, comm_ratio=0.01, cause_ratios={"bandwidth": 0.01})

        (only,) = propose(self.given(fast))

        assert only.changes == {"gradient_compression": None}
        assert -0.05 < only.predicted_gain < 0
        assert relaxations(self.given(fast)) == [only]

    def test_compression_stays_if_training_would_wait_for_the_bytes(self):
        assert tried(self.given(BUSY)) == []

    def test_compression_stays_if_only_few_bytes_can_be_hidden(self):
        hidden = replace(BUSY, exposed_ratio=0.01, cause_ratios={"bandwidth": 0.01}, comm_ratio=0.4)

        assert tried(self.given(hidden)) == []

    def test_compression_stays_without_figures(self):
        assert tried(self.given(replace(BUSY, coverage=0.5))) == []

    def test_compression_stays_if_its_end_is_excluded(self):
        fast = replace(BUSY, exposed_ratio=0.01, comm_ratio=0.01, cause_ratios={"bandwidth": 0.01})

        assert tried(self.given(fast, excluded={("gradient_compression", None)})) == []

    def test_checkpointing_ends_with_idle_memory(self):
        given = tuner_input(
            replace(BUSY, **MEMORY_TO_SPARE),
            configuration={**START, "activation_checkpointing": True},
        )

        assert tried(given) == [{"activation_checkpointing": False}]


@pytest.mark.parametrize("reading", [SLOW_LINK, MANY_CALLS, SHORT_OF_MEMORY])
@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("configuration", [START, STAGE_3])
def test_every_proposal_is_a_real_change_to_a_value_that_can_be_set(
    reading, numerics, configuration
):
    options = STAGE_3_OPTIONS
    found = propose(
        tuner_input(
            reading,
            configuration=configuration,
            options=options,
            numerics=numerics,
            allows_rebuild=True,
        )
    )

    for proposal in found:
        assert proposal.changes
        for knob, value in proposal.changes.items():
            assert value != configuration[knob]
            assert value in options[knob]
            assert knob in SPECS
    assert len({frozenset(one.changes.items()) for one in found}) == len(found)


def test_knobs_without_effect_at_a_stage_are_not_proposed():
    assert {"asynchronous_reduction": True} not in tried(at_stage_3(SLOW_LINK))


@pytest.mark.parametrize("partner", [{"reduce_scatter": False}, {"overlap_comm": True}])
def test_what_excludes_asynchronous_reduction_switches_it_off(partner):
    excluding = {"reduce_scatter": True, "overlap_comm": False}
    options = {**OPTIONS, **{knob: (False, True) for knob in excluding}}
    is_on = {**START, **excluding, "asynchronous_reduction": True}
    is_excluded = {**START, **excluding, **partner}

    on = tried(tuner_input(configuration=is_on, options=options))
    excluded = tried(tuner_input(configuration=is_excluded, options=options))

    assert {**partner, "asynchronous_reduction": False} in on
    assert partner not in on
    assert {"asynchronous_reduction": True} not in excluded


@pytest.mark.parametrize(
    ("overlaps", "partner"), [(True, {"asynchronous_reduction": False}), (False, {})]
)
def test_a_stage_that_overlaps_again_switches_asynchronous_reduction_off(overlaps, partner):
    at_1 = {**START, "zero_stage": 1, "asynchronous_reduction": True, "overlap_comm": overlaps}
    given = tuner_input(SHORT_OF_MEMORY, configuration=at_1, allows_rebuild=True)

    assert {"zero_stage": 2, **partner} in tried(given)


def compressed(kind: str | None, numerics: Numerics) -> TunerInput:
    reading = MetricsDelta(
        exposed_ratio=0.6,
        comm_ratio=0.6,
        cause_ratios={"bandwidth": 0.3, "latency": 0.3},
        coverage=1.0,
        world_size=2,
    )
    return TunerInput(
        configuration={"reduce_bucket_size": 1 << 16, "gradient_compression": kind},
        options={
            "reduce_bucket_size": (1 << 16, 1 << 20),
            "gradient_compression": (None, "int8"),
        },
        facts=JobFacts(world_size=2, backend="gloo", gradient_bytes=10**8, parameter_bytes=10**8),
        numerics=numerics,
        allows_rebuild=True,
        symptoms=diagnose(reading),
        reading=reading,
        samples_per_rank=8,
    )


def test_bitwise_numerics_with_compression_allow_no_other_bucket_size() -> None:
    """Buckets decide which values are rounded together."""
    assert propose(compressed(None, Numerics.BITWISE))
    assert not propose(compressed("int8", Numerics.BITWISE))
    assert propose(compressed("int8", Numerics.REASSOCIATION))
