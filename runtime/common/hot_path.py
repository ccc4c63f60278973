"""The classes that run on the training thread many times a step: in C where they were built.

With CPU caches that the model has filled, a line of Python takes about a microsecond, and C a tenth
of that. `_hot_path.c` and this file have the same classes. The ones in Python are used where the
extension was not built, for example without a compiler, or if _ZEROWATCH_HOT_PATH is "python". Both
must do the same. The classes know nothing of their users: these are `phase_timer.py`,
`fail_open.py`, `device_scalar.py`, `monitor/step_ring.py`, `instrumentation/` and `collectives/`.

Attributes:
    IS_COMPILED: Whether the classes are those in C.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

# No setting, as only tests and the search for a bug need it: "python" for the classes in Python.
VARIABLE = "_ZEROWATCH_HOT_PATH"
# Stands for the phase of an interval that does not count.
UNCOUNTED = -1
# Times in nanoseconds that are later and earlier than any other.
NEVER = 2**63 - 1
BEFORE_ALL = -(2**63)

T = TypeVar("T")

PhaseInterval = tuple[int, int, int]  # phase, start and end in nanoseconds

# What StepSlots writes: number of the step in the slots, step, end of the step, flags,
# micro-batches, samples, tokens, loss, gradient norm, learning rate, loss scale. The nanoseconds of
# each phase follow, and the checksum of all of them.
STEP_FORMAT, PHASE_FORMAT, CHECKSUM = "<QqdIqqqdddd", "q", struct.Struct("<I")
SKIPPED, HOST_TIMES = 1, 2  # the flags
UNKNOWN_COUNT = -1
# Stands for a value that is unknown, or still on a device. It is the lowest double: no loss has it,
# while nan and infinity are losses that must be reported.
NO_VALUE = -sys.float_info.max


class PhaseClock:
    """Attributes time to the innermost phase of a stack. `PhaseTimer` has the rest.

    Args:
        now_ns: A clock in nanoseconds.
        num_phases: The number of phases, which are numbered from 0.
        first: The phase at the beginning.
        non_training: The phases that are not training.
    """

    __slots__ = (
        "_intervals",
        "_non_training",
        "_now_ns",
        "_outer",
        "_started",
        "_stopped",
        "_totals",
        "current",
        "left_training",
        "on_change",
        "on_interval_end",
        "since_ns",
        "training_thread",
    )

    def __init__(
        self,
        now_ns: Callable[[], int],
        num_phases: int,
        first: int,
        non_training: Sequence[int],
    ) -> None:
        self._now_ns = now_ns
        self._totals = [0] * num_phases
        self._intervals: deque[PhaseInterval] | None = None
        self._outer: list[int] = []
        self._started = self._stopped = False
        self._non_training = non_training
        self.left_training = False
        self.on_change: Callable[[int], object] | None = None
        self.on_interval_end: Callable[[int], object] | None = None
        self.current = first
        self.since_ns = 0
        self.training_thread = 0

    def enter(self, phase: int) -> None:
        """Begin a phase inside the current phase."""
        if not self._started:
            self._started = True
            self.since_ns = self._now_ns()
        self._accrue(True)
        self._outer.append(self.current)
        self.current = phase
        if phase in self._non_training:
            self.left_training = True

    def leave(self) -> None:
        """End the innermost phase. The enclosing phase continues."""
        self._accrue(True)
        self.current = self._outer.pop()

    def drain(self) -> list[int]:
        """Return the nanoseconds of each phase since the last call, by number."""
        self._accrue(True)
        totals, self._totals = self._totals, [0] * len(self._totals)
        return totals

    def _nanoseconds(self, phase: int) -> int:
        """Return the nanoseconds of a phase since the last `drain`, up to the last change."""
        return self._totals[phase]

    def _accrue(self, is_counted: bool, /) -> None:
        if self.on_change is not None:
            self.on_change(self.current)
        is_counted, self._stopped = is_counted and not self._stopped, False
        if self.on_interval_end is not None:
            self.on_interval_end(self.current if is_counted else UNCOUNTED)
        now_ns = self._now_ns()
        if is_counted:
            self._totals[self.current] += now_ns - self.since_ns
            if self._intervals is not None:
                self._intervals.append((self.current, self.since_ns, now_ns))
        self.since_ns = now_ns


class Hook:
    """Calls a function whose exceptions must not reach the caller. `FailOpen` decides the rest.

    Args:
        body: The function.
        catches: The exceptions that are caught. The hook returns None after one.
        on_failure: Called with the hook and such an exception, while it is handled. It may set
            `is_off` and `is_short` of the hook.
        may_resume: Called with the hook if `is_off`; the body is called only if it returns true.
        on_success: Called with the hook after a call that returned, if `is_short`.
    """

    __slots__ = (
        "_body",
        "_catches",
        "_may_resume",
        "_on_failure",
        "_on_success",
        "is_off",
        "is_short",
    )

    def __init__(
        self,
        body: Callable[..., Any],
        catches: type[BaseException],
        on_failure: Callable[[Hook, BaseException], object],
        may_resume: Callable[[Hook], bool],
        on_success: Callable[[Hook], object],
    ) -> None:
        self._body, self._catches = body, catches
        self._on_failure, self._may_resume, self._on_success = on_failure, may_resume, on_success
        self.is_off = self.is_short = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns; None after an exception, and while it is off."""
        if self.is_off and not self._may_resume(self):
            return None
        try:
            result = self._body(*args, **kwargs)
        except self._catches as error:
            self._on_failure(self, error)
            return None
        if self.is_short:
            self._on_success(self)
        return result

    def __copy__(self) -> Hook:
        """Return the hook itself: like a function, copies of a model share it."""
        return self

    def __deepcopy__(self, memo: object) -> Hook:
        """Return the hook itself."""
        return self

    def __reduce__(self) -> str:
        """Refuse to be pickled, as a function inside of another does.

        Raises:
            TypeError: Always.
        """
        raise TypeError("cannot pickle a hook of zerowatch")


