"""What is asked of an engine once, when its watch begins."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from .engine_hooks import Window
from .flops import flops_per_token


def run_facts(engine: Any, run_id: str, world_size: int) -> tuple[str, ...]:
    """Return the label values of the run's info metric, in their order."""
    return (
        run_id,
        version("zerowatch"),
        torch.__version__,
        deepspeed.__version__,
        dist.get_backend() if dist.is_initialized() else "none",
        get_accelerator().device_name(),
        str(engine.zero_optimization_stage()),
        str(world_size),
    )


def cuda_device() -> int | None:
    """Return torch's index of the GPU this rank trains on; None on CPU."""
    on_cuda = get_accelerator().device_name() == "cuda" and torch.cuda.is_available()
    return torch.cuda.current_device() if on_cuda else None


class FlopsCounter:
    """The arithmetic of a window, from its tokens; asks the model once per sequence length."""

    def __init__(self, module: torch.nn.Module, method: str) -> None:
        self._per_token: dict[int | None, float | None] = {}
        self._ask = (lambda length: flops_per_token(module, length)) if method != "off" else None

    def __call__(self, window: Window) -> float | None:
        """Return floating point operations, or None where the batch shows no tokens."""
        if self._ask is None or window.tokens is None:
            return None
        length = window.sequence_length
        if length not in self._per_token:
            self._per_token[length] = self._ask(length)
        per_token = self._per_token[length]
        return None if per_token is None else per_token * window.tokens
