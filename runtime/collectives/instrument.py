"""Wraps every collective that Python code issues, and records the calls.

It wraps the functions of `torch.distributed`. For calls that do not pass through these functions,
it wraps methods of DeepSpeed's backend object. If a wrapped function calls another wrapped
function, only the outer call is recorded.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from .call_reader import CallReader, backend_readers, torch_readers
from .call_recorder import CallRecorder
from .stream_waits import StreamHooks

if TYPE_CHECKING:
    from .functional_collectives import FunctionalCollectives


class _InsideCall(threading.local):
    """Holds, for each thread, whether the thread is inside a wrapped call."""

    value = False


class CollectiveInstrumentation:
    """Wraps all collectives of the process from `open` until `close`, and may be opened again.

    Attributes:
        call_recorder: Records the calls.
        cost_ns: Nanoseconds spent on recording calls and waits, on any thread.
    """

    def __init__(self, fail_open: FailOpen) -> None:
        self.call_recorder = CallRecorder()
        self.cost_ns = 0
        self._open = False
        self._patches = PatchSet()
        self._wrappers: set[Callable[..., Any]] = set()
        self._backend: Any = None
        self._fail_open = fail_open
        self._functional: FunctionalCollectives | None = None
        self._inside = _InsideCall()
        recorder = self.call_recorder
        self._on_call = fail_open.wrap("collectives", recorder.on_call)
        # Kept: a call that on_call has begun must end, and a call that ends in a wait must, too.
        self._on_return = fail_open.wrap("collectives", recorder.on_return, is_kept=True)
        self._on_wait_start = fail_open.wrap("collectives", recorder.on_wait_start, is_kept=True)
        self._on_wait_end = fail_open.wrap("collectives", recorder.on_wait_end, is_kept=True)
        self._on_error = fail_open.wrap("collectives", recorder.on_error)
        self._stream_hooks = StreamHooks(fail_open, recorder.stream_waits, self._inside)

    @property
    def total_cost_ns(self) -> int:
        """Nanoseconds spent on recording calls, waits, and the synchronization of streams."""
        functional = 0 if self._functional is None else self._functional.cost_ns
        return self.cost_ns + self._stream_hooks.cost_ns + functional

    def open(self) -> None:
        """Wrap torch's functions in both modules through which callers reach them."""
        if self._open:
            return
        self._open = True
        for name, reader in torch_readers(_parameters_in_torch):
            wrapper = self._wrapper(reader, getattr(c10d, name))
            self._wrappers.add(wrapper)
            for module in (dist, c10d):
                if hasattr(module, name):
                    self._patches.add(module, name, partial(_return, wrapper))
        self._patches.add(dist.Work, "wait", self._wait_wrapper)
        self._stream_hooks.open()

    def open_backend(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object. A new object replaces the previous."""
        if backend is self._backend or not self._open:
            return
        self._backend = backend
        for name, reader in backend_readers():
            if hasattr(backend, name):
                self._patches.add(backend, name, partial(self._wrapper, reader))

    def open_functional(self) -> None:
        """Wrap the functional collectives, which DTensor and FSDP2 use. Imports torch's module."""
        from .functional_collectives import FunctionalCollectives

        if self._functional is None:
            self._functional = FunctionalCollectives(
                self._fail_open, self.call_recorder, self._inside
            )
        self._functional.open()

    def close(self) -> None:
        """Restore the original functions. Wrappers that callers still hold just call them."""
        self._open = False
        self._stream_hooks.close()
        if self._functional is not None:
            self._functional.close()
        self._patches.restore()
        self._release_captured()
        self._wrappers.clear()
        self._backend = None
        self.call_recorder.connect(None, None)

    def _release_captured(self) -> None:
        """Restore the functions that DeepSpeed's backend captured when it was made."""
        for name in ("all_gather_function", "reduce_scatter_function"):
            captured = getattr(self._backend, name, None)
            if captured in self._wrappers:
                setattr(self._backend, name, captured.__wrapped__)

    def _wrapper(self, reader: CallReader, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        inside, on_call, on_return = self._inside, self._on_call, self._on_return
        on_error = self._on_error

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # must come first, or torch.compile(fullgraph=True) breaks
                return original(*args, **kwargs)
            if inside.value or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            calls = on_call(reader, args, kwargs)
            inside.value = True
            work, returned = None, False
            started_ns = perf_counter_ns()
            try:
                work = original(*args, **kwargs)
                returned = True
            finally:
                ended_ns = perf_counter_ns()
                inside.value = False
                if calls:
                    on_return(reader, calls, work, started_ns, ended_ns)
                    if not returned:
                        on_error(calls[0])
                self.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
            return work

        return recorded

    def _wait_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        inside, on_wait_start, on_wait_end = self._inside, self._on_wait_start, self._on_wait_end
        on_error = self._on_error

        def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or inside.value or not self._open:
                return original(work, *args, **kwargs)
            entered_ns = perf_counter_ns()
            call = on_wait_start(work)
            self.cost_ns += perf_counter_ns() - entered_ns
            try:
                result = original(work, *args, **kwargs)
            except RuntimeError:
                if call is not None:
                    on_error(call)
                raise
            ended_ns = perf_counter_ns()
            on_wait_end(work, call)
            self.cost_ns += perf_counter_ns() - ended_ns
            return result

        return recorded_wait


def _parameters_in_torch(name: str) -> Sequence[str] | None:
    function = getattr(c10d, name, None)  # some versions of torch lack some functions
    return None if function is None else list(inspect.signature(function).parameters)


def _return(wrapper: Callable[..., Any], original: object) -> Callable[..., Any]:
    return wrapper
