"""Trains on a GPU and writes the bytes held by the engine after each step; `... REPORT CASE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from engine_memory_rss_job import TOKENS, VOCABULARY, make_engine

from zerowatch.runtime.memory.engine_memory import bytes_by_category

if __name__ == "__main__":
    deepspeed.init_distributed(verbose=False)
    engine = make_engine(sys.argv[2], Path(sys.argv[1]).parent)
    samples = []
    for _ in range(3):
        engine.backward(engine(torch.randint(0, VOCABULARY, (4, TOKENS), device="cuda")))
        engine.step()
        measured = sum(bytes_by_category(engine)["cuda:0"].values())
        statistics = torch.cuda.memory_stats(0)
        samples.append(
            {
                "measured": measured,
                "allocated": statistics["allocated_bytes.all.current"],
                "requested": statistics["requested_bytes.all.current"],
            }
        )
    Path(sys.argv[1]).write_text(json.dumps(samples))
