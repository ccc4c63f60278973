"""Traffic of a step in closed form, compared with the estimator, and predicted gains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerowatch.runtime.estimator.estimate_step import estimate_step
from zerowatch.runtime.estimator.model_shape import (
    ModelShape,
    ModuleShape,
    ParameterShape,
    Topology,
)
from zerowatch.runtime.estimator.step_estimate import StepEstimate
from zerowatch.runtime.tuner.policy.knob_registry import SPECS
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import JobFacts
from zerowatch.runtime.tuner.policy.predict import (
    num_micro_batches,
    predicted_gain,
    traffic_of,
)

LAYERS, ELEMENTS = 12, 1 << 20
FP32 = 4
ONE_CAUSE = MetricsDelta(cause_ratios={"bandwidth": 0.4, "redundancy": 0.3, "latency": 0.1})


def facts(ranks: int = 2, backend: str = "gloo") -> JobFacts:
    size = LAYERS * ELEMENTS * FP32
    return JobFacts(
        world_size=ranks,
        backend=backend,
        gradient_bytes=size,
        parameter_bytes=size,
        num_tensors=LAYERS,
    )


def configuration(stage: int, micro: int = 4, **others: object) -> dict:
    return {"zero_stage": stage, "micro_batch_samples": micro, **others}


def planned(
    stage: int, *, ranks: int, micro_batches: int, backend: str, **zero: object
) -> StepEstimate:
    modules = tuple(ModuleShape(name=str(n), parameters=(n,)) for n in range(LAYERS))
    model = ModelShape(
        parameters=tuple(
            ParameterShape(name=f"{n}.weight", shape=(ELEMENTS,)) for n in range(LAYERS)
        ),
        root=ModuleShape(name="", children=modules),
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage, **zero},
    }
    return estimate_step(model, config, Topology(world_size=ranks, backend=backend))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("stage", "pattern"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (1, {"use_multi_rank_bucket_allreduce": False}),
        (2, {"use_multi_rank_bucket_allreduce": False}),
        (2, {"reduce_scatter": False}),
        (3, {"reduce_scatter": False}),
        (2, {"reduce_bucket_size": 4 * ELEMENTS}),
    ],
)
def test_bytes_are_those_of_the_estimator(stage, pattern, micro_batches, ranks, backend):
    plan = planned(stage, ranks=ranks, micro_batches=micro_batches, backend=backend, **pattern)
    start = configuration(stage, 4, **pattern)

    sent = traffic_of(start, facts(ranks, backend), samples_per_rank=4 * micro_batches)

    assert sent.wire_bytes == pytest.approx(plan.wire_bytes, rel=0.02)


@pytest.mark.parametrize("bucket", [ELEMENTS, 4 * ELEMENTS, 500_000_000])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("together", [True, False])
def test_calls_are_about_those_of_the_estimator(stage, bucket, together):
    pattern = {"reduce_bucket_size": bucket, "use_multi_rank_bucket_allreduce": together}
    plan = planned(stage, ranks=2, micro_batches=4, backend="gloo", **pattern)

    sent = traffic_of(configuration(stage, **pattern), facts(), samples_per_rank=16)

    assert sent.calls == pytest.approx(sum(each.calls for each in plan.collectives), rel=0.15)


@pytest.mark.parametrize("distance", [0, 6 * ELEMENTS, 12 * ELEMENTS, 1_000_000_000])
def test_parameters_within_the_reuse_distance_are_gathered_once(distance):
    kept = {"max_reuse_distance": distance}
    keys = {"stage3_max_reuse_distance": distance, "stage3_prefetch_bucket_size": 0}
    plan = planned(3, ranks=2, micro_batches=2, backend="gloo", **keys)

    sent = traffic_of(configuration(3, **kept), facts(), samples_per_rank=8)

    assert sent.wire_bytes == pytest.approx(plan.wire_bytes, rel=0.05)


def test_frozen_parameters_are_gathered_at_stage_3_only():
    trained = facts()
    frozen = replace(trained, gathered_bytes=10 * trained.parameter_bytes, num_tensors=10 * LAYERS)
    gathered = 10 * LAYERS * ELEMENTS
    whole = {"max_reuse_distance": 0, "prefetch_bucket_size": gathered}

    for stage in (0, 1, 2):
        now = configuration(stage)
        assert traffic_of(now, frozen, 4) == traffic_of(now, trained, 4)
    now = configuration(3, **whole)
    more = traffic_of(now, frozen, 4).wire_bytes - traffic_of(now, trained, 4).wire_bytes
    assert more == pytest.approx(2 * 0.5 * 9 * trained.parameter_bytes)
    assert SPECS["prefetch_bucket_size"].saturation_size(frozen) == gathered
    assert SPECS["reduce_bucket_size"].saturation_size(frozen) == LAYERS * ELEMENTS


@pytest.mark.parametrize(("micro", "ratio"), [(16, 1.5), (4, 1.8)])
def test_multi_rank_buckets_of_stage_2_send_more_than_the_minimum(micro, ratio):
    size, share, micro_batches = facts().gradient_bytes, 0.5, 16 // micro
    least = share * (micro_batches * size + size)

    sent = traffic_of(configuration(2, micro), facts(), samples_per_rank=16)

    assert sent.wire_bytes / least == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("form", "width", "quarter"),
    [("bf16", 4, 2 / 4), ("int8", 4, 1 / 4), ("fp8", 4, 1 / 4), ("int8", 2, 1 / 2)],
)
def test_compression_reduces_bytes_and_sends_directly(form, width, quarter):
    half = JobFacts(
        world_size=2,
        backend="gloo",
        gradient_bytes=LAYERS * ELEMENTS * width,
        parameter_bytes=0,
        gradient_width=width,
    )
    plain = traffic_of(configuration(2), half, samples_per_rank=16)

    sent = traffic_of(configuration(2, gradient_compression=form), half, samples_per_rank=16)

    # An all-reduce goes twice, to the owners it goes once; scales take 1/64 of a byte a value.
    assert sent.wire_bytes == pytest.approx(plain.wire_bytes * quarter / 2, rel=0.02)


def test_parameters_are_never_compressed():
    start = configuration(2, 16)

    sent = traffic_of({**start, "gradient_compression": "int8"}, facts(), samples_per_rank=16)

    assert sent.wire_bytes > 0.5 * facts().parameter_bytes


def test_gradients_that_all_ranks_need_take_two_phases():
    plain = traffic_of(configuration(0), facts(), samples_per_rank=16)

    sent = traffic_of(configuration(0, gradient_compression="int8"), facts(), samples_per_rank=16)

    assert sent.wire_bytes == pytest.approx(plain.wire_bytes / 4, rel=0.02)


@pytest.mark.parametrize(("samples", "micro", "pieces"), [(16, 4, 4), (16, 5, 4), (16, 32, 1)])
def test_a_window_has_enough_micro_batches(samples, micro, pieces):
    assert num_micro_batches({"micro_batch_samples": micro}, samples) == pieces


def gain(now: dict, then: dict, reading: MetricsDelta = ONE_CAUSE, ranks: int = 2) -> float | None:
    return predicted_gain(now, then, facts(ranks), 16, reading)


def test_fewer_micro_batches_save_reductions():
    # 4 x 2 parts of gradients and 1 of parameters come down to 2 and 1; 8 and 2 calls to 3.
    step = 0.2 + 0.7 * 3 / 9 + 0.1 * 3 / 6

    assert gain(configuration(2, 4), configuration(2, 16)) == pytest.approx(1 / step - 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_below_stage_2_the_number_of_micro_batches_does_not_matter(stage):
    assert gain(configuration(stage, 4), configuration(stage, 16)) == pytest.approx(0)


def test_a_larger_batch_sends_the_same_bytes_for_more_samples():
    now = configuration(1, batch_samples=32)

    gained = gain(now, {**now, "batch_samples": 64})

    assert gained == pytest.approx(2 / (2 * 0.2 + 0.8) - 1)


def test_larger_buckets_make_fewer_calls():
    only_latency = MetricsDelta(cause_ratios={"latency": 0.5})
    now = configuration(2, reduce_bucket_size=ELEMENTS)

    gained = gain(now, {**now, "reduce_bucket_size": LAYERS * ELEMENTS}, only_latency)

    assert gained == pytest.approx(1 / (0.5 + 0.5 * 6 / 50) - 1)


def test_more_bytes_are_assumed_to_be_exposed():
    hidden = MetricsDelta(cause_ratios={"bandwidth": 0.01}, comm_ratio=0.5)
    compressed = configuration(2, gradient_compression="int8")

    gained = gain(compressed, {**compressed, "gradient_compression": None}, hidden)

    assert gained < -0.5


@pytest.mark.parametrize(
    ("stage", "bucket", "gained"),
    [
        pytest.param(2, 3 * ELEMENTS, 1 / (1 - 0.3 * 3 / 4) - 1, id="all but the last of four"),
        pytest.param(2, LAYERS * ELEMENTS, 0, id="one bucket leaves when backward has ended"),
        pytest.param(1, 3 * ELEMENTS, 0, id="ZeRO 1 sends after backward"),
    ],
)
def test_asynchronous_reduction_hides_behind_backward(stage, bucket, gained):
    reading = replace(ONE_CAUSE, phase_ratios={"backward": 0.8}, exposed_ratio=0.5)
    now = configuration(stage, reduce_bucket_size=bucket)

    assert gain(now, {**now, "asynchronous_reduction": True}, reading) == pytest.approx(gained)


def test_nothing_hides_behind_votes_within_backward():
    """Of 80 % in backward, 50 % wait for gradients and 20 % in votes: 10 % are computation.

    Other 15 % are waits between the windows.
    """
    reading = replace(
        ONE_CAUSE,
        phase_ratios={"backward": 0.8},
        exposed_ratio=0.65,
        own_transfer_ratio=0.2,
        own_exposed_ratios={"backward": 0.2, "other": 0.15},
    )
    now = configuration(2, reduce_bucket_size=3 * ELEMENTS)

    gained = gain(now, {**now, "asynchronous_reduction": True}, reading)

    assert gained == pytest.approx(1 / (1 - 0.1 * 3 / 4) - 1)


def test_an_end_of_offloading_saves_its_time():
    offloading = MetricsDelta(offload_ratio=0.2)
    now = configuration(2, offload_optimizer=True)

    assert gain(now, {**now, "offload_optimizer": False}, offloading) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("now", "reading"),
    [(configuration(2), MetricsDelta()), ({"micro_batch_samples": 4}, ONE_CAUSE)],
    ids=["no causes known", "no stage known"],
)
def test_without_figures_nothing_is_predicted(now, reading):
    assert gain(now, {**now, "micro_batch_samples": 16}, reading) is None
