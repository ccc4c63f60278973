"""A run put on the disk and taken up again, with its plan kept apart so that no death loses it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....errors import RebuildError
from ...common.host_group import HostGroup
from ...common.process_info import this_process
from ..data.data_source import TrainingData
from ..engine_holder import EngineHolder
from ..oom_recovery.sizing import MicroBatchLimits
from ..window.rng import RngState
from ..window_runner import WindowRunner
from .load import load_run, saved_config
from .plan_file import PlanFile
from .save import save_run
from .state import RunState

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and loads a run; writes its plan as soon as that changes.

    Args:
        changes: Holds the engine.
        windows: Of the run.
        sharing: Of the run.
        host_group: Of all ranks.
    """

    def __init__(
        self,
        changes: EngineHolder,
        windows: WindowRunner,
        sharing: TrainingData,
        host_group: HostGroup,
    ) -> None:
        self._changes, self._windows, self._sharing = changes, windows, sharing
        self._host_group = host_group
        self._plan_file = PlanFile(lambda: changes.engine.watch.run_folder)
        self._leads_node = this_process().local_rank == 0
        self._written = self._decisive()
        windows.on_fatal_oom.append(self._note_failure)

    def save(self, folder: str | Path, client: Any, keep: int) -> Path:
        """See `TrainingRun.save`."""
        state = RunState(
            steps=self._windows.steps,
            samples=self._windows.samples,
            config=self._changes.config,
            rebuilt=self._changes.is_rebuilt,
            micro_batch_plan=self._plan(),
            weight_exponent=self._windows.exponent,
            rng=asdict(RngState.capture()),
            data=self._sharing.state_dict(),
            codec=self._changes.compressor.state_dict() if self._changes.compressor else None,
            client=client,
        )
        with self._changes.optimizer_states_on_device():
            return save_run(folder, self._changes.engine, self._host_group, state, keep)

    def load(self, folder: str | Path) -> RunState | None:
        """Load the last save, if there is one, and what was learned of memory since."""
        self._take_config(saved_config(folder, self._host_group))
        with self._changes.optimizer_states_on_device():
            state = load_run(folder, self._changes.engine, self._host_group)
        if state is not None:
            windows = self._windows
            windows.steps, windows.samples = state.steps, state.samples
            windows.exponent = state.weight_exponent
            self._take_plan(state.micro_batch_plan)
            self._sharing.load_state_dict(state.data or {})
            if self._changes.compressor is not None and state.codec is not None:
                self._changes.compressor.load_state_dict(state.codec)
        self._heed_plan_file()
        if state is not None:
            RngState(**state.rng).restore()  # after a rebuild, which draws random numbers
        return state

    def window_ended(self) -> None:
        """Write the plan if it has changed, and the configuration if the engine was rebuilt."""
        decisive = self._decisive()
        has_place = self._changes.engine.watch.run_folder is not None  # a run may get it late
        if decisive != self._written and has_place:
            self._written = decisive
            if self._leads_node:
                self._plan_file.write(
                    self._plan(), steps=self._windows.steps, config=self._config_if_rebuilt()
                )

    def _plan(self) -> dict[str, Any]:
        return {
            "micro_batch_samples": self._windows.micro_batch_samples,
            "sizing": asdict(self._windows.replay.planner.limits),
        }

    def _decisive(self) -> Any:
        """Return what a restart must know; the rest of a plan only counts windows."""
        sizing = self._windows.replay.planner.limits
        learned = dict(sizing.bounds), dict(sizing.failing)
        return self._windows.micro_batch_samples, learned, self._config_if_rebuilt()

    def _config_if_rebuilt(self) -> Mapping[str, Any] | None:
        return self._changes.config if self._changes.is_rebuilt else None

    def _take_config(self, config: Mapping[str, Any] | None) -> None:
        """Have an engine of this configuration; it was written as JSON, where tuples are lists."""
        now = self._changes.config
        differing = {
            name: value
            for name, value in (config or {}).items()
            if name not in now or _as_json(now[name]) != _as_json(value)
        }
        if differing:
            self._changes.rebuild(differing)

    def _take_plan(self, plan: Mapping[str, Any]) -> None:
        self._windows.micro_batch_samples = plan["micro_batch_samples"]
        self._windows.replay.planner.limits = MicroBatchLimits(**plan["sizing"])

    def _heed_plan_file(self) -> None:
        """Keep to what an earlier life of this run learned after its last save, or died of."""
        found = self._plan_file.read(self._host_group)
        if found is None:
            return
        if found.plan and found.steps >= self._windows.steps:
            try:
                self._take_config(found.config)
            except RebuildError as error:
                logger.warning("training goes on without the engine it had last: %s", error)
            self._take_plan(found.plan)
        plans = self._windows.replay.planner
        for failure in found.failures:
            half = -(-failure.samples // 2)
            plans.limits = plans.limits.after_out_of_memory(failure.length, failure.samples, half)

    def _note_failure(self, length: int, samples: int) -> None:
        self._plan_file.add_failure(length=length, samples=samples)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
