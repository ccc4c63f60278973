"""Windows that a real GPU's allocator ends, run again on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from chosen_cases import chosen, tiers
from gpu.rank_jobs import rank_variables
from scripts.launching import SCRIPTS, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ENGINES = ("stage 0", "stage 1", "stage 2, overlapping", "stage 2, bf16")
ENGINES += ("stage 3", "stage 3, eager prefetching", "stage 3, bf16")
# One of each kind, as all of them take too long for `make verify-gpu`.
QUICK = ("stage 0", "stage 2, overlapping", "stage 3, bf16")
each_engine = pytest.mark.parametrize("name", tiers(ENGINES, QUICK))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict:
    folder = tmp_path_factory.mktemp("recovery")
    script = SCRIPTS / "trainer" / "recovery_matrix.py"
    engines = chosen(request, "name")
    finished = start(
        sys.executable, script, folder, "all", *engines, cwd=folder, variables=rank_variables()
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    return json.loads(Path(folder, "rank-0.json").read_text())


@each_engine
def test_the_allocator_s_own_error_is_survived(report: dict, name: str) -> None:
    windows = report[name]["windows"]

    real = [window for window in windows if window["fault"].startswith("real")]
    assert real
    assert {window["error"] for window in real} == {"OutOfMemoryError"}
    for window in windows:
        assert window["replays"] >= 1, window
        # The planner fits a line to measured peaks, which contain what the fault itself takes.
        assert 1 <= max(window["sizes"]) <= window["expected"], window
        assert max(window["then"]) <= window["expected"], window


@each_engine
def test_weights_are_those_of_a_run_with_these_sizes(report: dict, name: str) -> None:
    assert report[name]["same weights"]
    assert report[name]["samples once"]
