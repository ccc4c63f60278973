"""Tests of the run folder: its id among live runs, its deletion, and its targets file."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fakes.foreign_files import forbid_to_write
from fakes.locked_file import locked_by_another_process
from fakes.raw_steps import raw_step
from fakes.steps import step as record
from torch.distributed import HashStore

from zerowatch.metrics.file_lock import LOCK_FILE
from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common import rank_store
from zerowatch.runtime.common.launcher_link import receive_run_folder
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.common.rank_store import RankStore, TargetDiscovery
from zerowatch.runtime.monitor import run_folder as run_folder_module
from zerowatch.runtime.monitor import step_ring
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS
from zerowatch.runtime.monitor.run_folder import LAUNCHERS_FOLDER, RunFolder

RUN_ID = "night-7"
ADDRESS = "127.0.0.1:9464"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def open_folder(
    runs: Path,
    *,
    rank: int = 0,
    local_rank: int = 0,
    attempt: int = 0,
    run_id: str = RUN_ID,
    now: Callable[[], float] = time.monotonic,
    is_served: bool = True,
) -> RunFolder:
    process = ProcessInfo(
        rank=rank, local_rank=local_rank, world_size=2, host="here", attempt=attempt
    )
    store = RankStore(process, 0)
    targets = TargetDiscovery(store, process)
    settings = Settings(run_id=run_id, run_log={"folder": runs}, serve={"enabled": is_served})
    return RunFolder(settings, process, store, targets, now)


@pytest.mark.parametrize(
    ("rank", "local_rank", "is_sent", "is_of_rank_0"),
    [(0, 0, True, True), (2, 0, True, False), (1, 1, False, False)],
)
def test_local_rank_0_names_the_run_folder_to_the_launcher(
    tmp_path: Path, rank: int, local_rank: int, is_sent: bool, is_of_rank_0: bool
) -> None:
    with receive_run_folder(tmp_path / "runs") as receiver:
        folder = open_folder(tmp_path / "shared", rank=rank, local_rank=local_rank)
        folder.append([record(1)])
        folder.close()

        assert (tmp_path / "shared" in receiver.runs()) is is_sent
        assert (tmp_path / "shared" / RUN_ID in receiver.folders()) is is_of_rank_0


def is_locked(folder: Path) -> bool:
    """Whether another process finds a run folder locked; a process never conflicts with itself."""
    lock = f"open({str(folder / LOCK_FILE)!r}, 'w')"
    script = f"import fcntl; fcntl.lockf({lock}, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert other.returncode == 0 or b"BlockingIOError" in other.stderr, other.stderr
    return other.returncode != 0


def test_a_second_live_run_of_one_id_gets_another_id_and_a_warning(tmp_path: Path, caplog) -> None:
    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        folder = open_folder(tmp_path)
        folder.append([record(1)])
        folder.close()

    assert folder.run_id == f"{RUN_ID}-2"
    assert steps(tmp_path / f"{RUN_ID}-2" / "rank-0.jsonl") == [1]
    assert [path.name for path in (tmp_path / RUN_ID).iterdir()] == [LOCK_FILE]
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"{RUN_ID}-2" in warning.getMessage()


def test_a_longest_id_stays_within_its_limit(tmp_path: Path) -> None:
    longest = 80 * "x"
    with locked_by_another_process(tmp_path / longest / LOCK_FILE):
        folder = open_folder(tmp_path, run_id=longest)
        folder.close()

    assert folder.run_id == 78 * "x" + "-2"


def test_after_the_end_of_a_run_its_id_can_be_used_again(tmp_path: Path) -> None:
    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        pass

    folder = open_folder(tmp_path)
    folder.poll()
    assert folder.run_id == RUN_ID
    assert is_locked(tmp_path / RUN_ID)
    folder.close()

    assert not is_locked(tmp_path / RUN_ID)


def test_a_lock_that_the_script_has_released_by_a_copy_is_taken_again(tmp_path: Path) -> None:
    seconds = 100.0
    folder = open_folder(tmp_path / "runs", now=lambda: seconds)
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    assert not is_locked(tmp_path / "runs" / RUN_ID)

    seconds += RETRY_SECONDS
    folder.poll()

    assert is_locked(tmp_path / "runs" / RUN_ID)
    folder.close()
    assert not is_locked(tmp_path / "runs" / RUN_ID)


@pytest.mark.parametrize("is_served", [True, False])
def test_rank_0_shares_its_id_once_the_job_has_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_served: bool
) -> None:
    folders = [open_folder(tmp_path, rank=rank, is_served=is_served) for rank in (0, 1)]
    for folder in folders:
        folder.poll()
    before = folders[1].run_id

    store = HashStore()
    monkeypatch.setattr(rank_store, "job_store", lambda: store)
    for folder in folders:
        folder.poll()
        folder.close()

    assert (before, folders[1].run_id) == (None, RUN_ID)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let this process be a rank of one of torchrun's agents, by the agent's log folder."""

    def launched(agent: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{agent}/attempt_0/0/error.json")

    return launched


def claimed(runs: Path, **options: Any) -> str | None:
    """Return the id of a run that begins and ends."""
    folder = open_folder(runs, **options)
    folder.close()
    return folder.run_id


def test_a_restart_keeps_its_id_even_if_the_lock_of_the_last_attempt_is_still_held(
    tmp_path: Path, launched
) -> None:
    launched("first")
    claimed(tmp_path)

    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        again = claimed(tmp_path, attempt=1)

    assert again == RUN_ID


def test_a_restart_that_torchrun_does_not_count_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, attempt = tmp_path / "runs", tmp_path / "agent" / "attempt_0"
    (attempt / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / "0" / "error.json"))
    claimed(runs)

    with locked_by_another_process(runs / RUN_ID / LOCK_FILE):
        of_same_start = claimed(runs)
        os.utime(attempt, ns=(1, 1))  # a node was lost, and the agent made its folder again
        restarted = [claimed(runs), claimed(runs)]
        (signature,) = (runs / RUN_ID / LAUNCHERS_FOLDER).iterdir()
        signature.write_text("")  # as if it was not known in which start
        os.utime(attempt, ns=(2, 2))
        of_unknown_start = claimed(runs)

    assert of_same_start == f"{RUN_ID}-2"
    # The first run of the new start has signed its folder, so the second one takes the other.
    assert restarted == [RUN_ID, f"{RUN_ID}-2"]
    assert of_unknown_start == f"{RUN_ID}-2"


