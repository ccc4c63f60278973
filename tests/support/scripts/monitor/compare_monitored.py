"""Trains each configuration without and with monitoring, and writes differences as JSON per rank.

`compare_monitored.py FOLDER NAME...`; on GPUs if DS_ACCELERATOR is "cuda".

What PyTorch's Flight Recorder saw of the watched training is the oracle for calls and bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from zerowatch.metrics.catalog import communication, overhead
from zerowatch.runtime.entry_points import watch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ELEMENT_BYTES = {
    "Double": 8,
    "Float": 4,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Bool": 1,
    "Half": 2,
    "BFloat16": 2,
}
ON_CUDA = os.environ.get("DS_ACCELERATOR") == "cuda"
BACKEND = "nccl" if ON_CUDA else "gloo"
# What NCCL's group calls the operations that torch's functions issue.
NCCL_NAMES = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
}
STEPS, ACCUMULATION, MICRO_BATCH, WIDTH = 20 if ON_CUDA else 4, 2, 2, 16
CONFIGURATIONS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, reduce per owner": {"stage": 2, "use_multi_rank_bucket_allreduce": False},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "stage 2, optimizer on cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, optimizer on cpu": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.norm = torch.nn.LayerNorm(3 * WIDTH + 1)
        self.drop = torch.nn.Dropout(0.1)  # shows whether monitoring uses the RNG
        self.outer = torch.nn.Linear(3 * WIDTH + 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.nn.functional.gelu(self.norm(self.inner(x))))
        return (self.outer(hidden).squeeze(-1) - y).square().mean()


def make_engine(zero: dict):
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine) -> torch.Tensor:
    """Train, with a collective of the script's own in each step, in addition to DeepSpeed's."""
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    torch.manual_seed(7)
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            x = torch.randn(MICRO_BATCH, WIDTH, generator=data)
            y = torch.randn(MICRO_BATCH, generator=data)
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        dist.all_gather_object([None] * dist.get_world_size(), float(mean_loss))
    return weights(engine)


def weights(engine) -> torch.Tensor:
    whole = []
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                whole.append(parameter.detach().clone().flatten())
        else:
            whole.append(parameter.detach().clone().flatten())
    return torch.cat(whole).cpu()


def flight_entries() -> list[dict]:
    dump = c10d._dump_nccl_trace if ON_CUDA else c10d._dump_fr_trace
    return pickle.loads(dump())["entries"]


def flight_totals(entries: list[dict]) -> tuple[Counter, Counter]:
    """Sum calls and payload bytes by the operation that the backend ran."""
    calls, sizes = Counter(), Counter()
    for entry in entries:
        op = entry["profiling_name"].removeprefix(f"{BACKEND}:")
        if op == "coalesced":  # stands for calls that have entries of their own
            continue
        op = NCCL_NAMES.get(op, op)
        output = op == "all_gather"
        shapes = entry["output_sizes" if output else "input_sizes"]
        kinds = entry["output_dtypes" if output else "input_dtypes"]
        calls[op] += 1
        if op == "barrier":  # on NCCL an all-reduce of one element
            continue
        for shape, kind in zip(shapes, kinds, strict=False):
            sizes[op] += torch.Size(shape).numel() * ELEMENT_BYTES[kind]
    return calls, sizes


def our_totals(snapshot) -> tuple[Counter, Counter]:
    """Sum calls and bytes by operation; gloo runs reduce_scatter as all_reduce."""
    ran_as = {} if ON_CUDA else {"reduce_scatter": "all_reduce"}
    calls, sizes = Counter(), Counter()
    for (op, _, _), count in snapshot.values[communication.COLLECTIVE_CALLS].items():
        calls[ran_as.get(op, op)] += int(count)
    for (op, _), size in snapshot.values[communication.COLLECTIVE_BYTES].items():
        sizes[ran_as.get(op, op)] += int(size)
    return calls, sizes


def compare(zero: dict) -> dict:
    unmonitored = make_engine(zero)
    expected = train(unmonitored)
    unmonitored.destroy()
    engine = make_engine(zero)
    seen_before = len(flight_entries())
    opened = watch(engine, {"serve": {"enabled": False}})
    coverage = []
    opened.subscribe(
        lambda _: coverage.append(opened.snapshot().value(communication.COMM_COVERAGE_RATIO))
    )
    actual = train(engine)
    entries = flight_entries()[seen_before:]
    opened.close()
    ours, flight = our_totals(opened.snapshot()), flight_totals(entries)
    engine.destroy()
    return {
        "bitwise_equal": torch.equal(expected, actual),
        "trained": not torch.equal(expected, torch.cat([p.flatten() for p in fresh_weights()])),
        "our_calls": ours[0],
        "our_bytes": ours[1],
        "flight_calls": flight[0],
        "flight_bytes": flight[1],
        "coverage": coverage,
        "steps": len(coverage),
        "cost_parts": sorted(
            part for (part,) in opened.snapshot().values.get(overhead.WATCH_SECONDS, {})
        ),
    }


def fresh_weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [parameter.detach() for parameter in Net().parameters()]


if __name__ == "__main__":
    if ON_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(BACKEND, verbose=False)
    results = {name: compare(dict(CONFIGURATIONS[name])) for name in sys.argv[2:]}
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
