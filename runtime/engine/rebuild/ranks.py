"""Keeps the ranks of a rebuild in step: guarded collectives and a sum on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist

from ...collectives.ops import Guard, guarded_methods
from ...common.all_or_none import CollectiveAttempt
from ...common.patching import AttributePatch


@contextmanager
def guarded_collectives(attempt: CollectiveAttempt) -> Iterator[None]:
    """Let each collective of DeepSpeed be entered only if no rank has failed before it."""
    backend: Any = deepspeed_comm.cdb

    def guarded(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            attempt.check_peers()
            return original(*args, **kwargs)

        return call

    wraps = [
        AttributePatch(backend, name, guarded)
        for name in guarded_methods(Guard.REBUILD)
        if hasattr(backend, name)
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
