"""Knobs of the engine in use: DeepSpeed's live settings, attachments, compression, Python's GC."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ....errors import ZerowatchError
from ...common.ds_config import EngineSource
from ...common.undo import FAILURES, Undo
from ...engine.compression.compressed_all_reduce import workspace_bytes
from ...engine.compression.encoding import FORMATS
from ...engine.compression.gradient_compressor import (
    PLAIN,
    GradientCompressor,
    unsupported_reason,
)
from ...engine.live_settings.activation_checkpointing import ActivationCheckpointing, ModuleSelector
from ...engine.live_settings.all_settings import LIVE_SETTINGS
from ...engine.live_settings.bucket_settings import REDUCE_BUCKET_SIZE_SETTING
from ...engine.live_settings.config_entry import entry_in, with_entry
from ...engine.live_settings.live_setting import LiveSetting
from ...engine.live_settings.optimizer_state_offload import OptimizerStateOffload
from ...engine.live_settings.zero_optimizer import total_elements, zero_1_2_optimizer
from ...trainer.engine_change import EngineChange
from ...trainer.engine_holder import Attachment, EngineHolder, OptionalAttachment
from ..policy.knob_registry import (
    ACTIVATION_CHECKPOINTING,
    ASYNCHRONOUS_REDUCTION,
    GRADIENT_COMPRESSION,
    OPTIMIZER_STATE_OFFLOAD,
    PYTHON_GC,
    SPECS,
    KnobSpec,
)
from ..policy.policy_types import Value
from .knob import ReadableKnob, SwitchKnob, WritableKnob

logger = logging.getLogger(__name__)

ZERO = "zero_optimization"
# The smallest useful size is the size of the model divided by this number. Smaller sizes cause so
# many calls that latency dominates on any link.
SMALLEST_PART = 64


class DeepSpeedKnob(WritableKnob):
    """Sets a live setting of DeepSpeed, also on the engine of a later rebuild.

    Args:
        setting: Reads and sets it on an engine.
        source: Source of the engine.
    """

    def __init__(self, setting: LiveSetting, source: EngineSource) -> None:
        self.spec = SPECS[setting.name]
        self._setting, self._source = setting, source
        # Setting the previous value undoes the last change instead of adding another patch. The
        # alternating changes of a trial therefore do not accumulate.
        self._changes: list[tuple[Value, Undo]] = []
        self._was_set_before = False

    @property
    def is_set(self) -> bool:
        """Whether this knob has set its value, on this engine or on a previous engine."""
        return self._was_set_before or bool(self._changes)

    def unsupported_reason(self) -> str | None:
        """Return why the engine does not have the setting."""
        return self._setting.unsupported_reason(self._source.engine)

    def get(self) -> Value:
        """Return the engine's value."""
        return self._setting.get(self._source.engine)

    def options(self) -> Sequence[Value]:
        """Return both positions of a switch, or the sizes that differ in effect."""
        if self._setting.minimum is None:
            return (False, True)
        elements = total_elements(self._source.engine.module.parameters())
        with_zero = self._setting.minimum == 0
        return powers_of_two(elements, int(self.get() or 0), with_zero=with_zero)

    def set(self, value: Value) -> Undo:
        """Set the value. The undo does nothing if the engine no longer has the setting."""
        before = self.get()
        self._set(value)

        def undo() -> None:
            if self.unsupported_reason() is None:
                self._set(before)

        return undo

    def is_applied(self, value: Value) -> bool:
        """Whether the engine and its buffers match the value."""
        return isinstance(value, int) and self._setting.is_applied(self._source.engine, value)

    def memory_bytes(self, value: Value) -> int | None:
        """Return the additional bytes that buffers need with this value."""
        if not isinstance(value, int):
            return None
        return self._setting.memory_bytes(self._source.engine, value)

    def on_engine_replaced(self) -> None:
        """Apply the ds config's value to a new engine, if this knob has set the value.

        DeepSpeed applies the value by itself, except for settings without a key at stage 0.
        """
        self._was_set_before = self.is_set
        self._changes.clear()
        value = value_in_config(self.spec, self._source.config)
        if not self.is_set or value is None:
            return
        try:
            if self.unsupported_reason() is None:
                self._set(value)
        except FAILURES as error:  # on this rank alone, perhaps
            logger.warning("%s is not %r on the new engine: %s", self.name, value, error)

    def _set(self, value: Value) -> None:
        if self._changes and self._changes[-1][0] == value:
            self._changes.pop()[1]()
        before = self.get()
        if before == value:
            return
        if not isinstance(value, int):
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}")
        self._changes.append((before, self._setting.apply(self._source.engine, value)))


