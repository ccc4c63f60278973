"""Saves runs of many engines, and loads checkpoints that another number of ranks saved.

`reshard_checks.py FOLDER save NAME...` trains each engine, saves it half-way, and trains on. Every
second engine is saved in the background.
`reshard_checks.py FOLDER load NAME...` loads these checkpoints, and trains on. Both write what they
found to FOLDER, per rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from resume_checks import ENGINES, QUIET

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIGS: dict[str, dict[str, Any]] = {
    **ENGINES,
    "two groups, stage 2": {"zero_optimization": {"stage": 2}},
    "two groups, stage 3": {"zero_optimization": {"stage": 3}},
    "rebuilt, stage 2": {"zero_optimization": {"stage": 2}},
}
SAVED, STEPS, BATCH, SAMPLES, WIDTH = 3, 8, 12, 60, 9


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"id": index, "x": torch.randn(WIDTH, generator=generator)}


class Net(torch.nn.Module):
    """Has a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.frozen = torch.nn.Linear(2 * WIDTH + 1, WIDTH + 2)
        self.frozen.requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH + 2, 1)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.body(x)))
        return (self.head(hidden) * self.scale).squeeze(-1)


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"].to(next(model.parameters()).dtype)
    return ((model(x).float() - batch["x"].sum(dim=1)) ** 2).mean()


def two_groups(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    biases = [each for each in parameters if each.ndim == 1]
    weights = [each for each in parameters if each.ndim > 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.02
    )


def new_run(name: str, seed: int) -> zerowatch.TrainingRun:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        **CONFIGS[name],
    }
    has_groups = name.startswith("two groups")
    if not has_groups:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02}}
    return zerowatch.TrainingRun(
        Net(),
        config=config,
        loss=loss,
        optimizer=two_groups if has_groups else None,
        settings=QUIET,
    )


def full_state(run: zerowatch.TrainingRun) -> dict[str, Any]:
    """Return weights, master weights and moments as DeepSpeed gathers them, and all counts."""
    state: dict[str, Any] = {"counts": [run.steps, run.samples, run.engine.global_steps]}
    state["rate"] = run.engine.get_lr()
    with deepspeed.zero.GatheredParameters(list(run.module.parameters())):
        for name, parameter in run.module.named_parameters():
            state[name] = parameter.detach().double().flatten().tolist()
    for name, buffer in run.module.named_buffers():
        state[name] = buffer.double().tolist()
    link = getattr(run.engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # DeepSpeed links the states to the parameters at the first step only
        link()
    if run.engine.zero_optimization_stage() == 0:  # each rank has all of it
        for path, tensor in tensors(run.engine.optimizer.state_dict(), "optimizer"):
            state[path] = tensor.double().flatten().tolist()
        return state
    for name, parameter in run.module.named_parameters():
        if parameter.requires_grad:
            values = {"master": safe_get_full_fp32_param(parameter)}
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = safe_get_full_optimizer_state(parameter, key)
            for key, value in values.items():
                state[f"{name} {key}"] = value.double().flatten().tolist()
    return state


def tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested value, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(part, f"{path} {key}")


def train(run: zerowatch.TrainingRun, batches: Any, until: int) -> list[dict[str, Any]]:
    steps = []
    while run.steps < until:
        batch = next(batches)
        done = run.train_batch(batch)
        micro_batches = list(done.micro_batches)
        steps.append(
            {"ids": batch["id"].tolist(), "loss": done.loss, "micro_batches": micro_batches}
        )
    return steps


def save(name: str, folder: Path) -> dict[str, Any]:
    run = new_run(name, seed=0)
    if name.startswith("rebuilt"):
        run.rebuild({"zero_optimization": {"stage": 3}})
    batches = run.loader(Samples(), batch_samples=BATCH, seed=1).forever()
    train(run, batches, SAVED)
    in_background = list(CONFIGS).index(name) % 2 == 1
    run.save(folder / name.replace(" ", "-"), background=in_background)
    return end(run, {"state": full_state(run), "steps": train(run, batches, STEPS)})


def load(name: str, folder: Path) -> dict[str, Any]:
    run = new_run(name, seed=1)
    batches = run.loader(Samples(), batch_samples=BATCH, seed=1).forever()
    run.load(folder / name.replace(" ", "-"))
    return end(run, {"state": full_state(run), "steps": train(run, batches, STEPS)})


def end(run: zerowatch.TrainingRun, found: dict[str, Any]) -> dict[str, Any]:
    found["weights"] = {
        name: value for name, value in full_state(run).items() if name.endswith(("weight", "bias"))
    }
    run.close()
    run.engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    return found


if __name__ == "__main__":
    target, action = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    function = {"save": save, "load": load}[action]
    found = {name: function(name, target) for name in sys.argv[3:]}
    world_size = dist.get_world_size()
    (target / f"{action}-{world_size}-{dist.get_rank()}.json").write_text(json.dumps(found))
