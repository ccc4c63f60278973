"""Checkpoints of a TrainingRun, and its plan file.

The plan file has the micro-batch sizes that a restart needs, even if no checkpoint was written
after they were learned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....errors import CheckpointError, RebuildError
from ....metrics.catalog import training
from ...common.collective_attempt import raise_on_all_ranks
from ...common.host_group import HostGroup
from ...common.process_info import (
    launcher_may_restart,
    launcher_run_id,
    new_run_id,
    this_process,
)
from ...devices.available_memory import available_rank_bytes
from ...engine.rebuild.state_snapshot import autocast_scaler
from ..data.training_data import DataStart, TrainingData
from ..engine_holder import EngineHolder
from ..window.rng import RngState
from ..window_runner import WindowRunner
from .background_save import BackgroundSaver, copy_checkpoint
from .engine_files import is_writer_rank
from .folder_owner import folder_owner
from .load import find_checkpoint, load_checkpoint
from .plan_file import MicroBatchPlan, PlanFile, check_plan
from .rank_exchange import StoreExchange
from .run_state import RunState
from .save import save_checkpoint
from .shard_layout import shard_layout

logger = logging.getLogger(__name__)

_STATE = "Training may go on"


class CheckpointManager:
    """Writes and loads checkpoints, and writes the plan file whenever the plan changes.

    Args:
        engine_holder: Holder of the engine.
        window_runner: Runner of the windows, whose plan and counts are saved.
        data: Data of the run, whose position is saved.
        host_group: Group of all ranks.
        background: Whether a thread writes the checkpoints, if `save` is not asked for either.
    """

    def __init__(
        self,
        engine_holder: EngineHolder,
        window_runner: WindowRunner,
        data: TrainingData,
        host_group: HostGroup,
        *,
        background: bool,
    ) -> None:
        self._engine_holder, self._window_runner = engine_holder, window_runner
        self._data, self._host_group = data, host_group
        self._plan_file = PlanFile(engine_holder)
        self._is_node_leader = this_process().local_rank == 0
        self._superseded: set[Path] = set()
        self._written = self._relevant_state()
        self._has_trained = False
        run_id = engine_holder.engine.watch.run_id or launcher_run_id() or new_run_id()
        self._owner = folder_owner(run_id, host_group)
        self._is_background = background
        self._saver = BackgroundSaver()
        self._exchange: StoreExchange | None = None
        window_runner.on_fatal_oom.append(self._record_failure)

    def save(
        self, folder: str | Path, client_state: Any, keep: int, *, background: bool | None
    ) -> Path:
        """Write a checkpoint, or copy its state and write it later; see `TrainingRun.save`.

        A failure of the last checkpoint is raised only after this one was written or copied.
        """
        last_failure = self._last_failure()
        own = self._is_background if background is None else background
        can_start = own and self._saver.reserve_thread()
        in_background = bool(self._host_group.all_gather([can_start]).min())  # if all ranks can
        save = self._start_save if in_background else self._save
        path = save(folder, client_state, keep)
        if last_failure is not None:
            done = "is being written" if in_background else "was saved"
            raise CheckpointError(f"{last_failure}. The new checkpoint {path} {done}")
        return path

    def wait(self) -> None:
        """Wait until no checkpoint is being written beside training; all ranks must call it.

        Raises:
            CheckpointError: The last checkpoint was not completed.
        """
        failure = self._last_failure()
        if failure is not None:
            raise failure

    def load(
        self, folder: str | Path, *, fallback: bool | None, data: bool = True
    ) -> RunState | None:
        """Load the last checkpoint, if there is one, and the plan file if it is newer.

        The position in the data is loaded only if all ranks ask for it by `data`, or if an earlier
        attempt of this run has started the data at the beginning before it: see `DataStart`.
        """
        self._wait_for_threads()
        is_writer = is_writer_rank(self._engine_holder.engine)
        with self._owner.loading(Path(folder).absolute()) if is_writer else nullcontext():
            return self._load(folder, fallback=fallback, data=data)

    def _load(self, folder: str | Path, *, fallback: bool | None, data: bool) -> RunState | None:
        holder, runner, group = self._engine_holder, self._window_runner, self._host_group
        own = launcher_may_restart() if fallback is None else fallback
        # If all ranks allow it, or ask for it.
        allowed, with_position = group.all_gather([own, data]).min(axis=0).astype(bool).tolist()
        start = DataStart(is_requested=not with_position)
        checkpoint = find_checkpoint(folder, holder.engine, group, fallback=allowed)
        state = None
        if checkpoint is not None:
            state = checkpoint.state
            is_repeated = self._owner.is_earlier_attempt(state.data_started_by)
            start = replace(start, is_repeated=is_repeated)
            # First: a load that is refused changes nothing.
            position = self._data.position_to_load(state.data or {}, start)
            holder.restore_changes(checkpoint.manifest.config_changes)
            with holder.optimizer_states_on_device():
                load_checkpoint(checkpoint, holder.engine, group)
            scaler = autocast_scaler(holder.engine)
            if scaler is not None and state.autocast_scale is not None:
                scaler.load_state_dict(dict(state.autocast_scale))
            self._superseded = set(checkpoint.superseded)
            runner.steps, runner.samples = state.steps, state.samples
            runner.exponent = state.weight_exponent
            self._apply_plan(check_plan(state.micro_batch_plan, checkpoint.path))
            self._data.load_state_dict(position, start)
            if holder.compressor is not None and state.compression is not None:
                if checkpoint.is_resharded:
                    logger.warning(
                        "the rounding errors of compressed gradients in %s are discarded: they "
                        "belong to another number of ranks; training goes on, no action is needed",
                        checkpoint.path,
                    )
                else:
                    holder.compressor.load_state_dict(state.compression)
        else:
            self._data.set_start(start)
        self._apply_plan_file(None if state is None else state.steps)
        if checkpoint is not None and state is not None:  # last: a rebuild draws random numbers
            rng = RngState(**state.rng)
            if group.rank < checkpoint.manifest.engine.world_size:
                rng.restore()
            else:
                rng.restore_for_new_rank(group.rank)
        return state

    def on_window_end(self) -> None:
        """Write the plan and what rebuilds changed in the ds config, if either has changed."""
        self._has_trained = True
        state = self._relevant_state()
        has_folder = self._engine_holder.run_folder is not None  # the folder may be created late
        if state != self._written and has_folder:
            self._written = state
            if self._is_node_leader:
                self._plan_file.write(
                    self._plan(),
                    steps=self._window_runner.steps,
                    config_changes=self._engine_holder.config_changes,
                )

    def close(self) -> None:
        """Wait for the last checkpoint, and let other runs save. Safe to call twice.

        Raises:
            CheckpointError: The last checkpoint was not completed.
        """
        try:
            self._saver.close()
        finally:
            self._owner.close()

    def _save(self, folder: str | Path, client_state: Any, keep: int) -> Path:
        holder, group = self._engine_holder, self._host_group
        watch, state = holder.engine.watch, self._state(client_state)
        with watch.saving_checkpoint(), holder.optimizer_states_on_device():
            saved = save_checkpoint(
                folder, holder.engine, group, state, keep, self._superseded, self._owner
            )
        self._publish_size(watch, saved)
        return saved

    def _start_save(self, folder: str | Path, client_state: Any, keep: int) -> Path:
        holder, group, began_at = self._engine_holder, self._host_group, time.time()
        watch, state = holder.engine.watch, self._state(client_state)
        self._exchange = StoreExchange(group, previous=self._exchange)
        with watch.copying_checkpoint(), holder.optimizer_states_on_device():
            pending = copy_checkpoint(
                folder,
                holder.engine,
                group,
                state,
                available_rank_bytes,
                keep,
                self._superseded,
                self._owner,
            )
        on_end = partial(self._on_background_save, watch, pending.path, began_at)
        self._saver.start(pending, self._exchange, on_end)
        return pending.path

    def _state(self, client_state: Any) -> RunState:
        holder, runner = self._engine_holder, self._window_runner
        scaler = autocast_scaler(holder.engine)
        return RunState(
            steps=runner.steps,
            samples=runner.samples,
            config=holder.config,
            config_changes=holder.config_changes,
            micro_batch_plan=asdict(self._plan()),
            weight_exponent=runner.exponent,
            rng=asdict(RngState.capture()),
            data=self._data.state_dict(),
            compression=holder.compressor.state_dict() if holder.compressor else None,
            client_state=client_state,
            shard=shard_layout(holder.engine),
            autocast_scale=None if scaler is None else scaler.state_dict(),
            data_started_by=self._owner.attempt if self._data.starts_at_beginning else None,
        )

    def _last_failure(self) -> CheckpointError | None:
        """Wait for the last checkpoint; return on all ranks why it failed."""
        self._wait_for_threads()
        failure = self._saver.take_failure()
        try:
            with raise_on_all_ranks(self._host_group, "complete the last checkpoint", _STATE):
                if failure is not None:
                    raise failure
        except CheckpointError as error:
            return error
        return None

    def _wait_for_threads(self) -> None:
        if self._exchange is None:  # on all ranks: no save was started in the background
            return
        with self._engine_holder.engine.watch.waiting_for_checkpoint():
            self._saver.wait_together(self._host_group)

    def _on_background_save(
        self, watch: Any, path: Path, began_at: float, saved: bool, seconds: float
    ) -> None:
        watch.on_checkpoint_written(saved=saved, seconds=seconds, began_at=began_at)
        if saved:
            self._publish_size(watch, path)

    def _publish_size(self, watch: Any, saved: Path) -> None:
        if self._host_group.rank == 0:
            with suppress(OSError):  # the file system fails just now
                watch.recorder.set(training.LAST_CHECKPOINT_BYTES, _num_bytes(saved))

    def _plan(self) -> MicroBatchPlan:
        return MicroBatchPlan(
            micro_batch_samples=self._window_runner.micro_batch_samples,
            sizing=self._window_runner.replay.planner.limits,
        )

    def _relevant_state(self) -> Any:
        """Return the part of the plan that a restart needs; the rest only counts windows."""
        limits = self._window_runner.replay.planner.limits
        learned = dict(limits.bounds), dict(limits.failing)
        return (
            self._window_runner.micro_batch_samples,
            learned,
            self._engine_holder.config_changes,
        )

    def _apply_plan(self, plan: MicroBatchPlan) -> None:
        self._window_runner.micro_batch_samples = plan.micro_batch_samples
        self._window_runner.replay.planner.limits = plan.sizing

    def _apply_plan_file(self, loaded_steps: int | None) -> None:
        """Apply what earlier attempts of this run learned after their last checkpoint.

        Args:
            loaded_steps: Steps of the checkpoint that was loaded; None without a checkpoint.
        """
        stored = self._plan_file.read(self._host_group)
        if stored is None:
            return
        if stored.plan and stored.steps >= self._window_runner.steps:
            # A checkpoint of the same step may be newer: a rebuild after the window changes only
            # the checkpoint. Once this process has trained, the plan may be its own.
            is_newer = loaded_steps is None or stored.steps > loaded_steps
            if is_newer and not self._has_trained:
                self._restore_changes(stored.config_changes)
            self._apply_plan(stored.plan)
        planner = self._window_runner.replay.planner
        for failure in stored.failures:
            half = -(-failure.samples // 2)
            planner.limits = planner.limits.after_out_of_memory(
                failure.length, failure.samples, half
            )

    def _restore_changes(self, changes: Mapping[str, Any]) -> None:
        try:
            self._engine_holder.restore_changes(changes)
        except RebuildError as error:
            logger.warning(
                "the changes of the ds config in %s, which the last attempt made by a rebuild, "
                "are ignored: %s; training resumes without them, call rebuild to make them",
                self._plan_file.path,
                error,
            )

    def _record_failure(self, length: int, samples: int) -> None:
        self._plan_file.add_failure(length=length, samples=samples)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
