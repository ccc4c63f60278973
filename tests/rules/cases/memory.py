"""Test cases of the alerts on memory."""

from __future__ import annotations

from rules.history import GONE, SCRAPE, Series, Stretch, counter, gauge, of_both, of_rank, training
from rules.promtool import Case, annotations_of

LABELS = {
    "component": "memory",
    "job": "zerowatch",
    "run": "night-7",
    "rank": "1",
    "node": "node-1",
}
HIGH = {"alertname": "ZerowatchOomRiskHigh", "severity": "warning", **LABELS}
CRITICAL = {"alertname": "ZerowatchOomRiskCritical", "severity": "critical", **LABELS}
HOST = {"alertname": "ZerowatchHostMemoryRisk", "severity": "critical", **LABELS}
NODE_FULL = {
    "alertname": "ZerowatchHostMemoryNodeFull",
    "component": "memory",
    "severity": "critical",
    "job": "zerowatch",
    "run": "night-7",
    "node": "node-0",
}
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


def on_one_host(*stretches: Stretch, instance: str = "10.0.0.0:{port}") -> Series:
    """Two ranks on node-0, which may use 1,000 bytes and use so many each."""
    minutes = sum(stretch[0] for stretch in stretches)
    series: Series = {}
    for rank in (0, 1):
        for metric, values, labels in (
            ("run_active", gauge((minutes, 1)), {}),
            ("steps_total", counter((minutes, 2)), {}),
            ("memory_bytes", gauge(*stretches), {"device": "cpu", "state": "allocated"}),
            ("memory_limit_bytes", gauge((minutes, 1000)), {"device": "cpu"}),
        ):
            series |= of_rank(
                rank,
                f"zerowatch_{metric}",
                values,
                node="node-0",
                instance=instance.format(rank=rank, port=9464 + rank),
                **labels,
            )
    return series


