"""Tests of two trainings in one process: each has a run id and a run folder of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS, Finished

pytestmark = pytest.mark.jobs

SCRIPT = SCRIPTS / "trainer" / "two_trainings.py"


def attempt(number: int, folder: Path) -> Finished:
    """Run the job as an attempt of torchrun, with a run id from its launcher."""
    variables = {
        "ZEROWATCH_RUN_ID": "night",
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": str(folder / "errors" / f"attempt_{number}" / "0" / "e"),
    }
    return start_ranks(2, "-m", "zerowatch", SCRIPT, cwd=folder, variables=variables)


def steps_of(file: Path, number: int) -> list[int]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [record["step"] for record in records if record["attempt"] == number]


def test_each_training_has_a_folder_of_its_own_which_it_keeps_after_a_restart(
    tmp_path: Path,
) -> None:
    finished = [attempt(number, tmp_path) for number in (0, 1)]

    assert [each.returncode for each in finished] == [0, 0], finished
    runs = tmp_path / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["night", "night-2"]
    for name, steps in (("night", 3), ("night-2", 5)):
        for rank in (0, 1):
            for number in (0, 1):
                file = runs / name / f"rank-{rank}.jsonl"
                assert steps_of(file, number) == list(range(1, steps + 1))
        assert len((runs / name / "attempts.jsonl").read_text().splitlines()) == 2
    warning = "this TrainingRun is not monitored, because another engine of this process is; close("
    assert finished[0].stderr.count(warning) == 1
