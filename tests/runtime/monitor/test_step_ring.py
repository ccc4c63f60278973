"""Tests of the ring of steps in shared memory: what a killed process leaves.

Covers `log_tail.py`.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import set_clock
from fakes.raw_steps import raw_step
from fakes.scraper import eventually
from fakes.steps import step as record
from scripts.forked_ranks import running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS
from scripts.trainer.full_disk import fill_bytes, small_disk

from zerowatch.metrics.atomic_file import open_log
from zerowatch.metrics.file_lock import LOCK_FILE
from zerowatch.metrics.settings import RunLogSettings
from zerowatch.runtime.common.device_scalar import PendingScalar
from zerowatch.runtime.instrumentation.raw_step import StepCounts
from zerowatch.runtime.monitor import step_ring
from zerowatch.runtime.monitor.step_log import StepLog
from zerowatch.runtime.monitor.step_ring import (
    MAX_AGE_SECONDS,
    SLOTS,
    RingClaim,
    StepRing,
    recover,
)

LOG = "rank-3.jsonl"
IDENTITY = {"run_id": "night-7", "rank": 3, "host": "here", "attempt": 0, "world_size": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in place of /dev/shm; other tests run at the same time."""
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "night-7"
    path.mkdir(parents=True)
    return path


def new_ring(folder: Path, runs: Path, *, every_step: bool = True) -> StepRing:
    ring = StepRing.create(folder)
    assert ring is not None
    ring.set_log(runs / LOG, IDENTITY, every_step=every_step)
    return ring


