"""Wraps every collective that Python code issues, and records the calls.

It wraps the functions of `torch.distributed`. For calls that do not pass through these functions,
it wraps methods of DeepSpeed's backend object. If a wrapped function calls another wrapped
function, only the outer call is recorded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..common.fail_open import FailOpen
from ..common.hot_path import RecordedFunction, RecordedWait, WrapperState
from ..common.patching import PatchSet
from ..common.tracing import flags, is_traced, run_untraced
from .call_reader import CallReader, backend_readers, torch_readers
from .call_recorder import BATCH_CALLS, CallRecorder
from .groups import CollectiveCall, StreamWait
from .stream_waits import StreamHooks

if TYPE_CHECKING:
    from .functional_collectives import FunctionalCollectives

# The type of the payloads that code in C reads. Subclasses may do something else.
TENSOR_TYPE = torch.Tensor
# Calls the original function with these arguments, and records the call.
RecordedCall = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class CollectiveInstrumentation:
    """Wraps all collectives of the process from `open` until `close`, and may be opened again.

    Attributes:
        call_recorder: Records the calls.
    """

    def __init__(self, fail_open: FailOpen) -> None:
        self.call_recorder = CallRecorder()
        self._state = WrapperState()
        self._patches = PatchSet()
        self._wrappers: set[Callable[..., Any]] = set()
        self._backend: Any = None
        self._fail_open = fail_open
        self._functional: FunctionalCollectives | None = None
        recorder = self.call_recorder
        # Kept: one call may fail, and a call that was begun must end, also if it ends in a wait.
        self._on_call = fail_open.wrap("collectives", recorder.on_call, is_kept=True)
        self._on_return = fail_open.wrap("collectives", recorder.on_return, is_kept=True)
        self._on_wait_start = fail_open.wrap("collectives", recorder.on_wait_start, is_kept=True)
        self._on_wait_end = fail_open.wrap("collectives", recorder.on_wait_end, is_kept=True)
        self._on_error = fail_open.wrap("collectives", recorder.on_error)
        self._lose = fail_open.wrap("collectives", recorder.lose, is_kept=True)
        self._stream_hooks = StreamHooks(fail_open, recorder.stream_waits, self._state)

    @property
    def total_cost_ns(self) -> int:
        """Nanoseconds spent on recording calls, waits, and the synchronization of streams."""
        functional = 0 if self._functional is None else self._functional.cost_ns
        return self._state.cost_ns + self._stream_hooks.cost_ns + functional

    def open(self) -> None:
        """Wrap torch's functions in both modules through which callers reach them."""
        if self._state.is_open:
            return
        self._state.is_open = True
        for name, reader in torch_readers(_parameters_in_torch):
            wrapper = self._wrapper(reader, getattr(c10d, name))
            self._wrappers.add(wrapper)
            for module in (dist, c10d):
                if hasattr(module, name):
                    self._patches.add(module, name, partial(_return, wrapper))
        self._share_traceable_forms()
        self._patches.add(dist.Work, "wait", self._wait_wrapper)
        self._stream_hooks.open()

    def open_backend(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object. A new object replaces the previous."""
        if backend is self._backend or not self._state.is_open:
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
                self._fail_open, self.call_recorder, self._state
            )
        self._share_traceable_forms()
        self._functional.open()

    def close(self) -> None:
        """Restore the original functions. Wrappers that callers still hold just call them."""
        self._state.is_open = False
        self._stream_hooks.close()
        if self._functional is not None:
            self._functional.close()
        self._patches.restore()
        self._release_traceable_forms()
        self._release_captured()
        self._wrappers.clear()
        self._backend = None
        self.call_recorder.connect(None, None)

    def _share_traceable_forms(self) -> None:
        """Let torch.compile replace the wrappers like the originals by what it can trace.

        torch.compile looks a function up in a table. It adapts the arguments of the functions that
        are in torch.distributed, which are the wrappers now, and only of these. If torch imports
        the table while the functions are wrapped, it has the wrappers instead of the originals.
        """
        forms = _traceable_forms()
        for wrapper in self._wrappers:
            original: Any = wrapper.__wrapped__  # type: ignore[attr-defined]
            known = forms.get(original) or forms.get(wrapper)
            if known is not None:
                forms[original] = forms[wrapper] = known

    def _release_traceable_forms(self) -> None:
        """Leave the originals only in torch.compile's table."""
        self._share_traceable_forms()
        for wrapper in self._wrappers:
            _traceable_forms().pop(wrapper, None)

    def _release_captured(self) -> None:
        """Restore the functions that DeepSpeed's backend captured when it was made."""
        for name in ("all_gather_function", "reduce_scatter_function"):
            captured = getattr(self._backend, name, None)
            if captured in self._wrappers:
                setattr(self._backend, name, captured.__wrapped__)

    def _wrapper(self, reader: CallReader, original: Callable[..., Any]) -> Callable[..., Any]:
        record = self._record_in_python(reader, original)
        if RecordedFunction is not None and reader.plain is not None:
            record = self._record_in_c(reader, original, record)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or flags._is_compiling_flag:
                return original(*args, **kwargs)
            return record(args, kwargs)

        return run_untraced(recorded)

    def _record_in_c(
        self, reader: CallReader, original: Callable[..., Any], in_python: RecordedCall
    ) -> RecordedCall:
        """Return the function in C, which leaves calls that are not common to `in_python`."""
        plain = reader.plain
        assert plain is not None

        def on_failure(
            call: CollectiveCall, started_ns: int, ended_ns: int, error: Exception, is_ours: bool
        ) -> None:
            """Give up a call that raised, or whose end could not be recorded for an error."""
            if is_ours:
                self._lose(call, error)
                return
            self._on_return(reader, [call], None, started_ns, ended_ns)
            self._on_error(call, error)

        record: RecordedCall = RecordedFunction(
            state=self._state,
            recorder=self.call_recorder,
            original=original,
            in_python=in_python,
            on_call=self._on_call,
            on_failure=on_failure,
            tensor_type=TENSOR_TYPE,
            group_member=c10d.GroupMember,
            payload_place=plain.payload_place,
            payload_name=plain.payload_name,
            group_place=plain.group_place,
            op=plain.op,
            max_calls=BATCH_CALLS,
        )
        return record

    def _record_in_python(self, reader: CallReader, original: Callable[..., Any]) -> RecordedCall:
        state, on_call, on_return = self._state, self._on_call, self._on_return
        on_error = self._on_error

        def record(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if state.value or not state.is_open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            calls = on_call(reader, args, kwargs)
            state.value = True
            work, returned = None, False
            started_ns = perf_counter_ns()
            try:
                work = original(*args, **kwargs)
                returned = True
            finally:
                ended_ns = perf_counter_ns()
                state.value = False
                if calls:
                    on_return(reader, calls, work, started_ns, ended_ns)
                    if not returned:
                        on_error(calls[0], sys.exception())
                state.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
            return work

        return record

    def _wait_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        in_python = self._wait_in_python(original)
        if RecordedWait is None:
            return run_untraced(in_python)
        record = RecordedWait(
            state=self._state,
            recorder=self.call_recorder,
            original=original,
            in_python=in_python,
            on_wait_start=self._on_wait_start,
            on_wait_end=self._on_wait_end,
            on_error=self._on_error,
            stream_wait_type=StreamWait,
        )

        def recorded_wait(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or flags._is_compiling_flag:
                return original(*args, **kwargs)
            return record(args, kwargs)

        return run_untraced(recorded_wait)

    def _wait_in_python(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state, on_wait_start, on_wait_end = self._state, self._on_wait_start, self._on_wait_end
        on_error = self._on_error

        def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or flags._is_compiling_flag or state.value or not state.is_open:
                return original(work, *args, **kwargs)
            entered_ns = perf_counter_ns()
            call = on_wait_start(work)
            state.cost_ns += perf_counter_ns() - entered_ns
            try:
                result = original(work, *args, **kwargs)
            except RuntimeError as error:
                if call is not None:
                    on_error(call, error)
                raise
            ended_ns = perf_counter_ns()
            on_wait_end(work, call)
            state.cost_ns += perf_counter_ns() - ended_ns
            return result

        return recorded_wait


def _parameters_in_torch(name: str) -> Sequence[str] | None:
    function = getattr(c10d, name, None)  # some versions of torch lack some functions
    return None if function is None else list(inspect.signature(function).parameters)


def _traceable_forms() -> dict[Any, Any]:
    """Return torch.compile's table of functional collectives; empty before torch imports it."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    forms: dict[Any, Any] = getattr(functional, "traceable_collective_remaps", {})
    return forms


def _return(wrapper: Callable[..., Any], original: object) -> Callable[..., Any]:
    return wrapper
