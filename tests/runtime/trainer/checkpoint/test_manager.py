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
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.trainer.checkpoint import save as save_module
from zerowatch.runtime.trainer.checkpoint.folder import MANIFEST, CheckpointFolder
from zerowatch.runtime.trainer.checkpoint.folder_owner import FolderOwner
from zerowatch.runtime.trainer.checkpoint.manager import CheckpointManager
from zerowatch.runtime.trainer.checkpoint.plan_file import MicroBatchPlan
from zerowatch.runtime.trainer.checkpoint.run_state import RunState, read_rank
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint
from zerowatch.runtime.trainer.data.training_data import DataStart
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
    engine.watch = SimpleNamespace(
        run_id="second", saving_checkpoint=nullcontext, recorder=Recorder()
    )
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
    data = data or SimpleNamespace(state_dict=dict, starts_at_beginning=False)
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

    def refuse(position: object, start: DataStart) -> object:
        if not start.is_requested:
            raise CheckpointError("of other data")
        return {}

    data = SimpleNamespace(
        state_dict=dict,
        position_to_load=refuse,
        load_state_dict=lambda position, start: loaded_positions.append(position),
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


@pytest.mark.parametrize(
    ("saved_by", "is_repeated"),
    [
        (FolderOwner("before", ["launcher"], "attempt 1"), True),
        (FolderOwner("another", ["other launcher"], "attempt 1"), False),
        (FolderOwner("this", ["launcher"], "attempt 2"), False),
        (None, False),
    ],
)
def test_data_that_an_earlier_attempt_started_at_the_beginning_is_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved_by: FolderOwner | None,
    is_repeated: bool,
) -> None:
    plan = asdict(MicroBatchPlan(micro_batch_samples=4, sizing=MicroBatchLimits()))
    rng, position = asdict(RngState.capture()), {"data": {"position": 2}}
    state = RunState(
        steps=3,
        samples=24,
        config={},
        micro_batch_plan=plan,
        rng=rng,
        data=position,
        data_started_by=saved_by and saved_by.attempt,
    )
    save_checkpoint(tmp_path, trained(), ALONE, state)
    starts: list[DataStart] = []
    data = SimpleNamespace(
        position_to_load=lambda position, start: starts.append(start) or position,
        load_state_dict=lambda position, start: None,
    )
    manager = manager_of(PlainEngine(), data)
    manager._owner = FolderOwner("this", ["launcher"], "attempt 2")
    monkeypatch.setattr(manager._plan_file, "read", lambda group: None)

    manager.load(tmp_path, fallback=False, data=False)

    assert starts == [DataStart(is_requested=True, is_repeated=is_repeated)]


@pytest.mark.parametrize("starts_at_beginning", [False, True])
def test_a_checkpoint_names_the_attempt_that_started_the_data_at_the_beginning(
    tmp_path: Path, starts_at_beginning: bool
) -> None:
    data = SimpleNamespace(state_dict=dict, starts_at_beginning=starts_at_beginning)
    manager = manager_of(trained(), data)

    saved = manager.save(tmp_path, None, 1, background=False)

    known = read_rank(saved, 0).data_started_by
    assert known == (manager._owner.attempt if starts_at_beginning else None)


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
