"""What TrainingRun must refuse: said on every rank, and no trace of it in the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.launching import SCRIPTS
from scripts.ranks import start_ranks

pytestmark = pytest.mark.jobs

SAID = {
    "lengths differ": ("BatchError: the share of rank 1", "labels has 7"),
    "empty": ("BatchError: the share of rank 1", "share of the batch is empty"),
    "no tensors": ("BatchError: the share of rank 1", "got NoneType without any"),
    "nan": ("NonFiniteLossError: the loss of step 2 is nan",) * 2,
    "no weight": ("BatchError: the weights of this batch add up to 0.0",) * 2,
    "loss is a number": ("TypeError: loss(model, micro_batch) must return", "got float"),
}
CASES = [(name, stage) for name in SAID for stage in range(4)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("faults")
    finished = start_ranks(2, SCRIPTS / "window_faults.py", folder, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_every_rank_says_what_is_wrong_and_where(told, name, stage):
    for rank, part in zip(told, SAID[name], strict=True):
        assert part in rank[f"{name}, stage {stage}"]["said"]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_training_goes_on_as_if_the_refused_batch_had_never_come(told, name, stage):
    for rank in told:
        assert rank[f"{name}, stage {stage}"]["harmless"]
        assert rank[f"{name}, stage {stage}"]["account"] == [4, 64]


def test_a_micro_batch_of_nothing_is_refused(told):
    assert told[0]["micro-batch of 0"] == "a micro-batch holds 1 sample or more, got 0"


def test_a_model_with_batch_statistics_is_warned_of(told):
    (said,) = told[0]["batch statistics"]

    assert said.startswith("1 normalise by the samples of a micro-batch")
