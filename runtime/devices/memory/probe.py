"""The protocol of memory probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MemoryProbe(Protocol):
    """Reads the memory of one device.

    Attributes:
        device: The name of the device, such as "cuda:0" or "cpu".
        own_peaks: Whether a peak covers only the time since the last reading, so that it belongs to
            the steps since then.
    """

    device: str

    @property
    def own_peaks(self) -> bool:
        """Whether a peak is that since the last reading."""

    def read(self) -> Mapping[str, float]:
        """Return bytes by memory state, and `alloc_retries` where there is such a count.

        Unknown ones are absent.
        """

    def close(self) -> None:
        """Restore what was wrapped. Safe to call twice."""
