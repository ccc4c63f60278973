"""Trains each case on two ranks and writes the bytes held by the engine, and an independent count.

`engine_memory_checks.py FOLDER CASE...`; rank r writes FOLDER/rank-r.json. The independent count:
every tensor of the garbage collector, minus those that existed before the engine; parameters and
optimizer by module, parameter groups and optimizer state.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from async_io import built_extensions, use_built_op
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.utils import groups, safe_get_local_fp32_param
from engine_memory_cases import CASES, Case, Net

from zerowatch.runtime.memory.engine_memory import bytes_by_category, engine_tensors

importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed refuses fp16 on CPUs; torch computes it.
get_accelerator().is_fp16_supported = lambda: True

PARTS = ("ds_tensor", "ds_secondary_tensor")
Storages = dict[int, int]


def storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return bytes by address."""
    seen = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in seen if storage.nbytes()}


def tensors_of_this_process() -> list[torch.Tensor]:
    """Return all tensors known to Python, and their gradients, which only C++ may hold."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


def optimizer_tensors(engine) -> list[torch.Tensor]:
    optimizer = engine.basic_optimizer
    states = [value for state in optimizer.state.values() for value in state.values()]
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    # Stage 3 puts its partition into a parameter group only during the update. On NVMe it is in a
    # tensor only then, and reading it would create one.
    on_nvme = getattr(engine.optimizer, "optimizer_swapper", None) is not None
    module = [] if on_nvme else engine.module.parameters()
    partitioned = [p for p in module if hasattr(p, "ds_tensor")]
    masters = [safe_get_local_fp32_param(p) for p in partitioned if p.ds_tensor.numel()]
    return [t for t in [*optimizer.state, *grouped, *states, *masters] if torch.is_tensor(t)]


def sample(engine, foreign: Storages) -> dict:
    measured = {device: dict(held) for device, held in bytes_by_category(engine).items()}
    module = engine.module
    parameters = storages(
        tensor
        for parameter in [*module.parameters(), *module.buffers()]
        for tensor in (parameter, *(getattr(parameter, name, None) for name in PARTS))
        if tensor is not None
    )
    optimizer = storages(optimizer_tensors(engine))
    measured_bytes, total = sum(sum(held.values()) for held in measured.values()), -1
    for _ in range(50):  # gloo's threads release a call's tensors a moment after its end
        gc.collect()
        everything = storages(tensors_of_this_process())
        total = sum(size for at, size in everything.items() if at not in foreign)
        if total == measured_bytes:
            break
        time.sleep(0.02)
    return {
        "measured": measured,
        "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()),
        "parameters": sum(parameters.values()),
        "found": sorted(
            path for path, _, found in engine_tensors(engine) if any(map(torch.is_tensor, found))
        ),
        "optimizer": sum(size for at, size in optimizer.items() if at not in parameters),
        "total": total,
    }


def train(engine, case: Case, foreign: Storages) -> list[dict]:
    samples = []
    for _ in range(3):
        for _ in range(case.accumulation):
            batch = torch.randn(2, case.width).to(next(engine.module.parameters()).dtype)
            engine.backward(engine(batch))
            if engine.is_gradient_accumulation_boundary():
                samples.append(sample(engine, {**foreign, **storages([batch])}))
            engine.step()
        samples.append(sample(engine, {**foreign, **storages([batch])}))
    return samples


def measure(case: Case, folder: Path) -> list[dict]:
    gc.collect()
    before = tensors_of_this_process()  # kept, so that no address is used again
    torch.manual_seed(0)
    model = Net(case.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=case.ds_config(folder))[
        0
    ]
    del model, optimizer
    samples = train(engine, case, storages(before))
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    plain = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if plain is not None:
        torch.nn.functional.linear = plain
    return samples


if __name__ == "__main__":
    target = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    extensions = built_extensions()
    if extensions is not None:
        use_built_op(extensions)
    gc.freeze()  # what is there by now is no engine's, and costs time at each collection
    results = {name: measure(CASES[name], target) for name in sys.argv[2:] or CASES}
    (target / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
