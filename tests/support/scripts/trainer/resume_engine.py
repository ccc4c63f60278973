"""A fake engine that saves and loads as DeepSpeed's does, and fake host groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch


class SingleRankHostGroup:
    """Host group of one rank."""

    rank = 0
    world_size = 1

    def all_max(self, value):
        return value

    def all_gather(self, values):
        return np.array([values], dtype=float)

    def all_gather_text(self, text):
        return [text]

    def broadcast_text(self, text):
        return text


class TwoDisks:
    """Host group of one rank of two; the other's values are given in order, and then are 0."""

    rank = 1
    world_size = 2

    def __init__(self, *others):
        self._others = list(others)

    def all_gather(self, values):
        other = self._others.pop(0) if self._others else [0.0] * len(values)
        return np.array([other, values], dtype=float)


class PlainEngine:
    """A linear layer; counts steps, and writes two files, as each rank of DeepSpeed does."""

    def __init__(self, width: int = 4, stage: int = 2) -> None:
        self.module = torch.nn.Linear(width, 2, bias=False)
        self.optimizer = self.basic_optimizer = SimpleNamespace(clip_grad=1.0)
        self.checkpoint_engine = _Writer()
        self.local_rank = self.global_rank = 0
        self.world_size = self.seq_dp_world_size = 1
        self.micro_steps = self.global_samples = self.global_steps = 0
        self._stage = stage

    def zero_optimization_stage(self):
        return self._stage

    def get_data_types(self):
        return torch.float32, torch.float32

    def use_node_local_storage(self):
        return False

    def step(self):
        """Train for a step, so that the weights show the number of steps."""
        self.module.weight.data.add_(1.0)
        self.global_steps += 1
        self.micro_steps += 1

    def save_checkpoint(self, folder, tag, save_latest):
        path = Path(folder) / tag
        path.mkdir(parents=True, exist_ok=True)
        self.checkpoint_engine.save({"weight": self.module.weight.data}, path / "model.pt")
        moments = torch.zeros(2, *self.module.weight.shape)
        clip_grad = self.optimizer.clip_grad
        state = {"steps": self.global_steps, "clip_grad": clip_grad, "moments": moments}
        self.checkpoint_engine.save(state, path / "optimizer.pt")

    def load_checkpoint(self, folder, tag):
        path = Path(folder) / tag
        self.module.weight.data.copy_(torch.load(path / "model.pt", weights_only=False)["weight"])
        state = torch.load(path / "optimizer.pt", weights_only=False)
        self.global_steps, self.optimizer.clip_grad = state["steps"], state["clip_grad"]
        return path, {}


class _Writer:
    def is_decoupled(self):
        return False

    def save(self, state_dict, path):
        torch.save(state_dict, path)
