"""Tests of the owner of a checkpoint folder: another run's checkpoints are never overwritten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.errors import CheckpointError
from zerowatch.runtime.common.process_info import launcher_identity
from zerowatch.runtime.trainer.checkpoint.folder import CheckpointFolder
from zerowatch.runtime.trainer.checkpoint.folder_owner import OWNER, FolderOwner, folder_owner
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint


def save(folder: Path, owner: FolderOwner, steps: int = 1) -> Path:
    state = RunState(steps=steps, samples=8 * steps, config={})
    return save_checkpoint(folder, PlainEngine(), SingleRankHostGroup(), state, owner=owner)


def load(owner: FolderOwner, folder: Path) -> None:
    with owner.loading(folder):
        pass


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
        load(loaded, tmp_path)
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
    load(second, tmp_path)
    save(tmp_path, second, 2)
    assert json.loads((tmp_path / OWNER).read_text())["run_id"] == "second"


def test_a_folder_that_another_run_saved_into_after_the_load_is_refused(tmp_path: Path) -> None:
    second = run("second")
    load(second, tmp_path)
    first = run("first")
    save(tmp_path, first)
    first.close()

    with pytest.raises(CheckpointError, match=r"'first'.* since it was loaded"):
        save(tmp_path, second)


def test_a_folder_that_another_run_saved_into_during_the_load_is_refused(tmp_path: Path) -> None:
    first, second = run("first"), run("second")

    with second.loading(tmp_path):
        save(tmp_path, first)
    first.close()

    with pytest.raises(CheckpointError, match=r"'first'.* since it was loaded"):
        save(tmp_path, second)


def test_a_load_that_failed_does_not_count(tmp_path: Path) -> None:
    first, second = run("first"), run("second")
    save(tmp_path, first)
    first.close()
    before = content(tmp_path)

    with pytest.raises(KeyError), second.loading(tmp_path):
        raise KeyError

    with pytest.raises(CheckpointError, match=r"checkpoints of run 'first' \(.*, which"):
        save(tmp_path, second)
    assert content(tmp_path) == before


def test_a_load_that_failed_leaves_an_earlier_load(tmp_path: Path) -> None:
    first, second = run("first"), run("second")
    save(tmp_path, first)
    first.close()
    load(second, tmp_path)

    with pytest.raises(KeyError), second.loading(tmp_path):
        raise KeyError

    assert save(tmp_path, second, 2).is_dir()


def test_an_attempt_whose_launcher_was_there_before_goes_on_without_a_load(tmp_path: Path) -> None:
    first = FolderOwner("job", ["node a", "node b"], "attempt 0")
    save(tmp_path, first)
    first.close()

    second = FolderOwner("job-2", ["node c", "node b"], "attempt 1")
    save(tmp_path, second, 2)

    assert json.loads((tmp_path / OWNER).read_text())["launchers"] == ["node b", "node c"]


def test_without_a_launcher_a_run_of_the_same_id_is_another_run(tmp_path: Path) -> None:
    first = FolderOwner("job", ["", ""], "attempt 0")
    save(tmp_path, first)
    first.close()

    with pytest.raises(CheckpointError, match=r"checkpoints of run 'job'.*call `load`"):
        save(tmp_path, FolderOwner("job", ["", ""], "attempt 1"))


def test_another_launcher_with_the_same_run_id_is_refused_also_when_it_restarts(
    tmp_path: Path,
) -> None:
    first = FolderOwner("job", ["launcher of experiment 1"], "1, attempt 0")
    save(tmp_path, first)
    first.close()
    before = content(tmp_path)

    for attempt in ("2, attempt 0", "2, attempt 1"):
        with pytest.raises(CheckpointError, match=r"checkpoints of run 'job'.*call `load`"):
            save(tmp_path, FolderOwner("job", ["launcher of experiment 2"], attempt))

    assert content(tmp_path) == before


def test_a_second_run_of_the_same_processes_is_refused_unless_loaded(tmp_path: Path) -> None:
    first = FolderOwner("job", ["launcher"], "attempt 0")
    save(tmp_path, first)
    first.close()

    with pytest.raises(CheckpointError, match=r"call `load`"):
        save(tmp_path, FolderOwner("job", ["launcher"], "attempt 0"))


def start_workers(attempt: Path) -> None:
    """Make the folder of an attempt again, as torchrun's agent does before it starts workers."""
    shutil.rmtree(attempt, ignore_errors=True)
    (attempt / "0").mkdir(parents=True)


