"""The faults of a GPU that the bench plants, and the alert that each should raise.

No machine of the bench has a GPU. The ranks train on the CPU, and their probe of devices is
`nvml_device(0)` with the real pynvml, which loads a scripted library in place of NVIDIA's
(`fakes/nvml_library.c`). From the answers of NVML on, everything is real.

The list was committed before its first run. Nothing is added, removed or exchanged because of a
result; if an alert gets another name, the name here follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.incidents.planted_incidents import CRITICAL_SECONDS, Incident

# What NVML of rank 1 answers after the fault, by the keys of nvml_library.c.
ANSWERS: Mapping[str, Mapping[str, object]] = {
    "gpu-lost": {"0.lost": 15},  # NVML_ERROR_GPU_IS_LOST
    "gpu-xid-79": {"0.xids": "79"},
    "gpu-xid-31": {"0.xids": "31"},
    "gpu-uncorrectable-ecc": {"0.ecc1.0": 1},
    "gpu-row-remap-failed": {"0.remap_failed": 1},
    "gpu-row-remap-pending": {"0.remap_pending": 1},
    "gpu-nvlink-replay": {"0.link3.0": 1},
    "gpu-pcie-replays": {"0.pcie_replays": 104},  # 100 more than before
    "gpu-thermal-slowdown": {"0.reasons": 0x40 | 0x08},
    "gpu-power-brake": {"0.reasons": 0x80 | 0x08},
    "gpu-hot": {"0.temperature": 86},  # its limit is 88
}


def _incident(name: str, fault: str, alert: str, *also: str, critical: bool = False) -> Incident:
    return Incident(
        name=name,
        fault=fault,
        alert=alert,
        also=also,
        goal_seconds=CRITICAL_SECONDS if critical else None,
        names_host=True,
    )


HARDWARE_INCIDENTS = (
    _incident("gpu-lost", "NVML no longer reaches the GPU", "GpuLost", critical=True),
    _incident("gpu-xid-79", "the GPU fell off the PCIe bus (XID 79)", "GpuXid", critical=True),
    _incident("gpu-xid-31", "a memory page fault (XID 31)", "GpuXidMinor"),
    _incident(
        "gpu-uncorrectable-ecc",
        "one uncorrectable ECC error",
        "GpuUncorrectableEcc",
        critical=True,
    ),
    _incident(
        "gpu-row-remap-failed",
        "a faulty row of memory could not be replaced",
        "GpuRowRemapFailed",
        critical=True,
    ),
    _incident(
        "gpu-row-remap-pending",
        "a faulty row of memory is replaced at the next reset",
        "GpuRowRemap",
    ),
    _incident("gpu-nvlink-replay", "one replay on one NVLink", "GpuLinkErrors"),
    _incident("gpu-pcie-replays", "100 replays on the PCIe link", "GpuLinkErrors"),
    _incident("gpu-thermal-slowdown", "heat lowers the clock", "GpuThrottled"),
    _incident("gpu-power-brake", "the power brake lowers the clock", "GpuThrottled"),
    _incident("gpu-hot", "two degrees below the temperature limit", "GpuHot"),
)
