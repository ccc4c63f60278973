"""A link to a TCP server that can be cut: then nothing arrives, and no connection is closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

BACKLOG, BLOCK_BYTES = 16, 2**16


class CutLink:
    """Forwards connections to a local port until `cut`; connections are closed at the end.

    Attributes:
        port: The port to connect to instead.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._is_cut = threading.Event()
        self._start(self._accept)

    def cut(self) -> None:
        """Forward nothing more."""
        self._is_cut.set()

    def __enter__(self) -> CutLink:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += client, server
                self._start(self._forward, client, server)
                self._start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while (data := source.recv(BLOCK_BYTES)) and not self._is_cut.is_set():
                target.sendall(data)

    def _start(self, body: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=body, args=arguments, daemon=True).start()
