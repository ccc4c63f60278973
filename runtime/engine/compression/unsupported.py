"""Why an engine's gradients cannot be compressed: they would be summed wrongly, or nobody tried."""

from __future__ import annotations

from typing import Any

from ...common.deepspeed_internals import (
    BF16,
    ENGINE,
    INTERNALS,
    ZERO_1_AND_2,
    ZERO_3,
    missing_names,
)


def reducer_class(engine: Any) -> str:
    """Return the class whose methods reduce an engine's gradients, as "module:Class"."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return BF16
    stage = int(engine.zero_optimization_stage())
    return {0: ENGINE, 3: ZERO_3}.get(stage, ZERO_1_AND_2)


def unsupported_reason(engine: Any, *, asynchronous: bool) -> str | None:
    """Return why the codec cannot be attached; None if it can."""
    place = reducer_class(engine)
    owner = engine if place == ENGINE else engine.optimizer
    internals = INTERNALS["engine/compression"]
    missing = missing_names(owner, place, internals[place])
    missing += missing_names(engine, ENGINE, internals[ENGINE])
    if missing:
        return f"this DeepSpeed has no {', '.join(missing)}"
    reason = _of_the_model(engine) or _of_the_optimizer(engine.optimizer)
    if reason is None and asynchronous:
        return _of_asynchrony(place, engine.optimizer)
    return reason


def _of_the_model(engine: Any) -> str | None:
    if type(engine).__name__ == "PipelineEngine":
        return "pipeline stages reduce their gradients another way"
    if engine.has_moe_layers:
        return "experts' gradients are summed over other ranks than the rest"
    if engine.sequence_parallel_size > 1:
        return "sequence parallelism averages over fewer ranks than it sums"
    if engine.gradient_predivide_factor() != 1.0:
        return "gradient_predivide_factor is set"
    if any(getattr(module, "sparse", False) for module in engine.module.modules()):
        return "sparse gradients travel as they are"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients by itself"
    return None


def _of_the_optimizer(optimizer: Any) -> str | None:
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if "Muon" in kind:
        return "Muon needs whole matrices on several ranks"
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow rearranges gradients"
    if getattr(optimizer, "all2all_process_group", None) is not None:
        return "ZeRO++ quantizes gradients already (zero_quantized_gradients)"
    return None


def _of_asynchrony(place: str, optimizer: Any) -> str | None:
    if place != ZERO_1_AND_2:
        return "only ZeRO 1 and 2 reduce buckets that can be waited for later"
    if optimizer.overlap_comm:
        return "overlap_comm lets buckets travel already"
    if not optimizer.contiguous_gradients:
        return "without contiguous_gradients there are no buckets to put aside"
    if not optimizer.reduce_scatter:
        return "without reduce_scatter a bucket's sum is used at once"
    return None
