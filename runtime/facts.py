"""What is asked of an engine once, when its watch begins."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


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
