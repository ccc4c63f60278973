"""Votes before collectives, so that no rank enters a collective that a failed rank will not enter.

While the guard is armed, all ranks vote before each collective of the training. While it is not
armed, they vote only before the first collective of each forward and each backward. A rank that ran
out of memory, or whose loss raised an error, joins the next vote of the other ranks. All ranks then
raise an error instead of issuing the collective. So no rank waits for a rank that failed, and every
communicator can still be used. A rank that ran out of memory within a pass first issues the other
collectives of that pass, if they are known from earlier passes; see `recorded_passes`.

All ranks must issue the same collectives in the same order. ZeRO, tensor parallelism and sequence
parallelism do so, but pipeline stages do not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ....errors import PeerOutOfMemoryError
from ....metrics.catalog.labels import OWN_GROUP
from ...collectives.collective_table import Guard, guarded_methods
from ...collectives.groups import sequence_number
from ...common.group_backend import backend_name
from ...common.host_group import HostCollectives
from ...common.patching import PatchSet
from ...memory.oom.oom_error import is_caused_by_oom
from .recorded_passes import (
    PassRecorder,
    engine_generation,
    gathers_recorded,
    has_collectives_within_passes,
    issue,
)

_PASSES = ("forward", "backward")
_BACKEND = "gloo"  # NCCL was not tried
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
        recorder: Recorder of the collectives of each pass.
    """

    def __init__(self, host_group: HostCollectives) -> None:
        self.armed = False
        self.recorder = PassRecorder()
        self._backend: Any = None
        self._host_group = host_group
        self._is_single_rank = host_group.world_size == 1
        self._patches = PatchSet()
        self._call = _GuardedCall()
        self._window_thread: int | None = None
        self._outer_exception: BaseException | None = None
        self._is_in_pass = self._failed_in_collective = self._issues_rest = False
        self._issued_before: Mapping[str, int] = {}
        self.aborted_by = Vote.OK

    def open(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object, `deepspeed.comm.comm.cdb`."""
        if self._patches or self._is_single_rank:
            return
        self._backend = backend
        for name in guarded_methods(Guard.OOM):
            self._patches.add_existing(backend, [name], partial(self._wrapper, name))

    def close(self) -> None:
        """Restore the methods. A wrapper that other code has wrapped becomes a pass-through."""
        self.armed = False
        self._patches.restore()

    @contextmanager
    def window(self, engine: Any = None, *, is_recorded: bool = True) -> Iterator[None]:
        """Guard the collectives of this thread and its autograd threads in the `with` block.

        The block ends with a vote.

        Args:
            engine: DeepSpeed's engine. Each call of its `forward` or `backward` ends a pass.
                Without an engine the whole window is one pass.
            is_recorded: Whether the collectives of the engine's passes are recorded.

        Raises:
            PeerOutOfMemoryError: A rank ran out of memory since the last vote.
            WindowAborted: A rank failed for another reason since the last vote.
        """
        self._outer_exception = sys.exception()
        self._is_in_pass = self._failed_in_collective = self._issues_rest = False
        self.aborted_by = Vote.OK
        self._issued_before = {} if self._is_single_rank else _sequence_numbers()
        passes = PatchSet()
        self.recorder.begin_window(is_recording=is_recorded and engine is not None)
        self._window_thread = threading.get_ident()  # from here on, `waits_in_vain` may be True
        if engine is not None and not self._is_single_rank:
            for name in _PASSES:
                passes.add_existing(engine, [name], partial(self._pass_wrapper, name))
            gathers_recorded(engine, self.recorder, passes)
        try:
            yield
            if self.aborted_by:  # the script caught the exception
                raise self._aborted()
            if not self._is_single_rank:
                self.recorder.end_window(self._num_issued())
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

    def prepare_records(self, engine: Any, *changes: object) -> int:
        """Return a number that is equal on ranks with equal records; see `PassRecorder.prepare`.

        Nothing is recorded if the records are not needed, or cannot be used.

        Args:
            engine: DeepSpeed's engine.
            changes: Values that change if the collectives of a pass may change.
        """
        is_used = has_collectives_within_passes(engine) and backend_name() == _BACKEND
        if self._is_single_rank or not is_used:
            self.recorder.pause()
            return 0
        return self.recorder.prepare(engine_generation(engine, *changes))

    def unfinished_reason(self) -> str:
        """Return why this rank cannot issue the rest of its unfinished pass; "" if it can."""
        if self._failed_in_collective:
            return "the error was raised within a collective"
        rest, reason = self.recorder.rest()
        if reason:
            return reason
        if any(backend_name(call.group) != _BACKEND for call in rest):
            return f"only collectives of {_BACKEND} are issued with other values"
        issued, num_calls = self._num_issued(), self.recorder.num_calls
        if issued != num_calls:
            return f"{num_calls} of the {issued} collectives of this window are recorded"
        return ""

    def issue_rest(self, partitions: Mapping[int, torch.Tensor]) -> bool:
        """Issue the rest of the unfinished pass with scratch tensors.

        Returns:
            Whether memory sufficed. Without memory no collective is issued.

        Raises:
            Exception: A collective failed. The other ranks may wait in it.
        """
        rest, _ = self.recorder.rest()
        self._call.is_active = self._issues_rest = True  # no votes
        try:
            is_issued = issue(
                rest, self._backend, partitions, lambda each: probe_workspace((each,), {})
            )
        finally:
            self._call.is_active = False
        self._is_in_pass = not is_issued
        return is_issued

    def report(self, vote: Vote) -> None:
        """Join the next vote of the other ranks as a failed rank, and set `aborted_by`.

        Do nothing if the window was aborted before, because the other ranks do not vote any more.
        """
        if not self.aborted_by:
            self.aborted_by = Vote(self._exchange_vote(vote))

    def issued_in_training(self) -> dict[str, int]:
        """Return how many collectives this rank has issued in the window, without votes."""
        own: set[str] = set()
        if dist.is_initialized():
            groups = list(c10d._world.pg_map)
            own = {each.group_name for each in groups if each.group_desc == OWN_GROUP}
        return {group: num for group, num in self.issued_collectives().items() if group not in own}

    def waits_in_vain(self, issued: Mapping[str, int] | None) -> bool:
        """Return whether a failed rank of this window waits in vain for this rank.

        If the failed rank issues no more collectives, it waits until this rank fails after the same
        collectives. Else it issues the rest of its pass by the record. Call this on any thread.

        Args:
            issued: Collectives that the failed rank has issued in the window, by group; None if it
                issues the rest of its pass.
        """
        if self._window_thread is None or self.aborted_by:
            return False
        own = self.issued_in_training()
        if issued is not None:
            is_in_vain = any(own.get(group, 0) > number for group, number in issued.items())
        else:
            has_others = sum(own.values()) > self.recorder.num_calls  # read after the calls
            is_in_vain = not self._issues_rest and (self.recorder.has_varied or has_others)
        return is_in_vain and self._window_thread is not None  # the same window, see `window`

    def _num_issued(self) -> int:
        return sum(self.issued_in_training().values())

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

    def _wrapper(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, call, recorder = torch.compiler.is_compiling, self._call, self.recorder

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_guarded():
                recorder.num_outside += not call.is_active
                return original(*args, **kwargs)
            self._before_collective(args, kwargs)
            recorder.record(name, args, kwargs)
            call.is_active, has_failed = True, True
            try:
                result = original(*args, **kwargs)
                has_failed = False
            finally:
                call.is_active = False
                if has_failed:
                    self._on_failed_collective()
            return result

        return guarded

    def _on_failed_collective(self) -> None:
        """Note that a collective has raised an error.

        If the backend has not counted it, nothing was sent: this rank can still issue it with the
        rest of the pass. So it is if gloo has no memory for its copy of the input of a
        reduce-scatter.
        """
        if not self.armed and self._num_issued() == self.recorder.num_calls - 1:
            self.recorder.withdraw()
        else:
            self._failed_in_collective = True

    def _pass_wrapper(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_pass(*args: Any, **kwargs: Any) -> Any:
            self.recorder.begin_pass(name)
            result = original(*args, **kwargs)
            self._is_in_pass = False  # all ranks have issued its collectives
            self.recorder.end_pass()
            return result

        return run_pass


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
    return {group.group_name: sequence_number(group) for group in list(c10d._world.pg_map)}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_sparse:
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
