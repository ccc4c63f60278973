"""Tests of the checkpoint folder: a checkpoint is complete or absent, even after a kill."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pickle import UnpicklingError
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from chosen_cases import tiers
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from scripts.launching import SCRIPTS, start
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup, TwoDisks

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint import save as save_module
from zerowatch.runtime.trainer.checkpoint.folder import (
    MANIFEST,
    CheckpointFolder,
    FileInfo,
    file_info,
    read_manifest,
)
from zerowatch.runtime.trainer.checkpoint.load import (
    FoundCheckpoint,
    find_checkpoint,
    load_checkpoint,
)
from zerowatch.runtime.trainer.checkpoint.run_state import RunState, rank_file
from zerowatch.runtime.trainer.checkpoint.safe_load import plain_data_only
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

ALONE = SingleRankHostGroup()


def save(
    folder: Path,
    steps: int,
    engine: PlainEngine | None = None,
    *,
    keep: int = 2,
    superseded: set[Path] | None = None,
    **state: object,
) -> Path:
    plan = {"micro_batch_samples": 4}
    values = {"samples": 8 * steps, "config": {"stage": 2}, "micro_batch_plan": plan, **state}
    written = RunState(steps=steps, **values)
    return save_checkpoint(folder, engine or PlainEngine(), ALONE, written, keep, superseded)


def load(
    folder: Path, engine: PlainEngine | None = None, *, fallback: bool = False
) -> RunState | None:
    engine = engine or PlainEngine()
    found = find_checkpoint(folder, engine, ALONE, fallback=fallback)
    if found is None:
        return None
    load_checkpoint(found, engine, ALONE)
    return found.state


def found_in(folder: Path, others: TwoDisks) -> FoundCheckpoint | None:
    return find_checkpoint(folder, PlainEngine(), others)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode", tiers(["waited for", "background"], quick=["waited for"]))
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint_and_the_next_one_cleans_up(
    tmp_path: Path, mode: str
) -> None:
    script = SCRIPTS / "trainer" / "resume_killed.py"
    options = ["background"] if mode == "background" else []
    finished = start(sys.executable, script, tmp_path, *options, cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr
    kills = json.loads((tmp_path / "found.json").read_text())
    assert len(kills) > 15
    for kill in kills:
        (step,) = set(kill["steps"])
        assert kill["weight"] == step
        assert len(kill["after"]) == 4, kill  # `latest`, the owner, and two checkpoints
    places = Counter(kill["killed_at"] for kill in kills)
    for name in ("zerowatch-rank-00000.pt", "model.pt", "optimizer.pt"):
        assert places[f"write /.partial-step-00000003/{name}"] > 1
    found = Counter(kill["steps"][0] for kill in kills)
    assert found.keys() == {2, 3}
    assert found[2] > 5 < found[3]


def test_loading_from_a_folder_without_checkpoints_returns_none(tmp_path: Path) -> None:
    assert load(tmp_path / "none") is None


def test_a_folder_without_a_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert load(tmp_path / "none") is None

    (line,) = caplog.messages
    assert f"no checkpoint in {tmp_path / 'none'}" in line


@pytest.mark.parametrize("fallback", [False, True])
def test_loading_from_a_checkpoint_itself_names_its_parent_folder(
    tmp_path: Path, fallback: bool
) -> None:
    checkpoint = save(tmp_path, 1)

    with pytest.raises(
        CheckpointError,
        match=rf"{checkpoint} is itself a checkpoint; pass its parent folder {tmp_path}, whose",
    ):
        load(checkpoint, fallback=fallback)


def test_loading_from_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{}")

    with pytest.raises(CheckpointError, match=rf"{file} is not a folder; pass the folder given to"):
        load(file)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load(tmp_path) is None


def test_the_last_checkpoints_and_foreign_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-old").mkdir()

    for steps in (1, 2, 3, 4):
        save(tmp_path, steps, keep=3)

    assert names(tmp_path) == [
        *("latest", "notes.txt"),
        *("step-00000002", "step-00000003", "step-00000004", "step-old"),
    ]


def test_an_older_checkpoint_that_was_loaded_is_kept_until_the_next_is_complete(
    tmp_path: Path,
) -> None:
    for steps in (10, 20):
        save(tmp_path, steps)
    (tmp_path / "latest").write_text("step-00000010\n")

    loaded = load(tmp_path)
    save(tmp_path, 20, client_state="again", keep=1)

    assert loaded is not None
    assert loaded.steps == 10
    assert names(tmp_path) == ["latest", "step-00000020-2"]
    again = load(tmp_path)
    assert again is not None
    assert again.client_state == "again"


def test_several_checkpoints_of_one_step_have_different_names(tmp_path: Path) -> None:
    saved = [save(tmp_path, steps=20).name for _ in range(5)]

    assert len(set(saved)) == 5
    assert names(tmp_path) == ["latest", *saved[-2:]]


def test_loading_keeps_the_gradient_clipping_of_the_ds_config(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.optimizer.clip_grad = 0.25

    load(tmp_path, engine)

    assert engine.optimizer.clip_grad == 0.25


def test_samples_and_micro_steps_are_restored(tmp_path: Path) -> None:
    saved = PlainEngine()
    saved.step()
    save(tmp_path, 1, saved, samples=7)
    engine = PlainEngine()

    load(tmp_path, engine)

    assert (engine.micro_steps, engine.global_samples) == (1, 7)


def test_the_saved_config_is_found_with_what_rebuilds_changed_in_the_callers(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    first = find_checkpoint(tmp_path, PlainEngine(), ALONE)
    save(tmp_path, 2, config={"stage": 3, "clip": 1}, config_changes={"stage": 3})
    second = find_checkpoint(tmp_path, PlainEngine(), ALONE)

    assert first is not None
    assert first.manifest.config_changes == {}
    assert second is not None
    assert second.manifest.config_changes == {"stage": 3}
    assert second.manifest.config == {"stage": 3, "clip": 1}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (PlainEngine(stage=3), r"with 2 as ZeRO stage, this run has 3: .* `config`, and rebuild"),
        (
            PlainEngine(width=5),
            r"of another model: its weight has shape \[2, 4\], this model's \[2, 5",
        ),
    ],
    ids=["stage", "model"],
)
def test_another_engine_is_rejected(tmp_path: Path, engine: PlainEngine, message: str) -> None:
    save(tmp_path, 1)

    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, engine)


def test_another_number_of_ranks_for_a_copy_of_the_model_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.world_size = 4

    with pytest.raises(
        CheckpointError, match=r"with 1 rank\(s\) for each .*, this run has 4: .* as many ranks"
    ):
        load(tmp_path, engine)


def test_a_checkpoint_without_a_file_raises_with_its_name_and_a_recovery_hint(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path, 1)
    (folder / "model.pt").unlink()
    (folder / "optimizer.pt").write_bytes(b"short")

    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)

    message = str(raised.value)
    assert f"{folder} is damaged: model.pt is missing; optimizer.pt has 5 bytes" in message
    assert f"write its name into {tmp_path / 'latest'}" in message


def test_a_checkpoint_of_another_program_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "latest").write_text("global_step10")

    with pytest.raises(
        CheckpointError, match="names 'global_step10', which is no complete checkpoint of a "
    ):
        load(tmp_path)


def test_mixed_files_of_two_checkpoints_are_detected(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copy(rank_file(older, 0), rank_file(newer, 0))

    forge(newer, rank_file(newer, 0).name)

    with pytest.raises(CheckpointError, match="mixes files of several checkpoints"):
        load(tmp_path)


@pytest.mark.parametrize(("rebuilt", "changes"), [(False, {}), (True, {"stage": 3})])
def test_a_manifest_of_the_format_before_is_read(
    tmp_path: Path, rebuilt: bool, changes: dict[str, int]
) -> None:
    path = save(tmp_path, 1, config={"stage": 3}) / "zerowatch.json"
    written = json.loads(path.read_text())
    del written["config_changes"]
    path.write_text(json.dumps({**written, "format": 2, "rebuilt": rebuilt}))

    found = find_checkpoint(tmp_path, PlainEngine(), ALONE)

    assert found is not None
    assert found.manifest.config_changes == changes


def test_a_manifest_of_a_later_format_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "zerowatch.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))

    with pytest.raises(CheckpointError, match=r"of format 4; .* reads formats 2 and 3"):
        load(tmp_path)


def test_without_a_latest_file_the_newest_checkpoint_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").unlink()

    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)

    assert loaded is not None
    assert loaded.steps == 2
    assert "no file `latest`" in caplog.text


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.checkpoint_engine.save = _full_disk  # type: ignore[method-assign]

    with pytest.raises(
        CheckpointError, match=r"cannot save step 2 .* disk full\? \(no space\)\. Earlier"
    ):
        save(tmp_path, 2, engine)

    assert vars(engine.checkpoint_engine)["save"] is _full_disk
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.steps == 1


def test_all_ranks_raise_if_one_cannot_write(tmp_path: Path) -> None:
    well, failed = [0.0], [1.0]
    others = TwoDisks(well, [0.0, 0.0], failed)

    with pytest.raises(CheckpointError, match="failed on rank 0"):
        save_checkpoint(tmp_path, PlainEngine(), others, RunState(steps=1, samples=8, config={}))


class OtherRankFails(SingleRankHostGroup):
    """Host group of one rank of two; the other fails while DeepSpeed reads its files."""

    rank = 1
    world_size = 2
    failed = 0.0

    def all_max(self, value: int) -> int:
        self.failed = 1.0
        return 1

    def all_gather(self, values: Sequence[float]) -> Any:
        return np.array([[self.failed] * len(values), values], dtype=float)


def test_all_ranks_raise_if_deepspeed_cannot_read_the_files_of_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path, PlainEngine(), ALONE)
    assert found is not None

    with pytest.raises(CheckpointError, match="failed on rank 0, whose error has the reason"):
        load_checkpoint(found, PlainEngine(), OtherRankFails())


def test_a_model_with_experts_is_not_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.has_moe_layers = True
    found = find_checkpoint(tmp_path, engine, ALONE)
    assert found is not None

    load_checkpoint(found, engine, ALONE)
    with pytest.raises(CheckpointError, match=r"a model with experts \(MoE\) on 1 rank"):
        load_checkpoint(replace(found, is_resharded=True), engine, ALONE)


def test_nodes_with_local_disks_one_checkpoint_apart_load_the_earlier_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.copy(rank_file(tmp_path / "step-00000001", 0), rank_file(tmp_path / "step-00000001", 1))
    well, of_the_first = [0.0], [1.0]

    found = found_in(tmp_path, TwoDisks(well, well, of_the_first))

    assert found is not None
    assert found.state.steps == 1


def test_a_folder_that_is_not_shared_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    well, nothing = [0.0], [0.0]

    with pytest.raises(
        CheckpointError, match=r"rank 0 finds no undamaged checkpoint in .*, and other ranks do"
    ):
        found_in(tmp_path, TwoDisks(well, well, nothing))


def _full_disk(state_dict: object, path: object) -> None:
    raise RuntimeError("no space")


class OtherRankWrote(SingleRankHostGroup):
    """Host group of the writer of two ranks; the other reports a file of 3 bytes."""

    def __init__(self, folder: Path, write: Callable[[Path], object]) -> None:
        self._folder, self._write = folder, write

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        (partial,) = self._folder.glob(".partial*")
        self._write(partial / "shard-1.pt")
        return [text, json.dumps([False, {"shard-1.pt": {"size": 3, "crc32": 1}}])]


def save_with(others: OtherRankWrote, folder: Path) -> Path:
    state = RunState(steps=2, samples=16, config={}, micro_batch_plan={})
    return save_checkpoint(folder, PlainEngine(), others, state, keep=1)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(
            lambda path: None, "shard-1.pt does not exist on this host", id="another disk"
        ),
        pytest.param(
            lambda path: path.write_bytes(b"1234"), "4 bytes, but .* counted 3", id="another size"
        ),
    ],
)
def test_a_file_that_is_not_as_another_rank_wrote_it_prevents_the_checkpoint(
    tmp_path: Path,
    write: Callable[[Path], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(save_module, "VISIBLE_SECONDS", 0.0)

    with pytest.raises(CheckpointError, match=message):
        save_with(OtherRankWrote(tmp_path, write), tmp_path)

    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_file_of_another_rank_that_this_host_sees_late_is_waited_for(tmp_path: Path) -> None:
    def write_late(path: Path) -> None:
        Timer(0.3, path.write_bytes, [b"123"]).start()

    saved = save_with(OtherRankWrote(tmp_path, write_late), tmp_path)

    assert read_manifest(saved / MANIFEST).files["shard-1.pt"] == FileInfo(size=3, crc32=1)


def test_an_asynchronous_writer_is_rejected(tmp_path: Path) -> None:
    engine = PlainEngine()
    engine.checkpoint_engine.is_decoupled = lambda: True  # type: ignore[method-assign]

    with pytest.raises(CheckpointError, match="with an asynchronous checkpoint writer"):
        save(tmp_path, 1, engine)


def test_an_engine_whose_state_was_removed_is_not_saved(tmp_path: Path) -> None:
    before = save(tmp_path, 1)
    engine = PlainEngine()
    engine.optimizer = None

    with pytest.raises(CheckpointError, match="the engine has no optimizer"):
        save(tmp_path, 2, engine, keep=1)

    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [before]


def test_the_manifest_lists_all_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, data={"position": torch.tensor(5)})

    manifest = json.loads((folder / "zerowatch.json").read_text())

    assert manifest["steps"] == 1
    assert set(manifest["files"]) == {"model.pt", "optimizer.pt", "zerowatch-rank-00000.pt"}
    assert all(info.keys() == {"size", "crc32"} for info in manifest["files"].values())


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "zerowatch-rank-00000.pt"])
def test_a_changed_byte_in_any_file_raises_with_the_files_name(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1, client_state=torch.zeros(1000)) / name
    flip(file, file.stat().st_size // 2)

    with pytest.raises(CheckpointError, match=rf"is damaged: {name} has changed .*fallback=True"):
        load(tmp_path)


def test_with_fallback_the_last_undamaged_checkpoint_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [save(tmp_path, steps, keep=4) for steps in (1, 2, 3, 4)]
    flip(saved[3] / "model.pt", 900)
    (saved[2] / "zerowatch.json").write_text("{}")

    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path, fallback=True)

    assert loaded is not None
    assert loaded.steps == 2
    assert "model.pt has changed" in caplog.text
    assert "step-00000002 is tried instead" in caplog.text


def test_checkpoints_that_a_load_passed_over_do_not_count_and_are_deleted_first(
    tmp_path: Path,
) -> None:
    saved = [save(tmp_path, steps, keep=9) for steps in (5, 10, 20, 30)]
    flip(saved[2] / "model.pt", 900)
    (tmp_path / "latest").write_text("step-00000020")  # chosen by hand
    found = find_checkpoint(tmp_path, PlainEngine(), ALONE, fallback=True)
    assert found is not None
    superseded = set(found.superseded)

    save(tmp_path, 20, keep=3, superseded=superseded)

    assert found.path == saved[1]
    left = ["step-00000005", "step-00000010", "step-00000020-2"]
    assert names(tmp_path) == ["latest", *left]
    assert superseded == set()


@pytest.mark.parametrize("damaged", [1, 2])
def test_checkpoints_with_a_damaged_manifest_are_deleted_once_a_load_passed_over_them(
    tmp_path: Path, damaged: int
) -> None:
    """With 2, both the name in `latest` and the one that is tried after it are damaged."""
    saved = [save(tmp_path, steps, keep=9) for steps in (5, 10, 20)]
    (saved[2] / "zerowatch.json").write_text('{"format": 2, "ser')
    if damaged == 2:
        flip(saved[1] / "model.pt", 900)
    found = find_checkpoint(tmp_path, PlainEngine(), ALONE, fallback=True)
    assert found is not None
    superseded = set(found.superseded)

    save(tmp_path, 30, keep=9, superseded=superseded)

    left = [f"step-{steps:08d}" for steps in (5, 10, 30) if damaged == 1 or steps != 10]
    assert names(tmp_path) == ["latest", *left]
    assert superseded == set()


def test_a_damaged_checkpoint_that_cannot_be_deleted_never_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (10, 20):
        damaged = save(tmp_path, steps)
    flip(damaged / "model.pt", 900)
    found = find_checkpoint(tmp_path, PlainEngine(), ALONE, fallback=True)
    assert found is not None
    superseded = set(found.superseded)
    monkeypatch.setattr(CheckpointFolder, "remove", _busy)

    for steps in (30, 40):
        save(tmp_path, steps, superseded=superseded)
    monkeypatch.undo()
    save(tmp_path, 50, superseded=superseded)

    assert caplog.text.count(f"cannot delete the checkpoint {damaged}") == 2
    assert names(tmp_path) == ["latest", "step-00000040", "step-00000050"]


def _busy(self: CheckpointFolder, name: str) -> None:
    raise OSError(errno.EBUSY, "busy", str(self.path / name))


def test_fallback_takes_no_checkpoint_with_more_steps_than_the_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 10, keep=3)
    save(tmp_path, 20, keep=3)
    (tmp_path / "latest").write_text("step-00000010")
    load(tmp_path)
    flip(save(tmp_path, 15, keep=3) / "model.pt", 900)

    loaded = load(tmp_path, fallback=True)

    assert loaded is not None
    assert loaded.steps == 10


def test_fallback_raises_the_last_error_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    for steps in (1, 2):
        flip(save(tmp_path, steps) / "model.pt", 900)

    with pytest.raises(CheckpointError, match="step-00000001 is damaged"):
        load(tmp_path, fallback=True)


def test_another_model_is_rejected_even_with_fallback(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    with pytest.raises(CheckpointError, match="step-00000002 is of another model"):
        load(tmp_path, PlainEngine(width=5), fallback=True)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00binary", b"", b"../../etc", b"step-00000001/../..", b"step-00000099"],
    ids=["binary", "empty", "traversal", "inside", "missing"],
)
def test_a_bad_latest_file_raises_with_its_path_and_fallback_takes_the_newest(
    tmp_path: Path, content: bytes
) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").write_bytes(content)

    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    loaded = load(tmp_path, fallback=True)

    assert f"write its name into {tmp_path / 'latest'};" in str(raised.value)
    assert "etc/latest" not in str(raised.value)
    assert loaded is not None
    assert loaded.steps == 1
    found = find_checkpoint(tmp_path, PlainEngine(), ALONE, fallback=True)
    assert found is not None
    assert found.superseded == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("serial", "1"), ("serial", 0), ("serial", 10**400), ("steps", None), ("steps", -1)),
        *(("files", 3), ("files", {"model.pt": 17}), ("files", {"model.pt": {"size": "x"}})),
        *(("engine", []), ("engine", {"zero_stage": 2}), ("config", "x"), ("config_changes", 7)),
        *(("extra", 1), ("format", [])),
    ],
)
def test_a_manifest_of_wrong_types_raises_with_its_path(
    tmp_path: Path, key: str, value: object
) -> None:
    path = save(tmp_path, 1) / "zerowatch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    with pytest.raises(CheckpointError, match=r"step-00000001/zerowatch\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\x00", b"null", b"7", b"[]"])
def test_a_manifest_that_is_no_object_raises_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 1) / "zerowatch.json"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"step-00000001/zerowatch\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "zerowatch-rank-00000.pt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_file_with_code_is_refused_and_the_code_does_not_run(
    tmp_path: Path, name: str, zipped: bool
) -> None:
    folder = save(tmp_path / "saves", 1)
    torch.save(
        {"weight": torch.zeros(2, 4), "evil": Evil(tmp_path / "ran")},
        folder / name,
        _use_new_zipfile_serialization=zipped,
    )
    forge(folder, name)

    with pytest.raises(CheckpointError, match=rf"{name} holds posix\.mkdir\. It is refused"):
        load(tmp_path / "saves")

    assert not (tmp_path / "ran").exists()


def test_deepspeeds_own_reader_runs_no_code_either(tmp_path: Path) -> None:
    torch.save(Evil(tmp_path / "ran"), tmp_path / "model.pt")

    with plain_data_only(), pytest.raises(UnpicklingError, match=r"posix\.mkdir"):
        TorchCheckpointEngine().load(str(tmp_path / "model.pt"))

    assert not (tmp_path / "ran").exists()


def test_torch_load_and_its_allowed_classes_are_restored_after_a_load(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before, allowed = torch.load, set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([np.ndarray]):  # one that a load needs too
        load(tmp_path)

        assert set(torch.serialization.get_safe_globals()) == allowed | {np.ndarray}
    assert torch.load is before
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize("left", ["step-00000007/.nfs0001", "step-00000008/.nfs0001"])
def test_files_of_a_removed_checkpoint_that_are_still_in_use_do_not_prevent_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    in_use = tmp_path / f".partial-{left}"
    in_use.parent.mkdir()
    in_use.touch()
    (in_use.parent / "model.pt").touch()
    unlink = os.unlink

    def refuse(path: str, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(in_use.name):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)

    saved = save(tmp_path, 8)
    loaded = load(tmp_path)
    monkeypatch.undo()
    save(tmp_path, 9)

    assert loaded is not None
    assert not (saved / in_use.name).exists()
    assert f"{in_use.parent} cannot be deleted" in caplog.text
    assert names(tmp_path) == ["latest", saved.name, "step-00000009"]


def test_what_load_would_refuse_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.optimizer.clip_grad = Counted()

    with pytest.raises(CheckpointError, match=r"optimizer\.pt holds \S*Counted\. It is refused"):
        save(tmp_path, 2, engine)
    with torch.serialization.safe_globals([Counted]):
        save(tmp_path, 3, engine)
        loaded = load(tmp_path)

    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]
    assert loaded is not None


def test_numbers_of_numpy_in_the_engines_state_are_loaded(tmp_path: Path) -> None:
    saved, engine = PlainEngine(), PlainEngine()
    saved.optimizer.clip_grad = {"rate": np.float64(0.5), "seen": np.arange(3)}
    engine.optimizer.clip_grad = None
    save(tmp_path, 1, saved)

    load(tmp_path, engine)

    assert engine.optimizer.clip_grad["rate"] == 0.5
    assert engine.optimizer.clip_grad["seen"].tolist() == [0, 1, 2]


def test_a_plan_of_another_version_in_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1, micro_batch_plan={"micro_batch_samples": 4, "sizing": {"other": 1}})

    with pytest.raises(CheckpointError, match=r"another version of zerowatch \(sizing\.other"):
        load(tmp_path)


def flip(path: Path, offset: int) -> None:
    """Invert 16 bytes of a file; its length stays."""
    data = bytearray(path.read_bytes())
    data[offset : offset + 16] = bytes(255 - each for each in data[offset : offset + 16])
    path.write_bytes(data)


def forge(folder: Path, name: str) -> None:
    """Put a file's size and checksum into the manifest, as an attacker would."""
    path = folder / "zerowatch.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = asdict(file_info(folder / name))
    path.write_text(json.dumps(manifest))


class Evil:
    """An object that creates a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


class Counted:
    """A class of a script."""
