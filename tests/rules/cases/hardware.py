"""Test cases of the alerts on the hardware of GPUs, as each rank reads it by NVML."""

from __future__ import annotations

from rules.history import GONE, Series, Stretch, counter, gauge, of_rank, training, training_rank
from rules.promtool import Case, annotations_of

CARD = {"uuid": "GPU-1b2c", "pci_bus_id": "00000000:1B:00.0"}
GPU = {
    "component": "devices",
    "job": "zerowatch",
    "run": "night-7",
    "rank": "1",
    "node": "node-1",
    "device": "cuda:0",
    **CARD,
}
OF_DRIVER = {"name": "NVIDIA H100 80GB HBM3", "driver": "580.95.05"}
AT = "cuda:0 of rank 1 on node-1"
THE_CARD = "The card is GPU-1b2c, PCI address 00000000:1B:00.0."


def alert(name: str, severity: str, **labels: str) -> dict[str, str]:
    return {"alertname": f"ZerowatchGpu{name}", "severity": severity, **GPU, **labels}


def without_card(labels: dict[str, str]) -> dict[str, str]:
    return {label: value for label, value in labels.items() if label not in CARD}


def card(minutes: float) -> Series:
    """Return a healthy run, and the identity of rank 1's GPU."""
    info = of_rank(
        1, "zerowatch_device_info", gauge((minutes, 1)), device="cuda:0", **CARD, **OF_DRIVER
    )
    return training(minutes) | info


def of_gpu(metric: str, values: str, **labels: str) -> Series:
    return of_rank(1, f"zerowatch_device_{metric}", values, device="cuda:0", **labels)


def figure(metric: str, *stretches: Stretch, **labels: str) -> Series:
    """Return a gauge of rank 1's GPU, in a healthy run that lasts as long."""
    minutes = sum(length for length, _ in stretches)
    return card(minutes) | of_gpu(metric, gauge(*stretches), **labels)


def at_end(series: Series) -> Series:
    """Return series that end, as when a process dies."""
    return {name: f"{values} stale" for name, values in series.items()}


def fault(metric: str, *stretches: Stretch, grows: bool = False, **labels: str) -> Series:
    """Return the last minutes of rank 1's GPU, and its identity."""
    minutes = sum(length for length, _ in stretches)
    values = counter(*stretches) if grows else gauge(*stretches)
    info = of_gpu("info", gauge((minutes, 1)), **CARD, **OF_DRIVER)
    return at_end(info | of_gpu(metric, values, **labels))


def errors(metric: str, *stretches: Stretch, **labels: str) -> Series:
    """Return a counter of rank 1's GPU, which grows by so much per second."""
    minutes = sum(length for length, _ in stretches)
    return card(minutes) | of_gpu(metric, counter(*stretches), **labels)


