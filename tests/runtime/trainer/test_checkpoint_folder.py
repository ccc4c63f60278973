"""Folder of checkpoints: each checkpoint is complete or absent, even if the process is killed."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from scripts.launching import SCRIPTS, start
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup, TwoDisks

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.load import load_checkpoint, saved_config
from zerowatch.runtime.trainer.checkpoint.run_state import RunState, rank_file
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

ALONE = SingleRankHostGroup()


def save(folder: Path, steps: int, engine: PlainEngine | None = None, **state: object) -> Path:
    values = {"samples": 8 * steps, "config": {"stage": 2}, **state}
    keep = int(str(values.pop("keep", 2)))
    return save_checkpoint(
        folder, engine or PlainEngine(), ALONE, RunState(steps=steps, **values), keep
    )


def load(folder: Path, engine: PlainEngine | None = None) -> RunState | None:
    return load_checkpoint(folder, engine or PlainEngine(), ALONE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    finished = start(
        sys.executable, SCRIPTS / "trainer" / "resume_killed.py", tmp_path, cwd=tmp_path
    )

    assert finished.returncode == 0, finished.stderr
    kills = json.loads((tmp_path / "found.json").read_text())
    assert len(kills) > 15
    for kill in kills:
        (step,) = set(kill["steps"])
        assert kill["weight"] == step
        assert len(kill["after"]) == 3, kill
    found = Counter(kill["steps"][0] for kill in kills)
    assert found.keys() == {2, 3}
    assert found[2] > 5 < found[3]


def test_loading_from_a_folder_without_checkpoints_returns_none(tmp_path: Path) -> None:
    assert load(tmp_path / "none") is None
    assert saved_config(tmp_path, ALONE) is None


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
    save(tmp_path, 20, client="again", keep=1)

    assert loaded is not None
    assert loaded.steps == 10
    assert names(tmp_path) == ["latest", "step-00000020-2"]
    again = load(tmp_path)
    assert again is not None
    assert again.client == "again"


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


def test_the_saved_config_is_returned_if_it_is_not_the_callers(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert saved_config(tmp_path, ALONE) is None

    save(tmp_path, 2, config={"stage": 3}, rebuilt=True)

    assert saved_config(tmp_path, ALONE) == {"stage": 3}


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


def test_another_number_of_ranks_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    engine = PlainEngine()
    engine.world_size = 4

    with pytest.raises(
        CheckpointError, match=r"with 1 rank\(s\), this run has 4: .* as many ranks"
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

    with pytest.raises(CheckpointError, match="mixes files of several checkpoints"):
        load(tmp_path)


def test_a_manifest_of_a_later_format_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "zerowatch.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))

    with pytest.raises(CheckpointError, match=r"of format 2; .* reads format 1"):
        load(tmp_path)


def test_checkpoints_without_a_latest_file_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()

    with caplog.at_level(logging.WARNING):
        assert load(tmp_path) is None

    assert "holds checkpoints, but no file `latest`" in caplog.text


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


def test_nodes_with_local_disks_one_checkpoint_apart_load_the_earlier_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.copy(rank_file(tmp_path / "step-00000001", 0), rank_file(tmp_path / "step-00000001", 1))
    well, of_the_first = [0.0], [1.0]

    loaded = load_checkpoint(tmp_path, PlainEngine(), TwoDisks(well, of_the_first, well, well))

    assert loaded is not None
    assert loaded.steps == 1


def test_a_folder_that_is_not_shared_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    well, nothing = [0.0], [0.0]

    with pytest.raises(
        CheckpointError, match=r"rank 0 finds no checkpoint in .*, and other ranks do"
    ):
        load_checkpoint(tmp_path, PlainEngine(), TwoDisks(well, nothing, well))


def _full_disk(state_dict: object, path: object) -> None:
    raise RuntimeError("no space")


def test_an_asynchronous_writer_is_rejected(tmp_path: Path) -> None:
    engine = PlainEngine()
    engine.checkpoint_engine.is_decoupled = lambda: True  # type: ignore[method-assign]

    with pytest.raises(CheckpointError, match="with an asynchronous checkpoint writer"):
        save(tmp_path, 1, engine)


def test_the_manifest_lists_all_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, data={"position": torch.tensor(5)})

    manifest = json.loads((folder / "zerowatch.json").read_text())

    assert manifest["steps"] == 1
    assert set(manifest["files"]) == {"model.pt", "optimizer.pt", "zerowatch-rank-00000.pt"}
