"""Test cases of the alerts on the figures of dcgm-exporter."""

from __future__ import annotations

from rules.cases.hardware import CARD, card
from rules.history import GONE, SCRAPE, Series, Stretch, counter, gauge
from rules.promtool import Case, annotations_of

LABELS = {
    "component": "devices",
    "UUID": CARD["uuid"],
    "uuid": CARD["uuid"],
    "Hostname": "node-1",
    "node": "node-1",
    "gpu": "3",
}
OF_RUN = {
    "job": "zerowatch",
    "run": "night-7",
    "rank": "1",
    "device": "cuda:0",
    "pci_bus_id": CARD["pci_bus_id"],
}
AT = "GPU 3 on node-1"
IN_USE = "Rank 1 of training night-7 uses it."
THE_CARD = "The card is GPU-1b2c, PCI address 00000000:1B:00.0."


def alert(name: str, severity: str, **labels: str) -> dict[str, str]:
    return {"alertname": f"ZerowatchDcgm{name}", "severity": severity, **LABELS, **labels}


def served(field: str, values: str, **labels: str) -> Series:
    """Return a series as dcgm-exporter serves it."""
    known = {
        "job": "dcgm",
        "instance": "node-1:9400",
        "UUID": CARD["uuid"],
        "pci_bus_id": CARD["pci_bus_id"],
        "gpu": "3",
        "device": "nvidia3",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "node-1",
        **labels,
    }
    matchers = ", ".join(f'{name}="{value}"' for name, value in known.items())
    return {f"DCGM_FI_DEV_{field}{{{matchers}}}": values}


def grown(field: str, *stretches: Stretch) -> Series:
    return served(field, counter(*stretches))


def stands(field: str, *stretches: Stretch) -> Series:
    return served(field, gauge(*stretches))


CASES = (
    Case(
        title="From dcgm-exporter: does not fire again on an old XID an hour after a failed scrape",
        near="ZerowatchDcgmXid",
        series=stands("XID_ERRORS", (70, 79), (SCRAPE, GONE), (75, 79)),
        since="65m",
        until="140m",
    ),
    Case(
        title="From dcgm-exporter: nor an hour after Prometheus was down for half an hour",
        near="ZerowatchDcgmXid",
        series=stands("XID_ERRORS", (70, 79), (30, GONE), (75, 79)),
        since="65m",
        until="175m",
    ),
    Case(
        title="From dcgm-exporter: fires on an XID that asks for a reset, with the rank on the GPU",
        series=card(72)
        | served("XID_ERRORS", gauge((5, 0), (67, GONE)), err_code="0")
        | served("XID_ERRORS", gauge((5, GONE), (67, 48)), err_code="48"),
        alert=alert("Xid", "critical", xid="48", **OF_RUN),
        fires_at="5m15s",
        recovers_at="1h10m15s",
        annotations=annotations_of(
            "ZerowatchGpuXid",
            dashboard="zerowatch-devices",
            about_run=False,
            summary=f"XID 48 at {AT}",
            description="The XID asks for a reset of the GPU or a restart of the machine. Drain "
            f"the node. {IN_USE} {THE_CARD}",
        ),
    ),
    Case(
        title="From dcgm-exporter: fires on an XID of the script, though no run is monitored",
        series=stands("XID_ERRORS", (5, 0), (67, 31)),
        alert=alert("XidMinor", "warning", xid="31"),
        fires_at="5m15s",
        recovers_at="1h10m15s",
    ),
    *(
        Case(
            title=f"From dcgm-exporter: fires on XID {xid} again, an hour after a repair",
            series=stands("XID_ERRORS", (65, xid), (65, 0), (70, xid)),
            alert=alert(name, severity, xid=str(xid)),
            since="70m",
            fires_at="130m15s",
            recovers_at="195m15s",
        )
        for name, severity, xid in (("Xid", "critical", 79), ("XidMinor", "warning", 31))
    ),
    *(
        Case(
            title=f"From dcgm-exporter: fires on an XID again, {minutes} minutes after a repair",
            series=stands("XID_ERRORS", (70, 79), (minutes, 0), (70, 79)),
            alert=alert("Xid", "critical", xid="79"),
            since="70m",
            fires_at=f"{70 + minutes}m15s",
            recovers_at=f"{70 + minutes + 65}m15s",
        )
        for minutes in (2, 20)
    ),
    Case(
        title="From dcgm-exporter: fires on an uncorrectable memory error",
        series=grown("ECC_DBE_VOL_TOTAL", (5, 0), (0.1, 1 / 7), (6, 0)),
        alert=alert("UncorrectableEcc", "critical"),
        fires_at="5m15s",
        recovers_at="1h10m",
    ),
    Case(
        title="From dcgm-exporter: fires if a row of memory could not be remapped",
        series=stands("ROW_REMAP_FAILURE", (5, 0), (1, 1), (6, 0)),
        alert=alert("RowRemapFailed", "critical"),
        fires_at="5m15s",
        recovers_at="11m15s",
    ),
    Case(
        title="From dcgm-exporter: fires if a row of memory waits to be remapped",
        series=stands("ROW_REMAP_PENDING", (5, 0), (1, 1), (6, 0)),
        alert=alert("RowRemap", "warning"),
        fires_at="5m15s",
        recovers_at="11m15s",
    ),
    Case(
        title="From dcgm-exporter: fires on one replay of an NVLink",
        series=grown("NVLINK_REPLAY_ERROR_COUNT_TOTAL", (5, 0), (0.1, 1 / 7), (38, 0)),
        alert=alert("LinkErrors", "warning", link="nvlink", kind="replay"),
        fires_at="5m15s",
        recovers_at="40m",
    ),
    Case(
        title="From dcgm-exporter: fires on 12 PCIe replays per minute",
        series=grown("PCIE_REPLAY_COUNTER", (5, 0), (10, 0.2), (36, 0)),
        alert=alert("LinkErrors", "warning", link="pcie", kind="replay"),
        fires_at="8m30s",
        recovers_at="46m45s",
    ),
    Case(
        title="From dcgm-exporter: fires if heat lowers the clock",
        series=stands("CLOCKS_EVENT_REASONS", (5, 0x01 | 0x04 | 0x10), (10, 0x08 | 0x40), (12, 0)),
        alert=alert("Throttled", "warning"),
        fires_at="7m15s",
        recovers_at="20m15s",
    ),
    Case(
        title="From dcgm-exporter: fires at 88 degrees",
        series=stands("GPU_TEMP", (5, 60), (10, 88), (8, 60)),
        alert=alert("Hot", "warning"),
        fires_at="10m15s",
        recovers_at="20m15s",
    ),
    Case(
        title="From dcgm-exporter: does not fire on a healthy GPU",
        series=stands("XID_ERRORS", (15, 0))
        | stands("ROW_REMAP_FAILURE", (15, 0))
        | stands("ROW_REMAP_PENDING", (15, 0))
        | stands("CLOCKS_EVENT_REASONS", (15, 0x01 | 0x02 | 0x04 | 0x10 | 0x100))
        | stands("GPU_TEMP", (15, 70))
        | grown("ECC_DBE_VOL_TOTAL", (15, 0))
        | grown("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", (15, 5)),
        until="15m",
    ),
)
