"""How the ranks of a rebuild go on together, or go back together."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist

from ...common.host_collectives import HostCollectives
from ...common.patching import AttributePatch

# What DeepSpeed calls while it makes an engine; each is entered by all ranks or by none.
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


class PeerFailedError(RuntimeError):
    """Another rank has failed at what all ranks were doing."""


class Attempt:
    """Something that all ranks do or none: `with` it, then look at `error`.

    Inside, `together` says that this rank has come so far; it raises where another rank has failed,
    so that nobody enters a collective that another will miss. Whatever is raised inside ends here:
    the others must be told first, and what was begun be taken back.

    Attributes:
        error: What ended the attempt on this rank; `PeerFailedError` where another's did.
    """

    def __init__(self, host_group: HostCollectives) -> None:
        self.error: Exception | None = None
        self._host_group = host_group

    def together(self) -> None:
        """Wait for all ranks.

        Raises:
            PeerFailedError: One of them has failed.
        """
        if self._host_group.all_max(0):
            raise PeerFailedError("another rank has failed")

    def __enter__(self) -> Attempt:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Tell the others how it ended here, and learn how it ended there."""
        if error is None:
            self.error = self._peers_error()
            return True
        if not isinstance(error, Exception):
            return False
        self.error = error
        # The frames it came through hold what was half made.
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, PeerFailedError):
            self._host_group.all_max(1)
        return True

    def _peers_error(self) -> Exception | None:
        failed = self._host_group.all_max(0)
        return PeerFailedError("another rank has failed") if failed else None


@contextmanager
def guarded_collectives(attempt: Attempt) -> Iterator[None]:
    """Let each collective of DeepSpeed be entered only if no rank has failed before it."""
    backend: Any = deepspeed_comm.cdb

    def guarded(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            attempt.together()
            return original(*args, **kwargs)

        return call

    wraps = [
        AttributePatch(backend, name, guarded) for name in _COLLECTIVES if hasattr(backend, name)
    ]
    try:
        yield
    finally:
        for wrap in reversed(wraps):
            wrap.restore()


class HostSum:
    """Puts the ranks' parts of one tensor together on the host; `close` when all are moved.

    It has a gloo group of its own, for the collectives on it are no communication of the training.
    """

    def __init__(self, world_size: int) -> None:
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None

    def add_up(self, parts: torch.Tensor) -> None:
        """Add up a tensor that is zero wherever another rank's is not, bit for bit, in place."""
        if self._group is not None:
            # As integers: a sum with zero would turn -0.0 into 0.0.
            whole = {4: torch.int32, 8: torch.int64}.get(parts.element_size(), torch.uint8)
            self._group.allreduce([parts.view(whole)]).wait()

    def close(self) -> None:
        """Give the group back."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
