"""Serves a few HTTP clients at a time, each on its own thread.

The server of `http.server` is not enough. It does not measure CPU time, it performs the TLS
handshake on the accepting thread, and it does not limit the number of clients. With this server, a
client that is slow, disconnects or is refused never disturbs training and causes no log line.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from ...errors import SettingsError
from ..settings import ServeSettings

logger = logging.getLogger(__name__)

# Longest time for a whole request and its response. Then the connection is closed.
CLIENT_TIMEOUT_SECONDS = 5.0
MAX_CLIENTS = 8
# If all threads are in use, a new client replaces the oldest client, provided that the oldest one
# was accepted at least this long ago. A scrape takes milliseconds.
CROWDED_TIMEOUT_SECONDS = 1.0
# Longest wait for the thread of a client whose connection was closed.
THREAD_END_SECONDS = 0.5
# Delay after `accept` has failed for lack of descriptors or memory. The client stays in the queue,
# so without a delay the loop would retry at once, forever.
ACCEPT_RETRY_SECONDS = 0.5
# Prometheus and compatible scrapers send this header with each scrape.
SCRAPE_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"

# Interval at which the accepting thread closes overdue connections. On systems other than Linux,
# `stop` cannot wake the accepting thread, so closing the listener takes up to this long.
POLL_SECONDS = 2.0

# CPU_SHARE is the share of one core that serving may use in the long run. CPU_BURST_SECONDS is the
# CPU time that serving may use at once. A scrape takes some milliseconds.
CPU_SHARE = 0.02
CPU_BURST_SECONDS = 0.1
MAX_PAUSE_SECONDS = 1.0

# Temporary errors of `accept`: descriptors or memory ran out.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Ports
HIGHEST_PORT = 65535
FALLBACK_PORT_STEP = 100
FALLBACK_PORTS = 5

_FAILED = (
    b"HTTP/1.0 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\n"
    b"This page could not be made; the log of the training says why.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response. `sent` is called with the client's name after the response is written."""

    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    sent: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHandler:
    """The functions that the listener calls.

    `answer` takes the path and the Accept header. `failed` receives the error if `answer` fails, or
    None if there are too many clients. `spent` receives the CPU seconds that serving has used.
    """

    answer: Callable[[str, str], Response]
    failed: Callable[[BaseException | None], None]
    spent: Callable[[float], None]


