"""Tests which knobs are bit-exact, and whether that is true; tells both, as JSON per rank.

`self_test_checks.py FOLDER NAME...`, of cases; any number of ranks. Truth is what training for some
windows with a setting leads to, from the same weights and by the same batches.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.metrics.catalog import training
from zerowatch.runtime.trainer.oom_recovery.fit import MemoryMeasurements
from zerowatch.runtime.tuner.bitwise_check import bitwise_invariant_knobs
from zerowatch.runtime.tuner.dry_run_window import DryRunWindow
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WINDOWS, SAMPLES, WIDTH = 3, 8, 48
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}
BUCKETS = {"reduce_bucket_size": [500]}
CUTS = {"micro_batch_samples": [3]}
PATTERNS = {
    "reduce_scatter": [False],
    "use_multi_rank_bucket_allreduce": [False],
    "asynchronous_reduction": [True],
}
OVERLAP = {"overlap_comm": [True]}
CASES: Mapping[str, tuple[dict[str, Any], Mapping[str, list[Any]]]] = {
    "stage 0": ({"stage": 0}, {**BUCKETS, **CUTS}),
    "stage 1": ({"stage": 1, "reduce_bucket_size": 4000}, {**BUCKETS, **PATTERNS, **CUTS}),
    "stage 2": (
        {"stage": 2, "reduce_bucket_size": 4000},
        {**BUCKETS, **PATTERNS, **OVERLAP, **CUTS},
    ),
    "stage 2, offload": (
        {"stage": 2, "reduce_bucket_size": 4000, "offload_optimizer": {"device": "cpu"}},
        {**BUCKETS, **CUTS},
    ),
    "stage 3": (
        {"stage": 3, "reduce_bucket_size": 4000, "stage3_param_persistence_threshold": 0},
        {**BUCKETS, **CUTS, "reduce_scatter": [False]},
    ),
}


class Net(torch.nn.Module):
    """Draws random numbers, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        random.random()
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.dropout(x)


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return [
        {name: torch.randn(SAMPLES, WIDTH, generator=generator) for name in ("x", "y")}
        for _ in range(WINDOWS)
    ]


class Job:
    """A run, the hands on it, and what its passes would lead to."""

    def __init__(self, zero: dict[str, Any]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        model = Net()
        self.run = run = zerowatch.TrainingRun(
            model,
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clipping": 0.5,
                "steps_per_print": 10**9,
                "zero_optimization": {"reduce_bucket_size": 2**20, **zero},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            loss=loss,
            settings=QUIET,
        )
        self.hands = RunKnobs(
            run._changes,
            run._windows,
            run.agreement,
            measured=lambda: MemoryMeasurements(peaks=(), limit_bytes=None),
            largest_share=lambda: SAMPLES,
        )
        self.rehearsal = DryRunWindow(loss, run._changes, run.agreement, run._windows)

    def test(self, batch: Any, knobs: Mapping[str, list[Any]]) -> list[str]:
        passes = partial(self.rehearsal.checksum, batch)
        return sorted(bitwise_invariant_knobs(passes, self.hands, self.run.agreement, knobs))

    def end(self) -> dict[str, Any]:
        """End the run; tell what must not move."""
        engine = self.run.engine
        told = {
            "weights": self.weights(),
            "generators": [torch.get_rng_state().sum().item(), random.getstate()[1][-1]],
            "forwards": self.run.module.forwards.item(),
            "counts": [self.run.steps, self.run.samples, engine.global_steps, engine.micro_steps],
            "knobs": dict(self.hands.values()),
        }
        self.run.close()
        snapshot = self.run.watch.snapshot()  # closed, it has taken all
        told["metrics"] = [snapshot.value(each) for each in (training.STEPS, training.SAMPLES)]
        engine.destroy()
        return told

    def weights(self) -> str:
        """Return every bit of the weights, of all ranks under ZeRO 3."""
        parameters = list(self.run.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            numbers = torch.cat([each.detach().flatten() for each in parameters])
        return numbers.numpy().tobytes().hex()


def trained(zero: dict[str, Any], knob: str | None = None, value: Any = None) -> dict[str, Any]:
    job = Job(zero)
    if knob is not None:
        job.hands.apply({**job.hands.values(), knob: value})
    for batch in batches():
        job.run.train_batch(batch)
    return job.end()


def tested(zero: dict[str, Any], knobs: Mapping[str, list[Any]]) -> tuple[list[str], Any]:
    """Train, with a self-test before the second window."""
    job = Job(zero)
    first, second, *rest = batches()
    job.run.train_batch(first)
    exact = job.test(second, knobs)
    for batch in (second, *rest):
        job.run.train_batch(batch)
    return exact, job.end()


def check(zero: dict[str, Any], knobs: Mapping[str, list[Any]]) -> dict[str, Any]:
    alone = trained(zero)
    exact, state = tested(zero, knobs)
    truth = {
        knob: all(trained(zero, knob, value)["weights"] == alone["weights"] for value in values)
        for knob, values in knobs.items()
    }
    moved = [name for name, value in alone.items() if value != state[name]]
    truly = sorted(knob for knob, is_same in truth.items() if is_same)
    return {"tried": sorted(knobs), "exact": exact, "truly": truly, "moved": moved}


def main(folder: Path, *names: str) -> None:
    """Run some cases."""
    deepspeed.init_distributed("gloo", verbose=False)
    told = {name: check(*CASES[name]) for name in names}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
