"""Computes the memory of gradients: those kept, buckets, messages, and the optimizer's copies.

`model_memory.py` adds parameters and optimizer states to it.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (z12 below), runtime/zero/stage3.py,
runtime/bf16_optimizer.py and runtime/fp16/. On a GPU, allocated bytes count, touched or not. On
CPU, the part of a bucket to which no gradient is written takes no memory. Where DeepSpeed frees one
gradient while it allocates another, the larger one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .buckets import FlatGroup, fill_buckets, flatten
from .ds_options import DsOptions
from .model_shape import BYTES_OF, ModelShape
from .optimizer_places import PartitionSizes, master_copy_width, optimizer_places
from .pinned_memory import pinned_size

_ENGINE_BUCKET = 500_000_000  # elements; a constant of engine.py
_NORM_BYTES = 8  # norms are taken in fp64 (zero/utils.py:59), of a copy of one tensor at a time
# Optimizer types that select DeepSpeed's FusedAdam (engine.py, _configure_adam_optimizer).
_FUSED = frozenset(("adam", "adamw", "fusedadam"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMemory:
    """The bytes of one rank's gradients, on the device and on the host.

    Attributes:
        kept: Gradients at the end of backward.
        buffers: Buckets, during backward.
        transient: Messages and other copies while a bucket is reduced, at their maximum.
        in_step: Gradients and their copies in the optimizer's step, at their maximum.
        in_forward: Gradients present during forward, in the first micro-batch of a step.
        accumulated: Additional gradients kept if a step has several micro-batches.
        accumulated_in_forward: Additional gradients in forward, from the second micro-batch on.
        host: Gradients in CPU memory, if the optimizer is offloaded.
        host_accumulated: Additional gradients in CPU memory if a step has several micro-batches.
    """

    kept: int
    buffers: int
    transient: int
    in_step: int
    in_forward: int = 0
    accumulated: int = 0
    accumulated_in_forward: int = 0
    host: int = 0
    host_accumulated: int = 0


def gradient_memory(model: ModelShape, options: DsOptions, sizes: PartitionSizes) -> GradientMemory:
    """Return the gradient memory of one rank: the one with the most, if ranks differ."""
    if options.uses_bf16_optimizer:
        return _bf16_optimizer(model, options, sizes)
    return _BY_STAGE[options.stage](model, options, sizes)


def _stage_0(model: ModelShape, options: DsOptions, sizes: PartitionSizes) -> GradientMemory:
    width = sizes.width
    in_step = sizes.whole * width
    if options.mixed_precision:
        master = master_copy_width(options, width)
        in_step += sizes.whole * master
        if options.optimizer in _FUSED and not options.legacy_fusion and master != width:
            in_step += sizes.whole * master  # copied, then flattened (fused_optimizer.py:285)
    sent = BYTES_OF[options.communication_dtype]
    flat = width + (sent if sent != width else 0)
    return GradientMemory(
        kept=sizes.whole * width,
        buffers=0,
        transient=min(sizes.whole, _ENGINE_BUCKET) * flat,
        in_step=in_step,
        accumulated_in_forward=sizes.whole * width,
    )


def _bf16_optimizer(model: ModelShape, options: DsOptions, sizes: PartitionSizes) -> GradientMemory:
    """Return the memory with unpartitioned sums of gradients (fp32_groups_gradients_flat)."""
    accumulated, sent = (
        BYTES_OF[dtype] for dtype in (options.accumulation_dtype, options.communication_dtype)
    )
    sums = sizes.whole * accumulated
    copied = sent != accumulated or len(model.param_groups()) > 1
    message = copied * min(sizes.whole, _ENGINE_BUCKET) * sent
    in_fp32 = 0 if accumulated == BYTES_OF["fp32"] else sizes.part * BYTES_OF["fp32"]
    if options.immediate_grad_update:  # each gradient is dropped once it is added to its sum
        converted = accumulated if accumulated != sizes.width else 0
        return GradientMemory(
            kept=sums,
            buffers=0,
            transient=max(message, _largest(model) * (sizes.width + converted)),
            in_step=sums + in_fp32,
            in_forward=sums,
        )
    gradients = sizes.whole * sizes.width
    return GradientMemory(
        kept=sums + gradients,
        buffers=0,
        transient=message,
        in_step=sums + gradients + in_fp32,
        in_forward=sums,
        accumulated_in_forward=gradients,
    )


def _stages_1_and_2(model: ModelShape, options: DsOptions, sizes: PartitionSizes) -> GradientMemory:
    groups = [flatten(model, group, options, sizes.ranks) for group in model.param_groups()]
    reduction = _BucketedReduction.of(model, groups, options, sizes.width)
    width, accumulated = sizes.width, BYTES_OF[options.accumulation_dtype]
    offloads, compact = reduction.offloads, reduction.compact
    # Complete gradients, also of parameters of which the rank owns only a slice (z12:2188).
    copies = 0 if offloads else reduction.owned * width
    kept = sizes.part * accumulated if compact else copies
    collected = sizes.whole * accumulated if options.stage == 1 else 0  # until backward ends
    peak = reduction.peak()
    accumulated_copies = reduction.owned * width if options.stage == 2 and not compact else 0
    offload_buffer = (
        offloads * _largest(model) * width
    )  # temp_grad_buffer_for_gpu_offload (z12:659)
    host = host_accumulated = 0
    if offloads:  # fp32 gradients, a copy of the weights, a buffer of one gradient (z12:568, 653)
        host = sizes.part * (master_copy_width(options, width) + width) + offload_buffer
        host_accumulated = reduction.host_copies() if accumulated_copies else 0
        accumulated_copies = 0
    buckets = _bucket_elements(options, sizes, num_buckets=2 if options.overlap_comm else 1)
    return GradientMemory(
        kept=min(peak, collected + kept),
        buffers=reduction.contiguous * buckets * reduction.staged_width + offload_buffer,
        transient=max(0, peak - collected - kept),
        in_step=_step_of_stages_1_and_2(model, options, sizes, kept, compact),
        in_forward=offload_buffer,
        accumulated=accumulated_copies,
        accumulated_in_forward=collected or kept,
        host=host,
        host_accumulated=host_accumulated,
    )


def _step_of_stages_1_and_2(
    model: ModelShape, options: DsOptions, sizes: PartitionSizes, kept: int, compact: bool
) -> int:
    """Return the bytes of kept gradients and of the optimizer's flat and fp32 copies (z12:3090)."""
    if options.offloads_optimizer:
        return kept + _largest(model) * sizes.width
    norm = min(_largest(model), sizes.part) * _NORM_BYTES
    if compact:
        return kept + norm
    master = master_copy_width(options, sizes.width)
    flat = sizes.width + (master if master != sizes.width else 0)
    return kept + max(sizes.part * flat, norm)


