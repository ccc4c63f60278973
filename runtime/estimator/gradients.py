"""What gradients take beside the model's states: kept, in buckets, and copied in the step.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (z12 below), runtime/zero/stage3.py,
runtime/bf16_optimizer.py and runtime/fp16/. Counted is what is allocated, touched or not. Where
DeepSpeed frees one gradient as it makes another, the larger figure stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .buckets import flatten
from .options import Options
from .reduction import Reduction
from .shapes import BYTES_OF, ModelShape

_ENGINE_BUCKET = 500_000_000  # of engine.py; elements
_NORM_BYTES = 8  # norms are taken in fp64 (zero/utils.py:59), of a copy of one tensor at a time
# By these names a configuration gets DeepSpeed's FusedAdam (engine.py, _configure_adam_optimizer).
_FUSED = frozenset(("adam", "adamw", "fusedadam"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBytes:
    """Bytes on the device, but for those of `host`.

    Attributes:
        kept: Gradients at the end of backward.
        buffers: Buckets, as long as backward lasts.
        transient: Messages and other copies that a bucket takes as it is reduced, at their largest.
        in_step: All that the optimizer's step has of gradients at its fullest, copies included.
        in_forward: What is there while forward runs, in the first micro-batch of a step.
        accumulated: More that is kept where a step has several micro-batches.
        accumulated_in_forward: More that is there in forward from the second micro-batch on.
        host: What offloading the optimizer keeps in CPU memory beside the optimizer.
        host_accumulated: More of that where a step has several micro-batches.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements: `part` of a rank, padding included, `whole` before sharing; `width` in bytes."""

    part: int
    whole: int
    width: int

    @property
    def ranks(self) -> int:
        """Ranks over which ZeRO divides."""
        return max(1, round(self.whole / self.part)) if self.part else 1


def gradient_bytes(model: ModelShape, options: Options, sizes: Sizes) -> GradientBytes:
    """Plan what the gradients of one rank take; of several ranks, the one with most."""
    if options.uses_bf16_optimizer:
        return _bf16_optimizer(model, options, sizes)
    return _BY_STAGE[options.stage](model, options, sizes)


def master_width(options: Options, width: int) -> int:
    """Return the bytes of an element of the optimizer's copy of the parameters, if it has one."""
    return width if options.low_precision_master else 4


def _stage_0(model: ModelShape, options: Options, sizes: Sizes) -> GradientBytes:
    width = sizes.width
    in_step = sizes.whole * width
    if options.mixed_precision:
        master = master_width(options, width)
        in_step += sizes.whole * master
        if options.optimizer in _FUSED and not options.legacy_fusion and master != width:
            in_step += sizes.whole * master  # copied, then flattened (fused_optimizer.py:285)
    sent = BYTES_OF[options.communication_dtype]
    flat = width + (sent if sent != width else 0)
    return GradientBytes(
        kept=sizes.whole * width,
        buffers=0,
        transient=min(sizes.whole, _ENGINE_BUCKET) * flat,
        in_step=in_step,
        accumulated_in_forward=sizes.whole * width,
    )


def _bf16_optimizer(model: ModelShape, options: Options, sizes: Sizes) -> GradientBytes:
    """Plan whole fp32 gradients beside the model's own (fp32_groups_gradients_flat)."""
    accumulated, sent = (
        BYTES_OF[dtype] for dtype in (options.accumulation_dtype, options.communication_dtype)
    )
    kept = sizes.whole * (sizes.width + accumulated)
    copied = sent != accumulated or len(model.groups()) > 1
    return GradientBytes(
        kept=kept,
        buffers=0,
        transient=copied * min(sizes.whole, _ENGINE_BUCKET) * sent,
        in_step=kept,
        in_forward=sizes.whole * accumulated,
        accumulated_in_forward=sizes.whole * sizes.width,
    )


def _stages_1_and_2(model: ModelShape, options: Options, sizes: Sizes) -> GradientBytes:
    groups = [flatten(model, group, options, sizes.ranks) for group in model.groups()]
    reduction = Reduction.of(model, groups, options, sizes.width)
    width, accumulated = sizes.width, BYTES_OF[options.accumulation_dtype]
    offloads, compact = reduction.offloads, reduction.compact
    # Whole parameters, also those of which a rank owns a piece (z12:2188).
    copies = 0 if offloads else reduction.owned * width
    kept = sizes.part * accumulated if compact else copies
    collected = sizes.whole * accumulated if options.stage == 1 else 0  # until backward ends
    peak = reduction.peak()
    several = reduction.owned * width if options.stage == 2 and not compact else 0
    room = offloads * _largest(model) * width  # temp_grad_buffer_for_gpu_offload (z12:659)
    host = host_accumulated = 0
    if offloads:  # fp32 gradients, a copy of the weights, room for one gradient (z12:568, 653)
        host = sizes.part * (master_width(options, width) + width) + room
        several, host_accumulated = 0, several
    in_buckets = reduction.contiguous * options.reduce_bucket_size * reduction.staged_width
    return GradientBytes(
        kept=min(peak, collected + kept),
        buffers=in_buckets * (2 if options.overlap_comm else 1) + room,
        transient=max(0, peak - collected - kept),
        in_step=_step_of_stages_1_and_2(model, options, sizes, kept, compact),
        in_forward=room,
        accumulated=several,
        accumulated_in_forward=collected or kept,
        host=host,
        host_accumulated=host_accumulated,
    )


def _step_of_stages_1_and_2(
    model: ModelShape, options: Options, sizes: Sizes, kept: int, compact: bool
) -> int:
    """Add the flat copy that the optimizer is given, and its copy in fp32 (z12:3090)."""
    if options.offload_optimizer != "none":
        return kept + _largest(model) * sizes.width
    norm = min(_largest(model), sizes.part) * _NORM_BYTES
    if compact:
        return kept + norm
    master = master_width(options, sizes.width)
    flat = sizes.width + (master if master != sizes.width else 0)
    return kept + max(sizes.part * flat, norm)


def _stage_3(model: ModelShape, options: Options, sizes: Sizes) -> GradientBytes:
    accumulated, sent = (
        BYTES_OF[dtype] for dtype in (options.accumulation_dtype, options.communication_dtype)
    )
    largest, limit = _largest(model), options.reduce_bucket_size
    offloads = options.offload_optimizer != "none"
    reserved = limit * sent * options.contiguous_gradients  # stage3.py:782
    in_place = options.contiguous_gradients and not options.reduce_scatter  # stage3.py:1860
    # Rearranged by rank (coalesced_collectives.py:122).
    message = 0 if in_place else min(limit, sizes.whole) * sent
    norm = -(-largest // sizes.ranks) * _NORM_BYTES
    master = master_width(options, sizes.width)
    flat = sizes.part * accumulated  # grad_partitions_flat_buffer (stage3.py:791)
    alone = largest * sizes.width if largest > limit else 0
    group = min(sizes.part, options.sub_group_size + largest // sizes.ranks)
    copied = group * (accumulated + (master if master != accumulated else 0))  # stage3.py:2686
    return GradientBytes(
        kept=0 if offloads else flat,
        buffers=reserved,
        transient=max(alone + offloads * norm, message),
        in_step=reserved + (0 if offloads else flat + max(copied, norm)),
        in_forward=reserved + (0 if offloads else flat),
        host=offloads * (flat + sizes.part * master),
    )


_BY_STAGE: Mapping[int, Callable[[ModelShape, Options, Sizes], GradientBytes]] = MappingProxyType(
    {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}
)


def _largest(model: ModelShape) -> int:
    return max((p.numel for p in model.parameters if p.trained), default=0)
