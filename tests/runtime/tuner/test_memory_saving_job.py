"""Memory pressure under a limit: a run without a tuner runs out of memory, "auto" does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from scripts.tuner.run_tuner_memory import JobResult, run

# Slow, as its steps wait for samples of memory.
pytestmark = [pytest.mark.jobs, pytest.mark.slow]

# `make bench ARGS=tuner_memory` has batches that grow as well, and a plain loop, which dies.
KINDS, ARMS = ("leak",), ("off", "auto")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], JobResult]:
    """All jobs concurrently: they mostly wait."""
    folder = tmp_path_factory.mktemp("short_of_memory")
    with ThreadPoolExecutor() as pool:
        begun = {
            (kind, arm): pool.submit(run, folder / f"{kind}-{arm}", kind, arm)
            for kind in KINDS
            for arm in ARMS
        }
        return {which: each.result() for which, each in begun.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tuner_memory_runs_out(jobs, kind: str):
    assert jobs[kind, "off"].out_of_memory > 0


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_tuner_memory_never_runs_out(jobs, kind: str):
    auto = jobs[kind, "auto"]

    assert auto.code == 0, auto.stderr_tail
    assert auto.out_of_memory == 0
    assert sum(window["replays"] for window in auto.windows) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_the_run_that_ran_out(jobs, kind: str):
    auto, off = jobs[kind, "auto"].windows, jobs[kind, "off"].windows

    # When the tuner acts, and so which sums are ordered otherwise, depends on the machine.
    assert [window["loss"] for window in auto] == pytest.approx(
        [window["loss"] for window in off], rel=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_risk_rises_in_time(jobs, kind: str):
    windows = jobs[kind, "off"].windows
    first_alarm = next(each["window"] for each in windows if (each["risk"] or 0) >= 0.5)
    first_error = next((each["window"] for each in windows if each["replays"]), len(windows))

    assert first_error - first_alarm >= 5
