"""A client that reads one page of a rank, as Prometheus would."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
from collections.abc import Callable

# Far above what anything here takes, also where others take the machine.
PATIENCE_SECONDS = 120.0


def get(
    address: str,
    path: str = "/metrics",
    tls: ssl.SSLContext | None = None,
    method: str = "GET",
    **headers: str,
) -> tuple[int, str, str]:
    """Return status, content type and text of a page. In names of headers, "_" stands for "-"."""
    host, port = address.rsplit(":", 1)
    client = (
        http.client.HTTPConnection(host, int(port), timeout=60)
        if tls is None
        else http.client.HTTPSConnection(host, int(port), timeout=60, context=tls)
    )
    with contextlib.closing(client):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        client.request(method, path, headers=named)
        response = client.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()


def eventually(
    condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS, pause: float = 0.01
) -> bool:
    """Wait until the condition is true; return False after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True  # it may be false again by now, such as `up` after a scrape that took too long
