r"""Trains a tiny GPT-2 with DeepSpeed, and writes zerowatch's values to experiment trackers.

export ZEROWATCH_SINKS_NAMES=tensorboard
zerowatch run --standalone --nproc-per-node 2 examples/experiment_trackers.py

zerowatch run --standalone --nproc-per-node 2 examples/experiment_trackers.py \
    --deepspeed-monitor tensorboard csv_monitor
"""

import argparse

import deepspeed
import torch
from tiny_gpt import Sentences, fingerprint, tiny_gpt

MONITORS = {
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "tensorboard"},
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "csv"},
    "wandb": {"enabled": True, "project": "tiny-gpt"},
}

parser = argparse.ArgumentParser()
parser.add_argument(
    "--deepspeed-monitor", nargs="*", default=[], choices=MONITORS, help="monitors of the ds config"
)
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    **{name: MONITORS[name] for name in options.deepspeed_monitor},
}
model = tiny_gpt()
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    training_data=Sentences(),
    config=config,
)
losses, window = [], []
for batch in loader:
    batch = {name: ids.to(engine.device) for name, ids in batch.items()}
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    window.append(loss.item())
    if len(window) == 2:
        losses.append(sum(window) / 2)
        window.clear()
if engine.global_rank == 0:
    print("losses:", *losses)
    print("weights:", fingerprint(model))
