"""Tests of `read_shards.py` with real engines: checkpoints of another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

ENGINES = (
    *("stage 0", "stage 1", "stage 2", "stage 3", "stage 3, nothing kept", "stage 2, offload"),
    *("stage 3, offload", "bf16, stage 0", "bf16, stage 2", "BF16_Optimizer"),
    *("two groups, stage 2", "two groups, stage 3", "rebuilt, stage 2"),
)
QUICK = ("stage 2", "stage 3")
CHANGES = ("2 to 1", "1 to 2", "3 to 2", "2 to 3")
QUICK_CHANGES = ("2 to 1", "1 to 2")

Found = Sequence[Mapping[str, Any]]


def run_ranks(num: int, folder: Path, action: str, names: Sequence[str]) -> Found:
    script = SCRIPTS / "trainer" / "reshard_checks.py"
    finished = start_ranks(num, script, folder, action, *names, cwd=folder)
    files = [folder / f"{action}-{num}-{rank}.json" for rank in range(num)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module", params=tiers(CHANGES, quick=QUICK_CHANGES))
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Found, Found]:
    """Return what the ranks found before and after the change."""
    before, _, after = map(int, request.param.replace("to", "0").split())
    folder = tmp_path_factory.mktemp("reshard")
    names = chosen(request, "name")
    return run_ranks(before, folder, "save", names), run_ranks(after, folder, "load", names)


@pytest.mark.parametrize("name", tiers(ENGINES, quick=QUICK))
def test_weights_optimizer_and_counts_are_loaded_bit_for_bit(
    ranks: tuple[Found, Found], name: str
) -> None:
    saved, loaded = ranks

    assert len(saved[0][name]["state"]) > 10
    for rank in loaded:
        assert rank[name]["state"] == saved[0][name]["state"]


@pytest.mark.parametrize("name", tiers(ENGINES, quick=QUICK))
def test_training_continues_with_the_same_samples_and_losses(
    ranks: tuple[Found, Found], name: str
) -> None:
    saved, loaded = ranks
    rounding = 2e-2 if name.lower().startswith("bf16") else 1e-6

    for number, step in enumerate(saved[0][name]["steps"]):
        assert samples(loaded, name, number) == samples(saved, name, number)
        for rank in loaded:
            assert rank[name]["steps"][number]["loss"] == pytest.approx(step["loss"], rel=rounding)


def samples(ranks: Found, name: str, number: int) -> list[int]:
    return sorted(each for rank in ranks for each in rank[name]["steps"][number]["ids"])
