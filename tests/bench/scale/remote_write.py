"""Writes samples of the past into Prometheus by its remote-write protocol, version 0.1.

Protobuf and snappy by hand: four message types, and a "compressed" text that is one literal.
Sources: prometheus.io/docs/specs/remote_write_spec; google/snappy, format_description.txt.
"""

from __future__ import annotations

import http.client
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_SAMPLE_BYTES = 18  # of the message: a tagged double (9), and a tag and 6 bytes of milliseconds (7)
_LITERAL_OF_4_BYTES_LENGTH = 63 << 2


class RemoteWriter:
    """A connection to one Prometheus that was started with --web.enable-remote-write-receiver."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=120)

    def write(self, series: Iterable[tuple[bytes, bytes]]) -> None:
        """Append series, each the `labels` and the `samples` that the functions below encode."""
        message = b"".join(_field(1, labels + samples) for labels, samples in series)
        body = _varint(len(message)) + _literal(message)
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "snappy",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        self._connection.request("POST", "/api/v1/write", body, headers)
        answer = self._connection.getresponse()
        body = answer.read().decode()
        if answer.status >= 300:
            raise RuntimeError(f"Prometheus refused samples with {answer.status}: {body}")

    def close(self) -> None:
        self._connection.close()


def encode_labels(labels: Mapping[str, str]) -> bytes:
    """Encode a series' labels, `__name__` among them."""
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, labels[name].encode()))
        for name in sorted(labels)
    )


def encode_samples(values: Sequence[float], unix_milliseconds: Sequence[int]) -> bytes:
    """Encode a series' samples, oldest first."""
    samples = np.zeros((len(values), _SAMPLE_BYTES), np.uint8)
    samples[:, 0] = 2 << 3 | 2  # the field `samples` of a series, of so many bytes:
    samples[:, 1] = _SAMPLE_BYTES - 2
    samples[:, 2] = 1 << 3 | 1  # a double
    samples[:, 3:11] = np.asarray(values, "<f8").view(np.uint8).reshape(-1, 8)
    samples[:, 11] = 2 << 3  # a varint: 41 bits of milliseconds are 6 bytes of 7 bits
    left = np.asarray(unix_milliseconds, np.uint64)
    for place in range(12, 18):
        more = 0x80 if place < 17 else 0
        samples[:, place] = (left & np.uint64(0x7F)).astype(np.uint8) | more
        left = left >> np.uint64(7)
    return samples.tobytes()


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _literal(content: bytes) -> bytes:
    return bytes((_LITERAL_OF_4_BYTES_LENGTH,)) + struct.pack("<I", len(content) - 1) + content