class RankSetFields:
    """The fields of a `RankSet` that each call changes."""

    __slots__ = ("issued", "recent")

    issued: int
    recent: deque[Any]


class GroupFields:
    """The fields of a `Group` that each call reads or changes."""

    __slots__ = (
        "busy_until_ns",
        "maybe_busy_until_ns",
        "on_device",
        "rank_set",
        "recorded",
        "reference",
    )

    busy_until_ns: int
    maybe_busy_until_ns: int
    on_device: bool
    rank_set: Any
    recorded: int
    reference: Callable[[], Any]


class CollectiveCall:
    """Records one collective on one rank.

    Times are read from `time.perf_counter_ns`. For a call that is timed by events, times are
    nanoseconds relative to the batch's anchor, and "training" below means the compute stream.

    Attributes:
        op: The index of its operation in OPS.
        group: The process group.
        payload_bytes: Bytes by nccl-tests' convention; see `collective_table.Operation`.
        dtype: The data type of the payload; None without a payload.
        phase: The phase in which the call was issued, as an index of PHASES.
        sequence: The number of the call, from 1 on, among the calls that all members of the rank
            set issue. 0 for a point-to-point call, for a call that a graph captures, and for a call
            from a thread whose order of calls differs between ranks.
        start_ns: When the call was issued.
        end_ns: When the call ended; 0 until then.
        issued_ns: When the call returned, if it blocked training. Otherwise `start_ns`.
        wait_ns: When training first waited for the call; 0 if training did not wait.
        wait_phase: The phase of that wait.
        timed: Whether the end of the call can be read.
        is_bound: Whether `end_ns` or `duration_ns` is only an upper bound. So it is for a call on a
            device whose end is marked where a stream had waited for it, and for a call that may
            have queued behind such a call. If such a call is not timed, nothing has waited for it.
        is_lost: Whether the end of the call could not be marked, or not be read in time.
        start_event: The event at the start of the call, if the call runs on a stream. `end_event`
            is the event at its end.
        stream_wait: The point at which the compute stream began to wait for the call; None if the
            stream did not wait.
        batch: The number of the batch that the call was settled in. A batch holds the calls of one
            step, or a part of them.
        settled: Whether `settle` has set `duration_ns`, `exposed_ns` and `wait_exposed_ns`.
    """

    __slots__ = (
        "batch",
        "dtype",
        "duration_ns",
        "end_event",
        "end_ns",
        "exposed_ns",
        "group",
        "is_bound",
        "is_lost",
        "issued_ns",
        "op",
        "payload_bytes",
        "phase",
        "sequence",
        "settled",
        "start_event",
        "start_ns",
        "stream_wait",
        "timed",
        "wait_exposed_ns",
        "wait_ns",
        "wait_phase",
    )

    batch: int
    issued_ns: int
    wait_phase: int
    duration_ns: int
    exposed_ns: int
    wait_exposed_ns: int

    def __init__(self, op: int, group: Any, payload_bytes: int, dtype: Any, phase: int) -> None:
        self.op = op
        self.group = group
        self.payload_bytes = payload_bytes
        self.dtype = dtype
        self.phase = phase
        self.sequence = 0
        self.start_ns = 0
        self.end_ns = 0
        self.wait_ns = 0
        self.timed = True
        self.is_bound = self.is_lost = self.settled = False
        self.start_event: Any = None
        self.end_event: Any = None
        self.stream_wait: Any = None
        # This constructor is on the hot path. The other fields are set when the call returns or
        # settles.

    def values(self) -> tuple[int | bool, ...]:
        """Return the numbers of a call that has returned, for another process.

        Returns:
            Operation, payload, phase, sequence; the times of start, end, issue and wait; the phase
            of the wait; whether the call is timed, bound, lost and on a device.
        """
        return (
            self.op,
            self.payload_bytes,
            self.phase,
            self.sequence,
            self.start_ns,
            self.end_ns,
            self.issued_ns,
            self.wait_ns,
            self.wait_phase if self.wait_ns else 0,
            self.timed,
            self.is_bound,
            self.is_lost,
            self.start_event is not None,
        )

    def settle(self, batch: int = 0, /) -> None:
        """Compute how long the call took, and how much of this time it blocked training.

        A group runs one call after the other. `duration_ns` therefore begins at the issue of the
        call or at the end of the group's previous call, whichever is later. `exposed_ns` is the
        time in which training was blocked, and `wait_exposed_ns` is the part spent in `wait()`.
        """
        self.batch = batch
        self.duration_ns = self.exposed_ns = self.wait_exposed_ns = 0
        if self.timed:
            end_ns, group = self.end_ns, self.group
            self.duration_ns = max(0, end_ns - max(self.start_ns, group.busy_until_ns))
            # Earlier calls of the group have ended before this one.
            if self.is_bound:
                group.maybe_busy_until_ns = end_ns
            else:
                self.is_bound = self.start_ns < group.maybe_busy_until_ns
                group.busy_until_ns = max(end_ns, group.busy_until_ns)
                group.maybe_busy_until_ns = BEFORE_ALL
            issued_ns = min(self.issued_ns, end_ns)
            if self.wait_ns:
                self.wait_exposed_ns = max(0, end_ns - max(self.wait_ns, issued_ns))
            self.exposed_ns = issued_ns - self.start_ns + self.wait_exposed_ns
        elif self.is_bound:
            self.group.maybe_busy_until_ns = NEVER
        self.settled = True


