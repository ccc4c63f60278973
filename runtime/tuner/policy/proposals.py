"""Proposes which changes to try against the symptoms, and in which order. Pure.

A change is not proposed if the numerics setting forbids it, if it cannot be set in this job, or if
it was rejected in this context before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....metrics.thresholds import OOM_RISK_HIGH
from .diagnose import (
    COMM_SYMPTOMS,
    DEFAULT_THRESHOLDS,
    MEMORY_IDLE,
    MEMORY_PRESSURE,
    Thresholds,
    exposed_ratio,
)
from .knob_registry import (
    GRADIENT_COMPRESSION,
    KNOBS,
    REDUCE_BUCKET_SIZE,
    SPECS,
    ZERO_STAGE,
    KnobSpec,
    Trigger,
    required_numerics,
)
from .metrics_delta import MetricsDelta
from .policy_types import Configuration, JobFacts, Numerics, Proposal, Symptom, Value
from .predict import predicted_gain

MIN_PREDICTED_GAIN = 0.01  # a trial cannot distinguish a smaller gain from noise
MIN_PREDICTED_REBUILD_GAIN = 0.05  # a rebuild takes time and memory, and may fail
_REBUILD_FACTOR = 1.15  # predicted speed that a rebuild must have, relative to a live change
_EQUAL_GAINS = 0.02  # predicted gains that differ by less than this rank equal
# A predicted loss that effects without a prediction, such as overlap, cannot make up for.
_CERTAIN_LOSS = -0.15
HISTORY_REASON = "the best configuration in this context before"
# Compression is dropped only if waiting stays below this share of the threshold of waiting, so that
# compression is not switched on and off repeatedly.
_HYSTERESIS = 0.5

Pause = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerInput:
    """The data that proposals are derived from; serialized as `inputs` in `decisions.jsonl`.

    Attributes:
        configuration: The complete configuration in use, known to work.
        options: Possible values of each knob in this job.
        facts: Properties of the job.
        numerics: Strictness of numerics that the user allows.
        allows_rebuild: Whether the engine may be rebuilt.
        symptoms: The diagnosis, most urgent first.
        reading: The metrics that the diagnosis is made from.
        samples_per_rank: Samples of one rank in a window.
        excluded: Knobs with values that did not help in this context. This includes values that
            were in use before a better value was found.
        remembered: The complete configuration that was best in this context; None if unknown.
        thresholds: Thresholds of the diagnosis.
        context: Name of the context; "" if unknown.
    """

    configuration: Configuration
    options: Mapping[str, Sequence[Value]]
    facts: JobFacts
    numerics: Numerics
    allows_rebuild: bool
    symptoms: Sequence[Symptom]
    reading: MetricsDelta
    samples_per_rank: int
    excluded: Collection[tuple[str, Value]] = ()
    remembered: Configuration | None = None
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    context: str = ""

    def symptom(self, name: str) -> Symptom | None:
        """Return the symptom of that name, if it was found."""
        return next((one for one in self.symptoms if one.name == name), None)

    @property
    def is_memory_short(self) -> bool:
        """Whether memory is likely to run out, so that nothing but memory savings is proposed."""
        return is_memory_short(self.symptoms)


def is_memory_short(symptoms: Sequence[Symptom]) -> bool:
    """Whether memory is likely to run out. A low headroom alone does not make this likely."""
    return any(one.name == MEMORY_PRESSURE and one.ratio >= OOM_RISK_HIGH for one in symptoms)


def propose(inputs: TunerInput, pause: Pause = lambda: None) -> list[Proposal]:
    """Return the changes to try, the most promising first.

    If memory is likely to run out, these are only changes that free memory, one per knob. They need
    not make training faster. Otherwise, the result has the best configuration of the history,
    changes with a predicted gain, changes that only a trial can judge, and the undoing of measures
    that are no longer needed. If little memory is left, changes that free memory come first, and
    changes that need more are left out.

    Args:
        inputs: What is known of the job.
        pause: Called after each value that was judged, which takes some tenths of a millisecond.
    """
    pressure = inputs.symptom(MEMORY_PRESSURE)
    savings = []
    if pressure is not None:
        savings = _first_per_knob(_for_symptom(inputs, pressure, pause))
    if inputs.is_memory_short:
        return savings
    proposals: list[Proposal] = []
    for symptom in _actionable_symptoms(inputs):
        proposals += _worth_trying(_for_symptom(inputs, symptom, pause))
    faster = [*_from_history(inputs), *sorted(proposals, key=_priority)]
    others = [*faster, *relaxations(inputs, pause)]
    if pressure is not None:
        others = [one for one in others if not _needs_memory(inputs, one)]
        by_changes = {_changes_of(one): one for one in reversed(others)}
        savings = [by_changes.get(_changes_of(one), one) for one in savings]  # worth a trial
    return _dedupe([*savings, *others])


def relaxations(inputs: TunerInput, pause: Pause = lambda: None) -> list[Proposal]:
    """Return proposals to undo costly changes whose reason is gone, or to use idle memory."""
    return [*_drop_compression(inputs), *_spend_memory(inputs, pause)]


def _actionable_symptoms(inputs: TunerInput) -> Iterator[Symptom]:
    """Yield the symptoms to act on, except memory pressure.

    Idle memory is one of them only if there is another symptom.
    """
    symptoms = [one for one in inputs.symptoms if one.name != MEMORY_PRESSURE]
    others = [one for one in symptoms if one.name != MEMORY_IDLE]
    return iter(symptoms if others else ())


def _needs_memory(inputs: TunerInput, proposal: Proposal) -> bool:
    """Whether a change, or one of its partners, needs more memory."""
    now = inputs.configuration
    return any(
        SPECS[knob].needs_memory(now.get(knob), value) for knob, value in proposal.changes.items()
    )


def _for_symptom(inputs: TunerInput, symptom: Symptom, pause: Pause) -> Iterator[Proposal]:
    """Yield the proposals that may help against a symptom, in the order of KNOBS."""
    for spec in KNOBS:
        trigger = spec.triggers.get(symptom.name)
        if trigger is None or spec.name not in inputs.configuration:
            continue
        if spec.device_only and inputs.reading.on_cpu:
            continue
        for value in _untried_values(inputs, spec, trigger):
            changes = _in_several_buckets(inputs, {spec.name: value})
            proposal = _proposal(inputs, changes, symptom, spec.description)
            pause()
            if proposal is not None:
                yield proposal


def _from_history(inputs: TunerInput) -> Iterator[Proposal]:
    """Yield the change to the best configuration of this context, as one proposal.

    This configuration was measured before. If the change does not need a rebuild, it is therefore
    tried even if a loss is predicted.
    """
    changes = {
        knob: value
        for knob, value in (inputs.remembered or {}).items()
        if knob in inputs.configuration
        and value != inputs.configuration[knob]
        and value in inputs.options.get(knob, ())
    }
    if not changes:
        return
    others = (one for one in inputs.symptoms if one.name != MEMORY_PRESSURE)
    symptom = next(others, None) or _bandwidth_symptom(inputs)
    proposal = _proposal(inputs, changes, symptom, HISTORY_REASON)
    if proposal is None:
        return
    if proposal.apply_mode == "live":
        proposal = replace(proposal, predicted_gain=None)
    yield replace(proposal, relaxes=changes == {GRADIENT_COMPRESSION.name: None})


def _drop_compression(inputs: TunerInput) -> Iterator[Proposal]:
    """Yield uncompressed gradients, if waiting for them is predicted to stay short."""
    knob = GRADIENT_COMPRESSION.name
    waits = exposed_ratio(inputs.reading, inputs.thresholds)
    if waits is None or inputs.configuration.get(knob) is None:
        return
    if (knob, None) in inputs.excluded or None not in inputs.options.get(knob, ()):
        return
    symptom = _bandwidth_symptom(inputs)
    reason = f"waiting for communication takes {waits:.0%} of the time, no compression is needed"
    proposal = _proposal(inputs, {knob: None}, symptom, reason)
    if proposal is None or proposal.predicted_gain is None:
        return
    slowdown = 1 / (1 + proposal.predicted_gain)
    waits_then = (waits + slowdown - 1) / slowdown
    if waits_then <= _HYSTERESIS * inputs.thresholds.max_exposed_comm_ratio:
        yield replace(proposal, relaxes=True)


def _spend_memory(inputs: TunerInput, pause: Pause) -> Iterator[Proposal]:
    """Yield proposals that use more memory to save time."""
    idle = inputs.symptom(MEMORY_IDLE)
    if idle is not None and inputs.symptom(MEMORY_PRESSURE) is None:
        yield from _worth_trying(_for_symptom(inputs, idle, pause))


def _proposal(
    inputs: TunerInput, changes: Configuration, symptom: Symptom, reason: str
) -> Proposal | None:
    """Return a proposal with the partners of its changes; None if not possible or not allowed."""
    whole = _with_partners(inputs.configuration, changes)
    if any(whole[knob] != value for knob, value in changes.items()):
        return None
    options = inputs.options
    if any(
        value not in options.get(knob, ()) or not SPECS[knob].has(value)
        for knob, value in whole.items()
    ):
        return None
    numerics = _required_numerics(inputs, whole)
    if numerics is None or numerics > inputs.numerics:
        return None
    rebuilds = any(SPECS[knob].apply_mode == "rebuild" for knob in whole)
    if rebuilds and not inputs.allows_rebuild:
        return None
    return Proposal(
        changes=whole,
        symptom=symptom,
        apply_mode="rebuild" if rebuilds else "live",
        numerics=numerics,
        predicted_gain=_gain(inputs, whole),
        reason=reason,
    )


def _required_numerics(inputs: TunerInput, changes: Configuration) -> Numerics | None:
    numerics = required_numerics(changes, inputs.facts)
    reorders_sums = any(SPECS[knob].reorders_sums for knob in changes)
    if numerics is None or not reorders_sums:
        return numerics
    if inputs.configuration.get(GRADIENT_COMPRESSION.name):
        # The bucket size decides which values are rounded together.
        return max(numerics, Numerics.REASSOCIATION)
    return numerics


def _untried_values(inputs: TunerInput, spec: KnobSpec, trigger: Trigger) -> list[Value]:
    values = _candidate_values(inputs, spec, trigger)
    return [value for value in values if (spec.name, value) not in inputs.excluded]


def _gain(inputs: TunerInput, changes: Configuration) -> float | None:
    """Return the predicted gain of a change, as far as it can be computed."""
    reading = inputs.reading
    if exposed_ratio(reading, inputs.thresholds) is None:
        reading = replace(reading, cause_ratios={})
    return predicted_gain(
        inputs.configuration,
        {**inputs.configuration, **changes},
        inputs.facts,
        inputs.samples_per_rank,
        reading,
    )


def _worth_trying(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals that are worth a trial. A small prediction is removed from a live proposal.

    Most knobs also have effects that are not predicted. A small prediction is therefore not a
    reason against a trial.
    """
    for proposal in proposals:
        gain = proposal.predicted_gain
        is_complete = any(SPECS[knob].fully_predicted for knob in proposal.changes)
        least = (
            MIN_PREDICTED_REBUILD_GAIN if proposal.apply_mode == "rebuild" else MIN_PREDICTED_GAIN
        )
        if gain is not None and gain >= least:
            yield proposal
        elif proposal.apply_mode == "rebuild" or (
            is_complete and gain is not None and proposal.symptom.name in COMM_SYMPTOMS
        ):
            continue
        elif gain is None or gain > _CERTAIN_LOSS:
            yield replace(proposal, predicted_gain=None)


