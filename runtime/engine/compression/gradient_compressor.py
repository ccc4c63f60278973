"""Attaches gradient compression to a DeepSpeed engine, and keeps the error feedback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from deepspeed import comm as dist

from ...common.deepspeed_internals import (
    BF16,
    ENGINE,
    INTERNALS,
    ZERO_1_AND_2,
    ZERO_3,
    missing_names,
    unknown_subclass_reason,
)
from ...common.undo import Undo
from .bucket_compressor import BucketCompressor
from .encoding import FORMATS
from .error_feedback import CompressionError, Residuals
from .stage_0_reduction import Stage0Reduction
from .stage_1_and_2_reduction import Stage1And2Reduction
from .stage_3_reduction import Stage3Reduction

logger = logging.getLogger(__name__)

PLAIN = "plain"
KINDS = (PLAIN, *FORMATS)


def check_kind(kind: str) -> None:
    """Check the name of a wire format.

    Raises:
        ValueError: The format does not exist.
    """
    if kind not in KINDS:
        raise ValueError(f"compression must be one of {', '.join(KINDS)}, got {kind!r}")


class ReductionPatch(Protocol):
    """Patches the methods by which one kind of engine reduces its gradients."""

    def close(self) -> None:
        """Restore the original methods."""

    def discard(self) -> None:
        """Discard the reductions in flight."""


class GradientCompressor:
    """Compresses gradients as the ranks sum them, with error feedback.

    All ranks make the same calls, between two windows. Only gradients are compressed: not weights,
    norms or overflow flags. The errors of a window become residuals of the next one when the window
    is committed.

    Args:
        kind: Wire format: "fp32", "bf16", "fp16", "int8", "fp8", or "plain" for DeepSpeed's own
            uncompressed reduction, which is useful with `asynchronous`.
        feedback: Whether errors are added to the next gradients; by default for 8-bit formats.
        residual_dtype: Type of the residuals; see `Residuals` for their memory.
        asynchronous: Whether ZeRO 1 and 2 continue backward while a bucket is reduced.
    """

    def __init__(
        self,
        kind: str,
        *,
        feedback: bool | None = None,
        residual_dtype: torch.dtype = torch.float32,
        asynchronous: bool = False,
    ) -> None:
        check_kind(kind)
        self.kind = kind
        self.asynchronous = asynchronous
        wire_format = FORMATS.get(kind)
        has_feedback = wire_format is not None and (
            wire_format.feedback if feedback is None else feedback
        )
        self._error = CompressionError()
        self._residuals = Residuals(residual_dtype) if has_feedback else None
        self._compressor: BucketCompressor | None = None
        if wire_format is not None:
            self._compressor = BucketCompressor(wire_format, self._residuals, self._error)
        self._engine: Any = None
        self._patch: ReductionPatch | None = None

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why this cannot be attached to an engine; None if it can."""
        return unsupported_reason(engine, asynchronous=self.asynchronous)

    def attach(self, engine: Any) -> Undo:
        """Compress an engine's gradients until the returned function is called.

        On a single rank nothing is sent and nothing changes. The compressor keeps the engine alive
        until the undo. The residuals stay after the undo, so that the compressor can be attached to
        another engine of the same model, of any ZeRO stage.

        Raises:
            ValueError: The engine is not supported, or the compressor is attached already.
        """
        if self._patch is not None:
            raise ValueError("the gradient compressor is attached already: undo that first")
        reason = self.unsupported_reason(engine)
        if reason is not None:
            raise ValueError(f"gradients cannot be sent as {self.kind}: {reason}")
        if dist.get_world_size(group=engine.seq_data_parallel_group) < 2:
            return lambda: None
        patch = self._patched(engine)
        self._patch, self._engine = patch, engine
        logger.info("gradients are sent as %s", self.kind)

        def undo() -> None:
            if self._patch is patch and self._engine is engine:
                if patch is not None:
                    patch.close()
                self._patch = self._engine = None

        return undo

    def _patched(self, engine: Any) -> ReductionPatch | None:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        reducer = reducer_class(engine)
        if reducer == ZERO_1_AND_2:
            return Stage1And2Reduction(
                engine.optimizer, self._compressor, names, asynchronous=self.asynchronous
            )
        if self._compressor is None:
            return None
        if reducer == ZERO_3:
            return Stage3Reduction(engine.optimizer, self._compressor, names)
        return Stage0Reduction(engine, self._compressor, names)

    def begin_window(self, gradient_scale: float = 1.0) -> None:
        """Start a window from the committed residuals.

        Args:
            gradient_scale: Factor in this window's gradients, without fp16's loss scale. Only the
                ratio between the factors of different windows matters.
        """
        self.abort_window()
        if self._compressor is not None:
            self._compressor.gradient_scale = gradient_scale * _loss_scale(self._engine)

    def commit_window(self) -> None:
        """Keep the window's residuals; a window whose step was skipped must be aborted instead."""
        if self._residuals is not None:
            self._residuals.commit()
        self._error.close()

    def abort_window(self) -> None:
        """Discard the window, so that it can be run again; waits for reductions in flight."""
        if self._patch is not None:
            self._patch.discard()
        if self._residuals is not None:
            self._residuals.discard()
        self._error.discard()

    @property
    def error_ratio(self) -> float | None:
        """Norm of this rank's compression errors in the last window over the norm of sent values.

        The value is None before the first window, without compression, and after gradients that
        were not finite. On a GPU it is also None until it has been copied to the host. Reading it
        does not wait for the copy.
        """
        return self._error.ratio()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's committed residuals by parameter, copied to the host."""
        return self._residuals.state_dict() if self._residuals is not None else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state that `state_dict` returned on this rank. Call it between two windows."""
        if self._residuals is not None:
            self._residuals.load_state_dict(state)


def _loss_scale(engine: Any) -> float:
    """Return the present factor of fp16's loss scaler."""
    optimizer = getattr(engine, "optimizer", None)
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(getattr(scaler, "cur_scale", getattr(optimizer, "cur_scale", 1.0)))


