"""Fills every dashboard: trains, evaluates, saves and offloads on two ranks until asked to end.

Usage: dashboard_job.py FOLDER. It takes the first step once there is FOLDER/begin, so that what
happens once is scraped before and after; it ends at the first step that finds FOLDER/end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import zerowatch
from zerowatch.runtime.cli.demo.model import ByteGpt, GptConfig
from zerowatch.runtime.cross_rank import rank_figures

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

BATCH = 4
LENGTHS = (32, 48, 64)
EVERY_STEPS = 10
PAUSE_SECONDS = 0.03  # of each step: queries wait for time to pass, which need not take a core
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
SETTINGS: dict[str, Any] = {
    "cross_rank": {"interval_seconds": 1.0},
    # A budget that is passed at once: so an alert fires, and dashboards show alerts.
    "memory": {"detailed_sample_seconds": 1.0, "host_limit_bytes": "256MiB"},
    "sampling": {"device_interval_seconds": 0.5},
    "profile": {"every_steps": EVERY_STEPS},
    "tuner": {"diagnosis_interval_seconds": 1.0},
}


class Decoder(ByteGpt):
    """Returns prompts with new tokens, as transformers' decoders do."""

    generation_config = SimpleNamespace(eos_token_id=None)

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Append two tokens to each prompt."""
        return torch.cat((input_ids, input_ids[:, :2]), dim=1)


def main(folder: Path) -> None:
    rank_figures.PERIOD_SECONDS = 5.0
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = Decoder(GptConfig(hidden_size=128, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zerowatch.TrainingRun(
        model, optimizer=optimizer, config=CONFIG, loss=mean_loss, settings=SETTINGS
    )
    data = TensorDataset(torch.randint(256, (64 * BATCH, LENGTHS[-1] + 1)))
    loader = run.loader(data, batch_samples=2 * BATCH)
    while not all_see(folder / "begin"):
        time.sleep(0.1)
    for step, (tokens,) in enumerate(loader.forever(), 1):
        time.sleep(PAUSE_SECONDS)
        run.train_batch(tokens[:, : LENGTHS[step % len(LENGTHS)] + 1])
        run.engine.module.generate(tokens[:, : LENGTHS[0]])
        if step % EVERY_STEPS == 0:
            run.evaluate(tokens)
            run.engine.save_checkpoint(str(folder / "checkpoint"))
        if all_see(folder / "end"):
            break
    run.close()


def mean_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def all_see(file: Path) -> bool:
    """Return on all ranks whether rank 0 finds the file, so that all end at the same step."""
    seen = torch.tensor([float(file.exists())])
    dist.broadcast(seen, 0)
    return bool(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
