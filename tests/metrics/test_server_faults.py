"""Tests of the HTTP server under faults: greedy and slow clients, no thread, no descriptors."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import threading
import time

import pytest
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.devices import DEVICE_POWER
from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.catalog.training import RUN_ACTIVE, STEPS
from zerowatch.metrics.exporters import listener, server
from zerowatch.metrics.exporters.http_connection import MAX_REQUEST_BYTES
from zerowatch.metrics.exporters.listener import CpuBudget

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}


def answers(address: str) -> bool:
    """Whether a scrape is answered now."""
    try:
        return get(address)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def refuse_threads(monkeypatch, name: str) -> None:
    """Let the start of threads fail whose name contains `name`, as under a limit of processes."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if name in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)


@pytest.fixture
def renderings(monkeypatch):
    """The Accept headers for which the metrics were rendered."""
    rendered = []

    def count(snapshot, rank, accept, **options):
        rendered.append(accept)
        return exposition(snapshot, rank, accept, **options)

    exposition = server.exposition
    monkeypatch.setattr(server, "exposition", count)
    return rendered


def test_scrapes_in_quick_succession_are_answered_with_one_rendering(
    make_server, recorder, renderings
):
    clock = [100.0]
    address = make_server(now=lambda: clock[0]).start()

    first = [get(address)[2] for _ in range(5)]
    recorder.add(STEPS, 1)
    clock[0] += 0.9 * server.RENDER_SECONDS
    early = get(address)[2]
    clock[0] += 0.2 * server.RENDER_SECONDS
    late = get(address)[2]

    assert {*first, early} == {first[0]}
    assert 'zerowatch_steps_total{rank="0"} 5.0\n' in late
    assert len(renderings) == 2


def test_each_format_has_its_own_rendering(make_server, renderings):
    address = make_server(now=lambda: 100.0).start()

    texts = [get(address, **headers)[2] for headers in ({}, OPENMETRICS, {}, OPENMETRICS)]

    assert [text.endswith("# EOF\n") for text in texts] == [False, True, False, True]
    assert len(renderings) == 2


def test_the_end_of_the_run_is_rendered_at_once(make_server, recorder):
    running = make_server(now=lambda: 100.0, linger_seconds=0)
    address = running.start()
    get(address)

    recorder.set(RUN_ACTIVE, 0)
    running.wait_for_final_scrape()

    assert 'zerowatch_run_active{rank="0"} 0.0\n' in get(address)[2]


def test_clients_are_accepted_as_fast_as_the_cpu_budget_allows():
    clock = [50.0]
    budget = CpuBudget(now=lambda: clock[0])
    served_seconds = 0.0

    while clock[0] < 150:  # greedy clients, each of which costs 3 ms
        clock[0] += budget.pause_seconds() or 0.003
        budget.spend(0.003)
        served_seconds += 0.003

    assert served_seconds <= 1.01 * (listener.CPU_BURST_SECONDS + 100 * listener.CPU_SHARE)


def test_a_scraper_every_second_is_never_delayed_by_the_cpu_budget():
    clock = [50.0]
    budget = CpuBudget(now=lambda: clock[0])
    pauses = []

    for _ in range(1000):
        clock[0] += 1
        pauses.append(budget.pause_seconds())
        budget.spend(0.015)

    assert max(pauses) == 0


def test_a_server_beyond_its_cpu_budget_accepts_nobody_and_can_be_closed(make_server):
    running = make_server()
    host, port = running.start().rsplit(":", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBudget, "pause_seconds", lambda _: 60.0)
        with socket.create_connection((host, int(port)), timeout=0.1) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                client.recv(1)
            closing = threading.Thread(target=running.close, daemon=True)
            closing.start()
            closing.join(120)

    assert not closing.is_alive()


def test_the_cpu_time_of_serving_is_spent_from_the_budget(make_server, monkeypatch):
    rendering_seconds, spent = 0.1, []

    def render_slowly(*arguments, **options):
        start = time.thread_time()
        while time.thread_time() - start < rendering_seconds:
            pass
        return exposition(*arguments, **options)

    exposition = server.exposition
    monkeypatch.setattr(server, "exposition", render_slowly)
    monkeypatch.setattr(CpuBudget, "spend", lambda _, cpu_seconds: spent.append(cpu_seconds))

    get(make_server().start())

    assert eventually(lambda: max(spent, default=0) >= rendering_seconds)


def drip(clients: list[socket.socket], stop: threading.Event) -> None:
    """Send requests that never end, byte by byte, until the server has closed all connections."""
    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
    while clients and not stop.wait(0.1):
        for client in list(clients):
            try:
                client.sendall(b"X")
            except OSError:
                clients.remove(client)


@pytest.fixture
def open_dripping():
    """A function that opens dripping connections; they end with the test."""
    stop = threading.Event()
    with contextlib.ExitStack() as clients:

        def start(address: str, number: int) -> list[socket.socket]:
            host, port = address.rsplit(":", 1)
            opened = [
                clients.enter_context(socket.create_connection((host, int(port)), timeout=120))
                for _ in range(number)
            ]
            thread = threading.Thread(target=drip, args=(list(opened), stop))
            thread.start()
            clients.callback(thread.join)
            clients.callback(stop.set)
            return opened

        yield start