def reducer_class(engine: Any) -> str:
    """Return the class whose methods reduce an engine's gradients, as "module:Class"."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return BF16
    stage = int(engine.zero_optimization_stage())
    return {0: ENGINE, 3: ZERO_3}.get(stage, ZERO_1_AND_2)


def unsupported_reason(engine: Any, *, asynchronous: bool) -> str | None:
    """Return why an engine's gradients cannot be compressed; None if they can.

    The reason is that they would be summed wrongly, or that the combination was never tested.
    """
    reducer = reducer_class(engine)
    owner = engine if reducer == ENGINE else engine.optimizer
    internals = INTERNALS["engine/compression"]
    missing = missing_names(owner, reducer, internals[reducer])
    missing += missing_names(engine, ENGINE, internals[ENGINE])
    if missing:
        return f"this DeepSpeed has no {', '.join(missing)}"
    reason = _unsupported_model(engine) or _unsupported_optimizer(engine.optimizer)
    if reason is None and asynchronous:
        return _not_asynchronous(reducer, engine.optimizer)
    return reason


def _unsupported_model(engine: Any) -> str | None:
    if type(engine).__name__ == "PipelineEngine":
        return "pipeline stages reduce their gradients differently"
    if engine.has_moe_layers:
        return "gradients of experts are summed over other ranks than the rest"
    if engine.sequence_parallel_size > 1:
        return "sequence parallelism averages over fewer ranks than it sums"
    if engine.gradient_predivide_factor() != 1.0:
        return "gradient_predivide_factor is set"
    if any(getattr(module, "sparse", False) for module in engine.module.modules()):
        return "sparse gradients are not compressed"
    if engine.is_deepcompile_active():
        return "DeepCompile reduces gradients by itself"
    return None


def _unsupported_optimizer(optimizer: Any) -> str | None:
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if "Muon" in kind:
        return "Muon needs whole matrices on several ranks"
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow rearranges gradients"
    if getattr(optimizer, "all2all_process_group", None) is not None:
        return "ZeRO++ quantizes gradients already (zero_quantized_gradients)"
    return unknown_subclass_reason(optimizer)


def _not_asynchronous(reducer: str, optimizer: Any) -> str | None:
    if reducer != ZERO_1_AND_2:
        return "only ZeRO 1 and 2 have buckets that can be reduced asynchronously"
    if optimizer.overlap_comm:
        return "overlap_comm overlaps reduction with backward already"
    if not optimizer.contiguous_gradients:
        return "without contiguous_gradients there are no buckets to keep in flight"
    if not optimizer.reduce_scatter:
        return "without reduce_scatter the sums of a bucket are used at once"
    return None