def in_killed_process(action: Callable[[], object]) -> None:
    """Do something in a process that then kills itself."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def leave_ring(folder: Path, runs: Path, steps: list[Any], *, every_step: bool = True) -> Path:
    """Leave the ring of a killed process with these steps; return its file."""

    def write() -> None:
        ring = new_ring(folder, runs, every_step=every_step)
        for step in steps:
            ring.write(step)

    in_killed_process(write)
    (file,) = folder.iterdir()
    return file


def log_steps(runs: Path, *numbers: int) -> StepLog:
    log = StepLog(runs, IDENTITY, RunLogSettings())
    for number in numbers:
        log.append(record(number))
    log.close()
    return log


def logged(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / LOG).read_text().splitlines()]


def numbers(runs: Path) -> list[int]:
    return [line["step"] for line in logged(runs)]


def test_the_steps_that_a_killed_process_has_not_logged_are_appended(
    folder: Path, runs: Path
) -> None:
    log_steps(runs, 1, 2, 3)
    leave_ring(folder, runs, [raw_step(number) for number in range(1, 6)])

    assert recover(runs.parent, folder) == 2

    assert numbers(runs) == [1, 2, 3, 4, 5]
    line = logged(runs)[-1]
    assert {name: line[name] for name in IDENTITY} == IDENTITY
    assert line["ended_at_unix_seconds"] == 1005.0
    assert (line["seconds"], line["phase_seconds"]) == (0.5, {"forward": 0.5})
    assert (line["micro_batches"], line["samples"], line["tokens"]) == (2, 8, 64)
    assert (line["loss"], line["gradient_norm"]) == (1.5, 0.5)
    assert (line["learning_rate"], line["loss_scale"]) == (0.001, None)
    assert line["comm_seconds"] is None
    assert not (line["skipped"] or line["nonfinite_loss"] or line["phases_are_host_times"])
    assert list(folder.iterdir()) == []
    assert recover(runs.parent, folder) == 0


def test_the_time_of_the_log_is_that_of_its_last_step(folder: Path, runs: Path) -> None:
    """Else an old run would count as alive after its report."""
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])

    recover(runs, folder)

    assert (runs / LOG).stat().st_mtime == 1002.0


def test_all_steps_are_appended_to_a_log_that_was_never_opened(folder: Path, runs: Path) -> None:
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])

    assert recover(runs, folder) == 2
    assert numbers(runs) == [1, 2]


def test_values_that_were_not_known_or_still_on_a_device_are_null(folder: Path, runs: Path) -> None:
    class StillOnDevice(PendingScalar):
        def __init__(self) -> None:
            self._slot = []

    pending: Any = StillOnDevice()
    unknown = StepCounts(micro_batches=1, losses=[1.0, pending])
    leave_ring(
        folder,
        runs,
        [
            raw_step(1, counts=unknown, gradient_norm=pending, device_phases=object()),
            raw_step(2, counts=StepCounts(losses=[math.nan], skipped=True)),
            raw_step(3, counts=StepCounts(losses=[1.0, 2.0], losses_are_divided=True)),
            raw_step(4, counts=StepCounts(losses=[-math.inf])),
        ],
    )

    recover(runs, folder)

    first, second, third, fourth = logged(runs)
    names = ("loss", "samples", "tokens", "gradient_norm")
    assert [first[name] for name in names] == [None] * 4
    assert (first["nonfinite_loss"], first["phases_are_host_times"]) == (False, True)
    assert (second["loss"], second["nonfinite_loss"], second["skipped"]) == (None, True, True)
    assert third["loss"] == 3.0
    assert fourth["nonfinite_loss"]


def test_a_step_that_was_being_written_is_left_out(folder: Path, runs: Path) -> None:
    file = leave_ring(folder, runs, [raw_step(1), raw_step(2)])
    content = bytearray(file.read_bytes())
    place = content.index((2).to_bytes(8, "little") * 2)  # number in the ring, and step
    content[place + 20] ^= 1
    file.write_bytes(content)

    assert recover(runs, folder) == 1
    assert numbers(runs) == [1]


def test_a_ring_has_the_last_steps_in_order(folder: Path, runs: Path) -> None:
    leave_ring(folder, runs, [raw_step(number) for number in range(1, SLOTS + 8)])

    assert recover(runs, folder) == SLOTS
    assert numbers(runs) == list(range(8, SLOTS + 8))


def test_a_clock_that_is_set_back_loses_and_repeats_no_step(folder: Path, runs: Path) -> None:
    log_steps(runs, 1, 2)
    ends = [1001.0, 1002.0, 50.0, 51.0]
    leave_ring(folder, runs, [raw_step(n, ended_at=end) for n, end in enumerate(ends, 1)])

    assert recover(runs, folder) == 2
    assert numbers(runs) == [1, 2, 3, 4]


def test_a_rank_that_logs_each_tenth_step_gets_only_those(folder: Path, runs: Path) -> None:
    leave_ring(folder, runs, [raw_step(number) for number in range(1, 35)], every_step=False)

    assert recover(runs, folder) == 3
    assert numbers(runs) == [10, 20, 30]


def test_a_partial_line_at_the_end_of_the_log_is_no_line_afterwards(
    folder: Path, runs: Path
) -> None:
    log = log_steps(runs, 1)
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])

    recover(runs, folder)

    lines = log.path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_the_last_logged_step_may_be_in_the_segment_before(folder: Path, runs: Path) -> None:
    log_steps(runs, 1, 2)
    (runs / LOG).rename(runs / "rank-3.1.jsonl")
    leave_ring(folder, runs, [raw_step(number) for number in (1, 2, 3)])

    assert recover(runs, folder) == 1
    assert numbers(runs) == [3]


def test_the_ring_of_a_living_process_is_left_alone(folder: Path, runs: Path) -> None:
    ring = new_ring(folder, runs)
    ring.write(raw_step(1))

    def look_from_another_process() -> None:
        step_ring._own.clear()  # as it is in a process that was not forked from the owner
        recover(runs, folder)

    assert recover(runs, folder) == 0
    in_killed_process(look_from_another_process)
    assert not (runs / LOG).exists()
    # Its own look has not released the lock either.
    in_killed_process(look_from_another_process)
    assert not (runs / LOG).exists()

    ring.close()
    ring.close()
    assert list(folder.iterdir()) == []


def test_a_child_that_outlives_the_killed_process_does_not_hold_its_ring(
    folder: Path, runs: Path
) -> None:
    reader, writer = os.pipe()

    def fork_and_write() -> None:
        new_ring(folder, runs).write(raw_step(1))
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until this test closes the other end
            os._exit(0)

    in_killed_process(fork_and_write)

    assert recover(runs, folder) == 1
    os.close(writer)
    os.close(reader)


def test_a_forked_child_deletes_nothing(folder: Path, runs: Path) -> None:
    ring = new_ring(folder, runs)
    in_killed_process(ring.close)

    assert len(list(folder.iterdir())) == 1
    ring.close()


def test_a_ring_that_is_not_complete_in_the_log_stays(folder: Path, runs: Path) -> None:
    ring = new_ring(folder, runs)
    ring.write(raw_step(1))
    ring.close(deletes_file=False)

    assert recover(runs, folder) == 1


def test_a_step_survives_a_kill_from_the_moment_on_when_the_log_is_known(
    folder: Path, runs: Path
) -> None:
    ring = StepRing.create(folder)
    assert ring is not None
    assert not ring.write(raw_step(1))

    ring.set_log(runs / LOG, IDENTITY)

    assert ring.write(raw_step(2))
    ring.close()


def test_a_ring_without_a_log_leaves_no_file(folder: Path) -> None:
    ring = StepRing.create(folder)
    assert ring is not None

    assert not ring.write(raw_step(1))

    assert list(folder.iterdir()) == []
    ring.close()


def test_no_ring_is_made_where_little_memory_is_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = os.statvfs(folder)
    monkeypatch.setattr(step_ring, "MIN_FREE_BYTES", space.f_bavail * space.f_frsize)

    assert StepRing.create(folder) is None
    assert StepRing.create(tmp_path / "missing") is None


def test_steps_are_written_to_a_full_disk(runs: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(step_ring, "MIN_FREE_BYTES", 0)
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        with small_disk(disk):
            ring = new_ring(disk, runs)
            fill_bytes(disk, 0)
            for number in range(1, SLOTS + 2):  # on a sparse file: SIGBUS
                ring.write(raw_step(number))
            assert StepRing.create(disk) is None
            ring.close()
    except PermissionError as error:
        pytest.skip(f"no mounts here: {error}")


def test_a_log_that_cannot_be_written_is_tried_again_for_a_day(
    folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / LOG).mkdir()  # in the way
    leave_ring(folder, runs, [raw_step(1, ended_at=time.time())])
    assert recover(runs, folder) == 0

    (runs / LOG).rmdir()
    assert recover(runs, folder) == 1

    (runs / LOG).unlink()
    (runs / LOG).mkdir()
    leave_ring(folder, runs, [raw_step(1, ended_at=time.time())])
    later = time.time() + MAX_AGE_SECONDS + 1
    set_clock(monkeypatch, step_ring, time=lambda: later)
    assert recover(runs, folder) == 0
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("begun_at", "expected"), [(1000.5, [1, 2]), (1002.5, [])])
def test_steps_are_appended_only_if_the_folder_is_that_of_their_run(
    folder: Path, runs: Path, begun_at: float, expected: list[int]
) -> None:
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])
    (runs / LOG).touch()
    (runs / LOCK_FILE).touch()
    os.utime(runs / LOCK_FILE, (begun_at, begun_at))

    assert recover(runs.parent, folder) == len(expected)

    assert numbers(runs) == expected
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("num_later", [2, SLOTS + 100])
def test_nothing_is_appended_to_the_log_of_a_rank_that_has_gone_on(
    folder: Path,
    runs: Path,
    num_later: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was restarted on another host, so its ring is found later."""
    log_steps(runs, 1, 2)
    leave_ring(folder, runs, [raw_step(number) for number in range(1, 5)])
    log_steps(runs, *range(5, 5 + num_later))
    monkeypatch.setattr(step_ring, "SEARCHED_BYTES", 64 * 1024)  # less than the many steps
    before = (runs / LOG).read_bytes()

    with caplog.at_level("INFO"):
        assert recover(runs, folder) == 0

    assert (runs / LOG).read_bytes() == before
    assert list(folder.iterdir()) == []
    [line] = caplog.messages
    assert str(runs / LOG) in line


