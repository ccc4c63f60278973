"""Votes before collectives, so that no rank enters a collective that a failed rank will not enter.

While the guard is armed, all ranks vote before each collective of the training. While it is not
armed, they vote only before the first collective of each forward and each backward. A rank that ran
out of memory, or whose loss raised an error, joins the next vote of the other ranks. All ranks then
raise an error instead of issuing the collective. So no rank waits for a rank that failed, and every
communicator can still be used.

All ranks must issue the same collectives in the same order. ZeRO, tensor parallelism and sequence
parallelism do so, but pipeline stages do not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ....errors import PeerOutOfMemoryError
from ...collectives.collective_table import Guard, guarded_methods
from ...collectives.groups import sequence_number
from ...common.host_group import HostCollectives
from ...common.patching import PatchSet
from ...memory.oom.oom_error import is_caused_by_oom

_PASSES = ("forward", "backward")
_WORKSPACE_COPIES = 2  # one copy of the tensor, and one for the segments of gloo's ring


class Vote(IntEnum):
    """State of a rank's window. The highest vote of any rank decides for all ranks."""

    OK = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class WindowAborted(RuntimeError):
    """Raised to leave a window because another rank failed."""


class _GuardedCall(threading.local):
    """Holds whether this thread is in a guarded call already."""

    is_active = False


