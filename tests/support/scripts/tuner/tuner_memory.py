"""One rank under memory pressure, because of a leak or of growing batches.

`tuner_memory.py KIND ARM`, of kind "leak" or "growing"; arm "plain" is a DeepSpeed loop, "off" and
"auto" a TrainingRun with that tuner; all under a limit on their addresses. Appends a line to
windows.jsonl after each window, and ends at WINDOWS.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.metrics.catalog import memory

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise compiled for a minute

MIB = 2**20
KIND, ARM = sys.argv[1:]
WIDTH, DEPTH, SAMPLES = 64, 16, 16
# The watch reads memory four times a second; at this pace each step has its own sample.
STEP_SECONDS = 0.0 if ARM == "plain" else 0.26
WINDOWS = 140
FIRST = 8  # windows before the limit is set
FREE_BYTES = (200 if KIND == "leak" else 105) * MIB
LEAK_BYTES = 1 * MIB
LENGTH, LONGER = (384, 0) if KIND == "leak" else (32, 3)  # tokens, and each window more


class Block(torch.nn.Module):
    """Holds activations of 1 KiB per token, with little computation."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, WIDTH)
        self.gates = torch.nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x).relu()
        for gate in self.gates:
            wide = (wide * gate).relu()
        return x + wide


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def batch_of(window: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(window)
    return torch.randint(256, (SAMPLES, LENGTH + LONGER * window), generator=generator)


def config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        # FREE_BYTES are measured with torch's AdamW.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "steps_per_print": 10**9,
    }


def set_limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + FREE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def train(window_of: Callable[[torch.Tensor], dict[str, Any]]) -> None:
    kept = []
    with open("windows.jsonl", "a", buffering=1) as out:
        for window in range(WINDOWS):
            began = time.monotonic()
            if window == FIRST:
                set_limit()
            if KIND == "leak":
                kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))
            print(json.dumps({"window": window, **window_of(batch_of(window))}), file=out)
            time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))


def plain() -> None:
    model = Model()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config()
    )[0]

    def window(batch: torch.Tensor) -> dict[str, Any]:
        found = loss(engine, batch)
        engine.backward(found)
        engine.step()
        return {"loss": float(found.detach())}

    train(window)


def owned() -> None:
    run = zerowatch.TrainingRun(
        Model(),
        config=config(),
        loss=loss,
        tuner=ARM,
        settings={"serve": {"enabled": False}, "memory": {"detailed_sample_seconds": 2.0}},
    )

    def window(batch: torch.Tensor) -> dict[str, Any]:
        result = run.train_batch(batch)
        snapshot = run.watch.snapshot()
        return {
            "loss": result.loss,
            "micro_batch": max(result.micro_batches),
            "replays": result.replays,
            "risk": snapshot.value(memory.OOM_RISK, "cpu"),
            "ooms": {
                outcome: snapshot.value(memory.OOMS, "cpu", outcome)
                for outcome in ("replayed", "fatal", "killed", "raised")
            },
        }

    train(window)
    run.close()


if __name__ == "__main__":
    store = dist.FileStore(str(Path("store").absolute()), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain() if ARM == "plain" else owned()
