"""Tests of one connection of the HTTP server, over a pair of sockets that do not block."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from zerowatch.metrics.exporters.http_connection import (
    Connection,
    Request,
    RequestHandler,
    Response,
)

GET = b"GET /metrics HTTP/1.0\r\n\r\n"
FIGURES = Response(content_type="text/plain", body=b"some figures")
Connect = Callable[..., tuple[Connection, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that makes a connection with a response as its answer, and its client."""
    with contextlib.ExitStack() as sockets:

        def connect(
            response: Response = FIGURES, asked: list[Request] | None = None
        ) -> tuple[Connection, socket.socket]:
            def answer(request: Request) -> Response:
                if asked is not None:
                    asked.append(request)
                return response

            ours, client = socket.socketpair()
            for end in (ours, client):
                end.setblocking(False)
                sockets.enter_context(end)
            handler = RequestHandler(answer=answer, failed=lambda _: None, spent=lambda _: None)
            return Connection(ours, ("127.0.0.1", 1), handler, 0.0, lambda: True), client

        yield connect


def read_available(client: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := client.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def test_a_response_larger_than_the_sockets_buffer_goes_on_once_the_client_reads(
    connect: Connect,
) -> None:
    body = bytes(8 << 20)
    clients: list[str] = []
    response = Response(content_type="text/plain", body=body, sent=clients.append)
    connection, client = connect(response)
    client.sendall(GET)
    received, sent_early = [], []

    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        while events := connection.advance():
            sent_early += clients
            received.append(read_available(client))
            selector.modify(connection.socket, events)
            assert selector.select(0)
    received.append(read_available(client))

    assert len(received) > 2
    assert b"".join(received).endswith(b"\r\n\r\n" + body)
    assert (len(sent_early), len(clients)) == (0, 1)


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"])
def test_a_request_that_arrives_in_parts_is_read_to_its_end(
    connect: Connect, newline: bytes
) -> None:
    connection, client = connect()

    waited_for = []
    for part in (b"GET / HT", b"TP/1.0" + newline, b"Accept: text/plain" + newline, newline):
        waited_for.append(connection.advance())
        client.sendall(part)

    assert waited_for == [selectors.EVENT_READ] * 4
    assert connection.advance() == 0
    assert read_available(client).endswith(b"\r\n\r\nsome figures")


@pytest.mark.parametrize("leaves", ["before the answer", "after it"])
def test_a_scrape_counts_unless_its_client_has_gone_before_the_answer(
    connect: Connect, leaves: str
) -> None:
    scrapes: list[str] = []
    connection, client = connect(replace(FIGURES, sent=scrapes.append))
    client.sendall(GET)
    if leaves == "before the answer":
        client.shutdown(socket.SHUT_WR)

    assert connection.advance() == 0

    assert len(scrapes) == (leaves == "after it")
    assert read_available(client).endswith(b"some figures")  # it may have closed one side only


def test_two_scrapers_of_one_machine_with_other_timeouts_have_other_names(connect: Connect) -> None:
    names: list[str] = []
    for seconds in (b"10", b"15", b"10"):
        connection, client = connect(
            Response(content_type="text/plain", body=b"", sent=names.append)
        )
        timeout = b"X-Prometheus-Scrape-Timeout-Seconds: " + seconds
        client.sendall(b"GET / HTTP/1.0\r\nUser-Agent: Prometheus\r\n" + timeout + b"\r\n\r\n")
        connection.advance()

    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize(
    ("header", "is_browser"),
    [
        (b"Accept-Language: de", True),
        (b"Sec-Fetch-Mode: cors", True),
        (b"User-Agent: Prometheus", False),
    ],
)
def test_a_browser_is_recognized_by_each_header_that_only_browsers_send(
    connect: Connect, header: bytes, is_browser: bool
) -> None:
    asked: list[Request] = []
    connection, client = connect(FIGURES, asked)
    client.sendall(b"GET /metrics?name=x HTTP/1.0\r\n" + header + b"\r\n\r\n")

    connection.advance()

    assert [(each.path, each.query, each.is_browser) for each in asked] == [
        ("/metrics", "name=x", is_browser)
    ]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (b"X-Prometheus-Scrape-Timeout-Seconds: 9.5", 9.5),
        (b"X-Prometheus-Scrape-Timeout-Seconds: 10s", None),
        (b"X-Prometheus-Scrape-Timeout-Seconds: 0", None),
        (b"X-Prometheus-Scrape-Timeout-Seconds: nan", None),
        (b"X-Prometheus-Scrape-Timeout-Seconds: inf", None),
        (b"User-Agent: curl/8.5.0", None),
    ],
)
def test_a_scrape_has_the_timeout_of_its_header(
    connect: Connect, header: bytes, seconds: float | None
) -> None:
    asked: list[Request] = []
    connection, client = connect(FIGURES, asked)
    client.sendall(b"GET /metrics HTTP/1.0\r\n" + header + b"\r\n\r\n")

    connection.advance()

    assert [each.scrape_timeout_seconds for each in asked] == [seconds]


@pytest.fixture
def stream() -> Response:
    return Response(content_type="text/event-stream", body=b"0\n", next_event=lambda: b"1\n")


def test_the_headers_of_a_stream_have_no_length_and_those_of_a_page_have_one(
    connect: Connect, stream: Response
) -> None:
    lengths = []
    for response in (stream, FIGURES):
        connection, client = connect(response)
        client.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        assert connection.advance() == 0
        lengths.append(b"Content-Length" in read_available(client))

    assert lengths == [False, True]


def test_a_client_of_a_stream_that_sends_more_is_disconnected_and_gets_no_second_answer(
    connect: Connect, stream: Response
) -> None:
    connection, client = connect(stream)
    client.sendall(GET)
    assert connection.advance() == selectors.EVENT_READ
    assert connection.send_event() == selectors.EVENT_READ

    client.sendall(GET)

    assert connection.advance() == 0
    assert read_available(client).endswith(b"\r\n\r\n0\n1\n")
