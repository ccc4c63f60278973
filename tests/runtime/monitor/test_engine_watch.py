"""Tests of a watch on a real engine: patches are restored, and records are right.

Covers `comparison_monitor.py`, `device_sampler.py`, `device_scalar.py`,
`engine_instrumentation.py`, `memory_monitor.py`, `overhead_metrics.py`, `raw_step.py`,
`watch_context.py` and `watch_thread.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

SCRIPT = SCRIPTS / "monitor" / "engine_checks.py"
HELPERS = {
    "make",
    "listen",
    "step",
    "wrapped_places",
    "standing",
    "wait_until",
    "own_threads",
    "run_in_fork",
    "run_to_its_end",
}
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name not in HELPERS
]

CHECKS_OF_A_JOB = 12  # all of them at once would take longer than a job may on a busy machine


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")

    for first in range(0, len(CHECKS), CHECKS_OF_A_JOB):
        chosen = CHECKS[first : first + CHECKS_OF_A_JOB]
        finished = start_ranks(1, SCRIPT, folder, *chosen, cwd=folder)
        assert finished.returncode == 0, finished.stderr
    return folder


def test_a_collective_that_was_never_waited_for_does_not_abort_the_exit(tmp_path: Path) -> None:
    script = SCRIPTS / "monitor" / "leave_a_call_open.py"

    finished = start_ranks(2, "-m", "zerowatch", script, cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("out: leaving") == 2


@pytest.mark.parametrize("check", CHECKS)
def test_on_a_real_engine(check: str, outcomes: Path) -> None:
    status = (outcomes / f"{check}.status").read_text()

    assert status == "0", (outcomes / f"{check}.txt").read_text()
