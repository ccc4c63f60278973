"""What gives memory back when even a micro-batch of one sample does not fit, cheapest first.

After the last rung there is only another engine: a higher stage, or offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...common.undo import Undo, chain
from . import activation_checkpointing, optimizer_state_offload
from .choose_modules import ModuleSelector
from .knob import Knob
from .prefetch import (
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PARAM_PERSISTENCE_THRESHOLD,
    PREFETCH_BUCKET_SIZE,
)
from .reduce_bucket import REDUCE_BUCKET_SIZE
from .zero_optimizer import num_elements

# ZeRO 3 gathers each module's parameters when it runs, and lets them go after it.
LEAST_FETCHING: Mapping[Knob, int] = {
    PREFETCH_BUCKET_SIZE: 0,
    MAX_LIVE_PARAMETERS: 0,
    MAX_REUSE_DISTANCE: 0,
    PARAM_PERSISTENCE_THRESHOLD: 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaving:
    """One thing to do about too little memory; the ranks take it all or none.

    Attributes:
        name: For reports.
        unavailable: Why it would give nothing back on this engine; None where it might.
        apply: Does it between two windows, and returns what takes it back.
    """

    name: str
    unavailable: Callable[[Any], str | None]
    apply: Callable[[Any], Undo]


def memory_savings(chosen: ModuleSelector = None) -> tuple[MemorySaving, ...]:
    """Return the rungs in the order in which they are tried.

    Args:
        chosen: What activation checkpointing is to wrap, as in `activation_checkpointing.apply`.
    """
    return (
        MemorySaving(
            name="activation checkpointing on",
            unavailable=partial(activation_checkpointing.unavailable, chosen=chosen),
            apply=partial(activation_checkpointing.apply, chosen=chosen),
        ),
        MemorySaving(
            name="smaller buckets and less prefetching",
            unavailable=_all_is_least,
            apply=_minimise_buckets,
        ),
        MemorySaving(
            name="optimizer states asleep on the host",
            unavailable=optimizer_state_offload.unavailable,
            apply=optimizer_state_offload.apply,
        ),
    )


def _least_bucket(engine: Any) -> int:
    """A gradient larger than the bucket is reduced by itself, so a smaller one saves little."""
    return max((num_elements(each) for each in engine.module.parameters()), default=1)


def _to_lower(engine: Any) -> list[tuple[Knob, int]]:
    """Return the knobs that are not at their least, and that least."""
    fetching = [
        (knob, least)
        for knob, least in LEAST_FETCHING.items()
        if knob.unavailable(engine) is None and knob.get(engine) > least
    ]
    bucket = _least_bucket(engine)
    saved = REDUCE_BUCKET_SIZE.memory_bytes(engine, bucket)
    return [*([(REDUCE_BUCKET_SIZE, bucket)] if saved and saved < 0 else []), *fetching]


def _all_is_least(engine: Any) -> str | None:
    return None if _to_lower(engine) else "each is at its least already"


def _minimise_buckets(engine: Any) -> Undo:
    return chain([knob.apply(engine, least) for knob, least in _to_lower(engine)])
