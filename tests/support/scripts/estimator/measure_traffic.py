"""Trains each case and writes the collectives of its last steps; run with FILE NAME..."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.utils import groups
from traffic_cases import CASES, MODELS, TOKENS, WIDTH, Case, param_groups

from zerowatch.runtime.entry_points import watch
from zerowatch.runtime.estimator.engine_estimate import estimate_of_engine

importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed rejects fp16 on CPU; torch supports it, and the collectives are the same.
get_accelerator().is_fp16_supported = lambda: True

WARM_UP, MEASURED = 3, 2


def make_engine(case: Case):
    torch.manual_seed(0)
    model = MODELS[case.model]()
    optimizer = torch.optim.AdamW(param_groups(model, case.groups), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=case.ds_config)[0]


def train(engine, case: Case) -> None:
    dtype = next(engine.module.parameters()).dtype
    for _ in range(WARM_UP + MEASURED):
        for _ in range(case.accumulation):
            loss = engine(torch.randn(2, TOKENS * WIDTH).to(dtype))
            engine.backward(loss)
            engine.step()


def measure(case: Case) -> dict:
    engine = make_engine(case)
    monitor = watch(engine, {"serve": {"enabled": False}, "run_log": {"enabled": False}})
    steps: list[dict] = []
    monitor.subscribe(lambda record: steps.append(totals_of(record.collectives)))
    train(engine, case)
    estimated = estimate_of_engine(engine)
    held = {"parameters": parameter_bytes(engine), "optimizer": optimizer_bytes(engine)}
    monitor.close()
    engine.destroy()
    forget_stage_3()
    return {
        "steps": steps[WARM_UP:],
        "engine_estimate": totals_of(estimated.totals()),
        "engine_assumptions": estimated.assumptions,
        "held": held,
    }


def totals_of(collectives) -> dict[str, list[float]]:
    return {
        op: [totals.calls, totals.payload_bytes, totals.wire_bytes]
        for op, totals in collectives.items()
    }


def parameter_bytes(engine) -> int:
    """Return the bytes of parameters that the rank keeps while none are gathered.

    Between steps, frozen parameters have a secondary partition with hpZ.
    """
    parameters = list(engine.module.parameters())
    tensors = [getattr(p, "ds_tensor", p) for p in parameters]
    secondary = [getattr(p, "ds_secondary_tensor", None) for p in parameters]
    tensors += [each for each in secondary if each is not None]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def optimizer_bytes(engine) -> int:
    """Return the bytes of the optimizer's master copies and states."""
    models = {id(parameter) for parameter in engine.module.parameters()}
    state = engine.basic_optimizer.state
    masters = [parameter for parameter in state if id(parameter) not in models]
    states = [value for values in state.values() for value in values.values() if value.numel() > 1]
    return sum(tensor.nbytes for tensor in masters + states)


def forget_stage_3() -> None:
    """Reset the module globals that a stage-3 engine leaves behind."""
    parameter_offload.FWD_MODULE_STACK.clear()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    plain = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if plain is not None:
        torch.nn.functional.linear = plain


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    gc.freeze()  # stage 3 collects garbage at each start: half a second with all of torch in it
    results = {name: measure(CASES[name]) for name in sys.argv[2:]}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
