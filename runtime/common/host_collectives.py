"""What those who change a run need of an agreement between its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class HostCollectives(Protocol):
    """An exchange of small numbers that all ranks take part in, at the same moment."""

    rank: int
    world_size: int

    def all_gather(self, values: Sequence[float]) -> Any:
        """Return every rank's values, an array of shape [world_size, len(values)]."""

    def all_max(self, value: int) -> int:
        """Return the highest value of any rank."""
