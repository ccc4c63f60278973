"""A data loader's worker that was killed ran out of memory if the kernel counts one more kill."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.clock import FakeClock, set_clock
from fakes.ooms import FakeOomContext
from torch.utils.data import DataLoader, Dataset

from zerowatch.runtime.memory.oom import oom_finder
from zerowatch.runtime.memory.oom.error_report import OomReporter
from zerowatch.runtime.memory.oom.oom_error import OomError
from zerowatch.runtime.memory.oom.oom_finder import WINDOW_SECONDS, OomFinder

KILLED = "DataLoader worker (pid 18303) is killed by signal: Killed. "
LOST = "DataLoader worker (pid(s) 18303, 18304) exited unexpectedly"
OWN, HOST = "sys/fs/cgroup/job/memory.events", "proc/vmstat"


def count(root: Path, **kills: int | None) -> None:
    """Write the kernel's counters: `own` of the rank's cgroup, `host` of the machine."""
    for name, file in {"own": OWN, "host": HOST}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        if kills.get(name) is not None:
            (root / file).write_text(f"oom 4\noom_kill {kills[name]}\n")
    (root / "proc/self").mkdir(exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")


def killed() -> BaseException:
    return RuntimeError(KILLED)


def wrapped() -> BaseException:
    """Return the error of torch if the signal arrives while it waits for a batch."""
    return caused_by(killed())


def caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("DataLoader worker (pid(s) 18303) exited unexpectedly")
    error.__cause__ = cause
    return error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    set_clock(monkeypatch, oom_finder, monotonic=clock)
    return clock


@pytest.mark.parametrize("make", [killed, wrapped])
def test_a_worker_was_killed_by_the_oom_killer_if_its_cgroup_counts_one_more(
    tmp_path: Path, clock: FakeClock, make: Callable[[], BaseException]
) -> None:
    count(tmp_path, own=2, host=5)
    finder, error = OomFinder(tmp_path), make()
    clock.seconds += 7
    count(tmp_path, own=3, host=6)

    found = finder.find(error)

    expected = OomError(
        kind="operating system",
        device="cpu",
        requested_bytes=None,
        message="DataLoader worker (pid 18303) is killed by signal: Killed (cause: the kernel's "
        "OOM killer, which has killed 1 process(es) of this rank's memory cgroup in the last 7 s)",
        worker="DataLoader worker with pid 18303",
    )
    assert found == (error.__cause__ or error, expected)
    assert finder.is_caused_by_oom(error)


def test_without_a_counter_of_its_cgroup_the_one_of_the_machine_makes_it_probable(
    tmp_path: Path, clock: FakeClock
) -> None:
    count(tmp_path, host=5)
    finder = OomFinder(tmp_path)
    count(tmp_path, host=7)

    found = finder.find(killed())

    assert found is not None
    assert found[1].message.endswith(
        "(probable cause: the kernel's OOM killer, which has killed 2 process(es) on this host in "
        "the last 0 s)"
    )


@pytest.mark.parametrize("kills", [1, 0])
@pytest.mark.parametrize(
    "error",
    [RuntimeError(LOST), caused_by(queue.Empty()), caused_by(ConnectionResetError(104, "reset"))],
    ids=["alone", "after a timeout", "after a lost connection"],
)
def test_a_worker_that_ended_in_an_unknown_way_was_probably_killed_if_the_kernel_counts_it(
    tmp_path: Path, error: BaseException, kills: int
) -> None:
    count(tmp_path, own=2, host=5)
    finder = OomFinder(tmp_path)
    count(tmp_path, own=2 + kills, host=5 + kills)

    found = finder.find(error)

    assert (found is not None) == (kills > 0)
    if found is not None:
        assert found[0] is error
        assert str(error) in found[1].message
        assert "probable cause" in found[1].message


def test_a_kill_counts_for_about_a_minute_however_often_the_counters_are_refreshed(
    tmp_path: Path, clock: FakeClock
) -> None:
    count(tmp_path, own=2, host=5)
    finder = OomFinder(tmp_path)

    def pass_seconds(seconds: float) -> None:
        for _ in range(int(seconds)):
            clock.seconds += 1
            finder.refresh()

    pass_seconds(WINDOW_SECONDS - 1)
    count(tmp_path, own=3, host=6)
    pass_seconds(WINDOW_SECONDS)
    assert finder.find(killed()) is not None
    pass_seconds(WINDOW_SECONDS)
    assert finder.find(killed()) is None, "another process has sent the signal"
    count(tmp_path, own=4, host=7)
    found = finder.find(killed())

    assert found is not None
    assert "killed 1 process(es)" in found[1].message


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"own": 2, "host": 5}, {"own": 2, "host": 5}),
        ({"own": 0, "host": 5}, {"own": 0, "host": 6}),
        ({"host": 5}, {"host": 5}),
        ({}, {}),
    ],
    ids=["no kill", "a kill in another cgroup", "no kill on the host", "no counters"],
)
def test_a_worker_that_was_killed_otherwise_did_not_run_out_of_memory(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    count(tmp_path, **before)
    finder = OomFinder(tmp_path)
    count(tmp_path, **after)

    assert finder.find(killed()) is None
    assert not finder.is_caused_by_oom(killed())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DataLoader worker (pid 18303) is killed by signal: Segmentation fault. "),
        caused_by(RuntimeError("DataLoader worker (pid 18303) is killed by signal: Bus error. ")),
        caused_by(RuntimeError("DataLoader worker (pid 18303) exited unexpectedly with exit code")),
        ValueError(KILLED),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
    ids=["another signal", "wrapped", "an exit code", "another error", "another connection"],
)
def test_other_errors_are_not_out_of_memory_although_a_process_was_killed(
    tmp_path: Path, error: Exception
) -> None:
    count(tmp_path, own=2, host=5)
    finder = OomFinder(tmp_path)
    count(tmp_path, own=3, host=6)

    assert finder.find(error) is None


def test_other_out_of_memory_errors_are_found_too(tmp_path: Path) -> None:
    finder, error = OomFinder(tmp_path), MemoryError("no room")

    found = finder.find(error)

    assert found is not None
    assert found[0] is error
    assert finder.is_caused_by_oom(error)


class Killed(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)


def test_the_error_that_torch_raises_is_recognized(tmp_path: Path) -> None:
    count(tmp_path, own=0, host=0)
    finder = OomFinder(tmp_path)
    count(tmp_path, own=1, host=1)
    batches: Any = iter(DataLoader(Killed(), num_workers=1))
    (worker,) = batches._workers

    with pytest.raises(RuntimeError) as raised:
        next(batches)
    batches._shutdown_workers()

    found = finder.find(raised.value)
    assert found is not None
    assert found[1].worker == f"DataLoader worker with pid {worker.pid}"


class Small(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("kind", [ConnectionResetError, ConnectionRefusedError, EOFError])
def test_a_lost_connection_to_a_worker_that_has_not_exited_yet_is_recognized(
    tmp_path: Path, kind: type[Exception]
) -> None:
    count(tmp_path, own=0, host=0)
    finder = OomFinder(tmp_path)
    count(tmp_path, own=1, host=1)
    batches: Any = iter(DataLoader(Small(), num_workers=1))

    def fail(timeout: float) -> None:
        raise kind("lost")

    batches._data_queue.get = fail
    with pytest.raises(kind) as raised:
        next(batches)
    batches._shutdown_workers()

    found = finder.find(raised.value)
    assert found is not None
    assert found[0] is raised.value
    assert f"{kind.__name__}: lost (probable cause: " in found[1].message
    assert found[1].worker == "DataLoader worker"


def test_the_report_names_the_worker_and_advises_fewer_of_them(tmp_path: Path) -> None:
    count(tmp_path, own=0, host=0)
    reporter = OomReporter(0, FakeOomContext(tmp_path / "run"), OomFinder(tmp_path))
    count(tmp_path, own=1, host=1)

    reporter.on_error(killed())

    report = (tmp_path / "run/oom/rank-0-1.txt").read_text()
    assert "(in DataLoader worker with pid 18303)" in report.splitlines()[0]
    assert "use fewer workers or less prefetch_factor" in report
