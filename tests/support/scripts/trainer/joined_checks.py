"""Changes a TrainingRun's engine in several ways while it trains; writes the outcome as JSON.

`joined_checks.py FOLDER`, two ranks; the expected weights are those of a run left alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from window_checks import (
    Net,
    batches,
    mean_over_samples,
    relative_difference,
    share_of,
    weights,
)

import zerowatch
from zerowatch.errors import RebuildError, ZerowatchError
from zerowatch.metrics.catalog import memory, training, window
from zerowatch.runtime.engine.rebuild import engine_replacement

QUIET = {"serve": {"enabled": False}, "cross_rank": {"enabled": False}}
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes."

Found = dict[str, Any]


def grouped_by_dimensions(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, as scripts make them that exempt biases from decay."""
    matrices = [each for each in parameters if each.ndim > 1]
    vectors = [each for each in parameters if each.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=0.01)


def make(folder: Path, stage: int, optimizer: Any = None, **options: Any) -> zerowatch.TrainingRun:
    torch.manual_seed(0)
    model = Net()
    return zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
        },
        optimizer=optimizer or torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=mean_over_samples,
        settings={**QUIET, "run_log": {"folder": str(folder / "runs")}},
        **options,
    )


def train(run: zerowatch.TrainingRun, between: Callable[[int], None] = lambda step: None) -> Found:
    """Train through all batches; `between` may change the run before each."""
    results = []
    for step, batch in enumerate(batches()):
        between(step)
        results.append(run.train_batch(share_of(batch, None)))
    return {"weights": weights(run.engine), "replays": [each.replays for each in results]}


def end(run: zerowatch.TrainingRun) -> Found:
    snapshot = run.watch.snapshot()
    found = {
        "stage": run.engine.zero_optimization_stage(),
        "rebuilt": snapshot.value(window.ENGINE_REBUILDS, "committed"),
        "refused": snapshot.value(window.ENGINE_REBUILDS, "refused"),
        "replays": snapshot.value(window.WINDOW_REPLAYS, "committed"),
        "gave up": snapshot.value(window.WINDOW_REPLAYS, "gave_up"),
        "survived": snapshot.value(memory.OOMS, "cpu", "replayed"),
        "samples": run.samples,
    }
    run.close()
    snapshot = run.watch.snapshot()
    found["published steps"] = snapshot.value(training.STEPS)
    found["published samples"] = snapshot.value(training.SAMPLES)
    run.engine.destroy()
    return found


def rebuilt(folder: Path, **options: Any) -> Found:
    """Rebuild from stage 1 to 3 and to 2, and try a stage that does not exist."""
    run = make(folder, 1, **options)

    def between(step: int) -> None:
        if step in (1, 3):
            run.rebuild({"zero_optimization": {"stage": {1: 3, 3: 2}[step]}})
        if step == 2:
            for stage in (7, 7 if dist.get_rank() else 2):  # on both ranks, then on one
                try:
                    run.rebuild({"zero_optimization": {"stage": stage}})
                except RebuildError as error:
                    refused.append(str(error))

    refused: list[str] = []
    outcome = train(run, between)
    compressor = run._engine_holder.compressor
    attached = compressor is not None and compressor.error_ratio is not None
    return {**end(run), "difference": outcome["weights"], "errors": refused, "compressor": attached}


def starved(folder: Path, suffices: Callable[[zerowatch.TrainingRun], bool]) -> Found:
    """Train where rank 1 runs out of memory in every backward until `suffices` is true."""
    run = make(folder, 2)
    fault = {"on": False}

    def body(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(raise_or_not)

    def raise_or_not(gradient: torch.Tensor) -> None:
        if fault["on"] and dist.get_rank() == 1 and not suffices(run):
            raise RuntimeError(OUT_OF_MEMORY)

    handle = run.module.body.register_forward_hook(body)
    errors: list[str] = []

    def between(step: int) -> None:
        fault["on"] = step == 2

    outcome: Found = {}
    try:
        outcome = train(run, between)
    except RuntimeError as error:
        errors.append(f"{type(error).__name__}: {error}")
        fault["on"] = False
        for batch in batches()[2:]:
            run.train_batch(share_of(batch, None))
        outcome = {"weights": weights(run.engine), "replays": []}
    handle.remove()
    folder_of_run = run.watch.run_folder
    found = {
        **end(run),
        "difference": outcome["weights"],
        "errors": errors,
        "each": outcome["replays"],
    }
    plan = folder_of_run / "plan.json" if folder_of_run else None
    found["plan"] = json.loads(plan.read_text()) if plan and plan.exists() else None
    return found


def saved_and_loaded(folder: Path) -> Found:
    """Save after two steps on a rebuilt engine, and load into a run of the first stage."""
    run = make(folder, 1)
    for batch in batches()[:2]:
        run.train_batch(share_of(batch, None))
    run.rebuild({"zero_optimization": {"stage": 3}})
    run.save(folder / "saves", client_state={"note": "mine"})
    end(run)
    again = make(folder, 1)
    loaded = again.load(folder / "saves")
    client_state = again.client_state
    for batch in batches()[2:]:
        again.train_batch(share_of(batch, None))
    outcome = weights(again.engine)
    return {**end(again), "difference": outcome, "client_state": client_state, "loaded": loaded}


def lost(folder: Path) -> Found:
    """Let a rebuild fail on rank 1, also with the previous ds config; return the errors."""
    run = make(folder, 1)

    def restore(*args: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no state can be restored")
        restore_snapshot(*args)

    restore_snapshot = engine_replacement.restore_snapshot
    with mock.patch.object(engine_replacement, "restore_snapshot", restore):
        errors = [_error_of(lambda: run.rebuild({"zero_optimization": {"stage": 2}}))]
    errors.append(_error_of(lambda: run.train_batch(share_of(next(iter(batches())), None))))
    run.close()
    return {"errors": errors}


def _error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except (ZerowatchError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "none", ""


def main(folder: Path) -> None:
    """Run all cases."""
    deepspeed.init_distributed("gloo", verbose=False)
    run = make(folder, 1)
    expected = train(run)["weights"]
    end(run)
    found = {
        "rebuilt": rebuilt(folder),
        "rebuilt, with more": rebuilt(
            folder,
            optimizer=grouped_by_dimensions,
            compression="bf16",
            activation_checkpointing=["Linear"],
        ),
        "starved": starved(folder, lambda run: run.engine.zero_optimization_stage() == 3),
        "starved for good": starved(folder, lambda run: False),
        "saved": saved_and_loaded(folder),
    }
    for case in found.values():
        case["difference"] = relative_difference(case["difference"], expected)
    found["lost"] = lost(folder)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
