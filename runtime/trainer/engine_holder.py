"""What changes a run's engine between two windows; none of it is lost when another thing changes.

All ranks call it alike, at the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from ...errors import DsConfigError, RebuildError, ZerowatchError
from ..common.host_group import HostGroup
from ..common.training_config import leaner_engines, merged, training_config, zero_stage
from ..engine.compression.gradient_compressor import GradientCompressor
from ..engine.live_settings.activation_checkpointing import ActivationCheckpointing
from ..engine.live_settings.choose_modules import ModuleSelector
from ..engine.live_settings.minimal_buckets import MinimalBuckets
from ..engine.live_settings.optimizer_state_offload import (
    OffloadedOptimizerStates,
    OptimizerStateOffload,
)
from ..engine.rebuild.rebuild import MakeEngine, UndoneRebuildError, rebuild
from .metrics import RebuildOutcome, TrainerMetrics
from .oom_recovery.escalation import EngineChange, Escalation

logger = logging.getLogger(__name__)

Undo = Callable[[], None]


class Attachment(Protocol):
    """A setting that can be attached to an engine, and to the engine that replaces it."""

    def attach(self, engine: Any) -> Undo:
        """Apply the setting between two windows, and return the undo."""


class MemorySaving(Attachment, Protocol):
    """An attachment that reduces memory use."""

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why it would free no memory on this engine; None if it may."""


