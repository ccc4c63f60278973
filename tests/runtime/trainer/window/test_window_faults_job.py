"""Tests of errors in real engines: of unusable batches, which have no effect, and of updates."""

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


# The optimizer of rank 0 fails in the second update, which is guarded. Each rank catches all.
FAILED_UPDATE = """
import json, sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if Failing.fails:
            raise ValueError("a bad gradient")
        return super().step(closure)


def make():
    torch.manual_seed(0)
    return zerowatch.TrainingRun(
        torch.nn.Linear(4, 1),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": int(sys.argv[2])},
            "zero_allow_untested_optimizer": True,
        },
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: Failing(parameters, lr=0.1),
        settings={"serve": {"enabled": False}, "run_log": {"enabled": False}},
    )


def outcome(call):
    try:
        return str(call())
    except Exception as error:
        can_continue = getattr(error, "can_continue", None)
        return f"{type(error).__name__}: {error} (can_continue={can_continue})"


run, folder = make(), Path(sys.argv[1])
batch = torch.ones(4, 4) + dist.get_rank()
run.train_batch(batch)
run.save(folder / "checkpoints")
Failing.fails = dist.get_rank() == 0
found = [outcome(lambda: run.train_batch(batch))]
Failing.fails = False
found += [outcome(lambda: run.train_batch(batch)), outcome(lambda: run.evaluate(batch))]
found += [outcome(lambda: run.save(folder / "checkpoints"))]
run.close()
run.engine.destroy()
again = make()
found += [again.load(folder / "checkpoints"), again.train_batch(batch).step]
again.close()
again.engine.destroy()
(folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
"""


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


@pytest.mark.parametrize("stage", tiers([0, 1, 2, 3], quick=[0, 1]))
def test_a_failed_update_ends_the_run_on_every_rank_and_a_new_one_continues(
    tmp_path: Path, stage: int
) -> None:
    script = tmp_path / "failed_update.py"
    script.write_text(FAILED_UPDATE)

    finished = start_ranks(2, script, tmp_path, stage, cwd=tmp_path)

    assert finished.returncode == 0, finished.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert found[0][0].startswith("ValueError: a bad gradient")
    assert found[1][0].startswith("PeerFailedError: engine.step() failed on rank 0 with ValueError")
    assert found[1][0].endswith("(can_continue=False)")
    for (_, *later, loaded, step), name in zip(found, ("ValueError", "PeerFailed"), strict=True):
        assert len(later) == 3
        for error in later:
            assert error.startswith("ZerowatchError: this run has ended: engine.step()")
            assert name in error and "load the last checkpoint" in error
        assert (loaded, step) == (1, 2)