def test_the_rank_may_have_gone_on_in_the_segment_before(folder: Path, runs: Path) -> None:
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])
    log_steps(runs, 3)
    (runs / LOG).rename((runs / LOG).with_suffix(".1.jsonl"))
    (runs / LOG).write_text('{"step": 4')

    assert recover(runs, folder) == 0

    assert (runs / LOG).read_text() == '{"step": 4'


def test_two_threads_do_not_append_the_same_steps(
    folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher waits for a thread that recovers them for some seconds only."""
    leave_ring(folder, runs, [raw_step(1), raw_step(2)])
    blocked, goes_on = threading.Event(), threading.Event()

    def slow_disk(log: Path) -> int:
        blocked.set()
        goes_on.wait(TIMEOUT_SECONDS)
        return open_log(log)

    monkeypatch.setattr(step_ring, "open_log", slow_disk)
    thread = threading.Thread(target=recover, args=(runs, folder))
    thread.start()
    assert blocked.wait(TIMEOUT_SECONDS)

    assert recover(runs, folder) == 0

    goes_on.set()
    thread.join()
    assert numbers(runs) == [1, 2]


def test_the_logs_of_other_folders_are_not_written(
    folder: Path, runs: Path, tmp_path: Path
) -> None:
    leave_ring(folder, runs, [raw_step(1, ended_at=time.time())])

    assert recover(tmp_path / "other", folder) == 0
    assert not (runs / LOG).exists()
    assert recover(runs, folder) == 1


def test_the_steps_in_young_rings_of_other_folders_are_not_read(
    folder: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each killed job leaves a ring, and each start of a job looks at all of them."""
    leave_ring(folder, runs, [raw_step(1, ended_at=time.time())])
    read_bytes: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        content = pread(descriptor, size, offset)
        read_bytes.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted)

    assert recover(tmp_path / "other", folder) == 0
    assert sum(read_bytes) <= 4096
    assert len(list(folder.iterdir())) == 1


