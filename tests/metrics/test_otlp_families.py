"""Metrics in the terms of OTLP: units, kinds and attributes, and those of GPUs by hw.* names."""

from __future__ import annotations

import pytest

from zerowatch.metrics.catalog import devices, memory, training
from zerowatch.metrics.exporters.otlp_families import (
    families,
    hardware_families,
    process_families,
)
from zerowatch.metrics.exporters.prometheus import process_samples
from zerowatch.metrics.exporters.telemetry_data import Family, Point
from zerowatch.metrics.recorder import Recorder

IDENTITY = {"run": "night-7", "node": "a", "rank": "3"}
GPU = {"hw.id": "GPU-1", "hw.type": "gpu", "hw.name": "cuda:0", **IDENTITY}


@pytest.mark.parametrize(
    ("spec", "labels", "kind", "unit"),
    [
        (training.PHASE_SECONDS, ("data",), "counter", "s"),
        (training.STEPS, (), "counter", ""),
        (training.LOSS, (), "gauge", ""),
        (training.MFU, (), "gauge", "1"),
        (memory.MEMORY_LIMIT, ("cpu",), "gauge", "By"),
        (devices.DEVICE_POWER, ("cpu",), "gauge", "W"),
        (devices.DEVICE_TEMPERATURE, ("cpu",), "gauge", "Cel"),
        (devices.DEVICE_CLOCK, ("cpu",), "gauge", "Hz"),
        (devices.DEVICE_ENERGY, ("cpu",), "counter", "J"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_metric_has_its_kind_unit_and_the_identity_of_its_rank(spec, labels, kind, unit):
    recorder = Recorder()
    (recorder.add if spec.kind == "counter" else recorder.set)(spec, 7, *labels)

    assert list(families(recorder.snapshot(), IDENTITY)) == [
        Family(
            name=spec.name,
            kind=kind,
            unit=unit,
            help=spec.help,
            points=[
                Point(
                    attributes={**IDENTITY, **dict(zip(spec.label_names, labels, strict=True))},
                    value=7,
                )
            ],
        )
    ]


def test_the_start_time_of_the_process_is_a_gauge_under_its_name_on_metrics():
    ((_, _, _, started),) = process_samples(with_process=False)

    (found,) = process_families(IDENTITY)

    assert (found.name, found.kind, found.unit) == ("process_start_time_seconds", "gauge", "s")
    assert found.points == [Point(attributes=IDENTITY, value=started)]


def test_a_histogram_has_its_bounds():
    recorder = Recorder()
    recorder.observe(training.STEP_DURATION, 0.012)

    (found,) = families(recorder.snapshot(), IDENTITY)

    assert (found.name, found.kind, found.unit) == (training.STEP_DURATION.name, "histogram", "s")
    assert found.bounds == training.STEP_DURATION.buckets
    assert [(point.attributes, point.value.count) for point in found.points] == [(IDENTITY, 1)]


@pytest.mark.parametrize(
    ("spec", "labels", "name", "kind", "unit", "more"),
    [
        (devices.DEVICE_UTILIZATION, (), "hw.gpu.utilization", "gauge", "1", {}),
        (memory.MEMORY_BYTES, ("reserved",), "hw.gpu.memory.usage", "updowncounter", "By", {}),
        (memory.MEMORY_LIMIT, (), "hw.gpu.memory.limit", "updowncounter", "By", {}),
        (
            devices.DEVICE_LINK_BYTES,
            ("pcie", "sent"),
            "hw.gpu.io",
            "counter",
            "By",
            {"network.io.direction": "transmit", "zerowatch.link": "pcie"},
        ),
        (
            devices.DEVICE_LINK_BYTES,
            ("nvlink", "received"),
            "hw.gpu.io",
            "counter",
            "By",
            {"network.io.direction": "receive", "zerowatch.link": "nvlink"},
        ),
        (devices.DEVICE_POWER, (), "hw.power", "gauge", "W", {}),
        (devices.DEVICE_TEMPERATURE, (), "hw.temperature", "gauge", "Cel", {}),
        (
            devices.DEVICE_TEMPERATURE_LIMIT,
            (),
            "hw.temperature.limit",
            "gauge",
            "Cel",
            {"hw.limit_type": "throttled"},
        ),
        (
            devices.DEVICE_ECC_ERRORS,
            ("corrected",),
            "hw.errors",
            "counter",
            "{error}",
            {"error.type": "corrected"},
        ),
        (devices.DEVICE_ENERGY, (), "hw.energy", "counter", "J", {}),
    ],
)
def test_a_metric_of_a_gpu_has_the_name_and_unit_of_the_hardware_conventions(
    spec, labels, name, kind, unit, more
):
    recorder = Recorder()
    (recorder.add if spec.kind == "counter" else recorder.set)(spec, 7, "cuda:0", *labels)

    (found,) = hardware_families(recorder.snapshot(), {"cuda:0": "GPU-1"}, IDENTITY)

    assert (found.name, found.kind, found.unit) == (name, kind, unit)
    assert found.points == [Point(attributes={**GPU, **more}, value=7)]


def test_devices_without_an_id_and_memory_in_other_states_are_left_out():
    recorder = Recorder()
    recorder.set(devices.DEVICE_POWER, 7, "cpu")
    recorder.set(memory.MEMORY_BYTES, 7, "cuda:0", "allocated")

    assert list(hardware_families(recorder.snapshot(), {"cuda:0": "GPU-1"}, IDENTITY)) == []
