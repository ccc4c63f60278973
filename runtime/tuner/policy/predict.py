"""What a configuration puts on the wire in closed form, and what a change of it may gain. Pure.

Bytes and calls follow DeepSpeed 0.19.8 with rings, as runtime/estimator works them out to the
byte from a model's shape; here only sizes are known, enough to choose what to try first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .metrics_delta import MetricsDelta
from .numerics import JobFacts
from .types import Configuration

_ENGINE_BUCKET = 500_000_000  # elements; what stage 0 takes, whatever the configuration says
_SEGMENT_BYTES = 1 << 20  # gloo cuts a reduce into pieces of this
# Compressed, a value takes its code, and in blocks of 256 an fp32 scale.
_CODE_BYTES = {"bf16": 2.0, "fp16": 2 + 4 / 256, "int8": 1 + 4 / 256, "fp8": 1 + 4 / 256}
_PIECE_VALUES = 256 * 1024  # of a rank's values that the codec sends in one message over gloo


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in a step."""

    wire_bytes: float
    calls: float


def predicted_gain(
    now: Configuration,
    then: Configuration,
    facts: JobFacts,
    samples_per_rank: int,
    reading: MetricsDelta,
) -> float | None:
    """Return what a change gains of throughput; None where the reading or a stage is not known.

    Waiting for bandwidth and redundancy grows with the bytes, waiting for latency with the calls;
    the rest stays, so what a codec costs the host is not in it. Where bytes grow, those that were
    hidden may show: they are taken to.

    Args:
        now: The whole configuration that the reading is of.
        then: The whole other one.
        facts: Of the job.
        samples_per_rank: Of a window, at present.
        reading: Whose figures of communication can be believed.
    """
    grown = _batch(then) / _batch(now)
    before = traffic_of(now, facts, samples_per_rank)
    after = traffic_of(then, facts, round(samples_per_rank * grown))
    offloading = _offloading(now, then, reading)
    causes = reading.cause_ratios
    if before is None or after is None or not (causes or offloading):
        return None
    moving = causes.get("bandwidth", 0.0) + causes.get("redundancy", 0.0)
    latency = causes.get("latency", 0.0)
    bytes_ratio = _quotient(after.wire_bytes, before.wire_bytes)
    moved = moving * min(bytes_ratio, 1.0)
    if bytes_ratio > 1:
        moved = moving + (bytes_ratio - 1) * max(moving, reading.comm_ratio or 0.0)
    moved -= _hidden(now, then, facts, reading, moved)
    called = latency * _quotient(after.calls, before.calls)
    rest = max(0.0, 1.0 - moving - latency - offloading)
    return grown / max(rest * grown + moved + called, 1e-3) - 1


def traffic_of(
    configuration: Configuration, facts: JobFacts, samples_per_rank: int
) -> Traffic | None:
    """Return what a step of so many samples sends; None where the configuration lacks a stage."""
    stage = configuration.get("zero_stage")
    if stage is None:
        return None
    step = _StepTraffic(configuration=configuration, facts=facts)
    parts = list(step.parts(int(stage), num_micro_batches(configuration, samples_per_rank)))
    return Traffic(
        wire_bytes=sum(part.wire_bytes for part in parts), calls=sum(part.calls for part in parts)
    )