def test_the_ring_of_a_run_of_many_days_is_as_old_as_its_last_step(
    folder: Path, runs: Path, tmp_path: Path
) -> None:
    """A write to a page that is mapped already does not change the time of a file in memory."""
    file = leave_ring(folder, runs, [raw_step(1, ended_at=time.time())])
    began = time.time() - 2 * MAX_AGE_SECONDS
    os.utime(file, (began, began))

    assert recover(tmp_path / "other", folder) == 0
    assert recover(runs, folder) == 1


def test_what_is_no_ring_of_this_user_is_not_followed_and_not_deleted(
    folder: Path, runs: Path, tmp_path: Path
) -> None:
    name = f"zerowatch-steps-{os.getuid()}-1-"
    (folder / f"{name}link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("keep")
    (folder / f"{name}folder").mkdir()
    os.mkfifo(folder / f"{name}fifo")
    (folder / f"{name}junk").write_bytes(b"junk")

    assert recover(runs, folder) == 0

    assert (tmp_path / "secret").read_text() == "keep"
    assert {path.name for path in folder.iterdir()} == {
        f"{name}{end}" for end in ("link", "folder", "fifo")
    }


def test_a_ring_that_another_user_owns_is_left_alone(
    folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = leave_ring(folder, runs, [raw_step(1)])
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    file.rename(file.with_name(f"zerowatch-steps-{other}-1-x"))  # planted under our name

    assert recover(runs, folder) == 0
    assert len(list(folder.iterdir())) == 1


@pytest.mark.jobs
@pytest.mark.slow
def test_fifty_kills_at_random_moments_lose_no_step(tmp_path: Path, seed: int) -> None:
    """The script notes each step after it; at most the step in flight may be in one place only."""
    draw = random.Random(seed)
    recovered = 0
    for kill in range(50):
        folder = tmp_path / str(kill)
        folder.mkdir()
        noted = train_and_kill(folder, delay_seconds=draw.random())
        run = folder / "runs" / "killed"
        recovered += recover(run, Path("/dev/shm"))
        steps = [
            json.loads(line)["step"] for line in (run / "rank-0.jsonl").read_text().splitlines()
        ]
        assert steps == list(range(steps[0], steps[-1] + 1)), f"seed {seed}, kill {kill}"
        assert steps[-1] - noted[-1] in (0, 1), f"seed {seed}, kill {kill}"
    assert recovered > 50


def train_and_kill(folder: Path, *, delay_seconds: float) -> list[int]:
    """Train in a folder, kill the process, and return the steps that it has noted."""
    script, notes = SCRIPTS / "monitor" / "note_steps.py", folder / "steps"
    variables = {"ZEROWATCH_RUN_ID": "killed", "STEPS_FILE": str(notes)}
    with running_ranks(1, script, cwd=folder, variables=variables) as ranks:
        trains = eventually(
            lambda: (notes.exists() and notes.stat().st_size > 60) or ranks.codes() != [None],
            TIMEOUT_SECONDS,
        )
        assert trains, "the job has trained no 20 steps"
        assert ranks.codes() == [None], ranks.output()
        time.sleep(delay_seconds)  # it draws the moment of the kill, and waits for nothing
        os.kill(ranks.pids[0], signal.SIGKILL)
        ranks.join()
    return [int(line) for line in notes.read_text().split()]


def claim(ring: Path) -> RingClaim:
    return RingClaim(os.open(ring, os.O_RDWR))


def test_a_ring_that_a_process_has_claimed_is_left_to_it(folder: Path, runs: Path) -> None:
    claimed = claim(leave_ring(folder, runs, [raw_step(1)]))
    while_claimed = recover(runs, folder)
    claimed.release()
    claimed.release()

    assert while_claimed == 0
    assert recover(runs, folder) == 1
    assert numbers(runs) == [1]


def test_a_claimed_ring_can_be_waited_for(
    folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = claim(leave_ring(folder, runs, [raw_step(1)]))
    set_clock(monkeypatch, step_ring, sleep=lambda seconds: claimed.release())

    assert recover(runs, folder, wait_seconds=TIMEOUT_SECONDS) == 1
