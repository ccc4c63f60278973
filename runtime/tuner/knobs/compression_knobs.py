"""How gradients travel: in which form, and whether backward waits for them. One codec does both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...engine.compression.gradient_compressor import (
    PLAIN,
    GradientCompressor,
    unsupported_reason,
)
from ...engine.live_settings.zero_optimizer import total_elements, zero_1_2_optimizer
from ...trainer.engine_holder import EngineHolder
from ..policy.types import Undo, Value

KINDS = ("bf16", "int8", "fp8")
_WITH_FEEDBACK = frozenset({"int8", "fp8"})
_RESIDUAL_BYTES = 8  # a parameter, on every rank; see engine/compression/error_feedback.py
ALONE = "one rank by itself sends nothing"


class CodecConfig(NamedTuple):
    """What a codec does; of neither there is none."""

    kind: Value
    asynchronous: Value


def codec_config(codec: GradientCompressor | None) -> CodecConfig:
    """Return what this codec does."""
    if codec is None:
        return CodecConfig(None, False)
    return CodecConfig(None if codec.kind == PLAIN else codec.kind, codec.asynchronous)


def detach_codec(changes: EngineHolder) -> Undo:
    """Take the codec off, so that what it leans on can change below it."""
    codec = changes.compressor
    changes.set_compressor(None)
    return lambda: changes.set_compressor(codec)


def set_codec(changes: EngineHolder, form: CodecConfig, codec: GradientCompressor | None) -> Undo:
    """Let gradients travel in a form: through the given codec if it does that.

    Raises:
        ValueError: This engine's gradients cannot; the codec is what it was.
    """
    before = changes.compressor
    if form == codec_config(codec):
        changes.set_compressor(codec)  # what it owes is sent yet
    else:
        kind = None if form.kind is None else str(form.kind)
        changes.compress(kind, asynchronous=bool(form.asynchronous))
    return lambda: changes.set_compressor(before)


class CompressionKnob:
    """The form in which gradients travel."""

    name = "gradient_compression"

    def __init__(self, changes: EngineHolder, world_size: int) -> None:
        self._changes, self._world_size = changes, world_size

    def unsupported_reason(self) -> str | None:
        """Say why gradients only go as DeepSpeed sends them."""
        if self._changes.compressor is not None:
            return None
        return (
            ALONE
            if self._world_size == 1
            else unsupported_reason(self._changes.engine, asynchronous=False)
        )

    def get(self) -> Value:
        """Return the form, None for DeepSpeed's own."""
        return codec_config(self._changes.compressor).kind

    def options(self) -> Sequence[Value]:
        """Return all forms, and the present one where that is another."""
        now = self.get()
        return (None, *KINDS, *([now] if now not in (None, *KINDS) else []))

    def is_applied(self, value: Value) -> bool:
        """Whether they travel so."""
        return value == self.get()

    def memory_bytes(self, value: Value) -> int:
        """Return the change in what is kept of errors that are still to be sent."""
        flat = total_elements(self._changes.engine.module.parameters())
        more = (value in _WITH_FEEDBACK) - (self.get() in _WITH_FEEDBACK)
        return more * _RESIDUAL_BYTES * flat


class AsyncReductionKnob:
    """Whether ZeRO 1 and 2 go on with backward while gradients travel."""

    name = "asynchronous_reduction"

    def __init__(self, changes: EngineHolder, world_size: int) -> None:
        self._changes, self._world_size = changes, world_size

    def unsupported_reason(self) -> str | None:
        """Say why there is nothing to go on with."""
        if self._world_size == 1:
            return ALONE
        if zero_1_2_optimizer(self._changes.engine) is None:
            return "only ZeRO 1 and 2 reduce buckets that can be waited for later"
        return unsupported_reason(self._changes.engine, asynchronous=False)

    def get(self) -> Value:
        """Return whether they do."""
        return codec_config(self._changes.compressor).asynchronous

    def options(self) -> Sequence[Value]:
        """Return both, or no: other knobs may stand in the way, such as overlap_comm."""
        can = self.get() or unsupported_reason(self._changes.engine, asynchronous=True) is None
        return (False, True) if can else (False,)

    def is_applied(self, value: Value) -> bool:
        """Whether they do."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: how many buckets are on their way depends on the link."""
        return None
