"""Trains on a GPU and writes what is held there at each step's end; `... REPORT CASE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from holdings_rss_job import TOKENS, VOCABULARY, make_engine

from zerowatch.runtime.memory.engine_memory import bytes_by_category

if __name__ == "__main__":
    deepspeed.init_distributed(verbose=False)
    engine = make_engine(sys.argv[2], Path(sys.argv[1]).parent)
    looks = []
    for _ in range(3):
        engine.backward(engine(torch.randint(0, VOCABULARY, (4, TOKENS), device="cuda")))
        engine.step()
        told = sum(bytes_by_category(engine)["cuda:0"].values())
        looks.append({"told": told, "allocated": torch.cuda.memory_allocated(0)})
    Path(sys.argv[1]).write_text(json.dumps(looks))
