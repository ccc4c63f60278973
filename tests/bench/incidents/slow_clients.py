"""Holds eight connections to a server of metrics, and sends a byte a second on each.

Usage: slow_clients.py ADDRESS PORT. A connection that the server closes is opened again.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

CLIENTS = 8

address = (sys.argv[1], int(sys.argv[2]))
connections: dict[int, socket.socket] = {}
while True:
    for number in range(CLIENTS):
        try:
            if number not in connections:
                connections[number] = socket.create_connection(address, timeout=1)
                connections[number].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            connections[number].sendall(b"x")
        except OSError:
            with suppress(KeyError, OSError):
                connections.pop(number).close()
    time.sleep(1)