def have_ended_on_host(calls: list[Any]) -> bool:
    """Whether each call was timed by the host's clock, and its end is known."""
    return all(call.timed and call.end_ns and call.start_event is None for call in calls)


class RecorderFields:
    """The fields of a `CallRecorder` that each call reads or changes."""

    __slots__ = (
        "_calls",
        "_coalescing",
        "_is_draining",
        "_known_groups",
        "_left_out",
        "_messages",
        "_new_batch",
        "_num_gaps",
        "_phase_timer",
        "_sees_device",
        "_training_thread",
        "_under_way",
        "_works",
        "stream_waits",
    )

    _calls: list[Any]
    _is_draining: bool
    _coalescing: Mapping[Any, list[Any]]
    _known_groups: dict[int, Any]
    _left_out: int
    _messages: dict[int, list[Any]]
    _new_batch: Callable[..., Any]
    _num_gaps: int
    _phase_timer: Any
    _sees_device: bool
    _training_thread: int
    _under_way: set[Any]
    _works: dict[int, tuple[Callable[[], Any], Any]]
    stream_waits: Any

    def drain(self) -> Any:
        """Return the calls recorded since the last drain. Called on the thread that issues them.

        Calls of the batch before that nothing has waited for are not timed. The calls are not lost
        if the device's driver raises an error: only their times are. In C, without `_drain` until
        there was a call on a device.
        """
        return self._drain()

    def _drain(self) -> Any:
        raise NotImplementedError

    def _take_calls(self) -> list[Any] | None:
        """Return the calls so far, and begin a new list. Return None while `_is_draining`."""
        empty: list[Any] = []  # first: it may collect garbage, which may take the calls
        if self._is_draining:
            return None
        # Python switches threads at calls, at the end of loops and at the start of functions only.
        calls, self._calls = self._calls, empty
        return calls


