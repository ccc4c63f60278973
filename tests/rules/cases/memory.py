"""Alerts on memory."""

from __future__ import annotations

from rules.history import GONE, Series, Stretch, gauge, of_both, of_rank, training
from rules.promtool import Case, says

LABELS = {"component": "memory", "job": "zerowatch", "run": "night-7", "rank": "1"}
HIGH = {"alertname": "ZerowatchOomRiskHigh", "severity": "warning", **LABELS}
CRITICAL = {"alertname": "ZerowatchOomRiskCritical", "severity": "critical", **LABELS}
HOST = {"alertname": "ZerowatchHostMemoryRisk", "severity": "critical", **LABELS}
LEAK = {"alertname": "ZerowatchMemoryLeak", "severity": "warning", **LABELS}


def risk(device: str, *stretches: Stretch) -> Series:
    """The risk of rank 1."""
    return of_rank(1, "zerowatch_oom_risk_ratio", gauge(*stretches), device=device)


def on_gpus(minutes: float) -> Series:
    """Two ranks that train on a GPU each."""
    allocated = gauge((minutes, 2e10))
    return training(minutes) | of_both(
        "zerowatch_memory_bytes", allocated, device="cuda:0", state="allocated"
    )


def leak(*stretches: Stretch) -> Series:
    growth = gauge(*stretches)
    return of_rank(
        1, "zerowatch_memory_leak_bytes_per_step", growth, device="cuda:0", category="other"
    )


CASES = (
    Case(
        title="A GPU's memory that is more likely than not to run out is told of",
        series=on_gpus(15) | risk("cuda:0", (3, 0.1), (3, 0.62), (9, 0.1)),
        alert={**HIGH, "device": "cuda:0"},
        fires_at="3m45s",
        recovers_at="11m15s",
        annotations=says(
            "ZerowatchOomRiskHigh",
            dashboard="zerowatch-memory",
            summary="Rank 1 of training night-7 is likely to run out of memory on cuda:0",
            description="The probability that it does within the next 50 steps is 62%. Save a "
            "checkpoint if you can, then make the micro-batch smaller or shard more.",
        ),
    ),
    Case(
        title="Where a run trains on the CPU, its host's memory is the memory that matters",
        series=training(15) | risk("cpu", (3, 0.1), (3, 0.62), (9, 0.1)),
        alert={**HIGH, "device": "cpu"},
        fires_at="3m45s",
        recovers_at="11m15s",
    ),
    Case(
        title="A risk of one half is not yet told of",
        series=on_gpus(10) | risk("cuda:0", (10, 0.5)) | risk("cpu", (10, 0.5)),
        until="10m",
    ),
    Case(
        title="A risk that is high for a quarter of a minute is not told of",
        series=on_gpus(10) | risk("cuda:0", (3, 0.1), (0.25, 0.7), (6.75, 0.1)),
        until="10m",
    ),
    Case(
        title="A risk that leaps above nine tenths is told of at once",
        series=on_gpus(15) | risk("cuda:0", (3, 0.1), (0.25, 0.95), (11.75, 0.1)),
        alert={**CRITICAL, "device": "cuda:0"},
        fires_at="3m15s",
        recovers_at="8m30s",
    ),
    Case(
        title="The memory of a host that runs out beside GPUs has an alert of its own",
        series=on_gpus(15) | risk("cuda:0", (15, 0.1)) | risk("cpu", (3, 0.1), (3, 0.7), (9, 0.1)),
        alert=HOST | {"device": "cpu"},
        fires_at="3m45s",
        recovers_at="11m15s",
    ),
    Case(
        title="A leak is told of while it lasts",
        series=on_gpus(15) | leak((3, GONE), (5, 2097152), (7, GONE)),
        alert={**LEAK, "device": "cuda:0", "category": "other"},
        fires_at="5m15s",
        recovers_at="13m15s",
        annotations=says(
            "ZerowatchMemoryLeak",
            dashboard="zerowatch-memory",
            summary="Rank 1 of training night-7 leaks memory on cuda:0",
            description="2MiB more with each step, in other, and no batch explains it. See on the "
            "dashboard how many steps are left, and look for tensors that are kept.",
        ),
    ),
    Case(
        title="A leak that was doubted again after a minute is not told of",
        series=on_gpus(10) | leak((3, GONE), (1, 2097152), (6, GONE)),
        until="10m",
    ),
)
