"""Tests of the hot path in C: it does what the classes in Python do.

Covers `hot_path.py` and `_hot_path.c`, and how `instrument.py`, `device_scalar.py` and
`batch_shape.py` use them.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import dataclasses
import gc
import importlib.util
import inspect
import itertools
import math
import mmap
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import DeviceTensor, FakeCuda
from fakes.device_rank import DeviceRank
from fakes.raw_steps import raw_step
from fakes.sleeping_collectives import FakeWork, ManualClock, add_up
from fakes.waits_for_calls import CASES
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives import instrument
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.collectives.totals import StepCommTotals
from zerowatch.runtime.common import device_scalar, hot_path
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import BACKWARD, FORWARD, PhaseTimer
from zerowatch.runtime.instrumentation.batch_shape import (
    DOUBTFUL_PARTS,
    BatchShape,
    batch_shape,
    reader_in_c,
    shape_in_python,
)
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts

ROOT = Path(__file__).parents[3]
ALL_REDUCE = OPS.index("all_reduce")
needs_c = pytest.mark.skipif(not hot_path.IS_COMPILED, reason="the extension was not built")


def second_copy() -> ModuleType:
    name = f"{hot_path.__package__}.hot_path_again"
    spec = importlib.util.spec_from_file_location(name, hot_path.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def in_python() -> ModuleType:
    """A second copy of the module, with the classes in Python."""
    before = os.environ.get(hot_path.VARIABLE)
    os.environ[hot_path.VARIABLE] = "python"
    try:
        return second_copy()
    finally:
        del os.environ[hot_path.VARIABLE]
        if before is not None:
            os.environ[hot_path.VARIABLE] = before


def test_the_extension_is_built_where_it_can_be() -> None:
    has_header = Path(sysconfig.get_paths()["include"], "Python.h").exists()

    is_asked_for = os.environ.get(hot_path.VARIABLE) != "python"
    assert (is_asked_for and has_header and shutil.which("gcc") is not None) == hot_path.IS_COMPILED


@needs_c
def test_an_extension_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert second_copy().IS_COMPILED
    monkeypatch.setattr("zerowatch.runtime.common._hot_path.VERSION", hot_path.VERSION - 1)

    assert not second_copy().IS_COMPILED
    assert "install zerowatch again" in caplog.text


@pytest.mark.slow  # the tests below compare both implementations
@needs_c
def test_the_tests_of_its_users_pass_without_it() -> None:
    files = [
        "tests/runtime/collectives",
        *(f"tests/runtime/common/test_{name}.py" for name in ("phase_timer", "fail_open")),
        "tests/runtime/instrumentation/test_engine_hooks.py",
        "tests/runtime/monitor/test_step_ring.py",
    ]
    command = [sys.executable, "-m", "pytest", "-qq", "-n0", "-m", "not jobs and not slow", *files]

    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-x"],
        cwd=ROOT,
        env={**os.environ, hot_path.VARIABLE: "python"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


# Phases


class Clock:
    """A clock that moves on at each reading."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        self.now += 7
        return self.now


