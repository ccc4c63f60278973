"""The codec of a run: attached to its engine, told of its windows, saved with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist

from ...common.deepspeed_internals import ZERO_1_AND_2, ZERO_3
from .compression_error import CompressionError
from .compressor import Compressor
from .formats import FORMATS
from .reduction_patch import ReductionPatch, names_of
from .residuals import Residuals
from .stage_0 import Stage0
from .stage_1_and_2 import Stage1And2
from .stage_3 import Stage3
from .unsupported import reducer_class, unsupported_reason

logger = logging.getLogger(__name__)

Undo = Callable[[], None]

PLAIN = "plain"
KINDS = (PLAIN, *FORMATS)


class GradientCompressor:
    """Compresses gradients as the ranks sum them, and sends what was lost along the next time.

    On every rank alike, between two windows. Only gradients are touched: not weights, norms or
    overflow flags. Residuals, the errors yet to be sent, are a window's until it is committed.

    Args:
        kind: How gradients travel: "fp32", "bf16", "fp16", "int8", "fp8", or "plain": as DeepSpeed
            sends them, of use with `asynchronous`.
        feedback: Whether errors are kept and sent later; by default where a value has 8 bits.
        residual_dtype: What errors are kept in; see residuals.py for the memory.
        asynchronous: Whether ZeRO 1 and 2 go on with backward while a bucket travels.
    """

    def __init__(
        self,
        kind: str,
        *,
        feedback: bool | None = None,
        residual_dtype: torch.dtype = torch.float32,
        asynchronous: bool = False,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"codec is {kind!r}; it can be {', '.join(KINDS)}")
        self.kind = kind
        self.asynchronous = asynchronous
        form = FORMATS.get(kind)
        wanted = form is not None and (form.feedback if feedback is None else feedback)
        self._tally = CompressionError()
        self._residuals = Residuals(residual_dtype) if wanted else None
        self._compressor: Compressor | None = None
        if form is not None:
            self._compressor = Compressor(form, self._residuals, self._tally)
        self._engine: Any = None
        self._seam: ReductionPatch | None = None

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why this codec cannot be attached to an engine; None if it can."""
        return unsupported_reason(engine, asynchronous=self.asynchronous)

    def attach(self, engine: Any) -> Undo:
        """Let an engine's gradients go through the codec, until the returned function is called.

        One rank by itself sends nothing, and is left as it is. Until undone the codec keeps the
        engine alive. Residuals outlive that: the codec may then go to another engine of the same
        model, of any stage.

        Raises:
            ValueError: The engine is refused, or the codec is on an engine already.
        """
        if self._seam is not None:
            raise ValueError("the codec is attached already: undo that first")
        reason = self.unsupported_reason(engine)
        if reason is not None:
            raise ValueError(f"gradients cannot be sent as {self.kind}: {reason}")
        if dist.get_world_size(group=engine.seq_data_parallel_group) < 2:
            return lambda: None
        seam = self._made(engine)
        self._seam, self._engine = seam, engine
        logger.info("gradients are sent as %s", self.kind)

        def undo() -> None:
            if self._seam is seam and self._engine is engine:
                if seam is not None:
                    seam.close()
                self._seam = self._engine = None

        return undo

    def _made(self, engine: Any) -> ReductionPatch | None:
        names, place = names_of(engine.module), reducer_class(engine)
        if place == ZERO_1_AND_2:
            return Stage1And2(
                engine.optimizer, self._compressor, names, asynchronous=self.asynchronous
            )
        if self._compressor is None:
            return None
        if place == ZERO_3:
            return Stage3(engine.optimizer, self._compressor, names)
        return Stage0(engine, self._compressor, names)

    def begin_window(self, unit: float = 1.0) -> None:
        """Start from what was committed.

        Args:
            unit: What this window's gradients are multiplied by, without fp16's loss scale. Only
                how it differs from other windows' counts.
        """
        self.abort_window()
        if self._compressor is not None:
            self._compressor.unit = unit * _loss_scale(self._engine)

    def commit_window(self) -> None:
        """Keep the window's residuals; one whose step was skipped must be aborted instead."""
        if self._residuals is not None:
            self._residuals.commit()
        self._tally.close()

    def abort_window(self) -> None:
        """Forget the window, so that it may be run again; waits for what is on its way."""
        if self._seam is not None:
            self._seam.drop()
        if self._residuals is not None:
            self._residuals.drop()
        self._tally.drop()

    @property
    def error_ratio(self) -> float | None:
        """Norm of what this rank lost in the last window, over the norm of what it sent.

        None before the first, where nothing is compressed, where gradients were not finite, and on
        a GPU until the figure has arrived, which is not waited for.
        """
        return self._tally.ratio()

    @property
    def residual_bytes(self) -> int:
        """Memory of the residuals on this rank."""
        return self._residuals.num_bytes() if self._residuals is not None else 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's committed residuals by parameter, copied to the host."""
        return self._residuals.state_dict() if self._residuals is not None else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned on this rank; between two windows."""
        if self._residuals is not None:
            self._residuals.load_state_dict(state)


def _loss_scale(engine: Any) -> float:
    """Return what fp16's loss scaler multiplies losses by now."""
    optimizer = getattr(engine, "optimizer", None)
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(getattr(scaler, "cur_scale", getattr(optimizer, "cur_scale", 1.0)))
