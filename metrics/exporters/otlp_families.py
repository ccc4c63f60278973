"""Converts a snapshot to OTLP metrics. GPU metrics are also sent under OpenTelemetry's hw.* names.

The names are the same as on /metrics, so a query has the same meaning everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..catalog import devices, memory
from ..catalog.spec import MetricSpec
from ..recorder import Snapshot
from .prometheus import process_samples
from .telemetry_data import Family, Point

# UCUM's spelling of the units of names. Other metrics get no unit, because receivers that translate
# names for Prometheus would append the unit to the name.
_UNITS = {
    "seconds": "s",
    "bytes": "By",
    "ratio": "1",
    "watts": "W",
    "celsius": "Cel",
    "hertz": "Hz",
    "joules": "J",
}


def families(snapshot: Snapshot, identity: Mapping[str, str]) -> Iterator[Family]:
    """Yield every metric of a snapshot.

    Args:
        snapshot: The values.
        identity: The attributes `run`, `node` and `rank`, which every point gets. Receivers drop
            resource attributes by default, and Prometheus gets these labels from the targets only
            if it scrapes.
    """
    for spec, values in snapshot.values.items():
        if values:
            yield Family(
                name=spec.name,
                kind="counter" if spec.kind == "counter" else "gauge",
                unit=_UNITS.get(spec.unit, ""),
                help=spec.help,
                points=[
                    Point(attributes=_named(spec, labels, identity), value=value)
                    for labels, value in values.items()
                ],
            )
    for spec, seen in snapshot.distributions.items():
        yield Family(
            name=spec.name,
            kind="histogram",
            unit=_UNITS.get(spec.unit, ""),
            help=spec.help,
            points=[
                Point(attributes=_named(spec, labels, identity), value=one)
                for labels, one in seen.items()
            ],
            bounds=spec.buckets,
        )


def process_families(identity: Mapping[str, str]) -> Iterator[Family]:
    """Yield the start time of this process, which alerts read, under its name on /metrics.

    Args:
        identity: The attributes `run`, `node` and `rank`, which every point gets.
    """
    for metric, name, labels, value in process_samples(with_process=False):
        point = Point(attributes={**identity, **labels}, value=value)
        yield Family(name=name, kind="gauge", unit="s", help=metric.documentation, points=[point])


def hardware_families(
    snapshot: Snapshot, hardware_ids: Mapping[str, str], identity: Mapping[str, str]
) -> Iterator[Family]:
    """Yield GPU metrics in the form of OpenTelemetry's hardware conventions.

    Args:
        snapshot: The values.
        hardware_ids: The hardware id of each device. Devices without a hardware id are left out.
        identity: The attributes `run`, `node` and `rank`, which every point gets.
    """
    for hardware in _HARDWARE:
        points = [
            Point(
                attributes={
                    "hw.id": hardware_ids[device],
                    "hw.type": "gpu",
                    "hw.name": device,
                    **hardware.attributes(labels),
                    **identity,
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


def _named(
    spec: MetricSpec, labels: tuple[str, ...], identity: Mapping[str, str]
) -> dict[str, str]:
    return {**identity, **dict(zip(spec.label_names, labels, strict=True))}


@dataclass(frozen=True, slots=True)
class _Hardware:
    """A metric of the hardware conventions, and the zerowatch metric that provides its value.

    Attributes:
        name: The metric of the conventions.
        kind: Its instrument.
        unit: Its unit.
        help: The help text.
        spec: The zerowatch metric.
        labels: Selects series by the label values that follow the device.
        attributes: Returns further attributes from the label values that follow the device.
    """

    name: str
    kind: Literal["counter", "updowncounter", "gauge"]
    unit: str
    help: str
    spec: MetricSpec
    labels: tuple[str, ...] = ()
    attributes: Callable[[list[str]], Mapping[str, str]] = lambda _: {}


def _link_attributes(labels: list[str]) -> Mapping[str, str]:
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
        attributes=_link_attributes,
    ),
    _Hardware("hw.power", "gauge", "W", "Power draw.", devices.DEVICE_POWER),
    _Hardware("hw.temperature", "gauge", "Cel", "Core temperature.", devices.DEVICE_TEMPERATURE),
    _Hardware(
        "hw.temperature.limit",
        "gauge",
        "Cel",
        "Core temperature at which the GPU lowers its clock.",
        devices.DEVICE_TEMPERATURE_LIMIT,
        attributes=lambda _: {"hw.limit_type": "throttled"},
    ),
    _Hardware(
        "hw.errors",
        "counter",
        "{error}",
        "Memory errors since monitoring started.",
        devices.DEVICE_ECC_ERRORS,
        attributes=lambda labels: {"error.type": labels[0]},
    ),
    _Hardware(
        "hw.energy", "counter", "J", "Energy used since monitoring started.", devices.DEVICE_ENERGY
    ),
)
