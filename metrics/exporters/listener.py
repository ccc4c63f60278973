"""Serves HTTP clients on one thread, none of which can delay another.

The server of `http.server` is not enough. It gives each client a thread that waits for the client,
so slow clients use up the threads, and it does not measure CPU time. Here a single thread reads and
writes as much as each client allows at the moment. A client that is slow, disconnects or is refused
therefore disturbs neither training nor a scrape, and causes no log line.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import SettingsError
from ..atomic_file import regular_file_status
from ..settings import ServeSettings
from .http_connection import Connection, RequestHandler

logger = logging.getLogger(__name__)

# Longest time for a whole request and its response. Then the connection is closed.
CLIENT_TIMEOUT_SECONDS = 5.0
# Connections at the same time. A further client replaces the oldest one. Each needs a descriptor,
# of which training needs some too.
MAX_CLIENTS = 64
# Clients that wait in the system's queue to be accepted.
BACKLOG = 256
# Clients that are accepted before those with new data are served.
ACCEPTED_AT_ONCE = 16
# Streams of events at the same time, which need no slot of MAX_CLIENTS. A further one is refused.
MAX_STREAMS = 4
# Time between two events of a stream, and the share of one core that all streams may use.
EVENT_SECONDS = 1.0
STREAM_CPU_SHARE = 0.005
# A stream is closed if its client has not taken an event for this time.
STREAM_STALL_SECONDS = 30.0
# Delay after `accept` has failed for lack of descriptors or memory. The client stays in the queue,
# so without a delay the loop would retry at once, forever.
ACCEPT_RETRY_SECONDS = 0.5

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


class CpuBudget:
    """Limits the rate at which clients are served, so that training keeps its CPU time.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._paid_until = -math.inf

    def spend(self, cpu_seconds: float) -> None:
        """Account for CPU time that serving has used."""
        earliest = self._now() - CPU_BURST_SECONDS / CPU_SHARE
        self._paid_until = max(self._paid_until, earliest) + cpu_seconds / CPU_SHARE

    def pause_seconds(self) -> float:
        """Return the time to wait before serving clients again."""
        return min(max(self._paid_until - self._now(), 0.0), MAX_PAUSE_SECONDS)


