"""Starts the monitoring process of one rank: `python -m zerowatch.runtime.separate_process FD...`.

It reads what the rank sends before anything else. To import torch takes seconds, in which a rank
with short steps sends more than a socket holds. If the rank were killed then, these steps would be
lost.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from .connection import Connection

# Training comes first if all cores are busy.
NICENESS = 5


def main(descriptor: int, ring: int | None = None) -> None:
    """Monitor the rank at the other end of the socket until it ends.

    Args:
        descriptor: The socket.
        ring: The ring of steps of the rank.
    """
    # The training process decides when it ends; its last steps must still be written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)  # threads inherit it
    connection = Connection(socket.socket(fileno=descriptor))
    connection.read_ahead()
    from .serving import serve

    serve(connection, ring)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
