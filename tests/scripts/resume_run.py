"""Saves and loads a TrainingRun with its data, by the rooms it is made of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import zerowatch
from zerowatch.runtime.resume.load import load_run
from zerowatch.runtime.resume.save import save_run
from zerowatch.runtime.resume.state import RunState
from zerowatch.runtime.window.rng import RngState


def save(run: zerowatch.TrainingRun, folder: Path, data: Any = None, **others: Any) -> Path:
    state = RunState(
        steps=run.steps,
        samples=run.samples,
        config=run.config,
        micro_batch_plan={"micro_batch_samples": run.micro_batch_samples},
        weight_exponent=run._exponent,
        rng=asdict(RngState.capture()),
        data=None if data is None else data.state_dict(),
        **others,
    )
    return save_run(folder, run.engine, run.agreement, state)


def load(run: zerowatch.TrainingRun, folder: Path, data: Any = None) -> RunState | None:
    state = load_run(folder, run.engine, run.agreement)
    if state is not None:
        run.steps, run.samples = state.steps, state.samples
        run.set_micro_batch(state.micro_batch_plan["micro_batch_samples"])
        run._exponent = state.weight_exponent
        RngState(**state.rng).restore()
        if data is not None:
            data.load_state_dict(state.data)
    return state
