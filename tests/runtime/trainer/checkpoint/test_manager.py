"""Tests of `CheckpointManager`: refused loads, and what ranks of a node share."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint import save as save_module
from zerowatch.runtime.trainer.checkpoint.folder import MANIFEST, CheckpointFolder
from zerowatch.runtime.trainer.checkpoint.folder_owner import FolderOwner
from zerowatch.runtime.trainer.checkpoint.manager import CheckpointManager
from zerowatch.runtime.trainer.checkpoint.plan_file import MicroBatchPlan
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import MicroBatchLimits
from zerowatch.runtime.trainer.window.rng import RngState

ALONE = SingleRankHostGroup()
PLACES = (
    {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
)


def trained() -> PlainEngine:
    engine = PlainEngine()
    engine.step()
    return engine


def manager_of(engine: PlainEngine, data: Any = None) -> CheckpointManager:
    engine.watch = SimpleNamespace(run_id="second", saving_checkpoint=nullcontext)
    holder = SimpleNamespace(
        engine=engine,
        run_folder=None,
        config={},
        config_changes={},
        compressor=None,
        optimizer_states_on_device=nullcontext,
        restore_changes=lambda changes: None,
    )
    planner = SimpleNamespace(limits=MicroBatchLimits())
    runner = SimpleNamespace(
        steps=5,
        samples=40,
        exponent=0,
        micro_batch_samples=4,
        replay=SimpleNamespace(planner=planner),
        on_fatal_oom=[],
    )
    data = data or SimpleNamespace(state_dict=dict)
    return CheckpointManager(holder, runner, data, ALONE, background=False)


def test_after_a_load_that_was_refused_the_checkpoints_of_the_other_run_are_kept(
    tmp_path: Path,
) -> None:
    first = FolderOwner("first")
    for steps in (1, 2):
        state = RunState(steps=steps, samples=8 * steps, config={})
        save_checkpoint(tmp_path, PlainEngine(), ALONE, state, owner=first)
    first.close()
    before = CheckpointFolder(tmp_path).names()
    manager = manager_of(PlainEngine())

    with pytest.raises(CheckpointError, match="micro-batch plan of another version"):
        manager.load(tmp_path, fallback=False)
    with pytest.raises(CheckpointError, match="checkpoints of run 'first'"):
        manager.save(tmp_path, None, 1, background=False)

    assert CheckpointFolder(tmp_path).names() == before


def test_a_checkpoint_of_other_data_is_refused_before_anything_is_loaded_or_loads_without_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = asdict(MicroBatchPlan(micro_batch_samples=4, sizing=MicroBatchLimits()))
    rng, position = asdict(RngState.capture()), {"data": {"position": 2}}
    state = RunState(steps=3, samples=24, config={}, micro_batch_plan=plan, rng=rng, data=position)
    save_checkpoint(tmp_path, trained(), ALONE, state)
    engine, loaded_positions = PlainEngine(), list[object]()

    def refuse(position: object) -> None:
        if position:
            raise CheckpointError("of other data")

    data = SimpleNamespace(
        state_dict=dict, check_state_dict=refuse, load_state_dict=loaded_positions.append
    )
    manager = manager_of(engine, data)
    monkeypatch.setattr(manager._plan_file, "read", lambda group: None)
    weights = engine.module.weight.data.clone()

    with pytest.raises(CheckpointError, match="of other data"):
        manager.load(tmp_path, fallback=False)
    refused = torch.equal(engine.module.weight.data, weights), manager._window_runner.steps
    loaded = manager.load(tmp_path, fallback=False, data=False)

    assert refused == (True, 5)
    assert loaded is not None and manager._window_runner.steps == 3
    assert not torch.equal(engine.module.weight.data, weights)
    assert loaded_positions == [{}]


@pytest.mark.parametrize("place", PLACES)
def test_the_ranks_of_a_node_divide_the_files_to_sync_under_each_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, str]
) -> None:
    set_place(monkeypatch, place)
    synced: list[Path] = []
    monkeypatch.setattr(save_module, "sync", synced.append)

    saved = save_checkpoint(tmp_path, PlainEngine(), ALONE, RunState(steps=1, samples=8, config={}))

    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    written_before_the_manifest = sorted(set(names) - {MANIFEST})
    files = [str(path.relative_to(path.parent)) for path in synced if path.suffix == ".pt"]
    assert files == written_before_the_manifest[1::2]


def set_place(monkeypatch: pytest.MonkeyPatch, place: dict[str, str]) -> None:
    for names in PLACES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