def _priority(proposal: Proposal) -> tuple[float, bool, Numerics]:
    """Return the sort key: gain, then cost and safety.

    Proposals without a prediction keep the order of KNOBS.
    """
    gain = proposal.predicted_gain
    if gain is None:
        return 0.0, proposal.apply_mode == "rebuild", Numerics.BITWISE
    if proposal.apply_mode == "rebuild":
        gain = (1 + gain) / _REBUILD_FACTOR - 1
    return (
        -1.0 - math.floor(gain / _EQUAL_GAINS),
        proposal.apply_mode == "rebuild",
        proposal.numerics,
    )


def _dedupe(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Drop each proposal that makes the same changes as an earlier proposal."""
    firsts: dict[frozenset[tuple[str, Value]], Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(_changes_of(proposal), proposal)
    return [*firsts.values()]


def _changes_of(proposal: Proposal) -> frozenset[tuple[str, Value]]:
    return frozenset(proposal.changes.items())


def _first_per_knob(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Return the first proposal for each knob."""
    firsts: dict[str, Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(next(iter(proposal.changes)), proposal)
    return [*firsts.values()]


def _bandwidth_symptom(inputs: TunerInput) -> Symptom:
    """Return the share of waiting for bandwidth as a symptom, however small it is."""
    reading = inputs.reading
    waits = exposed_ratio(reading, inputs.thresholds)
    return Symptom(
        name="comm_bandwidth",
        ratio=reading.cause_ratios.get("bandwidth", 0.0),
        evidence={} if waits is None else {"comm_exposed_ratio": waits},
    )


def _candidate_values(inputs: TunerInput, spec: KnobSpec, trigger: Trigger) -> list[Value]:
    """Return the values of a knob to try against a symptom, the most promising first.

    Args:
        inputs: Configuration in use, and possible values.
        spec: The knob.
        trigger: Direction, or values, that the symptom asks for.
    """
    now = inputs.configuration[spec.name]
    if isinstance(trigger, tuple):
        return [value for value in trigger if value != now]
    options = inputs.options.get(spec.name, ())
    numbers = sorted(value for value in options if isinstance(value, int))
    if not isinstance(now, int):
        return []
    limit = spec.saturation_size(inputs.facts)
    up = [] if trigger == "down" else _larger(spec, now, numbers, limit, inputs.samples_per_rank)
    down = [] if trigger == "up" else _smaller(spec, now, numbers, limit)
    if trigger == "down" and spec.buffer_is_preallocated and now > limit:
        # The smallest buffer that still holds everything frees memory at no cost in time.
        down = [*[number for number in reversed(numbers) if number <= limit][:1]]
    return [*up, *down]


def _with_partners(configuration: Configuration, changes: Configuration) -> dict[str, Value]:
    """Return changes, and the changes of other knobs that they need.

    Knobs without effect in the resulting configuration are switched off.
    """
    result = dict(changes)
    for name, value in changes.items():
        stage = SPECS[name].brings_zero_stage
        if value and stage is not None and configuration.get(ZERO_STAGE.name) in range(stage):
            result[ZERO_STAGE.name] = stage
    target = {**configuration, **result}
    useless = {
        name: False for name, value in target.items() if value and SPECS[name].has_no_effect(target)
    }
    return {**result, **useless}


def _in_several_buckets(inputs: TunerInput, changes: Configuration) -> dict[str, Value]:
    """Return changes, with a smaller bucket if the changes need several buckets to have effect."""
    bucket = inputs.configuration.get(REDUCE_BUCKET_SIZE.name)
    limit = inputs.facts.num_gradients
    needs_several = any(
        value and SPECS[name].needs_several_buckets for name, value in changes.items()
    )
    if not needs_several or not isinstance(bucket, int) or bucket <= limit / 2:
        return dict(changes)
    largest = limit / REDUCE_BUCKET_SIZE.step_factor
    options = inputs.options.get(REDUCE_BUCKET_SIZE.name, ())
    smaller = [size for size in options if isinstance(size, int) and size <= largest]
    return {**changes, REDUCE_BUCKET_SIZE.name: max(smaller)} if smaller else dict(changes)


def _larger(
    spec: KnobSpec, now: int, numbers: Sequence[int], limit: float, samples_per_rank: int
) -> list[Value]:
    larger = [number for number in numbers if number > now]
    if spec.stepping == "micro_batches":
        return [*_fewer_micro_batches(now, larger, samples_per_rank)]
    if spec.stepping == "all":
        return [*larger]
    if not larger or now >= limit:
        return []
    target = min(spec.step_factor * now, limit)
    return [next((number for number in larger if number >= target), larger[-1])]


def _fewer_micro_batches(now: int, larger: Sequence[int], samples: int) -> list[int]:
    """Return one size for each number of micro-batches, the largest size first.

    If several sizes give the same number of micro-batches, the smallest of them is returned.
    """
    sizes: dict[int, int] = {}
    for size in larger:
        sizes.setdefault(math.ceil(samples / size), size)
    count_now = math.ceil(samples / now)
    return [size for count, size in sorted(sizes.items()) if count < count_now]


def _smaller(spec: KnobSpec, now: int, numbers: Sequence[int], limit: float) -> list[Value]:
    smaller = [number for number in reversed(numbers) if number < now]
    if spec.stepping == "all":
        return [*smaller]
    if spec.stepping == "micro_batches":
        return [*([number for number in smaller if number <= now / 2] or smaller[:1])]
    enough = [number for number in smaller if number <= min(now, limit) / spec.step_factor]
    return [*(enough or smaller)[:1]]
