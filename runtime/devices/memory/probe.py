"""What reads a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MemoryProbe(Protocol):
    """Reads the memory of one device.

    Attributes:
        device: Its name, such as "cuda:0" or "cpu".
        own_peaks: Whether a peak is that since the last reading; else it says little of a step.
    """

    device: str

    @property
    def own_peaks(self) -> bool:
        """See above."""

    def read(self) -> Mapping[str, float]:
        """Return bytes by memory state, and `alloc_retries` where there is such a count.

        What is not known is absent.
        """

    def close(self) -> None:
        """Take back what was wrapped. Safe to call twice."""
