"""Computes a configuration's traffic in closed form, and predicts the gain of a change. Pure.

Bytes and calls follow DeepSpeed 0.19.8 with ring algorithms. runtime/estimator computes exact bytes
from a model's shape. This module has only total sizes, enough to rank proposals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...collectives.collective_table import wire_factor
from .knob_registry import (
    ASYNCHRONOUS_REDUCTION,
    BATCH_SAMPLES,
    GRADIENT_COMPRESSION,
    MAX_REUSE_DISTANCE,
    MICRO_BATCH_SAMPLES,
    MULTI_RANK_BUCKET_ALLREDUCE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    PREFETCH_BUCKET_SIZE,
    REDUCE_BUCKET_SIZE,
    REDUCE_SCATTER,
    ZERO_STAGE,
    KnobSpec,
)
from .metrics_delta import MetricsDelta
from .policy_types import Configuration, JobFacts

_STAGE_0_BUCKET = 500_000_000  # elements; fixed in DeepSpeed at stage 0
# Bytes of a compressed value: the code of the value, and its share of an fp32 scale, which a block
# of 256 values has in common.
_CODE_BYTES = {"bf16": 2.0, "fp16": 2 + 4 / 256, "int8": 1 + 4 / 256, "fp8": 1 + 4 / 256}
_CHUNK_VALUES = 256 * 1024  # compressed values of a rank in one message over gloo
_DEVICE_MESSAGE_VALUES = 2**26  # compressed values of all ranks in one message between devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes and calls that one rank sends in a step."""

    wire_bytes: float
    calls: float


def predicted_gain(
    now: Configuration,
    then: Configuration,
    facts: JobFacts,
    samples_per_rank: int,
    reading: MetricsDelta,
) -> float | None:
    """Return the predicted gain of throughput; None without a ZeRO stage or without causes.

    Waiting for bandwidth and redundancy is assumed to scale with the bytes, and waiting for latency
    with the calls. All other time is assumed to stay the same, so the host time of compression is
    not included. If bytes increase, hidden communication is assumed to become exposed.

    Args:
        now: The complete configuration that the reading belongs to.
        then: The complete configuration to predict.
        facts: Properties of the job.
        samples_per_rank: Samples of one rank in a window now.
        reading: Metrics whose communication figures are reliable.
    """
    batch_ratio = _number(then, BATCH_SAMPLES, 1) / _number(now, BATCH_SAMPLES, 1)
    before = traffic_of(now, facts, samples_per_rank)
    after = traffic_of(then, facts, round(samples_per_rank * batch_ratio))
    offloading = _offloading_saved(now, then, reading)
    causes = reading.cause_ratios
    if before is None or after is None or not (causes or offloading):
        return None
    moving = causes.get("bandwidth", 0.0) + causes.get("redundancy", 0.0)
    latency = causes.get("latency", 0.0)
    bytes_ratio = _quotient(after.wire_bytes, before.wire_bytes)
    moving_then = moving * min(bytes_ratio, 1.0)
    if bytes_ratio > 1:
        moving_then = moving + (bytes_ratio - 1) * max(moving, reading.comm_ratio or 0.0)
    moving_then -= _hidden(now, then, facts, reading, moving_then)
    latency_then = latency * _quotient(after.calls, before.calls)
    rest = max(0.0, 1.0 - moving - latency - offloading)
    return batch_ratio / max(rest * batch_ratio + moving_then + latency_then, 1e-3) - 1


def traffic_of(
    configuration: Configuration, facts: JobFacts, samples_per_rank: int
) -> Traffic | None:
    """Return the traffic of a rank in a step; None if the configuration has no ZeRO stage."""
    stage = configuration.get(ZERO_STAGE.name)
    if stage is None:
        return None
    step = _StepTraffic(configuration=configuration, facts=facts)
    parts = list(step.parts(int(stage), num_micro_batches(configuration, samples_per_rank)))
    return Traffic(
        wire_bytes=sum(part.wire_bytes for part in parts), calls=sum(part.calls for part in parts)
    )


