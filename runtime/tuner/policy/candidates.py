"""Which values of a knob to try next, and what has to change along with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .numerics import JobFacts
from .registry import Trigger
from .types import Configuration, Value

STEP = 4  # of sizes; half of it moves the time of a step by less than a trial can tell
_BATCH_STEP = 2


def candidate_values(
    knob: str,
    trigger: Trigger,
    configuration: Configuration,
    options: Sequence[Value],
    facts: JobFacts,
    samples_per_rank: int,
) -> list[Value]:
    """Return the values of a knob that a symptom wants, the most promising first.

    Args:
        knob: Its name.
        trigger: What the symptom wants of it.
        configuration: The whole one in use.
        options: What the knob could be set to here.
        facts: Of the job.
        samples_per_rank: Of a window.
    """
    now = configuration[knob]
    if isinstance(trigger, tuple):
        return [value for value in trigger if value != now]
    numbers = sorted(value for value in options if isinstance(value, int))
    if not isinstance(now, int):
        return []
    most = _saturation(knob, facts)
    up = [] if trigger == "down" else _larger(knob, now, numbers, most, samples_per_rank)
    down = [] if trigger == "up" else _smaller(knob, now, numbers, most)
    if trigger == "down" and knob == "reduce_bucket_size" and now > most:
        # It is reserved whole, so one that just holds all gradients gives back without a price.
        down = [*[number for number in reversed(numbers) if number <= most][:1]]
    return [*up, *down]


def with_partners(configuration: Configuration, changes: Configuration) -> dict[str, Value]:
    """Return changes with those added without which they make no sense.

    One that makes none at the stage that it leads to is turned off itself.
    """
    whole = dict(changes)
    if changes.get("offload_param") and configuration.get("zero_stage") in (0, 1, 2):
        whole["zero_stage"] = 3
    target = {**configuration, **whole}
    stage = target.get("zero_stage")
    off = {
        "offload_param": stage != 3,
        "offload_optimizer": stage == 0,
        "asynchronous_reduction": stage not in (1, 2),
        "optimizer_sleep": stage == 0 or bool(target.get("offload_optimizer")),
    }
    return {**whole, **{knob: False for knob, ends in off.items() if ends and target.get(knob)}}


def in_several_buckets(
    configuration: Configuration, changes: Configuration, options: Sequence[Value], facts: JobFacts
) -> dict[str, Value]:
    """Return changes with a smaller bucket, where they need several to overlap anything.

    What is reduced in one bucket leaves when backward has ended.

    Args:
        configuration: The whole one in use.
        changes: Of one knob.
        options: What the bucket could be set to here.
        facts: Of the job.
    """
    bucket, most = configuration.get("reduce_bucket_size"), facts.num_gradients
    overlaps = changes.get("asynchronous_reduction") or changes.get("overlap_comm")
    if not overlaps or not isinstance(bucket, int) or bucket <= most / 2:
        return dict(changes)
    smaller = [size for size in options if isinstance(size, int) and size <= most / STEP]
    return {**changes, "reduce_bucket_size": max(smaller)} if smaller else dict(changes)


def _larger(
    knob: str, now: int, numbers: Sequence[int], most: float, samples_per_rank: int
) -> list[Value]:
    larger = [number for number in numbers if number > now]
    if knob == "micro_batch_samples":
        return [*_fewer_micro_batches(now, larger, samples_per_rank)]
    if knob == "zero_stage":
        return [*larger]
    if not larger or now >= most:
        return []
    step = _BATCH_STEP if knob == "batch_samples" else STEP
    target = min(step * now, most)
    return [next((number for number in larger if number >= target), larger[-1])]


def _fewer_micro_batches(now: int, larger: Sequence[int], samples: int) -> list[int]:
    """Return the largest micro-batch first; of those that make as many pieces, the smallest."""
    best: dict[int, int] = {}
    for size in larger:
        best.setdefault(math.ceil(samples / size), size)
    pieces_now = math.ceil(samples / now)
    return [size for pieces, size in sorted(best.items()) if pieces < pieces_now]


def _smaller(knob: str, now: int, numbers: Sequence[int], most: float) -> list[Value]:
    smaller = [number for number in reversed(numbers) if number < now]
    if knob == "zero_stage":
        return [*smaller]
    target = now / 2 if knob == "micro_batch_samples" else min(now, most) / STEP
    enough = [number for number in smaller if number <= target] or smaller[:1]
    return [*enough] if knob == "micro_batch_samples" else [*enough[:1]]


def _saturation(knob: str, facts: JobFacts) -> float:
    """Return the size above which a larger one is the same."""
    parameters = facts.num_parameters
    return {
        "reduce_bucket_size": facts.num_gradients,
        "max_reuse_distance": 2 * parameters,
        "prefetch_bucket_size": parameters,
        "max_live_parameters": parameters,
        "param_persistence_threshold": parameters,
    }.get(knob, math.inf)
