"""Tests of rebuilds of a TrainingRun on one rank: its schedule, and rebuilds that do not succeed.

Covers the end of a run by `RunEnd.end_without_engine` and `end_in_rebuild`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

SCHEDULES = (
    "WarmupCosineLR",
    "WarmupLR",
    "optimizer of a callable",
    "schedule of a callable",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("rebuilt")
    finished = start_ranks(1, SCRIPTS / "trainer" / "rebuilt_runs.py", folder, cwd=folder)
    assert (folder / "found.json").exists(), finished.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("when", ["at the start", "in the middle"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_and_weights_are_bitwise_those_of_a_run_without_rebuilds(
    found: dict[str, Any], schedule: str, when: str
) -> None:
    expected = found[f"{schedule}, rebuilt never"]

    assert found[f"{schedule}, rebuilt {when}"] == expected
    assert len(set(expected["rates"])) > 5
    assert expected["loaded"] == expected["weights"]
    assert expected["resumed"] == expected["rates"][-len(expected["resumed"]) :]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("interrupted rebuild", "KeyboardInterrupt"),
        ("interrupted switch", "KeyboardInterrupt"),
        ("failed rebuild", "RuntimeError"),
        ("failed switch", "RuntimeError"),
    ],
)
def test_a_rebuild_that_leaves_no_engine_ends_the_run_and_its_checkpoints_stay(
    found: dict[str, Any], case: str, error: str
) -> None:
    lost = found[case]

    assert lost["raised"][0] == error
    for kind, text in lost["errors"]:
        assert kind == "ZerowatchError"
        assert error in text and "load the last checkpoint" in text
    assert lost["unchanged"]
    assert (lost["loaded"], lost["equal"]) == (3, True)


def test_an_untested_optimizer_is_refused_before_the_engine_is_removed(
    found: dict[str, Any],
) -> None:
    refused = found["refused"]

    assert len(refused["errors"]) == 3
    assert all("zero_allow_untested_optimizer" in error for error in refused["errors"])
    assert refused["same"]
    assert refused["options"] == [0]
