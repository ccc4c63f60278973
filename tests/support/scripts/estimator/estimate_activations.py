"""Runs forward and backward passes and writes the growth of RSS; takes a FILE and names."""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path

import torch
from estimate_cases import SHAPES, Decoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(build: partial[Decoder], dtype: str, samples: int, tokens: int) -> dict[str, int]:
    """Return the growth of the second pass; libraries allocate in the first."""
    module = build().to(DTYPES[dtype])
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", None))
    for _ in range(2):
        ids = torch.randint(0, module.words.num_embeddings, (samples, tokens))
        gc.collect()
        before = rss("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak RSS
        logits = module(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        grown = rss("VmHWM") - before
        del logits, loss
    return {"rss": grown}


def rss(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


if __name__ == "__main__":
    results = {name: measure(*SHAPES[name]) for name in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(results))
