"""The demo's training script, one process per rank: a TrainingRun, its loader, and a loop.

Read it as an example. Apart from the console, this is all that an owned loop needs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist

from ...common import accelerator
from ...initialize import close_watch
from ...monitor.watch import Watch
from ...training_run import TrainingRun
from .console import DemoConsole
from .corpus import NextByteWindows, standard_library_text
from .model import ByteGpt
from .plain_deepspeed import make_deepspeed_plain

SEED = 1


def main() -> None:
    """Train, and on rank 0 show how it goes."""
    options = _parse()
    make_deepspeed_plain()
    text = standard_library_text()
    torch.manual_seed(SEED)  # the same weights on every rank
    model = ByteGpt()
    windows = NextByteWindows(text, model.config.max_position_embeddings)
    config = ds_config(steps=options.steps, stage=options.stage)
    short = {"tuner": {"total_steps": options.steps}}  # what cannot pay by then is not tried
    run = TrainingRun(model, config=config, loss=mean_loss, settings=short, tuner="auto")
    batch_samples = config["train_micro_batch_size_per_gpu"] * dist.get_world_size()
    batches = run.loader(windows, batch_samples=batch_samples, seed=SEED).forever()
    console = _console(run.watch, options)

    for batch in itertools.islice(batches, options.steps):
        run.train_batch(batch)

    stage = run.engine.zero_optimization_stage()  # the tuner may have changed it
    run.close()
    if console is not None:
        console.show_summary(stage=stage)
    dist.destroy_process_group()


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a part of the batch, which is all that a TrainingRun asks for."""
    loss: torch.Tensor = model(**batch)
    return loss


def ds_config(*, steps: int, stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; on a GPU with larger batches, and in bfloat16."""
    on_gpu = accelerator.current.is_available()
    return {
        "train_micro_batch_size_per_gpu": 64 if on_gpu else 8,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": on_gpu},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            # torch's own AdamW: DeepSpeed's would be compiled first, which takes a C++ compiler.
            "params": {
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


def _console(watch: Watch, options: argparse.Namespace) -> DemoConsole | None:
    """Let rank 0 show each step; the other ranks are as good as the same."""
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
    except KeyboardInterrupt:  # somebody has seen enough, and no traceback is due
        close_watch(failed=True)
        sys.exit(130)