# A run's own threshold, while one scrape fails.
OWN = gauge((10.15, 0.95), (SCRAPE, GONE), (10, 0.95))
CASES = (
    Case(
        title="Does not fire below a run's own threshold while a scrape of rank 0 fails",
        near="ZerowatchOomRiskCritical",
        series=training(20)
        | risk("cuda:0", (20, 0.85))
        | of_rank(0, "zerowatch_alert_threshold", OWN, name="oom_risk_high")
        | of_rank(0, "zerowatch_alert_threshold", OWN, name="oom_risk_critical"),
        until="20m",
    ),
    Case(
        title="Fires if a GPU's risk is above 50 %",
        series=on_gpus(15) | risk("cuda:0", (3, 0.1), (3, 0.62), (9, 0.1)),
        alert={**HIGH, "device": "cuda:0"},
        fires_at="3m45s",
        recovers_at="11m15s",
        annotations=annotations_of(
            "ZerowatchOomRiskHigh",
            dashboard="zerowatch-memory",
            summary="Rank 1 of training night-7 is likely to run out of memory on node-1",
            description="The probability of an out-of-memory error on cuda:0 within the next 50 "
            "steps is 62%. Save a checkpoint if you can, then reduce the micro-batch or use a "
            "higher ZeRO stage.",
        ),
    ),
    Case(
        title="Fires on the host's memory if the run trains on the CPU",
        series=training(15) | risk("cpu", (3, 0.1), (3, 0.62), (9, 0.1)),
        alert={**HIGH, "device": "cpu"},
        fires_at="3m45s",
        recovers_at="11m15s",
    ),
    Case(
        title="Does not fire at a risk of 50 %",
        near="ZerowatchOomRiskHigh",
        series=on_gpus(10) | risk("cuda:0", (10, 0.5)) | risk("cpu", (10, 0.5)),
        until="10m",
    ),
    Case(
        title="Does not fire on a high risk of 15 seconds",
        near="ZerowatchOomRiskHigh",
        series=on_gpus(10) | risk("cuda:0", (3, 0.1), (0.25, 0.7), (6.75, 0.1)),
        until="10m",
    ),
    Case(
        title="Fires at once if the risk is above 90 %",
        series=on_gpus(15) | risk("cuda:0", (3, 0.1), (0.25, 0.95), (11.75, 0.1)),
        alert={**CRITICAL, "device": "cuda:0"},
        fires_at="3m15s",
        recovers_at="8m30s",
    ),
    Case(
        title="Fires the host's own alert in a run on GPUs",
        series=on_gpus(15) | risk("cuda:0", (15, 0.1)) | risk("cpu", (3, 0.1), (3, 0.7), (9, 0.1)),
        alert=HOST | {"device": "cpu"},
        fires_at="3m45s",
        recovers_at="11m15s",
    ),
    Case(
        title="Fires while a leak lasts and resolves after it",
        series=on_gpus(15) | leak((3, GONE), (5, 2097152), (7, GONE)),
        alert={**LEAK, "device": "cuda:0", "category": "other"},
        fires_at="5m15s",
        recovers_at="13m15s",
        annotations=annotations_of(
            "ZerowatchMemoryLeak",
            dashboard="zerowatch-memory",
            summary="Rank 1 of training night-7 leaks memory on node-1",
            description="Memory of category other on cuda:0 grows by 2MiB with each step, and the "
            "batches do not explain it. The dashboard shows how many steps are left until memory "
            "is full. Look for tensors that the script keeps.",
        ),
    ),
    Case(
        title="Does not fire on a leak that is withdrawn after a minute",
        near="ZerowatchMemoryLeak",
        series=on_gpus(10) | leak((3, GONE), (1, 2097152), (6, GONE)),
        until="10m",
    ),
    Case(
        title="Fires if two ranks fill the memory of their host, and resolves",
        series=on_one_host((3, 300), (5, 460), (9, 300)),
        alert=NODE_FULL,
        fires_at="4m15s",
        recovers_at="13m15s",
        annotations=annotations_of(
            "ZerowatchHostMemoryNodeFull",
            dashboard="zerowatch-memory",
            summary="The ranks of training night-7 fill the memory of node-0",
            description="The ranks on node-0 together use 92% of the memory that they may use "
            "there. When it is full, the kernel kills one of them and the run ends. Save a "
            "checkpoint now if you can, and check what else runs on that host.",
        ),
    ),
    Case(
        title="Fires if two ranks fill the memory of their host, without addresses",
        series=on_one_host((3, 300), (5, 460), (9, 300), instance="night-7/{rank}"),
        alert=NODE_FULL,
        fires_at="4m15s",
        recovers_at="13m15s",
    ),
    Case(
        title="Does not fire if two ranks use 92 % of the memory of a container each",
        near="ZerowatchHostMemoryNodeFull",
        series=on_one_host((15, 920), instance="10.0.0.{rank}:9464"),
        until="15m",
    ),
    Case(
        title="Does not fire if a rank alone fills its container, next to two ranks in another",
        near="ZerowatchHostMemoryNodeFull",
        series=on_one_host((15, 100))
        | {
            series.replace('rank="0"', 'rank="2"').replace("10.0.0.0:", "10.0.0.2:"): values
            for series, values in on_one_host((15, 950)).items()
            if 'rank="0"' in series
        },
        until="15m",
    ),
    Case(
        title="Does not fire if two ranks use 88 % of the memory of their host",
        near="ZerowatchHostMemoryNodeFull",
        series=on_one_host((15, 440)),
        until="15m",
    ),
    Case(
        title="Does not fire if two ranks use 92 % of the memory of a host each",
        near="ZerowatchHostMemoryNodeFull",
        series=training(15)
        | of_both("zerowatch_memory_bytes", gauge((15, 920)), device="cpu", state="allocated")
        | of_both("zerowatch_memory_limit_bytes", gauge((15, 1000)), device="cpu"),
        until="15m",
    ),
)
