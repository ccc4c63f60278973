"""The job that the benches watch: a small GPT under ZeRO on gloo, fed with random tokens.

Imported by rank scripts only; it knows nothing of zerowatch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VOCABULARY = 256
CONTEXT = 64
# Small enough that a step has several collectives even for a small model.
BUCKET_ELEMENTS = 200_000


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm_attention = torch.nn.LayerNorm(width)
        self.query_key_value = torch.nn.Linear(width, 3 * width)
        self.attention_out = torch.nn.Linear(width, width)
        self.norm_hidden = torch.nn.LayerNorm(width)
        self.hidden = torch.nn.Linear(width, 4 * width)
        self.hidden_out = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.hidden_out(functional.gelu(self.hidden(self.norm_hidden(x))))


class TinyGpt(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class RandomTokens(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        rows = torch.randint(0, VOCABULARY, (512, CONTEXT + 1), generator=generator)
        while True:
            yield from rows


class Training:
    """An engine and its data; `step()` is one optimizer step."""

    def __init__(self, *, stage: int, width: int = 128, layers: int = 4, batch: int = 8) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        meet()
        model = TinyGpt(width, layers)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            config=_ds_config(stage, batch),
        )
        self.use_batch(batch)

    def use_batch(self, batch: int) -> None:
        """Draw `batch` sequences a step from now on."""
        self.batch = batch
        self._batches = iter(DataLoader(RandomTokens(), batch_size=batch))

    def step(self) -> None:
        loss = self.engine(next(self._batches))
        self.engine.backward(loss)
        self.engine.step()

    def time_steps(self, num_steps: int) -> float:
        """Return the mean seconds of a step, over a block that all ranks begin together."""
        torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        return (time.perf_counter() - begin) / num_steps

    def aim_at(self, seconds: float) -> None:
        """Choose the batch so that a step takes about `seconds`; the same on all ranks."""
        for _ in range(3):
            self.time_steps(3)
            measured = torch.tensor(self.time_steps(5))
            torch.distributed.all_reduce(measured, torch.distributed.ReduceOp.MAX)
            self.use_batch(max(1, round(self.batch * seconds / measured.item())))


def arguments() -> dict[str, Any]:
    """Return what the launcher asks this rank to do."""
    return dict(json.loads(sys.argv[1]))


def meet() -> None:
    """Join the process group of the ranks that the launcher started; they meet in a file."""
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{os.environ['BENCH_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        auto_mpi_discovery=False,
        verbose=False,
    )


def report(findings: object) -> None:
    """Hand what this rank found to the launcher, and leave the process group."""
    Path(os.environ["BENCH_REPORT"]).write_text(json.dumps(findings))
    torch.distributed.destroy_process_group()


def _ds_config(stage: int, batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
        },
    }
