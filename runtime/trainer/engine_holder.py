"""What changes a run's engine between two windows; none of it is lost when another thing changes.

All ranks call it alike, at the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ...errors import DsConfigError, RebuildError, ZerowatchError
from ..common.host_group import HostGroup
from ..common.training_config import leaner_engines, merged, training_config, zero_stage
from ..engine.compression.gradient_compressor import GradientCompressor
from ..engine.live_settings import activation_checkpointing
from ..engine.live_settings.choose_modules import ModuleSelector
from ..engine.live_settings.memory_savings import MemorySaving, memory_savings
from ..engine.live_settings.optimizer_state_offload import OptimizerStateOffload
from ..engine.rebuild.rebuild import MakeEngine, UndoneRebuildError, rebuild
from .metrics import RebuildOutcome, TrainerMetrics
from .oom_recovery.escalation import STEPS, Escalation

logger = logging.getLogger(__name__)

CHECKPOINTING, _, SLEEP, REBUILT = STEPS
CODEC = "gradient codec"

Undo = Callable[[], None]
Apply = Callable[[Any], Undo]


class EngineHolder:
    """Holds the engine of a run, and what was laid on it.

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
        self._laid_on: dict[str, tuple[Apply, Undo]] = {}

    def checkpoint_activations(self, chosen: ModuleSelector | bool) -> None:
        """Checkpoint activations of the chosen modules; of the repeated block by True; or stop.

        Raises:
            ZerowatchError: No such module is there.
        """
        if chosen is False:
            self.attach(CHECKPOINTING, None)
            return
        which = None if chosen is True else chosen
        self.attach(CHECKPOINTING, partial(activation_checkpointing.apply, chosen=which))

    def compress(self, kind: str | None, *, asynchronous: bool = False) -> None:
        """Send gradients in another form from the next window on; None for DeepSpeed's own way.

        Raises:
            ValueError: There is no such form, or this engine's gradients cannot be had.
        """
        codec = None
        if kind is not None or asynchronous:
            codec = GradientCompressor(kind or "plain", asynchronous=asynchronous)
            reason = codec.refusal(self.engine)
            if reason is not None:
                raise ValueError(f"gradients cannot be sent as {codec.kind}: {reason}")
        self.send_through(codec)

    def send_through(self, codec: GradientCompressor | None) -> None:
        """Let gradients go through this codec in the place of the one before, if any.

        Raises:
            ValueError: The engine's gradients cannot be had; the one before is on.
        """
        self.attach(CODEC, None if codec is None else codec.attach)
        self.codec = codec

    def attached(self, name: str) -> Apply | None:
        """Return what laid on the engine what it bears under a name; None where that is nothing."""
        return self._laid_on[name][0] if name in self._laid_on else None

    def attach(self, name: str, apply: Apply | None) -> None:
        """Lay something on the engine in the place of what it bears under a name, or nothing.

        What `apply` raises is raised; the engine then bears what it bore before.
        """
        before = self.attached(name)
        self._detach(name)
        with ExitStack() as undo:
            if before is not None:
                undo.callback(self._attach, name, before)
            if apply is not None:
                self._attach(name, apply)
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
        for sleep in self._sleeping():
            sleep.lie_down()

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
        """Take everything off the engine for the time of the block, and lay it on what is then."""
        try:
            for _, undo in reversed(self._laid_on.values()):
                undo()
            yield
        finally:
            if self.engine.optimizer is not None:  # else no engine could be built at all
                self._reattach_all()

    def wake(self) -> None:
        """Have the optimizer's states back where they are updated, if they sleep."""
        for sleep in self._sleeping():
            sleep.wake()

    @contextmanager
    def optimizer_states_on_device(self) -> Iterator[None]:
        """Have them back for the time of the block, in which they may be read."""
        self.wake()
        try:
            yield
        finally:
            for sleep in self._sleeping():
                sleep.lie_down()

    def escalations(self, chosen: ModuleSelector = None) -> list[Escalation]:
        """Return what may be given up for memory, in order, from here on."""
        on_host = self.engine.device == torch.device("cpu")
        rebuilds = leaner_engines(self.config, self._host_group.world_size, on_host=on_host)
        return [
            *(
                Escalation(name=rung.name, apply=partial(self._take, rung))
                for rung in memory_savings(chosen)
            ),
            *(Escalation(name=REBUILT, apply=partial(self._try_rebuild, one)) for one in rebuilds),
        ]

    def close(self) -> None:
        """Take everything off the engine again. Safe to call twice."""
        for name in reversed(list(self._laid_on)):
            self._detach(name)

    def _take(self, rung: MemorySaving) -> bool:
        if rung.name in self._laid_on or rung.unavailable(self.engine) is not None:
            return False
        try:
            self._attach(rung.name, rung.apply)
        except (RuntimeError, MemoryError, ZerowatchError) as error:  # on this rank alone, perhaps
            logger.warning("%s: %s", rung.name, error)
            return False
        return True

    def _changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ds config with changes, and still such that the run ends its windows."""
        try:
            return training_config(merged(self.config, changes))
        except DsConfigError as error:
            raise RebuildError(f"the engine was not rebuilt: {error}") from error

    def _try_rebuild(self, changes: Mapping[str, Any]) -> bool:
        config = merged(self.config, changes)
        if config == self.config or zero_stage(config) < zero_stage(self.config):
            return False  # it was rebuilt since these were listed
        try:
            self.rebuild(changes)
        except RebuildError as error:
            logger.warning("%s", error)
            return False
        return True

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

    def _sleeping(self) -> list[OptimizerStateOffload]:
        return [
            undo for _, undo in self._laid_on.values() if isinstance(undo, OptimizerStateOffload)
        ]

    def _attach(self, name: str, apply: Apply) -> None:
        self._laid_on[name] = (apply, apply(self.engine))

    def _detach(self, name: str) -> None:
        if name in self._laid_on:
            self._laid_on.pop(name)[1]()

    def _reattach_all(self) -> None:
        """Lay on this engine what the last one bore, as far as it can be there."""
        for name, (apply, _) in list(self._laid_on.items()):
            try:
                self._attach(name, apply)
            except (ValueError, RuntimeError, MemoryError, ZerowatchError) as error:
                # Perhaps on this rank alone: others would wait for it, were it raised.
                del self._laid_on[name]
                if name == CODEC:
                    self.codec = None
                logger.warning("%s is off on the new engine: %s", name, error)
