"""A run put on the disk and taken up again, with its plan kept apart so that no death loses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .engine_changes import EngineChanges
from .identity import this_process
from .recovery.sizing import Sizing
from .resume.load import load_run, saved_config
from .resume.plan_file import PlanFile
from .resume.save import save_run
from .resume.state import RunState
from .sharing import Sharing
from .window.agreement import Agreement
from .window.rng import RngState
from .windows import Windows


class Saving:
    """Saves and loads a run; writes its plan as soon as that changes.

    Args:
        changes: Holds the engine.
        windows: Of the run.
        sharing: Of the run.
        agreement: Of all ranks.
    """

    def __init__(
        self,
        changes: EngineChanges,
        windows: Windows,
        sharing: Sharing,
        agreement: Agreement,
    ) -> None:
        self._changes, self._windows, self._sharing = changes, windows, sharing
        self._agreement = agreement
        self._plan_file = PlanFile(lambda: changes.engine.watch.run_folder)
        self._leads_node = this_process().local_rank == 0
        self._written: Mapping[str, Any] = self._plan()
        windows.on_fatal.append(self._note_failure)

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
            codec=self._changes.codec.state_dict() if self._changes.codec else None,
            client=client,
        )
        with self._changes.bare():
            return save_run(folder, self._changes.engine, self._agreement, state, keep)

    def load(self, folder: str | Path) -> RunState | None:
        """Load the last save, if there is one, and what was learned of memory since."""
        config = saved_config(folder, self._agreement)
        if config is not None and config != self._changes.config:
            self._changes.rebuild(config)
        with self._changes.bare():
            state = load_run(folder, self._changes.engine, self._agreement)
        if state is not None:
            windows = self._windows
            windows.steps, windows.samples = state.steps, state.samples
            windows.exponent = state.weight_exponent
            self._take_plan(state.micro_batch_plan)
            self._sharing.load_state_dict(state.data or {})
            if self._changes.codec is not None and state.codec is not None:
                self._changes.codec.load_state_dict(state.codec)
        self._heed_plan_file()
        if state is not None:
            RngState(**state.rng).restore()  # after a rebuild, which draws random numbers
        return state

    def window_ended(self) -> None:
        """Write the plan if it has changed."""
        plan = self._plan()
        if _decisive(plan) != _decisive(self._written):
            self._written = plan
            if self._leads_node:
                config = dict(self._changes.config) if self._changes.is_rebuilt else None
                self._plan_file.write(plan, steps=self._windows.steps, config=config)

    def _plan(self) -> dict[str, Any]:
        return {
            "micro_batch_samples": self._windows.micro_batch_samples,
            "sizing": asdict(self._windows.replay.plans.sizing),
        }

    def _take_plan(self, plan: Mapping[str, Any]) -> None:
        self._windows.micro_batch_samples = plan["micro_batch_samples"]
        self._windows.replay.plans.sizing = Sizing(**plan["sizing"])

    def _heed_plan_file(self) -> None:
        """Keep to what an earlier life of this run learned after its last save, or died of."""
        found = self._plan_file.read(self._agreement)
        if found is None:
            return
        if found.config is not None and found.config != self._changes.config:
            self._changes.rebuild(found.config)
        if found.plan and found.steps >= self._windows.steps:
            self._take_plan(found.plan)
        plans = self._windows.replay.plans
        for failure in found.failures:
            half = -(-failure.samples // 2)
            plans.sizing = plans.sizing.after_out_of_memory(failure.length, failure.samples, half)

    def _note_failure(self, length: int, samples: int) -> None:
        self._plan_file.add_failure(length=length, samples=samples)


def _decisive(plan: Mapping[str, Any]) -> Any:
    """What a restart must know of a plan; the rest only counts windows."""
    return plan["micro_batch_samples"], plan["sizing"]["bounds"], plan["sizing"]["failing"]
