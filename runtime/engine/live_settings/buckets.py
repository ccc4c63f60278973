"""How ZeRO reduces its buckets of gradients: by which collective, from which buffers and stream."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ...common.deepspeed_internals import PARAMETER_OFFLOAD, ZERO_1_AND_2, ZERO_3, attribute
from ...common.deepspeed_internals_live_settings import missing
from ...common.undo import Undo, chain, set_attributes
from .knob import Knob, Value
from .reduce_bucket import element_bytes, num_buffers, resize_buffers
from .zero_optimizer import coordinator, of_stage_3, of_stages_1_and_2

NOT_PARTITIONED = "this stage reduces whole gradients at once"
_ALLGATHER_STREAM = attribute(PARAMETER_OFFLOAD, "__allgather_stream")
_FETCH_STREAM = "_PartitionedParameterCoordinator__allgather_stream"
_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32)


def _scatter_refusal(engine: Any) -> str | None:
    """What DeepSpeed checks as it starts, for reduce_scatter on; it may be off at any time."""
    zero_1_2, zero_3 = of_stages_1_and_2(engine), of_stage_3(engine)
    zero = zero_1_2 or zero_3
    if zero is None:
        return NOT_PARTITIONED
    names = ("reduce_scatter", "gradient_predivide_factor", "postscale_gradients")
    gone = missing(zero, ZERO_1_AND_2 if zero_1_2 is not None else ZERO_3, *names)
    if gone is not None:
        return gone
    if zero.gradient_predivide_factor != 1.0 or not zero.postscale_gradients:
        return "it cannot go with gradient_predivide_factor or prescale_gradients"
    if not set(zero.ipg_buckets) <= set(_REDUCIBLE):
        return f"gradients are reduced as {', '.join(map(str, zero.ipg_buckets))}"
    if zero_3 is not None and not zero_3.contiguous_gradients:
        return "without contiguous gradients stage 3 always scatters"
    if zero_3 is not None and (zero.use_muon or zero.all2all_process_group is not None):
        return "Muon and quantised gradients need it as it is"
    return None


def _multi_rank_refusal(engine: Any) -> str | None:
    zero = of_stages_1_and_2(engine)
    if zero is None:
        return "only stages 1 and 2 choose between one all-reduce and a reduce for each owner"
    gone = missing(zero, ZERO_1_AND_2, "use_multi_rank_bucket_allreduce")
    return gone or (None if zero.reduce_scatter else "reduce_scatter is off: all is all-reduced")


def _contiguous_refusal(engine: Any) -> str | None:
    zero_1_2, zero_3 = of_stages_1_and_2(engine), of_stage_3(engine)
    if zero_1_2 is None and zero_3 is None:
        return NOT_PARTITIONED
    if zero_3 is not None:
        return missing(zero_3, ZERO_3, "contiguous_gradients", "ipg_buckets")
    names = ("contiguous_gradients", "_release_ipg_buffers", "_grad_acc_hooks", "cpu_offload")
    gone = missing(zero_1_2, ZERO_1_AND_2, *names)
    if gone is None and zero_1_2 is not None and zero_1_2.cpu_offload:
        return "an optimizer on the host needs contiguous gradients"
    return gone or _without_hooks(zero_1_2)


def _without_hooks(zero_1_2: Any) -> str | None:
    if zero_1_2._grad_acc_hooks:
        return None
    return "the engine was made without the hooks on gradients that fill the buckets"


def _change_contiguous(engine: Any, value: Value) -> Undo:
    zero_1_2, zero_3 = of_stages_1_and_2(engine), of_stage_3(engine)
    if zero_1_2 is not None:
        zero_1_2._release_ipg_buffers()
        return set_attributes(zero_1_2, contiguous_gradients=value)
    undo_flag = set_attributes(zero_3, contiguous_gradients=value)
    size = engine.optimizer.reduce_bucket_size if value else None
    # The buffers come back once the flag is back, which says whether there are any.
    return chain([resize_buffers(zero_3, size), undo_flag])


def _contiguous_holds(engine: Any, value: Value) -> bool:
    zero_3 = of_stage_3(engine)
    if zero_3 is None:
        return True
    return all((bucket.buffer is not None) == value for bucket in zero_3.ipg_buckets.values())


def _contiguous_memory(engine: Any, value: Value) -> int | None:
    zero = engine.optimizer
    if value == zero.contiguous_gradients:
        return 0
    if of_stages_1_and_2(engine) is not None:
        return None  # what is flattened instead depends on the order in which gradients come
    kinds: list[torch.dtype] = list(zero.ipg_buckets)
    size = int(zero.reduce_bucket_size) * sum(kind.itemsize for kind in kinds)
    return size if value else -size


def _overlap_refusal(engine: Any) -> str | None:
    zero_1_2, zero_3 = of_stages_1_and_2(engine), of_stage_3(engine)
    if zero_3 is not None:
        return _overlap_3_refusal(engine, zero_3)
    if zero_1_2 is None:
        return NOT_PARTITIONED
    gone = missing(zero_1_2, ZERO_1_AND_2, "overlap_comm", "_grad_acc_hooks", "partition_gradients")
    if gone is not None:
        return gone
    if not zero_1_2.partition_gradients and not engine.managed_gradient_accumulation():
        return "stage 1 reduces within step() when the accumulation window is not DeepSpeed's"
    return _without_hooks(zero_1_2)


def _overlap_3_refusal(engine: Any, zero_3: Any) -> str | None:
    if get_accelerator().is_synchronized_device():
        return "this device has no streams, and stage 3 overlaps by streams alone"
    gone = missing(zero_3, ZERO_3, "reduce_and_partition_stream", "parameter_offload")
    if gone is not None:
        return gone
    return missing(zero_3.parameter_offload, PARAMETER_OFFLOAD, "__allgather_stream")


def _get_overlap(engine: Any) -> bool:
    zero_3 = of_stage_3(engine)
    if zero_3 is None:
        return bool(engine.optimizer.overlap_comm)
    return bool(zero_3.reduce_and_partition_stream != get_accelerator().default_stream())


def _change_overlap(engine: Any, value: Value) -> Undo:
    zero_3 = of_stage_3(engine)
    if zero_3 is None:
        return set_attributes(engine.optimizer, overlap_comm=value)
    accelerator = get_accelerator()
    reducing = accelerator.Stream() if value else accelerator.default_stream()
    fetching = accelerator.Stream() if value else accelerator.default_stream()
    return chain(
        [
            set_attributes(zero_3, reduce_and_partition_stream=reducing),
            set_attributes(zero_3.parameter_offload, **{_ALLGATHER_STREAM: fetching}),
            set_attributes(coordinator(zero_3), **{_FETCH_STREAM: fetching}),
        ]
    )


def _overlap_memory(engine: Any, value: Value) -> int | None:
    zero = engine.optimizer
    if of_stage_3(engine) is not None or value == zero.overlap_comm:
        return 0 if value == _get_overlap(engine) else None
    one = element_bytes(zero)
    change = (2 if value else 1) - num_buffers(zero)
    return None if one is None else change * one * int(zero.reduce_bucket_size)


def _always(_: Any, __: Value) -> bool:
    return True


REDUCE_SCATTER = Knob(
    name="reduce_scatter",
    least=None,
    exact=False,
    refusal=_scatter_refusal,
    get=lambda engine: bool(engine.optimizer.reduce_scatter),
    change=lambda engine, value: set_attributes(engine.optimizer, reduce_scatter=value),
    holds=_always,
)
MULTI_RANK_BUCKET_ALLREDUCE = Knob(
    name="use_multi_rank_bucket_allreduce",
    least=None,
    exact=False,
    refusal=_multi_rank_refusal,
    get=lambda engine: bool(engine.optimizer.use_multi_rank_bucket_allreduce),
    change=lambda engine, value: set_attributes(
        engine.optimizer, use_multi_rank_bucket_allreduce=value
    ),
    holds=_always,
)
CONTIGUOUS_GRADIENTS = Knob(
    name="contiguous_gradients",
    least=None,
    exact=False,
    refusal=_contiguous_refusal,
    get=lambda engine: bool(engine.optimizer.contiguous_gradients),
    change=_change_contiguous,
    holds=_contiguous_holds,
    memory=_contiguous_memory,
)
OVERLAP_COMM = Knob(
    name="overlap_comm",
    least=None,
    exact=True,
    refusal=_overlap_refusal,
    get=_get_overlap,
    change=_change_overlap,
    holds=_always,
    memory=_overlap_memory,
)
