"""Windows that a real GPU's allocator ends, run again on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from scripts.launching import SCRIPTS, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ENGINES = ("stage 0", "stage 1", "stage 2, overlapping", "stage 2, bf16")
ENGINES += ("stage 3", "stage 3, eager prefetching", "stage 3, bf16")
ALONE = {
    "DS_ACCELERATOR": "cuda",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29671",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("recovery")
    script = SCRIPTS / "trainer" / "recovery_matrix.py"
    finished = start(sys.executable, script, folder, "all", *ENGINES, cwd=folder, variables=ALONE)
    file = Path(folder, "rank-0.json")
    assert file.exists(), finished.stderr[-5000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", ENGINES)
def test_the_allocator_s_own_error_is_survived(report: dict, name: str) -> None:
    windows = report[name]["windows"]

    real = [window for window in windows if window["fault"].startswith("real")]
    assert real
    assert {window["error"] for window in real} == {"OutOfMemoryError"}
    for window in windows:
        assert window["replays"] >= 1, window
        assert max(window["sizes"]) == max(window["then"]) == window["expected"], window


@pytest.mark.parametrize("name", ENGINES)
def test_weights_are_those_of_a_run_with_these_sizes(report: dict, name: str) -> None:
    assert report[name]["same weights"]
    assert report[name]["samples once"]