def num_micro_batches(configuration: Configuration, samples_per_rank: int) -> int:
    """Return the number of micro-batches of a window with `samples_per_rank` samples."""
    size = _number(configuration, MICRO_BATCH_SAMPLES, samples_per_rank)
    return max(1, math.ceil(samples_per_rank / max(1, size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTraffic:
    configuration: Configuration
    facts: JobFacts

    @property
    def sent(self) -> float:
        """Share of a payload that a rank sends to other ranks."""
        return wire_factor("all_gather", self.facts.backend, self.facts.world_size)

    @property
    def gradients(self) -> float:
        """Elements of all gradients."""
        return self.facts.num_gradients

    @property
    def bucket(self) -> int:
        """Elements of a bucket."""
        return max(1, _number(self.configuration, REDUCE_BUCKET_SIZE, _STAGE_0_BUCKET))

    def parts(self, stage: int, micro_batches: int) -> Iterator[Traffic]:
        """Yield the traffic of the gradient norm, of gradients and of parameters."""
        yield Traffic(wire_bytes=0.0, calls=1)
        if stage == 0:
            yield self._all_reduced(_STAGE_0_BUCKET)
            return
        reductions = micro_batches if stage > 1 else 1
        reduction = self._reduced_at_stage_3() if stage == 3 else self._reduced_at_stages_1_and_2()
        yield Traffic(
            wire_bytes=reductions * reduction.wire_bytes, calls=reductions * reduction.calls
        )
        if stage < 3:
            yield Traffic(wire_bytes=self.sent * self.facts.parameter_bytes, calls=1)
            return
        passes = micro_batches * self._gathers_per_micro_batch()
        yield Traffic(
            wire_bytes=passes * self.sent * self.facts.stage_3_bytes,
            calls=passes * self._calls_per_gather(),
        )

    def _reduced_at_stages_1_and_2(self) -> Traffic:
        """Return the traffic of one reduction of all gradients by ZeRO 1 or 2."""
        ranks, scatters = self.facts.world_size, self._is_on(REDUCE_SCATTER)
        multi_rank = self._is_on(MULTI_RANK_BUCKET_ALLREDUCE)
        if self._code_bytes() is not None:
            # A bucket is sent directly to its owners if no rank owns most of the bucket.
            is_spread = multi_rank and self.bucket >= self.gradients / 2
            is_direct = scatters and (ranks == 2 or is_spread)
            return self._compressed(self.bucket, phases=1 if is_direct else 2)
        if multi_rank or not scatters:
            return self._all_reduced(self.bucket)
        calls = math.ceil(self.gradients / self.bucket) + ranks - 1
        payload = self.facts.gradient_bytes
        factor = wire_factor("reduce", self.facts.backend, ranks, payload / calls)
        return Traffic(wire_bytes=payload * factor, calls=calls)

    def _reduced_at_stage_3(self) -> Traffic:
        """Return the traffic of one reduction of all gradients by ZeRO 3."""
        if self._code_bytes() is not None:
            return self._compressed(self.bucket, phases=1)
        scatters = self._is_on(REDUCE_SCATTER) and self.facts.backend != "gloo"
        whole = self._all_reduced(self.bucket)
        return Traffic(wire_bytes=whole.wire_bytes / (1 + scatters), calls=whole.calls)

    def _all_reduced(self, bucket: int) -> Traffic:
        if self._code_bytes() is not None:
            return self._compressed(bucket, phases=2)
        return Traffic(
            wire_bytes=2 * self.sent * self.facts.gradient_bytes,
            calls=math.ceil(self.gradients / bucket),
        )

    def _compressed(self, bucket: int, phases: int) -> Traffic:
        values = min(bucket, self.gradients)
        chunks = math.ceil(values / _DEVICE_MESSAGE_VALUES)
        if self.facts.backend == "gloo":
            chunks = math.ceil(values / self.facts.world_size / _CHUNK_VALUES)
        return Traffic(
            wire_bytes=phases * self.sent * self.gradients * (self._code_bytes() or 0.0),
            calls=phases * chunks * math.ceil(self.gradients / bucket),
        )

    def _gathers_per_micro_batch(self) -> float:
        """Return how often a micro-batch of ZeRO 3 gathers all parameters.

        Parameters are gathered once in forward and once in backward. Parameters within the reuse
        distance are gathered only once, because backward begins with the last ones of forward.
        """
        distance = _number(self.configuration, MAX_REUSE_DISTANCE, 1_000_000_000)
        return 2 - min(1.0, distance / max(1.0, 2 * self.facts.num_parameters))

    def _calls_per_gather(self) -> int:
        """Return the least number of calls that gather all parameters once."""
        bucket = max(1, _number(self.configuration, PREFETCH_BUCKET_SIZE, 50_000_000))
        return min(self.facts.num_tensors, math.ceil(self.facts.num_parameters / bucket))

    def _code_bytes(self) -> float | None:
        return _CODE_BYTES.get(str(self.configuration.get(GRADIENT_COMPRESSION.name)))

    def _is_on(self, knob: KnobSpec) -> bool:
        return bool(self.configuration.get(knob.name, True))


def _offloading_saved(now: Configuration, then: Configuration, reading: MetricsDelta) -> float:
    """Return the share of time in offloading that a change removes."""
    knobs = (OFFLOAD_OPTIMIZER.name, OFFLOAD_PARAM.name)
    ends = any(now.get(knob) for knob in knobs) and not any(then.get(knob) for knob in knobs)
    return (reading.offload_ratio or 0.0) if ends else 0.0


def _hidden(
    now: Configuration, then: Configuration, facts: JobFacts, reading: MetricsDelta, moving: float
) -> float:
    """Return the share of time that asynchronous reduction will hide behind backward.

    Only ZeRO 2 hides any, because ZeRO 1 reduces after backward. The last bucket is never hidden.
    """
    knob = ASYNCHRONOUS_REDUCTION.name
    begins = then.get(knob) and not now.get(knob)
    if not begins or then.get(ZERO_STAGE.name) != 2:
        return 0.0
    buckets = math.ceil(facts.num_gradients / _number(then, REDUCE_BUCKET_SIZE, _STAGE_0_BUCKET))
    own = sum(each for phase, each in reading.own_exposed_ratios.items() if phase != "backward")
    waits = (reading.exposed_ratio or 0.0) + reading.own_transfer_ratio - own  # those in backward
    computing = reading.phase_ratios.get("backward", 0.0) - waits
    return min(moving, max(0.0, computing)) * (1 - 1 / buckets)


def _number(configuration: Configuration, knob: KnobSpec, default: int) -> int:
    value = configuration.get(knob.name)
    return value if isinstance(value, int) else default


def _quotient(after: float, before: float) -> float:
    return after / before if before else 1.0
