"""Tests of the hooks of the common passes and steps in C: they do what those in Python do.

Covers `EngineHookFields`, `StepCollectorFields`, `MemoryHookFields`, `InboxFields` and `drain` of
`RecorderFields`, of which `hot_path.py` has the twins.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.metrics.exporters.trace_context import OPENTELEMETRY
from zerowatch.metrics.settings import SamplingSettings
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.common import hot_path
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.hot_path import MemoryHookFields
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.instrumentation.batch_shape import BatchShape
from zerowatch.runtime.instrumentation.engine_hooks import EngineHooks
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.instrumentation.step_collector import StepCollector
from zerowatch.runtime.monitor.watch_thread import MAX_PENDING, WAKING_ITEMS, WatchThread

# What each rank calls in C, and the method in Python that does the same.
TWINS: dict[type[Any], dict[str, str]] = {
    EngineHooks: {
        "_begin_forward": "_on_forward_start",
        "_end_forward": "_on_forward_end",
        "_begin_backward": "_on_backward_start",
        "_end_backward": "_on_backward_end",
        "_begin_step": "_on_step_start",
        "_end_step": "_on_step_end",
    },
    StepCollector: {"on_step_end": "_collect"},
    CallRecorder: {"drain": "_drain"},
    WatchThread: {"enqueue": "_enqueue"},
}
SECOND = 1_000_000_000
RUNTIME = str(Path(hot_path.__file__).parents[1])

pytestmark = pytest.mark.skipif(not hot_path.IS_COMPILED, reason="the extension was not built")


def in_python(kind: type[Any]) -> type[Any]:
    """A subclass that does everything in Python."""
    methods = {name: getattr(kind, other) for name, other in TWINS[kind].items()}
    return type(kind.__name__, (kind,), methods)


class Memory(MemoryHookFields):
    """Hooks on memory that know each shape after its first micro-batch."""

    def __init__(self) -> None:
        self._forecasts = SimpleNamespace(known_risks={})
        self._known_shape: BatchShape | None = None
        self._known_risks: Any = None
        self.reading_due, self.micro_batch = 0.0, 0
        self.events: list[Any] = []

    def on_batch_start(self, shape: BatchShape, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        risks = self._forecasts.known_risks
        if not (shape is self._known_shape and risks is self._known_risks):
            self.events.append(("assessed", shape.samples, micro_batch))
            self._known_shape, self._known_risks = shape, risks

    def on_backward_end(self) -> None:
        self.events.append("gradients")

    def on_update_start(self) -> None:
        self.events.append("update")

    def on_generation_start(self) -> None: ...

    def on_generation_end(self) -> None: ...

    def on_exception(self, error: BaseException) -> None:
        self.events.append(repr(error))

    def on_step_end(self) -> Any:
        return SimpleNamespace(readings={})


class Engine:
    """An engine whose calls take a second each."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.global_steps = self.skipped_steps = 0
        self.module = nn.Linear(2, 1)
        self.output: Any = None
        self.error: Exception | None = None
        self.ends_step, self.skips = True, False
        self.norm: Any = 1.5
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.125}])

    def forward(self, batch: torch.Tensor, **inputs: Any) -> Any:
        self._run()
        return self.output

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> str:
        self._run()
        return "returned"

    def _backward_prologue(self) -> None: ...

    def _backward_epilogue(self) -> None: ...

    def step(self) -> None:
        self._run()
        self.global_steps += self.ends_step
        self.skipped_steps += self.ends_step and self.skips

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def managed_gradient_accumulation(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return False

    def get_global_grad_norm(self) -> Any:
        if isinstance(self.norm, Exception):
            raise self.norm
        return self.norm

    def _run(self) -> None:
        self.work()
        if self.error is not None:
            raise self.error


class Rank:
    """The hooks of one engine, the collector of its steps, and the queue of the watch thread."""

    def __init__(self, *, in_c: bool) -> None:
        kinds = {kind: kind if in_c else in_python(kind) for kind in TWINS}
        self.now_ns = 0
        self.timer = PhaseTimer(self._clock)
        self.fail_open, self.memory = FailOpen(), Memory()
        self.engine = Engine(self._work)
        self.recorder = kinds[CallRecorder]()
        self.recorder.connect(self.timer, None)
        self.recorder.groups.drain_coverage = lambda: 0.5
        self.written: Any = True
        folder: Any = SimpleNamespace(is_logged=True, ring=SimpleNamespace(write=self._write))
        sampler: Any = SimpleNamespace(close=lambda: None, read_devices=lambda: None)
        self.thread = kinds[WatchThread](
            analysis=SimpleNamespace(is_risky=False, has_unwritten=False),
            sampler=sampler,
            folder=folder,
            calls=self.recorder,
            fail_open=self.fail_open,
            device_phases=None,
        )
        self.phases = SimpleNamespace(end_step=lambda: SimpleNamespace(phase_ns=None))
        self.context: Any = SimpleNamespace(
            fail_open=self.fail_open,
            phase_timer=self.timer,
            call_recorder=self.recorder,
            device_phases=None,
            settings=SimpleNamespace(sampling=SamplingSettings()),
        )
        self.steps: list[RawStep] = []
        self.collector = kinds[StepCollector](
            self.context, self.engine, self.memory, self._enqueue, None
        )
        checkpoints: Any = SimpleNamespace(begin=lambda: None, end=lambda *, saved: None)
        memory: Any = self.memory
        self.hooks = kinds[EngineHooks](
            self.engine, self.timer, self.fail_open, memory, self.collector, checkpoints
        )

    def _clock(self) -> int:
        return self.now_ns

    def _work(self) -> None:
        self.now_ns += SECOND

    def _write(self, step: RawStep) -> bool:
        if self.written is None:
            raise OSError("the ring failed")
        return bool(self.written)

    def _enqueue(self, step: RawStep) -> None:
        self.steps.append(step)
        self.thread.enqueue(step)

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self.engine, name)(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            self.memory.events.append(f"raised {error!r}")

    def state(self) -> dict[str, Any]:
        thread, recorder, hooks, timer = self.thread, self.recorder, self.hooks, self.timer
        return {
            "steps": [_fields(step) for step in self.steps],
            "counts": dataclasses.asdict(hooks._counts),
            "shapes": list(hooks._shapes),
            "hooks": (hooks._loss, hooks._inside_backward, hooks._plain_backward),
            "output": hooks._output() is self.engine.output,
            "memory": (self.memory.events, self.memory.micro_batch),
            "timer": (timer.current, timer.training_thread == get_ident()),
            "phases": [timer._nanoseconds(phase) for phase in range(8)],
            "queue": (len(thread._inbox), thread._bell.qsize(), thread.num_steps),
            "dropped": (thread.dropped_steps, thread.dropped_calls),
            "recorder": (recorder._calls, recorder._num_gaps, recorder.is_sampled),
            "failures": dict(self.fail_open.failures),
        }


def _fields(step: RawStep) -> dict[str, Any]:
    found = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    del found["ended_at"]
    for name in ("memory", "device_phases", "unseen"):
        found[name] = found[name] is not None
    found["intervals"] = list(found["intervals"])
    return found | {"counts": dataclasses.asdict(step.counts)}


# Each action draws what it does, and does it with the rank.


def forward(rank: Rank, chance: random.Random) -> None:
    rank.engine.module.training = chance.random() < 0.9
    tokens = torch.zeros(chance.choice([2, 3]), 7, dtype=torch.long)
    args: Any = chance.choice([(tokens,), (tokens,), (torch.zeros(4, 2),), (torch.zeros(()),)])
    kwargs = chance.choice([{}, {}, {"labels": tokens}])
    loss = torch.tensor(0.25)
    rank.engine.output = chance.choice([loss, loss, loss, {"loss": loss}, [loss], None])
    with torch.set_grad_enabled(chance.random() < 0.9):
        rank.call("forward", *args, **kwargs)


def backward(rank: Rank, chance: random.Random) -> None:
    losses = [torch.tensor(0.5), torch.tensor(0.75, dtype=torch.float64), torch.tensor(2), 0.5, 3]
    loss = chance.choice([*losses, *losses, torch.zeros(2), None, "no loss"])
    args = chance.choice([(), (), (), (False,), (False, False)])
    kwargs = chance.choice([{}, {}, {}, {"retain_graph": True}, {"scale_wrt_gas": False}])
    rank.call("backward", loss, *args, **kwargs)


def plain_backward(rank: Rank, chance: random.Random) -> None:
    rank.call("_backward_prologue")
    rank.now_ns += SECOND
    if chance.random() < 0.8:  # else it raises, and nothing calls the engine
        rank.call("_backward_epilogue")


def step(rank: Rank, chance: random.Random) -> None:
    engine = rank.engine
    engine.ends_step, engine.skips = chance.random() < 0.8, chance.random() < 0.2
    norms = [1.5, 1.5, torch.tensor(2.5), torch.tensor(3), 2, None, math.nan]
    engine.norm = chance.choice([*norms, *norms, ValueError("no norm")])
    rates: list[Any] = [0.125, 0.125, 1, torch.tensor(0.5)]
    groups: list[Any] = [[{"lr": chance.choice(rates)}], ({"lr": 0.25},)]
    engine.optimizer = SimpleNamespace(param_groups=chance.choice(groups))
    rank.call("step")


def fail(rank: Rank, chance: random.Random) -> None:
    rank.engine.error = chance.choice([RuntimeError("out of memory"), ValueError("bad")])
    chance.choice([forward, backward, step])(rank, chance)
    rank.engine.error = None


CHANGES = (
    *("due", "due", "memory", "detail", "intervals", "thread", "device", "scale", "unseen"),
    *("profile", "ring", "queue", "capture", "calls", "risks", "loss", "span"),
)


def change(rank: Rank, chance: random.Random) -> None:
    """Make the next steps less common, or common again."""
    collector, thread, engine = rank.collector, rank.thread, rank.engine
    never, now = math.inf, 0.0
    match chance.choice(CHANGES):
        case "due":
            collector._coverage_due = chance.choice([never, never, now])
        case "memory":
            rank.memory.reading_due = chance.choice([never, never, never, now])
        case "detail":
            rank.timer.on_change = chance.choice([None, None, lambda phase: None])
        case "intervals":
            rank.timer.record_intervals()
        case "thread":
            collector._training_thread = chance.choice([get_ident(), 1])
        case "device":
            collector._device_phases = chance.choice([None, rank.phases])
        case "scale":
            collector._scales_loss = chance.choice([False, False, True])
            engine._get_optimizer_loss_scale = lambda: 1024.0  # type: ignore[attr-defined]
        case "unseen":
            collector._take_unseen = chance.choice([None, None, lambda: (None, 0.75)])
        case "profile":
            collector._profile = chance.choice([None, rank.memory.events.append])
        case "ring":
            rank.written = chance.choice([True, True, True, False])
            thread._is_logged = chance.choice([True, True, False])
        case "queue":
            for _ in range(chance.choice([WAKING_ITEMS, 0, MAX_PENDING])):
                thread._pending.append(CallBatch([]))
            thread._inbox.clear()
        case "capture":
            rank.recorder.stream_waits.dropped_in_capture += 1
        case "calls":
            rank.recorder._left_out += 1
            rank.recorder._sees_device = chance.choice([False, False, True])
        case "risks":
            rank.memory._forecasts.known_risks = {}
        case "loss":
            rank.hooks._losses_are_divided = chance.choice([False, True])
        case "span":
            span = chance.choice([None, {"trace_id": "1"}])
            collector._trace = lambda: span
            collector._modules = chance.choice([{}, {"opentelemetry.trace": None}])


def discard(rank: Rank, chance: random.Random) -> None:
    rank.hooks.discard_window()


ACTIONS = [forward, backward, step] * 6 + [change] * 4 + [plain_backward, fail, discard]


@pytest.mark.parametrize("seed", range(40))
def test_passes_and_steps_are_as_in_python(seed: int) -> None:
    ranks = Rank(in_c=True), Rank(in_c=False)
    chance = random.Random(seed)
    for number in range(150):
        action, drawn = chance.choice(ACTIONS), chance.random()
        for rank in ranks:
            action(rank, random.Random(drawn))

        in_c, python = (rank.state() for rank in ranks)
        for name, value in python.items():
            assert _text(in_c[name]) == _text(value), (number, action.__name__, name)


def _text(value: Any) -> str:
    """Describe a value; nan is the same as nan."""
    return repr(value)


@pytest.fixture
def rank() -> Rank:
    made = Rank(in_c=True)
    made.collector._coverage_due = made.memory.reading_due = math.inf
    made.collector._modules = {}
    return made


def train(rank: Rank, num_steps: int = 1) -> None:
    """Train with common steps."""
    tokens = torch.zeros(2, 7, dtype=torch.long)
    for _ in range(num_steps):
        rank.engine.output = loss = torch.tensor(0.5)
        rank.engine.forward(tokens)
        rank.engine.backward(loss)
        rank.engine.step()


def test_common_steps_do_not_run_python_code_of_the_hooks(rank: Rank) -> None:
    train(rank)  # the shape is assessed once
    called: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(RUNTIME):
            called.append(code.co_name)

    sys.setprofile(note)
    try:
        train(rank)
    finally:
        sys.setprofile(None)

    # Only what torch.compile must be able to trace.
    assert called == ["hooked"] * 3
    assert len(rank.steps) == 2


def test_neither_objects_nor_references_are_left(rank: Rank) -> None:
    kept: list[Any] = [rank.engine, rank.timer, rank.memory, rank.engine.module]

    def references() -> list[int]:
        rank.steps.clear()
        rank.thread._inbox.clear()
        gc.collect()
        return [sys.getrefcount(each) for each in kept]

    train(rank, 5)
    before, objects = references(), len(gc.get_objects())
    train(rank, 300)
    after = references()

    assert after == before
    assert len(gc.get_objects()) - objects < 50


def test_hooks_are_freed_with_their_engine() -> None:
    rank = Rank(in_c=True)
    train(rank, 3)
    freed = [weakref.ref(each) for each in (rank.hooks, rank.collector, rank.engine)]

    rank.hooks.restore()
    del rank
    gc.collect()

    assert [each() for each in freed] == [None] * 3


@pytest.mark.parametrize(
    "where", ["forward", "risks", "backward", "step", "norm", "rate", "enqueue"]
)
def test_an_interrupt_in_a_hook_reaches_the_script(rank: Rank, where: str) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    train(rank)
    match where:
        case "forward":
            rank.hooks._read_shape = interrupt
        case "risks":
            rank.memory._forecasts = Interrupting()
        case "backward":
            rank.hooks._read_loss, rank.hooks._read_value = interrupt, None
        case "step":
            rank.timer.on_interval_end = interrupt
        case "norm":
            rank.engine.get_global_grad_norm = interrupt  # type: ignore[method-assign]
        case "rate":
            rank.engine.optimizer = Interrupting()
        case "enqueue":
            rank.collector._enqueue = interrupt

    with pytest.raises(KeyboardInterrupt):
        train(rank)
    assert not rank.fail_open.failures


class Interrupting:
    num_reads = 0

    @property
    def param_groups(self) -> Any:
        raise KeyboardInterrupt

    @property
    def known_risks(self) -> Any:
        self.num_reads += 1
        if self.num_reads == 1:
            raise KeyboardInterrupt
        return {}


def test_a_failure_counts_under_its_own_name(rank: Rank) -> None:
    rank.engine.norm = ValueError("no norm")
    train(rank)
    rank.engine.optimizer = None
    train(rank, 2)
    rank.written = None
    train(rank)

    assert rank.fail_open.failures == {"gradient_norm": 1, "learning_rate": 1, "step ring": 1}
    assert [(each.gradient_norm, each.learning_rate) for each in rank.steps] == [
        (None, 0.125),
        *[(None, None)] * 3,
    ]


def test_fields_without_a_value_are_no_crash() -> None:
    arguments: list[tuple[Any, ...]] = [(), (None,), (None, None), ((), {}), ((), True)]
    arguments.append((torch.zeros(1), True))
    for kind, names in (
        (hot_path.EngineHookFields, TWINS[EngineHooks]),
        (hot_path.StepCollectorFields, TWINS[StepCollector]),
        (hot_path.RecorderFields, TWINS[CallRecorder]),
        (hot_path.InboxFields, TWINS[WatchThread]),
    ):
        for name in names:
            for args in arguments:
                with pytest.raises((AttributeError, TypeError)):
                    getattr(kind(), name)(*args)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StepCounts)])
def test_counts_without_a_value_are_no_crash(rank: Rank, name: str) -> None:
    train(rank)
    delattr(rank.hooks._counts, name)

    train(rank, 2)
    rank.thread._is_logged = False
    train(rank)


def test_modules_may_be_of_any_class(rank: Rank) -> None:
    rank.collector._modules = UserDict({OPENTELEMETRY: None})
    rank.collector._trace = lambda: {"trace_id": "1"}

    train(rank)

    assert [each.trace for each in rank.steps] == [{"trace_id": "1"}]
    assert not rank.fail_open.failures


def test_the_step_takes_an_engine_and_counts(rank: Rank) -> None:
    end: Any = rank.collector.on_step_end
    arguments = [rank.engine, StepCounts(), None]
    for args in (arguments[:0], arguments[:1], arguments):
        with pytest.raises(TypeError):
            end(*args)
