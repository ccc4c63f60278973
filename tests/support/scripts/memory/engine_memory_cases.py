"""Engine configurations whose memory is counted: ZeRO stages, precisions, offload."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

NVME_WIDTH = 768  # DeepSpeed swaps nothing of less than a mebibyte


class Net(torch.nn.Module):
    """Three layers, one of a size that no rank's part divides evenly, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(width, 2 * width + 5)
        self.norm = torch.nn.LayerNorm(2 * width + 5)
        self.head = torch.nn.Linear(2 * width + 5, width, bias=False)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.norm(self.body(x))) * self.scale[0]).square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One ds config; `offload` maps optimizer or param to a device."""

    stage: int
    precision: str = "fp32"
    offload: dict[str, str] = field(default_factory=dict)
    accumulation: int = 1
    width: int = 48
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def ds_config(self, folder: Path) -> dict[str, Any]:
        """Return the DeepSpeed configuration; NVMe swaps into the folder."""
        offload = {
            f"offload_{what}": {"device": device, "nvme_path": str(folder), "pin_memory": False}
            | ({"buffer_size": 2_000_000} if (what, device) == ("param", "nvme") else {})
            for what, device in self.offload.items()
        }
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 6_000,
                "stage3_param_persistence_threshold": 200,
                **offload,
                **self.zero,
            },
            **_PRECISION_OPTIONS[self.precision],
            **self.more,
        }


_PRECISION_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},  # no step is skipped
}
_STAGES = (0, 1, 2, 3)
_PRECISIONS = ("fp32", "bf16", "fp16")
CASES: dict[str, Case] = {
    **{f"{p} stage {s}": Case(stage=s, precision=p) for p in _PRECISIONS for s in _STAGES},
    **{
        f"{p} stage {s}, optimizer on cpu": Case(stage=s, precision=p, offload={"optimizer": "cpu"})
        for p in ("fp32", "bf16")
        for s in (1, 2, 3)
    },
    **{
        f"{p} stage 3, all on cpu": Case(
            stage=3, precision=p, offload={"optimizer": "cpu", "param": "cpu"}
        )
        for p in ("fp32", "bf16")
    },
    "bf16 stage 1, accumulating in fp32": Case(
        stage=1,
        precision="bf16",
        accumulation=2,
        more={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "fp16 stage 1, accumulating in fp32": Case(
        stage=1,
        precision="fp16",
        accumulation=2,
        more={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "bf16 stage 2, accumulating": Case(stage=2, precision="bf16", accumulation=2),
    "bf16 stage 2, on cpu, accumulating": Case(
        stage=2, precision="bf16", accumulation=2, offload={"optimizer": "cpu"}
    ),
    "fp32 stage 1, overlapping": Case(stage=1, zero={"overlap_comm": True}),
    "bf16 stage 3, within nodes": Case(
        stage=3, precision="bf16", zero={"zero_hpz_partition_size": 2}
    ),
    "bf16 stage 3, optimizer on nvme": Case(
        stage=3, precision="bf16", offload={"optimizer": "nvme"}, width=NVME_WIDTH
    ),
    "bf16 stage 3, all on nvme": Case(
        stage=3, precision="bf16", offload={"optimizer": "nvme", "param": "nvme"}, width=NVME_WIDTH
    ),
}
NVME_CASES = tuple(name for name in CASES if "nvme" in name)
