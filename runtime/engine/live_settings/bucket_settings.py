"""Sets gradient reduction live, for every ZeRO stage: buckets, buffers, collective, stream.

Stages 1 and 2 allocate their buffers in each backward pass. Stage 3 keeps its buffers, so these are
resized. Stage 0 and BF16_Optimizer have no setting for the bucket size, only a default argument.
They copy up to 500 million elements of gradients to one flat buffer for an all-reduce, which can
double the memory of the gradients. `engine.allreduce_gradients` is wrapped to pass another size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

from ...common.deepspeed_internals import (
    ENGINE,
    PARAMETER_OFFLOAD,
    ZERO_1_AND_2,
    ZERO_3,
    attribute,
    missing_reason,
)
from ...common.patching import AttributePatch
from ...common.undo import FAILURES, Undo, UndoOnce, apply_all, chain, set_attributes
from .live_setting import LiveSetting, SettingValue
from .zero_optimizer import (
    largest_itemsize,
    param_coordinator,
    total_elements,
    zero_1_2_optimizer,
    zero_3_optimizer,
)

_NOT_PARTITIONED = "this stage reduces whole gradients at once"
_ALLGATHER_STREAM = attribute(PARAMETER_OFFLOAD, "__allgather_stream")
_COORDINATOR_STREAM = "_PartitionedParameterCoordinator__allgather_stream"
_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32)


class _ReduceBucketSize(LiveSetting):
    """Sets the number of gradient elements that are reduced in one collective."""

    name = "reduce_bucket_size"
    minimum = 1

    def _unsupported_reason(self, engine: Any) -> str | None:
        for place, optimizer in (
            (ZERO_1_AND_2, zero_1_2_optimizer(engine)),
            (ZERO_3, zero_3_optimizer(engine)),
        ):
            if optimizer is not None:
                return missing_reason(optimizer, place, "reduce_bucket_size", "ipg_buckets")
        if getattr(engine, "pipeline_parallelism", False):
            return "a pipeline engine passes its own bucket size with each call"
        return missing_reason(engine, ENGINE, "allreduce_gradients")

    def get(self, engine: Any) -> int:
        if _has_bucket_setting(engine):
            return int(engine.optimizer.reduce_bucket_size)
        return _whole_gradient_bucket_size(engine)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        if not _has_bucket_setting(engine):
            return _set_whole_gradient_bucket_size(engine, value)
        zero = engine.optimizer
        changes = [partial(set_attributes, zero, reduce_bucket_size=value)]
        if zero_3_optimizer(engine) is not None:
            changes.append(partial(_resize_buffers, zero, value))
        return apply_all(changes)

    def _is_consistent(self, engine: Any, value: SettingValue) -> bool:
        zero_3 = zero_3_optimizer(engine)
        if zero_3 is None or not zero_3.contiguous_gradients:
            return True
        buffers = [bucket.buffer for bucket in zero_3.ipg_buckets.values()]
        return all(buffer is not None and buffer.numel() == value for buffer in buffers)

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        if not _has_bucket_setting(engine):
            parameters = list(engine.module.parameters())
            total = total_elements(parameters)
            return (min(value, total) - min(self.get(engine), total)) * largest_itemsize(parameters)
        element_bytes = _element_bytes(engine.optimizer)
        if element_bytes is None:
            return None
        return (value - self.get(engine)) * element_bytes * _num_buffers(engine.optimizer)


class _ReduceScatter(LiveSetting):
    """Sets whether gradients are reduced to the ranks that own them, instead of all-reduced."""

    name = "reduce_scatter"

    def _unsupported_reason(self, engine: Any) -> str | None:
        """Return why reduce_scatter cannot be on; DeepSpeed makes the same checks at start-up."""
        zero_1_2, zero_3 = zero_1_2_optimizer(engine), zero_3_optimizer(engine)
        zero = zero_1_2 or zero_3
        if zero is None:
            return _NOT_PARTITIONED
        names = ("reduce_scatter", "gradient_predivide_factor", "postscale_gradients")
        missing = missing_reason(zero, ZERO_1_AND_2 if zero_1_2 is not None else ZERO_3, *names)
        if missing is not None:
            return missing
        if zero.gradient_predivide_factor != 1.0 or not zero.postscale_gradients:
            return "it is incompatible with gradient_predivide_factor and prescale_gradients"
        if not set(zero.ipg_buckets) <= set(_REDUCIBLE):
            return f"gradients are reduced as {', '.join(map(str, zero.ipg_buckets))}"
        if zero_3 is not None and not zero_3.contiguous_gradients:
            return "without contiguous gradients stage 3 always scatters"
        if zero_3 is not None and (zero.use_muon or zero.all2all_process_group is not None):
            return "Muon and quantized gradients require the present value"
        return None

    def get(self, engine: Any) -> bool:
        return bool(engine.optimizer.reduce_scatter)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        return set_attributes(engine.optimizer, reduce_scatter=value)


class _MultiRankBucketAllreduce(LiveSetting):
    """Sets whether stages 1 and 2 all-reduce a bucket that several ranks own parts of."""

    name = "use_multi_rank_bucket_allreduce"

    def _unsupported_reason(self, engine: Any) -> str | None:
        zero = zero_1_2_optimizer(engine)
        if zero is None:
            return "only stages 1 and 2 choose between one all-reduce and a reduce per owner"
        missing = missing_reason(zero, ZERO_1_AND_2, "use_multi_rank_bucket_allreduce")
        if missing is not None:
            return missing
        return None if zero.reduce_scatter else "reduce_scatter is off: everything is all-reduced"

    def get(self, engine: Any) -> bool:
        return bool(engine.optimizer.use_multi_rank_bucket_allreduce)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        return set_attributes(engine.optimizer, use_multi_rank_bucket_allreduce=value)


class _ContiguousGradients(LiveSetting):
    """Sets whether gradients are copied to a contiguous buffer before they are reduced."""

    name = "contiguous_gradients"

    def _unsupported_reason(self, engine: Any) -> str | None:
        zero_1_2, zero_3 = zero_1_2_optimizer(engine), zero_3_optimizer(engine)
        if zero_1_2 is None and zero_3 is None:
            return _NOT_PARTITIONED
        if zero_3 is not None:
            return missing_reason(zero_3, ZERO_3, "contiguous_gradients", "ipg_buckets")
        names = ("contiguous_gradients", "_release_ipg_buffers", "_grad_acc_hooks", "cpu_offload")
        missing = missing_reason(zero_1_2, ZERO_1_AND_2, *names)
        if missing is None and zero_1_2 is not None and zero_1_2.cpu_offload:
            return "an optimizer on the host needs contiguous gradients"
        return missing or _missing_hooks(zero_1_2)

    def get(self, engine: Any) -> bool:
        return bool(engine.optimizer.contiguous_gradients)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        zero_1_2, zero_3 = zero_1_2_optimizer(engine), zero_3_optimizer(engine)
        if zero_1_2 is not None:
            zero_1_2._release_ipg_buffers()
            return set_attributes(zero_1_2, contiguous_gradients=value)
        undo_flag = set_attributes(zero_3, contiguous_gradients=value)
        size = engine.optimizer.reduce_bucket_size if value else None
        # The undo restores the flag first, because the flag decides whether buffers are allocated.
        try:
            return chain([_resize_buffers(zero_3, size), undo_flag])
        except FAILURES:
            undo_flag()
            raise

    def _is_consistent(self, engine: Any, value: SettingValue) -> bool:
        zero_3 = zero_3_optimizer(engine)
        if zero_3 is None:
            return True
        return all((bucket.buffer is not None) == value for bucket in zero_3.ipg_buckets.values())

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        zero = engine.optimizer
        if value == zero.contiguous_gradients:
            return 0
        if zero_1_2_optimizer(engine) is not None:
            return None  # the flattened size depends on the order of gradients
        dtypes: list[torch.dtype] = list(zero.ipg_buckets)
        num_bytes = int(zero.reduce_bucket_size) * sum(dtype.itemsize for dtype in dtypes)
        return num_bytes if value else -num_bytes


class _OverlapComm(LiveSetting):
    """Sets whether gradients are reduced on another stream while backward continues."""

    name = "overlap_comm"

    def _unsupported_reason(self, engine: Any) -> str | None:
        zero_1_2, zero_3 = zero_1_2_optimizer(engine), zero_3_optimizer(engine)
        if zero_3 is not None:
            return self._unsupported_reason_of_stage_3(zero_3)
        if zero_1_2 is None:
            return _NOT_PARTITIONED
        names = ("overlap_comm", "_grad_acc_hooks", "partition_gradients")
        missing = missing_reason(zero_1_2, ZERO_1_AND_2, *names)
        if missing is not None:
            return missing
        if not zero_1_2.partition_gradients and not engine.managed_gradient_accumulation():
            return "stage 1 reduces within step() unless DeepSpeed manages gradient accumulation"
        return _missing_hooks(zero_1_2)

    def _unsupported_reason_of_stage_3(self, zero_3: Any) -> str | None:
        if get_accelerator().is_synchronized_device():
            return "this device has no streams, and stage 3 overlaps by streams alone"
        missing = missing_reason(zero_3, ZERO_3, "reduce_and_partition_stream", "parameter_offload")
        if missing is not None:
            return missing
        return missing_reason(zero_3.parameter_offload, PARAMETER_OFFLOAD, "__allgather_stream")

    def get(self, engine: Any) -> bool:
        zero_3 = zero_3_optimizer(engine)
        if zero_3 is None:
            return bool(engine.optimizer.overlap_comm)
        return bool(zero_3.reduce_and_partition_stream != get_accelerator().default_stream())

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        zero_3 = zero_3_optimizer(engine)
        if zero_3 is None:
            return set_attributes(engine.optimizer, overlap_comm=value)
        accelerator = get_accelerator()
        reduce_stream = accelerator.Stream() if value else accelerator.default_stream()
        gather_stream = accelerator.Stream() if value else accelerator.default_stream()
        offload, coordinator = zero_3.parameter_offload, param_coordinator(zero_3)
        return apply_all(
            [
                partial(set_attributes, zero_3, reduce_and_partition_stream=reduce_stream),
                partial(set_attributes, offload, **{_ALLGATHER_STREAM: gather_stream}),
                partial(set_attributes, coordinator, **{_COORDINATOR_STREAM: gather_stream}),
            ]
        )

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        zero = engine.optimizer
        if zero_3_optimizer(engine) is not None or value == zero.overlap_comm:
            return 0 if value == self.get(engine) else None
        element_bytes = _element_bytes(zero)
        more_buffers = (2 if value else 1) - _num_buffers(zero)
        if element_bytes is None:
            return None
        return more_buffers * element_bytes * int(zero.reduce_bucket_size)


REDUCE_BUCKET_SIZE_SETTING = _ReduceBucketSize()
REDUCE_SCATTER_SETTING = _ReduceScatter()
MULTI_RANK_BUCKET_ALLREDUCE_SETTING = _MultiRankBucketAllreduce()
CONTIGUOUS_GRADIENTS_SETTING = _ContiguousGradients()
OVERLAP_COMM_SETTING = _OverlapComm()


def _has_bucket_setting(engine: Any) -> bool:
    return zero_1_2_optimizer(engine) is not None or zero_3_optimizer(engine) is not None


def _missing_hooks(zero_1_2: Any) -> str | None:
    if zero_1_2._grad_acc_hooks:
        return None
    return "the engine was built without the gradient hooks that fill the buckets"


def _resize_buffers(zero_3: Any, elements: int | None) -> Undo:
    """Resize the bucket buffers of ZeRO 3, or drop the buffers if `elements` is None.

    The old buffers are freed first. If there is not enough memory for the new buffers, buffers of
    the old sizes are allocated again.
    """
    before = {
        dtype: None if bucket.buffer is None else bucket.buffer.numel()
        for dtype, bucket in zero_3.ipg_buckets.items()
    }
    try:
        _allocate_buffers(zero_3, dict.fromkeys(before, elements))
    except FAILURES:
        _allocate_buffers(zero_3, before)
        raise
    reference = weakref.ref(zero_3)

    def undo() -> None:
        alive = reference()
        if alive is not None:
            _allocate_buffers(alive, before)

    return undo


def _allocate_buffers(zero_3: Any, sizes: dict[torch.dtype, int | None]) -> None:
    device = get_accelerator().current_device_name()
    for dtype, elements in sizes.items():
        zero_3.ipg_buckets[dtype].buffer = None
        if elements is not None and zero_3.contiguous_gradients:
            zero_3.ipg_buckets[dtype].buffer = torch.empty(elements, dtype=dtype, device=device)


def _element_bytes(zero: Any) -> int | None:
    """Return the bytes per element, summed over all buckets; None without buffers."""
    if not zero.contiguous_gradients:
        return None
    dtypes: list[torch.dtype] = list(zero.ipg_buckets)
    if hasattr(zero, "_gradient_reduction_buffer_dtype"):  # stages 1 and 2
        dtypes = [zero._gradient_reduction_buffer_dtype()] * len(dtypes)
    return sum(dtype.itemsize for dtype in dtypes)


def _num_buffers(zero: Any) -> int:
    """Return the buffers per bucket: with overlap_comm, stages 1 and 2 alternate between two."""
    return 2 if getattr(zero, "overlap_comm", False) else 1


class _SizedAllreduce:
    """Replaces `engine.allreduce_gradients` to pass a bucket size; does nothing without a size.

    The class uses slots, because `AttributePatch` copies the attributes of the original to the
    replacement and could overwrite an attribute of this class.
    """

    __slots__ = ("__dict__", "__weakref__", "_original", "elements")

    def __init__(self, original: Callable[..., Any], elements: int) -> None:
        self._original = original
        self.elements: int | None = elements

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.elements is not None and not args and "bucket_size" not in kwargs:
            kwargs["bucket_size"] = self.elements
        return self._original(*args, **kwargs)


def _whole_gradient_bucket_size(engine: Any) -> int:
    """Return how many elements stage 0 and BF16_Optimizer flatten at once."""
    patched = [each.elements for each in _patches(engine) if each.elements is not None]
    return patched[0] if patched else int(MEMORY_OPT_ALLREDUCE_SIZE)


def _set_whole_gradient_bucket_size(engine: Any, elements: int) -> Undo:
    """Set how many elements stage 0 and BF16_Optimizer flatten at once."""
    wrappers: list[_SizedAllreduce] = []

    def make(original: Callable[..., Any]) -> _SizedAllreduce:
        wrappers.append(_SizedAllreduce(original, elements))
        return wrappers[0]

    patch = AttributePatch(engine, "allreduce_gradients", make)

    def undo() -> None:
        wrappers[0].elements = None  # in case another wrapper now wraps this one
        patch.restore()

    return UndoOnce(undo)


def _patches(engine: Any) -> Iterator[_SizedAllreduce]:
    """Yield zerowatch's replacements, the outermost first, also inside other code's wrappers."""
    function = engine.allreduce_gradients
    while function is not None:
        if isinstance(function, _SizedAllreduce):
            yield function
        function = getattr(function, "__wrapped__", None)
