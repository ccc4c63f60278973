"""Two ranks, the second one slow: trains with a split by speed, an even split, and both.

JSON per rank.

`balance_job.py FOLDER STAGE...`
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

BATCH, WIDTH, DATA_SAMPLES = 12, 8, 100
SAMPLE_SECONDS = (0.001, 0.006)  # by rank; six times, so that a busy machine hides nothing
# From stage 2 on the watch reports the time blocked by collectives once a second.
WINDOWS = {1: 24, 2: 70, 3: 70}
TURNED_ON, TURNED_OFF = 8, 18  # before the window of that index
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}


class Slow(torch.nn.Module):
    """Model with a fixed time per sample."""

    def __init__(self, sample_seconds: float) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, WIDTH + 1)
        self.head = torch.nn.Linear(WIDTH + 1, 1)
        self.sample_seconds = sample_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self.sample_seconds)
        return self.head(torch.tanh(self.body(x))).squeeze(1)


def mean_square(model: Any, batch: Any) -> torch.Tensor:
    x, y, _ = batch
    return torch.nn.functional.mse_loss(model(x), y)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(DATA_SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(dim=1), torch.arange(DATA_SAMPLES))


def make(stage: int, *, slow: bool, balance: bool) -> zerowatch.TrainingRun:
    torch.manual_seed(0)
    model = Slow(SAMPLE_SECONDS[dist.get_rank()] if slow else 0.0)
    return zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=mean_square,
        settings=QUIET,
        balance=balance,
    )


def batches_of(run: zerowatch.TrainingRun, num_workers: int) -> Iterator[Any]:
    return run.loader(data(), batch_samples=BATCH, num_workers=num_workers).forever()


def go_on(run: zerowatch.TrainingRun, batches: Iterator[Any], windows: int) -> list[list[int]]:
    """Train; return the samples of this rank by window."""
    seen = []
    for _, batch in zip(range(windows), batches, strict=False):
        run.train_batch(batch)
        seen.append(batch[2].tolist())
    return seen


def end(run: zerowatch.TrainingRun, seen: list[list[int]]) -> dict[str, Any]:
    weights = gathered(run.module)
    run.close()
    return {"seen": seen, "weights": weights, "samples": run.samples}


def train(stage: int, *, balance: bool, num_workers: int) -> dict[str, Any]:
    """Train in one mode; return the samples of this rank by window, and the weights.

    With balancing also the seconds per sample, by rank, of each exchange.
    """
    run = make(stage, slow=balance, balance=balance)
    batches = batches_of(run, num_workers)
    seen: list[list[int]] = []
    exchanged: list[list[float]] = []
    for _ in range(WINDOWS[stage]):
        seen += go_on(run, batches, 1)
        sample_seconds = run._data.state_dict()["shares"]["sample_seconds"]
        if sample_seconds not in ([], *exchanged[-1:]):
            exchanged.append(sample_seconds)
    return {"exchanged": exchanged, **end(run, seen)}


def by_turns(stage: int, folder: Path) -> dict[str, Any]:
    """Turn balancing on and off, and continue in another run from a checkpoint."""
    run = make(stage, slow=True, balance=False)
    knobs = run._tuner._knobs
    found = {"without loader": "balance" in knobs.options()}
    batches = batches_of(run, num_workers=1)
    found["options"] = knobs.options()["balance"]
    seen = go_on(run, batches, TURNED_ON)
    knobs.apply({"balance": True})()  # on and off again before training
    knobs.apply({"balance": True})
    found["reads"] = [knobs.values()["balance"], knobs.verify({"balance": True})]
    seen += go_on(run, batches, TURNED_OFF - TURNED_ON)
    knobs.apply({"balance": False})
    seen += go_on(run, batches, 1)
    run.save(folder / "saves")  # while workers hold batches that are split unevenly
    end(run, seen)
    again = make(stage, slow=True, balance=False)
    again.load(folder / "saves")
    seen += go_on(again, batches_of(again, num_workers=0), WINDOWS[stage] - len(seen))
    return {**found, **end(again, seen)}


def gathered(model: torch.nn.Module) -> list[float]:
    """Return all weights, whole under every stage."""
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return torch.cat([one.detach().flatten() for one in parameters]).tolist()
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([one.detach().flatten() for one in parameters]).tolist()


def larger_batches(stage: int, folder: Path) -> dict[str, Any]:
    """Double the batch and restore it, with a checkpoint between; then do it by hand."""
    run = make(stage, slow=False, balance=False)
    knobs = run._tuner._knobs
    batches = batches_of(run, num_workers=1)
    found = {"options": knobs.options()["batch_samples"]}
    seen = go_on(run, batches, 3)
    knobs.apply({"batch_samples": 4 * BATCH})()
    undo = knobs.apply({"batch_samples": 2 * BATCH})
    seen += go_on(run, batches, 6)
    found["reads"] = [knobs.values()["batch_samples"], knobs.verify({"batch_samples": 2 * BATCH})]
    run.save(folder / "larger")
    end(run, seen)
    again = make(stage, slow=False, balance=False)
    again.load(folder / "larger")
    batches = batches_of(again, num_workers=0)
    seen += go_on(again, batches, 2)
    found["loaded"] = again._tuner._knobs.values()["batch_samples"]
    again.rebuild({"zero_optimization": {"stage": 2}})
    seen += go_on(again, batches, 2)
    again._tuner._knobs.apply({"batch_samples": BATCH})
    seen += go_on(again, batches, 3)
    undo()  # the run has ended: no effect
    rate = again.engine.basic_optimizer.param_groups[0]["lr"]
    return {**found, **end(again, seen), "rate": rate, "by hand": by_hand(stage, seen)}


def by_hand(stage: int, seen: list[list[int]]) -> list[float]:
    """Train on the same samples, with the rate set before each window."""
    run, whole = make(stage, slow=False, balance=False), data()
    (group,) = run.engine.basic_optimizer.param_groups
    rate = group["lr"]
    for samples in seen:
        group["lr"] = rate * 2 * len(samples) / BATCH
        run.train_batch(whole[samples])
    return end(run, seen)["weights"]


def main(folder: Path, stages: list[int]) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    for stage in stages:
        found[stage] = {
            "balanced": train(stage, balance=True, num_workers=1),
            "even": train(stage, balance=False, num_workers=0),
        }
    found["by turns"] = by_turns(1, folder)
    found["larger"] = larger_batches(1, folder)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
    dist.destroy_process_group()
