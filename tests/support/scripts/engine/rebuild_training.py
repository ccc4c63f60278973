"""Model with all kinds of state that a rebuild must keep, its engines, and their training."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from rebuild_cases import Case, Engine

from zerowatch.runtime.engine.rebuild.teardown import teardown

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed refuses fp16 on CPUs; torch computes it.
get_accelerator().is_fp16_supported = lambda: True

WIDTH, ODD = 12, 29  # an odd number divides evenly over no ranks
EPSILON = 1e-4  # of Adam and its variants, which otherwise amplify rounding of tiny gradients
# DeepSpeed's default: FusedAdam, which counts the updates of a group in its last tensor only.
OWN = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": EPSILON}}}


class Net(torch.nn.Module):
    """Tied weights, a frozen parameter, persistent and other buffers, odd sizes, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(17, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, ODD)
        self.norm = torch.nn.LayerNorm(ODD)
        self.drop = torch.nn.Dropout(0.1)  # shows whether a rebuild uses the RNG
        self.outer = torch.nn.Linear(ODD, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.words.weight
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.rand(WIDTH), persistent=False)
        self.register_buffer("average", torch.zeros(ODD))
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids).mean(1) * self.mask.to(self.words.weight.dtype)
        hidden = self.drop(torch.tanh(self.norm(self.inner(hidden))))
        self.average.lerp_(hidden.detach().mean(0).to(self.average.dtype), 0.1)
        hidden = self.frozen(torch.tanh(self.outer(hidden))) * self.gain
        return torch.nn.functional.cross_entropy(self.head(hidden).float(), ids[:, 0])


class Run:
    """One training of a case; `stop` frees the engine."""

    def __init__(self, case: Case, optimizer: Any = None) -> None:
        self.case = case
        torch.manual_seed(0)
        model = Net()
        # Made once: in stage 3, the parameters have no shapes later.
        self.groups: Any = _groups(model)
        self.optimizer = optimizer or _optimizer(case.optimizer, model)
        self.schedule: Any = None
        if case.schedule == "torch":
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.engine = self.make_engine(model, self.config_of(case.old))
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())
        torch.manual_seed(7 + dist.get_rank())

    def make_engine(self, model: torch.nn.Module, config: dict[str, Any]) -> Any:
        groups = [dict(group) for group in self.groups]  # an optimizer changes them
        return deepspeed.initialize(
            model=model,
            model_parameters=groups if self.optimizer is None else _trained(model),
            optimizer=self.optimizer,
            lr_scheduler=self.schedule,
            config=config,
        )[0]

    def config_of(self, engine: Engine) -> dict[str, Any]:
        return self.case.ds_config(engine) | (OWN if self.case.optimizer == "config" else {})

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            for _ in range(2):
                loss = self.engine(torch.randint(0, 17, (2, 5), generator=self.data))
                self.engine.backward(loss / 2, scale_wrt_gas=False)
                losses.append(float(loss))
            self.engine.step()
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        whole = {}
        for name, parameter in self.engine.module.named_parameters():
            if hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    whole[name] = parameter.detach().clone()
            else:
                whole[name] = parameter.detach().clone()
        return whole | {
            f"buffer {name}": buffer.clone() for name, buffer in self.engine.module.named_buffers()
        }

    def stop(self) -> None:
        teardown(self.engine)
        self.engine = self.optimizer = self.schedule = self.groups = None


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups of several tensors each."""
    trained = _trained(model)
    return [
        {"params": [each for each in trained if each.ndim > 1], "lr": 0.02},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _optimizer(name: str, model: torch.nn.Module) -> Any:
    groups = _groups(model)
    match name:
        case "config":
            return None
        case "factory":
            return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=EPSILON)
        case "Adagrad":  # DeepSpeed makes one group of its groups
            return torch.optim.Adagrad(_trained(model), lr=0.01, eps=EPSILON)
        case "RMSprop":  # it divides by less than Adam at first
            return torch.optim.RMSprop(groups, lr=0.003, momentum=0.9, eps=0.01)
        case "SGD":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    return getattr(torch.optim, name)(groups, lr=0.01, eps=EPSILON)
