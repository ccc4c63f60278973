"""Holds a run's engine and its attachments, such as compression and memory savings.

A rebuild replaces the engine and keeps the attachments. All ranks must make the same calls between
the same two windows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from ...errors import RebuildError
from ..common.collective_attempt import CollectiveAttempt
from ..common.ds_config import merged, training_config, zero_stage
from ..common.host_group import HostGroup
from ..common.undo import FAILURES, Undo
from ..engine.compression.gradient_compressor import GradientCompressor
from ..engine.live_settings.activation_checkpointing import ActivationCheckpointing, ModuleSelector
from ..engine.live_settings.all_settings import MinimalBuckets
from ..engine.live_settings.optimizer_state_offload import (
    OffloadedOptimizerStates,
    OptimizerStateOffload,
)
from ..engine.rebuild.engine_replacement import (
    MakeEngine,
    UndoneRebuildError,
    not_rebuilt,
    rebuild,
)
from .engine_change import EngineChange
from .oom_recovery.escalation import MemorySaving, rebuild_changes
from .run_end import RunEnd
from .run_metrics import RebuildOutcome, RunMetrics

logger = logging.getLogger(__name__)


class Attachment(Protocol):
    """Changes an engine, and makes the same change to an engine that replaces it."""

    def attach(self, engine: Any) -> Undo:
        """Apply the setting between two windows, and return the undo."""


class OptionalAttachment(Attachment, Protocol):
    """Saves memory on the engines that support it."""

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why attaching it to this engine would free no memory; None if it may free some."""


