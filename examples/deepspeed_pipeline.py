"""Trains a model in two pipeline stages with DeepSpeed's PipelineModule.

    zerowatch run --standalone --nproc-per-node 2 examples/deepspeed_pipeline.py

The script does not import zerowatch.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

VOCABULARY, WIDTH, LENGTH, MICRO_BATCH, MICRO_BATCHES = 256, 64, 32, 4, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
}


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and the layer's output."""
        return hidden + self.inner(hidden)


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each label."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random tokens, and the next token of each."""
    random = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH), generator=random)
        yield tokens, tokens.roll(-1, 1)


def main() -> None:
    """Train, and print a checksum of each stage's weights."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    steps = options.parse_args().steps
    if not torch.cuda.is_available():  # this op would first be compiled, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)

    model = PipelineModule(
        [
            LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
            *(LayerSpec(Block) for _ in range(4)),
            LayerSpec(nn.Linear, WIDTH, VOCABULARY),
        ],
        num_stages=2,
        loss_fn=token_loss,
        partition_method="parameters",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    data = batches()
    for step in range(1, steps + 1):
        loss = engine.train_batch(data)
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    weights = b"".join(one.detach().cpu().numpy().tobytes() for one in engine.module.parameters())
    print(f"weights of rank {dist.get_rank()} {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
