"""Tests of streams of events: their slots, slow clients, the end, and methods that only read."""

from __future__ import annotations

import contextlib
import itertools
import socket

import pytest
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.exporters import listener
from zerowatch.metrics.exporters.http_connection import Response
from zerowatch.metrics.exporters.listener import MAX_CLIENTS, MAX_STREAMS

REQUEST = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE_SECONDS = 120


def numbers(size: int = 0):
    """A page of events with their number, each followed by `size` bytes."""

    def page(_):
        count = itertools.count()

        def event() -> bytes:
            return b"data: %d %s\n\n" % (next(count), b"x" * size)

        return Response(content_type="text/event-stream", body=event(), next_event=event)

    return page


@pytest.fixture
def open_stream(monkeypatch):
    """A function that opens a stream; it ends with the test. Events follow each other quickly."""
    monkeypatch.setattr(listener, "EVENT_SECONDS", 0.02)
    with contextlib.ExitStack() as clients:

        def start(address: str, receive_buffer: int | None = None) -> socket.socket:
            host, port = address.rsplit(":", 1)
            client = clients.enter_context(socket.socket())
            if receive_buffer is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            client.settimeout(PATIENCE_SECONDS)
            client.connect((host, int(port)))
            client.sendall(REQUEST)
            return client

        yield start


def read_until(client: socket.socket, text: bytes) -> bytes:
    """Return what the client receives, up to the first part with the text, or to the end."""
    received = b""
    while text not in received:
        part = client.recv(65536)
        if not part:
            break
        received += part
    return received


def is_accepted(client: socket.socket) -> bool:
    return b" 200 OK" in read_until(client, b"\r\n\r\n")


def test_a_stream_sends_events_until_the_client_leaves(make_server, open_stream, monkeypatch):
    monkeypatch.setattr(listener, "CLIENT_TIMEOUT_SECONDS", 0.1)
    address = make_server(pages={"/events": numbers()}).start()

    received = read_until(open_stream(address), b"data: 20 ")

    head, _, events = received.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    assert b"content-length" not in head.lower()
    assert events.startswith(b"data: 0 \n\ndata: 1 \n\ndata: 2 ")


def test_a_stream_too_many_is_refused_and_the_others_continue(make_server, open_stream):
    address = make_server(pages={"/events": numbers()}).start()
    clients = [open_stream(address) for _ in range(MAX_STREAMS)]
    for client in clients:
        read_until(client, b"data: 0 ")

    status, _, text = get(address, "/events")

    assert status == 503
    assert "streams" in text
    assert all(b"data: " in read_until(client, b"data: ") for client in clients)


def test_the_slot_of_a_client_that_left_is_free_again(make_server, open_stream):
    address = make_server(pages={"/events": numbers()}).start()
    clients = [open_stream(address) for _ in range(MAX_STREAMS)]
    for client in clients:
        read_until(client, b"data: 0 ")

    clients[0].close()

    assert eventually(lambda: is_accepted(open_stream(address)))


def test_streams_take_no_slot_of_scrapes(make_server, open_stream, recorder):
    address = make_server(pages={"/events": numbers()}).start()
    streams = [open_stream(address) for _ in range(MAX_STREAMS)]
    for stream in streams:
        read_until(stream, b"data: 0 ")
    host, port = address.rsplit(":", 1)

    with contextlib.ExitStack() as clients:
        for _ in range(2 * MAX_CLIENTS):  # greedy clients, which replace each other
            clients.enter_context(socket.create_connection((host, int(port)), timeout=60))
        assert get(address)[0] == 200

    assert all(b"data: " in read_until(stream, b"data: ") for stream in streams)


def test_streams_whose_clients_read_nothing_do_not_disturb_scrapes_and_are_closed(
    make_server, open_stream, monkeypatch
):
    monkeypatch.setattr(listener, "STREAM_STALL_SECONDS", 0.5)
    sizes = itertools.chain([8_000_000] * MAX_STREAMS, itertools.repeat(0))
    address = make_server(pages={"/events": lambda _: numbers(next(sizes))(_)}).start()

    for _ in range(MAX_STREAMS):
        open_stream(address, receive_buffer=4096)

    assert [get(address)[0] for _ in range(3)] == [200, 200, 200]
    # Their slots become free for clients that keep them.
    for _ in range(MAX_STREAMS):
        assert eventually(lambda: is_accepted(open_stream(address)))


def test_a_stream_whose_events_fail_is_closed_and_counted(make_server, open_stream, recorder):
    def page(_):
        def fail() -> bytes:
            raise ValueError("no state")

        return Response(content_type="text/event-stream", body=b"data: 0\n\n", next_event=fail)

    address = make_server(pages={"/events": page}).start()

    received = read_until(open_stream(address), b"never")

    assert received.endswith(b"data: 0\n\n")
    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 1
    assert get(address)[0] == 200


def test_a_last_event_is_sent_when_the_server_closes(make_server, open_stream, monkeypatch):
    monkeypatch.setattr(listener, "EVENT_SECONDS", 3600)
    server = make_server(pages={"/events": numbers()})
    client = open_stream(server.start())
    read_until(client, b"data: 0 ")

    server.close()

    assert read_until(client, b"never") == b"data: 1 \n\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_than_get_and_head_are_refused(make_server, method):
    address = make_server().start()

    status, _, text = get(address, method=method)

    assert (status, text) == (405, "All pages are for reading: GET or HEAD.\n")


def test_head_returns_no_body_and_opens_no_stream(make_server):
    address = make_server(pages={"/events": numbers()}).start()

    assert get(address, method="HEAD")[::2] == (200, "")
    assert get(address, "/events", method="HEAD") == (200, "text/event-stream", "")


def test_no_response_lets_another_origin_read_it(make_server):
    host, port = make_server().start().rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nOrigin: http://foreign.example\r\n\r\n")
        head = read_until(client, b"never").partition(b"\r\n\r\n")[0].lower()

    assert b"access-control-" not in head
    assert b"cross-origin-resource-policy: same-origin" in head
    assert b"x-content-type-options: nosniff" in head
