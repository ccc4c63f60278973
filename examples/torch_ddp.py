"""Trains a small language model with DistributedDataParallel, without DeepSpeed.

Start it with monitoring, or with torchrun to compare:

    zerowatch run --standalone --nproc-per-node 2 examples/torch_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/torch_ddp.py

The script does not import zerowatch. From the second optimizer step on, its model is monitored.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, WIDTH, LENGTH = 256, 64, 32


class LanguageModel(nn.Module):
    """A transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=input_ids.device)
        hidden = self.layers(self.embedding(input_ids), mask=mask, is_causal=True)
        scores = self.head(hidden[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), input_ids[:, 1:].flatten())


def main() -> None:
    """Join the process group, and train."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    arguments = options.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(device, arguments.steps, arguments.accumulate)
    # Now the model is gone. Had it the last reference to the group, torch 2.13 could hang: with the
    # GIL held it would join a thread of gloo that waits for the GIL.
    gc.collect()
    dist.destroy_process_group()


def train(device: torch.device, num_steps: int, accumulate: int) -> None:
    """Train, and print a checksum of the weights."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (64, LENGTH))
    dataset = TensorDataset(tokens)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(LanguageModel().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    micro_batches = batches(loader, sampler)
    for step in range(1, num_steps + 1):
        losses = []
        for index in range(accumulate):
            is_last = index == accumulate - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(next(micro_batches).to(device))
                (loss / accumulate).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.6f}", flush=True)
    if dist.get_rank() == 0:
        weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()}")


def batches(loader, sampler):
    """Yield micro-batches without end, in another order each epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            yield batch
        epoch += 1


if __name__ == "__main__":
    main()
