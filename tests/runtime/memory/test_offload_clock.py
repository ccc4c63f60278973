"""Bytes and seconds of offloading by direction: on the host's clock, and on a device's events."""

from __future__ import annotations

import pytest
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import HandClock

from zerowatch.runtime.collectives.events import EventPool
from zerowatch.runtime.memory.offload import clock as offload_clock
from zerowatch.runtime.memory.offload.clock import DIRECTIONS, OffloadClock
from zerowatch.runtime.memory.offload.transfer_sizes import Moves


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    host = HandClock()
    monkeypatch.setattr(offload_clock, "perf_counter_ns", host)
    return host


@pytest.fixture
def device(host: HandClock, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device = FakeCuda(host)
    device.patch(monkeypatch)
    return device


def seconds(clock: OffloadClock) -> dict[str, float]:
    clock.settle()
    return {k: v for k, v in zip(DIRECTIONS, clock.seconds(), strict=True) if v}


def test_directions_are_the_metric_s():
    from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS

    for spec in (OFFLOAD_BYTES, OFFLOAD_SECONDS):
        assert spec.labels[0].values == DIRECTIONS


def test_bytes_add_up_by_direction(host):
    clock = OffloadClock(None)

    clock.count(Moves(to_host=3))
    clock.count(Moves(to_host=4, from_nvme=5))

    assert clock.bytes == [7, 0, 0, 5]


def test_a_stretch_lasts_as_long_as_the_host_was_in_it(host):
    clock = OffloadClock(None)

    clock.begin(Moves(to_device=8))
    host.elapse(20)
    clock.end()

    assert seconds(clock) == {"to_device": pytest.approx(0.020)}


def test_two_directions_share_a_stretch_by_their_bytes(host):
    clock = OffloadClock(None)

    clock.begin(Moves(to_host=30, to_device=10))
    host.elapse(8)
    clock.end()

    assert seconds(clock) == {"to_host": pytest.approx(0.006), "to_device": pytest.approx(0.002)}


def test_what_is_inside_a_stretch_interrupts_it(host):
    clock = OffloadClock(None)

    clock.begin(Moves(to_host=8))
    host.elapse(1)
    clock.begin(Moves(to_nvme=8), on_stream=False)
    host.elapse(10)
    clock.end()
    host.elapse(2)
    clock.end()

    assert seconds(clock) == {"to_host": pytest.approx(0.003), "to_nvme": pytest.approx(0.010)}


def test_a_copy_on_a_stream_lasts_as_long_as_the_stream_takes(host, device):
    clock = OffloadClock(EventPool())

    clock.begin(Moves(to_host=8))
    device.current.run(20)
    clock.end()
    before = seconds(clock)
    device.synchronize()

    assert before == {}
    assert seconds(clock) == {"to_host": pytest.approx(0.020)}


def test_reading_from_nvme_is_no_part_of_the_copy_that_follows_it(host, device):
    clock = OffloadClock(EventPool())

    clock.begin(Moves(to_device=8))
    clock.begin(Moves(from_nvme=8), on_stream=False)
    host.elapse(50)
    clock.end()
    device.current.run(3)
    clock.end()
    device.synchronize()

    assert seconds(clock) == {"from_nvme": pytest.approx(0.050), "to_device": pytest.approx(0.003)}


def test_events_are_used_again_and_the_device_is_never_waited_for(host, device):
    clock = OffloadClock(EventPool())
    started_ns = host.now_ns

    for _ in range(10):
        clock.begin(Moves(to_host=8))
        device.current.run(1)
        clock.end()
        assert host.now_ns == started_ns
        device.synchronize()
        clock.settle()
        started_ns = host.now_ns

    assert device.num_events == 2
    assert seconds(clock) == {"to_host": pytest.approx(0.010)}


def test_nothing_is_recorded_into_a_graph_that_is_captured(host, device):
    clock = OffloadClock(EventPool())
    device.capturing = True

    clock.begin(Moves(to_host=8))
    clock.end()

    assert device.num_records == 0
    assert seconds(clock) == {}


def test_events_that_nobody_reads_do_not_pile_up(host, device, monkeypatch):
    monkeypatch.setattr(offload_clock, "MAX_UNREAD", 3)
    clock = OffloadClock(EventPool())

    for _ in range(10):
        clock.begin(Moves(to_host=8))
        device.current.run(1)
        clock.end()
    device.synchronize()

    assert seconds(clock) == {"to_host": pytest.approx(0.003)}


def test_where_events_cannot_be_read_none_is_recorded(host, device):
    events = EventPool()
    events.disabled = True
    clock = OffloadClock(events)

    clock.begin(Moves(to_host=8))
    clock.end()

    assert device.num_records == 0
