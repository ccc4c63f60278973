"""Memory that runs short under a limit: where a run without a tuner runs out, "auto" does not."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripts.launching import SCRIPTS, start

pytestmark = pytest.mark.jobs

# Of the kinds only the leak: `make bench ARGS=tuner_memory` has batches that grow as well.
KINDS, ARMS = ("leak",), ("plain", "off", "auto")
VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # glibc unmaps what is larger as soon as it is freed
    "MALLOC_ARENA_MAX": "1",  # else each new thread maps 64 MiB, used or not
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a job left: its exit code, the end of what it said, and a line for each window."""

    code: int
    said: str
    windows: list[dict[str, Any]]

    @property
    def out_of_memory(self) -> float:
        """Errors of any kind."""
        return sum(each or 0 for each in self.windows[-1]["ooms"].values())


def run(folder: Path, kind: str, arm: str) -> Ended:
    folder.mkdir()
    script = SCRIPTS / "tuner_memory.py"
    finished = start(sys.executable, script, kind, arm, cwd=folder, variables=VARIABLES)
    lines = (folder / "windows.jsonl").read_text().splitlines()
    windows = [json.loads(line) for line in lines]
    return Ended(code=finished.returncode, said=finished.stderr[-3000:], windows=windows)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ended]:
    """All jobs, side by side: they mostly wait."""
    folder = tmp_path_factory.mktemp("short_of_memory")
    with ThreadPoolExecutor() as pool:
        begun = {
            (kind, arm): pool.submit(run, folder / f"{kind}-{arm}", kind, arm)
            for kind in KINDS
            for arm in ARMS
        }
        return {which: each.result() for which, each in begun.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_dies(jobs, kind: str):
    plain = jobs[kind, "plain"]

    assert plain.code != 0
    assert "can't allocate memory" in plain.said
    assert len(plain.windows) < len(jobs[kind, "auto"].windows)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tuner_memory_runs_out(jobs, kind: str):
    assert jobs[kind, "off"].out_of_memory > 0


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_tuner_it_never_does(jobs, kind: str):
    auto = jobs[kind, "auto"]

    assert auto.code == 0, auto.said
    assert auto.out_of_memory == 0
    assert sum(window["replays"] for window in auto.windows) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_the_run_that_ran_out(jobs, kind: str):
    auto, off = jobs[kind, "auto"].windows, jobs[kind, "off"].windows

    assert [window["loss"] for window in auto] == pytest.approx(
        [window["loss"] for window in off], rel=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_risk_is_seen_in_time(jobs, kind: str):
    windows = jobs[kind, "off"].windows
    first_alarm = next(each["window"] for each in windows if (each["risk"] or 0) >= 0.5)
    first_error = next((each["window"] for each in windows if each["replays"]), len(windows))

    assert first_error - first_alarm >= 5