class CollectiveGuard:
    """Wraps the collectives of DeepSpeed's backend so that the ranks vote before a collective.

    `close` restores the collectives.

    Attributes:
        armed: Whether the ranks vote before each collective within a window. Change it between two
            windows, on all ranks.
        aborted_by: The vote that ended the last window; OK if no vote ended it.
    """

    def __init__(self, host_group: HostCollectives) -> None:
        self.armed = False
        self._host_group = host_group
        self._is_single_rank = host_group.world_size == 1
        self._patches = PatchSet()
        self._call = _GuardedCall()
        self._window_thread: int | None = None
        self._outer_exception: BaseException | None = None
        self._is_in_pass = self._failed_in_collective = False
        self._issued_before: Mapping[str, int] = {}
        self.aborted_by = Vote.OK

    def open(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object, `deepspeed.comm.comm.cdb`."""
        if self._patches or self._is_single_rank:
            return
        self._patches.add_existing(backend, guarded_methods(Guard.OOM), self._wrapper)

    def close(self) -> None:
        """Restore the methods. A wrapper that other code has wrapped becomes a pass-through."""
        self.armed = False
        self._patches.restore()

    @contextmanager
    def window(self, engine: Any = None) -> Iterator[None]:
        """Guard the collectives of this thread and its autograd threads in the `with` block.

        The block ends with a vote.

        Args:
            engine: DeepSpeed's engine. Each call of its `forward` or `backward` ends a pass.
                Without an engine the whole window is one pass.

        Raises:
            PeerOutOfMemoryError: A rank ran out of memory since the last vote.
            WindowAborted: A rank failed for another reason since the last vote.
        """
        self._window_thread = threading.get_ident()
        self._outer_exception = sys.exception()
        self._is_in_pass = self._failed_in_collective = False
        self.aborted_by = Vote.OK
        self._issued_before = {} if self._is_single_rank else _sequence_numbers()
        passes = PatchSet()
        if engine is not None and not self._is_single_rank:
            passes.add_existing(engine, _PASSES, self._pass_wrapper)
        try:
            yield
            if self.aborted_by:  # the script caught the exception
                raise self._aborted()
            self._vote()
        finally:
            passes.restore()
            self._window_thread = self._outer_exception = None

    @property
    def can_report(self) -> bool:
        """Whether the other ranks vote before any collective that this rank will not enter.

        If the pass is not guarded, or if this rank failed inside a collective, the other ranks may
        be in such a collective already.
        """
        if self._is_single_rank:
            return True
        return not self._failed_in_collective and (self.armed or not self._is_in_pass)

    def issued_collectives(self) -> dict[str, int]:
        """Return how many collectives this rank has issued since the window began, by group.

        This includes the collectives of the script's own code.
        """
        return {
            group: number - self._issued_before.get(group, 0)
            for group, number in _sequence_numbers().items()
        }

    def report(self, vote: Vote) -> None:
        """Join the next vote of the other ranks as a failed rank, and set `aborted_by`.

        Do nothing if the window was aborted before, because the other ranks do not vote any more.
        """
        if not self.aborted_by:
            self.aborted_by = Vote(self._exchange_vote(vote))

    def _vote(self) -> None:
        self.aborted_by = Vote(self._exchange_vote(Vote.OK))
        if self.aborted_by:
            raise self._aborted()

    def _aborted(self) -> WindowAborted | PeerOutOfMemoryError:
        if self.aborted_by is Vote.FAILED:
            return WindowAborted("another rank failed in this window")
        return PeerOutOfMemoryError("another rank ran out of memory in this window")

    def _exchange_vote(self, vote: int) -> int:
        """Return the highest vote of all ranks."""
        return vote if self._is_single_rank else self._host_group.all_max(vote)

    def _before_collective(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Vote, unless an error of this rank or a vote is ending the window already."""
        current = sys.exception()
        unwinds = (
            current is not None
            and current is not self._outer_exception
            and is_caused_by_oom(current)
        )
        if self.aborted_by:
            raise self._aborted()
        if unwinds:
            raise PeerOutOfMemoryError("this rank ran out of memory in this window")
        if self.armed:
            probe_workspace(args, kwargs)
        elif self._is_in_pass:
            return
        self._vote()
        self._is_in_pass = True

    def _is_guarded(self) -> bool:
        """Return whether this thread runs the window or is an autograd thread of the window."""
        if self._window_thread is None or self._call.is_active:
            return False
        is_own = threading.get_ident() == self._window_thread
        return is_own or torch._C._current_graph_task_id() != -1

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, call = torch.compiler.is_compiling, self._call

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_guarded():
                return original(*args, **kwargs)
            self._before_collective(args, kwargs)
            call.is_active, has_failed = True, True
            try:
                result = original(*args, **kwargs)
                has_failed = False
            finally:
                call.is_active = False
                self._failed_in_collective = self._failed_in_collective or has_failed
            return result

        return guarded

    def _pass_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ending(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._is_in_pass = False  # all ranks have issued its collectives
            return result

        return ending


def probe_workspace(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Allocate the memory that a collective on these tensors may need, and free it at once.

    gloo allocates memory within its calls: a copy of the input of a reduce or scatter, the flat
    output of a gather, the segments of a ring. If such an allocation fails, it is too late, because
    the other ranks are in the call.

    On a device, torch allocates one flat buffer if one side of a collective is a list of tensors,
    as in `all_gather(tensors, tensor)`. The allocator keeps the freed memory for the call that
    follows. NCCL's own buffers do not come from torch's allocator, and are not probed: NCCL
    allocates them in the first call of a group.

    Raises:
        RuntimeError: There is not enough memory. The collective would raise the same error.
    """
    values = (*args, *kwargs.values())
    on_host = [each for each in _tensors(values) if each.device.type == "cpu"]
    if on_host:
        num_bytes = _WORKSPACE_COPIES * sum(each.nbytes for each in on_host)
        torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if not any(isinstance(value, torch.Tensor) for value in values):
        return
    for value in values:
        flattened = [] if isinstance(value, torch.Tensor) else list(_tensors((value,)))
        if flattened and flattened[0].device.type != "cpu":
            num_bytes = sum(each.nbytes for each in flattened)
            torch.empty(num_bytes, dtype=torch.uint8, device=flattened[0].device)


def _sequence_numbers() -> dict[str, int]:
    """Return the number of collectives that this rank has issued so far, by group."""
    if not dist.is_initialized():
        return {}
    numbers: dict[str, int] = {}
    for group in list(c10d._world.pg_map):
        with suppress(RuntimeError):  # a backend that does not count
            numbers[group.group_name] = sequence_number(group)
    return numbers


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_sparse:
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
