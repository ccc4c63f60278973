"""Small runs with a fast tuner, for tests of its effect on the numbers.

Trials are short, and every other one is accepted, with any measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.metrics.catalog import overhead, tuner
from zerowatch.runtime.monitor import watch_thread
from zerowatch.runtime.tuner import controller_runner
from zerowatch.runtime.tuner.policy import proposals
from zerowatch.runtime.tuner.policy.trial_search import TrialSearch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# torch's optimizer where results are compared bitwise: on CPUs DeepSpeed's own multiplies or raises
# the powers of beta, depending on earlier steps of the process, which differ in the last bit.
_DEFAULT_OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
DECISIONS = 2
# Steps until a test fails. The tuner waits for figures that come by time: on a busy machine the
# second trial may begin after a few hundred steps.
LONGEST = 4000
SAMPLES, WIDTH, BUCKET = 4, 48, 500_000
SETTINGS = {
    "serve": {"enabled": False},
    "cross_rank": {"interval_seconds": 0.1},
    "tuner": {
        "diagnosis_interval_seconds": 0.1,
        "cooldown_steps": 5,
        "exploration_ratio": 1.0,
        "max_exposed_comm_ratio": 0.01,
        "rebuild": False,
    },
}

Results = dict[str, Any]
Run = zerowatch.TrainingRun


def be_quick() -> None:
    """Shorten trials, publish metrics often, and exclude the knob without effect on numbers."""
    proposals.KNOBS = tuple(knob for knob in proposals.KNOBS if knob.name != "python_gc")
    controller_runner.POLL_SECONDS = 0.0
    watch_thread.TICK_SECONDS = 0.05
    design_of, min_gains = TrialSearch._design, cycle((-0.9, 0.01))

    def design(*args: Any, **kwargs: Any) -> Any:
        return replace(
            design_of(*args, **kwargs),
            block_steps=2,
            settle_steps=1,
            first_interim_pair=2,
            max_pairs=2,
            interim_level=0.5,
            min_gain=next(min_gains),
        )

    TrialSearch._design = design  # type: ignore[method-assign]


def make(
    folder: Path,
    bucket: int = BUCKET,
    settings: Mapping[str, Any] = SETTINGS,
    *,
    default_optimizer: bool = False,
    **options: Any,
) -> Run:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    return Run(
        model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket},
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            **(_DEFAULT_OPTIMIZER if default_optimizer else {}),
        },
        optimizer=None if default_optimizer else torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
        settings={**settings, "run_log": {"folder": str(folder / "runs")}},
        **options,
    )


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return this rank's share of a step's batch; all have the same size."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(SAMPLES, WIDTH, generator=source)
    return {"x": x, "y": x.sum(dim=1, keepdim=True).sin()}


def weights(run: Run) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in run.module.parameters()])


class Trained:
    """Trains a run step by step; keeps the losses, and the weights after each step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.worked_with: list[Results] = []

    def step(self) -> None:
        self.losses.append(self.run.train_batch(batch_of(self.run.steps)).loss)
        self.weights.append(weights(self.run))
        knobs = getattr(self.run._tuner, "_knobs", None)
        values = {} if knobs is None else dict(knobs.values())
        if values not in self.worked_with:
            self.worked_with.append(values)

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()

    def until_trial(self) -> bool:
        """Train until something is on trial; return False if nothing ever is."""
        while self.run.steps < LONGEST:
            self.step()
            if self.agreed(self.is_on_trial):
                return True
        return False

    def until_decided(self) -> None:
        """Train until enough decisions are made."""
        while self.run.steps < LONGEST:
            self.step()
            if self.agreed(lambda: len(self.decisions()) >= DECISIONS):
                return

    def is_on_trial(self) -> bool:
        """Whether the run uses a configuration that is not known to be good, by rank 0."""
        runner = self.run._tuner._runner
        return runner is not None and runner._needs_rollback

    def agreed(self, question: Callable[[], bool]) -> bool:
        return bool(self.run._host_group.all_max(int(question())))

    def decisions(self) -> list[Results]:
        path = self.run.watch.run_folder
        file = path / "decisions.jsonl" if path else None
        text = file.read_text() if file and file.exists() else ""
        *whole, _ = text.split("\n")  # rank 0 may be writing the last line
        return [json.loads(line) for line in whole]

    def now(self) -> Results:
        """Return this rank's configuration, and the state of rank 0's controller."""
        knobs, runner = self.run._tuner._knobs, self.run._tuner._runner
        return {
            "values": dict(knobs.values()),
            "good": dict(runner._controller.configuration.known_good) if runner else None,
            "state": runner._controller.state if runner else None,
            "decisions": len(self.decisions()),
        }

    def end(self) -> Results:
        decisions = self.decisions()
        self.run.close()
        snapshot = self.run.watch.snapshot()
        self.run.engine.destroy()
        return {
            "steps": self.run.steps,
            "worked with": self.worked_with,
            "verdicts": [each["verdict"] for each in decisions],
            "reasons": [each["reason"] for each in decisions],
            "turned": [
                [change["knob"], each["numerics"]]
                for each in decisions
                for change in each["changes"]
            ],
            "failures": snapshot.value(overhead.HOOK_FAILURES, "tuner") or 0,
            "other failures": snapshot.total(overhead.HOOK_FAILURES) or 0,
            "states": len(snapshot.values.get(tuner.TUNER_STATE, {})),
        }
