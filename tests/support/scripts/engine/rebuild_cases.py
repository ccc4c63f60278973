"""Test cases of rebuilds: pairs of ds configs, optimizers and precisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CPU = {"device": "cpu", "pin_memory": False}
SIXTEEN_BITS = {"bf16": 1e-2, "fp16": 2e-3}
_PRECISION_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # A window of 2 steps, so that the scale moves within a run.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The part of a ds config that a rebuild changes."""

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One rebuild in the middle of training; `exact` if results must be bitwise equal."""

    old: Engine
    new: Engine
    optimizer: str = "AdamW"
    precision: str = "fp32"
    schedule: str | None = None
    blocks: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    fp32_tolerance: float = 1e-6

    @property
    def tolerance(self) -> float:
        """Largest difference of weights to training without a rebuild, relative to their norm."""
        # Other stages sum gradients in another order: the last bit of 16 differs now and then.
        sent = self.old.more.get("communication_data_type", self.precision)
        return self.fp32_tolerance if sent == "fp32" else SIXTEEN_BITS[sent]

    def ds_config(self, engine: Engine) -> dict[str, Any]:
        """Return the whole ds config of one of the two."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": engine.stage,
                "reduce_bucket_size": 6_000,
                "stage3_param_persistence_threshold": 100,
                **engine.zero,
            },
            **_PRECISION_OPTIONS[self.precision],
            **self.blocks,
            **engine.more,
        }


def offloaded(stage: int, *, param: bool = False) -> Engine:
    both = {"offload_param": CPU} if param else {}
    return Engine(stage=stage, zero={"offload_optimizer": CPU, **both})


STAGES = (0, 1, 2, 3)
PLAIN = {stage: Engine(stage=stage) for stage in STAGES}
TRANSITIONS = {
    f"stage {old} to {new}": Case(old=PLAIN[old], new=PLAIN[new], exact=old == new)
    for old in STAGES
    for new in STAGES
}
OFFLOADS = {
    f"stage {stage}, optimizer to the {where}": Case(
        old=PLAIN[stage] if where == "host" else offloaded(stage),
        new=offloaded(stage) if where == "host" else PLAIN[stage],
    )
    for stage in (1, 2, 3)
    for where in ("host", "device")
} | {
    "stage 3, all to the host": Case(old=PLAIN[3], new=offloaded(3, param=True)),
    "stage 3, all to the device": Case(old=offloaded(3, param=True), new=PLAIN[3]),
    "stage 0 to 3, all on the host": Case(old=PLAIN[0], new=offloaded(3, param=True)),
    "stage 3, all on the host, to 1": Case(old=offloaded(3, param=True), new=PLAIN[1]),
}
LAYOUTS = {
    "stage 3, smaller sub-groups": Case(
        old=PLAIN[3], new=Engine(stage=3, zero={"sub_group_size": 500})
    ),
    "stage 3, larger sub-groups": Case(
        old=Engine(stage=3, zero={"sub_group_size": 500}), new=PLAIN[3]
    ),
    "stage 3, with secondary partitions": Case(
        old=PLAIN[3], new=Engine(stage=3, zero={"zero_hpz_partition_size": 2})
    ),
    "stage 3, without secondary partitions": Case(
        old=Engine(stage=3, zero={"zero_hpz_partition_size": 2}), new=PLAIN[3]
    ),
    "stage 2, dealt out in turn": Case(
        old=PLAIN[2], new=Engine(stage=2, zero={"round_robin_gradients": True})
    ),
    "stage 2, other buckets": Case(
        old=PLAIN[2], new=Engine(stage=2, zero={"reduce_bucket_size": 700, "overlap_comm": True})
    ),
    "stage 1, gradients sent in bf16 and back": Case(
        old=Engine(stage=1, more={"communication_data_type": "bf16"}), new=PLAIN[1]
    ),
}
OPTIMIZERS = {
    f"{name}, stage {old} to {new}": Case(
        old=PLAIN[old], new=PLAIN[new], optimizer=name, exact=old == new
    )
    for name, old, new in (
        ("SGD", 1, 3),
        ("SGD", 3, 0),
        ("Adam", 0, 2),
        ("Adagrad", 2, 2),
        ("RMSprop", 3, 1),
        ("RMSprop", 0, 0),
        ("config", 2, 3),
        ("config", 3, 3),
        ("factory", 3, 1),
    )
}
# DeepSpeed's own optimizer, between stage 0 and each other stage.
DEFAULT_OPTIMIZER = {
    f"{precision}, default optimizer, stage {old} to {new}": Case(
        old=PLAIN[old],
        new=PLAIN[new],
        optimizer="config",
        precision=precision,
        exact=old == new,
    )
    for precision in ("fp32", "bf16")
    for old, new in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0))
} | {
    "default optimizer, stage 0 to 1 on the host": Case(
        old=PLAIN[0],
        new=offloaded(1),
        optimizer="config",
        # DeepSpeedCPUAdam has 0.999^t in fp32: as a product if it counted all t, else by pow().
        # One bit of that is 2e-5 of 1 - 0.999^3, and 1e-7 of a step of 0.01.
        fp32_tolerance=1e-5,
    ),
}
_WARMUP = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 2, "total_num_steps": 20, "warmup_max_lr": 0.02},
    }
}
SCHEDULES = {
    "DeepSpeed's schedule, stage 2 to 3": Case(old=PLAIN[2], new=PLAIN[3], blocks=_WARMUP),
    "DeepSpeed's schedule, stage 1 to 1": Case(
        old=PLAIN[1], new=PLAIN[1], blocks=_WARMUP, exact=True
    ),
    "torch's schedule, stage 3 to 1": Case(old=PLAIN[3], new=PLAIN[1], schedule="torch"),
    "torch's schedule, stage 0 to 0": Case(
        old=PLAIN[0], new=PLAIN[0], schedule="torch", exact=True
    ),
}
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS = {
    f"{precision}, stage {old} to {new}": Case(
        old=PLAIN[old], new=PLAIN[new], precision=precision, exact=old == new
    )
    for precision, old, new in (
        ("bf16", 0, 0),
        ("bf16", 0, 2),
        ("bf16", 1, 3),
        ("bf16", 2, 2),
        ("bf16", 3, 0),
        ("bf16", 3, 3),
        ("fp16", 2, 3),
        ("fp16", 3, 3),
        ("fp16", 0, 0),
        ("fp16", 3, 1),
    )
} | {
    "bf16 with sums in fp32, stage 1 to 1": Case(
        old=PLAIN[1], new=PLAIN[1], precision="bf16", blocks=_FP32_SUMS, exact=True
    ),
    "bf16 with sums in fp32, stage 1 to 3": Case(
        old=PLAIN[1], new=PLAIN[3], precision="bf16", blocks=_FP32_SUMS
    ),
    "bf16 with sums in fp32, stage 2 to 1": Case(
        old=PLAIN[2], new=PLAIN[1], precision="bf16", blocks=_FP32_SUMS
    ),
    "bf16, stage 3, all to the host": Case(
        old=PLAIN[3], new=offloaded(3, param=True), precision="bf16"
    ),
}
CASES = {
    **TRANSITIONS,
    **OFFLOADS,
    **LAYOUTS,
    **OPTIMIZERS,
    **DEFAULT_OPTIMIZER,
    **SCHEDULES,
    **PRECISIONS,
}