class ChangedPhases:
    """A phase clock with a record of its callbacks."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self.clock = kind(Clock(), len(PHASES), len(PHASES) - 1, (4, 6))
        self.called: list[tuple[str, int]] = []

    def listen(self, name: str, is_on: bool) -> None:
        listener = (lambda phase: self.called.append((name, phase))) if is_on else None
        setattr(self.clock, name, listener)

    def state(self) -> dict[str, Any]:
        clock = self.clock
        return {
            "current": clock.current,
            "since": clock.since_ns,
            "left": clock.left_training,
            "stopped": clock._stopped,
            "intervals": None if clock._intervals is None else list(clock._intervals),
            "totals": [clock._nanoseconds(phase) for phase in range(len(PHASES))],
            "called": list(self.called),
        }


@needs_c
def test_phases_are_the_same_after_any_calls(in_python: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    both = [ChangedPhases(hot_path.PhaseClock), ChangedPhases(in_python.PhaseClock)]

    for _ in range(500):
        action, phase = draw.choice(ACTIONS), draw.randrange(len(PHASES))
        results = [action(each, phase) for each in both]

        assert results[0] == results[1]
        assert both[0].state() == both[1].state()


def _enter(phases: ChangedPhases, phase: int) -> object:
    return phases.clock.enter(phase)


def _leave(phases: ChangedPhases, phase: int) -> object:
    try:
        return phases.clock.leave()
    except IndexError:
        return "IndexError"


def _stop(phases: ChangedPhases, phase: int) -> object:
    phases.clock._accrue(phase % 2 == 0)
    phases.clock._stopped = True
    return None


def _keep_intervals(phases: ChangedPhases, phase: int) -> object:
    phases.clock._intervals = [] if phase % 2 else None
    phases.clock.left_training = False
    return None


ACTIONS: list[Callable[[ChangedPhases, int], object]] = [
    _enter,
    _enter,
    _leave,
    _stop,
    _keep_intervals,
    lambda phases, _: phases.clock.drain(),
    lambda phases, phase: phases.listen("on_change", phase % 2 == 0),
    lambda phases, phase: phases.listen("on_interval_end", phase % 2 == 0),
]


@needs_c
def test_an_error_in_the_clock_or_a_listener_is_raised() -> None:
    def fail(*_: int) -> int:
        raise RuntimeError("broken")

    broken_clock = hot_path.PhaseClock(fail, 3, 0, ())
    broken_listener = hot_path.PhaseClock(Clock(), 3, 0, ())
    broken_listener.on_change = fail

    for clock in (broken_clock, broken_listener):
        with pytest.raises(RuntimeError, match="broken"):
            clock.enter(1)
    with pytest.raises(IndexError):
        hot_path.PhaseClock(Clock(), 3, 0, ()).enter(3)


# Hooks


@needs_c
@pytest.mark.parametrize("raised", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("is_short", [False, True])
def test_hooks_call_the_same_functions(
    in_python: ModuleType,
    raised: type[BaseException] | None,
    is_off: bool,
    resumes: bool,
    is_short: bool,
) -> None:
    def outcome(module: ModuleType) -> list[Any]:
        called: list[Any] = []

        def body(*args: Any, **kwargs: Any) -> Any:
            called.append((args, kwargs))
            if raised is not None:
                raise raised("now")
            return "result"

        def on_failure(hook: Any, error: BaseException) -> None:
            called.append((type(error), error.__traceback__ is not None))

        hook = module.Hook(
            body,
            Exception,
            on_failure,
            lambda hook: called.append("resumes?") or resumes,
            lambda hook: called.append("success"),
        )
        hook.is_off, hook.is_short = is_off, is_short
        try:
            called.append(hook(1, two=2))
        except BaseException as error:
            called.append(("raised", type(error)))
        return [*called, hook.is_off, hook.is_short, sys.exception()]

    assert outcome(hot_path) == outcome(in_python)


def test_a_hook_that_fails_in_a_generator_leaves_no_exception_there() -> None:
    hook = FailOpen().wrap("hook", lambda: 1 / 0)

    def steps() -> Iterator[BaseException | None]:
        while True:
            hook()
            yield sys.exception()

    generator = steps()
    try:
        raise KeyError("outer")
    except KeyError:
        next(generator)

    assert next(generator) is None


def test_a_hook_that_was_called_once_is_freed_at_once() -> None:
    class Body:
        def __call__(self) -> None:
            pass

    gc.disable()
    try:
        FailOpen().call("hook", body := Body())
        alive = weakref.ref(body)
        del body

        assert alive() is None
    finally:
        gc.enable()


def test_copies_of_a_model_share_its_hooks() -> None:
    model = torch.nn.Linear(1, 1)
    model.register_forward_hook(FailOpen().wrap("hook", lambda *_: None))

    (copied,) = copy.deepcopy(model)._forward_hooks.values()

    assert [copied] == list(model._forward_hooks.values())
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(copied)


# Scalars


class Marked(torch.Tensor):
    """A subclass, whose operators may do something else."""


@needs_c
@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        (torch.tensor(3.140625), True),
        (torch.tensor([3.140625], dtype=torch.float64), True),
        (torch.tensor([1.0, 3.140625])[1], True),
        (torch.tensor(3.140625, requires_grad=True) * 1, True),
        (torch.tensor(float("nan")), True),
        (torch.tensor(3.140625, dtype=torch.bfloat16), False),
        (torch.tensor(3), False),
        (torch.complex(torch.tensor(0.0), torch.tensor(3.140625)).conj().imag, False),
        (torch.tensor([3.140625]).as_subclass(Marked), False),
        (torch.tensor([3.140625]).to_sparse(), False),
        (torch.tensor([1.0, 2.0]), False),
        (torch.empty((), device="meta"), False),
        (3.140625, False),
    ],
    ids=str,
)
def test_only_dense_floats_in_host_memory_are_read(source: Any, is_read: bool) -> None:
    found = hot_path.ScalarReader(torch.Tensor, torch.float32, torch.float64)(source)

    assert (found is not None) == is_read
    if is_read:
        assert found == float(source.detach()) or found != found


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_view_of_freed_or_no_memory_is_not_read(dtype: torch.dtype) -> None:
    # torch gives both an address: their offset. Printing the first one ends the process.
    freed = torch.tensor([1.0, 3.140625], dtype=dtype)[1]
    freed.untyped_storage().resize_(0)
    zero = torch._efficientzerotensor(2, dtype=dtype)[1]
    read = hot_path.ScalarReader(torch.Tensor, torch.float32, torch.float64)

    assert [each.data_ptr() for each in (freed, zero)] == [dtype.itemsize] * 2
    assert [read(each) for each in (freed, zero)] == [None, None]


@needs_c
def test_scalars_are_the_same_with_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [torch.tensor([0.1]), torch.tensor(2.5, requires_grad=True), torch.tensor(7), 0.1, 3]
    found = [device_scalar.scalar(source) for source in sources]

    monkeypatch.setattr(device_scalar, "host_value", device_scalar._no_value)

    assert found == [device_scalar.scalar(source) for source in sources]


# Collectives


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Recording:
    """Collectives of one rank that are recorded, in C or in Python."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, in_c: bool, counts_python_calls: bool = True
    ) -> None:
        self.in_python_calls = 0
        if not in_c:
            for name in ("RecordedFunction", "RecordedWait"):
                monkeypatch.setattr(instrument, name, None)
        self.fail_open = FailOpen()
        self.instrumentation = CollectiveInstrumentation(self.fail_open)
        self.recorder = self.instrumentation.call_recorder
        self.phases = PhaseTimer()
        self.failed: list[CollectiveCall] = []
        counted = self.instrumentation._on_call

        def on_call(*args: Any) -> Any:
            self.in_python_calls += 1
            return counted(*args)

        if counts_python_calls:
            self.instrumentation._on_call = on_call
        self.instrumentation.open()
        self.recorder.connect(self.phases, None, self.failed.append)
        monkeypatch.undo()

    def outcome(self, issue: Callable[[], object]) -> dict[str, Any]:
        """Issue collectives; return what was recorded, without the times themselves."""
        self.phases.enter(BACKWARD)
        raised = None
        try:
            issue()
        except BaseException as error:
            raised = type(error)
        self.phases.leave()
        self.recorder.wait_for_completion(10)
        calls = self.recorder.drain().calls
        groups = self.recorder.groups.known()
        return {
            "raised": raised,
            "calls": [_described(call) for call in calls],
            "recorded": sorted(group.recorded for group in groups),
            "issued": sorted(group.num_issued() or 0 for group in groups),
            "recent": sorted(len(group.rank_set.recent) for group in groups),
            "failed": [_described(call) for call in self.failed],
            "under way": len(self.recorder._under_way),
            "failures": dict(self.fail_open.failures),
        }


def _described(call: CollectiveCall) -> tuple[Any, ...]:
    order = call.start_ns <= call.issued_ns and (not call.timed or call.start_ns <= call.end_ns)
    return (
        OPS[call.op],
        call.payload_bytes,
        call.dtype,
        PHASES[call.phase],
        call.sequence,
        call.timed,
        call.is_bound,
        call.is_lost,
        call.settled,
        call.start_event,
        order,
        call.issued_ns == call.end_ns,
    )


