"""Records the collectives of DTensor: `torch.distributed._functional_collectives`.

A functional collective returns a tensor at once, and whoever reads the tensor first waits for it by
`wait_tensor`. The end of a call is where that wait ends, and nothing is known about the end of a
call that nobody waits for. Calls of the operators in `torch.ops`, and calls in compiled code, are
not recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from ..common.tracing import run_untraced
from .call_reader import CallReader, functional_readers
from .call_recorder import CallRecorder

# Results that nobody has waited for so far. If there are more, the earliest are forgotten.
MAX_RESULTS = 1024


class InsideCall(Protocol):
    """Holds, for each thread, whether the thread is inside a wrapped call."""

    value: bool


class _Result:
    """Stands for the handle that a functional collective does not return."""

    __slots__ = ("__weakref__",)

    def wait(self) -> None:
        """Do nothing. The recorder expects handles to have this method."""


class FunctionalCollectives:
    """Wraps the functional collectives from `open` until `close`.

    Attributes:
        cost_ns: Nanoseconds spent on recording.
    """

    def __init__(self, fail_open: FailOpen, recorder: CallRecorder, inside: InsideCall) -> None:
        self.cost_ns = 0
        self._open = False
        self._inside = inside
        self._patches = PatchSet()
        self._results: OrderedDict[int, _Result] = OrderedDict()  # by the address of the result
        name = "functional collectives"
        # Kept: one call may fail, and a call that was begun must end, also if it ends in a wait.
        self._on_call = fail_open.wrap(name, recorder.on_call, is_kept=True)
        self._on_return = fail_open.wrap(name, recorder.on_return, is_kept=True)
        self._on_error = fail_open.wrap(name, recorder.on_error)
        self._on_wait_start = fail_open.wrap(name, recorder.on_wait_start, is_kept=True)
        self._on_wait_end = fail_open.wrap(name, recorder.on_wait_end, is_kept=True)
        self._keep = fail_open.wrap(name, self._keep_result)

    def open(self) -> None:
        """Wrap the functions. Safe to call twice."""
        if self._open:
            return
        self._open = True
        for name, reader in functional_readers(_parameters, _group):
            self._patches.add(funcol, name, partial(self._wrapper, reader))
        self._patches.add(funcol, "wait_tensor", self._wait_wrapper)

    def close(self) -> None:
        """Restore the functions. Safe to call twice."""
        self._open = False
        self._patches.restore()
        self._results.clear()

    def _wrapper(self, reader: CallReader, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, is_tracing = torch.compiler.is_compiling, funcol._are_we_tracing
        inside, on_call, on_return = self._inside, self._on_call, self._on_return
        keep, on_error = self._keep, self._on_error
        ended = replace(reader, has_future=True)  # without a handle: it ends with the call

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or inside.value or not self._open or is_tracing():
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            calls = on_call(reader, args, kwargs)
            inside.value = True
            tensor, returned = None, False
            started_ns = perf_counter_ns()
            try:
                tensor = original(*args, **kwargs)
                returned = True
            finally:
                ended_ns = perf_counter_ns()
                inside.value = False
                if calls:
                    result = keep(tensor)
                    by = ended if result is None else reader
                    on_return(by, calls, result, started_ns, ended_ns)
                    if not returned:
                        on_error(calls[0], sys.exception())
                self.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
            return tensor

        return run_untraced(recorded)

    def _keep_result(self, tensor: Any) -> _Result | None:
        """Return an object that stands for a result; None if the function has waited for it."""
        if not isinstance(tensor, funcol.AsyncCollectiveTensor):
            return None
        result = self._results[_address(tensor.elem)] = _Result()
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)  # in one step, as other threads add results
        return result

    def _wait_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, is_tracing = torch.compiler.is_compiling, funcol._are_we_tracing

        def wait_tensor(tensor: Any) -> Any:
            if is_compiling() or self._inside.value or not self._results or is_tracing():
                return original(tensor)
            entered_ns = perf_counter_ns()
            result = self._results.pop(_address(tensor), None)
            if result is None:
                return original(tensor)
            call = self._on_wait_start(result)
            self.cost_ns += perf_counter_ns() - entered_ns
            waited = original(tensor)
            ended_ns = perf_counter_ns()
            self._on_wait_end(result, call)
            self.cost_ns += perf_counter_ns() - ended_ns
            return waited

        return run_untraced(wait_tensor)


def _address(tensor: Any) -> int:
    """Return the address of a tensor's storage, which its views share; 0 without one."""
    try:
        address: int = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
    return address


def _parameters(name: str) -> Sequence[str] | None:
    function = getattr(funcol, name, None)
    return None if function is None else list(inspect.signature(function).parameters)


def _group(given: Any) -> dist.ProcessGroup | None:
    """Return the process group that a caller has given in one of several forms."""
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    name = funcol._resolve_group_name(given)
    group: dist.ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined]
    return group