class Listener:
    """A listening socket and its clients, all served by the thread that calls `serve`.

    Raises:
        OSError: The constructor cannot listen. The host is unknown or not an address of this
            machine, or the port is taken.
    """

    def __init__(
        self, host: str, port: int, site: RequestHandler, tls: ssl.SSLContext | None
    ) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        self._site = site
        self._tls = tls
        self._clients: dict[Connection, None] = {}  # in order of acceptance
        # The streams of events, by the time at which the client had taken all events.
        self._streams: dict[Connection, float] = {}
        self._event_due = 0.0
        self._stopping = threading.Event()
        self._cpu_budget = CpuBudget()
        self._accounted_seconds = 0.0
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Not SO_REUSEPORT: two ranks could share a port, and a scrape would reach either.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.server_address = self._socket.getsockname()
        # A byte on this pair of sockets wakes the serving thread.
        self._waking, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    @property
    def is_secured(self) -> bool:
        """Whether clients are served over TLS only."""
        return self._tls is not None

    def serve(self) -> None:
        """Serve clients until `stop` is called. May be called again after an exception."""
        while not self._stopping.is_set():
            ready = self._selector.select(self._seconds_to_deadline())
            self._stopping.wait(self._cpu_budget.pause_seconds())
            for key, _ in ready:
                connection = key.data
                if isinstance(connection, Connection):
                    # Else the connection was replaced by a client of this round.
                    if connection in self._clients or connection in self._streams:
                        self._advance(connection, connection.advance)
                elif key.fileobj is self._socket:
                    self._accept()
            self._close_overdue()
            if self._streams and time.monotonic() >= self._event_due:
                self._send_events()
            self._account_cpu_time()
        self._send_events()  # the last event: the end of the run

    def stop(self) -> None:
        """Make `serve` return at once. Any thread may call this."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._waking.send(b"\0")

    def server_close(self) -> None:
        """Close all sockets. In a forked child, the connections of the parent stay open."""
        for open_socket in (self._socket, self._waking, self._woken):
            open_socket.close()
        for client in (*self._clients, *self._streams):
            client.socket.close()
        self._clients.clear()
        self._streams.clear()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, address = self._socket.accept()
            except OSError as error:  # usually a BlockingIOError: no client waits
                if error.errno in SHORTAGES:
                    self._site.failed(error)
                    self._stopping.wait(ACCEPT_RETRY_SECONDS)
                return
            try:
                client.setblocking(False)
                if self._tls is not None:
                    client = self._tls.wrap_socket(
                        client, server_side=True, do_handshake_on_connect=False
                    )
            except OSError:  # the client has disconnected
                client.close()
                continue
            if len(self._clients) >= MAX_CLIENTS:
                self._site.failed(None)
                self._close(next(iter(self._clients)))
            connection = Connection(
                client, address, self._site, time.monotonic(), self._has_free_stream
            )
            self._clients[connection] = None
            self._selector.register(client, selectors.EVENT_READ, connection)
            self._advance(connection, connection.advance)

    def _advance(self, connection: Connection, serve: Callable[[], int]) -> None:
        """Serve a client as far as possible now, and close the connection when it is complete."""
        with contextlib.ExitStack() as on_end:
            on_end.callback(self._close, connection)
            events = serve()
            if events:
                self._selector.modify(connection.socket, events, connection)
                on_end.pop_all()
        if connection.is_stream and connection in self._clients:
            self._begin_stream(connection)

    def _begin_stream(self, connection: Connection) -> None:
        now = time.monotonic()
        if not self._streams:
            self._event_due = now + EVENT_SECONDS
        del self._clients[connection]
        self._streams[connection] = now
        # Otherwise the system would keep events for a client that has vanished for 15 minutes.
        milliseconds = int(1000 * STREAM_STALL_SECONDS)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def _has_free_stream(self) -> bool:
        return len(self._streams) < MAX_STREAMS

    def _send_events(self) -> None:
        """Send an event to each stream whose client has taken the last one. Close stalled ones."""
        started, now = time.thread_time(), time.monotonic()
        for connection, taken_at in list(self._streams.items()):
            if not connection.has_unsent:
                self._streams[connection] = now
                self._advance(connection, connection.send_event)
            elif now - taken_at > STREAM_STALL_SECONDS:
                self._close(connection)
        spent = time.thread_time() - started
        self._event_due = now + max(EVENT_SECONDS, spent / STREAM_CPU_SHARE)

    def _close(self, connection: Connection) -> None:
        self._clients.pop(connection, None)
        self._streams.pop(connection, None)
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)  # the client reads the rest, then the end
        connection.socket.close()

    def _seconds_to_deadline(self) -> float | None:
        """Return the time until a connection is overdue, or until the next event of the streams."""
        oldest = next(iter(self._clients), None)
        deadlines = [] if oldest is None else [oldest.accepted_at + CLIENT_TIMEOUT_SECONDS]
        if self._streams:
            deadlines.append(self._event_due)
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic())

    def _close_overdue(self) -> None:
        """Close connections whose request or response has not ended in time.

        A timeout of the socket is not enough, because it starts over with each byte that arrives.
        """
        accepted_before = time.monotonic() - CLIENT_TIMEOUT_SECONDS
        for connection in list(self._clients):
            if connection.accepted_at > accepted_before:
                return
            self._close(connection)

    def _account_cpu_time(self) -> None:
        now = time.thread_time()
        spent, self._accounted_seconds = now - self._accounted_seconds, now
        self._cpu_budget.spend(spent)
        self._site.spent(spent)


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
                "port %d is taken: local rank %d serves on %d instead. /targets and targets.json "
                "list that port; a Prometheus with targets of its own needs it, or set serve.port.",
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
        regular_file_status(path)
        path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"serve.{setting}: cannot read {path} ({error.strerror}); "
            "give a PEM file that this user may read"
        ) from None
