"""Bytes and seconds of offload by direction: timed by the host, and by a device's events."""

from __future__ import annotations

import pytest
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock

from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.memory.offload import transfer_timer
from zerowatch.runtime.memory.offload.transfer_sizes import TransferBytes
from zerowatch.runtime.memory.offload.transfer_timer import DIRECTIONS, OffloadTimer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    host = ManualClock()
    monkeypatch.setattr(transfer_timer, "perf_counter_ns", host)
    return host


@pytest.fixture
def device(host: ManualClock, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device = FakeCuda(host)
    device.patch(monkeypatch)
    return device


def seconds(timer: OffloadTimer) -> dict[str, float]:
    timer.read_events()
    return {k: v for k, v in zip(DIRECTIONS, timer.seconds(), strict=True) if v}


def test_directions_are_the_metric_s():
    from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS

    for spec in (OFFLOAD_BYTES, OFFLOAD_SECONDS):
        assert spec.labels[0].values == DIRECTIONS


def test_bytes_add_up_by_direction(host):
    timer = OffloadTimer(None)

    timer.add(TransferBytes(to_host=3))
    timer.add(TransferBytes(to_host=4, from_nvme=5))

    assert timer.bytes == [7, 0, 0, 5]


def test_a_transfer_takes_the_host_s_time(host):
    timer = OffloadTimer(None)

    timer.start(TransferBytes(to_device=8))
    host.elapse(20)
    timer.stop()

    assert seconds(timer) == {"to_device": pytest.approx(0.020)}


def test_two_directions_share_the_time_of_a_transfer_by_their_bytes(host):
    timer = OffloadTimer(None)

    timer.start(TransferBytes(to_host=30, to_device=10))
    host.elapse(8)
    timer.stop()

    assert seconds(timer) == {"to_host": pytest.approx(0.006), "to_device": pytest.approx(0.002)}


def test_a_transfer_inside_another_interrupts_it(host):
    timer = OffloadTimer(None)

    timer.start(TransferBytes(to_host=8))
    host.elapse(1)
    timer.start(TransferBytes(to_nvme=8), on_stream=False)
    host.elapse(10)
    timer.stop()
    host.elapse(2)
    timer.stop()

    assert seconds(timer) == {"to_host": pytest.approx(0.003), "to_nvme": pytest.approx(0.010)}


def test_a_copy_on_a_stream_takes_the_stream_s_time(host, device):
    timer = OffloadTimer(EventPool())

    timer.start(TransferBytes(to_host=8))
    device.current.run(20)
    timer.stop()
    before = seconds(timer)
    device.synchronize()

    assert before == {}
    assert seconds(timer) == {"to_host": pytest.approx(0.020)}


def test_a_transfer_whose_stream_changes_is_timed_once_both_streams_have_passed_it(host, device):
    timer = OffloadTimer(EventPool())
    device.current.run(30)  # work before the transfer

    timer.start(TransferBytes(to_host=8))
    with device.stream(device.new_stream()):
        device.current.run(40)
        timer.stop()
    host.elapse(29)
    with device.stream(device.new_stream()):
        timer.start(TransferBytes(to_device=8))
        timer.stop()
    early = seconds(timer)
    device.synchronize()

    assert early == {}
    assert seconds(timer) == {"to_host": pytest.approx(0.010)}


def test_a_transfer_whose_end_is_passed_before_its_start_waits_for_both(host, device):
    timer = OffloadTimer(EventPool())
    device.current.run(30)

    timer.start(TransferBytes(to_host=8))
    with device.stream(device.new_stream()):
        timer.stop()  # at once, on a stream without work

    assert seconds(timer) == {}


def test_a_thread_that_must_not_query_the_device_drops_what_is_unread(host, device):
    events = EventPool()
    timer = OffloadTimer(events)
    timer.start(TransferBytes(to_host=8))
    device.current.run(20)
    timer.stop()
    host.elapse(30)

    events.disabled = True
    while_disabled = seconds(timer)
    events.disabled = False

    assert (while_disabled, seconds(timer)) == ({}, {})
    assert device.queried_by == set()


def test_reading_from_nvme_does_not_count_in_the_copy_that_follows_it(host, device):
    timer = OffloadTimer(EventPool())

    timer.start(TransferBytes(to_device=8))
    timer.start(TransferBytes(from_nvme=8), on_stream=False)
    host.elapse(50)
    timer.stop()
    device.current.run(3)
    timer.stop()
    device.synchronize()

    assert seconds(timer) == {"from_nvme": pytest.approx(0.050), "to_device": pytest.approx(0.003)}


def test_events_are_reused_and_the_device_is_never_synchronized(host, device):
    timer = OffloadTimer(EventPool())
    started_ns = host.now_ns

    for _ in range(10):
        timer.start(TransferBytes(to_host=8))
        device.current.run(1)
        timer.stop()
        assert host.now_ns == started_ns
        device.synchronize()
        timer.read_events()
        started_ns = host.now_ns

    assert device.num_events == 2
    assert seconds(timer) == {"to_host": pytest.approx(0.010)}


def test_no_event_is_recorded_during_graph_capture(host, device):
    timer = OffloadTimer(EventPool())
    device.capturing = True

    timer.start(TransferBytes(to_host=8))
    timer.stop()

    assert device.num_records == 0
    assert seconds(timer) == {}


def test_the_number_of_unread_events_is_bounded(host, device, monkeypatch):
    monkeypatch.setattr(transfer_timer, "MAX_UNREAD", 3)
    timer = OffloadTimer(EventPool())

    for _ in range(10):
        timer.start(TransferBytes(to_host=8))
        device.current.run(1)
        timer.stop()
    device.synchronize()

    assert seconds(timer) == {"to_host": pytest.approx(0.003)}


def test_no_event_is_recorded_while_the_pool_is_disabled(host, device):
    events = EventPool()
    events.disabled = True
    timer = OffloadTimer(events)

    timer.start(TransferBytes(to_host=8))
    timer.stop()

    assert device.num_records == 0
