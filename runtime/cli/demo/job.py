"""Trains the demo's model on each rank: a TrainingRun, its loader, and a loop.

It is also an example: apart from the console, a training loop needs nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist

from ...common import accelerator
from ...entry_points import close_watch
from ...monitor.watch import WatchHandle
from ...training_run import TrainingRun
from .console import DemoConsole
from .corpus import NextByteSequences, standard_library_text
from .launch_ranks import quiet_deepspeed
from .model import ByteGpt

SEED = 1


def main() -> None:
    """Train, and print progress on rank 0."""
    options = _parse()
    quiet_deepspeed()
    text = standard_library_text()
    torch.manual_seed(SEED)  # the same weights on every rank
    model = ByteGpt()
    sequences = NextByteSequences(text, model.config.max_position_embeddings)
    config = ds_config(steps=options.steps, stage=options.stage)
    # The tuner does not try changes that cannot pay off by then. The demo has a console of its own.
    settings = {"tuner": {"total_steps": options.steps}, "console": "off"}
    run = TrainingRun(model, config=config, loss=mean_loss, settings=settings, tuner="auto")
    batch_samples = config["train_micro_batch_size_per_gpu"] * dist.get_world_size()
    batches = run.loader(sequences, batch_samples=batch_samples, seed=SEED).forever()
    console = _console(run.watch, options)

    for batch in itertools.islice(batches, options.steps):
        run.train_batch(batch)

    stage = run.engine.zero_optimization_stage()  # the tuner may have changed it
    run.close()
    if console is not None:
        console.show_summary(stage=stage)
    dist.destroy_process_group()


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a part of the batch, a 0-d tensor, as TrainingRun requires."""
    loss: torch.Tensor = model(**batch)
    return loss


def ds_config(*, steps: int, stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration; on a GPU with larger batches and bfloat16."""
    on_gpu = accelerator.current.is_available()
    return {
        "train_micro_batch_size_per_gpu": 64 if on_gpu else 8,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": on_gpu},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                # DeepSpeed's own AdamW is compiled first, which needs a C++ compiler.
                "torch_adam": True,
                "lr": 2e-3,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
            },
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": max(2, min(20, steps // 5)),
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
        "steps_per_print": 10**9,
    }


def _console(watch: WatchHandle, options: argparse.Namespace) -> DemoConsole | None:
    """Create a console on rank 0 that prints each step; return None on the other ranks."""
    if dist.get_rank() != 0:
        return None
    console = DemoConsole(watch=watch, steps=options.steps, num_ranks=dist.get_world_size())
    watch.subscribe(console.on_step)
    return console


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zerowatch.runtime.cli.demo.job")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C ends the demo without a traceback
        close_watch(failed=True)
        sys.exit(130)
