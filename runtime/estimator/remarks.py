"""Plain sentences on a plan: which gradient pattern runs and why, and which keys do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from .memory import optimizer_states
from .options import Options
from .plan import Plan
from .shapes import ModelShape, Topology

# Keys that DeepSpeed 0.19.8 reads and then ignores, with the reason.
_IGNORED = {
    "allgather_bucket_size": "parameters are gathered by one all-gather per param group",
    "allgather_partitions": "nothing reads it",
}

_NOTABLY_LESS = 0.99


def remarks_on(options: Options, topology: Topology, micro_batches: int) -> tuple[str, ...]:
    """Say what is worth knowing of a configuration at one stage."""
    return tuple(
        (
            gradient_pattern(options),
            *_on_accumulation(options, micro_batches),
            *_on_ignored_keys(options),
            *_on_backend(options, topology),
            *_on_the_optimizer(options),
        )
    )


def remarks_on_result(plan: Plan, model: ModelShape, options: Options) -> tuple[str, ...]:
    """Say what the plan's figures show."""
    return (*_on_reuse(plan, options), *_on_buckets(plan, model, options))


def _on_reuse(plan: Plan, options: Options) -> Iterator[str]:
    gathered = sum(c.payload_bytes for c in plan.collectives if c.purpose == "parameters")
    if options.stage == 3 and gathered and (plan.volume_ratio or 1) < _NOTABLY_LESS:
        yield (
            "Less than the least is sent, which gathers in forward and again in backward: "
            "parameters that backward uses again soon stay gathered (stage3_max_reuse_distance, "
            "stage3_prefetch_bucket_size), at the price of the memory under gathered."
        )


def _on_buckets(plan: Plan, model: ModelShape, options: Options) -> Iterator[str]:
    reserved = plan.memory.device_bytes["comm_buffers"]
    reads_size = options.stage > 0 and not options.uses_bf16_optimizer
    if reads_size and reserved and options.reduce_bucket_size > model.num_trained:
        yield (
            f"reduce_bucket_size is {options.reduce_bucket_size:,} elements, reserved whole; the "
            f"model has {model.num_trained:,} gradients, so that many would do."
        )


def gradient_pattern(options: Options) -> str:
    """Say which collective aggregates the gradients, and why that one."""
    if options.stage == 0:
        return (
            "Gradients: all-reduce. Without ZeRO every rank needs all of them, in buckets of 5e8 "
            "elements that no key changes."
        )
    if options.uses_bf16_optimizer:
        return (
            "Gradients: all-reduce. bf16 with fp32 accumulation at stage 1 runs DeepSpeed's "
            "BF16_Optimizer, which never reads reduce_scatter, "
            "use_multi_rank_bucket_allreduce or reduce_bucket_size."
        )
    if options.stage == 3:
        return _pattern_of_stage_3(options)
    return _pattern_of_stages_1_and_2(options)


def _pattern_of_stages_1_and_2(options: Options) -> str:
    offloads = options.offload_optimizer != "none"
    if not options.contiguous_gradients and not offloads:
        return (
            "Gradients: all-reduce, as contiguous_gradients is false: that path never looks at "
            "reduce_scatter. Each rank keeps its part and drops the rest."
        )
    if not options.reduce_scatter:
        return (
            "Gradients: all-reduce of each bucket, as reduce_scatter is false. Each rank keeps its "
            "part and drops the rest."
        )
    if options.use_multi_rank_bucket_allreduce:
        return (
            "Gradients: all-reduce, although reduce_scatter is true. In ZeRO-1 and 2 that key "
            "never issues a reduce-scatter: with use_multi_rank_bucket_allreduce (the default) the "
            "parts of all ranks travel in one all-reduce per bucket, and each rank copies out its "
            "own. It is twice the bytes, but few messages. Set to false, each part goes to its "
            "owner only: about the least, in more and smaller messages, which can be slower; "
            "measure it."
        )
    return (
        "Gradients: one reduce per bucket and owner, as use_multi_rank_bucket_allreduce is false. "
        "About half of an all-reduce's bytes, in more and smaller messages, which can be slower."
    )


def _pattern_of_stage_3(options: Options) -> str:
    if options.reduce_scatter:
        return "Gradients: reduce-scatter of each bucket; this is the stage where the key means it."
    if not options.contiguous_gradients:
        return (
            "Gradients: reduce-scatter, although reduce_scatter is false: all-reduce needs "
            "contiguous_gradients."
        )
    return (
        "Gradients: all-reduce of each bucket, as reduce_scatter is false; a parameter larger "
        "than the bucket is reduce-scattered all the same."
    )


def _on_accumulation(options: Options, micro_batches: int) -> Iterator[str]:
    if micro_batches == 1 or options.stage < 2:
        return
    if options.stage == 2:
        yield (
            f"Each of the {micro_batches} micro-batches reduces its gradients, as they are "
            "partitioned; at stage 1 only the last one does."
        )
    else:
        yield (
            f"Each of the {micro_batches} micro-batches reduces its gradients and gathers the "
            "parameters; larger micro-batches in smaller number send less."
        )


def _on_ignored_keys(options: Options) -> Iterator[str]:
    ignored = dict(_IGNORED)
    if options.stage == 0 or options.uses_bf16_optimizer:
        ignored["reduce_bucket_size"] = "a constant of 5e8 elements is used here"
    if options.stage != 3:
        ignored["sub_group_size"] = "it is for stage 3"
        ignored["offload_param"] = "it is for stage 3"
    for key in sorted(options.set_keys & ignored.keys()):
        yield f"{key} is set and does nothing: {ignored[key]}."


def _on_backend(options: Options, topology: Topology) -> Iterator[str]:
    if topology.backend == "gloo" and options.stage == 3:
        yield "gloo runs a reduce-scatter as an all-reduce, so it sends twice the bytes of one."


def _on_the_optimizer(options: Options) -> Iterator[str]:
    if optimizer_states(options) is None:
        name = f"{options.optimizer!r}" if options.optimizer else "the script's own"
        yield f"The optimizer is {name}; its memory is planned as Adam's."
    if options.model_dtype == "fp16":
        yield "A step that overflows fp16 is skipped: no norm, and no parameters gathered after it."
