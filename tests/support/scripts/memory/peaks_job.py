"""Trains a small transformer on batches of varying length and records the memory of each step.

peaks_job.py SERIES '{"pattern": ..., "steps": ..., ...}', a job of one rank. It reads the kernel or
torch directly: the code under test must not depend on the package's own hooks.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Iterator

import deepspeed
import torch
from torch.nn import functional

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VOCABULARY = 512
WIDTH = 128
HEADS = 4
LAYERS = 4
SAMPLES = 8
SHORTEST, LONGEST = 16, 512
USUAL_LENGTH = 150

MicroBatches = list[tuple[int, int]]


class Block(torch.nn.Module):
    """Pre-norm; one that keeps scores is attention as written by hand: length^2 for backward."""

    def __init__(self, keeps_scores: bool) -> None:
        super().__init__()
        self.keeps_scores = keeps_scores
        self.norm_attention = torch.nn.LayerNorm(WIDTH)
        self.query_key_value = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm_hidden = torch.nn.LayerNorm(WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.hidden_out = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if self.keeps_scores:
            scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            mixed = functional.softmax(scores, dim=-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.hidden_out(functional.gelu(self.hidden(self.norm_hidden(x))))


class Transformer(torch.nn.Module):
    def __init__(self, keeps_scores: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(keeps_scores) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class HostReader:
    """The peak of RSS since the last reading, and RSS now, in bytes."""

    def __init__(self) -> None:
        self._mark = open("/proc/self/clear_refs", "w")  # noqa: SIM115 - for the whole run
        self.read()

    def read(self) -> tuple[int, int]:
        with open("/proc/self/status") as status:
            sizes = dict(line.split(":", 1) for line in status)
        self._mark.write("5")
        self._mark.flush()
        peak, now = (int(sizes[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))
        return peak, now


class CudaReader:
    """The peak of what torch has allocated since the last reading, and what it has now."""

    def read(self) -> tuple[int, int]:
        peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak, now


def steps_of(pattern: str, steps: int, micro_batches: int, seed: int) -> list[MicroBatches]:
    """Return samples and length of each step's micro-batches.

    `random` has the long tail of texts. `rising` goes from the shortest to the longest; `sorted`
    does so twice, as loaders do that sort within a window. `budget` holds samples times length.
    """
    chance = random.Random(seed)
    drawn = (
        min(LONGEST, max(SHORTEST, round(chance.lognormvariate(math.log(USUAL_LENGTH), 0.7))))
        for _ in range(steps * micro_batches)
    )
    lengths = list(drawn)
    half = len(lengths) // 2
    shapes = {
        "fixed": lambda: [(SAMPLES, LONGEST // 2)] * len(lengths),
        "random": lambda: [(SAMPLES, length) for length in lengths],
        "rising": lambda: [(SAMPLES, length) for length in sorted(lengths)],
        "sorted": lambda: [
            (SAMPLES, length) for length in (*sorted(lengths[:half]), *sorted(lengths[half:]))
        ],
        "budget": lambda: [
            (max(1, SAMPLES * LONGEST // 2 // length), length) for length in lengths
        ],
    }[pattern]()
    return [shapes[at : at + micro_batches] for at in range(0, len(shapes), micro_batches)]


def make_engine(stage: int, keeps_scores: bool, micro_batches: int):
    torch.manual_seed(0)
    model = Transformer(keeps_scores)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000},
        },
    )
    return engine


def train(engine, steps: list[MicroBatches], leak_bytes: int) -> Iterator[dict]:
    """Train, and yield the memory of each step; each step leaks `leak_bytes`."""
    reader = HostReader() if engine.device.type == "cpu" else CudaReader()
    leaked = []
    for step, micro_batches in enumerate(steps):
        for shape in micro_batches:
            tokens = torch.randint(0, VOCABULARY, shape, device=engine.device)
            engine.backward(engine(tokens))
            engine.step()
        if leak_bytes:
            leaked.append(torch.ones(leak_bytes, dtype=torch.uint8, device=engine.device))
        peak, floor = reader.read()
        distinct = [list(shape) for shape in dict.fromkeys(micro_batches)]
        yield {"step": step, "peak": peak, "floor": floor, "shapes": distinct}


def main(
    series: str,
    *,
    pattern: str,
    steps: int,
    seed: int = 0,
    stage: int = 1,
    keeps_scores: bool = True,
    micro_batches: int = 1,
    leak_bytes: int = 0,
) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(
        "gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else "nccl",
        init_method=f"file://{series}.store",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
    )
    engine = make_engine(stage, keeps_scores, micro_batches)
    with open(series, "w") as output:
        for point in train(engine, steps_of(pattern, steps, micro_batches, seed), leak_bytes):
            print(json.dumps(point), file=output, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    main(sys.argv[1], **json.loads(sys.argv[2]))
