"""Tests of rebuilds in the middle of training, compared with training without a rebuild.

Covers `engine_replacement.py`, `preconditions.py` and `state_snapshot.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.engine.rebuild_cases import CASES, DEFAULT_OPTIMIZER, TRANSITIONS
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

ON_TWO_RANKS = (
    *TRANSITIONS,
    *DEFAULT_OPTIMIZER,
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
# Each stage left and entered, with states on the host, in 16 bits, with a schedule.
QUICK = [
    (2, "stage 0 to 3"),
    (2, "stage 3 to 1"),
    (2, "stage 1 to 2"),
    (2, "stage 2 to 2"),
    (2, "fp32, default optimizer, stage 0 to 1"),
    (2, "bf16, default optimizer, stage 2 to 0"),
    (2, "stage 2, optimizer to the host"),
    (2, "stage 3, all to the device"),
    (2, "torch's schedule, stage 3 to 1"),
    (2, "fp16, stage 2 to 3"),
    (1, "stage 3 to 3"),
]
ON_ANY = tiers(
    [*((2, name) for name in ON_TWO_RANKS), *((1, name) for name in ON_ONE_RANK)], quick=QUICK
)
FAULTS = "faults"

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of each rank by number of ranks."""
    folder = tmp_path_factory.mktemp("rebuild")
    names: dict[int, list[str]] = {2: [FAULTS], 1: []}
    for ranks, name in chosen(request, "ranks", "name"):
        names[ranks].append(name)
    return {ranks: _run(folder / str(ranks), ranks, names[ranks]) for ranks in names}


def _run(folder: Path, num_ranks: int, names: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    script = SCRIPTS / "engine" / "rebuild_checks.py"
    finished = start_ranks(num_ranks, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("ranks", "name"), ON_ANY)
def test_training_continues_as_without_a_rebuild(results: Results, ranks: int, name: str) -> None:
    for rank in results[ranks]:
        found = rank[name]

        if CASES[name].exact:
            assert found["equal"]
        assert found["difference"] <= CASES[name].tolerance
        assert found["stage"] == CASES[name].new.stage
        assert found["counted"] and found["tied"]


@pytest.mark.parametrize(("ranks", "name"), ON_ANY)
def test_the_old_engine_is_freed_after_a_rebuild(results: Results, ranks: int, name: str) -> None:
    assert [rank[name]["alive"] for rank in results[ranks]] == [[]] * ranks


FAILURES = {
    "before, stage 1 to 3": 1,
    "after, stage 3 to 0": 3,
    "after, stage 0 to 3": 0,
    "within, stage 2 to 3": 2,
}


@pytest.mark.parametrize(("name", "stage"), FAILURES.items())
def test_a_rebuild_that_fails_on_one_rank_leaves_training_bitwise_unchanged(
    results: Results, name: str, stage: int
) -> None:
    for rank in results[2]:
        found = rank[FAULTS][name]

        assert found["equal"] and found["stage"] == stage
        assert found["gone"]
        assert "previous ds config" in found["text"]


def test_an_unsupported_rebuild_is_refused_before_anything_changes(results: Results) -> None:
    for rank in results[2]:
        refused = rank[FAULTS]["refused"]

        wrong = {words: text for words, text in refused["errors"].items() if words not in text}
        assert wrong == {}
        assert refused["equal"]


def test_a_rebuild_that_one_rank_refuses_is_refused_on_all_ranks(results: Results) -> None:
    first, second = (rank[FAULTS]["refused"]["alone"] for rank in results[2])

    assert "another rank refused" in first
    assert "NVMe" in second


def test_a_rebuild_that_a_ranks_host_has_no_memory_for_is_refused_on_all_ranks(
    results: Results,
) -> None:
    first, second = (rank[FAULTS]["refused"]["no memory"] for rank in results[2])

    assert "another rank refused" in first
    assert re.search(r"needs .* KiB of host memory on this rank, and 1 KiB are available", second)


def test_the_watch_continues_with_the_new_engine(results: Results) -> None:
    for rank in results[2]:
        watched = rank[FAULTS]["watched"]

        assert watched["same"] and watched["gone"]
        assert watched["steps"] == watched["seconds"] == 4
        assert watched["active"] == 1
        assert watched["decreased"] == [] and watched["failures"] == {}
        assert watched["coverage"] == 1


def test_of_the_run_info_only_the_stage_changes(results: Results) -> None:
    for rank in results[2]:
        ((*_, stage, ranks),) = rank[FAULTS]["watched"]["info"]

        assert (stage, ranks) == ("3", "2")
