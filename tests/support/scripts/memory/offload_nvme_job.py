"""Trains at stage 3 with optimizer and parameters on NVMe; writes the bytes moved as JSON per rank.

`offload_nvme_job.py FOLDER EXTENSIONS NAME...`. The result also has the files that DeepSpeed leaves
in FOLDER. EXTENSIONS is torch's folder of built extensions: DeepSpeed's op for asynchronous I/O is
taken from there, as building it takes minutes.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from async_io import use_built_op
from offload_job import attributes, held_on_host, published, weights
from offload_oracle import SeparateMemories, TwoMemories

from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.offload.traffic import OffloadTraffic

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
STEPS, ACCUMULATION, WIDTH = 3, 2, 1024  # a rank's part of a weight is 2 MiB: below 1 MiB none goes


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x))).square().mean()


def make_engine(folder: Path, params: bool, pipeline: bool) -> Any:
    torch.manual_seed(0)
    model = Net()
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 8}
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": nvme | {"pipeline_read": pipeline, "pipeline_write": pipeline},
    }
    if params:
        zero["offload_param"] = nvme | {"buffer_size": WIDTH * WIDTH, "max_in_cpu": 0}
    config = {
        "bf16": {"enabled": params},  # DeepSpeed 0.19.8 takes parameters in no other type to NVMe
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def data() -> torch.Generator:
    return torch.Generator().manual_seed(1 + dist.get_rank())


def train(engine: Any, source: torch.Generator, steps: int) -> None:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for _ in range(steps * ACCUMULATION):
        engine.backward(engine(torch.randn(2, WIDTH, generator=source).to(dtype)))
        engine.step()


def check(folder: Path, params: bool, pipeline: bool) -> dict[str, Any]:
    plain = make_engine(folder / "plain", params, pipeline)
    train(plain, data(), STEPS)
    expected = weights(plain)
    plain.destroy()
    engine = make_engine(folder / "watched", params, pipeline)
    before, handles = attributes(engine), handles_of(engine)
    traffic = OffloadTraffic(engine, fail_open := FailOpen(), EventPool())
    memories = TwoMemories(lambda: held_on_host(engine.optimizer))
    source, per_step, written, read = data(), [], disk("write_bytes"), disk("read_bytes")
    faults = major_faults()
    with SeparateMemories(memories), memories:
        for _ in range(STEPS):
            train(engine, source, 1)
            per_step.append(published(traffic))
    result = {
        "per_step": per_step,
        "oracle": memories.moved,
        "failures": fail_open.failures,
        "files": {p.name: p.stat().st_size for p in own_files(folder / "watched")},
        "disk": [disk("write_bytes") - written, disk("read_bytes") - read],
        "faults": major_faults() - faults,
    }
    traffic.restore()
    result["restored"] = (before, handles) == (attributes(engine), handles_of(engine))
    result["bitwise_equal"] = all(
        torch.equal(a, b) for a, b in zip(expected, weights(engine), strict=True)
    )
    engine.destroy()
    return result


def handles_of(engine: Any) -> list[int]:
    swapper = engine.optimizer.optimizer_swapper
    owners = [swapper, swapper.gradient_swapper]
    param_swapper = next(engine.module.parameters()).nvme_swapper
    owners += [param_swapper] if param_swapper is not None else []
    return [id(v) for owner in owners for k, v in vars(owner).items() if k.endswith("handle")]


def own_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.swp") if p.parent.name == f"rank{dist.get_rank()}"]


def disk(name: str) -> int:
    """Return what the kernel counts for this process, in bytes."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[name])


def major_faults() -> int:
    """Return how many pages of its files the kernel had to read again: it took them for others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def main(folder: Path, names: list[str]) -> None:
    deepspeed.init_distributed("gloo")
    cases = {
        "optimizer": (False, False),
        "optimizer, pipelined": (False, True),
        "both": (True, False),
    }
    results = {name: check(folder / name, *cases[name]) for name in names}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    use_built_op(Path(sys.argv[2]))
    main(Path(sys.argv[1]), sys.argv[3:])