def _stage_3(model: ModelShape, options: DsOptions, sizes: PartitionSizes) -> GradientMemory:
    accumulated, sent = (
        BYTES_OF[dtype] for dtype in (options.accumulation_dtype, options.communication_dtype)
    )
    largest, limit = _largest(model), options.reduce_bucket_size
    offloads = options.offloads_optimizer
    elements = _bucket_elements(options, sizes) if options.contiguous_gradients else 0
    reserved = elements * sent  # stage3.py:782
    in_place = options.contiguous_gradients and not options.reduce_scatter  # stage3.py:1860
    # Rearranged by rank (coalesced_collectives.py:122).
    message = 0 if in_place else min(limit, sizes.whole) * sent
    norm = -(-largest // sizes.ranks) * _NORM_BYTES
    master = master_copy_width(options, sizes.width)
    flat = sizes.part * accumulated  # grad_partitions_flat_buffer (stage3.py:791)
    alone = largest * sizes.width if largest > limit else 0
    copied = sizes.largest_sub_group * (accumulated + (master if master != accumulated else 0))
    if offloads:
        places = optimizer_places(options, sizes)
        # Gradients of the optimizer's dtype are allocated for all steps (stage3.py:1337).
        on_device, unswapped = places.device * master, places.unswapped * master
        return GradientMemory(
            kept=on_device + unswapped,
            buffers=reserved,
            transient=max(alone + norm, message),
            in_step=reserved + on_device + unswapped,
            in_forward=reserved + on_device,
            host=flat + places.host * master,
        )
    return GradientMemory(
        kept=flat,
        buffers=reserved,
        transient=max(alone, message),
        in_step=reserved + flat + max(copied, norm),  # stage3.py:2686
        in_forward=reserved + flat,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketedReduction:
    """Computes the memory while ZeRO-1 or 2 reduces all gradients, bucket by bucket.

    Attributes:
        sizes: Elements of each trained parameter.
        owners: Ranks that own a slice of each parameter.
        order: Parameters in the order in which they enter buckets.
        part: Elements of a rank's part.
        width: Bytes of one element of a gradient.
        options: The configuration.
    """

    sizes: Mapping[int, int]
    owners: Mapping[int, Collection[int]]
    order: Sequence[int]
    part: int
    width: int
    options: DsOptions

    @classmethod
    def of(
        cls, model: ModelShape, groups: Sequence[FlatGroup], options: DsOptions, width: int
    ) -> _BucketedReduction:
        """Derive a reduction from the model and its flat param groups."""
        # Without overlap they enter in the order of the groups, however the flat buffer is laid out
        # (round_robin_gradients): stage_1_and_2.py:971.
        in_groups = [index for group in model.param_groups() for index in group]
        sizes = {index: model.parameters[index].numel for index in in_groups}
        return cls(
            sizes=sizes,
            owners={
                index: {owner for owner, _ in group.slices(offset, sizes[index])}
                for group in groups
                for index, offset in group.offsets.items()
            },
            order=model.gradient_order() if options.reduces_in_backward_order else in_groups,
            part=sum(group.part for group in groups),
            width=width,
            options=options,
        )

    @property
    def compact(self) -> bool:
        """Whether sums are kept in fp32, for the rank's part only (z12:1258)."""
        return self.width < BYTES_OF[self.options.accumulation_dtype] == BYTES_OF["fp32"]

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is offloaded."""
        return self.options.offloads_optimizer

    @property
    def contiguous(self) -> bool:
        """Whether gradients are copied into buckets."""
        return self.options.contiguous_gradients or self.offloads

    @property
    def staged_width(self) -> int:
        """The bytes of one element in a bucket; ZeRO-1 puts its accumulated gradients there."""
        is_stage_1 = self.options.stage == 1
        return BYTES_OF[self.options.accumulation_dtype] if is_stage_1 else self.width

    @property
    def owned(self) -> int:
        """The elements of all parameters of which a rank owns a slice; the maximum over ranks."""
        return max(self._owned_by_rank().values(), default=0)

    def host_copies(self) -> int:
        """Return the bytes in CPU memory of the gradients of `owned` parameters (z12:1825)."""
        size = pinned_size if self.options.pins_optimizer else int
        by_rank = self._owned_by_rank(lambda index: size(self.sizes[index] * self.width))
        return max(by_rank.values(), default=0)

    def peak(self) -> int:
        """Return the peak bytes of gradients and copies, of the rank with the most."""
        owned = self._owned_by_rank()
        # First, last and largest owner represent all ranks: there may be many.
        ranks = {min(owned), max(owned), max(owned, key=lambda rank: owned[rank])} if owned else ()
        return max(
            (num_bytes for rank in ranks for num_bytes in self._bytes_over_time(rank, owned)),
            default=0,
        )

    def _owned_by_rank(self, size_of: Callable[[int], int] | None = None) -> dict[int, int]:
        """Return the sizes of each rank's parameters: their elements by default."""
        size_of = size_of or self.sizes.__getitem__
        owned: dict[int, int] = {}
        for index, owners in self.owners.items():
            for owner in owners:
                owned[owner] = owned.get(owner, 0) + size_of(index)
        return owned

    def _bytes_over_time(self, rank: int, owned: Mapping[int, int]) -> Iterator[int]:
        """Yield the bytes while each bucket is reduced, and after it."""
        is_stage_1 = self.options.stage == 1
        collected = sum(self.sizes.values()) * self.staged_width if is_stage_1 else 0
        kept = self.part * BYTES_OF["fp32"] if self.compact else 0
        copies = not self.compact and not self.offloads
        for bucket in fill_buckets(self.order, self.sizes, self.options.reduce_bucket_size):
            elements = sum(self.sizes[index] for index in bucket)
            own = [index for index in bucket if rank in self.owners[index]]
            fits = self.contiguous and elements <= self.options.reduce_bucket_size
            unreduced = 0 if is_stage_1 or fits else elements * self.width
            if is_stage_1 and fits:  # copying into the bucket frees them
                collected -= elements * self.staged_width
            yield collected + kept + unreduced + self._copies(bucket, own)
            if own and copies and self.contiguous:  # the first one allocates all (z12:2192)
                kept = owned[rank] * self.width
            elif copies and not is_stage_1:
                kept += sum(self.sizes[index] for index in own) * self.width
            yield collected + kept + (unreduced if self.contiguous else 0)
            if is_stage_1 and self.contiguous and not fits:
                collected -= sum(self.sizes[index] for index in own) * self.staged_width

    def _copies(self, bucket: Sequence[int], own: Sequence[int]) -> int:
        """Return the bytes of a bucket's message, or of the norm's copy if that is larger.

        A bucket is copied unless it has a single owner. Offloading computes the norm of each
        gradient on the device (z12:1889).
        """
        elements = sum(self.sizes[index] for index in bucket)
        owners = {owner for index in bucket for owner in self.owners[index]}
        must_copy = (len(owners) > 1 and self.options.reduce_scatter) or self.compact
        copied = must_copy if self.contiguous else len(bucket) > 1
        largest = max((self.sizes[index] for index in own), default=0)
        in_fp32 = self.compact * min(largest, self.part) * BYTES_OF["fp32"]  # z12:1326
        message = elements * self.staged_width * copied + in_fp32
        return max(message, self.offloads * largest * _NORM_BYTES)


_BY_STAGE: Mapping[int, Callable[[ModelShape, DsOptions, PartitionSizes], GradientMemory]] = (
    MappingProxyType({0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3})
)


def _bucket_elements(options: DsOptions, sizes: PartitionSizes, *, num_buckets: int = 1) -> int:
    """Return the elements for which buckets take memory."""
    elements = num_buckets * options.reduce_bucket_size
    return min(elements, sizes.whole) if options.on_cpu else elements


def _largest(model: ModelShape) -> int:
    return max((p.numel for p in model.parameters if p.is_trained), default=0)
