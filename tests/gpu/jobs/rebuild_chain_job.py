"""Rebuilds one engine through ZeRO 0, 1, 2, 3, offload and 0; `FOLDER AdamW|FusedAdam`."""

from __future__ import annotations

import gc
import sys
from typing import Any

import deepspeed
import torch
from gpu.jobs import engines

from zerowatch.runtime.common.host_group import HostGroup
from zerowatch.runtime.engine.rebuild.engine_replacement import rebuild

WIDTH, COUNT, STEPS = 1024, 4, 3
CPU = {"device": "cpu", "pin_memory": True}
CHAIN: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("stage 1", 1, {}),
    ("stage 2", 2, {}),
    ("stage 3", 3, {}),
    ("stage 2, offload", 2, {"offload_optimizer": CPU}),
    ("stage 0", 0, {}),
)


class Chain:
    def __init__(self, optimizer: str) -> None:
        self.own = optimizer == "FusedAdam"
        model = engines.layers(WIDTH, COUNT)
        self.client = None if self.own else torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine = self.make(model, self.config(0, {}))
        self.data = torch.Generator().manual_seed(1)

    def config(self, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
        config = engines.ds_config(stage, **zero)
        if self.own:  # DeepSpeed's default: FusedAdam on a GPU
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        return config

    def make(self, model: torch.nn.Module, config: dict[str, Any]) -> Any:
        parameters = list(model.parameters())
        return deepspeed.initialize(
            model=model, model_parameters=parameters, optimizer=self.client, config=config
        )[0]

    def train(self) -> None:
        for _ in range(STEPS):
            batch = torch.randn(4, WIDTH, generator=self.data).to(self.engine.device)
            engines.step(self.engine, batch)


def allocated() -> int:
    gc.collect()
    if not engines.ON_CUDA:
        return 0
    engines.synchronize()
    return torch.cuda.memory_allocated()


def unbroken(optimizer: str) -> torch.Tensor:
    """Return the weights of a training without rebuilds."""
    chain = Chain(optimizer)
    for _ in range(len(CHAIN) + 1):
        chain.train()
    found = engines.weights(chain.engine)
    engines.give_up(chain.engine)
    return found


def main(optimizer: str) -> None:
    engines.meet()
    expected = unbroken(optimizer)
    group, chain = HostGroup(), Chain(optimizer)
    chain.train()
    name_of_optimizer = type(getattr(chain.engine, "basic_optimizer", None)).__name__
    before, found = allocated(), []
    for name, stage, zero in CHAIN:
        weights = engines.weights(chain.engine)
        chain.engine = rebuild(
            chain.engine, chain.config(stage, zero), make_engine=chain.make, host_group=group
        )
        kept = torch.equal(weights, engines.weights(chain.engine))
        found.append({"name": name, "kept": kept, "stage": chain.engine.zero_optimization_stage()})
        chain.train()
    actual = engines.weights(chain.engine)
    engines.report(
        {
            "rebuilds": found,
            "optimizer": name_of_optimizer,
            "difference": float((actual - expected).norm() / expected.norm()),
            "allocated before": before,
            "allocated after": allocated(),
        }
    )


if __name__ == "__main__":
    main(sys.argv[2])
