"""Trains until it runs out of memory under a limit that it sets itself, and exits with the error.

The limit is on the address space on CPU, and on the memory that torch may reserve on CUDA.

Arguments: `leak` (the model keeps a tensor of each step), `long` (lengths vary and one batch is far
too long) or `short` (a clean exit after some steps); and a memory cgroup to move into, for a leak
that the kernel ends instead. Its own measurements go to measured.json.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zerowatch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled for a minute

MIB = 2**20
ON_CUDA = get_accelerator().device_name() == "cuda"
KIND = sys.argv[1]
WIDTH, SAMPLES = 1024, 8
# The watch reads memory four times a second, so each step has a separate reading.
STEP_SECONDS = 0.27
CGROUPS = sys.argv[2:]
# Some 250 MiB of addresses go to the threads of the watch, which touch little of them.
ROOM_BYTES = (1000 if KIND == "leak" else 600) * MIB
LEAK_BYTES = (40 if CGROUPS else 9) * MIB
SHORTEST, LONGEST, FAR_TOO_LONG, FATAL_STEP = 32, 512 if KIND == "long" else 128, 8192, 36


class Model(torch.nn.Module):
    """Has activations of 16 KiB a token; leaks a tensor each step in one kind of job."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 64)
        self.wide = torch.nn.Linear(64, WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))  # no large product: steps mostly wait
        self.narrow = torch.nn.Linear(WIDTH, 1)
        self.kept: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if KIND == "leak":
            self.kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8, device=input_ids.device))
        hidden = self.wide(self.embedding(input_ids)).relu()
        return self.narrow((hidden * self.scale).relu()).square().mean()


def sizes() -> dict[str, int]:
    if ON_CUDA:
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    lines = Path("/proc/self/status").read_text().splitlines()
    found = (line.split() for line in lines if line.startswith(("VmRSS:", "RssFile:", "VmSize:")))
    by_name = {name.rstrip(":"): int(size) * 1024 for name, size, _ in found}
    in_use = by_name["VmRSS"] - by_name.get("RssFile", 0)  # the kernel can drop pages of files
    return {"in_use": in_use, "VmSize": by_name["VmSize"]}


def step(engine: deepspeed.DeepSpeedEngine, length: int) -> None:
    engine.backward(engine(torch.randint(256, (SAMPLES, length), device=engine.device)))
    engine.step()


def set_limit() -> int:
    """Set a limit that leaves memory for some more steps, and return it."""
    if ON_CUDA:
        limit = torch.cuda.memory_reserved() + ROOM_BYTES
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        return limit
    limit = sizes()["VmSize"] + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return limit


def train(engine: deepspeed.DeepSpeedEngine, measured: dict[str, object]) -> None:
    chance = random.Random(0)
    while KIND != "short" or engine.global_steps < 10:
        begin = time.monotonic()
        length = chance.randrange(SHORTEST, LONGEST + 1)
        if KIND == "long" and engine.global_steps + 1 == FATAL_STEP:
            length = FAR_TOO_LONG
        measured["shape"] = [SAMPLES, length]
        step(engine, length)
        time.sleep(max(0.0, begin + STEP_SECONDS - time.monotonic()))


if __name__ == "__main__":
    for cgroup in CGROUPS:
        Path(cgroup, "cgroup.procs").write_text("0")
    store = dist.FileStore(str(Path("store").absolute()), 1)
    dist.init_process_group("nccl" if ON_CUDA else "gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    model = Model()
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            # On CUDA DeepSpeed's own is compiled by nvcc, which a machine may lack.
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": ON_CUDA}},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
            "steps_per_print": 10**9,
        },
    )[0]
    step(engine, LONGEST)  # allocates everything that training needs once
    measured: dict[str, object] = {
        "limit": None if CGROUPS or KIND == "short" else set_limit(),
        "parameters": sum(each.numel() * each.element_size() for each in model.parameters()),
    }
    settings = {"memory": {"detailed_sample_seconds": 2.0}, "flops": {"method": "off"}}
    zerowatch.watch(engine, settings)
    try:
        train(engine, measured)
    except RuntimeError as error:
        measured |= {
            "step": engine.global_steps,
            "type": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "chained": [str(error.__cause__), str(error.__context__)],
            "at_the_end": sizes(),
        }
        Path("measured.json").write_text(json.dumps(measured))
        raise