CASES = (
    Case(
        title="Fires as the driver loses a GPU, and for an hour after that",
        series=fault("lost", (5, 0), (1, 1)),
        alert=alert("Lost", "critical"),
        fires_at="5m15s",
        recovers_at="1h7m",
        annotations=annotations_of(
            "ZerowatchGpuLost",
            dashboard="zerowatch-devices",
            summary=f"Training night-7 has lost {AT}",
            description="The driver no longer reaches the GPU, or must reset it first. The run "
            f"cannot continue on this node. {THE_CARD} Drain the node, and restart the run from "
            "its last checkpoint on another one.",
        ),
    ),
    Case(
        title="Fires on a lost GPU even if its card is unknown",
        series=at_end(of_gpu("lost", gauge((5, 0), (1, 1)))),
        alert=without_card(alert("Lost", "critical")),
        fires_at="5m15s",
        recovers_at="1h7m",
    ),
    Case(
        title="Fires on an XID that asks for a reset",
        series=fault("xid_errors_total", (5, GONE), (0.25, 1 / 7), (2, 0), grows=True, xid="79"),
        alert=alert("Xid", "critical", xid="79"),
        fires_at="5m15s",
        recovers_at="1h8m15s",
        words_at="6m",
        annotations=annotations_of(
            "ZerowatchGpuXid",
            dashboard="zerowatch-devices",
            summary=f"XID 79 in training night-7, at {AT}",
            description="The driver has reported this XID 2 times since the rank started. It asks "
            f"for a reset of the GPU or a restart of the machine. {THE_CARD} Drain the node. The "
            "table in the runbook says what the number means, and who is to blame.",
        ),
    ),
    Case(
        title="Fires on an XID of the script, of which the series begins with the first error",
        series=fault("xid_errors_total", (5, GONE), (70, 1), xid="31"),
        alert=alert("XidMinor", "warning", xid="31"),
        fires_at="5m15s",
        recovers_at="1h10m15s",
        annotations=annotations_of(
            "ZerowatchGpuXidMinor",
            dashboard="zerowatch-devices",
            summary=f"XID 31 in training night-7, at {AT}",
            description="The driver has reported this XID within the last hour. No reset of the "
            "GPU is needed at once, unless it is XID 154: the kernel log then names the reset. "
            f"{THE_CARD} Most such errors come from the script; look the number up in the "
            "runbook's table.",
        ),
    ),
    *(
        Case(
            title=f"Fires on an XID of the script that a single scrape reads, after {healthy} min",
            series=fault("xid_errors_total", (healthy, GONE), (0.1, 1), xid="31"),
            alert=alert("XidMinor", "warning", xid="31"),
            fires_at=fires_at,
            recovers_at=recovers_at,
        )
        for healthy, fires_at, recovers_at in (
            (5, "5m15s", "1h10m15s"),
            (5.3, "5m30s", "1h10m30s"),
        )
    ),
    Case(
        title="Fires once on two XIDs of the script, the second of which ends the process",
        series=fault("xid_errors_total", (5, GONE), (1, 1), (9, 2), xid="31"),
        alert=alert("XidMinor", "warning", xid="31"),
        fires_at="5m15s",
        recovers_at="1h11m",
    ),
    Case(
        title="Fires on an XID with its card if the rank restarts on another card",
        series=fault("xid_errors_total", (5, GONE), (0.1, 1), xid="31")
        | of_gpu(
            "info",
            gauge((6, GONE), (70, 1)),
            instance="10.0.1.1:9464",
            uuid="GPU-0a0b",
            pci_bus_id="00000000:1A:00.0",
            **OF_DRIVER,
        ),
        alert=alert("XidMinor", "warning", xid="31"),
        fires_at="5m15s",
        recovers_at="1h10m15s",
    ),
    *(
        Case(
            title=f"Fires on an XID without a card if its address had two within the hour: {uuids}",
            series=at_end(
                of_gpu("info", gauge((8.2, 1), (8, GONE)), uuid=uuids[0], **OF_DRIVER)
                | of_gpu("info", gauge((8, GONE), (8, 1)), uuid=uuids[1], **OF_DRIVER)
                | of_gpu("xid_errors_total", gauge((8, GONE), (8, 1)), xid="31")
            ),
            alert=without_card(alert("XidMinor", "warning", xid="31")),
            fires_at="8m15s",
            recovers_at="1h13m15s",
        )
        for uuids in (("GPU-a", "GPU-b"), ("GPU-b", "GPU-a"))
    ),
    Case(
        title="Fires on an XID of a new process after Prometheus was down during the one before",
        series=at_end(
            of_rank(1, "process_start_time_seconds", gauge((80, GONE), (5, -7200)))
            | of_rank(
                1,
                "process_start_time_seconds",
                gauge((86, GONE), (5, 5100)),
                instance="10.0.1.1:9464",
            )
            | of_gpu(
                "xid_errors_total", gauge((90, GONE), (1, 1)), xid="31", instance="10.0.1.1:9464"
            )
        ),
        alert=without_card(alert("XidMinor", "warning", xid="31")),
        fires_at="90m15s",
        recovers_at="155m15s",
    ),
    Case(
        title="Does not fire on an old XID of a process that ends after Prometheus was down",
        near="ZerowatchGpuXidMinor",
        series=at_end(
            of_rank(1, "process_start_time_seconds", gauge((80, GONE), (20, -7200)))
            | of_gpu("xid_errors_total", gauge((80, GONE), (20, 1)), xid="31")
        ),
        since="80m",
        until="170m",
    ),
    Case(
        title="Fires on an uncorrectable memory error",
        series=fault(
            "ecc_errors_total", (5, 0), (0.1, 1 / 7), (6, 0), grows=True, kind="uncorrected"
        ),
        alert=alert("UncorrectableEcc", "critical"),
        fires_at="5m15s",
        recovers_at="1h10m",
        annotations=annotations_of(
            "ZerowatchGpuUncorrectableEcc",
            dashboard="zerowatch-devices",
            summary=f"Uncorrectable memory errors in training night-7, at {AT}",
            description="The memory of the GPU has lost data, and the driver ends the processes "
            f"that used it. {THE_CARD} Restart the run from its last checkpoint. Reset the GPU "
            "before it is used again.",
        ),
    ),
    Case(
        title="Fires once on an uncorrectable memory error that ends the process",
        series=fault("ecc_errors_total", (5, 0), (0.2, 1 / 7), grows=True, kind="uncorrected"),
        alert=alert("UncorrectableEcc", "critical"),
        fires_at="5m15s",
        recovers_at="1h10m15s",
    ),
    Case(
        title="Does not fire on errors that happened before the run, nor on corrected ones",
        near="ZerowatchGpuUncorrectableEcc",
        series=figure("ecc_errors_total", (10, 7), kind="uncorrected")
        | errors("ecc_errors_total", (10, 1), kind="corrected"),
        until="10m",
    ),
    Case(
        title="Fires if a row of memory could not be remapped",
        series=fault("row_remap", (5, 0), (1, 1), state="failed"),
        alert=alert("RowRemapFailed", "critical"),
        fires_at="5m15s",
        recovers_at="1h7m",
        annotations=annotations_of(
            "ZerowatchGpuRowRemapFailed",
            dashboard="zerowatch-devices",
            summary=f"The memory of a GPU is worn out in training night-7, at {AT}",
            description="A faulty row of memory could not be replaced, because no spare row is "
            f"left or the attempt failed. {THE_CARD} Drain the node and have the card replaced.",
        ),
    ),
    Case(
        title="Fires if a row of memory waits to be remapped",
        series=fault("row_remap", (5, 0), (1, 1), state="pending"),
        alert=alert("RowRemap", "warning"),
        fires_at="5m15s",
        recovers_at="1h7m",
        annotations=annotations_of(
            "ZerowatchGpuRowRemap",
            dashboard="zerowatch-devices",
            summary=f"A GPU waits for a reset in training night-7, at {AT}",
            description="A faulty row of memory is replaced at the next reset of the GPU. Until "
            f"then it may cause further errors. {THE_CARD} Reset the GPU when the run ends.",
        ),
    ),
    Case(
        title="Fires on one recovery of an NVLink",
        series=errors(
            "link_errors_total", (5, 0), (0.1, 1 / 7), (38, 0), link="nvlink", kind="recovery"
        ),
        alert=alert("LinkErrors", "warning", link="nvlink", kind="recovery"),
        fires_at="5m15s",
        recovers_at="40m",
        annotations=annotations_of(
            "ZerowatchGpuLinkErrors",
            dashboard="zerowatch-devices",
            summary=f"Errors on a link of training night-7, at {AT}",
            description="Its nvlink link counts errors of the kind recovery. Data is sent again, "
            "so results are right and communication is slower. A link with growing counters "
            f"usually fails later. {THE_CARD} Check the link as the runbook says.",
        ),
    ),
    Case(
        title="Does not fire on a few PCIe replays or CRC errors",
        near="ZerowatchGpuLinkErrors",
        series=errors("link_errors_total", (10, 0.1), link="pcie", kind="replay")
        | errors("link_errors_total", (10, 50), link="nvlink", kind="crc"),
        until="10m",
    ),
    Case(
        title="Fires on 12 PCIe replays per minute",
        series=errors("link_errors_total", (5, 0), (10, 0.2), (36, 0), link="pcie", kind="replay"),
        alert=alert("LinkErrors", "warning", link="pcie", kind="replay"),
        fires_at="8m30s",
        recovers_at="46m45s",
    ),
    Case(
        title="Fires if heat lowers the clock for a fifth of the time",
        series=errors("throttled_seconds_total", (5, 0), (10, 0.2), (12, 0), reason="hw_thermal"),
        alert=alert("Throttled", "warning", reason="hw_thermal"),
        fires_at="9m30s",
        recovers_at="22m30s",
        words_at="14m",
        annotations=annotations_of(
            "ZerowatchGpuThrottled",
            dashboard="zerowatch-devices",
            summary=f"The clock of a GPU is lowered in training night-7, at {AT}",
            description="For 20% of the last five minutes the clock was lowered, for the reason "
            f"hw_thermal; up to 10% is usual. All ranks wait for this GPU. {THE_CARD} Check the "
            "cooling and the power of the node.",
        ),
    ),
    Case(
        title="Does not fire on the power cap, which is usual at full load",
        near="ZerowatchGpuThrottled",
        series=errors("throttled_seconds_total", (15, 1), reason="power_cap"),
        until="15m",
    ),
    Case(
        title="Fires three degrees below the limit",
        series=figure("temperature_celsius", (5, 60), (10, 85), (8, 60))
        | of_gpu("temperature_limit_celsius", gauge((23, 88))),
        alert=alert("Hot", "warning"),
        fires_at="10m15s",
        recovers_at="20m15s",
        annotations=annotations_of(
            "ZerowatchGpuHot",
            dashboard="zerowatch-devices",
            summary=f"A GPU is close to its temperature limit in training night-7, at {AT}",
            description="The GPU may get only 3 degrees hotter before it lowers its clock. "
            f"{THE_CARD} Check the fans, the coolant and the air inlet of the node.",
        ),
    ),
    Case(
        title="Fires three degrees below the limit, with a scrape each 90 seconds",
        series=training_rank(0, (30, 1), every=90)
        | training_rank(1, (30, 1), every=90)
        | of_gpu("info", gauge((30, 1), every=90), **CARD, **OF_DRIVER)
        | of_gpu("temperature_celsius", gauge((6, 60), (12, 85), (12, 60), every=90))
        | of_gpu("temperature_limit_celsius", gauge((30, 88), every=90)),
        alert=alert("Hot", "warning"),
        fires_at="11m",
        recovers_at="23m",
        every=90,
    ),
    Case(
        title="Does not fire at 85 degrees if the limit is unknown or far",
        near="ZerowatchGpuHot",
        series=figure("temperature_celsius", (12, 85))
        | of_rank(0, "zerowatch_device_temperature_celsius", gauge((12, 85)), device="cuda:0")
        | of_rank(
            0, "zerowatch_device_temperature_limit_celsius", gauge((12, 95)), device="cuda:0"
        ),
        until="12m",
    ),
    *(
        Case(
            title=f"Fires on a fault that a single scrape reads, after {healthy} minutes: {name}",
            series=fault(metric, (healthy, before), (0.1, 1), **labels),
            alert=alert(name, severity, **xid),
            fires_at=fires_at,
            recovers_at=recovers_at,
        )
        for name, severity, metric, before, labels, xid in (
            ("Lost", "critical", "lost", 0, {}, {}),
            ("Xid", "critical", "xid_errors_total", GONE, {"xid": "79"}, {"xid": "79"}),
            ("RowRemapFailed", "critical", "row_remap", 0, {"state": "failed"}, {}),
            ("RowRemap", "warning", "row_remap", 0, {"state": "pending"}, {}),
        )
        # Each time the process is gone before the rules are evaluated.
        for healthy, fires_at, recovers_at in (
            (5, "5m15s", "1h6m15s"),
            (5.1, "5m15s", "1h6m15s"),
            (5.3, "5m30s", "1h6m30s"),
        )
    ),
)
