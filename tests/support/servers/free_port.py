"""TCP ports on loopback that nothing listens on, each given to one caller only."""

from __future__ import annotations

import random
import socket

# Below Linux's usual ephemeral ports: no outgoing connection takes a port between choice and use.
# (A port that the kernel chooses was given twice in a session of tests, which then failed.)
_PORTS = range(10_000, 30_000)
_chooser = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nothing listens on, and that this process has not been given before."""
    while (port := _chooser.choice(_PORTS)) in _given or not _is_free(port):
        pass
    _given.add(port)
    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
