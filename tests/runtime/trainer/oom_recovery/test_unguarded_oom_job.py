"""Tests of out-of-memory errors on one rank within a pass that is not guarded, in real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import chosen
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

ENGINES = (
    "stage 2, small buckets",
    "stage 2, overlapping",
    "stage 2, optimizer on host",
    "stage 3, small buckets",
    "stage 3, overlapping",
    "stage 3, all-reduce",
    "stage 3, bf16",
    "stage 3, all on host",
)
FEATURES = ("checkpointing", "rebuild", "evaluate", "save")
RUNS = [
    (2, "stage 3, eager prefetching", ""),
    (2, "stage 2, small buckets per owner", ""),
    *((3, name, "") for name in ENGINES),
    *((2, "stage 2, small buckets", feature) for feature in FEATURES),
    *((2, "stage 3, eager prefetching", feature) for feature in FEATURES),
]


def fault(place: str, block: int, micro_batch: int, fits: int, *, is_real: bool) -> dict:
    return {
        "place": place,
        "block": block,
        "micro_batch": micro_batch,
        "fits": fits,
        "ranks": "one",
        "is_real": is_real,
    }


FAULTS = [
    fault("backward", 0, 0, 2, is_real=True),
    fault("forward", 1, 1, 2, is_real=False),
    fault("backward", 1, 2, 1, is_real=False),
]
Found = list[dict]  # results of each rank


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str, str], Found]:
    """Return, by run, the results of each rank."""
    cases = chosen(request, "world_size", "name", "feature")
    return {case: run(*case, tmp_path_factory.mktemp("unguarded")) for case in cases}


def run(world_size: int, name: str, feature: str, folder: Path) -> Found:
    script = SCRIPTS / "trainer" / "unguarded_oom.py"
    plan = json.dumps([{"engine": name, "faults": FAULTS, "with": feature}])
    done = start_ranks(world_size, script, folder, plan, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    assert all(file.exists() for file in files), done.stderr[-5000:]
    return [json.loads(file.read_text())[0] for file in files]


@pytest.mark.parametrize(("world_size", "name", "feature"), RUNS)
def test_training_equals_a_run_with_the_smaller_sizes_from_the_start(
    found: dict[tuple[int, str, str], Found], world_size: int, name: str, feature: str
) -> None:
    for rank in found[world_size, name, feature]:
        assert all(window.get("replays", 0) >= 1 for window in rank["windows"]), rank
        assert rank["same losses"]
        assert rank["same weights"]


@pytest.mark.parametrize(("world_size", "name", "feature"), RUNS)
def test_the_failed_rank_issues_the_other_collectives_of_its_pass(
    found: dict[tuple[int, str, str], Found], world_size: int, name: str, feature: str
) -> None:
    ranks = found[world_size, name, feature]
    reasons = [window["reasons"] for window in ranks[1]["windows"]]

    if name.startswith("stage 3") and feature in ("evaluate", "save"):
        assert all(window["guarded"] for window in ranks[1]["windows"])
        assert reasons == [[]] * len(FAULTS)
        return
    assert [""] in reasons
    assert all(each in ([], [""]) for each in reasons)
    assert not any(window["guarded"] for rank in ranks for window in rank["windows"])
    for rank in (ranks[0], *ranks[2:]):
        assert not any(window["reasons"] for window in rank["windows"])


@pytest.mark.parametrize("name", ["stage 2, small buckets", "stage 3, small buckets"])
def test_the_run_ends_on_all_ranks_if_the_collectives_are_not_known(
    name: str, tmp_path: Path
) -> None:
    peer, failing = (rank["windows"][-1] for rank in run(2, name, "no records", tmp_path))

    assert "can't allocate memory" in failing["ended"]
    assert failing["reasons"] == ["the collectives of this pass are not known"]
    assert peer["ended"].startswith("PeerFailedError")
