"""Keeps ranks from entering a collective that a rank which ran out of memory will not enter.

While armed, all ranks vote before each collective of the training. A rank that ran out joins the
vote that the others are about to hold, and they raise instead of issuing the collective: no rank is
left waiting, and no communicator is left half used. All ranks must issue the same collectives in
the same order, as ZeRO, tensor and sequence parallelism do, and pipeline stages do not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from ...common.host_collectives import HostCollectives
from ...common.patching import AttributePatch
from ...memory.oom.parse_error import is_caused_by_oom
from .probe_workspace import probe_workspace

# Methods of DeepSpeed's backend object. Point-to-point calls are not symmetric, and not guarded.
GUARDED = (
    "all_reduce",
    "all_reduce_coalesced",
    "inference_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
)
_WELL, _OUT_OF_MEMORY = 0, 1
_GIVEN_UP = "this window is being given up, as a rank ran out of memory"


class PeerOutOfMemory(RuntimeError):
    """Another rank ran out of memory, and so this rank gives the window up too."""


class _Inside(threading.local):
    """Whether this thread is in a guarded call already."""

    value = False


class CollectiveGuard:
    """Wraps the methods of DeepSpeed's backend; `close` puts them back.

    Attributes:
        armed: Whether each collective within a window is voted on. To be changed between windows
            only, on all ranks alike.
        num_votes: Agreed held so far, those at the end of windows included.
        vote_seconds: What they took, waiting for the slowest rank included.
    """

    def __init__(self, votes: HostCollectives) -> None:
        self.armed = False
        self.num_votes = 0
        self.vote_seconds = 0.0
        self._votes = votes
        self._alone = votes.world_size == 1
        self._wraps: list[AttributePatch] = []
        self._inside = _Inside()
        self._window_thread: int | None = None
        self._handled: BaseException | None = None
        self._is_lost = False

    def open(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object, `deepspeed.comm.comm.cdb`."""
        if self._wraps or self._alone:
            return
        self._wraps = [
            AttributePatch(backend, name, self._wrapper)
            for name in GUARDED
            if hasattr(backend, name)
        ]

    def close(self) -> None:
        """Restore the methods. Wrappers that others wrapped over become pass-throughs."""
        self.armed = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Guard what this thread, and autograd for it, does in here; ends with a vote.

        Raises:
            PeerOutOfMemory: A rank ran out since the last vote.
        """
        self._window_thread = threading.get_ident()
        self._handled = sys.exception()
        self._is_lost = False
        try:
            yield
            if self._is_lost:  # somebody caught the exception
                raise PeerOutOfMemory(_GIVEN_UP)
            self._vote()
        finally:
            self._window_thread = self._handled = None

    def report(self) -> None:
        """Tell the others that this rank ran out: they meet this at their next vote.

        Where the window was given up before, they hold none: this rank ran out as it left it.
        """
        if not self._is_lost:
            self._hold(_OUT_OF_MEMORY)

    def _vote(self) -> None:
        if self._hold(_WELL) != _WELL:
            self._is_lost = True
            raise PeerOutOfMemory("another rank ran out of memory in this window")

    def _hold(self, flag: int) -> int:
        if self._alone:
            return flag
        began = perf_counter()
        result = self._votes.all_max(flag)
        self.num_votes += 1
        self.vote_seconds += perf_counter() - began
        return result

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Vote; not where the window is being left already because memory ran out."""
        raised = sys.exception()
        unwinds = raised is not None and raised is not self._handled and is_caused_by_oom(raised)
        if self._is_lost or unwinds:
            raise PeerOutOfMemory(_GIVEN_UP)
        probe_workspace(args, kwargs)
        self._vote()

    def _is_guarded(self) -> bool:
        """Whether this thread works on the window: itself, or as one of autograd's."""
        if not self.armed or self._window_thread is None or self._inside.value:
            return False
        is_own = threading.get_ident() == self._window_thread
        return is_own or torch._C._current_graph_task_id() != -1

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, inside = torch.compiler.is_compiling, self._inside

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_guarded():
                return original(*args, **kwargs)
            self._before(args, kwargs)
            inside.value = True
            try:
                return original(*args, **kwargs)
            finally:
                inside.value = False

        return guarded
