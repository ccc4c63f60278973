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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from ...errors import SettingsError
from ..atomic_file import regular_file_status
from ..settings import ServeSettings
from .client_auth import file_version
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
# Time between two tries to listen on a port that is taken, and how long beyond `linger_seconds` it
# is tried: the process of an earlier run may still wait there for its last scrape.
PORT_RETRY_SECONDS = 1.0
PORT_PATIENCE_SECONDS = 15.0
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
    """Listening sockets and their clients, all served by the thread that calls `serve`.

    Args:
        host: The address to listen on.
        port: The port to listen on; None for none yet.
        site: Answers the requests.
        tls: The certificates; None without TLS.

    Attributes:
        server_address: Where clients are served, or will be after `wait_for`.

    Raises:
        OSError: The host is unknown or not an address of this machine, or the port is taken.
    """

    def __init__(self, host: str, port: int | None, site: RequestHandler, tls: Tls | None) -> None:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        self._family: socket.AddressFamily = family
        self.server_address: tuple[Any, ...] = address
        self._site = site
        self._tls = tls
        self._clients: dict[Connection, None] = {}  # in order of acceptance
        # The streams of events, by the time at which the client had taken all events.
        self._streams: dict[Connection, float] = {}
        self._event_due = 0.0
        self._stopping = threading.Event()
        self._cpu_budget = CpuBudget()
        self._accounted_seconds = 0.0
        self._sockets: list[socket.socket] = []
        self._wanted_port: int | None = None
        self._retry_at = self._wanted_until = 0.0
        # A byte on this pair of sockets wakes the serving thread.
        self._waking, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        if port is not None:
            try:
                self.listen_at(port)
            except OSError:
                self.server_close()
                raise

    def listen_at(self, port: int) -> None:
        """Listen on a port, too.

        Raises:
            OSError: The host is not an address of this machine, or the port is taken.
        """
        host, _, *rest = self.server_address
        listening = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            # Not SO_REUSEPORT: two ranks could share a port, and a scrape would reach either.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port, *rest))
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        listening.setblocking(False)
        if not self._sockets:
            self.server_address = listening.getsockname()
        self._sockets.append(listening)
        self._selector.register(listening, selectors.EVENT_READ)

    def wait_for(self, port: int, seconds: float) -> None:
        """Listen on a port that is taken as soon as it is free. Must be called before `serve`."""
        if not self._sockets:
            host, _, *rest = self.server_address
            self.server_address = (host, port, *rest)
        self._wanted_port, self._wanted_until = port, time.monotonic() + seconds

    @property
    def is_listening(self) -> bool:
        """Whether it listens on a port, or did until it was closed."""
        return bool(self._sockets)

    @property
    def ports(self) -> list[int]:
        """The ports on which it listens now."""
        return [int(each.getsockname()[1]) for each in self._sockets]

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
                elif key.fileobj is not self._woken:
                    self._accept(cast(socket.socket, key.fileobj))
            self._close_overdue()
            if self._wanted_port is not None and time.monotonic() >= self._retry_at:
                self._listen_at_wanted(self._wanted_port)
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
        for open_socket in (*self._sockets, self._waking, self._woken):
            open_socket.close()
        for client in (*self._clients, *self._streams):
            client.socket.close()
        self._clients.clear()
        self._streams.clear()
        self._selector.close()

    def _listen_at_wanted(self, port: int) -> None:
        now = time.monotonic()
        self._retry_at = now + PORT_RETRY_SECONDS
        try:
            self.listen_at(port)
        except OSError as error:
            if now < self._wanted_until:
                return
            if not self._sockets:
                logger.error("no metrics are served: port %d is still not free: %s", port, error)
        else:
            logger.info("port %d is free now: metrics are served there", port)
        self._wanted_port = None

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, address = listening.accept()
            except OSError as error:  # usually a BlockingIOError: no client waits
                if error.errno in SHORTAGES:
                    self._site.failed(error)
                    self._stopping.wait(ACCEPT_RETRY_SECONDS)
                return
            try:
                client.setblocking(False)
                if self._tls is not None:
                    client = self._tls.context().wrap_socket(
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
        """Return the time until a connection is overdue, or something else is due."""
        oldest = next(iter(self._clients), None)
        deadlines = [] if oldest is None else [oldest.accepted_at + CLIENT_TIMEOUT_SECONDS]
        if self._streams:
            deadlines.append(self._event_due)
        if self._wanted_port is not None:
            deadlines.append(self._retry_at)
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


def listen(
    settings: ServeSettings,
    local_rank: int,
    site: RequestHandler,
    vacate: Callable[[int], Iterable[int]] = lambda port: (),
) -> Listener:
    """Listen on the first port of this rank that is free, and on its own port once that is free.

    Args:
        settings: Address, ports and TLS.
        local_rank: The rank on this node.
        site: Answers the requests.
        vacate: Called with each port before it is tried. Returns further ports that it has freed,
            at which this listener serves, too.

    Raises:
        SettingsError: The address or a TLS file is not usable.
    """
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = Tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    ports = candidate_ports(settings.port, local_rank, strict=settings.strict_port)
    try:
        listener = Listener(settings.host, None, site, tls)
    except OSError as error:
        raise _address_error(settings.host, ports[0], error) from None
    for port in ports:
        freed = vacate(port)
        try:
            listener.listen_at(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                listener.server_close()
                raise _address_error(settings.host, port, error) from None
            continue
        for other in freed:
            with contextlib.suppress(OSError):  # another process has taken it meanwhile
                listener.listen_at(other)
        break
    patience_seconds = settings.linger_seconds + PORT_PATIENCE_SECONDS
    if not listener.is_listening:
        logger.warning(
            "port %d of %s is taken and serve.strict_port is set: local rank %d serves no metrics "
            "until it is free, and tries for %.0f s; free the port or set another serve.port",
            ports[0],
            settings.host,
            local_rank,
            patience_seconds,
        )
    elif port != ports[0]:
        logger.warning(
            "port %d is taken: local rank %d serves on %d instead. /targets and targets.json "
            "list that port; a Prometheus with targets of its own needs it, or set serve.port.",
            ports[0],
            local_rank,
            listener.server_address[1],
        )
    if port != ports[0] or not listener.ports:
        listener.wait_for(ports[0], patience_seconds)
    return listener


def _address_error(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen on {host}:{port} ({error.strerror}); set serve.host to an address of this "
        "machine and serve.port to a port that this user may open"
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


class Tls:
    """The TLS context of a server. A certificate that is renewed during the run is read again.

    Args:
        certificate: The setting `serve.tls_certificate`.
        key: The setting `serve.tls_key`.
        client_ca: The setting `serve.tls_client_ca`.

    Raises:
        SettingsError: A file cannot be read, or has the wrong content.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._versions = self._present_versions()
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return the context for the next client, from the last files that were usable."""
        versions = self._present_versions()
        if versions != self._versions:
            self._versions = versions
            try:
                self._context = self._read()
            except SettingsError as error:  # such as the new certificate, and not yet its key
                logger.error("clients get the previous certificate: %s", error)
        return self._context

    def _present_versions(self) -> list[tuple[int, ...] | None]:
        """Return the versions of the files, None for one that cannot be read."""
        versions: list[tuple[int, ...] | None] = []
        for path in filter(None, (self._certificate, self._key, self._client_ca)):
            try:
                versions.append(file_version(path))
            except OSError:
                versions.append(None)
        return versions

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_certificate(context, self._certificate, self._key)
        if self._client_ca is not None:
            _load_client_authority(context, self._client_ca)
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
