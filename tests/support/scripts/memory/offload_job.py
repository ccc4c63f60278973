"""Trains with offload, with and without the hooks, and writes the bytes moved, as JSON per rank.

`offload_job.py FOLDER NAME...`. The result also has the bytes counted by an oracle of two memories.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from offload_oracle import SeparateMemories, TwoMemories, held_on_host

from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.offload.traffic import OffloadTraffic

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, WIDTH = 2, 16
CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
UNMANAGED = {"managed_gradient_accumulation": False}  # the script sets step boundaries
FP32_SUMS = BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}
GATHER_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}
# Name: ZeRO's settings, micro-batches, other settings, separate host and device memory.
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any], bool]] = {
    "stage 1": ({"stage": 1, "offload_optimizer": CPU}, 2, {}, False),
    "stage 2, one micro-batch": ({"stage": 2, "offload_optimizer": CPU}, 1, {}, False),
    "stage 2": ({"stage": 2, "offload_optimizer": CPU}, 3, {}, False),
    "stage 2, bf16": ({"stage": 2, "offload_optimizer": CPU}, 2, BF16, False),
    "stage 2, bf16, fp32 sums": ({"stage": 2, "offload_optimizer": CPU}, 2, FP32_SUMS, False),
    "stage 2, unmanaged": ({"stage": 2, "offload_optimizer": CPU}, 2, UNMANAGED, False),
    "stage 3": ({**GATHER_ALL, "offload_optimizer": CPU}, 2, BF16, False),
    "stage 3, two memories": ({**GATHER_ALL, "offload_optimizer": CPU}, 3, BF16, True),
    "stage 3, unmanaged": ({**GATHER_ALL, "offload_optimizer": CPU}, 2, UNMANAGED, True),
    "stage 3, params": (
        {**GATHER_ALL, "offload_optimizer": CPU, "offload_param": CPU},
        2,
        BF16,
        True,
    ),
    "stage 3, persistent params": (
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        2,
        {},
        True,
    ),
    "stage 3, params alone": ({**GATHER_ALL, "offload_param": CPU}, 2, {}, False),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.outer = torch.nn.Linear(3 * WIDTH + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).square().mean()


def make_engine(zero: dict[str, Any], accumulation: int, others: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **others,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, accumulation: int, steps: int = STEPS) -> None:
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for number in range(1, steps * accumulation + 1):
        loss = engine(torch.randn(2, WIDTH, generator=data).to(dtype))
        engine.backward(loss)
        if engine.managed_gradient_accumulation() or number % accumulation == 0:
            engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]


def check(name: str) -> dict[str, Any]:
    zero, accumulation, others, separate = CASES[name]
    plain = make_engine(zero, accumulation, others)
    train(plain, accumulation)
    expected = weights(plain)
    plain.destroy()
    engine = make_engine(zero, accumulation, others)
    before = attributes(engine)
    traffic = OffloadTraffic(engine, fail_open := FailOpen(), EventPool())
    memories = TwoMemories(lambda: held_on_host(engine.optimizer))
    with SeparateMemories(memories) if separate else nullcontext(), memories:
        train(engine, accumulation)
    found = published(traffic)
    traffic.restore()
    after = attributes(engine)
    trained = weights(engine)
    result = {
        "oracle": memories.moved,
        "published": found,
        "failures": fail_open.failures,
        "bitwise_equal": all(torch.equal(a, b) for a, b in zip(expected, trained, strict=True)),
        "restored": before == after,
    }
    engine.destroy()
    return result


def published(traffic: OffloadTraffic) -> dict[str, tuple[float, float]]:
    """Return the published bytes and seconds by direction."""
    recorder = Recorder()
    traffic.publish(recorder)
    values = recorder.snapshot().values
    moved, seconds = values.get(OFFLOAD_BYTES, {}), values.get(OFFLOAD_SECONDS, {})
    return {labels[0]: (moved[labels], seconds[labels]) for labels in moved}


def attributes(engine: Any) -> list[tuple[str, int]]:
    """Return every callable attribute of the patched objects, by identity."""
    owners = [engine.optimizer, *engine.module.parameters()]
    return [(k, id(v)) for owner in owners for k, v in vars(owner).items() if callable(v)]


def move_states() -> dict[str, Any]:
    """Offload and reload the states of a stage 2 engine without offload."""
    engine = make_engine({"stage": 2}, 1, {})
    traffic = OffloadTraffic(engine, FailOpen(), EventPool())
    train(engine, 1)
    quiet, quiet_cost_ns = published(traffic), traffic.cost_ns
    expected = states(engine)
    engine.offload_states(pin_memory=False)
    away = published(traffic)
    engine.reload_states()
    back = published(traffic)
    traffic.restore()
    train(engine, 1, steps=1)
    return {
        "quiet": quiet,
        "quiet_cost_ns": quiet_cost_ns,
        "away": away,
        "back": back,
        "expected": expected,
    }


def states(engine: Any) -> int:
    optimizer = engine.optimizer
    tensors = [*optimizer.single_partition_of_fp32_groups, *optimizer.bit16_groups_flat]
    for state in optimizer.optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return sum(t.numel() * t.element_size() for t in tensors)


def main(folder: Path, names: list[str]) -> None:
    deepspeed.init_distributed("gloo")
    results = {name: check(name) for name in names}
    results["states"] = move_states()
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