class CpuBudget:
    """Limits the rate at which clients are accepted, so that training keeps its CPU time.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._paid_until = -math.inf

    def spend(self, cpu_seconds: float) -> None:
        """Account for CPU time that serving has used."""
        with self._lock:
            earliest = self._now() - CPU_BURST_SECONDS / CPU_SHARE
            self._paid_until = max(self._paid_until, earliest) + cpu_seconds / CPU_SHARE

    def pause_seconds(self) -> float:
        """Return the time to wait before accepting the next client."""
        return min(max(self._paid_until - self._now(), 0.0), MAX_PAUSE_SECONDS)


class Listener(ThreadingTCPServer):
    """A listening socket that serves a few clients, each on its own thread.

    Raises:
        OSError: The constructor cannot listen. The host is unknown or not an address of this
            machine, or the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True
    # If True, two ranks could share a port, and a scrape would reach either of the two.
    allow_reuse_port = False
    request_queue_size = 2 * MAX_CLIENTS

    def __init__(
        self, host: str, port: int, site: RequestHandler, tls: ssl.SSLContext | None
    ) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        self._site = site
        self._tls = tls
        self._free_clients = threading.BoundedSemaphore(MAX_CLIENTS)
        self._client_starts: dict[socket.socket, float] = {}
        self._clients_lock = threading.Lock()
        self._stopping = threading.Event()
        self._cpu_budget = CpuBudget()
        self._accounted_seconds = 0.0
        super().__init__(address, _RequestHandler)  # type: ignore[arg-type]  # typeshed knows only IPv4

    @property
    def is_secured(self) -> bool:
        """Whether clients are served over TLS only."""
        return self._tls is not None

    def answer(self, path: str, accept: str) -> Response:
        """Answer a request. `handle_error` handles an exception."""
        return self._site.answer(path, accept)

    def serve(self) -> None:
        """Accept clients until `stop` is called. May be called again after an exception."""
        # Not serve_forever, because its shutdown() waits forever for a thread that has died.
        self.timeout = POLL_SECONDS
        while not self._stopping.is_set():
            self.handle_request()
            self.service_actions()

    def stop(self) -> None:
        """Make `serve` return at once. Any thread may call this."""
        self._stopping.set()
        # Wakes the accepting thread, which would otherwise notice the end at its next poll.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client, leaving the TLS handshake to the client's own thread."""
        self._stopping.wait(self._cpu_budget.pause_seconds())
        try:
            client, address = super().get_request()
        except OSError as error:
            if error.errno in SHORTAGES:
                self._site.failed(error)
                self._stopping.wait(ACCEPT_RETRY_SECONDS)
            raise  # the caller ignores the error and accepts the next client
        if self._tls is not None:
            client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the client on a thread, or close the connection if no thread is available."""
        if not self._take_thread():
            self._site.failed(None)
            self.shutdown_request(request)
            return
        with self._clients_lock:
            self._client_starts[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except (RuntimeError, MemoryError) as error:  # the thread cannot be started
            self._release_thread(request)
            self._site.failed(error)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one client from start to end, on the client's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release_thread(request)
            self._spend(time.thread_time())  # the thread did nothing else

    def close_request(self, request: Any) -> None:
        """Close a connection. From now on, only the caller may close the connection."""
        with self._clients_lock:
            self._client_starts.pop(request, None)
        super().close_request(request)

    def _take_thread(self) -> bool:
        """Reserve a thread, if necessary the thread of an old client. Return whether it worked."""
        if self._free_clients.acquire(blocking=False):
            return True
        with self._clients_lock:
            oldest = min(self._client_starts.values(), default=math.inf)
        if time.monotonic() - oldest < CROWDED_TIMEOUT_SECONDS:
            return False
        self._disconnect(oldest)
        return self._free_clients.acquire(timeout=THREAD_END_SECONDS)

    def _release_thread(self, request: Any) -> None:
        with self._clients_lock:
            self._client_starts.pop(request, None)
        self._free_clients.release()

    def _disconnect(self, until: float) -> None:
        """Disconnect the clients that were accepted up to this time, which ends their threads.

        A timeout of the socket is not enough, because it starts over with each byte that arrives.
        """
        with self._clients_lock:
            for client, start in self._client_starts.items():
                if start <= until:
                    with contextlib.suppress(OSError):
                        # SSLSocket's own method would also change the object that its thread uses.
                        socket.socket.shutdown(client, socket.SHUT_RDWR)

    def service_actions(self) -> None:
        """End overdue requests, and account for the CPU time of accepting. Called once per loop."""
        self._disconnect(time.monotonic() - CLIENT_TIMEOUT_SECONDS)
        now = time.thread_time()
        self._spend(now - self._accounted_seconds)
        self._accounted_seconds = now

    def _spend(self, cpu_seconds: float) -> None:
        self._cpu_budget.spend(cpu_seconds)
        self._site.spent(cpu_seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of the client. Report an error of the server, and answer status 500."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
            logger.debug("client %s went away: %s", client_address, error)
            return
        self._site.failed(error)
        with contextlib.suppress(OSError):
            request.sendall(_FAILED)


class _RequestHandler(BaseHTTPRequestHandler):
    """Handles one request per connection, so that no thread waits for a second request."""

    server: Listener
    timeout = CLIENT_TIMEOUT_SECONDS
    server_version = "zerowatch"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a GET request."""
        answer = self.server.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
        if answer.sent is not None:
            answer.sent(self._client())

    def _client(self) -> str:
        """Return a name that identifies the client across scrapes, each of which is a connection.

        The name includes the scrape timeout. Two Prometheus servers on one machine usually have
        different timeouts if their scrape intervals differ.
        """
        names = (self.headers.get(name, "") for name in ("User-Agent", SCRAPE_TIMEOUT))
        return " ".join((str(self.client_address[0]), *names))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a line per scrape would hide the output of the training script."""


def listen(settings: ServeSettings, local_rank: int, site: RequestHandler) -> Listener:
    """Listen on the first port of this rank that is free.

    Raises:
        SettingsError: No port is free, or a TLS file is not usable.
    """
    tls = tls_context(settings)
    ports = candidate_ports(settings.port, local_rank, strict=settings.strict_port)
    for port in ports:
        try:
            listener = Listener(settings.host, port, site, tls)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise SettingsError(
                f"cannot listen on {settings.host}:{port} ({error.strerror}); set serve.host to "
                "an address of this machine and serve.port to a port that this user may open"
            ) from None
        if port != ports[0]:
            logger.warning(
                "port %d is taken: local rank %d serves on %d instead. Point Prometheus there, or "
                "set serve.port.",
                ports[0],
                local_rank,
                listener.server_address[1],
            )
        return listener
    raise SettingsError(
        f"port {ports[0]} of {settings.host} is taken and serve.strict_port is set; "
        "free the port or set another serve.port"
    )


def candidate_ports(port: int, local_rank: int, *, strict: bool) -> tuple[int, ...]:
    """Return the ports to try in turn. The port 0 means any free port.

    Raises:
        SettingsError: The only allowed port is greater than HIGHEST_PORT.
    """
    if port == 0:
        return (0,)
    first = port + local_rank
    if strict and first > HIGHEST_PORT:
        raise SettingsError(
            f"serve.port {port} + local rank {local_rank} is above {HIGHEST_PORT}; "
            "set a lower serve.port"
        )
    if strict:
        return (first,)
    last = min(first + FALLBACK_PORTS * FALLBACK_PORT_STEP, HIGHEST_PORT)
    return (*range(first, last + 1, FALLBACK_PORT_STEP), 0)


def advertised_address(listener: Listener, advertise_host: str | None) -> str:
    """Return the "host:port" at which other machines reach the listener."""
    host, port = listener.server_address[:2]
    name = advertise_host or str(host)
    if name in ("0.0.0.0", "::"):  # a wildcard address is not an address for a scraper
        name = socket.gethostname()
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Build the server's TLS context, or None if TLS is not configured.

    Raises:
        SettingsError: A file cannot be read, or has the wrong content.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate, key)
    if settings.tls_client_ca is not None:
        _load_client_authority(context, settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _check_readable("tls_certificate", certificate)
    _check_readable("tls_key", key)
    try:
        # Without this argument, OpenSSL would stop the training to ask for a password.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise SettingsError(
            f"serve.tls_certificate {certificate} and serve.tls_key {key} cannot be used together "
            f"({error.reason}); give a PEM certificate and its own PEM key without a password"
        ) from None


def _load_client_authority(context: ssl.SSLContext, authority: Path) -> None:
    _check_readable("tls_client_ca", authority)
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise SettingsError(
            f"serve.tls_client_ca {authority} holds no certificate ({error.reason}); "
            "give the PEM file of the authority that signs the clients' certificates"
        ) from None


def _check_readable(setting: str, path: Path) -> None:
    """Raise an error that contains the name of the file, which errors of the ssl module omit."""
    try:
        # Reading a FIFO or a terminal would block until somebody writes.
        reason = None if stat.S_ISREG(path.stat().st_mode) else "it is not a regular file"
        if reason is None:
            path.read_bytes()
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise SettingsError(
            f"serve.{setting}: cannot read {path} ({reason}); "
            "give a PEM file that this user may read"
        )
