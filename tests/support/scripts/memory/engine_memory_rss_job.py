"""Trains a model of 20 million parameters and writes what its peak RSS was made of.

`engine_memory_rss_job.py FOLDER CASE STEPS`; rank r writes FOLDER/rank-r.json: for each step bytes
by category, the peak of forward and backward, and the baseline.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from engine_memory_cases import CASES

from zerowatch.runtime.devices.host_memory import HostMemory
from zerowatch.runtime.devices.libc_memory import free_heap_bytes
from zerowatch.runtime.memory.categories import baseline, categories_at_peak
from zerowatch.runtime.memory.engine_memory import bytes_by_category

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VOCABULARY, WIDTH, LAYERS, TOKENS = 12_000, 384, 6, 128


class Model(torch.nn.Module):
    """A small language model: 20 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.Sequential(
            *(
                torch.nn.TransformerEncoderLayer(
                    WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.words(ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def make_engine(name: str, folder: Path):
    torch.manual_seed(0)
    model = Model()
    config = CASES[name].ds_config(folder)
    del config["zero_optimization"]["reduce_bucket_size"]  # DeepSpeed's own: half a billion
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine, host: HostMemory) -> tuple:
    """Return engine memory before and after the update, floor and peak of forward and backward."""
    ids = torch.randint(0, VOCABULARY, (4, TOKENS))
    host.read()
    engine.backward(engine(ids))
    peak = host.read()["peak_allocated"]
    before = bytes_by_category(engine)["cpu"]
    engine.step()
    return before, bytes_by_category(engine)["cpu"], in_use(host), peak


def in_use(host: HostMemory) -> float:
    """Return RSS without what the C library keeps for the next allocations."""
    return host.read()["allocated"] - free_heap_bytes()


def main(folder: Path, name: str, steps: int) -> None:
    engine = make_engine(name, folder)
    host = HostMemory(reset_peak=True)
    others = baseline("cpu", in_use(host), bytes_by_category(engine)["cpu"])
    report = []
    for _ in range(steps):
        before, after, floor, peak = step(engine, host)
        categories = categories_at_peak(before, after, floor, peak, others)
        report.append({"categories": categories, "peak": peak, "baseline": others})
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
