"""Order of the tests, locks of killed jobs, failures, and the seed of tests that draw their data.

Tests of jobs come first, and fail at once if they would wait for the lock of a killed job. Of three
workers of pytest-xdist, one runs most files of jobs and another one those that wait most of their
time. Two jobs at a time need four cores now and then, but less work leaves two cores idle.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import pytest
from extension_locks import complaint, stale_locks
from scripts.optimizers import use_own_compiler

from zerowatch.runtime.common.extension_locks import extensions_root
from zerowatch.runtime.monitor import step_ring

# Files of jobs that run beside the others, on a second worker. Most wait much of their time.
BESIDE_JOBS = (
    "tests/docs/test_code_blocks.py",
    "tests/runtime/separate_process/test_separate_process_job.py",
    "tests/runtime/memory/oom/test_oom_job.py",
    "tests/runtime/monitor/test_engine_watch.py",
    "tests/runtime/estimator/test_model_memory_measured.py",
    "tests/runtime/cross_rank/test_injected_delays.py",
    "tests/runtime/cross_rank/hang/test_hang_job.py",
    "tests/runtime/monitor/test_interrupted_job.py",
    "tests/runtime/trainer/oom_recovery/test_unguarded_oom_job.py",
    "tests/runtime/cli/test_zero_code_jobs.py",
    "tests/runtime/memory/forecast/test_peak_model_job.py",
    "tests/runtime/cross_rank/test_late_rank_job.py",
    "tests/runtime/trainer/data/test_balance_job.py",
    "tests/runtime/trainer/checkpoint/test_restart_job.py",
    "tests/runtime/cli/test_run_command.py",
)

# A test or its jobs that take longer are printed at once; on an idle machine only the compilation
# of DeepSpeed's optimizers does.
SLOW_SECONDS = 60.0


# Not a variable ZEROWATCH_...: one that is no setting is an error.
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of tests that draw their data")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return what a test seeds its generators with; a test that fails prints it."""
    return pytestconfig.getoption("seed")


@pytest.fixture(scope="session", autouse=True)
def rings_of_steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the rings of this process, some of which no test closes, out of /dev/shm.

    At the end, those of the jobs that tests have killed are deleted there.
    """
    shared = step_ring.SHARED_MEMORY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_ring, "SHARED_MEMORY", tmp_path_factory.mktemp("shm"))
        yield
    step_ring.recover(tmp_path_factory.getbasetemp(), shared)


@pytest.fixture(scope="module")
def frozen_imports() -> Iterator[None]:
    """Exclude what is imported from collections of garbage, which scan all of torch otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the seed of a failed test, and the command that runs the test again."""
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        seed = item.config.getoption("seed")
        command = f".venv/bin/python -m pytest --seed {seed} '{item.nodeid}'"
        report.sections.append(("seed", f"seed {seed}; rerun: {command}"))
    return report


class ReportsAtOnce:
    """Prints failures and slow tests as they happen: a run that is killed comes to no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} failed")
            self._terminal.write_line(report.longreprtext)
        if report.duration >= SLOW_SECONDS:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} took {report.duration:.0f} s")


@pytest.hookimpl(trylast=True)  # after the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    """Register the reports, and set up the environment of jobs.

    A job imports zerowatch, which takes twice as long without bytecode.
    """
    use_own_compiler()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if terminal := config.pluginmanager.getplugin("terminalreporter"):  # no worker has one
        config.pluginmanager.register(ReportsAtOnce(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler like xdist's own for `--dist loadfile`, but with the jobs on two workers.

    Each worker that runs jobs starts processes that have imported torch and DeepSpeed.
    """
    from xdist.scheduler import LoadScopeScheduling

    assert all((config.rootpath / file).is_file() for file in BESIDE_JOBS), "a renamed file?"

    @cache
    def scope(file: str) -> str:
        if file in BESIDE_JOBS:
            return "beside jobs"
        has_jobs = "pytest.mark.jobs" in config.rootpath.joinpath(file).read_text()
        return "jobs" if has_jobs else file

    class JobsTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # in the order below
    return JobsTogether(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: objects are made only. It takes a fifth less time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files: jobs, BESIDE_JOBS, others. No worker ends with a long file alone."""
    job_files = {item.path for item in items if item.get_closest_marker("jobs")}
    beside = {item.config.rootpath / file for item in items[:1] for file in BESIDE_JOBS}
    items.sort(key=lambda item: (item.path not in job_files, item.path in beside))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test of a job, before it starts one, if a job would hang."""
    if item.get_closest_marker("jobs") and (locks := stale_locks(extensions_root())):
        pytest.fail(complaint(locks), pytrace=False)