def test_a_second_training_of_the_same_worker_is_refused_unless_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, saves = tmp_path / "attempt_0", tmp_path / "saves"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "0" / "error.json"))
    start_workers(attempt)
    train_once = (
        "import sys; from pathlib import Path; from test_folder_owner import save;"
        "from scripts.trainer.resume_engine import SingleRankHostGroup;"
        "from zerowatch.runtime.trainer.checkpoint.folder_owner import folder_owner;"
        "save(Path(sys.argv[1]), folder_owner('job', SingleRankHostGroup()))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    monkeypatch.setenv("PYTHONPATH", paths)
    subprocess.run([sys.executable, "-c", train_once, str(saves)], check=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "1" / "error.json"))

    with pytest.raises(CheckpointError, match=r"checkpoints of run 'job'.*call `load`"):
        save(saves, folder_owner("job", SingleRankHostGroup()), 2)

    start_workers(attempt)  # a change of nodes starts the workers again in the same attempt
    save(saves, folder_owner("job", SingleRankHostGroup()), 2)


def test_a_run_of_the_same_id_that_saved_after_the_load_is_noticed(tmp_path: Path) -> None:
    first = FolderOwner("job", ["launcher 1"], "1")
    save(tmp_path, first)
    first.close()
    second = FolderOwner("job", ["launcher 2"], "2")
    load(second, tmp_path)
    third = FolderOwner("job", ["launcher 3"], "3")
    load(third, tmp_path)
    save(tmp_path, third, 2)
    third.close()

    with pytest.raises(CheckpointError, match=r"'job'.* since it was loaded"):
        save(tmp_path, second, 2)


def test_ranks_agree_on_the_owner_and_its_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/errors/attempt_1/0/error.json")

    owner = folder_owner("job", SingleRankHostGroup())
    save(tmp_path / "saves", owner)

    written = json.loads((tmp_path / "saves" / OWNER).read_text())
    assert written["run_id"] == "job"
    assert written["launchers"] == [launcher_identity()]


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
    load(second, tmp_path)
    save(tmp_path, second, 2)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 7}', b"\xff", b"[" * 4000])
def test_a_damaged_owner_file_is_replaced_after_a_load(tmp_path: Path, damage: bytes) -> None:
    first = run("first")
    save(tmp_path, first)
    first.close()
    (tmp_path / OWNER).write_bytes(damage)

    second = run("second")
    load(second, tmp_path)
    save(tmp_path, second, 2)

    assert json.loads((tmp_path / OWNER).read_text())["run_id"] == "second"


def test_a_kill_before_the_end_of_a_longer_text_is_cut_off_leaves_a_known_owner(
    tmp_path: Path,
) -> None:
    first = FolderOwner("job", ["launcher"], "attempt 0")
    save(tmp_path, first)
    first.close()
    with (tmp_path / OWNER).open("a") as file:
        file.write('.example.org", "pid": 1}')

    save(tmp_path, FolderOwner("job", ["launcher"], "attempt 1"), 2)


def test_a_folder_that_was_deleted_during_the_run_is_reserved_again(tmp_path: Path) -> None:
    first = run("first")
    save(tmp_path / "saves", first)
    shutil.rmtree(tmp_path / "saves")

    save(tmp_path / "saves", first, 2)

    with pytest.raises(CheckpointError, match="in use by run 'first'"):
        save(tmp_path / "saves", run("second"))


def test_a_run_makes_its_owner_file_again_if_that_was_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run("first")
    save(tmp_path, first)
    (tmp_path / OWNER).unlink()

    save(tmp_path, first, 2)
    save(tmp_path, first, 3)

    assert caplog.text.count(f"{tmp_path / OWNER} was deleted") == 1
    with pytest.raises(CheckpointError, match="in use by run 'first'"):
        save(tmp_path, run("second"))


def test_a_run_is_refused_by_a_run_that_deleted_its_owner_file_and_saved(tmp_path: Path) -> None:
    first = FolderOwner("job", ["launcher"], "attempt 0", wait_seconds=0.0)
    save(tmp_path, first)
    (tmp_path / OWNER).unlink()
    second = FolderOwner("job", ["launcher"], "attempt 1", wait_seconds=0.0)
    load(second, tmp_path)
    save(tmp_path, second, 2)

    with pytest.raises(CheckpointError, match="in use by run 'job'"):
        save(tmp_path, first, 2)
    second.close()
    with pytest.raises(CheckpointError, match=r"in use by run 'job'.* since the last save"):
        save(tmp_path, first, 2)


def test_checkpoints_moved_to_the_path_of_a_deleted_folder_are_refused(tmp_path: Path) -> None:
    other = run("other")
    save(tmp_path / "other", other)
    (tmp_path / "other" / OWNER).unlink()
    first = run("first")
    save(tmp_path / "saves", first)

    shutil.rmtree(tmp_path / "saves")
    (tmp_path / "other").rename(tmp_path / "saves")

    with pytest.raises(CheckpointError, match="a run without an id"):
        save(tmp_path / "saves", first, 2)


def test_a_folder_that_was_copied_to_another_disk_during_the_run_is_still_its_own(
    tmp_path: Path,
) -> None:
    first = run("first")
    save(tmp_path / "saves", first)
    shutil.copytree(tmp_path / "saves", tmp_path / "larger")
    shutil.rmtree(tmp_path / "saves")
    (tmp_path / "larger").rename(tmp_path / "saves")

    save(tmp_path / "saves", first, 2)


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

