"""The protocol of memory probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MemoryProbe(Protocol):
    """Reads the memory of one device.

    Attributes:
        device: Its name, such as "cuda:0" or "cpu".
        own_peaks: Whether a peak is that since the last reading, and so belongs to the steps since.
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
