"""Tests of the owner of a checkpoint folder: another run's checkpoints are never overwritten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.folder import CheckpointFolder
from zerowatch.runtime.trainer.checkpoint.folder_owner import OWNER, FolderOwner
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint


def save(folder: Path, owner: FolderOwner, steps: int = 1) -> Path:
    state = RunState(steps=steps, samples=8 * steps, config={})
    return save_checkpoint(folder, PlainEngine(), SingleRankHostGroup(), state, owner=owner)


def run(run_id: str) -> FolderOwner:
    return FolderOwner(run_id, wait_seconds=0.0)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_in_use_by_another_run_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    first = run("first")
    save(tmp_path, first)
    before = content(tmp_path)

    with pytest.raises(CheckpointError, match=rf"'first' .*process {os.getpid()} on"):
        loaded = run("second")
        loaded.note_load(tmp_path)
        save(tmp_path, loaded)

    assert content(tmp_path) == before


def test_an_empty_folder_in_use_by_another_run_is_refused_too(tmp_path: Path) -> None:
    first = run("first")
    first.claim(CheckpointFolder(tmp_path))

    with pytest.raises(CheckpointError, match="in use by run 'first'"):
        save(tmp_path, run("second"))


def test_checkpoints_of_another_run_that_has_ended_are_refused_unless_loaded(
    tmp_path: Path,
) -> None:
    first = run("first")
    save(tmp_path, first)
    first.close()
    before = content(tmp_path)

    with pytest.raises(CheckpointError, match=r"checkpoints of run 'first'.*call `load`"):
        save(tmp_path, run("second"))
    assert content(tmp_path) == before

    second = run("second")
    second.note_load(tmp_path)
    save(tmp_path, second, 2)
    assert json.loads((tmp_path / OWNER).read_text())["run_id"] == "second"


def test_a_folder_that_another_run_saved_into_after_the_load_is_refused(tmp_path: Path) -> None:
    second = run("second")
    second.note_load(tmp_path)
    first = run("first")
    save(tmp_path, first)
    first.close()

    with pytest.raises(CheckpointError, match="'first' since it was loaded"):
        save(tmp_path, second)


def test_a_restarted_run_of_the_same_id_goes_on(tmp_path: Path) -> None:
    first = run("same")
    save(tmp_path, first)
    first.close()

    save(tmp_path, run("same"), 2)


def test_checkpoints_of_an_earlier_version_are_refused_unless_loaded(tmp_path: Path) -> None:
    first = run("first")
    save(tmp_path, first)
    first.close()
    (tmp_path / OWNER).unlink()
    before = content(tmp_path)

    with pytest.raises(CheckpointError, match="a run without an id"):
        save(tmp_path, run("second"))
    assert content(tmp_path) == before

    second = run("second")
    second.note_load(tmp_path)
    save(tmp_path, second, 2)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 7}', b"\xff", b"[" * 4000])
def test_a_damaged_owner_file_is_replaced_after_a_load(tmp_path: Path, damage: bytes) -> None:
    first = run("first")
    save(tmp_path, first)
    first.close()
    (tmp_path / OWNER).write_bytes(damage)

    second = run("second")
    second.note_load(tmp_path)
    save(tmp_path, second, 2)

    assert json.loads((tmp_path / OWNER).read_text())["run_id"] == "second"


def test_a_kill_before_the_end_of_a_longer_text_is_cut_off_leaves_a_known_owner(
    tmp_path: Path,
) -> None:
    first = run("first")
    save(tmp_path, first)
    first.close()
    with (tmp_path / OWNER).open("a") as file:
        file.write('.example.org", "pid": 1}')

    save(tmp_path, run("first"), 2)


def test_a_folder_that_was_deleted_during_the_run_is_reserved_again(tmp_path: Path) -> None:
    first = run("first")
    save(tmp_path / "saves", first)
    shutil.rmtree(tmp_path / "saves")

    save(tmp_path / "saves", first, 2)

    with pytest.raises(CheckpointError, match="in use by run 'first'"):
        save(tmp_path / "saves", run("second"))


def test_a_link_in_place_of_the_owner_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    saves = tmp_path / "saves"
    saves.mkdir()
    (saves / OWNER).symlink_to(tmp_path / "precious")

    with pytest.raises(CheckpointError, match="symbolic link"):
        save(saves, run("first"))

    assert (tmp_path / "precious").read_text() == "mine"


HOLD = """
import os, sys, time
from pathlib import Path
from zerowatch.runtime.trainer.checkpoint.folder import CheckpointFolder
from zerowatch.runtime.trainer.checkpoint.folder_owner import FolderOwner

owner = FolderOwner("killed")
owner.claim(CheckpointFolder(Path(sys.argv[1])))
worker = os.fork()
if worker == 0:  # as a worker of a DataLoader, which outlives its parent
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
time.sleep(60)
"""


def test_a_kill_releases_the_folder_although_a_forked_worker_lives_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
            save(tmp_path, run("next"))

        process.kill()
        process.wait()

        save(tmp_path, FolderOwner("next", wait_seconds=30.0))
        os.kill(worker, 0)  # it still lives
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.kill(worker, signal.SIGKILL)


def test_a_process_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    code = HOLD.replace("time.sleep(60)\n", "time.sleep(0.5)\n")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()

    save(tmp_path, FolderOwner("next", wait_seconds=60.0))

    assert time.monotonic() - began < 60
    assert process.wait() == 0
    process.stdout.close()