def test_a_restart_takes_the_folder_of_its_own_job(tmp_path: Path, launched, caplog) -> None:
    launched("first")
    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        launched("second")
        begun = claimed(tmp_path)
        while_other_lives = claimed(tmp_path, attempt=1)
    after_its_end = claimed(tmp_path, attempt=2)
    launched("first")
    first_again = claimed(tmp_path, attempt=1)

    assert (begun, while_other_lives, after_its_end) == (f"{RUN_ID}-2",) * 3
    assert first_again == f"{RUN_ID}-3"  # it had not begun to log
    assert len(caplog.records) == 2


def test_an_id_whose_folder_is_another_users_gets_a_number_that_a_restart_finds(
    tmp_path: Path, launched, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    launched("first")
    claimed(tmp_path)  # the name of the other user's launcher does not matter
    forbid_to_write(monkeypatch, tmp_path / RUN_ID)
    original = run_folder_module.open_to_append

    def refuse(path: Path) -> int:
        if path.parent == tmp_path / RUN_ID:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(run_folder_module, "open_to_append", refuse)
    begun = claimed(tmp_path)
    restarted = claimed(tmp_path, attempt=1)

    assert (begun, restarted) == (f"{RUN_ID}-2",) * 2
    [warning] = caplog.records
    assert f"{RUN_ID}-2" in warning.getMessage()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_a_run_keeps_its_id_if_its_own_folder_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: Path) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(run_folder_module, "open_to_append", refuse)

    assert claimed(tmp_path) == RUN_ID


