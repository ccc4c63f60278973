"""Tests of the message about a job without a first step: a lock of torch, or another reason.

Covers `console_logging.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fakes.scraper import eventually
from torch.utils.file_baton import FileBaton

from zerowatch.runtime.common.extension_locks import awaited_lock
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.monitor import startup_monitor
from zerowatch.runtime.monitor.startup_monitor import FIRST_SECONDS, StartupMonitor


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """A lock of three hours ago, for which a thread waits as torch does."""
    path = tmp_path / "lock"
    path.touch()
    os.utime(path, (time.time() - 3 * 3600 - 300,) * 2)
    waiting = threading.Thread(target=FileBaton(str(path)).wait)
    waiting.start()
    assert eventually(lambda: awaited_lock() == path)
    yield path
    path.unlink()
    waiting.join()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "zerowatch.runtime.monitor.startup_monitor")
    return caplog


def monitor(
    has_stepped: bool = False, seconds: float = FIRST_SECONDS, forward_only_ns: Sequence[int] = ()
) -> StartupMonitor:
    """Make a monitor; `forward_only_ns` is the time of forward passes at each check, then 0."""
    times = iter(forward_only_ns)
    return StartupMonitor(lambda: has_stepped, lambda: next(times, 0), FailOpen(), seconds)


def test_a_stale_lock_is_named_once_with_its_age_and_what_to_do(
    lock: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lock.parent)  # this process does not compile, wherever it works
    started = monitor()

    for seconds in (5.0, 20.0):  # 15 s of waiting
        started.check(seconds)
    before = log.messages[:]
    for seconds in (25.0, 60.0):
        started.check(seconds)

    assert before == []
    (line,) = log.messages
    assert "before the first step after 25 s" in line
    assert f"the lock {lock} since 3 h 5 min" in line
    assert f"rm {lock}" in line
    assert log.records[0].levelname == "WARNING"


def test_a_lock_of_a_running_compilation_is_not_called_stale(
    lock: Path, log: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, cwd=lock.parent, stdin=subprocess.PIPE) as compiler:
        started = monitor()
        for seconds in (0.0, 20.0):
            started.check(seconds)
        compiler.kill()

    (line,) = log.messages
    assert f"process {compiler.pid} compiles there" in line
    assert "rm " not in line


def test_a_long_start_is_reported_with_its_place_if_training_is_initialized(
    log: pytest.LogCaptureFixture,
) -> None:
    started = monitor()
    started.check(20.0)
    before = log.messages[:]

    started.start(initializing=True)
    started.check(40.0)
    started.stop()

    assert before == []
    (line,) = log.messages
    place = "in test_a_long_start_is_reported_with_its_place_if_training_is_initialized ("
    assert f"before the first step after 40 s: {place}monitor/test_startup_monitor.py:" in line


def test_the_place_is_in_a_file_and_names_the_line_of_the_script(
    log: pytest.LogCaptureFixture,
) -> None:
    started = monitor()
    started.start(initializing=True)

    # As a script that imports a module: code without a file, below a line of the script.
    script = compile("\n\nimported()", "/jobs/train.py", "exec")
    imported = compile("check(40.0)", "<frozen importlib._bootstrap>", "exec")
    names = {"__name__": "importlib", "check": started.check}
    exec(script, {"__name__": "__main__", "imported": lambda: exec(imported, names)})
    started.stop()

    (line,) = log.messages
    assert "(monitor/test_startup_monitor.py:" in line
    assert line.endswith(", from line 3 of train.py")


def test_a_compilation_is_named_before_training_is_initialized(
    log: pytest.LogCaptureFixture,
) -> None:
    started = monitor()
    torch = compile("check(40.0)\ncheck(60.0)", "/site/torch/utils/cpp_extension.py", "exec")

    exec(torch, {"__name__": "torch.utils.cpp_extension", "check": started.check})

    (line,) = log.messages
    assert "after 40 s: torch compiles a C++ extension" in line


def test_nothing_is_logged_while_only_forward_passes_run(log: pytest.LogCaptureFixture) -> None:
    started = monitor(forward_only_ns=[10, 20, 20])
    started.start(initializing=True)

    for seconds in (30.0, 60.0):
        started.check(seconds)
    while_they_run = log.messages[:]
    started.check(90.0)
    started.stop()

    assert while_they_run == []
    assert len(log.messages) == 1
    assert "after 90 s" in log.messages[0]


def test_of_an_engine_that_does_not_train_only_locks_are_reported(
    lock: Path, log: pytest.LogCaptureFixture
) -> None:
    started = monitor()
    started.start(initializing=True)
    started.expect_no_step()

    for seconds in (0.0, 20.0):
        started.check(seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_monitor, "awaited_lock", lambda: None)
        started.check(60.0)
    started.stop()

    assert len(log.messages) == 1
    assert str(lock) in log.messages[0]


def test_nothing_is_logged_after_the_first_step(log: pytest.LogCaptureFixture) -> None:
    started = monitor(has_stepped=True, seconds=0.001)
    others = set(threading.enumerate())  # of other tests, which may never end

    started.start(initializing=True)
    ended = eventually(
        lambda: (
            not any(each.name == "zerowatch-startup" for each in {*threading.enumerate()} - others)
        )
    )

    assert ended
    assert log.messages == []


def test_the_thread_logs_by_itself(lock: Path, log: pytest.LogCaptureFixture) -> None:
    started = monitor(seconds=0.01)

    started.start()

    assert eventually(lambda: bool(log.messages))
    started.stop()