def num_micro_batches(configuration: Configuration, samples_per_rank: int) -> int:
    """Return in how many pieces a window of so many samples is cut."""
    size = _number(configuration, "micro_batch_samples", samples_per_rank)
    return max(1, math.ceil(samples_per_rank / max(1, size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTraffic:
    configuration: Configuration
    facts: JobFacts

    @property
    def share(self) -> float:
        return (self.facts.world_size - 1) / self.facts.world_size

    @property
    def gradients(self) -> float:
        """Elements of all gradients."""
        return self.facts.num_gradients

    @property
    def bucket(self) -> int:
        return max(1, _number(self.configuration, "reduce_bucket_size", _ENGINE_BUCKET))

    def parts(self, stage: int, micro_batches: int) -> Iterator[Traffic]:
        """Yield what is sent for gradients, for parameters, and to clip and to skip."""
        yield Traffic(wire_bytes=0.0, calls=1)  # the gradients' norm
        if stage == 0:
            yield self._summed_for_all(_ENGINE_BUCKET)
            return
        reductions = micro_batches if stage > 1 else 1
        reduction = self._scattered() if stage == 3 else self._to_owners()
        yield Traffic(
            wire_bytes=reductions * reduction.wire_bytes, calls=reductions * reduction.calls
        )
        gathered = self.share * self.facts.parameter_bytes
        if stage < 3:
            yield Traffic(wire_bytes=gathered, calls=1)
            return
        passes = micro_batches * self._gathers()
        yield Traffic(wire_bytes=passes * gathered, calls=passes * self._fetches())

    def _to_owners(self) -> Traffic:
        """Return one reduction of all gradients by ZeRO 1 or 2."""
        ranks, scatters = self.facts.world_size, self._is_on("reduce_scatter")
        together = self._is_on("use_multi_rank_bucket_allreduce")
        if self._code_bytes() is not None:
            # A bucket goes straight to its owners where no rank owns most of it.
            spread = together and self.bucket >= self.gradients / 2
            straight = scatters and (ranks == 2 or spread)
            return self._compressed(self.bucket, shots=1 if straight else 2)
        if together or not scatters:
            return self._summed_for_all(self.bucket)
        calls = math.ceil(self.gradients / self.bucket) + ranks - 1
        payload = self.facts.gradient_bytes
        return Traffic(wire_bytes=payload * self._reduce_factor(payload / calls), calls=calls)

    def _scattered(self) -> Traffic:
        """Return one reduction of all gradients by ZeRO 3."""
        if self._code_bytes() is not None:
            return self._compressed(self.bucket, shots=1)
        scatters = self._is_on("reduce_scatter") and self.facts.backend != "gloo"
        whole = self._summed_for_all(self.bucket)
        return Traffic(wire_bytes=whole.wire_bytes / (1 + scatters), calls=whole.calls)

    def _summed_for_all(self, bucket: int) -> Traffic:
        if self._code_bytes() is not None:
            return self._compressed(bucket, shots=2)
        return Traffic(
            wire_bytes=2 * self.share * self.facts.gradient_bytes,
            calls=math.ceil(self.gradients / bucket),
        )

    def _compressed(self, bucket: int, shots: int) -> Traffic:
        pieces = 1
        if self.facts.backend == "gloo":
            own = min(bucket, self.gradients) / self.facts.world_size
            pieces = math.ceil(own / _PIECE_VALUES)
        return Traffic(
            wire_bytes=shots * self.share * self.gradients * (self._code_bytes() or 0.0),
            calls=shots * pieces * math.ceil(self.gradients / bucket),
        )

    def _gathers(self) -> float:
        """Return how often a micro-batch of ZeRO 3 gathers all parameters.

        Once in forward and once in backward, but for those that backward uses again so soon that
        they stay: the last of forward are the first of backward.
        """
        distance = _number(self.configuration, "max_reuse_distance", 1_000_000_000)
        return 2 - min(1.0, distance / max(1.0, 2 * self.facts.num_parameters))

    def _fetches(self) -> int:
        """Return into how many calls one gathering of all parameters is cut, at least."""
        ahead = max(1, _number(self.configuration, "prefetch_bucket_size", 50_000_000))
        return min(self.facts.num_tensors, math.ceil(self.facts.num_parameters / ahead))

    def _reduce_factor(self, payload_bytes: float) -> float:
        """Return bytes on the wire over payload of a reduce to one rank, on average over ranks."""
        ranks = self.facts.world_size
        if self.facts.backend != "gloo":
            return self.share
        # gloo/reduce.cc: all but two segments go round the ring, then each part to the root.
        needed = max(math.ceil(payload_bytes / _SEGMENT_BYTES), 2 * ranks)
        segments = math.ceil(needed / ranks) * ranks
        return 1 - 2 / segments + (ranks - 1) / ranks**2

    def _code_bytes(self) -> float | None:
        return _CODE_BYTES.get(str(self.configuration.get("gradient_compression")))

    def _is_on(self, knob: str) -> bool:
        return bool(self.configuration.get(knob, True))


def _offloading(now: Configuration, then: Configuration, reading: MetricsDelta) -> float:
    """Return the share of time in offloading that a change does away with."""
    knobs = ("offload_optimizer", "offload_param")
    ends = any(now.get(knob) for knob in knobs) and not any(then.get(knob) for knob in knobs)
    return (reading.offload_ratio or 0.0) if ends else 0.0


def _hidden(
    now: Configuration, then: Configuration, facts: JobFacts, reading: MetricsDelta, moved: float
) -> float:
    """Return the share of time for which bytes will travel while backward computes.

    At ZeRO 2; ZeRO 1 reduces after backward. The last bucket has nothing to hide behind.
    """
    begins = then.get("asynchronous_reduction") and not now.get("asynchronous_reduction")
    if not begins or then.get("zero_stage") != 2:
        return 0.0
    buckets = math.ceil(facts.num_gradients / _number(then, "reduce_bucket_size", _ENGINE_BUCKET))
    computing = reading.phase_ratios.get("backward", 0.0) - (reading.exposed_ratio or 0.0)
    return min(moved, max(0.0, computing)) * (1 - 1 / buckets)


def _batch(configuration: Configuration) -> int:
    return _number(configuration, "batch_samples", 1)


def _number(configuration: Configuration, knob: str, default: int) -> int:
    value = configuration.get(knob)
    return value if isinstance(value, int) else default


def _quotient(after: float, before: float) -> float:
    return after / before if before else 1.0
