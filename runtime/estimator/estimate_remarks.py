"""Writes the sentences of an estimate: its inaccuracies, its assumptions, and unused keys."""

from __future__ import annotations

from collections.abc import Iterator

from .buckets import fill_buckets
from .ds_options import DsOptions
from .model_memory import optimizer_states
from .model_shape import ModelShape, Topology
from .step_estimate import StepEstimate

# Keys that DeepSpeed 0.19.8 reads and then ignores, with the reason.
_IGNORED = {
    "allgather_bucket_size": "one all-gather per param group gathers the parameters",
    "allgather_partitions": "no code reads it",
}

_NOTABLY_LESS = 0.99


def inexact_reasons(model: ModelShape, options: DsOptions, topology: Topology) -> list[str]:
    """Return a sentence for each feature that makes the estimate inexact."""
    reasons = [f"{feature} is on, which is not modeled" for feature in options.unmodeled]
    reasons += model.unmodeled + (model.unmodeled_in_stage_3 if options.stage == 3 else ())
    if options.stage == 3 and model.recomputes:
        reasons.append(
            "activation checkpointing is on, which gathers parameters once more in backward"
        )
    if model.is_synthetic:
        reasons.append(
            "parameter shapes are those of a typical transformer of this size. Bytes are right "
            "for its total size, and calls are approximate; --model estimates your own model"
        )
    if topology.tensor_parallel > 1 or topology.pipeline_parallel > 1:
        reasons.append(
            "parameters are divided evenly over tensor and pipeline ranks, whose own collectives "
            "are not modeled"
        )
    return [f"Not exact: {reason}." for reason in reasons]


def assumptions(model: ModelShape, options: DsOptions) -> tuple[str, ...]:
    """Return the assumptions that would change the estimate if they did not hold."""
    assumed = []
    if options.stage > 0:
        assumed.append("every trainable parameter gets a gradient in every micro-batch")
    partitions = options.stage > 0 or options.uses_bf16_optimizer
    if partitions and options.optimizer is None and len(model.param_groups()) == 1:
        assumed.append("all parameters are in one param group")
    if not options.managed_accumulation:
        assumed.append("the script runs gradient_accumulation_steps micro-batches per step")
    if options.stage == 3 and model.recomputes is None:
        assumed.append(
            "activations are not recomputed (checkpointing gathers parameters once more)"
        )
    order_matters = _order_matters(model, options)
    if not model.order_known and (options.stage == 3 or order_matters):
        assumed.append("each module runs once per micro-batch, in the order of registration")
    if order_matters and any(module.parameters and module.children for module in model.root.walk()):
        assumed.append("each module uses its own parameters before its submodules")
    return tuple(assumed)


def _order_matters(model: ModelShape, options: DsOptions) -> bool:
    """Return whether gradients fill several buckets, so that their order matters."""
    if options.stage == 0 or options.uses_bf16_optimizer or not options.reduces_in_backward_order:
        return False
    sizes = {index: parameter.numel for index, parameter in enumerate(model.parameters)}
    return len(fill_buckets(model.gradient_order(), sizes, options.reduce_bucket_size)) > 1


def config_remarks(options: DsOptions, topology: Topology, micro_batches: int) -> tuple[str, ...]:
    """Return remarks on a configuration at one stage, the gradient pattern first."""
    return (
        gradient_pattern(options),
        *_on_accumulation(options, micro_batches),
        *_on_ignored_keys(options),
        *_on_backend(options, topology),
        *_on_optimizer(options),
    )


def result_remarks(
    estimate: StepEstimate, model: ModelShape, options: DsOptions
) -> tuple[str, ...]:
    """Return remarks on the figures of an estimate."""
    return (*_on_parameter_reuse(estimate, options), *_on_bucket_size(estimate, model, options))


def gradient_pattern(options: DsOptions) -> str:
    """Return which collective reduces the gradients, and why."""
    if options.uses_bf16_optimizer:
        used_by = (
            "bf16 with fp32 accumulation at stage 1" if options.stage else "A pipeline in bf16"
        )
        return (
            f"Gradients: all-reduce. {used_by} runs DeepSpeed's BF16_Optimizer, which ignores "
            "reduce_scatter, use_multi_rank_bucket_allreduce and reduce_bucket_size."
        )
    if options.stage == 0:
        return (
            "Gradients: all-reduce. Without ZeRO every rank needs all gradients. The bucket size "
            "is fixed at 5e8 elements."
        )
    if options.stage == 3:
        return _pattern_of_stage_3(options)
    return _pattern_of_stages_1_and_2(options)


