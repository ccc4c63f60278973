"""A data loader's worker that was killed ran out of memory if the kernel counts one more kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.ooms import FakeOomContext
from torch.utils.data import DataLoader, Dataset

from zerowatch.runtime.memory.oom.error_report import OomReporter
from zerowatch.runtime.memory.oom.oom_error import OomError
from zerowatch.runtime.memory.oom.oom_finder import OomFinder

KILLED = "DataLoader worker (pid 18303) is killed by signal: Killed. "
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
    error = RuntimeError("DataLoader worker (pid(s) 18303) exited unexpectedly")
    error.__cause__ = killed()
    return error


@pytest.mark.parametrize("make", [killed, wrapped])
def test_a_worker_was_killed_by_the_oom_killer_if_its_cgroup_counts_one_more(
    tmp_path: Path, make: Callable[[], BaseException]
) -> None:
    count(tmp_path, own=2, host=5)
    finder, error = OomFinder(tmp_path), make()
    count(tmp_path, own=3, host=6)

    found = finder.find(error)

    expected = OomError(
        kind="operating system",
        device="cpu",
        requested_bytes=None,
        message="DataLoader worker (pid 18303) is killed by signal: Killed (by the kernel's OOM "
        "killer, which has killed 1 process(es) of this rank's memory cgroup since the start)",
        worker="DataLoader worker with pid 18303",
    )
    assert found == (error.__cause__ or error, expected)
    assert finder.is_caused_by_oom(error)


def test_without_a_counter_of_its_cgroup_the_one_of_the_machine_makes_it_probable(
    tmp_path: Path,
) -> None:
    count(tmp_path, host=5)
    finder = OomFinder(tmp_path)
    count(tmp_path, host=7)

    found = finder.find(killed())

    assert found is not None
    assert found[1].message.endswith(
        "(probably by the kernel's OOM killer, which has killed 2 process(es) on this host since "
        "the start)"
    )


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
        RuntimeError("DataLoader worker (pid(s) 18303) exited unexpectedly"),
        RuntimeError("DataLoader worker (pid 18303) is killed by signal: Segmentation fault. "),
        ValueError(KILLED),
    ],
    ids=["no signal", "another signal", "another error"],
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


def test_the_report_names_the_worker_and_advises_fewer_of_them(tmp_path: Path) -> None:
    count(tmp_path, own=0, host=0)
    reporter = OomReporter(0, FakeOomContext(tmp_path / "run"), OomFinder(tmp_path))
    count(tmp_path, own=1, host=1)

    reporter.on_error(killed())

    report = (tmp_path / "run/oom/rank-0-1.txt").read_text()
    assert "(in DataLoader worker with pid 18303)" in report.splitlines()[0]
    assert "use fewer workers or less prefetch_factor" in report
