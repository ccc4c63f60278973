"""Tests of unusable batches: an error on every rank, and no effect on the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

ERRORS = {
    "lengths differ": ("BatchError: the local batch of rank 1", "labels has 7"),
    "empty": ("BatchError: the local batch of rank 1", "local batch is empty"),
    "no tensors": ("BatchError: the local batch of rank 1", "got NoneType without any"),
    "nan": ("NonFiniteLossError: the loss of step 2 is nan",) * 2,
    "no weight": ("BatchError: the weights of this batch add up to 0.0",) * 2,
    "loss is a number": ("TypeError: loss(model, micro_batch) must return", "got float"),
}
CASES = tiers(
    [(name, stage) for name in ERRORS for stage in range(4)],
    quick=[(name, number % 4) for number, name in enumerate(ERRORS)],
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("faults")
    names = [f"{name}, stage {stage}" for name, stage in chosen(request, "name", "stage")]
    script = SCRIPTS / "trainer" / "window_faults.py"
    finished = start_ranks(2, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_every_rank_raises_and_names_the_problem(found, name, stage):
    for rank, part in zip(found, ERRORS[name], strict=True):
        assert part in rank[f"{name}, stage {stage}"]["error"]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_rejected_batch_does_not_change_the_training(found, name, stage):
    for rank in found:
        assert rank[f"{name}, stage {stage}"]["harmless"]
        assert rank[f"{name}, stage {stage}"]["counts"] == [4, 64]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ("micro-batch of 0", ("BatchError: ", "1 or more, got 0")),
        ("micro-batch of x", ("BatchError: ", "1 or more, got 'x'")),
        ("rebuild of 9", ("RebuildError: ", "changes", "got 9")),
        (
            "rebuild to stage 9",
            ("RebuildError: ", "stage", "0, 1, 2 or 3, got 9"),
        ),
        ("compression of bf8", ("ValueError: ", "compression", "got 'bf8'")),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(found, call, parts):
    for rank in found:
        error = rank["wrong arguments"][call]
        assert all(part in error for part in parts), error


def test_a_batch_that_the_engine_cannot_discard_ends_the_run_on_every_rank(found):
    for rank in found:
        first, *later = rank["not discarded"]
        assert first.startswith("NonFiniteLossError: ")
        for error in later:
            assert error.startswith("ZerowatchError: this run has ended: train_batch failed with ")
            assert "Muon keeps state" in error


def test_a_model_with_batch_statistics_is_logged(found):
    (message,) = found[0]["batch statistics"]

    assert message.startswith("1 normalize over the samples of a micro-batch")