def _pattern_of_stages_1_and_2(options: DsOptions) -> str:
    if not options.contiguous_gradients and not options.offloads_optimizer:
        return (
            "Gradients: all-reduce, because contiguous_gradients is false: that code path ignores "
            "reduce_scatter. Each rank keeps its part and drops the rest."
        )
    if not options.reduce_scatter:
        return (
            "Gradients: all-reduce of each bucket, because reduce_scatter is false. Each rank "
            "keeps its part and drops the rest."
        )
    if options.use_multi_rank_bucket_allreduce:
        return (
            "Gradients: all-reduce, although reduce_scatter is true. In ZeRO-1 and 2 that key "
            "never issues a reduce-scatter. With use_multi_rank_bucket_allreduce (the default), "
            "one all-reduce per bucket carries the parts of all ranks, and each rank copies its "
            "own part: twice the bytes, in few messages. Without it, each part is reduced to its "
            "owner only: about half the bytes, in more and smaller messages. Measure which is "
            "faster."
        )
    return (
        "Gradients: one reduce per bucket and owner, because use_multi_rank_bucket_allreduce is "
        "false. This sends about half the bytes of an all-reduce, in more and smaller messages, "
        "which can be slower."
    )


def _pattern_of_stage_3(options: DsOptions) -> str:
    if options.reduce_scatter:
        return "Gradients: reduce-scatter of each bucket, as reduce_scatter asks for."
    if not options.contiguous_gradients:
        return (
            "Gradients: reduce-scatter, although reduce_scatter is false: all-reduce requires "
            "contiguous_gradients."
        )
    return (
        "Gradients: all-reduce of each bucket, because reduce_scatter is false. A parameter larger "
        "than the bucket is reduce-scattered nevertheless."
    )


def _on_accumulation(options: DsOptions, micro_batches: int) -> Iterator[str]:
    if micro_batches == 1 or options.stage < 2:
        return
    if options.stage == 2:
        yield (
            f"Each of the {micro_batches} micro-batches reduces its gradients, because they are "
            "partitioned. At stage 1 only the last one does."
        )
    else:
        yield (
            f"Each of the {micro_batches} micro-batches reduces its gradients and gathers the "
            "parameters. Fewer and larger micro-batches send less."
        )


def _on_ignored_keys(options: DsOptions) -> Iterator[str]:
    ignored = dict(_IGNORED)
    if options.stage == 0 or options.uses_bf16_optimizer:
        ignored["reduce_bucket_size"] = "the bucket size is fixed at 5e8 elements"
    if options.stage != 3:
        ignored["sub_group_size"] = "it applies to stage 3 only"
        ignored["offload_param"] = "it applies to stage 3 only"
    for key in sorted(options.set_keys & ignored.keys()):
        yield f"{key} is set and has no effect: {ignored[key]}."


def _on_backend(options: DsOptions, topology: Topology) -> Iterator[str]:
    if topology.backend == "gloo" and options.stage == 3:
        yield "gloo runs a reduce-scatter as an all-reduce, which sends twice the bytes."


def _on_optimizer(options: DsOptions) -> Iterator[str]:
    if optimizer_states(options) is None:
        name = f"{options.optimizer!r}" if options.optimizer else "created by the script"
        yield f"The optimizer is {name}; its memory is estimated as for Adam."
    may_be_unfused = options.optimizer is None or options.torch_adam
    if may_be_unfused and not options.offloads_optimizer and not options.on_cpu:
        yield (
            "On a GPU, an Adam of torch without fused=True needs up to 4 more bytes in the step "
            "for each element that a rank updates. They are not included."
        )
    if options.model_dtype == "fp16":
        yield (
            "A step whose fp16 gradients overflow is skipped: it computes no norm and gathers no "
            "parameters afterwards."
        )


def _on_parameter_reuse(estimate: StepEstimate, options: DsOptions) -> Iterator[str]:
    gathered = sum(c.payload_bytes for c in estimate.collectives if c.purpose == "parameters")
    if options.stage == 3 and gathered and (estimate.volume_ratio or 1) < _NOTABLY_LESS:
        yield (
            "Less than the reference is sent. The reference is the volume in the ZeRO paper, which "
            "gathers each parameter in forward and again in backward. Here some parameters stay "
            "gathered in between (stage3_max_reuse_distance, stage3_prefetch_bucket_size), which "
            'costs the memory in the column "gathered".'
        )


def _on_bucket_size(estimate: StepEstimate, model: ModelShape, options: DsOptions) -> Iterator[str]:
    reserved = estimate.memory.device_bytes["comm_buffers"]
    reads_size = options.stage > 0 and not options.uses_bf16_optimizer
    # On CPU, the part of a bucket that is not written takes no memory.
    is_in_full = reads_size and reserved and not options.on_cpu
    if is_in_full and options.reduce_bucket_size > model.num_trained:
        yield (
            f"reduce_bucket_size is {options.reduce_bucket_size:,} elements, allocated in full; "
            f"{model.num_trained:,} are enough, the number of gradients of this model."
        )