def in_another_thread(issue: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()

    return run


def interrupted() -> None:
    class Interrupting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    dist.all_reduce(torch.ones(2).as_subclass(Interrupting))


def some() -> torch.Tensor:
    return torch.ones(10)


ISSUED: dict[str, Callable[[], object]] = {
    "blocking": lambda: dist.all_reduce(some()),
    "by names": lambda: dist.all_reduce(tensor=some(), group=dist.group.WORLD),
    "with a group": lambda: dist.all_reduce(some(), dist.ReduceOp.MAX, dist.group.WORLD),
    "of a module": lambda: c10d.broadcast(some(), src=0),
    "asynchronous": lambda: dist.all_reduce(some(), async_op=True).wait(),
    "asynchronous, not waited for": lambda: dist.all_reduce(some(), async_op=True),
    "another type": lambda: dist.all_reduce(some().to(torch.bfloat16)),
    "into a tensor": lambda: dist.all_gather_into_tensor(some(), some()),
    "a list": lambda: dist.all_gather([some()], some()),
    "reduce_scatter": lambda: dist.reduce_scatter(some(), [some()]),
    "gather": lambda: dist.gather(some(), [some()]),
    "barrier": dist.barrier,
    "monitored": dist.monitored_barrier,
    "objects": lambda: dist.all_gather_object([None], {"a": 1}),
    "an empty tensor": lambda: dist.all_reduce(torch.ones(0)),
    "no tensor": lambda: dist.all_reduce("nothing"),  # type: ignore[arg-type]
    "no argument": lambda: dist.all_reduce(),  # type: ignore[call-arg]
    "no group": lambda: dist.all_reduce(some(), group="none"),  # type: ignore[arg-type]
    "not a member": lambda: dist.all_reduce(some(), group=dist.GroupMember.NON_GROUP_MEMBER),
    "a sparse tensor": lambda: dist.all_reduce(some().to_sparse()),
    "wrong values": lambda: dist.broadcast(some(), src=99),
    "interrupted": interrupted,
    "another thread": in_another_thread(lambda: dist.all_reduce(some())),
    "several": lambda: [dist.all_reduce(some(), async_op=each % 2 == 0) for each in range(5)],
}


@needs_c
@pytest.mark.parametrize("issue", ISSUED.values(), ids=ISSUED)
def test_a_call_is_recorded_as_in_python(
    world: None, monkeypatch: pytest.MonkeyPatch, issue: Callable[[], object]
) -> None:
    outcomes = []
    for in_c in (True, False):
        recording = Recording(monkeypatch, in_c=in_c)
        dist.all_reduce(some())  # the record of the group is made in Python
        outcomes.append(recording.outcome(issue))
        recording.instrumentation.close()

    assert outcomes[0] == outcomes[1]


@needs_c
def test_common_calls_do_not_run_python_code(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch, in_c=True)
    dist.all_reduce(some())
    before = recording.in_python_calls

    for name in ("blocking", "by names", "asynchronous", "another type", "into a tensor"):
        recording.outcome(ISSUED[name])
    recording.instrumentation.close()

    assert (before, recording.in_python_calls) == (1, 1)
    assert recording.instrumentation.total_cost_ns > 0


@needs_c
def test_only_the_call_that_failed_is_not_recorded(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for in_c in (True, False):
        recording = Recording(monkeypatch, in_c=in_c, counts_python_calls=False)
        dist.all_reduce(some())
        with monkeypatch.context() as broken:
            broken.setattr(recording.recorder.groups, "find", lambda *_, **__: 1 / 0)
            dist.gather(some(), [some()])

        outcomes.append(recording.outcome(ISSUED["several"]))
        recording.instrumentation.close()

    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["failures"] == {"collectives": 1}
    assert [call[0] for call in outcomes[0]["calls"]] == ["all_reduce"] * (1 + 5)


@needs_c
@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_only_an_interrupt_while_a_call_is_read_reaches_the_script(
    world: None, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func == torch.Tensor.nbytes.__get__:
                raise raised
            return func(*args, **kwargs or {})

    recording = Recording(monkeypatch, in_c=True)
    dist.all_reduce(some())
    tensor = some()

    with Interrupted():
        if raised is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
    recording.instrumentation.close()

    assert dict(recording.fail_open.failures) == (
        {} if raised is KeyboardInterrupt else {"collectives": 1}
    )


@needs_c
@pytest.mark.parametrize("where", ["call", "wait"])
def test_an_interrupt_during_the_report_of_a_failed_call_keeps_its_error(
    world: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Work:
        def get_future(self) -> Any:
            return torch.futures.Future()

        def wait(self) -> None:
            raise RuntimeError("in the call")

    original = c10d.all_reduce

    def call(tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        original(tensor, group=group)  # the group counts the call
        if where == "wait":
            return Work()
        raise RuntimeError("in the call")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    contexts = []
    for in_c in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(c10d, "all_reduce", call)
            patched.setattr(dist, "all_reduce", call)
            patched.setattr(dist, "Work", Work)
            recording = Recording(pytest.MonkeyPatch(), in_c=in_c)  # it undoes all its patches
            recording.recorder.connect(recording.phases, None, interrupt)
            try:
                with pytest.raises(KeyboardInterrupt) as raised:
                    try:
                        raise ValueError("of the script")
                    finally:
                        dist.all_reduce(some(), async_op=True).wait()
            finally:
                recording.instrumentation.close()
        contexts.append(_contexts(raised.value))

    assert contexts == [["RuntimeError('in the call')", "ValueError('of the script')"]] * 2


def _contexts(error: BaseException) -> list[str]:
    """Return the exceptions behind an error. A circle of them would not end here."""
    found = []
    while (behind := error.__context__) is not None and len(found) < 9:
        error = behind
        found.append(repr(error))
    return found


@needs_c
def test_an_end_that_cannot_be_recorded_loses_one_call(
    world: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenWork:
        def get_future(self) -> Any:
            raise ValueError("no future")  # a RuntimeError: this handle never has one

    broken = BrokenWork()
    monkeypatch.setattr(c10d, "all_reduce", lambda tensor, group=None: broken)
    monkeypatch.setattr(dist, "all_reduce", c10d.all_reduce)
    instrumentation = CollectiveInstrumentation(fail_open := FailOpen())
    instrumentation.open()
    recorder = instrumentation.call_recorder
    recorder.connect(PhaseTimer(), None)
    dist.barrier()

    results = [dist.all_reduce(some(), group=dist.group.WORLD) for _ in range(2)]
    instrumentation.close()

    assert results == [broken, broken]
    assert dict(fail_open.failures) == {"collectives": 2}
    assert "no future" in caplog.text
    assert [OPS[call.op] for call in recorder.drain().calls] == ["barrier"]
    (rank_set,) = recorder.groups.rank_sets()
    assert [call.settled for call in rank_set.recent] == [False, True, True]
    assert not recorder._under_way


# Collectives on a device


class DeviceRecording(Recording):
    """Collectives of one rank on the streams of a fake device, as `DeviceRank` has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, in_c: bool) -> None:
        self.host = ManualClock()
        self.cuda = FakeCuda(self.host)
        self.cuda.collective_backend = "gloo"
        self.cuda.patch(monkeypatch)
        for module in (dist, c10d):
            monkeypatch.setattr(module, "all_reduce", self.cuda.all_reduce)
        monkeypatch.setattr(dist.Work, "wait", lambda work: work.wait_for_end())
        monkeypatch.setattr(instrument, "TENSOR_TYPE", DeviceTensor)
        super().__init__(pytest.MonkeyPatch(), in_c=in_c)
        self.compute, self.side = self.cuda.current, self.cuda.new_stream()
        self.reduce(1)  # the record of the group is made in Python
        self.steps()
        self.in_python_calls = 0

    reduce, begin, on_side = DeviceRank.reduce, DeviceRank.begin, DeviceRank.on_side

    def steps(self) -> list[StepCommTotals]:
        batch = self.recorder.drain()
        self.host.elapse(1000)
        if not batch.settled():
            batch.expire()
        return add_up([batch], self.instrumentation)

    def found(self, issue: Callable[[Any], object]) -> dict[str, Any]:
        """Issue collectives; return what was recorded, with the times of the device."""
        raised = None
        self.phases.enter(BACKWARD)
        try:
            issue(self)
        except BaseException as error:
            raised = type(error)
        self.phases.leave()
        self.cuda.is_broken = self.cuda.capturing = False
        self.cuda.current_index = 0
        calls = list(self.recorder._calls)
        (step,) = self.steps()
        (group,) = self.recorder.groups.known()
        return {
            "raised": raised,
            "calls": [
                (
                    *(OPS[call.op], call.payload_bytes, call.dtype, PHASES[call.phase]),
                    *(call.sequence, call.timed, call.is_bound, call.is_lost, call.settled),
                    call.group.on_device,
                    *(call.start_ns, call.end_ns, call.issued_ns, call.wait_ns)
                    * (call.start_event is not None and call.timed),
                )
                for call in calls
            ],
            "seconds": (step.seconds, step.comm_seconds, step.exposed_seconds)
            if all(call.start_event is not None for call in calls)
            else None,  # of the real clock
            "recorded": group.recorded,
            "recent": [call.sequence for call in group.rank_set.recent],
            "waits": [(call.wait_phase, call.wait_ns != 0) for call in calls],
            "failed": [_described(call)[:4] for call in self.failed],
            "known": (len(self.recorder._works), len(self.recorder._under_way)),
            "left out": (self.recorder._left_out, self.recorder.dropped_in_capture),
            "events": self.cuda.num_records,
            "failures": dict(self.fail_open.failures),
            "disabled": self.recorder.events.disabled,
        }


def in_a_thread_of_autograd(rank: Any) -> None:
    """Python did not start the thread, so that threading makes a stand-in for it."""
    ended = threading.Event()
    _thread.start_new_thread(lambda: (rank.reduce(10), ended.set()), ())
    ended.wait()


def while_a_graph_is_captured(rank: Any) -> None:
    rank.cuda.capturing = True
    rank.reduce(10)


def on_another_current_device(rank: Any) -> None:
    rank.cuda.current_index = 1
    rank.reduce(10)


def on_a_failed_device(rank: Any) -> None:
    rank.cuda.is_broken = True
    rank.reduce(10)
    rank.reduce(10)


def that_fails_while_the_call_runs(rank: Any) -> None:
    rank.host.at(rank.host.now_ns + 1, lambda: setattr(rank.cuda, "is_broken", True))
    rank.reduce(10)


def without_events(rank: Any) -> None:
    rank.recorder.events.disable("a test")
    rank.reduce(10)


def in_host_memory(rank: Any) -> None:
    dist.all_reduce(torch.tensor([10.0]))


def refused(rank: Any) -> None:
    rank.reduce(10, group="none")


def waiting(during: Callable[[Any], object]) -> Callable[[Any], None]:
    """Wait for a call; something happens while the handle waits."""

    def wait(rank: Any) -> None:
        work = rank.begin(10)
        work.wait_for_end = lambda: during(rank)
        work.wait()

    wait.__name__ = f"waiting, {during.__name__}"
    return wait


def it_fails(_: Any) -> None:
    raise RuntimeError("refused")


def it_is_wrong(_: Any) -> None:
    raise ValueError("wrong")


def it_is_interrupted(_: Any) -> None:
    raise KeyboardInterrupt


def the_device_fails(rank: Any) -> None:
    rank.cuda.is_broken = True


def a_graph_is_captured(rank: Any) -> None:
    rank.cuda.capturing = True


def waiting_on_a_failed_device(rank: Any) -> None:
    work = rank.begin(10)
    rank.cuda.is_broken = True
    work.wait()


def waiting_while_a_graph_is_captured(rank: Any) -> None:
    work = rank.begin(10)
    rank.cuda.capturing = True
    work.wait()


def waiting_in_another_thread(rank: Any) -> None:
    work = rank.begin(10)
    in_another_thread(work.wait)()


def waiting_twice(rank: Any) -> None:
    work = rank.begin(10)
    work.wait()
    rank.compute.run(5)
    work.wait()


def waiting_after_the_calls_were_read(rank: Any) -> None:
    work = rank.begin(10)
    rank.steps()
    work.wait()


def waiting_for_an_unknown_handle(rank: Any) -> None:
    FakeWork(None, lambda: None).wait()
    with pytest.raises(TypeError):
        dist.Work.wait()


def many(rank: Any) -> None:
    for each in range(30):
        if each % 3:
            rank.reduce(each, async_op=each % 2 == 0)
        else:
            with rank.on_side():
                rank.begin(each).wait()


ON_DEVICE = (
    *(what for what, *_ in CASES),
    *(in_a_thread_of_autograd, while_a_graph_is_captured, on_another_current_device),
    *(on_a_failed_device, that_fails_while_the_call_runs, without_events, in_host_memory),
    *map(waiting, (it_fails, it_is_wrong, it_is_interrupted)),
    *map(waiting, (the_device_fails, a_graph_is_captured)),
    *(waiting_on_a_failed_device, waiting_while_a_graph_is_captured, waiting_twice),
    *(waiting_in_another_thread, waiting_after_the_calls_were_read),
    *(
        waiting_for_an_unknown_handle,
        refused,
        many,
        lambda rank: in_another_thread(lambda: rank.reduce(10))(),
    ),
)


@needs_c
@pytest.mark.parametrize("issue", ON_DEVICE, ids=lambda each: each.__name__)
@pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled", "not sampled"])
def test_a_call_on_a_device_is_recorded_as_in_python(
    world: None, issue: Callable[[Any], object], is_sampled: bool
) -> None:
    found = []
    for in_c in (True, False):
        with pytest.MonkeyPatch.context() as patches:
            recording = DeviceRecording(patches, in_c=in_c)
            recording.recorder.is_sampled = is_sampled
            found.append(recording.found(issue))
            recording.instrumentation.close()

    assert found[0] == found[1]


@needs_c
def test_common_calls_on_a_device_are_begun_and_ended_in_c(world: None) -> None:
    with pytest.MonkeyPatch.context() as patches:
        recording = DeviceRecording(patches, in_c=True)
        for issue in (many, in_a_thread_of_autograd):
            recording.found(issue)
        recording.instrumentation.close()

    assert recording.in_python_calls == 0
    assert recording.fail_open.failures == {}


@needs_c
def test_neither_events_nor_streams_of_a_device_are_left(world: None) -> None:
    with pytest.MonkeyPatch.context() as patches:
        recording = DeviceRecording(patches, in_c=True)
        tensor = torch.tensor([1.0]).as_subclass(DeviceTensor)
        recorder = recording.recorder
        watched = [tensor, recording.compute, recorder.events, recorder.stream_waits, recorder]

        def counts() -> list[int]:
            for rank_set in recorder.groups.rank_sets():
                rank_set.recent.clear()
            gc.collect()
            return [sys.getrefcount(each) for each in watched]

        def issue() -> None:
            for _ in range(100):
                dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            with pytest.raises(TypeError):
                dist.all_reduce(tensor, none=1)
            with recording.on_side():
                dist.all_reduce(tensor)
            recording.steps()

        issue()
        before, events = counts(), recording.cuda.num_events
        for _ in range(5):
            issue()
        after = counts()
        recording.instrumentation.close()

    assert [b - a for a, b in zip(before, after, strict=True)] == [0] * len(watched)
    assert recording.cuda.num_events - events < 20  # events are used again


@needs_c
def test_neither_objects_nor_references_are_left(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(monkeypatch, in_c=True)
    tensor, group = some(), dist.group.WORLD
    issue = ISSUED["several"]
    watched: list[Any] = [tensor, group, tensor.dtype, recording.recorder, recording.phases]
    recording.outcome(issue)

    def counts() -> list[int]:
        for rank_set in recording.recorder.groups.rank_sets():
            rank_set.recent.clear()
        recording.failed.clear()
        gc.collect()
        return [sys.getrefcount(each) for each in watched]

    before = counts()
    for _ in range(300):
        dist.all_reduce(tensor, group=group)
        with pytest.raises(RuntimeError, match="invalid root rank"):
            dist.broadcast(tensor, src=99)
        recording.outcome(issue)
    after = counts()
    recording.instrumentation.close()

    assert [b - a for a, b in zip(before, after, strict=True)] == [0] * len(watched)
    assert not [each for each in gc.get_objects() if type(each) is CollectiveCall]


def test_calls_are_taken_once_though_a_collection_of_garbage_takes_them(
    in_python: ModuleType,
) -> None:
    # On Python 3.11 a collection may begin while a list is made, and run any code.
    for module in (hot_path, in_python):
        recorder = module.RecorderFields()
        recorder._calls, recorder._is_draining = [object()], False
        calls, taken = recorder._calls, []

        def take(phase: str, info: object, recorder: Any = recorder, taken: Any = taken) -> None:
            if phase == "start":
                taken.append(recorder._take_calls())

        threshold, lists = gc.get_threshold(), [[] for _ in range(200)]  # no list is kept for reuse
        gc.callbacks.append(take)
        gc.set_threshold(1, 1, 1)
        try:
            taken.append(recorder._take_calls())
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(take)

        assert len(lists) == 200
        assert [each is calls for each in taken].count(True) == 1
        assert [each for each in taken if each is not calls] == [[]] * (len(taken) - 1)


@needs_c
def test_fields_are_those_of_python(in_python: ModuleType) -> None:
    for name in ("CollectiveCall", "GroupFields", "RankSetFields", "RecorderFields"):
        kind = getattr(hot_path, name)
        fields = {field for field in vars(kind) if not field.startswith("__")}
        fields -= {"settle", "values", "_take_calls", "drain"}

        assert fields == set(getattr(in_python, name).__slots__), name
    for name in ("InboxFields", "MemoryHookFields", "StepCollectorFields", "EngineHookFields"):
        kind, twin = getattr(hot_path, name), getattr(in_python, name)
        in_c = {field for field, value in vars(kind).items() if inspect.isdatadescriptor(value)}
        methods = {field for field in vars(kind) if callable(vars(kind)[field])}
        methods = {field for field in methods if not field.startswith("__")}

        of_twin = set(inspect.get_annotations(twin))
        assert in_c <= of_twin, name
        assert methods <= set(vars(twin)), name
    made = [
        module.CollectiveCall(ALL_REDUCE, None, 8, None, FORWARD)
        for module in (hot_path, in_python)
    ]
    in_order = in_python.CollectiveCall.__slots__
    assert [getattr(made[0], field) for field in in_order if hasattr(made[1], field)] == [
        getattr(made[1], field) for field in in_order if hasattr(made[1], field)
    ]


@needs_c
@pytest.mark.parametrize("end_ns", [-20, 0, 30])
@pytest.mark.parametrize("wait_ns", [0, -30, 10, hot_path.NEVER])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("busy", [hot_path.BEFORE_ALL, -35, hot_path.NEVER])
def test_calls_settle_as_in_python(
    in_python: ModuleType, end_ns: int, wait_ns: int, timed: bool, is_bound: bool, busy: int
) -> None:
    def settled(module: ModuleType, group: Any) -> list[Any]:
        group.busy_until_ns = group.maybe_busy_until_ns = busy
        call = module.CollectiveCall(ALL_REDUCE, group, 8, None, FORWARD)
        call.start_ns = call.issued_ns = -50
        call.end_ns, call.wait_ns, call.timed, call.is_bound = end_ns, wait_ns, timed, is_bound
        call.settle(3)
        fields = ("batch", "duration_ns", "exposed_ns", "wait_exposed_ns", "is_bound", "settled")
        own = [getattr(call, field) for field in fields]
        return [*own, group.busy_until_ns, group.maybe_busy_until_ns]

    expected = settled(in_python, SimpleNamespace())

    assert settled(hot_path, hot_path.GroupFields()) == expected
    assert settled(hot_path, SimpleNamespace()) == expected


@needs_c
@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_calls_for_another_process_are_as_in_python(
    in_python: ModuleType, seed: int
) -> None:
    def calls(module: ModuleType) -> list[Any]:
        draw = random.Random(seed)
        made = []
        for _ in range(draw.randrange(4)):
            call = module.CollectiveCall(*(draw.randrange(5), None, 2**40, torch.half, FORWARD))
            call.sequence, call.start_ns = draw.randrange(2**60), -draw.randrange(2**60)
            call.issued_ns, call.wait_phase = draw.randrange(2**60), 3
            call.end_ns, call.wait_ns = draw.choice([0, 7, 7]), draw.choice([0, 9])
            call.is_bound, call.is_lost = draw.random() < 0.5, draw.random() < 0.5
            call.timed = draw.random() < 0.8
            call.start_event = draw.choice([None, None, None, "event"])
            made.append(call)
        return made

    ours, expected = calls(hot_path), calls(in_python)

    assert [call.values() for call in ours] == [call.values() for call in expected]
    assert hot_path.have_ended_on_host(ours) == in_python.have_ended_on_host(expected)
    with pytest.raises(TypeError):
        hot_path.have_ended_on_host(None)


# Calls between hooks


def outcome_of_hooked_call(
    module: ModuleType, *, is_open: bool, is_paired: bool, raised: dict[str, Any], begun: Any
) -> tuple[Any, ...]:
    """Return what a call between hooks did: which functions it called, and how it ended."""
    called: list[Any] = []

    def hook(name: str, result: Any = None) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            called.append((name, repr(args), repr(kwargs)))
            if raised.get(name) is not None:
                raise raised[name](name)
            return result

        return body

    state = module.HookState()
    state.is_open = is_open
    hooks = hook("start", begun), hook("end"), hook("exception")
    call = module.HookedCall(state, hook("original", "result"), *hooks, is_paired)
    found: list[Any] = []
    try:
        found.append(call((1, "a"), {"b": 2}))
    except BaseException as error:
        behind: BaseException | None = error
        while behind is not None:
            found.append(repr(behind))
            behind = behind.__context__
    assert (state.cost_ns > 0) == (is_open and raised.get("start") is None)
    return called, found


@needs_c
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("begun", [None, True, 0])
@pytest.mark.parametrize(
    "original", [None, RuntimeError, NotImplementedError, MemoryError, ValueError, SystemExit]
)
def test_calls_between_hooks_are_as_in_python(
    in_python: ModuleType, is_open: bool, is_paired: bool, begun: Any, original: Any
) -> None:
    for interrupted in itertools.product([None, KeyboardInterrupt], repeat=3):
        raised = dict(zip(("start", "end", "exception"), interrupted, strict=True))
        given: Any = {
            "is_open": is_open,
            "is_paired": is_paired,
            "raised": raised | {"original": original},
            "begun": begun,
        }

        expected = outcome_of_hooked_call(in_python, **given)

        assert outcome_of_hooked_call(hot_path, **given) == expected


@needs_c
def test_calls_between_hooks_leave_no_references() -> None:
    state, arguments, error = hot_path.HookState(), (object(),), RuntimeError("raised")
    state.is_open = True
    kwargs, made = {"name": object()}, object()

    def original(*args: Any, **kwargs: Any) -> object:
        if kwargs["name"] is None:
            raise error
        return made

    def nothing(*args: Any) -> None:
        """Do nothing."""

    call: Any = hot_path.HookedCall(state, original, nothing, nothing, nothing, False)
    watched = [arguments, arguments[0], kwargs, kwargs["name"], made, state, original, nothing]

    def many() -> list[int]:
        for _ in range(50):
            call(arguments, kwargs)
            with contextlib.suppress(RuntimeError):
                call(arguments, {"name": None})
            error.__traceback__ = None
        return [sys.getrefcount(each) for each in [*watched, error]]

    before = many()
    assert many() == before
    with pytest.raises(TypeError, match="tuple and a dict"):
        call(1, 2)


@needs_c
def test_an_interrupt_of_a_hook_keeps_its_context_before_the_error_of_the_call(
    in_python: ModuleType,
) -> None:
    def interrupted(*args: Any) -> None:
        try:
            raise ValueError("in the hook")
        finally:
            raise KeyboardInterrupt

    def fails() -> None:
        raise RuntimeError("in the call")

    chains = []
    for module in (in_python, hot_path):
        state = module.HookState()
        state.is_open = True
        with pytest.raises(KeyboardInterrupt) as raised:
            try:
                raise ValueError("of the script")
            finally:
                module.HookedCall(state, fails, print, interrupted, str, False)((), {})
        chains.append(_contexts(raised.value))

    causes = ["ValueError('in the hook')", "RuntimeError('in the call')"]
    assert chains == [[*causes, "ValueError('of the script')"]] * 2


@needs_c
def test_an_owner_of_a_call_between_hooks_is_freed() -> None:
    class Owner:
        call: Any

    owner = Owner()
    owner.call = hot_path.HookedCall(hot_path.HookState(), owner, print, print, print, False)
    freed = weakref.ref(owner)
    del owner
    gc.collect()

    assert freed() is None


# Shapes of batches


class Tokens(dict[str, Any]):
    """A mapping like that of a tokenizer."""


def plain_batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchShape | None:
    """Return the shape that is read in C; None if that is left to Python."""
    return PLAIN_READER(args, kwargs)  # type: ignore[no-any-return]


PLAIN_READER = hot_path.ShapeReader and reader_in_c(lambda args, kwargs: None)


def drawn_value(chance: random.Random, depth: int = 0) -> Any:
    """A tensor, or something else that a batch may contain."""
    kind = chance.randrange(12)
    if kind < 6:
        dtype = chance.choice([torch.float32, torch.int64, torch.bool, torch.complex64])
        return torch.zeros([chance.randrange(4) for _ in range(chance.randrange(4))], dtype=dtype)
    if kind < 8 and depth < 3:
        names = ["input_ids", "tokens", "labels", "mask", "x", "inputs_embeds"]
        kept = chance.sample(names, chance.randrange(4))
        made = {name: drawn_value(chance, depth + 1) for name in kept}
        return chance.choice([dict, dict, Tokens])(made)
    if kind == 8 and depth < 3:
        inner = [drawn_value(chance, depth + 1) for _ in range(chance.randrange(3))]
        return chance.choice([list, tuple])(inner)
    others = [None, 3, 0.5, True, "text", object(), torch.nn.Parameter(torch.ones(2, 3)), Tokens()]
    return chance.choice([*others, {1: torch.ones(2, 3)}])


@needs_c
def test_shapes_of_batches_are_as_in_python(seed: int) -> None:
    chance, num_read = random.Random(seed), 0
    for _ in range(300):
        args = tuple(drawn_value(chance) for _ in range(chance.randrange(4)))
        known = ["input_ids", "attention_mask", "x", "inputs_embeds", "label_ids"]
        names = chance.sample(known, chance.randrange(5))
        kwargs = {name: drawn_value(chance) for name in names}

        found = plain_batch_shape(args, kwargs)

        assert batch_shape(args, kwargs) == shape_in_python(args, kwargs)
        if found is not None:
            num_read += 1
            assert found == shape_in_python(args, kwargs)
    assert num_read > 100


IDS, MASK = torch.ones(4, 16, dtype=torch.int64), torch.ones(4, 16, dtype=torch.bool)
VECTORS = torch.ones(2, 8, 4)


@needs_c
@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((torch.ones(8, 3, 5),), {}, (8, 120, None, None)),
        ((), {"attention_mask": MASK, "input_ids": IDS, "labels": IDS}, (4, 64, 64, 16)),
        (({"x": None, "tokens": torch.ones(2, 7)},), {}, (2, 14, 14, 7)),
        ((), {"input_ids": IDS, "decoder_input_ids": torch.ones(4, 3)}, (4, 64, 64, 16)),
        (([torch.ones(3), IDS], None), {"use_cache": False}, (4, 3, 64, 16)),
        ((), {}, (None, None, None, None)),
        ((), {"input_values": torch.ones(4, 90), "labels": IDS}, (4, 360, None, None)),
        ((torch.ones(4, 90),), {"labels": IDS, "mask": IDS}, (4, 64, None, None)),
        ((), {"inputs_embeds": torch.ones(4, 16, 2), "mask": IDS}, (4, 128, 64, 16)),
        ((), {"inputs_embeds": VECTORS, "mask": torch.ones(2, 1, 8, 8)}, (2, 64, 16, 8)),
        ((), {"inputs_embeds": VECTORS, "mask": torch.ones(2, 8), "labels": IDS}, (2, 64, 16, 8)),
        ((), {"grid": IDS[:1, :3], "inputs_embeds": VECTORS, "mask": IDS}, (2, 3, 16, 8)),
        ((), {"inputs_embeds": VECTORS, "mask": IDS, "task": IDS[:2, :1]}, (2, 64, 16, 8)),
        ((), {"inputs_embeds": VECTORS, "input_ids": IDS}, (4, 64, 64, 16)),
        ((), {"labels": IDS, "loss_mask": torch.ones(4, 16)}, (4, 64, 64, 16)),
        ((), {"x": VECTORS, "masked_input_ids": IDS}, (4, 64, 64, 16)),
        (([torch.ones(3, 4, 5)] * 2, [{"masks": IDS}, {}]), {}, (2, 120, None, None)),
    ],
)
def test_common_batches_do_not_run_python_code(args: Any, kwargs: Any, expected: Any) -> None:
    found = plain_batch_shape(args, kwargs)

    assert found is not None
    assert (found.samples, found.elements, found.tokens, found.sequence_length) == expected
    assert plain_batch_shape(args, kwargs) is found
    assert plain_batch_shape((torch.ones(1, 2, 3),), {}) is not found


class Interrupting(TorchFunctionMode):
    """Interrupts each function of torch, or raises another error in it."""

    def __init__(self, raised: type[BaseException]) -> None:
        super().__init__()
        self.raised = raised

    def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.raised


@needs_c
def test_batches_that_only_python_code_can_read_are_left_to_it() -> None:
    circle: dict[str, Any] = {"x": 1}
    circle["circle"] = circle
    deep: dict[str, Any] = {"input_ids": IDS}
    for _ in range(10):
        deep = {"inner": deep}

    for value in (circle, [circle], deep, Tokens(), {1: IDS}):
        assert plain_batch_shape((value,), {}) is None
    with Interrupting(ValueError):
        assert plain_batch_shape((IDS,), {}) is None
    with pytest.raises(KeyboardInterrupt), Interrupting(KeyboardInterrupt):
        plain_batch_shape((IDS,), {})


@needs_c
def test_reading_a_shape_leaves_no_references() -> None:
    watched = [IDS, MASK, IDS.dtype, torch.bool]
    batch = {"attention_mask": MASK, "input_ids": IDS}
    doubtful, image, target = {"labels": IDS}, torch.ones(3, 4, 5), {"labels": IDS}
    watched += [image, target, *DOUBTFUL_PARTS]
    plain_batch_shape((batch, [IDS]), batch)
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(50):
        plain_batch_shape((batch, [IDS]), batch)
        plain_batch_shape((batch, [MASK], object()), {})
        plain_batch_shape((), doubtful)
        plain_batch_shape(([image], [target]), {})

    assert [sys.getrefcount(each) for each in watched] == before


# Slots of steps

NUM_SLOTS, NUM_PHASES, FIRST_BYTE = 5, 3, 16
SLOT_BYTES = struct.calcsize(hot_path.STEP_FORMAT + NUM_PHASES * hot_path.PHASE_FORMAT) + 4


def drawn_step(chance: random.Random) -> Any:
    """A step with some values that are unknown, still on a device, or no numbers."""
    values = [1.5, -math.inf, math.nan, 0.0, 1e308, None, object()]
    losses = chance.choices([0.25, 7.0, math.inf], k=chance.randrange(4))
    if chance.random() < 0.2:
        losses.append(chance.choice([None, object()]))
    counts = StepCounts(
        micro_batches=chance.randrange(9),
        samples=chance.choice([None, 0, 2**40]),
        tokens=chance.choice([None, 1, 2**62]),
        losses=losses,
        losses_are_divided=chance.random() < 0.5,
        skipped=chance.random() < 0.5,
    )
    return raw_step(
        chance.randrange(2**40),
        phase_ns=[chance.randrange(-5, 2**50) for _ in range(NUM_PHASES)],
        counts=counts,
        gradient_norm=chance.choice(values),
        learning_rate=chance.choice(values),
        loss_scale=chance.choice(values),
        device_phases=chance.choice([None, object()]),
    )


def slots_in_both(in_python: ModuleType) -> tuple[list[bytearray], list[Any]]:
    """Return the buffers of the slots in C and in Python, and the slots."""
    buffers = [bytearray(FIRST_BYTE + NUM_SLOTS * SLOT_BYTES) for _ in range(2)]
    slots = [
        module.StepSlots(buffer, FIRST_BYTE, NUM_SLOTS, NUM_PHASES)
        for module, buffer in zip((hot_path, in_python), buffers, strict=True)
    ]
    return buffers, slots


@needs_c
def test_steps_are_written_as_in_python(in_python: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    buffers, slots = slots_in_both(in_python)

    for _ in range(200):
        step, is_recoverable = drawn_step(chance), chance.random() < 0.5
        for each in slots:
            each.is_recoverable = is_recoverable

            assert each.write(step) is is_recoverable

        assert buffers[0] == buffers[1]


class StepWithoutSlots:
    """A step whose class has one of its fields, and not as a slot."""

    loss_scale = 3.0

    def __init__(self, step: RawStep) -> None:
        names = [each.name for each in dataclasses.fields(step) if each.name != "loss_scale"]
        vars(self).update({name: getattr(step, name) for name in names})


def outcome(call: Callable[..., Any], args: list[int], kwargs: dict[str, int]) -> Any:
    try:
        return call(*args, **kwargs)
    except TypeError as error:
        return str(error)


@needs_c
@pytest.mark.parametrize("kind", [StepCounts, RawStep, CallBatch])
def test_objects_are_made_as_by_the_class_itself(kind: type[Any], seed: int) -> None:
    chance, make = random.Random(seed), hot_path.constructor(kind)
    names = [field.name for field in dataclasses.fields(kind)]

    for _ in range(500):
        args = [chance.randrange(9) for _ in range(chance.randrange(len(names) + 2))]
        given = chance.sample([*names, "another"], chance.randrange(len(names)))
        kwargs = {name: chance.randrange(9) for name in given}
        if chance.random() < 0.8:  # mostly those that are accepted
            kwargs = {name: 5 for name in names[len(args) :]}
        made = outcome(make, args, kwargs)

        assert type(made) in (kind, str)
        assert made == outcome(kind, args, kwargs)


@needs_c
def test_each_object_has_its_own_lists_and_is_freed() -> None:
    make, value = hot_path.constructor(StepCounts), object()
    first, second = make(samples=value), make(samples=value)
    first.losses.append(1.0)
    before, num_objects = sys.getrefcount(value), len(gc.get_objects())
    for _ in range(100):
        make(samples=value, losses=[])
        make(tokens=value)
        outcome(make, [], {"another": value})  # type: ignore[dict-item]

    assert second.losses == []
    assert gc.is_tracked(first)
    assert sys.getrefcount(value) == before
    assert len(gc.get_objects()) < num_objects + 50


@needs_c
def test_a_class_whose_fields_are_no_slots_has_no_constructor() -> None:
    @dataclasses.dataclass
    class Plain:
        field: int = 0

    with pytest.raises(ValueError, match="'field' is no slot"):
        hot_path.constructor(Plain)
    with pytest.raises(TypeError, match="initialized once"):
        hot_path.constructor(StepCounts).__init__(StepCounts, (), None)  # type: ignore[misc]


def test_without_the_extension_the_constructor_is_the_class(in_python: ModuleType) -> None:
    assert in_python.constructor(StepCounts) is StepCounts


class SubclassOfStep(RawStep):
    """A step that inherits its slots, and has another field in place of one of them."""

    __slots__ = ("step",)


def as_subclass(step: RawStep) -> RawStep:
    values = {each.name: getattr(step, each.name) for each in dataclasses.fields(step)}
    return SubclassOfStep(**values)


@needs_c
def test_steps_of_several_classes_are_written_as_in_python(
    in_python: ModuleType, seed: int
) -> None:
    chance = random.Random(seed)
    buffers, slots = slots_in_both(in_python)

    for _ in range(100):
        made = chance.choice([lambda step: step, StepWithoutSlots, as_subclass])(drawn_step(chance))
        for each in slots:
            each.write(made)

        assert buffers[0] == buffers[1]


@needs_c
def test_a_step_with_a_field_that_was_never_set_is_refused(in_python: ModuleType) -> None:
    step = raw_step(1, phase_ns=[1, 2, 3])
    for module in (hot_path, in_python):
        slots = module.StepSlots(
            bytearray(FIRST_BYTE + NUM_SLOTS * SLOT_BYTES), FIRST_BYTE, NUM_SLOTS, NUM_PHASES
        )
        slots.write(step)
        partial = RawStep.__new__(RawStep)
        partial.counts = step.counts

        with pytest.raises(AttributeError):
            slots.write(partial)


@needs_c
@pytest.mark.parametrize(
    ("changed", "raised"),
    [
        ({"step": "7"}, (TypeError, struct.error)),
        ({"step": 2**63}, (OverflowError, struct.error)),
        ({"step": None}, (TypeError, struct.error)),
        ({"phase_ns": [1, None, 3]}, (TypeError, struct.error)),
        ({"ended_at": None}, (TypeError, struct.error)),
        ({"phase_ns": [1, 2]}, (ValueError, struct.error)),
        ({"phase_ns": [1, 2, 0.5]}, (TypeError, struct.error)),
        ({"counts": None}, AttributeError),
        ({"counts": StepCounts(losses=None)}, TypeError),  # type: ignore[arg-type]
    ],
)
def test_a_step_that_cannot_be_written_leaves_all_slots_as_they_were(
    in_python: ModuleType, changed: dict[str, Any], raised: Any
) -> None:
    for module in (hot_path, in_python):
        buffer = bytearray(FIRST_BYTE + NUM_SLOTS * SLOT_BYTES)
        slots = module.StepSlots(buffer, FIRST_BYTE, NUM_SLOTS, NUM_PHASES)
        slots.write(raw_step(1, phase_ns=[1, 2, 3]))
        before = bytes(buffer)

        with pytest.raises(raised):
            slots.write(raw_step(2, **{"phase_ns": [1, 2, 3], **changed}))

        assert buffer == before


@needs_c
def test_neither_the_buffer_nor_the_step_is_kept() -> None:
    large = 10**15
    step = raw_step(large, phase_ns=[large + 1, large + 2, large + 3])
    losses: list[Any] = [object()]
    step.counts.losses, step.counts.samples = losses, large + 4
    memory = mmap.mmap(-1, FIRST_BYTE + NUM_SLOTS * SLOT_BYTES)
    slots = hot_path.StepSlots(memory, FIRST_BYTE, NUM_SLOTS, NUM_PHASES)
    # No small integers and no None, whose references other threads change.
    watched = [step.step, step.ended_at, step.phase_ns, *step.phase_ns]
    watched += [step.counts, step.counts.samples, losses, losses[0], memory]
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(50):
        slots.write(step)

    assert [sys.getrefcount(each) for each in watched] == before
    memory.close()  # which fails while somebody has its buffer
    with pytest.raises(ValueError, match="closed"):
        slots.write(step)


@needs_c
@pytest.mark.parametrize(
    "options", [(-1, 5, 3), (2**60, 5, 3), (0, 0, 3), (0, 2**60, 3), (0, 5, 99), (0, 5, -1)]
)
def test_slots_that_cannot_be_are_refused(options: tuple[int, int, int]) -> None:
    slots = hot_path.StepSlots(bytearray(9999), 0, 5, 3)

    with pytest.raises(ValueError, match="expected a slot or more"):
        hot_path.StepSlots(bytearray(9999), *options)
    with pytest.raises(ValueError, match="expected a slot or more"):
        slots.__init__(bytearray(9999), *options)
    slots.write(raw_step(1, phase_ns=[1, 2, 3]))  # with the options that it had


@needs_c
def test_a_buffer_that_is_too_short_is_not_written_beyond_its_end() -> None:
    slots = hot_path.StepSlots(bytearray(FIRST_BYTE + SLOT_BYTES), FIRST_BYTE, 2, NUM_PHASES)

    with pytest.raises(ValueError, match="the buffer ends before this slot"):
        slots.write(raw_step(1, phase_ns=[1, 2, 3]))
    slots.write(raw_step(2, phase_ns=[1, 2, 3]))