class EngineHolder:
    """Engine of a run and what is attached to it.

    Args:
        engine: The first one; its watch goes along to others.
        config: Its ds config.
        host_group: Of the run.
        figures: Where it is told.
        make_engine: Makes another of a module and a ds config.

    Attributes:
        engine, config: As they stand.
        codec: What compresses gradients, where something does.
        is_rebuilt: Whether this is no longer the first engine.
        on_adopted: Called as another engine takes the place of one, before anything is laid on it.
    """

    def __init__(
        self,
        engine: Any,
        config: Mapping[str, Any],
        host_group: HostGroup,
        figures: TrainerMetrics,
        make_engine: MakeEngine,
    ) -> None:
        self.engine, self.config = engine, config
        self.codec: GradientCompressor | None = None
        self.is_rebuilt = False
        self._watch, self._host_group, self._figures = engine.watch, host_group, figures
        self._make_engine = make_engine
        self.on_adopted: list[Callable[[], None]] = []
        self._attached: dict[EngineChange, tuple[Attachment, Undo]] = {}

    def checkpoint_activations(self, chosen: ModuleSelector | bool) -> None:
        """Checkpoint activations of the chosen modules; of the repeated block by True; or stop.

        Raises:
            ZerowatchError: No such module is there.
        """
        if chosen is False:
            self.attach(EngineChange.ACTIVATION_CHECKPOINTING, None)
            return
        checkpointing = ActivationCheckpointing(None if chosen is True else chosen)
        self.attach(EngineChange.ACTIVATION_CHECKPOINTING, checkpointing)

    def compress(self, kind: str | None, *, asynchronous: bool = False) -> None:
        """Send gradients in another form from the next window on; None for DeepSpeed's own way.

        Raises:
            ValueError: There is no such form, or this engine's gradients cannot be had.
        """
        codec = None
        if kind is not None or asynchronous:
            codec = GradientCompressor(kind or "plain", asynchronous=asynchronous)
            reason = codec.unsupported_reason(self.engine)
            if reason is not None:
                raise ValueError(f"gradients cannot be sent as {codec.kind}: {reason}")
        self.send_through(codec)

    def send_through(self, codec: GradientCompressor | None) -> None:
        """Let gradients go through this codec in the place of the one before, if any.

        Raises:
            ValueError: The engine's gradients cannot be had; the one before is on.
        """
        self.attach(EngineChange.GRADIENT_COMPRESSION, codec)
        self.codec = codec

    def attached(self, change: EngineChange) -> Attachment | None:
        """Return what is attached to the engine for a change; None if nothing is."""
        return self._attached[change][0] if change in self._attached else None

    def attach(self, change: EngineChange, attachment: Attachment | None) -> None:
        """Replace what is attached to the engine for a change; None only detaches.

        If the new one raises, the previous one is attached again and the error is re-raised.
        """
        before = self.attached(change)
        self._detach(change)
        with ExitStack() as undo:
            if before is not None:
                undo.callback(self._attach, change, before)
            if attachment is not None:
                self._attach(change, attachment)
            undo.pop_all()

    def begin_window(self, unit: float) -> None:
        """Let the codec start from what was committed.

        Args:
            unit: What gradients come as in this window, where those of a mean loss were 1.
        """
        if self.codec is not None:
            self.codec.begin_window(unit)

    def abort_window(self) -> None:
        """Have codec and watch forget a window that is not committed."""
        self._watch.discard_window()
        if self.codec is not None:
            self.codec.abort_window()
        for states in self._offloaded():
            states.offload()

    def commit_window(self, *, skipped: bool) -> None:
        """Let the codec keep what it lost in a window, if that had an update, and tell how much."""
        if self.codec is None:
            return
        if skipped:
            self.codec.abort_window()
        else:
            self.codec.commit_window()
        self._figures.compressed(self.codec.kind, self.codec.error_ratio)

    def rebuild(self, changes: Mapping[str, Any]) -> None:
        """Put another engine in the place of this one, with its whole training state.

        Args:
            changes: What is to be different in the ds config, nested as it is.

        Raises:
            RebuildError: Nothing has changed; training goes on.
        """
        self.rebuild_as(self._changed(changes))

    def rebuild_as(self, config: Mapping[str, Any]) -> None:
        """Put another engine in the place of this one, of a ds config that a run was made for.

        Raises:
            RebuildError: Nothing has changed; training goes on.
        """
        began = perf_counter()
        outcome: RebuildOutcome = "refused"
        with self._detached():
            try:
                engine = self._rebuilt(config)
                outcome = "committed"
                self.config, self.is_rebuilt = config, True
                self._adopt(engine)
            except UndoneRebuildError as error:
                outcome = "undone"
                self._adopt(error.engine)
                raise
            finally:
                self._figures.rebuilt(outcome, perf_counter() - began)

    @contextmanager
    def _detached(self) -> Iterator[None]:
        """Detach everything during the block, then attach it to the engine of that moment."""
        try:
            for _, undo in reversed(self._attached.values()):
                undo()
            yield
        finally:
            if self.engine.optimizer is not None:  # else no engine could be built at all
                self._reattach_all()

    def reload_optimizer_states(self) -> None:
        """Copy offloaded optimizer states back to the device."""
        for states in self._offloaded():
            states.reload()

    @contextmanager
    def optimizer_states_on_device(self) -> Iterator[None]:
        """Keep optimizer states on the device during the block, in which they may be read."""
        self.reload_optimizer_states()
        try:
            yield
        finally:
            for states in self._offloaded():
                states.offload()

    def escalations(self, chosen: ModuleSelector = None) -> list[Escalation]:
        """Return the changes that reduce memory use, cheapest first, from the present config on."""
        on_host = self.engine.device == torch.device("cpu")
        rebuilds = leaner_engines(self.config, self._host_group.world_size, on_host=on_host)
        checkpointing = ActivationCheckpointing(chosen)
        savings: list[tuple[EngineChange, MemorySaving]] = [
            (EngineChange.ACTIVATION_CHECKPOINTING, checkpointing),
            (EngineChange.MINIMAL_BUCKETS, MinimalBuckets()),
            (EngineChange.OPTIMIZER_STATE_OFFLOAD, OptimizerStateOffload()),
        ]
        return [
            *(_AttachSaving(self, change, saving) for change, saving in savings),
            *(_Rebuild(self, ds_changes) for ds_changes in rebuilds),
        ]

    def close(self) -> None:
        """Detach everything from the engine. Safe to call twice."""
        for change in reversed(list(self._attached)):
            self._detach(change)

    def try_attach(self, change: EngineChange, saving: MemorySaving) -> bool:
        """Attach a memory saving; return False if it is attached, unsupported, or fails."""
        if change in self._attached or saving.unsupported_reason(self.engine) is not None:
            return False
        try:
            self._attach(change, saving)
        except (RuntimeError, MemoryError, ZerowatchError) as error:  # on this rank alone, perhaps
            logger.warning("%s: %s", change.value, error)
            return False
        return True

    def try_rebuild(self, changes: Mapping[str, Any]) -> bool:
        """Rebuild with changes of the ds config; return False if it is outdated or fails."""
        config = merged(self.config, changes)
        if config == self.config or zero_stage(config) < zero_stage(self.config):
            return False  # it was rebuilt since these were listed
        try:
            self.rebuild(changes)
        except RebuildError as error:
            logger.warning("%s", error)
            return False
        return True

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ds config with changes, and still such that the run ends its windows."""
        try:
            return training_config(merged(self.config, changes))
        except DsConfigError as error:
            raise RebuildError(f"the engine was not rebuilt: {error}") from error

    def _rebuilt(self, config: Mapping[str, Any]) -> Any:
        with self._watch.suspended():
            return rebuild(
                self.engine, config, make_engine=self._make_engine, host_group=self._host_group
            )

    def _adopt(self, engine: Any) -> None:
        self.engine = engine
        self._watch.rebind_engine(engine)
        for tell in self.on_adopted:
            tell()

    def _offloaded(self) -> list[OffloadedOptimizerStates]:
        undos = (undo for _, undo in self._attached.values())
        return [undo for undo in undos if isinstance(undo, OffloadedOptimizerStates)]

    def _attach(self, change: EngineChange, attachment: Attachment) -> None:
        self._attached[change] = (attachment, attachment.attach(self.engine))

    def _detach(self, change: EngineChange) -> None:
        if change in self._attached:
            self._attached.pop(change)[1]()

    def _reattach_all(self) -> None:
        """Attach to this engine what the last one had, as far as this one supports it."""
        for change, (attachment, _) in list(self._attached.items()):
            try:
                self._attach(change, attachment)
            except (ValueError, RuntimeError, MemoryError, ZerowatchError) as error:
                # Perhaps on this rank alone: others would wait for it, were it raised.
                del self._attached[change]
                if change is EngineChange.GRADIENT_COMPRESSION:
                    self.codec = None
                logger.warning("%s is off on the new engine: %s", change.value, error)


@dataclass(frozen=True, slots=True)
class _AttachSaving:
    """Escalation that attaches a memory saving."""

    holder: EngineHolder
    change: EngineChange
    saving: MemorySaving

    def apply(self) -> bool:
        return self.holder.try_attach(self.change, self.saving)


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """Escalation that rebuilds the engine with changes of the ds config."""

    holder: EngineHolder
    ds_changes: Mapping[str, Any]
    change: EngineChange = EngineChange.REBUILD

    def apply(self) -> bool:
        return self.holder.try_rebuild(self.ds_changes)
