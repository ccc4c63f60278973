"""The model of the tuner's benches, and how configurations are applied to its engine.

Imported by rank scripts only. The configurations are those of the tuner: knob by name -> value.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from bench.tuner_link.link_figures import REPORT

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.cli.demo.model import ByteGpt, GptConfig
from zerowatch.runtime.engine.live_settings.all_settings import LIVE_SETTINGS
from zerowatch.runtime.training_run import TrainingRun

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# 9.7 million parameters: 39 MB of gradients in float32, 1.6 s on a link of 200 Mbit/s.
LENGTH, MOST_LENGTH = 32, 256
MODEL = GptConfig(
    max_position_embeddings=MOST_LENGTH, hidden_size=512, num_hidden_layers=3, num_attention_heads=8
)
SAMPLES = 16  # of each rank, in each window
LIVE = {setting.name: setting for setting in LIVE_SETTINGS}
WHOLE = "reduce_scatter"  # while it is off, the other pattern cannot be chosen
# What the caller would have written: four micro-batches of four.
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 2},
}


def asked() -> dict[str, Any]:
    """Return the arguments that the launcher wrote for this rank."""
    return dict(json.loads(Path(sys.argv[1]).read_text()))


def report(found: Mapping[str, Any]) -> None:
    """Print a report for the launcher, on rank 0 only."""
    if dist.get_rank() == 0:
        print(REPORT + json.dumps(found), flush=True)


def leave(run: TrainingRun) -> None:
    """Report the end of the job and close the process group."""
    run.close()
    dist.barrier()
    report({"ended": True})
    dist.destroy_process_group()


def new_run(micro_batch_samples: int = 4, stage: int = 2, **options: Any) -> TrainingRun:
    """Return a run from DeepSpeed's defaults; all ranks make the same model."""
    given = {
        "train_micro_batch_size_per_gpu": micro_batch_samples,
        "zero_optimization": {"stage": stage},
    }
    config = DS_CONFIG | given
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TrainingRun(ByteGpt(MODEL), config=config, loss=_loss, optimizer=_optimizer, **options)


def batch(samples: int = SAMPLES, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return this rank's share of a global batch: random bytes."""
    rows = torch.randint(0, MODEL.vocab_size, (samples, length + 1))
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def work_with(run: TrainingRun, configuration: Mapping[str, Any]) -> None:
    """Set all knobs of a configuration that this engine supports.

    Raises:
        ValueError, ZerowatchError: It cannot be.
    """
    run.compress(None)
    stage = configuration.get("zero_stage", 2)
    if run.config["zero_optimization"]["stage"] != stage:
        run.rebuild({"zero_optimization": {"stage": stage}})
    run.set_micro_batch(configuration.get("micro_batch_samples", 4))
    live = {name: value for name, value in configuration.items() if name in LIVE}
    if LIVE[WHOLE].unsupported_reason(run.engine) is None:
        LIVE[WHOLE].apply(run.engine, True)
    for name in sorted(live, key=lambda name: name == WHOLE):
        if LIVE[name].unsupported_reason(run.engine) is None:
            LIVE[name].apply(run.engine, live[name])
    kind = configuration.get("gradient_compression")
    run.compress(kind, asynchronous=configuration.get("asynchronous_reduction", False))


def configuration_of(run: TrainingRun) -> dict[str, Any]:
    """Return the configuration in use, read from the engine."""
    live = {
        name: knob.get(run.engine)
        for name, knob in LIVE.items()
        if knob.unsupported_reason(run.engine) is None
    }
    compressor = run._engine_holder.compressor  # the run itself has no attribute for it
    kind = None if compressor is None else compressor.kind
    return {
        **live,
        "zero_stage": int(run.engine.zero_optimization_stage()),
        "micro_batch_samples": run.micro_batch_samples,
        "gradient_compression": None if kind == "plain" else kind,
        "asynchronous_reduction": compressor is not None and compressor.asynchronous,
    }


def visit(
    run: TrainingRun, configuration: Mapping[str, Any], settle_steps: int, steps: int
) -> dict[str, Any]:
    """Train with a configuration; return the seconds of each step, or why it cannot be."""
    began = time.perf_counter()
    try:
        work_with(run, configuration)
    except (ValueError, ZerowatchError) as error:
        return {"configuration": dict(configuration), "refused": str(error)}
    changed = time.perf_counter()
    ends = [changed]
    for _ in range(settle_steps + steps):
        run.train_batch(batch())
        ends.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(ends)]
    return {
        "configuration": dict(configuration),
        "change_seconds": changed - began,
        "seconds": seconds[settle_steps:],
    }


def _loss(model: Any, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(micro_batch["input_ids"], micro_batch["labels"])
    return loss


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