class _Inside(threading.local):
    value = False


class HookState:
    """What the hooks of one owner share.

    Attributes:
        is_open: Whether hooks are called.
        cost_ns: Nanoseconds that the hooks have taken, on any thread.
    """

    __slots__ = ("cost_ns", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self.cost_ns = 0


class WrapperState(HookState):
    """What the wrappers of collectives share. Their hooks record calls and waits."""

    __slots__ = ("_inside",)

    def __init__(self) -> None:
        super().__init__()
        self._inside = _Inside()

    @property
    def value(self) -> bool:
        """Whether this thread is inside a wrapped call."""
        return self._inside.value

    @value.setter
    def value(self, value: bool) -> None:
        self._inside.value = value


class HookedCall:
    """Calls a function between two hooks, and adds the time of the hooks to the cost.

    The hooks fail open themselves, so only an interrupt such as that of Ctrl-C leaves them. They
    must not ask for the exception that is handled (`sys.exception()`), which is none in C.

    Args:
        state: While it is not open, only the function is called.
        original: The function.
        on_start: Called with the arguments, `(args, kwargs)`.
        on_end: Called with the result and whether the function returned.
        on_exception: Called with a RuntimeError or MemoryError of the function.
        is_paired: Whether `on_end` is called only, and always, after an `on_start` that has
            returned true.
    """

    __slots__ = ("_is_paired", "_on_end", "_on_exception", "_on_start", "_original", "_state")

    def __init__(
        self,
        state: HookState,
        original: Callable[..., Any],
        on_start: Callable[..., Any],
        on_end: Callable[[Any, bool], object],
        on_exception: Callable[[BaseException], object],
        is_paired: bool,
    ) -> None:
        self._state, self._original, self._is_paired = state, original, is_paired
        self._on_start, self._on_end, self._on_exception = on_start, on_end, on_exception

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the function returns."""
        state = self._state
        if not state.is_open:
            return self._original(*args, **kwargs)
        entered_ns = perf_counter_ns()
        has_begun = self._on_start(args, kwargs) or not self._is_paired
        started_ns = perf_counter_ns()
        result, returned = None, False
        try:
            result = self._original(*args, **kwargs)
            returned = True
        except (RuntimeError, MemoryError) as error:
            self._on_exception(error)
            raise
        finally:
            ended_ns = perf_counter_ns()
            try:
                if has_begun:
                    self._on_end(result, returned)
            finally:
                state.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
        return result


class StepSlots:
    """Writes the numbers of steps into slots of a buffer, each in place of the oldest one.

    Args:
        buffer: A writable buffer of bytes. It may be closed: then each step is a ValueError.
        first_byte: Where the first slot begins.
        num_slots: The number of slots.
        num_phases: The number of phases that each step has.

    Attributes:
        is_recoverable: Whether the steps would be found if the process were killed now.
    """

    __slots__ = ("_buffer", "_first_byte", "_layout", "_num_slots", "_number", "is_recoverable")

    def __init__(self, buffer: Any, first_byte: int, num_slots: int, num_phases: int) -> None:
        self._buffer, self._first_byte, self._num_slots = buffer, first_byte, num_slots
        self._layout = struct.Struct(STEP_FORMAT + num_phases * PHASE_FORMAT)
        self._number = 0
        self.is_recoverable = False

    def write(self, step: Any) -> bool:
        """Write a `RawStep`, without values that are still on a device; return `is_recoverable`."""
        counts = step.counts
        losses = counts.losses
        if len(losses) == 1:
            loss = losses[0]
        else:  # the loss of some micro-batches is not that of the step
            loss = counts.loss() if all(type(one) is float for one in losses) else None
        norm, rate, scale = step.gradient_norm, step.learning_rate, step.loss_scale
        self._number += 1
        body = self._layout.pack(
            self._number,
            step.step,
            step.ended_at,
            SKIPPED * counts.skipped | HOST_TIMES * (step.device_phases is not None),
            counts.micro_batches,
            UNKNOWN_COUNT if counts.samples is None else counts.samples,
            UNKNOWN_COUNT if counts.tokens is None else counts.tokens,
            loss if type(loss) is float else NO_VALUE,
            norm if type(norm) is float else NO_VALUE,
            rate if type(rate) is float else NO_VALUE,
            scale if type(scale) is float else NO_VALUE,
            *step.phase_ns,
        )
        slot = body + CHECKSUM.pack(crc32(body))
        start = self._first_byte + self._number % self._num_slots * len(slot)
        self._buffer[start : start + len(slot)] = slot
        return self.is_recoverable


class InboxFields:
    """The fields of `WatchThread` for what the training thread enqueues."""

    _bell: Any
    _inbox: Any
    _is_logged: bool
    _max_pending: int
    _pending: Any
    _step_type: type[Any]
    _waking_items: int
    _write_ring: Callable[[Any], bool | None] | None
    num_steps: int

    def enqueue(self, item: Any) -> None:
        """Add a batch of calls or a raw step to the queue. Called on the training thread.

        In C, without `_enqueue` for a step that has no sample of memory and wakes nobody.
        """
        self._enqueue(item)

    def _enqueue(self, item: Any) -> None:
        raise NotImplementedError


class MemoryHookFields:
    """The fields of `MemoryHooks` that the hooks of each step read and write."""

    _forecasts: Any
    _known_shape: Any
    _known_risks: Any
    micro_batch: int
    reading_due: float


class StepCollectorFields:
    """The fields of a `StepCollector`, which makes the common steps in C."""

    _calls: Any
    _coverage_due: float
    _device_phases: Any
    _enqueue: Callable[[Any], object]
    _gradient_norm: Callable[[Any], Any]
    _learning_rate: Callable[[Any], Any]
    _memory: Any
    _modules: dict[str, Any]
    _new_step: Callable[..., Any]
    _phase_timer: Any
    _profile: Callable[[int], object] | None
    _read_value: Callable[[Any], float | None]
    _scales_loss: bool
    _take_unseen: Callable[[], Any] | None
    _trace: Callable[[], Any]
    _training_thread: int

    def on_step_end(self, engine: Any, counts: Any) -> None:
        """Enqueue the step of these micro-batches of the engine.

        In C, without `_collect` if the step has neither a reading of memory nor of the coverage, no
        detailed sample and no loss scale.
        """
        self._collect(engine, counts)

    def _collect(self, engine: Any, counts: Any) -> None:
        raise NotImplementedError


class EngineHookFields:
    """The fields of `EngineHooks`, and the hooks of the common passes.

    Each hook does what the method `_on_...` of the same pass does. In C, it calls this method only
    for passes that are not common: of a pipeline, with other arguments, while memory is sampled in
    detail, or after an exception.
    """

    _collect: Callable[[Any, Any], object]
    _counts: Any
    _engine: Callable[[], Any]
    _generation: Any
    _inside_backward: bool
    _is_grad_enabled: Callable[[], bool]
    _is_pipeline: bool
    _loss: Any
    _losses_are_divided: bool
    _memory: Any
    _new_counts: Callable[[], Any]
    _on_backward_end: Callable[[Any, bool], None]
    _on_backward_start: Callable[[tuple[Any, ...], Mapping[str, Any]], None]
    _on_batch_start: Callable[[Any, int], object]
    _on_forward_end: Callable[[Any, bool], None]
    _on_forward_start: Callable[[tuple[Any, ...], Mapping[str, Any]], None]
    _on_step_end: Callable[[Any, bool], None]
    _on_step_start: Callable[[tuple[Any, ...], Mapping[str, Any]], None]
    _output: Callable[[], Any]
    _phase_timer: Any
    _plain_backward: bool
    _read_loss: Callable[[Any], Any]
    _read_shape: Callable[..., Any]
    _read_value: Callable[[Any], float | None]
    _shapes: list[Any]
    _skipped_before: int
    _steps_before: int
    _tensor_type: type[Any]

    def _begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._on_forward_start(args, kwargs)

    def _end_forward(self, output: Any, returned: bool) -> None:
        self._on_forward_end(output, returned)

    def _begin_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._on_backward_start(args, kwargs)

    def _end_backward(self, result: Any, returned: bool) -> None:
        self._on_backward_end(result, returned)

    def _begin_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._on_step_start(args, kwargs)

    def _end_step(self, result: Any, returned: bool) -> None:
        self._on_step_end(result, returned)


# That of the extension must be the same: one that was built for other code may be left.
VERSION = 7
IS_COMPILED = False
# Only in C: functions that record the common calls of a collective, and the waits for them, and
# readers of scalars and of the shapes of batches. Without them, `instrument.py`, `device_scalar.py`
# and `batch_shape.py` do the same.
RecordedFunction: Any = None
RecordedWait: Any = None
ScalarReader: Any = None
ShapeReader: Any = None
# Only in C: makes objects of a dataclass whose fields are slots. See `constructor`.
_Constructor: Any = None

if os.environ.get(VARIABLE) != "python" and not TYPE_CHECKING:
    try:
        from . import _hot_path as built

        if getattr(built, "VERSION", None) != VERSION:
            logging.getLogger(__name__).warning(
                "%s was built for another version of zerowatch and is not used: install zerowatch "
                "again (in a checkout: make)",
                built.__file__,
            )
            raise ImportError
        classes = (
            *(built.PhaseClock, built.Hook, built.RankSetFields, built.GroupFields),
            *(built.CollectiveCall, built.RecorderFields, built.WrapperState),
            *(built.RecordedFunction, built.RecordedWait, built.ScalarReader, built.StepSlots),
            *(built.HookState, built.HookedCall, built.ShapeReader, built.Constructor),
            *(built.have_ended_on_host, built.MemoryHookFields, built.StepCollectorFields),
            *(built.EngineHookFields, built.InboxFields),
        )
    except (ImportError, AttributeError):  # it was not built, or for another version of zerowatch
        pass
    else:
        IS_COMPILED = True
        PhaseClock, Hook, RankSetFields, GroupFields = classes[:4]
        CollectiveCall, RecorderFields, WrapperState = classes[4:7]
        RecordedFunction, RecordedWait, ScalarReader, StepSlots = classes[7:11]
        HookState, HookedCall, ShapeReader, _Constructor, have_ended_on_host = classes[11:16]
        MemoryHookFields, StepCollectorFields, EngineHookFields, InboxFields = classes[16:]


def constructor(cls: type[T]) -> Callable[..., T]:
    """Return a function that makes objects of a dataclass as the class itself does, in C.

    Args:
        cls: A dataclass with `slots=True`, and without `__post_init__` and keyword-only fields.
            It is returned itself where the extension was not built.

    Examples:
        >>> new_counts = constructor(StepCounts)
        >>> new_counts(samples=4)
    """
    if _Constructor is None:
        return cls
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # mypy has no type of dataclasses
    of_class = tuple((each.name, each.default, each.default_factory) for each in fields)
    return _Constructor(cls, of_class, dataclasses.MISSING)  # type: ignore[no-any-return]
