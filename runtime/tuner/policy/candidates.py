"""Which values of a knob to try next, and which other knobs have to change with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .registry import REDUCE_BUCKET_SIZE, SPECS, ZERO_STAGE, KnobSpec, Trigger
from .types import Configuration, JobFacts, Value


def candidate_values(
    spec: KnobSpec,
    trigger: Trigger,
    configuration: Configuration,
    options: Sequence[Value],
    facts: JobFacts,
    samples_per_rank: int,
) -> list[Value]:
    """Return the values of a knob to try against a symptom, the most promising first.

    Args:
        spec: The knob.
        trigger: Direction, or values, that the symptom asks for.
        configuration: The complete configuration in use.
        options: Possible values of the knob in this job.
        facts: Properties of the job.
        samples_per_rank: Samples of one rank in a window.
    """
    now = configuration[spec.name]
    if isinstance(trigger, tuple):
        return [value for value in trigger if value != now]
    numbers = sorted(value for value in options if isinstance(value, int))
    if not isinstance(now, int):
        return []
    limit = spec.saturation_size(facts)
    up = [] if trigger == "down" else _larger(spec, now, numbers, limit, samples_per_rank)
    down = [] if trigger == "up" else _smaller(spec, now, numbers, limit)
    if trigger == "down" and spec.buffer_is_preallocated and now > limit:
        # The smallest buffer that still holds everything frees memory at no cost in time.
        down = [*[number for number in reversed(numbers) if number <= limit][:1]]
    return [*up, *down]


def with_partners(configuration: Configuration, changes: Configuration) -> dict[str, Value]:
    """Return changes with those of other knobs that they need.

    Knobs without effect in the resulting configuration are switched off.
    """
    result = dict(changes)
    for name, value in changes.items():
        stage = SPECS[name].brings_zero_stage
        if value and stage is not None and configuration.get(ZERO_STAGE.name) in range(stage):
            result[ZERO_STAGE.name] = stage
    target = {**configuration, **result}
    useless = {name: False for name, value in target.items() if value and _is_useless(name, target)}
    return {**result, **useless}


def in_several_buckets(
    configuration: Configuration, changes: Configuration, options: Sequence[Value], facts: JobFacts
) -> dict[str, Value]:
    """Return changes with a smaller bucket where they need several buckets to have an effect.

    Args:
        configuration: The complete configuration in use.
        changes: Change of one knob, and of those that it needs.
        options: Possible bucket sizes in this job.
        facts: Properties of the job.
    """
    bucket, limit = configuration.get(REDUCE_BUCKET_SIZE.name), facts.num_gradients
    needs_several = any(
        value and SPECS[name].needs_several_buckets for name, value in changes.items()
    )
    if not needs_several or not isinstance(bucket, int) or bucket <= limit / 2:
        return dict(changes)
    largest = limit / REDUCE_BUCKET_SIZE.step_factor
    smaller = [size for size in options if isinstance(size, int) and size <= largest]
    return {**changes, REDUCE_BUCKET_SIZE.name: max(smaller)} if smaller else dict(changes)


def _is_useless(name: str, target: Configuration) -> bool:
    spec = SPECS[name]
    if spec.excluded_by is not None and target.get(spec.excluded_by):
        return True
    return spec.zero_stages is not None and target.get(ZERO_STAGE.name) not in spec.zero_stages


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
    """Return the largest size first; of sizes with equal numbers of micro-batches the smallest."""
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