def deepspeed_knobs(source: EngineSource) -> list[DeepSpeedKnob]:
    """Return the knobs of all live settings that the registry has."""
    return [DeepSpeedKnob(setting, source) for setting in LIVE_SETTINGS if setting.name in SPECS]


def powers_of_two(total: int, now: int, *, with_zero: bool = False) -> tuple[int, ...]:
    """Return powers of two from a part of the total up to all of it, and the value in use.

    Args:
        total: Maximum number of elements used at once. Larger values have the same effect.
        now: The value in use.
        with_zero: Whether 0 is a useful value too.
    """
    top = 1 << max(0, total - 1).bit_length()
    parts = [1 << power for power in range(SMALLEST_PART.bit_length())]
    sizes = {now, *(top // part for part in parts if top // part >= 1)}
    return tuple(sorted(sizes | {0} if with_zero else sizes))


def value_in_config(spec: KnobSpec, config: Mapping[str, Any]) -> Value:
    """Return a knob's value in a ds config; None if the config does not have the value.

    DeepSpeed takes a whole number from a float too, such as 5e8.
    """
    found = entry_in(config, _ds_path(spec))
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return found if isinstance(found, bool | int) else None


def _ds_path(spec: KnobSpec) -> tuple[str, ...]:
    return spec.ds_key or (spec.name,)


class ConfigOfKnobs:
    """Writes the live settings that knobs have changed to the ds config, for rebuilds.

    Entries of other settings stay as the user has given them, and so does the entry of a knob that
    is set back to its first value.

    Args:
        engine_holder: Holder of the ds config and the engine. The engine's own copy, from which its
            collectives are estimated, has the values in use. They may differ from those for
            rebuilds, while a memory saving has lowered them.
    """

    def __init__(self, engine_holder: EngineHolder) -> None:
        self._engine_holder = engine_holder
        self._first_config = engine_holder.config

    def write(self, knobs: Sequence[DeepSpeedKnob]) -> Undo:
        """Write the values of knobs that have just been changed."""
        holder, engine = self._engine_holder, self._engine_holder.engine
        before = config, in_use = holder.config, engine.config
        for knob in knobs:
            if knob.unsupported_reason() is None:
                path, value = _ds_path(knob.spec), knob.get()
                entry = value if knob.is_set else entry_in(self._first_config, path)
                config = with_entry(config, path, entry)
                in_use = with_entry(in_use, path, value)
        holder.config, engine.config = config, in_use

        def undo() -> None:
            holder.config, engine.config = before

        return undo

    def on_engine_replaced(self) -> None:
        """Take the ds config of a rebuild as the one that the user has given.

        It has the values of the knobs that are set, which remain set on all later engines.
        """
        self._first_config = self._engine_holder.config


class AttachmentKnob(SwitchKnob):
    """Switches one attachment of an engine. A rebuild attaches it again.

    Args:
        spec: The knob's data.
        engine_holder: Holder of the engine.
        change: The key of the attachment in the engine holder.
        attachment: The setting to attach; after the knob has switched off another one, that one.
    """

    def __init__(
        self,
        spec: KnobSpec,
        engine_holder: EngineHolder,
        change: EngineChange,
        attachment: OptionalAttachment,
    ) -> None:
        self.spec = spec
        self._engine_holder, self._change, self._attachment = engine_holder, change, attachment

    def unsupported_reason(self) -> str | None:
        """Return why the setting cannot be attached; None if it is attached."""
        if self.get():
            return None
        return self._attachment.unsupported_reason(self._engine_holder.engine)

    def get(self) -> bool:
        """Return whether it is on."""
        return self._engine_holder.attached(self._change) is not None

    def _switch(self, *, on: bool) -> Undo:
        before = self._engine_holder.attached(self._change)
        if before is not None:  # the script may have chosen other modules
            self._attachment = cast(OptionalAttachment, before)
        if on != (before is not None):
            self._engine_holder.attach(self._change, self._attachment if on else None)
        return lambda: self._restore(before)

    def _restore(self, before: Attachment | None) -> None:
        if self._engine_holder.attached(self._change) is not before:
            self._engine_holder.attach(self._change, before)


def attachment_knobs(
    engine_holder: EngineHolder, activation_checkpointing: ModuleSelector
) -> list[AttachmentKnob]:
    """Return the knobs of activation checkpointing, of these modules, and of optimizer states."""
    return [
        AttachmentKnob(
            ACTIVATION_CHECKPOINTING,
            engine_holder,
            EngineChange.ACTIVATION_CHECKPOINTING,
            ActivationCheckpointing(activation_checkpointing),
        ),
        AttachmentKnob(
            OPTIMIZER_STATE_OFFLOAD,
            engine_holder,
            EngineChange.OPTIMIZER_STATE_OFFLOAD,
            OptimizerStateOffload(),
        ),
    ]


class EngineCheckpointingKnob(SwitchKnob):
    """Reads activation checkpointing of a script's own model, which can only be advised."""

    spec = ACTIVATION_CHECKPOINTING

    def __init__(self, source: EngineSource) -> None:
        self._source = source

    def unsupported_reason(self) -> str | None:
        """Return why checkpointing cannot be switched on, e.g. because it is on already."""
        return ActivationCheckpointing().unsupported_reason(self._source.engine)

    def get(self) -> bool:
        """Return False, because the knob is not available if checkpointing is on."""
        return False

    def _switch(self, *, on: bool) -> Undo:
        raise ZerowatchError(f"{self.name} cannot be set: the training loop is the script's own")


def restore_attachments(engine_holder: EngineHolder) -> Undo:
    """Return an undo that restores the present attachments.

    An engine in between may not support an attachment. Such an engine drops the attachment.
    """
    compressor = engine_holder.compressor
    changes = (
        EngineChange.ACTIVATION_CHECKPOINTING,
        EngineChange.MINIMAL_BUCKETS,
        EngineChange.OPTIMIZER_STATE_OFFLOAD,
    )
    attachments = {change: engine_holder.attached(change) for change in changes}

    def undo() -> None:
        for change, attachment in attachments.items():
            if engine_holder.attached(change) is not attachment:
                engine_holder.attach(change, attachment)
        if engine_holder.compressor is not compressor:
            engine_holder.set_compressor(compressor)

    return undo


COMPRESSIONS = ("bf16", "int8", "fp8")
_WITH_ERROR_FEEDBACK = frozenset({"int8", "fp8"})
_RESIDUAL_BYTES = 8  # per parameter, on every rank; see engine/compression/error_feedback.py
_SINGLE_RANK = "a single rank sends nothing"


class CompressorConfig(NamedTuple):
    """The values of the two knobs that a gradient compressor implements."""

    kind: Value
    asynchronous: Value


NO_COMPRESSOR = CompressorConfig(None, False)


def compressor_config(compressor: GradientCompressor | None) -> CompressorConfig:
    """Return the configuration of a compressor."""
    if compressor is None:
        return NO_COMPRESSOR
    kind = None if compressor.kind == PLAIN else compressor.kind
    return CompressorConfig(kind, compressor.asynchronous)


def detach_compressor(engine_holder: EngineHolder) -> Undo:
    """Detach the compressor, so that settings that it depends on can change."""
    compressor = engine_holder.compressor
    engine_holder.set_compressor(None)
    return lambda: engine_holder.set_compressor(compressor)


def set_compressor(
    engine_holder: EngineHolder, config: CompressorConfig, previous: GradientCompressor | None
) -> Undo:
    """Compress gradients as configured. Reuse the previous compressor if it has that config.

    Raises:
        ValueError: This engine's gradients are not accessible. The compressor is unchanged.
    """
    before = engine_holder.compressor
    if config == compressor_config(previous):
        engine_holder.set_compressor(previous)  # it still has residuals to send
    else:
        kind = None if config.kind is None else str(config.kind)
        engine_holder.compress(kind, asynchronous=bool(config.asynchronous))
    return lambda: engine_holder.set_compressor(before)


class CompressionKnob(ReadableKnob):
    """Reads the data type of gradients on the wire, which `set_compressor` sets."""

    spec = GRADIENT_COMPRESSION

    def __init__(self, engine_holder: EngineHolder, world_size: int) -> None:
        self._engine_holder, self._world_size = engine_holder, world_size

    def unsupported_reason(self) -> str | None:
        """Return why gradients cannot be compressed."""
        if self._engine_holder.compressor is not None:
            return None
        if self._world_size == 1:
            return _SINGLE_RANK
        return unsupported_reason(self._engine_holder.engine, asynchronous=False)

    def get(self) -> Value:
        """Return the data type, None without compression."""
        return compressor_config(self._engine_holder.compressor).kind

    def options(self) -> Sequence[Value]:
        """Return all data types of the knob, and the data type in use."""
        now = self.get()
        return (None, *COMPRESSIONS, *([now] if now not in (None, *COMPRESSIONS) else []))

    def memory_bytes(self, value: Value) -> int:
        """Return the additional bytes that residuals and buffers need with this value."""
        return self._memory_bytes(value) - self._memory_bytes(self.get())

    def _memory_bytes(self, value: Value) -> int:
        """Return the bytes of the residuals, and of the buffers in which a bucket is compressed."""
        if value is None:
            return 0
        engine = self._engine_holder.engine
        elements = total_elements(engine.module.parameters())
        num_values = min(elements, REDUCE_BUCKET_SIZE_SETTING.get(engine))
        device_type = torch.device(engine.device).type
        workspace = workspace_bytes(FORMATS[str(value)], num_values, self._world_size, device_type)
        return workspace + (value in _WITH_ERROR_FEEDBACK) * _RESIDUAL_BYTES * elements


class AsyncReductionKnob(ReadableKnob):
    """Reads whether ZeRO 1 and 2 reduce gradients during backward. `set_compressor` sets it."""

    spec = ASYNCHRONOUS_REDUCTION

    def __init__(self, engine_holder: EngineHolder, world_size: int) -> None:
        self._engine_holder, self._world_size = engine_holder, world_size

    def unsupported_reason(self) -> str | None:
        """Return why gradients cannot be reduced asynchronously."""
        if self._world_size == 1:
            return _SINGLE_RANK
        if zero_1_2_optimizer(self._engine_holder.engine) is None:
            return "only ZeRO 1 and 2 reduce buckets that can be waited for later"
        return unsupported_reason(self._engine_holder.engine, asynchronous=False)

    def get(self) -> Value:
        """Return whether gradients are reduced during backward."""
        return compressor_config(self._engine_holder.compressor).asynchronous

    def options(self) -> Sequence[Value]:
        """Return both values, or only False if another setting (overlap_comm) prevents True."""
        engine = self._engine_holder.engine
        is_possible = self.get() or unsupported_reason(engine, asynchronous=True) is None
        return (False, True) if is_possible else (False,)


# Values of the knob python_gc.
AUTOMATIC = "automatic"
BETWEEN_STEPS = "between_steps"
FULL_EVERY_WINDOWS = 100  # windows per full collection; other windows collect young objects only
_YOUNG = 1  # collects generations 0 and 1
_ALL = 2  # collects all generations


class _ForkedProcesses:
    """Switches automatic collection on in forked processes, such as workers of a DataLoader.

    They inherit that it is off, but have no windows after which to collect.

    Attributes:
        collect: Whether a process that is forked now should collect automatically.
    """

    def __init__(self) -> None:
        self.collect = False
        self._is_registered = False

    def register(self) -> None:
        """Register the function that runs in each forked process. Later calls do nothing."""
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(after_in_child=self._after_fork)  # cannot be unregistered

    def _after_fork(self) -> None:
        if self.collect:
            self.collect = False
            gc.enable()


_forked_processes = _ForkedProcesses()


class GcKnob(WritableKnob):
    """Sets when Python collects garbage: automatically, or between two windows.

    To collect between windows, the knob freezes existing objects, disables automatic collection,
    and runs a collection after each window. Processes that are forked meanwhile collect
    automatically.
    """

    spec = PYTHON_GC

    def __init__(self) -> None:
        self._is_ours = self._froze = self._was_enabled = self._has_collected = False
        self._windows = 0

    def unsupported_reason(self) -> str | None:
        """Return why the knob cannot be set, which is that the script disabled the collector."""
        return None if self._is_ours or gc.isenabled() else "the script has disabled it"

    def get(self) -> str:
        """Return the value in use."""
        return BETWEEN_STEPS if self._is_ours and not gc.isenabled() else AUTOMATIC

    def options(self) -> Sequence[Value]:
        """Return both values."""
        return (AUTOMATIC, BETWEEN_STEPS)

    def set(self, value: Value) -> Undo:
        """Set it.

        Raises:
            ZerowatchError: There is no such value.
        """
        if value not in self.options():
            raise ZerowatchError(f"{self.name} cannot be set to {value!r}")
        before = self.get()
        self._set(value == BETWEEN_STEPS)
        return lambda: self._set(before == BETWEEN_STEPS)

    def memory_bytes(self, value: Value) -> int:
        """Return 0, because the garbage of a window is small."""
        return 0

    def on_window_end(self) -> None:
        """Collect the garbage of a window if the knob is set to collect between windows."""
        if not self._is_ours:
            return
        self._windows += 1
        gc.collect(_YOUNG if self._windows % FULL_EVERY_WINDOWS else _ALL)

    def close(self) -> None:
        """Restore automatic collection. Safe to call twice."""
        self._set(False)

    def _set(self, is_ours: bool) -> None:
        if is_ours == self._is_ours:
            return
        self._is_ours = is_ours
        if is_ours:
            gc.collect(_YOUNG if self._has_collected else _ALL)  # a trial comes here repeatedly
            self._has_collected = True
            self._was_enabled, self._froze = gc.isenabled(), gc.get_freeze_count() == 0
            _forked_processes.register()
            _forked_processes.collect = self._was_enabled
            gc.disable()
            if self._froze:
                gc.freeze()
            return
        if self._froze:  # otherwise objects that the script froze would be unfrozen
            gc.unfreeze()
        _forked_processes.collect = False
        if self._was_enabled:
            gc.enable()
