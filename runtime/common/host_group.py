"""Small numbers that all ranks of a run exchange on the training thread, on the host.

A gloo group of its own, so that a device's queue is never waited for. Its process group is called
directly: torch.distributed's functions are tapped, and our own traffic is no communication of the
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
)

from ...errors import ZerowatchError


class HostGroup:
    """Made on all ranks at the same moment, as every group is; `close` when the run ends.

    Attributes:
        rank, world_size: Of the run.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self._highest = AllreduceOptions()
        self._highest.reduceOp = ReduceOp.MAX  # type: ignore[assignment]  # torch's stub is wrong

    def all_gather(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return every rank's values, of shape [world_size, len(values)]; the same on all ranks.

        Raises:
            ZerowatchError: It was closed.
        """
        mine = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return mine.unsqueeze(0).numpy()
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._open_group().allgather([everybody], [mine]).wait()
        return torch.stack(everybody).numpy()

    def all_max(self, value: int) -> int:
        """Return the highest value of any rank.

        Raises:
            ZerowatchError: It was closed.
        """
        if self.world_size == 1:
            return value
        flag = torch.tensor([value], dtype=torch.int64)
        self._open_group().allreduce([flag], self._highest).wait()
        return int(flag.item())

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank.

        Raises:
            ZerowatchError: It was closed.
        """
        if self.world_size == 1:
            return text
        data = bytearray(text.encode()) if self.rank == 0 else bytearray()
        size = self.all_max(len(data))
        letters = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            letters = torch.frombuffer(data, dtype=torch.uint8)
        self._open_group().broadcast([letters], BroadcastOptions()).wait()
        return bytes(letters.tolist()).decode()

    def close(self) -> None:
        """Give the group back. Safe to call twice, and when the process group is gone."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _open_group(self) -> Any:
        if self._group is None:
            raise ZerowatchError("this TrainingRun was closed; make another to go on")
        return self._group
