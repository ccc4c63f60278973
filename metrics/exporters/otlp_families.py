"""Converts a snapshot to OTLP metrics: all by their own names, GPU metrics also as hw.*.

The names are those of /metrics, so that a query means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..catalog import devices, memory
from ..catalog.spec import MetricSpec
from ..recorder import Snapshot
from .telemetry_data import Family, Point

# By the last word of a name without _total. Other names have no unit, because receivers that
# translate names for Prometheus append it.
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
    """Yield every metric of a snapshot, each series with its rank, as on /metrics."""
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
    """Return the unit that a metric's name ends in."""
    words = name.removesuffix("_total").split("_")
    return "" if "per" in words else _UNITS.get(words[-1], "")


def hardware_families(snapshot: Snapshot, hardware_ids: Mapping[str, str]) -> Iterator[Family]:
    """Yield GPU metrics by OpenTelemetry's hardware conventions (semconv 0.66b2).

    Args:
        snapshot: The values.
        hardware_ids: The hardware id of each device; devices without one are left out.
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
    """A metric of the conventions, and the zerowatch metric that provides its value.

    `labels` selects series by the labels after the device.
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
        memory.MEMORY_BYTES,
        ("limit",),
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
