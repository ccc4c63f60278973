"""Converts a snapshot to OTLP metrics. GPU metrics are also sent under OpenTelemetry's hw.* names.

The names are the same as on /metrics, so a query has the same meaning everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..catalog import devices, memory
from ..catalog.spec import MetricSpec
from ..recorder import Snapshot
from .telemetry_data import Family, Point

# The unit by the last word of a metric's name, without _total. Other names get no unit, because
# receivers that translate names for Prometheus would append the unit to the name.
_UNITS = {
    "seconds": "s",
    "bytes": "By",
    "ratio": "1",
    "watts": "W",
    "celsius": "Cel",
    "hertz": "Hz",
    "joules": "J",
}


def families(snapshot: Snapshot, rank: int) -> Iterator[Family]:
    """Yield every metric of a snapshot. Each series has the label `rank`, as on /metrics."""
    for spec, values in snapshot.values.items():
        if values:
            yield Family(
                name=spec.name,
                kind="counter" if spec.kind == "counter" else "gauge",
                unit=unit_of(spec.name),
                help=spec.help,
                points=[
                    Point(attributes=_named(spec, labels, rank), value=value)
                    for labels, value in values.items()
                ],
            )
    for spec, seen in snapshot.distributions.items():
        yield Family(
            name=spec.name,
            kind="histogram",
            unit=unit_of(spec.name),
            help=spec.help,
            points=[
                Point(attributes=_named(spec, labels, rank), value=one)
                for labels, one in seen.items()
            ],
            bounds=spec.buckets,
        )


def unit_of(name: str) -> str:
    """Return the unit at the end of a metric's name."""
    words = name.removesuffix("_total").split("_")
    return "" if "per" in words else _UNITS.get(words[-1], "")


def hardware_families(snapshot: Snapshot, hardware_ids: Mapping[str, str]) -> Iterator[Family]:
    """Yield GPU metrics in the form of OpenTelemetry's hardware conventions (semconv 0.66b2).

    Args:
        snapshot: The values.
        hardware_ids: The hardware id of each device. Devices without a hardware id are left out.
    """
    for hardware in _HARDWARE:
        points = [
            Point(
                attributes={
                    "hw.id": hardware_ids[device],
                    "hw.type": "gpu",
                    "hw.name": device,
                    **hardware.more(labels),
                },
                value=value,
            )
            for (device, *labels), value in snapshot.values.get(hardware.spec, {}).items()
            if device in hardware_ids and labels[: len(hardware.labels)] == list(hardware.labels)
        ]
        if points:
            yield Family(
                name=hardware.name,
                kind=hardware.kind,
                unit=hardware.unit,
                help=hardware.help,
                points=points,
            )


def _named(spec: MetricSpec, labels: tuple[str, ...], rank: int) -> dict[str, str]:
    return {"rank": str(rank), **dict(zip(spec.label_names, labels, strict=True))}


@dataclass(frozen=True, slots=True)
class _Hardware:
    """A metric of the hardware conventions, and the zerowatch metric that provides its value.

    `labels` selects series by the label values that follow the device.
    """

    name: str
    kind: Literal["counter", "updowncounter", "gauge"]
    unit: str
    help: str
    spec: MetricSpec
    labels: tuple[str, ...] = ()

    def more(self, labels: list[str]) -> dict[str, str]:
        """Return the attributes that distinguish several series of one GPU."""
        if self.spec is not devices.DEVICE_LINK_BYTES:
            return {}
        link, direction = labels
        way = "transmit" if direction == "sent" else "receive"
        return {"network.io.direction": way, "zerowatch.link": link}


_HARDWARE = (
    _Hardware(
        "hw.gpu.utilization",
        "gauge",
        "1",
        "Share of time the GPU was busy.",
        devices.DEVICE_UTILIZATION,
    ),
    _Hardware(
        "hw.gpu.memory.usage",
        "updowncounter",
        "By",
        "GPU memory this process has reserved.",
        memory.MEMORY_BYTES,
        ("reserved",),
    ),
    _Hardware(
        "hw.gpu.memory.limit",
        "updowncounter",
        "By",
        "GPU memory this process may reserve.",
        memory.MEMORY_LIMIT,
    ),
    _Hardware(
        "hw.gpu.io",
        "counter",
        "By",
        "Bytes over the GPU's links since monitoring started.",
        devices.DEVICE_LINK_BYTES,
    ),
    _Hardware("hw.power", "gauge", "W", "Power draw.", devices.DEVICE_POWER),
    _Hardware("hw.temperature", "gauge", "Cel", "Core temperature.", devices.DEVICE_TEMPERATURE),
    _Hardware(
        "hw.energy", "counter", "J", "Energy used since monitoring started.", devices.DEVICE_ENERGY
    ),
)
