"""Collectives of small values on the host, between all ranks, called on the training thread.

The gloo group is separate from the training's groups, so its collectives do not wait for a device
queue. They are called through torch.distributed, so a watch records them like all collectives: a
rank that waits here waits for another rank. GROUP_DESCRIPTION marks the group as zerowatch's own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ...errors import ZerowatchError
from ...metrics.catalog.labels import OWN_GROUP
from .gloo_interface import VARIABLE, gloo_interface_chosen

# The `group_desc` of zerowatch's own process groups, by which the instrumentation finds their role.
GROUP_DESCRIPTION = OWN_GROUP


class HostCollectives(Protocol):
    """Exchanges small host values by collectives. All ranks make the same calls in order."""

    rank: int
    world_size: int

    def all_gather(self, values: Sequence[float]) -> Any:
        """Return every rank's values, an array of shape [world_size, len(values)]."""

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        """Return every rank's text, by rank."""

    def all_max(self, value: int) -> int:
        """Return the largest value of any rank."""

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""

    def close(self) -> None:
        """Leave the group. If other ranks wait in the group, their waits end with an error."""


def new_host_group() -> Any:
    """Return a new gloo group of all ranks that is marked as zerowatch's own.

    Raises:
        ZerowatchError: The ranks cannot connect over the interface that gloo uses.
    """
    with gloo_interface_chosen(dist.get_world_size()):
        try:
            return dist.new_group(backend="gloo", group_desc=GROUP_DESCRIPTION)
        except RuntimeError as error:
            raise ZerowatchError(
                f"no gloo group of all ranks was made: {error}. Set {VARIABLE} on each node to the "
                "interface by which the nodes reach each other, such as eth0"
            ) from error


class HostGroup:
    """Owns a gloo group of all ranks. All ranks construct it at the same point of the program.

    Attributes:
        rank: The rank of this process in the job.
        world_size: Ranks of the job. With one rank no group is made and nothing is sent.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = new_host_group() if self.world_size > 1 else None
        self._closing = threading.Lock()

    def all_gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return every rank's values, of shape [world_size, len(values)]; the same on all ranks.

        Raises:
            ZerowatchError: The group is closed.
        """
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        return torch.stack(self._all_gather(own)).numpy()

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        """Return every rank's text, by rank; the same on all ranks.

        Args:
            text: At most some thousand characters, none of them NUL.
            num_bytes: Length in UTF-8 to which every rank pads its text. No text may be longer. By
                default the ranks first exchange the lengths in one more collective.

        Raises:
            ZerowatchError: The group is closed.
        """
        data = text.encode()
        if num_bytes is None:
            num_bytes = int(self.all_gather([len(data)]).max())
        padded = list(data.ljust(num_bytes, b"\0"))
        own = torch.tensor(padded, dtype=torch.uint8, device="cpu")
        rows = [bytes(row.tolist()) for row in self._all_gather(own)]
        return [row.rstrip(b"\0").decode() for row in rows]

    def all_max(self, value: int) -> int:
        """Return the largest value of any rank.

        Raises:
            ZerowatchError: The group is closed.
        """
        if self.world_size == 1:
            return value
        flag = torch.tensor([value], dtype=torch.int64, device="cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._open_group())
        return int(flag.item())

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank.

        Raises:
            ZerowatchError: The group is closed.
        """
        if self.world_size == 1:
            return text
        data = bytearray(text.encode()) if self.rank == 0 else bytearray()
        size = self.all_max(len(data))
        buffer = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            buffer = torch.frombuffer(data, dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._open_group())
        return bytes(buffer.tolist()).decode()

    def close(self) -> None:
        """Destroy the group. Safe to call twice and on any thread, also without the job's group."""
        with self._closing:
            group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        if self.world_size == 1:
            return [own]
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self._open_group())
        return rows

    def _open_group(self) -> Any:
        if self._group is None:
            raise ZerowatchError("this TrainingRun was closed; make another to go on")
        return self._group
