"""The bucket in which gradients are reduced: its size, live, under every ZeRO stage.

Stages 1 and 2 make their buffers anew in each backward; stage 3 keeps one, which goes along.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...common.deepspeed_internals import ENGINE, ZERO_1_AND_2, ZERO_3
from ...common.deepspeed_internals_live_settings import missing
from ...common.undo import Undo, chain, set_attributes
from . import stage_0_bucket
from .knob import Knob, Value
from .zero_optimizer import of_stage_3, of_stages_1_and_2, total_elements


def _refusal(engine: Any) -> str | None:
    for place, optimizer in (
        (ZERO_1_AND_2, of_stages_1_and_2(engine)),
        (ZERO_3, of_stage_3(engine)),
    ):
        if optimizer is not None:
            return missing(optimizer, place, "reduce_bucket_size", "ipg_buckets")
    if getattr(engine, "pipeline_parallelism", False):
        return "a pipeline engine passes a size of its own with each call"
    return missing(engine, ENGINE, "allreduce_gradients")


def _has_setting(engine: Any) -> bool:
    return of_stages_1_and_2(engine) is not None or of_stage_3(engine) is not None


def _get(engine: Any) -> int:
    if _has_setting(engine):
        return int(engine.optimizer.reduce_bucket_size)
    return stage_0_bucket.get(engine)


def _change(engine: Any, value: Value) -> Undo:
    if not _has_setting(engine):
        return stage_0_bucket.change(engine, value)
    undo_size = set_attributes(engine.optimizer, reduce_bucket_size=value)
    if of_stage_3(engine) is None:
        return undo_size
    return chain([undo_size, resize_buffers(engine.optimizer, value)])


def resize_buffers(zero_3: Any, elements: int | None) -> Undo:
    """Give ZeRO 3's buckets buffers of another size, or none at all; frees the old ones first."""
    kept = {
        kind: None if bucket.buffer is None else bucket.buffer.numel()
        for kind, bucket in zero_3.ipg_buckets.items()
    }
    _make_buffers(zero_3, dict.fromkeys(kept, elements))
    reference = weakref.ref(zero_3)

    def undo() -> None:
        alive = reference()
        if alive is not None:
            _make_buffers(alive, kept)

    return undo


def _make_buffers(zero_3: Any, sizes: dict[torch.dtype, int | None]) -> None:
    device = get_accelerator().current_device_name()
    for kind, elements in sizes.items():
        zero_3.ipg_buckets[kind].buffer = None
        if elements is not None and zero_3.contiguous_gradients:
            zero_3.ipg_buckets[kind].buffer = torch.empty(elements, dtype=kind, device=device)


def _holds(engine: Any, value: Value) -> bool:
    zero_3 = of_stage_3(engine)
    if zero_3 is None or not zero_3.contiguous_gradients:
        return True
    buffers = [bucket.buffer for bucket in zero_3.ipg_buckets.values()]
    return all(buffer is not None and buffer.numel() == value for buffer in buffers)


def _memory(engine: Any, value: Value) -> int | None:
    if not _has_setting(engine):
        parameters = list(engine.module.parameters())
        flat = total_elements(parameters)
        itemsize = max((parameter.element_size() for parameter in parameters), default=0)
        return (min(value, flat) - min(_get(engine), flat)) * itemsize
    one = element_bytes(engine.optimizer)
    return None if one is None else (value - _get(engine)) * one * num_buffers(engine.optimizer)


def element_bytes(zero: Any) -> int | None:
    """Return what one element takes in all buckets' buffers; None if there are no buffers."""
    if not zero.contiguous_gradients:
        return None
    kinds: list[torch.dtype] = list(zero.ipg_buckets)
    if hasattr(zero, "_gradient_reduction_buffer_dtype"):  # stages 1 and 2
        kinds = [zero._gradient_reduction_buffer_dtype()] * len(kinds)
    return sum(kind.itemsize for kind in kinds)


def num_buffers(zero: Any) -> int:
    """Return the buffers of each bucket: with overlap, stages 1 and 2 fill one beside the other."""
    return 2 if getattr(zero, "overlap_comm", False) else 1


REDUCE_BUCKET_SIZE = Knob(
    name="reduce_bucket_size",
    least=1,
    exact=False,
    refusal=_refusal,
    get=_get,
    change=_change,
    holds=_holds,
    memory=_memory,
)
