"""Rebuilds runs of one rank: with schedules of DeepSpeed, interrupted, failing, and refused.

`rebuilt_runs.py FOLDER`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR

import zerowatch
from zerowatch.errors import RebuildError
from zerowatch.runtime.engine.rebuild import engine_replacement
from zerowatch.runtime.tuner.knobs.layout_knobs import ZeroLayouts, layout_knobs
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs
from zerowatch.runtime.tuner.policy.policy_types import SwitchRequest
from zerowatch.runtime.tuner.transaction import switch_all_ranks

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH, STEPS, SAVED_AT = 8, 10, 6
QUIET = {
    **{part: {"enabled": False} for part in ("serve", "run_log", "cross_rank")},
    "tuner": {"mode": "off"},
}
COSINE = {"total_num_steps": STEPS, "warmup_num_steps": 2}
LINEAR = {"warmup_num_steps": 8, "warmup_type": "linear"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupCosineLR": {"schedule": {"type": "WarmupCosineLR", "params": COSINE}},
    "WarmupLR": {"schedule": {"type": "WarmupLR", "params": LINEAR}},
    "optimizer of a callable": {
        "schedule": {"type": "WarmupLR", "params": LINEAR},
        "as_callable": True,
    },
    "schedule of a callable": {
        "lr_scheduler": lambda optimizer: WarmupCosineLR(optimizer, **COSINE)
    },
}
REBUILT_AT = {"never": (), "at the start": (0,), "in the middle": (3, 8)}

Found = dict[str, Any]


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


def batch(step: int) -> dict[str, torch.Tensor]:
    data = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4, WIDTH, generator=data), "y": torch.randn(4, generator=data)}


def make(
    stage: int,
    kind: Any = torch.optim.AdamW,
    *,
    schedule: dict[str, Any] | None = None,
    as_callable: bool = False,
    **options: Any,
) -> zerowatch.TrainingRun:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        **({} if schedule is None else {"scheduler": schedule}),
    }

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.1)

    return zerowatch.TrainingRun(
        model,
        config=config,
        optimizer=optimizer if as_callable else optimizer(model.parameters()),
        loss=loss,
        settings=QUIET,
        **options,
    )


def end(run: zerowatch.TrainingRun) -> None:
    run.close()
    run.engine.destroy()


def train(run: zerowatch.TrainingRun, until: int, rebuilt_at: tuple[int, ...] = ()) -> list[float]:
    """Train, with rebuilds to stage 2 and back to 1 before some steps; return the rates."""
    rates = []
    while run.steps < until:
        if run.steps in rebuilt_at:
            stage = 3 - run.config["zero_optimization"]["stage"]
            run.rebuild({"zero_optimization": {"stage": stage}})
        run.train_batch(batch(run.steps))
        rates.append(run.engine.get_lr()[0])
    return rates


def weights(run: zerowatch.TrainingRun) -> list[float]:
    values = [value.detach().flatten() for value in run.module.parameters()]
    return torch.cat(values).tolist()


def scheduled(folder: Path, options: dict[str, Any], rebuilt_at: tuple[int, ...]) -> Found:
    """Train to the end, and train a new run to the end from a checkpoint on the way."""
    run = make(1, **options)
    rates = train(run, SAVED_AT, rebuilt_at)
    run.save(folder)
    rates += train(run, STEPS, rebuilt_at)
    final = weights(run)
    end(run)
    loaded = make(1, **options)
    loaded.load(folder)
    resumed = train(loaded, STEPS)
    found = {"rates": rates, "weights": final, "resumed": resumed, "loaded": weights(loaded)}
    end(loaded)
    return found


def switch(run: zerowatch.TrainingRun) -> None:
    """Rebuild to stage 2 as the tuner does."""
    knobs = RunKnobs(run._engine_holder, run._window_runner, run._host_group)
    target = {**knobs.values(), "zero_stage": 2}
    request = SwitchRequest(target=target, reason="a test", checked=False)
    try:
        switch_all_ranks(run._host_group, knobs, request)
    finally:
        knobs.close()


def rebuild(run: zerowatch.TrainingRun) -> None:
    run.rebuild({"zero_optimization": {"stage": 2}})


def interrupt(*args: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def fail(*args: Any) -> None:
    raise RuntimeError("no state can be restored")


def lost(
    folder: Path, change: Callable[[zerowatch.TrainingRun], None], restore: Callable[..., None]
) -> Found:
    """Let a rebuild end while the state is restored; try to go on, and load in a new run."""
    run = make(0)
    for _ in range(3):
        train(run, run.steps + 1)
        run.save(folder)
    final, before = weights(run), names(folder)
    with mock.patch.object(engine_replacement, "restore_snapshot", restore):
        raised = error_of(lambda: change(run))
    errors = [
        error_of(call)
        for call in (
            lambda: run.save(folder),
            lambda: run.save(folder, background=True),
            lambda: run.train_batch(batch(3)),
        )
    ]
    unchanged = names(folder) == before
    run.close()
    again = make(0)
    loaded = again.load(folder)
    found = {"raised": raised, "errors": errors, "unchanged": unchanged, "loaded": loaded}
    found["equal"] = weights(again) == final
    end(again)
    return found


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "none", ""


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused() -> Found:
    """Ask for stages that DeepSpeed refuses with an optimizer that it has not tested."""
    run = make(0, torch.optim.SGD)
    train(run, 1)
    engine, stages = run.engine, (1, 2, 3)
    errors = []
    for stage in stages:
        try:
            run.rebuild({"zero_optimization": {"stage": stage}})
        except RebuildError as error:
            errors.append(str(error))
    stage_knob, *_ = layout_knobs(ZeroLayouts(run._engine_holder, 2, is_training_run=True))
    found = {
        "errors": errors,
        "same": run.engine is engine,
        "options": stage_knob.options(),
    }
    train(run, 2)
    end(run)
    return found


def main(folder: Path) -> None:
    """Run all cases."""
    found: Found = {}
    for name, options in SCHEDULES.items():
        for when, rebuilt_at in REBUILT_AT.items():
            key = f"{name}, rebuilt {when}"
            found[key] = scheduled(folder / key, options, rebuilt_at)
    for key, change, restore in (
        ("interrupted rebuild", rebuild, interrupt),
        ("interrupted switch", switch, interrupt),
        ("failed rebuild", rebuild, fail),
        ("failed switch", switch, fail),
    ):
        found[key] = lost(folder / key, change, restore)
    found["refused"] = refused()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(Path(sys.argv[1]))
