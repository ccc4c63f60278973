"""Trains each case and writes its ranks' memory; `estimate_job.py FOLDER MODEL [CASES...]`.

Three measurements are independent of the estimate: a walk over Python's objects for tensors, the
live bytes of storages (with peaks as in a device's allocator), and RSS.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from estimate_cases import CASES, FURTHER, MODELS, WITH_ACTIVATIONS, Case
from measure_traffic import forget_stage_3

from zerowatch.runtime.estimator.trace_activations import LiveBytes

importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, STAGE_3_STEPS = 2, 4  # ZeRO-3 prefetches from the fourth on
ALL_CASES = {**CASES, **FURTHER, **WITH_ACTIVATIONS}


def measure(case: Case, model: str) -> dict[str, int]:
    """Train an engine; return the bytes of its last step by measurement."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, rss_before = storages(), rss("VmRSS")
    torch.manual_seed(0)
    live = LiveBytes()
    with live:
        module = MODELS[case.model or model]()
        # Fused, like DeepSpeed's own: torch's other implementation makes copies in its step.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=case.ds_config)[0]
        for _ in range((STAGE_3_STEPS if case.zero["stage"] == 3 else STEPS) - 1):
            step(engine, case, module.words.num_embeddings)
        read = step(engine, case, module.words.num_embeddings, live)
        read["walked"] = sum(bytes_ for key, bytes_ in storages().items() if key not in before)
        read["counted"] = live.live
    read["rss_peak"] -= rss_before
    engine.destroy()
    forget_stage_3()
    return read


def step(engine: Any, case: Case, vocabulary: int, live: LiveBytes | None = None) -> dict[str, int]:
    """Train one step; return the peaks of its passes, of the optimizer's step, and of RSS."""
    if live:
        live.peak = live.live
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak RSS
    for micro_batch in range(case.accumulation):
        ids = torch.randint(0, vocabulary, case.batch)
        logits = engine(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        engine.backward(loss)
        del logits, loss
        passes_peak = live.peak if live else 0
        if live and micro_batch == case.accumulation - 1:
            live.peak = live.live
        engine.step()
    if not live:
        return {}
    return {
        "passes_peak": passes_peak,
        "step_peak": live.peak,
        "rss_peak": rss("VmHWM"),
    }


def storages() -> dict[int, int]:
    """Return the bytes of each storage of a tensor that Python references."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor) or each.is_meta:
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def rss(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


if __name__ == "__main__":
    folder, model = Path(sys.argv[1]), sys.argv[2]
    names = sys.argv[3:] or list(CASES)
    deepspeed.init_distributed("gloo", verbose=False)
    measure(ALL_CASES[names[0]], model)  # libraries allocate in the first case
    gc.collect()
    gc.freeze()
    results = {name: measure(ALL_CASES[name], model) for name in names}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