class EngineHolder:
    """Holds a run's engine, replaces it, and moves its attachments to the new engine.

    Args:
        engine: The first engine. Its watch moves to the engines that replace it.
        config: The first engine's ds config.
        host_group: Group of all ranks, in which they vote on rebuilds.
        metrics: Recorder of rebuilds and compression.
        make_engine: Builds an engine from a module and a ds config.
        run_end: Ends the run if a rebuild leaves no engine.

    Attributes:
        engine: The engine in use.
        config: The ds config in use.
        config_changes: What rebuilds have changed in the first ds config, nested as in it.
        compressor: Compressor of the gradients; None without compression.
        num_changes: Changes of the engine so far: replacements, and attachments on or off.
        on_engine_replaced: Functions to call when the engine has been replaced, before attachments
            are attached to the new engine.
    """

    def __init__(
        self,
        engine: Any,
        config: Mapping[str, Any],
        host_group: HostGroup,
        metrics: RunMetrics,
        make_engine: MakeEngine,
        run_end: RunEnd,
    ) -> None:
        self.engine, self.config = engine, config
        self.config_changes: Mapping[str, Any] = {}
        self.compressor: GradientCompressor | None = None
        self.num_changes = 0
        self._is_replacing = False  # stays True if the replacement is interrupted
        self._watch, self._host_group, self._metrics = engine.watch, host_group, metrics
        self._make_engine, self._first_config, self._run_end = make_engine, config, run_end
        self.on_engine_replaced: list[Callable[[], None]] = []
        self._attached: dict[EngineChange, tuple[Attachment, Undo]] = {}

    @property
    def run_folder(self) -> Path | None:
        """Run folder of the engine's watch. It changes if the caller opens another watch."""
        folder: Path | None = self.engine.watch.run_folder
        return folder

    def checkpoint_activations(self, chosen: ModuleSelector | bool) -> None:
        """Checkpoint activations of chosen modules; True for the repeated block, False for none.

        Raises:
            ZerowatchError: The model has no such module.
        """
        if chosen is False:
            self.attach(EngineChange.ACTIVATION_CHECKPOINTING, None)
            return
        activation_checkpointing = ActivationCheckpointing(None if chosen is True else chosen)
        self.attach(EngineChange.ACTIVATION_CHECKPOINTING, activation_checkpointing)

    def compress(self, kind: str | None, *, asynchronous: bool = False) -> None:
        """Compress gradients from the next window on; None for DeepSpeed's own reduction.

        Raises:
            ValueError: The kind does not exist, or this engine's gradients are not accessible.
        """
        compressor = None
        if kind is not None or asynchronous:
            compressor = GradientCompressor(kind or "plain", asynchronous=asynchronous)
            reason = compressor.unsupported_reason(self.engine)
            if reason is not None:
                raise ValueError(f"gradients cannot be sent as {compressor.kind}: {reason}")
        self.set_compressor(compressor)

    def set_compressor(self, compressor: GradientCompressor | None) -> None:
        """Replace the compressor of gradients; None detaches it.

        Raises:
            ValueError: The engine's gradients are not accessible. The previous compressor stays in
                use.
        """
        self.attach(EngineChange.GRADIENT_COMPRESSION, compressor)
        self.compressor = compressor

    def attached(self, change: EngineChange) -> Attachment | None:
        """Return the engine's attachment for a kind of change; None if there is no attachment."""
        return self._attached[change][0] if change in self._attached else None

    def attach(self, change: EngineChange, attachment: Attachment | None) -> None:
        """Replace the engine's attachment for a kind of change.

        None detaches the previous attachment without a replacement. If attaching the new attachment
        raises an error, the previous attachment is attached again and the error is re-raised.
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
        """Start the compressor's window from its committed state.

        Args:
            unit: Size of this window's gradients relative to those of a mean loss.
        """
        if self.compressor is not None:
            self.compressor.begin_window(unit)

    def abort_window(self) -> None:
        """Discard the window in the compressor and the watch, and offload optimizer states."""
        self._watch.discard_window()
        if self.compressor is not None:
            self.compressor.abort_window()
        for states in self._offloaded():
            states.offload()

    def commit_window(self, *, skipped: bool) -> None:
        """Commit the compressor's window, or discard it if the step was skipped.

        Publishes the window's compression error.
        """
        if self.compressor is None:
            return
        if skipped:
            self.compressor.abort_window()
        else:
            self.compressor.commit_window()
        self._metrics.set_compression_error(self.compressor.kind, self.compressor.error_ratio)

    def rebuild(self, changes: Mapping[str, Any]) -> None:
        """Replace the engine by an engine with a changed ds config and the same training state.

        Args:
            changes: The keys of the ds config to change, nested as in the ds config.

        Raises:
            RebuildError: The new engine cannot be built. Training can continue as before.
        """
        self.rebuild_as(self._merged_config(self.config, changes))

    def restore_changes(self, changes: Mapping[str, Any]) -> None:
        """Rebuild the engine unless its ds config is the first one with these changes.

        Args:
            changes: `config_changes` that were saved, possibly as JSON.

        Raises:
            RebuildError: The new engine cannot be built. Training can continue as before.
        """
        if _as_json(merged(self._first_config, changes)) != _as_json(self.config):
            self.rebuild_as(self._merged_config(self._first_config, changes))

    def rebuild_as(self, config: Mapping[str, Any]) -> None:
        """Replace the engine by an engine with this complete ds config.

        Raises:
            RebuildError: The new engine cannot be built. Training can continue as before.
        """
        began = perf_counter()
        outcome: RebuildOutcome = "refused"
        with self._detached():
            try:
                engine = self._build_replacement(config)
                outcome = "committed"
                self.config = config
                self.config_changes = _changes(self._first_config, config)
                self._replace_engine(engine)
            except UndoneRebuildError as error:
                outcome = "undone"
                self._replace_engine(error.engine)
                raise
            finally:
                self._metrics.count_rebuild(outcome, perf_counter() - began)

    @contextmanager
    def _detached(self) -> Iterator[None]:
        """Detach everything during the block, then attach it to the engine in use by then."""
        try:
            for _, undo in reversed(self._attached.values()):
                undo()
            yield
        except BaseException as error:
            if not self.has_engine:
                self._run_end.end_without_engine(error)
            raise
        finally:
            if self.has_engine:
                self._reattach_all()

    @property
    def has_engine(self) -> bool:
        """Whether the engine can train: a rebuild may remove it and then fail or be interrupted."""
        return not self._is_replacing and self.engine.optimizer is not None

    def reload_optimizer_states(self) -> None:
        """Copy offloaded optimizer states back to the device."""
        for states in self._offloaded():
            states.reload()

    @contextmanager
    def optimizer_states_on_device(self) -> Iterator[None]:
        """Keep optimizer states on the device during the block, so that they can be read."""
        self.reload_optimizer_states()
        try:
            yield
        finally:
            for states in self._offloaded():
                states.offload()

    def memory_savings(self, chosen: ModuleSelector = None) -> list[MemorySaving]:
        """Return the memory savings that the ds config still allows, in no particular order.

        Args:
            chosen: Modules for activation checkpointing; None for the default.
        """
        on_host = self.engine.device == torch.device("cpu")
        rebuilds = rebuild_changes(self.config, self._host_group.world_size, on_host=on_host)
        activation_checkpointing = ActivationCheckpointing(chosen)
        savings: list[tuple[EngineChange, OptionalAttachment]] = [
            (EngineChange.ACTIVATION_CHECKPOINTING, activation_checkpointing),
            (EngineChange.MINIMAL_BUCKETS, MinimalBuckets()),
            (EngineChange.OPTIMIZER_STATE_OFFLOAD, OptimizerStateOffload()),
        ]
        return [
            *(_AttachedSaving(self, change, saving) for change, saving in savings),
            *(_RebuildSaving(self, ds_changes) for ds_changes in rebuilds),
        ]

    def close(self) -> None:
        """Detach everything from the engine. Safe to call twice."""
        for change in reversed(list(self._attached)):
            self._detach(change)

    def try_attach(self, change: EngineChange, saving: OptionalAttachment) -> bool:
        """Attach a memory saving, and return whether this succeeded.

        It does not succeed if the saving is attached already, is unsupported, or raises an error.
        """
        try:
            if change in self._attached or saving.unsupported_reason(self.engine) is not None:
                return False
            self._attach(change, saving)
        except FAILURES as error:  # possibly on this rank only
            logger.warning(
                "memory saving failed on this rank: %s: %s; training goes on, no action is needed",
                change.value,
                error,
            )
            return False
        return True

    def try_rebuild(self, changes: Mapping[str, Any]) -> bool:
        """Rebuild with changes of the ds config, and return whether this succeeded.

        It does not succeed if the changes are outdated or the rebuild fails.
        """
        config = merged(self.config, changes)
        if config == self.config or zero_stage(config) < zero_stage(self.config):
            return False  # the engine was rebuilt after these changes were listed
        try:
            self.rebuild(changes)
        except RebuildError as error:
            logger.warning("memory saving by a rebuild failed: %s", error)
            return False
        return True

    def _merged_config(
        self, before: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a ds config with changes, in which the run still controls its windows.

        Raises:
            RebuildError: It cannot be used; raised on all ranks.
        """
        with CollectiveAttempt(self._host_group) as attempt:
            config = training_config(merged(before, changes))
        if attempt.error is not None:
            self._metrics.count_rebuild("refused", 0.0)
            raise not_rebuilt(attempt.error)
        return config

    def _build_replacement(self, config: Mapping[str, Any]) -> Any:
        with self._watch.checkpoint_phase():
            return rebuild(
                self.engine,
                config,
                make_engine=self._make_engine,
                host_group=self._host_group,
                on_engine_lost=self._run_end.end_in_rebuild,
            )

    def _replace_engine(self, engine: Any) -> None:
        self._is_replacing = True
        self._watch.rebind_engine(engine)
        self.engine = engine
        self.num_changes += 1
        for notify in self.on_engine_replaced:
            notify()
        self._is_replacing = False

    def _offloaded(self) -> list[OffloadedOptimizerStates]:
        undos = (undo for _, undo in self._attached.values())
        return [undo for undo in undos if isinstance(undo, OffloadedOptimizerStates)]

    def _attach(self, change: EngineChange, attachment: Attachment) -> None:
        self.num_changes += 1
        self._attached[change] = (attachment, attachment.attach(self.engine))

    def _detach(self, change: EngineChange) -> None:
        if change in self._attached:
            self.num_changes += 1
            self._attached.pop(change)[1]()

    def _reattach_all(self) -> None:
        """Attach the attachments of the previous engine to this engine, if it supports them."""
        for change, (attachment, _) in list(self._attached.items()):
            try:
                self._attach(change, attachment)
            except FAILURES as error:
                # Do not raise: if only this rank failed, the other ranks would wait for it.
                del self._attached[change]
                if change is EngineChange.GRADIENT_COMPRESSION:
                    self.compressor = None
                logger.warning(
                    "%s is off on the rebuilt engine: %s; training goes on without it. To keep "
                    "it, rebuild with a ds config that supports it",
                    change.value,
                    error,
                )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that, merged into a nested mapping, make another one with as many keys."""
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            below = _changes(old, value)
            if below:
                changes[name] = below
        elif name not in before or value != old:
            changes[name] = value
    return changes


def _as_json(value: Any) -> str:
    """Return text that is equal for a value before and after JSON, where tuples become lists."""
    return json.dumps(value, sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class _AttachedSaving:
    """Memory saving that is attached to the engine."""

    holder: EngineHolder
    change: EngineChange
    saving: OptionalAttachment

    def apply(self) -> bool:
        return self.holder.try_attach(self.change, self.saving)


@dataclass(frozen=True, slots=True)
class _RebuildSaving:
    """Memory saving by a rebuild with changes of the ds config."""

    holder: EngineHolder
    ds_changes: Mapping[str, Any]
    change: EngineChange = EngineChange.REBUILD

    def apply(self) -> bool:
        return self.holder.try_rebuild(self.ds_changes)
