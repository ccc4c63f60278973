"""Computes the bytes in CPU memory that pinning adds to what DeepSpeed offloads.

torch rounds each pinned tensor up to a power of two of bytes, and keeps freed ones for reuse
(ATen/core/CachingHostAllocator.h). The buffers for swaps to NVMe are DeepSpeed's own, and exact.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (z12 below), stage3.py and
partition_parameters.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .buckets import flatten
from .ds_options import DsOptions
from .model_shape import BYTES_OF, ModelShape, ParameterShape
from .optimizer_places import PartitionSizes, master_copy_width, optimizer_places


def pinned_size(num_bytes: int) -> int:
    """Return the bytes of a pinned tensor whose elements have `num_bytes`."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def pinning_bytes(model: ModelShape, options: DsOptions, sizes: PartitionSizes, ranks: int) -> int:
    """Return the bytes of one rank that pinning adds; 0 where nothing is pinned."""
    first: list[int] = []
    freed: list[int] = []
    later: list[int] = []
    if options.offload_param != "none" and not options.on_cpu:
        first += _flat_parameters(model, options, sizes, ranks)
    if options.offload_param == "cpu" and options.pins_param:
        # Each parameter has a partition (partition_parameters.py:1843). Those of trained ones are
        # then copied to the flat tensor.
        first += _frozen_parts(model, options, ranks)
        freed += [part * sizes.width for parts in sizes.sub_groups for part in parts]
        later += _secondary_parts(model, options, ranks)
    if options.pins_optimizer:
        by_stage = _optimizer_of_stage_3 if options.stage == 3 else _optimizer_of_stages_1_and_2
        later += by_stage(model, options, sizes, ranks)
    unused = Counter(map(pinned_size, freed)) - Counter(map(pinned_size, later))
    return sum(pinned_size(size) - size for size in first + later) + sum(unused.elements())


def _optimizer_of_stages_1_and_2(
    model: ModelShape, options: DsOptions, sizes: PartitionSizes, ranks: int
) -> Iterator[int]:
    """Yield the bytes of the pinned tensors of ZeRO-1 and 2 (z12:565, 572, 657, 940)."""
    master = master_copy_width(options, sizes.width)
    for group in model.param_groups():
        part = flatten(model, group, options, ranks).part
        yield from (part * master, part * sizes.width, part * master)
    yield sizes.width * max((p.numel for p in model.parameters if p.is_trained), default=0)


def _optimizer_of_stage_3(
    _model: ModelShape, options: DsOptions, sizes: PartitionSizes, _ranks: int
) -> Iterator[int]:
    """Yield the bytes of the pinned gradients of ZeRO-3 (stage3.py:795, 1340)."""
    yield sizes.part * BYTES_OF[options.accumulation_dtype]
    master = master_copy_width(options, sizes.width)
    for numel in optimizer_places(options, sizes).host_sub_groups:
        yield numel * master


def _flat_parameters(
    model: ModelShape, options: DsOptions, sizes: PartitionSizes, ranks: int
) -> Iterator[int]:
    """Yield the bytes of each param group in CPU memory: pinned in any case (stage3.py:906)."""
    total = 0
    for group in model.param_groups():
        part = sum(-(-model.parameters[index].numel // ranks) for index in group)
        left = max(0, options.offload_param_max_in_cpu - total)
        total += part
        yield sizes.width * (min(part, left) if options.offload_param == "nvme" else part)


def _frozen_parts(model: ModelShape, options: DsOptions, ranks: int) -> Iterator[int]:
    """Yield the bytes of each frozen parameter's partition."""
    for parameter in model.parameters:
        if not parameter.is_trained:
            yield _part_bytes(parameter, options, ranks)


def _secondary_parts(model: ModelShape, options: DsOptions, ranks: int) -> Iterator[int]:
    """Yield the bytes of each secondary partition with hpZ (partition_parameters.py:1920)."""
    if options.hpz_partition_size > 1:
        for parameter in model.parameters:
            yield _part_bytes(parameter, options, ranks) * ranks // options.hpz_partition_size


def _part_bytes(parameter: ParameterShape, options: DsOptions, ranks: int) -> int:
    return -(-parameter.numel // ranks) * parameter.width_in_training(options.model_dtype)
