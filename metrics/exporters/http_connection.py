"""Reads one HTTP request from a client and writes the response, without ever waiting."""

from __future__ import annotations

import io
import math
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
# Every response has these headers. There is no header that lets another origin read a response.
SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The headers by which a browser is recognized. Scripts of a page cannot remove them.
_BROWSER_HEADERS = ("Accept-Language", "Sec-Fetch-Mode")
_METHODS = "GET, HEAD"
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
    """A GET or HEAD request: its path without the query, and some headers, empty if absent.

    Attributes:
        query: The text after the first "?" of the address, or "".
        is_browser: Whether the headers are those of a browser. A page of a foreign site cannot make
            the browser leave them out.
        scrape_timeout_seconds: The timeout of a scrape, which Prometheus and compatible scrapers
            send. None for other clients.
    """

    path: str
    query: str = ""
    accept: str = ""
    authorization: str = ""
    host: str = ""
    origin: str = ""
    is_browser: bool = False
    scrape_timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response.

    Attributes:
        sent: Called with the client's name after the response is written, unless the client had
            gone before: a scraper may have lost patience while training held the interpreter lock.
        next_event: If set, the response is a stream without an end. The body is its first part, and
            the function returns a further part each time that the listener asks for one.
    """

    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: Callable[[str], None] | None = None
    next_event: Callable[[], bytes] | None = None


_READ_ONLY = Response(
    content_type="text/plain",
    body=b"All pages are for reading: GET or HEAD.\n",
    status=HTTPStatus.METHOD_NOT_ALLOWED,
    headers={"Allow": _METHODS},
)
_NO_FREE_STREAM = Response(
    content_type="text/plain",
    body=b"All streams of events are in use; read /live/state instead, or try again later.\n",
    status=HTTPStatus.SERVICE_UNAVAILABLE,
    headers={"Retry-After": "30"},
)


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
        may_stream: Returns whether a further stream of events may begin. If not, the client gets
            status 503.

    Attributes:
        is_stream: Whether the response is a stream of events, which has begun.
    """

    def __init__(
        self,
        client: socket.socket,
        address: Any,
        handler: RequestHandler,
        accepted_at: float,
        may_stream: Callable[[], bool] = lambda: False,
    ) -> None:
        self.socket = client
        self.accepted_at = accepted_at
        self.is_stream = False
        self._may_stream = may_stream
        self._next_event: Callable[[], bytes] | None = None
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
            if self.is_stream:
                self._check_connected()
            elif not self._unsent:
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
        return selectors.EVENT_READ if self.is_stream else 0

    @property
    def has_unsent(self) -> bool:
        """Whether the client has not yet taken everything that was written."""
        return bool(self._unsent)

    def send_event(self) -> int:
        """Write the next event of a stream, whose client has taken the last one.

        Returns:
            The same as `advance`.
        """
        with _CaughtError() as caught:
            if self._next_event is not None:
                self._unsent = memoryview(self._next_event())
        if caught.error is not None:
            self._handler.failed(caught.error)
            return 0
        return self.advance()

    def _check_connected(self) -> None:
        """Raise an error if the client of a stream has disconnected, or sends a further request."""
        try:
            self.socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        raise ConnectionResetError

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
        if not self.is_stream and self._has_gone():
            self._after_sending = lambda: None

    def _has_gone(self) -> bool:
        """Whether the client has closed its side. Some clients do, and still read the response."""
        try:
            return not self.socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False

    def _response(self) -> bytes:
        with _CaughtError() as caught:
            exchange = _Exchange(
                bytes(self._received), self._address, self._handler.answer, self._may_stream
            )
            self._after_sending = exchange.after_sending
            self._next_event = exchange.next_event
            self.is_stream = exchange.next_event is not None
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

    def __init__(
        self,
        request: bytes,
        address: Any,
        answer: Callable[[Request], Response],
        may_stream: Callable[[], bool],
    ) -> None:
        # The base class would read from a socket, and wait for it.
        self.rfile, self.wfile = io.BytesIO(request), io.BytesIO()
        self.client_address = address
        self.next_event: Callable[[], bytes] | None = None
        self._answer = answer
        self._may_stream = may_stream
        self._sent: Callable[[str], None] | None = None
        self.handle_one_request()

    def do_GET(self) -> None:
        """Answer a GET request."""
        response = self._response()
        is_stream = response.next_event is not None
        if is_stream and not self._may_stream():
            response, is_stream = _NO_FREE_STREAM, False
        self._send_head(response, with_length=not is_stream)
        self.wfile.write(response.body)
        self.next_event, self._sent = response.next_event, response.sent

    def do_HEAD(self) -> None:
        """Answer with the headers of a GET request."""
        response = self._response()
        self._send_head(response, with_length=response.next_event is None)

    def do_POST(self) -> None:
        """Refuse a request that is not for reading."""
        self._send_head(_READ_ONLY, with_length=True)
        self.wfile.write(_READ_ONLY.body)

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def _response(self) -> Response:
        path, _, query = self.path.partition("?")
        return self._answer(
            Request(
                path=path,
                query=query,
                accept=self.headers.get("Accept", ""),
                authorization=self.headers.get("Authorization", ""),
                host=self.headers.get("Host", ""),
                origin=self.headers.get("Origin", ""),
                is_browser=any(name in self.headers for name in _BROWSER_HEADERS),
                scrape_timeout_seconds=self._scrape_timeout_seconds(),
            )
        )

    def _scrape_timeout_seconds(self) -> float | None:
        try:
            seconds = float(self.headers.get(SCRAPE_TIMEOUT, ""))
        except ValueError:
            return None
        return seconds if 0 < seconds < math.inf else None

    def _send_head(self, response: Response, *, with_length: bool) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        if with_length:
            self.send_header("Content-Length", str(len(response.body)))
        for name, value in (SAFE_HEADERS | dict(response.headers)).items():
            self.send_header(name, value)
        self.end_headers()

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
