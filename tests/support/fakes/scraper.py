"""A client that reads one page of a rank, as Prometheus would."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
from collections.abc import Callable


def get(
    address: str, path: str = "/metrics", tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, str, str]:
    """Return status, content type and text of a page."""
    host, port = address.rsplit(":", 1)
    client = (
        http.client.HTTPConnection(host, int(port), timeout=5)
        if tls is None
        else http.client.HTTPSConnection(host, int(port), timeout=5, context=tls)
    )
    with contextlib.closing(client):
        client.request("GET", path, headers=headers)
        response = client.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()


def eventually(condition: Callable[[], bool], seconds: float = 5.0, pause: float = 0.01) -> bool:
    """Wait until the condition is true; return False after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(pause)
    return condition()
