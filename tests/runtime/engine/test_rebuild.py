"""Engines rebuilt in the middle of their training, beside ones that nothing disturbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts.launching import SCRIPTS
from scripts.ranks import start_ranks
from scripts.rebuild_cases import CASES, TRANSITIONS

pytestmark = pytest.mark.jobs

ON_TWO_RANKS = (
    *TRANSITIONS,
    "stage 2, optimizer to the host",
    "stage 3, all to the host",
    "stage 3, all to the device",
    "stage 3, with secondary partitions",
    "SGD, stage 3 to 0",
    "DeepSpeed's schedule, stage 2 to 3",
    "torch's schedule, stage 3 to 1",
    "bf16, stage 0 to 2",
    "bf16 with sums in fp32, stage 1 to 3",
    "fp16, stage 2 to 3",
)
ON_ONE_RANK = ("stage 0 to 3", "stage 3 to 1", "stage 3 to 3", "config, stage 3 to 3")
ON_ANY = [
    *((2, name) for name in ON_TWO_RANKS),
    *((1, name) for name in ON_ONE_RANK),
]
FAULTS = "faults"

Told = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return, by number of ranks, what each rank tells of its cases."""
    folder = tmp_path_factory.mktemp("rebuild")
    return {
        2: _run(folder / "two", 2, [*ON_TWO_RANKS, FAULTS]),
        1: _run(folder / "one", 1, ON_ONE_RANK),
    }


def _run(folder: Path, num_ranks: int, names: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    script = SCRIPTS / "rebuild_checks.py"
    finished = start_ranks(num_ranks, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("ranks", "name"), ON_ANY)
def test_training_goes_on_as_if_there_had_been_no_rebuild(
    told: Told, ranks: int, name: str
) -> None:
    for rank in told[ranks]:
        found = rank[name]

        if CASES[name].exact:
            assert found["equal"]
        assert found["difference"] <= CASES[name].tolerance
        assert found["stage"] == CASES[name].new.stage
        assert found["counted"] and found["tied"]


@pytest.mark.parametrize(("ranks", "name"), ON_ANY)
def test_nothing_holds_the_old_engine(told: Told, ranks: int, name: str) -> None:
    assert [rank[name]["alive"] for rank in told[ranks]] == [[]] * ranks


FAILURES = {
    "before, stage 1 to 3": 1,
    "after, stage 3 to 0": 3,
    "after, stage 0 to 3": 0,
    "within, stage 2 to 3": 2,
}


@pytest.mark.parametrize(("name", "stage"), FAILURES.items())
def test_a_rebuild_that_fails_on_one_rank_leaves_training_bitwise_as_it_was(
    told: Told, name: str, stage: int
) -> None:
    for rank in told[2]:
        found = rank[FAULTS][name]

        assert found["equal"] and found["stage"] == stage
        assert found["gone"]
        assert "runs on with the one before" in found["text"]


def test_what_cannot_be_rebuilt_is_refused_before_anything_is_touched(told: Told) -> None:
    for rank in told[2]:
        refused = rank[FAULTS]["refused"]

        assert {words: said for words, said in refused["said"].items() if words not in said} == {}
        assert refused["equal"]


def test_a_rank_that_refuses_alone_refuses_for_all(told: Told) -> None:
    first, second = (rank[FAULTS]["refused"]["alone"] for rank in told[2])

    assert "another rank refused" in first
    assert "NVMe" in second


def test_the_watch_goes_on_with_the_new_engine(told: Told) -> None:
    for rank in told[2]:
        watched = rank[FAULTS]["watched"]

        assert watched["same"] and watched["gone"]
        assert watched["steps"] == watched["seconds"] == 6
        assert watched["active"] == 1
        assert watched["fallen"] == [] and watched["failures"] == {}
        assert watched["coverage"] == 1


def test_only_the_stage_among_the_facts_of_the_run_changes(told: Told) -> None:
    for rank in told[2]:
        ((*_, stage, ranks),) = rank[FAULTS]["watched"]["info"]

        assert (stage, ranks) == ("3", "2")
