"""Sends objects to another process on this host, and receives some, without ever blocking to send.

Both processes run the same code of this package, so the objects are pickled. The socket is a pair
that the parent made, so nobody else can write to it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")
_PROTOCOL = pickle.HIGHEST_PROTOCOL
# Bytes that wait for the other process. With more, the connection is closed: it has stopped. Also
# the bytes that are read ahead.
MAX_WAITING_BYTES = 64 * 2**20
# Time between two looks whether so many bytes have been taken that more can be read ahead.
FULL_SECONDS = 0.1


def pickled(value: object) -> bytes:
    """Return a value as bytes, which `pickle.loads` reads."""
    return pickle.dumps(value, _PROTOCOL)


class Connection:
    """One end of a pair of sockets. `send` may be called on any thread, `receive` on one.

    Examples:
        >>> ours, theirs = Connection.pair()
        >>> ours.send(("steps", [1, 2]))
        >>> next(theirs.receive())
        ('steps', [1, 2])
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self._is_closed = False
        self._ahead: queue.SimpleQueue[bytearray | None] | None = None
        self._num_read = self._num_taken = 0  # bytes of messages that were read ahead
        self._received_at = time.monotonic()

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Return two connected ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    @property
    def is_closed(self) -> bool:
        """Whether the other process has ended, or this end was closed."""
        return self._is_closed

    @property
    def silent_seconds(self) -> float:
        """Seconds since something was received, or since this end was made."""
        return time.monotonic() - self._received_at

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: object) -> bool:
        """Send a message, or keep it until the next call if the other process does not read.

        Returns:
            False if the message was lost, because the other process has ended or stopped. So are
            all later ones: each message says only what is new.
        """
        if self._is_closed:  # also in a forked process, where the lock may be held for ever
            return False
        data = pickled(message)
        with self._lock:
            if len(self._waiting) + len(data) > MAX_WAITING_BYTES:
                self.close()
            if self._is_closed:
                return False
            self._waiting += _LENGTH.pack(len(data)) + data
            self._send_waiting()
            return not self._is_closed

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all messages are sent. Return whether they are."""
        deadline = time.monotonic() + timeout_seconds
        while self._waiting and not self._is_closed:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not self._is_ready(select.POLLOUT, seconds):
                return False
            with self._lock:
                self._send_waiting()
        return not self._is_closed

    def read_ahead(self) -> None:
        """Read on a thread from now on, so that little waits in the other process.

        There it would be lost if that process were killed.
        """
        self._ahead = queue.SimpleQueue()
        threading.Thread(target=self._read_ahead, name="zerowatch-reader", daemon=True).start()

    def receive(self, silent_seconds: float | None = None) -> Iterator[Any]:
        """Yield the messages of the other process, until it ends or closes its end.

        Args:
            silent_seconds: Yield None after each period of this length without a message.
        """
        while True:
            try:
                data = self._next_message(silent_seconds)
            except TimeoutError:
                yield None
                continue
            if data is None:
                return
            yield pickle.loads(data)

    def close(self) -> None:
        """Close this end. Safe to call twice, and while another thread is in `receive`."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # else `receive` would not end

    def close_here(self) -> None:
        """Close the descriptor of this process. The connection of another one stays open."""
        self._is_closed = True
        self._socket.close()

    def _send_waiting(self) -> None:
        try:
            while self._waiting:
                sent = self._socket.send(self._waiting, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._waiting[:sent]
        except BlockingIOError:
            pass  # the other process is busy
        except OSError:
            self._is_closed = True
            self._waiting.clear()

    def _next_message(self, silent_seconds: float | None) -> bytearray | None:
        """Return the next message, or None at the end.

        Raises:
            TimeoutError: There was none in this time.
        """
        if self._ahead is None:
            if silent_seconds is not None and not self._is_ready(select.POLLIN, silent_seconds):
                raise TimeoutError
            return self._read_message()
        try:
            data = self._ahead.get(timeout=silent_seconds)
        except queue.Empty:
            raise TimeoutError from None
        if data is None:
            self._ahead.put(None)  # for another call of `receive`
        else:
            self._num_taken += len(data)
        return data

    def _read_ahead(self) -> None:
        assert self._ahead is not None
        try:
            while (data := self._read_message()) is not None:
                self._num_read += len(data)
                self._ahead.put(data)
                while self._num_read - self._num_taken > MAX_WAITING_BYTES:
                    time.sleep(FULL_SECONDS)
        finally:
            self.close()  # if there was no memory for a message, too
            self._ahead.put(None)

    def _read_message(self) -> bytearray | None:
        header = self._read(_LENGTH.size)
        return None if header is None else self._read(_LENGTH.unpack(header)[0])

    def _is_ready(self, events: int, timeout_seconds: float) -> bool:
        poll = select.poll()  # `select.select` refuses descriptors from 1024 on
        poll.register(self._socket, events)
        return bool(poll.poll(1000 * timeout_seconds))

    def _read(self, size: int) -> bytearray | None:
        """Return that many bytes, or None if the other process has ended."""
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except OSError:
                part = b""
            if not part:
                self._is_closed = True
                return None
            self._received_at = time.monotonic()
            data += part
        return data
