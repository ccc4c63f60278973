"""The communication tap: sees every collective that Python code issues, and has it noted.

It wraps the functions of `torch.distributed` and, for what these do not show, methods of
DeepSpeed's backend object. A nested call counts once. It knows nothing of steps or metrics.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..common.fail_open import FailOpen
from ..common.patching import AttributePatch
from .operations import BACKEND_METHODS, OPERATIONS, Operation, Reader, reader_for
from .recorder import CallRecorder
from .stream_hooks import StreamHooks


class _Inside(threading.local):
    """Whether this thread is inside a wrapped call already."""

    value = False


class CollectiveInstrumentation:
    """Wraps and restores. Opening twice does nothing; closing restores every name.

    Attributes:
        call_recorder: Where the calls are noted.
        cost_ns: Nanoseconds spent noting calls and waits, on whatever thread they came.
    """

    def __init__(self, fail_open: FailOpen) -> None:
        self.call_recorder = CallRecorder()
        self.cost_ns = 0
        self._open = False
        self._wraps: list[AttributePatch] = []
        self._wrappers: set[Callable[..., Any]] = set()
        self._backend: Any = None
        self._inside = _Inside()
        self._begin = fail_open.wrap("collectives", self.call_recorder.on_call)
        self._end = fail_open.wrap("collectives", self.call_recorder.on_return)
        self._waits = fail_open.wrap("collectives", self.call_recorder.on_wait_start)
        self._waited = fail_open.wrap("collectives", self.call_recorder.on_wait_end)
        self._failed = fail_open.wrap("collectives", self.call_recorder.on_error)
        self._stream_hooks = StreamHooks(fail_open, self.call_recorder.stream_waits, self._inside)

    @property
    def total_cost_ns(self) -> int:
        """Nanoseconds spent noting calls, waits and the joining of streams."""
        return self.cost_ns + self._stream_hooks.cost_ns

    def open(self) -> None:
        """Wrap torch's functions, under both names by which callers reach them."""
        if self._open:
            return
        self._open = True
        for name, operation in OPERATIONS.items():
            self._wrap_function(name, operation)
        self._wraps.append(AttributePatch(dist.Work, "wait", self._wait_wrapper))
        self._stream_hooks.open()

    def open_backend(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object; another one replaces the first."""
        if backend is self._backend or not self._open:
            return
        self._backend = backend
        for name, (operation, parameters) in BACKEND_METHODS.items():
            if hasattr(backend, name):
                reader = reader_for(operation, parameters)
                self._wraps.append(AttributePatch(backend, name, partial(self._wrapper, reader)))

    def close(self) -> None:
        """Restore every name; wrappers that others hold on to become pass-throughs."""
        self._open = False
        self._stream_hooks.close()
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()
        self._release_captured()
        self._wrappers.clear()
        self._backend = None
        self.call_recorder.connect(None, None)

    def _release_captured(self) -> None:
        """Give DeepSpeed's backend back the functions it captured when it was made."""
        for name in ("all_gather_function", "reduce_scatter_function"):
            captured = getattr(self._backend, name, None)
            if captured in self._wrappers:
                setattr(self._backend, name, captured.__wrapped__)

    def _wrap_function(self, name: str, operation: Operation) -> None:
        original = getattr(c10d, name, None)
        if original is None:  # this version has no such function
            return
        reader = reader_for(operation, list(inspect.signature(original).parameters))
        wrapper = self._wrapper(reader, original)
        self._wrappers.add(wrapper)
        for module in (dist, c10d):
            if hasattr(module, name):
                self._wraps.append(AttributePatch(module, name, lambda _: wrapper))

    def _wrapper(self, reader: Reader, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        inside, begin, end, failed = self._inside, self._begin, self._end, self._failed

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # must come first: else torch.compile(fullgraph=True) breaks
                return original(*args, **kwargs)
            if inside.value or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            calls = begin(reader, args, kwargs)
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
                    end(reader, calls, work, started_ns, ended_ns)
                    if not returned:
                        failed(calls[0])
                self.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
            return work

        return tapped

    def _wait_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        inside, waits, failed = self._inside, self._waits, self._failed
        waited = self._waited

        def tapped(work: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or inside.value or not self._open:
                return original(work, *args, **kwargs)
            entered_ns = perf_counter_ns()
            call = waits(work)
            self.cost_ns += perf_counter_ns() - entered_ns
            try:
                result = original(work, *args, **kwargs)
            except RuntimeError:
                if call is not None:
                    failed(call)
                raise
            ended_ns = perf_counter_ns()
            waited(work)
            self.cost_ns += perf_counter_ns() - ended_ns
            return result

        return tapped
