"""Counts what waits for the device in a step: `FOLDER`. All counts are of several steps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import probes
from gpu.jobs import engines
from torch.profiler import ProfilerActivity, profile

import zerowatch

STEPS, WIDTH = 8, 512
ROOT = str(Path(__file__).resolve().parents[3])


def warned(steps: Callable[[], None]) -> list[str]:
    """Return the places at which torch warned of a synchronization."""
    if engines.ON_CUDA:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    if engines.ON_CUDA:
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(each.filename).resolve()}:{each.lineno}"
        for each in caught
        if "synchronizing" in str(each.message)
    ]


def waited(steps: Callable[[], None]) -> Counter[str]:
    """Return how often each function of the CUDA runtime that waits was called."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if engines.ON_CUDA else [])]
    with profile(activities=activities) as profiler:
        steps()
    names = (event.name() for event in profiler.profiler.kineto_results.events())
    return Counter(name for name in names if "Synchronize" in name and name.startswith("cuda"))


def of_engine(stage: int) -> dict[str, Any]:
    engine = engines.make_engine(
        engines.layers(WIDTH, 3), engines.ds_config(stage, bf16=engines.ON_CUDA)
    )
    dtype = torch.bfloat16 if engines.ON_CUDA else torch.float32
    batch = torch.randn(4, WIDTH, device=engine.device, dtype=dtype)

    def steps() -> None:
        for _ in range(STEPS):
            engines.step(engine, batch)

    steps()
    found: dict[str, Any] = {"plain": {"warned": len(warned(steps)), "waited": waited(steps)}}
    watch = zerowatch.watch(engine, {"serve": {"enabled": False}})
    steps()
    places = warned(steps)
    found["monitored"] = {"warned": len(places), "waited": waited(steps)}
    found["own"] = probes.own_synchronizations(places, ROOT)
    watch.close()
    engines.give_up(engine)
    return found


def of_training_run() -> dict[str, Any]:
    run = zerowatch.TrainingRun(
        engines.layers(WIDTH, 3),
        config={
            **engines.ds_config(2, bf16=engines.ON_CUDA),
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        },
        loss=lambda model, batch: model(batch["x"]).float().square().mean(),
        settings=engines.QUIET,
        tuner="off",
    )
    dtype = torch.bfloat16 if engines.ON_CUDA else torch.float32
    batch = {"x": torch.randn(32, WIDTH, dtype=dtype)}

    def windows() -> None:
        for _ in range(STEPS):
            run.train_batch(batch)

    windows()
    places = warned(windows)
    run.close()
    return {"warned": len(places), "own": probes.own_synchronizations(places, ROOT)}


if __name__ == "__main__":
    engines.meet()
    engines.report(
        {
            "windows": STEPS,
            "stages": {f"stage {stage}": of_engine(stage) for stage in (1, 3)},
            "training run": of_training_run(),
        }
    )
