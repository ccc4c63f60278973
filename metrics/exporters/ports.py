"""The port that a rank listens on, and the address that it advertises."""

from __future__ import annotations

import errno
import logging
import socket

from ...errors import SettingsError
from ..settings import ServeSettings
from .listener import Listener, RequestHandler
from .tls import tls_context

logger = logging.getLogger(__name__)

HIGHEST_PORT = 65535
FALLBACK_PORT_STEP = 100
FALLBACK_PORTS = 5


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
    """Return the ports to try in turn; 0 means any free one.

    Raises:
        SettingsError: The only port allowed is beyond the highest there is.
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
    """Return "host:port" under which other machines reach the listener."""
    host, port = listener.server_address[:2]
    name = advertise_host or str(host)
    if name in ("0.0.0.0", "::"):  # wildcard addresses; a scraper needs one address
        name = socket.gethostname()
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