owner = FolderOwner("killed", ["launcher"], "attempt 0")
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


@pytest.fixture
def lock_of_earlier_attempt(tmp_path: Path) -> Iterator[Path]:
    """A folder that stays locked, as a file server does it for a host that was lost."""
    first = FolderOwner("killed", ["launcher"], "attempt 0")
    save(tmp_path, first)
    yield tmp_path
    first.close()


def change_owner(folder: Path, **changes: object) -> None:
    """Change the owner file in place, so that it stays locked."""
    owner = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**owner, **changes}))


def restarted(launcher: str = "launcher") -> FolderOwner:
    return FolderOwner(
        "killed", [launcher], "attempt 1", wait_seconds=0.0, restart_wait_seconds=0.3
    )


def test_a_restart_goes_on_without_the_lock_of_a_lost_host(
    lock_of_earlier_attempt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = lock_of_earlier_attempt
    change_owner(folder, boot_id="of the lost host", host="lost")

    owner = restarted()
    save(folder, owner, 2)
    save(folder, owner, 3)

    assert f"{folder} is still locked by run 'killed' (process" in caplog.text
    assert caplog.text.count("is still locked") == 1
    assert json.loads((folder / OWNER).read_text())["attempt"] == "attempt 1"


def test_a_restart_without_the_lock_notices_another_run_at_its_next_save(
    lock_of_earlier_attempt: Path,
) -> None:
    folder = lock_of_earlier_attempt
    change_owner(folder, boot_id="of the lost host", host="lost")
    owner = restarted()
    save(folder, owner, 2)

    change_owner(folder, instance="of another run", run_id="other")

    with pytest.raises(CheckpointError, match=r"in use by run 'other'.* since the last save"):
        save(folder, owner, 3)


def test_a_restart_is_refused_while_its_earlier_attempt_lives_on_this_host(
    lock_of_earlier_attempt: Path,
) -> None:
    with pytest.raises(CheckpointError, match="in use by run 'killed'"):
        save(lock_of_earlier_attempt, restarted(), 2)


def test_a_restart_does_not_wait_long_for_its_earlier_attempt_on_this_host(
    lock_of_earlier_attempt: Path,
) -> None:
    owner = FolderOwner(
        "killed", ["launcher"], "attempt 1", wait_seconds=0.0, restart_wait_seconds=30.0
    )
    began = time.monotonic()

    with pytest.raises(CheckpointError, match="in use by run 'killed'"):
        save(lock_of_earlier_attempt, owner, 2)

    assert time.monotonic() - began < 30


def test_an_earlier_attempt_with_the_lock_notices_a_restart_that_saved_without_it(
    tmp_path: Path,
) -> None:
    first = FolderOwner("killed", ["launcher"], "attempt 0")
    save(tmp_path, first)
    change_owner(tmp_path, boot_id="of the other host", host="other")
    save(tmp_path, restarted(), 2)
    before = content(tmp_path)

    with pytest.raises(CheckpointError, match=r"since the last save.*a restart of this run"):
        save(tmp_path, first, 2)

    assert content(tmp_path) == before


def test_another_run_does_not_go_on_without_the_lock_of_a_lost_host(
    lock_of_earlier_attempt: Path,
) -> None:
    folder = lock_of_earlier_attempt
    change_owner(folder, boot_id="of the lost host", host="lost")
    other = restarted("another launcher")
    load(other, folder)

    with pytest.raises(CheckpointError, match=f"host lost was lost.*delete {folder / OWNER}"):
        save(folder, other, 2)


def test_the_owner_file_is_writable_for_a_group_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        run("first").claim(CheckpointFolder(tmp_path))
    finally:
        os.umask(before)

    assert (tmp_path / OWNER).stat().st_mode & 0o777 == 0o664


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("umask", [0o002, 0o022])
def test_a_colleague_continues_or_reads_what_to_do(umask: int) -> None:
    with tempfile.TemporaryDirectory() as name:  # another user cannot enter tmp_path
        Path(name).chmod(0o755)
        folder = Path(name) / "saves"
        first = run("first")
        before = os.umask(umask)
        try:
            save(folder, first)
        finally:
            os.umask(before)
        first.close()
        folder.chmod(0o775)

        found = as_colleague(lambda: load_and_claim(folder))

    if umask == 0o002:
        assert found == "claimed"
    else:
        assert f"Let its owner, root, run `chmod g+w {folder / OWNER}`" in found


def load_and_claim(folder: Path) -> str:
    second = run("second")
    load(second, folder)
    try:
        second.claim(CheckpointFolder(folder))
    except CheckpointError as error:
        return str(error)
    return "claimed"


def as_colleague(action: Callable[[], str]) -> str:
    """Return what an action returns for another user of root's group."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(0)
            os.setuid(12345)
            os.write(writer, action().encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as file:
        return file.read()


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
