"""What is tried against what holds a job back, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerowatch.runtime.tuner.policy.diagnose import diagnose
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.proposals import TunerInput, propose, relaxations
from zerowatch.runtime.tuner.policy.registry import SPECS
from zerowatch.runtime.tuner.policy.types import JobFacts, ModelTraits, Numerics, Symptom, Value

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


def situation(reading: MetricsDelta = SLOW_LINK, **others: object) -> TunerInput:
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
    return situation(reading, configuration=STAGE_3, options=STAGE_3_OPTIONS, **others)


def tried(given: TunerInput) -> list[dict[str, Value]]:
    return [dict(proposal.changes) for proposal in propose(given)]


def of_knob(given: TunerInput, knob: str) -> list[Value]:
    return [changes[knob] for changes in tried(given) if knob in changes]


def test_nothing_is_tried_where_nothing_holds_the_job_back():
    assert tried(situation(BUSY)) == []


def test_on_a_slow_link_the_largest_micro_batch_comes_first_then_smaller_ones():
    assert of_knob(situation(), "micro_batch_samples") == [16, 8, 6]
    assert tried(situation())[0] == {"micro_batch_samples": 16}


def test_what_it_gains_is_foretold():
    first = propose(situation())[0]

    assert first.predicted_gain > 1.0
    assert (first.tier, first.numerics, first.symptom.name) == (
        "live",
        REASSOCIATION,
        "comm_bandwidth",
    )
    assert first.why == SPECS["micro_batch_samples"].description


@pytest.mark.parametrize("stage", [0, 1])
def test_below_stage_2_only_a_trial_tells_what_larger_micro_batches_save(stage):
    below = situation(configuration={**START, "zero_stage": stage})

    larger = [one for one in propose(below) if "micro_batch_samples" in one.changes]

    assert [one.changes["micro_batch_samples"] for one in larger] == [16, 8, 6]
    assert {one.predicted_gain for one in larger} == {None}


def test_what_only_a_trial_can_tell_comes_after_what_is_foretold():
    order = tried(situation())

    assert order.index({"micro_batch_samples": 6}) < order.index({"asynchronous_reduction": True})
    assert {"reduce_bucket_size": 1 << 24} in order
    assert {"reduce_bucket_size": 1 << 20} in order


def test_many_calls_want_larger_buckets_and_no_smaller_ones():
    assert of_knob(situation(MANY_CALLS), "reduce_bucket_size") == [1 << 24]


def test_what_has_failed_here_is_not_tried_again():
    denied = situation(denied={("micro_batch_samples", 16), ("reduce_bucket_size", 1 << 20)})

    assert of_knob(denied, "micro_batch_samples") == [8, 6]
    assert of_knob(denied, "reduce_bucket_size") == [1 << 24]


def test_what_cannot_be_set_here_is_not_tried():
    options = {**OPTIONS, "micro_batch_samples": (4, 5)}
    without = {knob: value for knob, value in options.items() if knob != "reduce_bucket_size"}

    order = tried(situation(options=without))

    assert not [changes for changes in order if "micro_batch_samples" in changes]
    assert not [changes for changes in order if "reduce_bucket_size" in changes]


@pytest.mark.parametrize("bucket", [1 << 24, 500_000_000])
def test_from_one_bucket_for_all_the_next_is_several(bucket):
    whole = situation(configuration={**START, "reduce_bucket_size": bucket})

    assert {"reduce_bucket_size": 1 << 21} in tried(whole)
    assert {"asynchronous_reduction": True, "reduce_bucket_size": 1 << 21} in tried(whole)


def test_what_is_foretold_to_lose_a_little_is_not_foretold():
    whole = situation(configuration={**START, "reduce_bucket_size": 1 << 24})

    (smaller,) = [one for one in propose(whole) if [*one.changes] == ["reduce_bucket_size"]]

    assert smaller.predicted_gain is None


@pytest.mark.parametrize(("on_cpu", "found"), [(True, False), (False, True)])
def test_a_cpu_has_no_streams_to_overlap_on(on_cpu, found):
    given = situation(
        replace(SLOW_LINK, on_cpu=on_cpu),
        configuration={**START, "overlap_comm": False},
        options={**OPTIONS, "overlap_comm": (False, True)},
    )

    assert ({"overlap_comm": True} in tried(given)) is found


class TestContract:
    @pytest.mark.parametrize("numerics", Numerics)
    def test_nothing_looser_than_the_user_allows_is_tried(self, numerics):
        found = propose(situation(numerics=numerics, allows_rebuild=True))

        assert found
        assert all(proposal.numerics <= numerics for proposal in found)

    def test_bitwise_leaves_the_order_of_sums_to_two_ranks(self):
        four = replace(FACTS, world_size=4)

        assert {"asynchronous_reduction": True} in tried(situation(numerics=BITWISE))
        assert tried(situation(numerics=BITWISE, facts=four)) == []

    def test_statistical_tries_compression_and_the_smallest_first(self):
        forms = of_knob(situation(numerics=STATISTICAL), "gradient_compression")

        assert forms == ["int8", "fp8", "bf16"]

    def test_free_tries_a_larger_batch_one_step_at_a_time(self):
        assert of_knob(situation(numerics=UNRESTRICTED), "batch_samples") == [64]

    def test_micro_batches_stay_where_experts_have_a_capacity(self):
        experts = replace(FACTS, traits=ModelTraits(expert_capacity=True))

        assert of_knob(situation(facts=experts, numerics=UNRESTRICTED), "micro_batch_samples") == []

    def test_with_dropout_they_change_under_statistical_only(self):
        drops = replace(FACTS, traits=ModelTraits(dropout=True))

        assert of_knob(situation(facts=drops), "micro_batch_samples") == []
        assert of_knob(situation(facts=drops, numerics=STATISTICAL), "micro_batch_samples")


class TestRebuild:
    def test_needs_leave(self):
        assert of_knob(situation(), "zero_stage") == []

    def test_goes_to_the_stage_that_sends_least(self):
        found = propose(situation(allows_rebuild=True))

        assert found[0].changes == {"zero_stage": 0}
        assert found[0].tier == "rebuild"

    def test_is_left_where_little_would_be_gained(self):
        little = replace(SLOW_LINK, exposed_ratio=0.21, cause_ratios={"bandwidth": 0.05})

        found = situation(
            little, configuration={**START, "micro_batch_samples": 16}, allows_rebuild=True
        )

        assert of_knob(found, "zero_stage") == []

    def test_takes_along_what_makes_no_sense_without_the_old_stage(self):
        offloads = {**STAGE_3, "offload_param": True, "asynchronous_reduction": False}
        given = situation(
            SLOW_LINK, configuration=offloads, options=STAGE_3_OPTIONS, allows_rebuild=True
        )

        assert {"zero_stage": 1, "offload_param": False} in tried(given)

    def test_of_offloading_is_predicted_by_the_time_that_it_takes(self):
        reading = replace(SLOW_LINK, offload_ratio=0.1, **MEMORY_TO_SPARE)
        offloads = {**START, "offload_optimizer": True}
        given = situation(reading, configuration=offloads, allows_rebuild=True)

        assert {"offload_optimizer": False} in tried(given)
        assert of_knob(replace(given, allows_rebuild=False), "offload_optimizer") == []


class TestMemoryPressure:
    def test_is_answered_by_what_gives_memory_back_and_nothing_else(self):
        order = tried(situation(SHORT_OF_MEMORY, allows_rebuild=True))

        assert order == [
            {"micro_batch_samples": 2},
            {"activation_checkpointing": True},
            {"reduce_bucket_size": 1 << 20},
            {"zero_stage": 3},
            {"offload_optimizer": True},
        ]

    def test_gets_no_rebuild_without_leave(self):
        order = tried(situation(SHORT_OF_MEMORY))

        assert [*order[-1]] == ["reduce_bucket_size"]

    def test_goes_on_below_what_has_failed(self):
        given = situation(SHORT_OF_MEMORY, denied={("micro_batch_samples", 2)})

        assert tried(given)[0] == {"micro_batch_samples": 1}

    def test_starts_with_buckets_no_larger_than_all_gradients(self):
        default = {**START, "reduce_bucket_size": 1 << 29}

        given = situation(SHORT_OF_MEMORY, configuration=default)

        assert of_knob(given, "reduce_bucket_size") == [1 << 23]

    def test_at_stage_3_shortens_what_is_fetched_ahead(self):
        order = tried(at_stage_3(SHORT_OF_MEMORY, allows_rebuild=True))

        assert {"prefetch_bucket_size": 1 << 21} in order
        assert {"offload_param": True} in order

    def test_offloads_parameters_together_with_the_stage_that_can(self):
        configuration = {**START, "offload_param": False}
        given = situation(
            SHORT_OF_MEMORY,
            configuration=configuration,
            options=STAGE_3_OPTIONS,
            allows_rebuild=True,
        )

        assert {"offload_param": True, "zero_stage": 3} in tried(given)

    def test_keeps_to_the_contract(self):
        order = tried(situation(SHORT_OF_MEMORY, numerics=BITWISE))

        assert order == [{"activation_checkpointing": True}, {"reduce_bucket_size": 1 << 20}]

    def test_wins_over_everything_else(self):
        both = replace(SLOW_LINK, oom_risk=0.9)

        assert tried(situation(both)) == tried(situation(SHORT_OF_MEMORY))


class TestRemembered:
    def test_is_tried_first_as_one_change(self):
        given = situation(remembered=BEST, numerics=STATISTICAL)

        first = propose(given)[0]

        assert first.changes == {"micro_batch_samples": 16, "gradient_compression": "int8"}
        assert first.numerics == STATISTICAL
        assert first.predicted_gain is None  # it was measured

    def test_may_cost_a_little_where_it_rounds_no_longer(self):
        exact = {**BEST, "gradient_compression": None}
        given = situation(BUSY, configuration=BEST, remembered=exact, numerics=STATISTICAL)

        first = propose(given)[0]

        assert first.changes == {"gradient_compression": None}
        assert first.relaxes

    def test_is_forgotten_where_the_contract_forbids_it(self):
        assert tried(situation(remembered=BEST)) == tried(situation())

    def test_is_nothing_new_where_it_is_in_use(self):
        assert tried(situation(remembered=START)) == tried(situation())

    def test_is_tried_even_where_nothing_else_would_be(self):
        given = situation(BUSY, remembered={**START, "micro_batch_samples": 2})

        assert tried(given) == [{"micro_batch_samples": 2}]

    def test_leaves_out_what_cannot_be_set_any_longer(self):
        given = situation(
            remembered={**START, "micro_batch_samples": 16, "optimizer_state_offload": True}
        )

        assert tried(given)[0] == {"micro_batch_samples": 16}


class TestOtherSymptoms:
    def test_a_straggler_gets_fewer_samples(self):
        slow = replace(BUSY, straggler_score=0.2)

        assert tried(situation(slow)) == [{"python_gc": "between_steps"}, {"balance": True}]

    def test_a_host_that_cannot_keep_up_gets_less_to_do(self):
        waits = replace(BUSY, device_utilization=0.4)

        order = tried(situation(waits))

        assert {"python_gc": "between_steps"} in order
        assert of_knob(situation(waits), "micro_batch_samples") == [16, 8, 6]

    def test_what_nobody_can_foretell_comes_in_the_registrys_order(self):
        waits = replace(BUSY, device_utilization=0.4, cause_ratios={})

        knobs = [next(iter(proposal.changes)) for proposal in propose(situation(waits))]

        assert knobs[0] == "micro_batch_samples"
        assert knobs == sorted(knobs, key=list(SPECS).index)

    def test_data_that_is_late_has_no_knob(self):
        late = replace(BUSY, phase_ratios={"data": 0.3, "backward": 0.7})

        assert tried(situation(late)) == []

    def test_memory_to_spare_alone_is_no_reason(self):
        assert tried(situation(replace(BUSY, **MEMORY_TO_SPARE))) == []

    def test_nothing_is_foretold_from_communication_that_was_not_recorded_whole(self):
        blind = replace(SLOW_LINK, coverage=0.5)
        told = [Symptom(name="comm_bandwidth", ratio=0.5, evidence={})]

        found = propose(situation(blind, symptoms=told))

        assert found
        assert all(proposal.predicted_gain is None for proposal in found)


class TestNotNeededAnyLonger:
    def given(self, reading: MetricsDelta, **others: object) -> TunerInput:
        return situation(reading, configuration=BEST, numerics=STATISTICAL, **others)

    def test_compression_ends_where_the_link_has_become_fast(self):
        fast = replace(BUSY, exposed_ratio=0.01, comm_ratio=0.01, cause_ratios={"bandwidth": 0.01})

        (only,) = propose(self.given(fast))

        assert only.changes == {"gradient_compression": None}
        assert -0.05 < only.predicted_gain < 0
        assert relaxations(self.given(fast)) == [only]

    def test_it_stays_where_its_bytes_would_be_waited_for(self):
        assert tried(self.given(BUSY)) == []

    def test_it_stays_where_they_may_be_hidden_only_for_being_few(self):
        hidden = replace(BUSY, exposed_ratio=0.01, cause_ratios={"bandwidth": 0.01}, comm_ratio=0.4)

        assert tried(self.given(hidden)) == []

    def test_it_stays_where_nobody_knows(self):
        assert tried(self.given(replace(BUSY, coverage=0.5))) == []

    def test_it_stays_where_its_end_was_tried(self):
        fast = replace(BUSY, exposed_ratio=0.01, comm_ratio=0.01, cause_ratios={"bandwidth": 0.01})

        assert tried(self.given(fast, denied={("gradient_compression", None)})) == []

    def test_activations_are_kept_again_where_there_is_memory_to_spare(self):
        given = situation(
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
        situation(
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


def test_what_the_stage_cannot_do_is_not_tried_there():
    assert {"asynchronous_reduction": True} not in tried(at_stage_3(SLOW_LINK))