@pytest.mark.parametrize("number", [8, 200])
def test_dripping_clients_do_not_delay_a_scrape(make_server, open_dripping, monkeypatch, number):
    monkeypatch.setattr(listener, "CLIENT_TIMEOUT_SECONDS", 3600)
    address = make_server().start()
    open_dripping(address, number)

    assert [answers(address) for _ in range(3)] == [True, True, True]


def test_clients_that_read_no_response_do_not_delay_a_scrape(make_server, recorder, monkeypatch):
    monkeypatch.setattr(listener, "CLIENT_TIMEOUT_SECONDS", 3600)
    for device in range(40_000):  # more than the system's buffers hold
        recorder.set(DEVICE_POWER, 300.0, f"cuda:{device}")
    address = make_server().start()
    host, port = address.rsplit(":", 1)

    with contextlib.ExitStack() as clients:
        for _ in range(8):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")

        assert answers(address)


def test_a_response_longer_than_the_systems_buffers_arrives_whole(make_server, recorder):
    for device in range(40_000):
        recorder.set(DEVICE_POWER, 300.0, f"cuda:{device}")

    _, _, text = get(make_server().start())

    assert text.count("zerowatch_device_power_watts{") == 40_000


def test_a_request_has_one_deadline_however_many_bytes_arrive(
    make_server, open_dripping, monkeypatch
):
    monkeypatch.setattr(listener, "CLIENT_TIMEOUT_SECONDS", 0.3)
    address = make_server().start()
    [client] = open_dripping(address, 1)

    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""


def test_a_request_that_is_too_long_is_refused(make_server):
    host, port = make_server().start().rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES)
        assert client.recv(12) == b"HTTP/1.0 431"


def test_a_request_in_pieces_is_answered(make_server):
    host, port = make_server().start().rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=120) as client:
        for piece in (b"GET /heal", b"thz HTTP/1.0\r\n", b"\r", b"\n"):
            client.sendall(piece)
        assert client.recv(12) == b"HTTP/1.0 200"


def test_without_a_free_descriptor_the_serving_thread_does_not_spin(
    make_server, recorder, monkeypatch
):
    monkeypatch.setattr(listener, "ACCEPT_RETRY_SECONDS", 0.1)
    address = make_server().start()
    host, port = address.rsplit(":", 1)
    tries = []

    def full_table(_):
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with socket.create_connection((host, int(port)), timeout=120) as waiting:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket.socket, "accept", full_table)
            waiting.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            with socket.create_connection((host, int(port)), timeout=120):
                assert eventually(lambda: len(tries) > 0)
                before = len(tries)
                time.sleep(0.3)
                assert len(tries) - before < 10
        assert waiting.recv(12) == b"HTTP/1.0 200"

    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == len(tries)
    assert answers(address)


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_a_serving_thread_that_dies_is_counted_and_serves_again(
    make_server, fail_open, monkeypatch, error
):
    address = make_server().start()
    accept, errors = socket.socket.accept, [error]

    def fail_once(listening):
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_once)

    assert get(address)[0] == 200
    assert errors == []
    assert fail_open.failures == {"http thread": 1}
    assert fail_open.num_dead_threads == 0


def test_a_serving_thread_that_always_dies_is_counted_as_dead_and_the_server_can_be_closed(
    make_server, fail_open, monkeypatch, caplog
):
    running = make_server()
    host, port = running.start().rsplit(":", 1)

    def fail(_):
        raise MemoryError

    monkeypatch.setattr(socket.socket, "accept", fail)
    with socket.create_connection((host, int(port)), timeout=120):
        died = eventually(lambda: fail_open.num_dead_threads == 1)
    closing = threading.Thread(target=running.close, daemon=True)
    closing.start()
    closing.join(120)

    assert died
    assert "http thread" in caplog.records[-1].message
    assert not closing.is_alive()
    assert fail_open.num_dead_threads == 0


def test_a_server_whose_thread_cannot_be_started_is_off(make_server, monkeypatch, caplog):
    refuse_threads(monkeypatch, "zerowatch-http")
    first = make_server()

    address = first.start()
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    closing.join(120)

    assert address is None
    assert not closing.is_alive()
    assert "serves no metrics, training continues" in caplog.text


def test_the_port_of_a_server_whose_thread_cannot_be_started_is_free(make_server):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch, "zerowatch-http")
        make_server(port=port, strict_port=True).start()

    assert make_server(port=port, strict_port=True).start() == f"127.0.0.1:{port}"


def test_without_a_thread_to_linger_on_the_server_closes_at_once(make_server, monkeypatch):
    running = make_server()
    address = running.start()
    refuse_threads(monkeypatch, "zerowatch-linger")

    running.close_after_final_scrape()

    assert not answers(address)