def test_a_second_node_of_a_job_finds_its_folder_as_rank_zero_of_a_restart(
    tmp_path: Path, launched, monkeypatch
) -> None:
    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        launched("node-0")
        first = open_folder(tmp_path)
        launched("node-1")
        second = open_folder(tmp_path, rank=1)
        monkeypatch.setattr(second._store, "get", {"run_id": first.run_id}.get)
        second.poll()

        restarted = claimed(tmp_path, attempt=1)

    assert restarted == f"{RUN_ID}-2"
    first.close()
    second.close()


def test_a_rank_that_hears_nothing_of_rank_zero_takes_the_folder_of_its_job(
    tmp_path: Path, launched
) -> None:
    launched("second")
    with locked_by_another_process(tmp_path / RUN_ID / LOCK_FILE):
        begun = claimed(tmp_path)
        other = open_folder(tmp_path, rank=1)
        other.append([record(1)])
        other.close()

    assert begun == other.run_id == f"{RUN_ID}-2"


def test_other_ranks_take_the_id_of_rank_zero(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = open_folder(tmp_path, rank=1)
    before = folder.run_id
    monkeypatch.setattr(folder._store, "get", {"run_id": f"{RUN_ID}-2"}.get)
    folder.poll()

    assert (before, folder.run_id) == (None, f"{RUN_ID}-2")
    folder.close()


def test_a_step_is_in_the_log_at_once_if_rank_zero_has_an_id_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ring, "SHARED_MEMORY", tmp_path)
    folder = open_folder(tmp_path, rank=1)
    assert folder.ring is not None
    monkeypatch.setattr(folder._store, "get", {"run_id": RUN_ID}.get)

    folder.append([record(1)])

    assert steps(tmp_path / RUN_ID / "rank-1.jsonl") == [1]
    assert folder.ring.write(raw_step(2))  # from now on a kill loses no step
    folder.close()


def test_the_id_is_not_looked_for_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(tmp_path, rank=1)
    looks: list[str] = []
    monkeypatch.setattr(folder._store, "get", looks.append)
    monkeypatch.setattr(folder._look_backoff, "_now", lambda: 0.0)

    for number in range(1, 9):
        folder.append([record(number)])

    assert looks == ["run_id"]
    folder.close()
    assert steps(tmp_path / RUN_ID / "rank-1.jsonl") == list(range(1, 9))


def test_a_rank_that_rank_zero_never_published_its_id_uses_the_chosen_one(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, rank=1)

    folder.append([record(1)])
    folder.close()

    assert folder.run_id == RUN_ID
    assert steps(tmp_path / RUN_ID / "rank-1.jsonl") == [1]


