"""Reads one HTTP request from a client and writes the response, without ever waiting."""

from __future__ import annotations

import io
import selectors
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

# Prometheus and compatible scrapers send this header with each scrape.
SCRAPE_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"
# Longest request line with headers. A scrape has less than 1 KiB.
MAX_REQUEST_BYTES = 16 * 1024
_CHUNK_BYTES = 4096
_ENDS_OF_REQUEST = (b"\r\n\r\n", b"\n\n")
_TOO_LARGE = (
    b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Type: text/plain\r\n\r\n"
    b"The request is longer than 16 KiB.\n"
)
_FAILED = (
    b"HTTP/1.0 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\n"
    b"This page could not be made; the log of the training says why.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A GET request: its path with the query, and two of its headers, empty if absent."""

    path: str
    accept: str = ""
    authorization: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response. `sent` is called with the client's name after the response is written."""

    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHandler:
    """The functions that the listener calls.

    `failed` receives the error if `answer` fails, or None if there are too many clients. `spent`
    receives the CPU seconds that serving has used.
    """

    answer: Callable[[Request], Response]
    failed: Callable[[BaseException | None], None]
    spent: Callable[[float], None]


class Connection:
    """One client, from its first byte to the last byte of the response.

    Args:
        client: The socket, which does not block. An SSL socket may still need its handshake.
        address: The client's address.
        handler: Answers the request.
        accepted_at: The time of acceptance, by a monotonic clock, in seconds.
    """

    def __init__(
        self,
        client: socket.socket,
        address: Any,
        handler: RequestHandler,
        accepted_at: float,
    ) -> None:
        self.socket = client
        self.accepted_at = accepted_at
        self._address = address
        self._handler = handler
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._after_sending: Callable[[], None] = lambda: None

    def advance(self) -> int:
        """Read or write as much as possible now.

        Returns:
            The events of `selectors` to wait for before the next call, or 0 if the connection can
            be closed: the response is written, or the client has disconnected.
        """
        try:
            if not self._unsent:
                self._receive_and_answer()
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except BlockingIOError:
            return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
        except OSError:  # the client has disconnected, or does not use TLS
            return 0
        self._after_sending()
        return 0

    def _receive_and_answer(self) -> None:
        while not any(end in self._received for end in _ENDS_OF_REQUEST):
            data = self.socket.recv(_CHUNK_BYTES)  # also performs the TLS handshake
            if not data:
                raise ConnectionResetError
            self._received += data
            if len(self._received) > MAX_REQUEST_BYTES:
                self._unsent = memoryview(_TOO_LARGE)
                return
        self._unsent = memoryview(self._response())

    def _response(self) -> bytes:
        with _CaughtError() as caught:
            exchange = _Exchange(bytes(self._received), self._address, self._handler.answer)
            self._after_sending = exchange.after_sending
            return exchange.wfile.getvalue()
        self._handler.failed(caught.error)
        return _FAILED


class _CaughtError:
    """Catches an error of the server, so that the client gets status 500."""

    error: Exception | None = None

    def __enter__(self) -> _CaughtError:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


class _Exchange(BaseHTTPRequestHandler):
    """Parses a request that has arrived completely, and writes the response into memory."""

    server_version = "zerowatch"
    sys_version = ""
    wfile: io.BytesIO

    def __init__(self, request: bytes, address: Any, answer: Callable[[Request], Response]) -> None:
        # The base class would read from a socket, and wait for it.
        self.rfile, self.wfile = io.BytesIO(request), io.BytesIO()
        self.client_address = address
        self._answer = answer
        self._sent: Callable[[str], None] | None = None
        self.handle_one_request()

    def do_GET(self) -> None:
        """Answer a GET request."""
        request = Request(
            path=self.path,
            accept=self.headers.get("Accept", ""),
            authorization=self.headers.get("Authorization", ""),
        )
        answer = self._answer(request)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)
        self._sent = answer.sent

    def after_sending(self) -> None:
        """Call the response's `sent`, if it has one, with the name of the client."""
        if self._sent is not None:
            self._sent(self._client())

    def _client(self) -> str:
        """Return a name that identifies the client across scrapes, each of which is a connection.

        The name includes the scrape timeout. Two Prometheus servers on one machine usually have
        different timeouts if their scrape intervals differ.
        """
        names = (self.headers.get(name, "") for name in ("User-Agent", SCRAPE_TIMEOUT))
        return " ".join((str(self.client_address[0]), *names))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a line per scrape would hide the output of the training script."""
