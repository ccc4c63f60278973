"""Alerts on out-of-memory risks, memory leaks and replayed accumulation windows."""

from __future__ import annotations

from ...metrics.catalog import memory
from ...metrics.thresholds import (
    HOST_MEMORY_NODE_HIGH,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
    REPLAY_RATIO_HIGH,
    Threshold,
)
from .. import recording_rules as recorded
from ..limits import above
from ..promql import IDENTITY, ON_GPU, ON_HOST, by, select, where
from ..timing import MINUTE, Timing
from .alert import BYTES, DEVICE, NODE, PERCENT, RANK, RUN, Alert, InhibitRule
from .guards import after_some_steps, not_on_gpu, on_gpu, while_training

DASHBOARD = "zerowatch-memory"
OOM_RISK_HIGH_ALERT = "ZerowatchOomRiskHigh"


def memory_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _oom_risk_high(),
        _oom_risk_critical(),
        _host_memory_risk(),
        _host_memory_node_full(),
        _memory_leak(),
        _oom_replays(timing),
    )


def _training_device_risk(limit: Threshold) -> str:
    """Return the risk of each rank whose training device runs out of memory with `limit` or more.

    The training device is the GPU, or in a run without GPUs the host, whose device label is cpu.
    """
    gpu = above(recorded.OOM_RISK.select(ON_GPU), limit)
    host = not_on_gpu(above(recorded.OOM_RISK.select(ON_HOST), limit))
    return while_training(f"(\n{gpu}\nor\n({host})\n)", "rank")


def _oom_risk_high() -> Alert:
    return Alert(
        name=OOM_RISK_HIGH_ALERT,
        component="memory",
        severity="warning",
        expression=_training_device_risk(OOM_RISK_HIGH),
        for_seconds=MINUTE / 2,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is likely to run out of memory on {NODE}",
        description=(
            f"The probability of an out-of-memory error on {DEVICE} within the next 50 steps is "
            f"{PERCENT}. "
            "Save a checkpoint if you can, then reduce the micro-batch or use a higher ZeRO stage."
        ),
        dashboard=DASHBOARD,
    )


def _oom_risk_critical() -> Alert:
    return Alert(
        name="ZerowatchOomRiskCritical",
        component="memory",
        severity="critical",
        expression=_training_device_risk(OOM_RISK_CRITICAL),
        for_seconds=0,  # the error may follow within seconds
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is about to run out of memory on {NODE}",
        description=(
            f"The probability of an out-of-memory error on {DEVICE} within the next 50 steps is "
            f"{PERCENT}. "
            "Save a checkpoint now if you can: the run is likely to fail."
        ),
        dashboard=DASHBOARD,
        inhibits=InhibitRule(alerts=(OOM_RISK_HIGH_ALERT,), same=(*IDENTITY, "rank", "device")),
    )


def _host_memory_risk() -> Alert:
    host = on_gpu(above(recorded.OOM_RISK.select(ON_HOST), OOM_RISK_HIGH))
    return Alert(
        name="ZerowatchHostMemoryRisk",
        component="memory",
        severity="critical",  # the kernel kills the process, and nothing can catch that
        expression=while_training(host, "rank"),
        for_seconds=MINUTE / 2,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} is likely to run out of host memory on {NODE}",
        description=(
            f"The probability that {NODE} runs out of memory within the next 50 steps is "
            f"{PERCENT}. The kernel then kills the process. Save a checkpoint if you can, and "
            "check what else runs on that host."
        ),
        dashboard=DASHBOARD,
    )


def _host_memory_node_full() -> Alert:
    # Of several ranks: a single rank compares itself with the limit, see HostMemoryRisk.
    ranks = recorded.on_address("count", memory.MEMORY_LIMIT, ON_HOST)
    full = where(
        above(recorded.ADDRESS_MEMORY_RATIO, HOST_MEMORY_NODE_HIGH),
        f"{ranks} > 1",
        "node",
        "address",
    )
    return Alert(
        name="ZerowatchHostMemoryNodeFull",
        component="memory",
        severity="critical",  # the kernel kills one of the processes, and the run ends with it
        expression=while_training(by("max", full, "node"), "node"),
        for_seconds=MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The ranks of training {RUN} fill the memory of {NODE}",
        description=(
            f"The ranks on {NODE} together use {PERCENT} of the memory that they may use there. "
            "When it is full, the kernel kills one of them and the run ends. Save a checkpoint now "
            "if you can, and check what else runs on that host."
        ),
        dashboard=DASHBOARD,
    )


def _memory_leak() -> Alert:
    growth = by("max", select(memory.MEMORY_LEAK), "rank", "device", "category")
    return Alert(
        name="ZerowatchMemoryLeak",
        component="memory",
        severity="warning",
        expression=while_training(f"{growth} > 0", "rank"),  # the series exists only during a leak
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Rank {RANK} of training {RUN} leaks memory on {NODE}",
        description=(
            f"Memory of category {{{{ $labels.category }}}} on {DEVICE} grows by {BYTES} with each "
            "step, and the batches do not explain it. The dashboard shows how many steps are left "
            "until memory is full. Look for tensors that the script keeps."
        ),
        dashboard=DASHBOARD,
    )


def _oom_replays(timing: Timing) -> Alert:
    # The 30 minutes exclude single bad batches. The 5 minutes end the alert soon after the cause.
    both_ranges = where(
        above(recorded.REPLAY_RATIO_LONG.select(), REPLAY_RATIO_HIGH),
        f"{recorded.REPLAY_RATIO.select()} > 0",
    )
    return Alert(
        name="ZerowatchOomReplays",
        component="memory",
        severity="warning",
        expression=while_training(after_some_steps(both_ranges, timing)),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} keeps running out of memory and replaying windows",
        description=(
            f"In the last half hour, replaying accumulation windows took {PERCENT} of the training "
            "time. No sample is lost. Start the run with smaller micro-batches, or free memory."
        ),
        dashboard=DASHBOARD,
    )