def test_a_rank_that_chose_an_id_serves_that_and_rank_zeros_late_one_only(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(run_folder_module, "RUN_ID_TIMEOUT_SECONDS", -1.0)
    folder = open_folder(tmp_path, rank=1)
    folder.poll()
    before = [folder.serves_run(run) for run in (RUN_ID, "late", "ended")]
    monkeypatch.setattr(folder._store, "get", {"run_id": "late"}.get)
    folder.poll()

    assert before == [True, False, False]
    assert [folder.serves_run(run) for run in (RUN_ID, "late", "ended")] == [True, True, False]
    folder.close()


def test_a_folder_that_was_deleted_is_made_again_with_all_its_files(tmp_path: Path, caplog) -> None:
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.append([record(step)])
    before = {path.name for path in (tmp_path / RUN_ID).iterdir()}

    shutil.rmtree(tmp_path / RUN_ID)
    for step in (3, 4):
        folder.append([record(step)])

    assert {path.name for path in (tmp_path / RUN_ID).iterdir()} == before
    assert steps(tmp_path / RUN_ID / "rank-0.jsonl") == [3, 4]
    assert json.loads((tmp_path / RUN_ID / "settings.json").read_text())["run_id"] == RUN_ID
    assert folder.dropped == 2
    [warning] = caplog.records
    assert "deleted" in warning.getMessage()
    folder.close()


@pytest.mark.parametrize("link", ["", "x"])
def test_a_linked_runs_folder_is_used(tmp_path: Path, link: str) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")

    folder = open_folder(tmp_path / "runs" / link)
    folder.append([record(1)])
    folder.close()

    assert steps(tmp_path / "scratch" / link / RUN_ID / "rank-0.jsonl") == [1]


def run_folder(runs: Path, address: str = ADDRESS) -> RunFolder:
    """Return the folder of rank 0 of one, with its targets file."""
    process = ProcessInfo(rank=0, local_rank=0, world_size=1, host="here", attempt=0)
    store = RankStore(process, 0, dist.HashStore())
    targets = TargetDiscovery(store, process)
    settings = Settings(run_id="night-7", run_log={"folder": runs})
    folder = RunFolder(settings, process, store, targets)
    targets.announce(address)
    folder.poll()
    return folder


def listed(runs: Path) -> list[str]:
    targets = json.loads((runs / "night-7" / "targets.json").read_text())
    return [address for target in targets for address in target["targets"]]


def test_prometheus_asks_an_address_for_the_run_that_it_belongs_to(tmp_path: Path) -> None:
    run_folder(tmp_path)

    (target,) = json.loads((tmp_path / "night-7" / "targets.json").read_text())

    assert target["labels"] == {
        "run": "night-7",
        "node": "here",
        "rank": "0",
        "__param_run": "night-7",
    }


def test_after_a_normal_end_the_run_has_no_targets(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    during = listed(tmp_path)

    folder.withdraw_targets()
    folder.withdraw_targets()

    assert (during, listed(tmp_path)) == ([ADDRESS], [])


def test_the_targets_of_a_later_watch_of_the_same_run_are_kept(tmp_path: Path) -> None:
    first = run_folder(tmp_path)
    run_folder(tmp_path, "127.0.0.1:9564")

    first.withdraw_targets()

    assert listed(tmp_path) == ["127.0.0.1:9564"]


def test_a_removed_run_folder_is_not_made_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (tmp_path / "night-7" / "targets.json").unlink()

    folder.withdraw_targets()

    assert not (tmp_path / "night-7" / "targets.json").exists()


def test_the_steps_of_a_killed_process_are_in_the_log_before_those_of_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ring, "SHARED_MEMORY", tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            killed = open_folder(tmp_path / "runs")
            assert killed.ring is not None
            killed.ring.write(raw_step(7, ended_at=time.time()))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    restarted = open_folder(tmp_path / "runs", attempt=1)
    restarted.append([record(8)])
    restarted.close()

    assert steps(tmp_path / "runs" / RUN_ID / "rank-0.jsonl") == [7, 8]
    assert not list(tmp_path.glob("zerowatch-steps-*"))


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_ring_is_deleted_unless_steps_are_missing_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    monkeypatch.setattr(step_ring, "SHARED_MEMORY", tmp_path)
    folder = open_folder(tmp_path / "runs")

    folder.close(is_complete=is_complete)

    assert len(list(tmp_path.glob("zerowatch-steps-*"))) == (not is_complete)


def test_without_a_run_log_there_is_no_ring() -> None:
    process = ProcessInfo(rank=0, local_rank=0, world_size=1, host="here", attempt=0)
    store = RankStore(process, 0)
    settings = Settings(run_log={"enabled": False})

    folder = RunFolder(settings, process, store, TargetDiscovery(store, process))

    assert folder.ring is None
