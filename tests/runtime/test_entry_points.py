"""The entry points: what they pass to DeepSpeed, what they watch, and how a run ends."""

from __future__ import annotations

import json
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from fakes.locked_file import locked_by_another_process
from scripts.launching import SCRIPTS, plain

import zerowatch
from zerowatch.metrics.catalog import training
from zerowatch.metrics.catalog.overhead import HOOK_FAILURES
from zerowatch.metrics.file_lock import LOCK_FILE
from zerowatch.metrics.settings import Settings, load_settings
from zerowatch.runtime import entry_points
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.torch_engine import TorchEngine, torch_engine
from zerowatch.runtime.entry_points import MAX_PASSED_OVER
from zerowatch.runtime.monitor.watch import NullWatch, Watch
from zerowatch.runtime.reports.run_summary import summary_of

OFF = {"enabled": False}


def of_this_version(model: Any = None, config: Any = None) -> tuple[Any, ...]:
    return SimpleNamespace(given={"model": model, "config": config}), None, None, None


def of_a_later_version(model: Any = None, config: Any = None, plan: Any = None) -> tuple[Any, ...]:
    return SimpleNamespace(given={"model": model, "plan": plan}), None, None, None


def of_a_wrapper(**options: Any) -> tuple[Any, ...]:
    return SimpleNamespace(given=options), None, None, None


@pytest.mark.parametrize("original", [of_a_later_version, of_a_wrapper])
def test_a_parameter_that_deepspeed_has_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, original: Callable[..., Any]
) -> None:
    monkeypatch.setattr("deepspeed.initialize", original)

    engine, *_ = zerowatch.initialize(model=1, plan=2, settings=OFF)

    assert engine.given == {"model": 1, "plan": 2}


@pytest.mark.parametrize(("name", "advice"), [("plan", "'plan'"), ("setings", "mean 'settings'")])
def test_a_parameter_that_deepspeed_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.setattr("deepspeed.initialize", of_this_version)

    with pytest.raises(TypeError, match=advice) as caught:
        zerowatch.initialize(model=1, **{name: 2}, settings=OFF)

    assert "deepspeed.initialize" in str(caught.value)


def test_no_first_step_is_expected_of_an_engine_without_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    startup = SimpleNamespace(expect_no_step=lambda: calls.append(1))
    monkeypatch.setattr(entry_points, "_process", SimpleNamespace(watch=None, startup=startup))

    entry_points._watch_first(SimpleNamespace(optimizer=None), Settings())

    assert calls == [1]


class Recorded:
    """Stands in for an object of the process; keeps the calls of its methods.

    Args:
        calls: Where the calls are kept, as name and arguments.
        name: The name of the object in `calls`.
        attributes: Values that the object has.
    """

    def __init__(self, calls: list[Any], name: str, **attributes: Any) -> None:
        self._calls, self._name = calls, name
        vars(self).update(attributes)

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            self._calls.append((f"{self._name}.{method}", *args, *kwargs.items()))

        return call


class Process:
    """Stands in for the state of the process, and for the watches that are opened.

    Attributes:
        calls: What was called, in order.
        state: The state.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.state = SimpleNamespace(
            fail_open=FailOpen(),
            collectives=None,
            watch=None,
            settings=None,
            module=lambda: None,
            num_watches=0,
            is_new_training=False,
            is_model_known=False,
            watches_torch=False,
            is_opened_in_step=False,
            num_steps=0,
            known_optimizers=weakref.WeakKeyDictionary(),
            num_passed_over=0,
            num_short_runs=0,
            opened_at=0.0,
            passed_over=[],
            passed_over_hook=None,
            first_step_hook=None,
            attached_settings=None,
            startup=Recorded(self.calls, "startup"),
            open_collectives=lambda: self.calls.append("collectives are open"),
        )
        monkeypatch.setattr(entry_points, "_process", self.state)
        monkeypatch.setattr(entry_points, "_open_watch", self._open)
        monkeypatch.setattr(entry_points, "show_own_lines", lambda: None)

    def _open(self, engine: Any, settings: Settings) -> Any:
        self.calls.append(("watched", engine, settings.serve.port))
        self.state.watch = self.watch_of(engine, settings)
        return self.state.watch

    def watch_of(self, engine: Any, settings: Settings | None = None, **values: Any) -> Any:
        return Recorded(
            self.calls,
            "watch",
            **{
                "is_open": True,
                "settings": settings,
                "watches": lambda it: it is engine,
                "uncaught_error": None,
                **values,
            },
        )


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Process:
    monkeypatch.chdir(tmp_path)
    return Process(monkeypatch)


class Engine(SimpleNamespace):
    """An engine; unlike a SimpleNamespace it can be referred to weakly."""


def engine_that(trains: bool = True, **values: Any) -> Any:
    return Engine(optimizer=object() if trains else None, module=object(), **values)


def test_each_parameter_of_deepspeed_is_passed_on_under_its_own_name(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.initialize", of_a_wrapper)
    names = [
        "args",
        "model",
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
        "distributed_port",
        "mpu",
        "dist_init_required",
        "collate_fn",
        "config",
        "mesh_param",
        "config_params",
    ]
    given: dict[str, Any] = {name: number for number, name in enumerate(names, 3)}
    given["config"] = {}

    engine, *_ = zerowatch.initialize(**given, settings=OFF)
    by_position, *_ = zerowatch.initialize(*given.values(), settings=OFF)

    assert engine.given == by_position.given == given


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, {}),
        ({"distributed_port": 29500}, {}),
        ({"distributed_port": 29501}, {"distributed_port": 29501}),
        ({"dist_init_required": False}, {"dist_init_required": False}),
    ],
)
def test_a_parameter_at_its_default_is_left_to_deepspeed(
    given: dict[str, Any],
    passed: dict[str, Any],
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepspeed.initialize", of_a_wrapper)

    engine, *_ = zerowatch.initialize(**given, settings=OFF)

    assert engine.given == passed


@pytest.mark.parametrize(
    "given",
    [
        {"config": {"zerowatch": {"serve": {"port": 9511}}}},
        {"config_params": {"zerowatch": {"serve": {"port": 9511}}}},
        {"args": SimpleNamespace(deepspeed_config={"zerowatch": {"serve": {"port": 9511}}})},
        {"settings": {"serve": {"port": 9511}}},
        {
            "config": {"zerowatch": {"serve": {"port": 9511}}},
            "config_params": {"zerowatch": {"serve": {"port": 9522}}},
            "args": SimpleNamespace(deepspeed_config={"zerowatch": {"serve": {"port": 9533}}}),
        },
    ],
)
def test_settings_come_from_the_ds_config_that_deepspeed_uses(
    given: dict[str, Any], process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that()

    def make(
        args: Any = None, config: Any = None, config_params: Any = None
    ) -> tuple[Any, None, None, None]:
        process.calls.append("deepspeed.initialize")
        return engine, None, None, None

    monkeypatch.setattr("deepspeed.initialize", make)

    zerowatch.initialize(**given)

    assert process.calls == [
        "collectives are open",
        ("startup.start", ("initializing", True)),
        "deepspeed.initialize",
        ("watched", engine, 9511),
    ]
    assert engine.watch is process.state.watch


def test_disabled_monitoring_calls_deepspeed_and_nothing_else(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that()
    monkeypatch.setattr("deepspeed.initialize", lambda **_: (engine, 1, 2, 3))
    process.state.collectives = Recorded(process.calls, "collectives")

    result = zerowatch.initialize(model=1, settings=OFF)

    assert result == (engine, 1, 2, 3)
    assert isinstance(engine.watch, NullWatch)
    assert process.calls == [("collectives.close",)]


@pytest.mark.parametrize("by", ["zerowatch.initialize", "deepspeed.initialize"])
def test_an_engine_without_monitoring_leaves_the_collectives_to_the_watch_of_another(
    by: str, process: Process
) -> None:
    deepspeed: Any = SimpleNamespace(initialize=lambda config: (engine_that(), 1, 2, 3))
    entry_points.wrap_deepspeed(deepspeed)
    process.state.collectives = Recorded(process.calls, "collectives")
    process.state.watch = process.watch_of(engine_that())
    process.calls.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.initialize", deepspeed.initialize)
        initialize = zerowatch.initialize if by.startswith("zerowatch") else deepspeed.initialize
        initialize(config={"zerowatch": OFF})

    assert process.calls == []


@pytest.mark.parametrize(
    ("trains", "running", "interactive", "calls"),
    [
        (True, None, False, ["watched"]),
        (True, False, False, ["watched"]),
        (True, True, False, []),
        (True, True, True, ["watched"]),
        (False, None, False, ["startup.expect_no_step"]),
        (False, False, True, ["startup.expect_no_step"]),
        (False, True, True, []),
    ],
)
def test_the_first_engine_that_trains_is_watched_and_in_a_notebook_the_newest(
    trains: bool,
    running: bool | None,
    interactive: bool,
    calls: list[str],
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry_points, "_is_interactive", lambda: interactive)
    if running is not None:
        process.state.watch = process.watch_of(engine_that(), is_open=running)

    entry_points._watch_first(engine_that(trains), Settings())

    assert [call[0] for call in process.calls] == calls


def test_without_a_watch_the_start_is_no_longer_checked(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no port")

    monkeypatch.setattr(entry_points, "_open_watch", fail)

    with pytest.raises(OSError, match="no port"):
        entry_points._watch_first(engine_that(), Settings())

    assert process.calls == [("startup.stop",)]


@pytest.mark.parametrize("name", ["DummyOptim", "DeepSpeedZeRoOffload"])
def test_an_engine_with_a_placeholder_for_an_optimizer_does_not_train(
    name: str, process: Process
) -> None:
    engine = SimpleNamespace(optimizer=type(name, (), {})())

    entry_points._watch_first(engine, Settings())

    assert process.calls == [("startup.expect_no_step",)]


QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}}

Made = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture
def real_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a new process. What it opens is closed after the test."""
    monkeypatch.setattr(entry_points, "_process", entry_points._Process())
    yield
    entry_points.close_watch(failed=False)


def made() -> Made:
    model = torch.nn.Linear(2, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


def num_steps(watch: Watch) -> float | None:
    return watch.snapshot().value(training.STEPS)


def test_the_engine_that_replaces_one_that_no_longer_exists_has_its_own_watch(
    real_process: None,
) -> None:
    model, optimizer = made()
    first = zerowatch.watch(model, optimizer, QUIET)
    train_step(model, optimizer)
    model.itself = [model]  # type: ignore[assignment]  # like an engine, it is in a cycle
    del model, optimizer

    model, optimizer = made()
    engine = torch_engine(model, optimizer)
    entry_points._watch_first(engine, load_settings(QUIET))
    second = entry_points.current_watch()
    assert second is not None
    for _ in range(3):
        train_step(model, optimizer)
    second.close()

    assert second.watches(engine)
    assert (first.is_open, num_steps(first), num_steps(second)) == (False, 1, 3)
    assert first.snapshot().value(training.RUN_END_INFO, "completed") == 1


def test_the_failures_of_a_run_are_not_those_of_the_next_but_for_hooks_that_stay_off(
    real_process: None,
) -> None:
    first = zerowatch.watch(*made(), QUIET)
    first.fail_open.failures.update({"listener": 3, "collectives": 1})

    second = zerowatch.watch(*made(), QUIET)
    second.close()

    values = (watch.snapshot().values[HOOK_FAILURES] for watch in (first, second))
    assert [{hook: failed for (hook,), failed in each.items()} for each in values] == [
        {"watch thread": 0, "listener": 3, "collectives": 1},
        {"watch thread": 0, "collectives": 1},
    ]


def test_an_engine_of_the_watched_model_replaces_the_one_before(real_process: None) -> None:
    model, optimizer = made()
    first = zerowatch.watch(model, optimizer, QUIET)
    kept = torch_engine(model, optimizer)

    second_optimizer = torch.optim.SGD(model.parameters())
    engine = torch_engine(model, second_optimizer)
    entry_points._watch_first(engine, load_settings(QUIET))
    second = entry_points.current_watch()

    assert not first.is_open
    assert first.watches(kept)
    assert second is not None and second.watches(engine)


def test_a_training_gets_a_folder_of_its_own_though_another_run_has_taken_its_id(
    real_process: None, tmp_path: Path
) -> None:
    options = {"run_id": "night", "run_log": {"folder": tmp_path}, "serve": {"enabled": False}}
    runs = []
    with (
        locked_by_another_process(tmp_path / "night" / LOCK_FILE),
        locked_by_another_process(tmp_path / "night-2" / LOCK_FILE),
    ):
        runs.append(zerowatch.watch(*made(), options).run_id)
    for _ in range(2):
        engine = made()
        watch = zerowatch.watch(*engine, options)
        runs.append(watch.run_id)
    watch.close()
    of_other_id = zerowatch.watch(*engine, {**options, "run_id": "day"})

    # Not night-2, though it is free by now: a restart gives the first training its first folder.
    assert runs == ["night-3", "night-4", "night-5"]
    assert of_other_id.run_id == "day"


def test_a_training_that_is_watched_again_keeps_its_folder_though_its_id_is_free_by_then(
    real_process: None, tmp_path: Path
) -> None:
    options = {"run_id": "night", "run_log": {"folder": tmp_path}, "serve": {"enabled": False}}
    engine = made()
    with locked_by_another_process(tmp_path / "night" / LOCK_FILE):
        first = zerowatch.watch(*engine, options)
    first.close()
    again = zerowatch.watch(*engine, options)

    assert (first.run_id, again.run_id) == ("night-2", "night-2")


def test_an_engine_of_another_model_leaves_the_watch_of_one_that_exists(
    real_process: None,
) -> None:
    model, optimizer = made()
    first = zerowatch.watch(model, optimizer, QUIET)

    entry_points._watch_first(torch_engine(*made()), load_settings(QUIET))

    assert entry_points.current_watch() is first


class FakeEngine(TorchEngine):
    """An engine that keeps its model alive, as DeepSpeed's does."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.held = model


def fake_deepspeed() -> Any:
    """A module whose `initialize` makes an engine of a model and its optimizer, with monitoring."""

    def initialize(model: Any, optimizer: Any, config: Any = None) -> tuple[Any, ...]:
        return FakeEngine(model, optimizer), optimizer, None, None

    deepspeed: Any = SimpleNamespace(initialize=initialize)
    entry_points.wrap_deepspeed(deepspeed)
    return deepspeed


@pytest.mark.parametrize("by", ["zerowatch.initialize", "deepspeed.initialize"])
def test_each_training_of_a_loop_that_keeps_the_engine_in_one_variable_is_watched(
    by: str, real_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed, runs = fake_deepspeed(), []
    monkeypatch.setattr("deepspeed.initialize", deepspeed.initialize)
    initialize = zerowatch.initialize if by.startswith("zerowatch") else deepspeed.initialize

    for _ in range(4):
        model, optimizer = made()
        engine, *_ = initialize(model=model, optimizer=optimizer, config={"zerowatch": QUIET})
        for _ in range(3):
            train_step(model, optimizer)
        watch = entry_points.current_watch()
        assert watch is not None and watch.watches(engine)
        assert getattr(engine, "watch", watch) is watch
        runs.append(watch.run_id)

    assert len(set(runs)) == 4


def test_an_engine_beside_the_watched_one_is_logged_once_and_its_later_steps_cost_nothing(
    real_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    deepspeed, engines = fake_deepspeed(), []
    for _ in range(2):
        model, optimizer = made()
        engines.append(deepspeed.initialize(model, optimizer, {"zerowatch": QUIET})[0])
    watch = entry_points.current_watch()
    assert watch is not None
    silent = caplog.messages == []

    for _ in range(3):
        train_step(model, optimizer)

    assert silent and watch.is_open and watch.watches(engines[0])
    assert [watch.run_id in line for line in caplog.messages] == [True]
    assert entry_points._process.passed_over_hook is None


def test_an_engine_that_trains_after_the_watched_one_has_ended_is_watched_and_nothing_is_logged(
    real_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    deepspeed, trained = fake_deepspeed(), [made(), made()]
    engines = [deepspeed.initialize(*each, {"zerowatch": QUIET})[0] for each in trained]
    first = entry_points.current_watch()
    assert first is not None

    for _ in range(3):
        train_step(*trained[0])
    is_first_watched = first.watches(engines[0])
    del engines[0], trained[0]
    train_step(*trained[0])

    watch = entry_points.current_watch()
    assert is_first_watched
    assert watch is not None and watch is not first and watch.watches(engines[0])
    assert not any("another engine" in line for line in caplog.messages)
    assert entry_points._process.passed_over_hook is None


@pytest.mark.parametrize("is_next_made_first", [False, True])
def test_an_engine_that_never_trains_does_not_take_the_place_of_the_one_that_does(
    real_process: None, is_next_made_first: bool
) -> None:
    deepspeed, trained, teacher = fake_deepspeed(), made(), made()
    engine = deepspeed.initialize(*trained, {"zerowatch": QUIET})[0]
    kept = deepspeed.initialize(*teacher, {"zerowatch": QUIET})[0]
    train_step(*trained)
    if not is_next_made_first:
        del engine, trained
    trained = made()
    engine = deepspeed.initialize(*trained, {"zerowatch": QUIET})[0]
    train_step(*trained)

    watch = entry_points.current_watch()
    assert watch is not None and watch.watches(engine) and not watch.watches(kept)


def test_an_engine_to_which_nothing_refers_any_more_is_not_watched(real_process: None) -> None:
    deepspeed, trained = fake_deepspeed(), [made() for _ in range(3)]
    engines = [deepspeed.initialize(*each, {"zerowatch": QUIET})[0] for each in trained]
    engines[1].cycle = engines[1]
    del engines[:2], trained[:2]

    train_step(*trained[0])

    watch = entry_points.current_watch()
    assert watch is not None and watch.watches(engines[0])


def test_a_training_that_is_watched_again_with_the_id_of_another_one_gets_a_folder_of_its_own(
    real_process: None, tmp_path: Path
) -> None:
    options = {"run_log": {"folder": tmp_path}, "serve": {"enabled": False}}
    trainings = [made(), made()]
    runs = []
    for number, run_id in ((0, "day"), (1, "night"), (1, "day"), (1, "day")):
        watch = zerowatch.watch(*trainings[number], {**options, "run_id": run_id})
        runs.append(watch.run_id)
        watch.close()

    assert runs == ["day", "night", "day-2", "day-2"]


def test_of_several_engines_that_replace_the_watched_one_the_first_is_watched(
    real_process: None,
) -> None:
    deepspeed = fake_deepspeed()
    for _ in range(2):
        trained = [made() for _ in range(2)]
        first = deepspeed.initialize(*trained[0], {"zerowatch": QUIET})[0]
        second = deepspeed.initialize(*trained[1], {"zerowatch": QUIET})[0]
        train_step(*trained[1])
        watch = entry_points.current_watch()

        assert watch is not None and watch.watches(first) and not watch.watches(second)


def test_an_engine_that_was_released_untrained_is_not_watched_in_place_of_the_one_that_trains(
    real_process: None,
) -> None:
    deepspeed = fake_deepspeed()
    for _ in range(3):
        trained = made()
        engine = deepspeed.initialize(*trained, {"zerowatch": QUIET})[0]
        engine.itself = engine  # only the garbage collector frees it, as DeepSpeed's
    train_step(*trained)

    watch = entry_points.current_watch()
    assert watch is not None and watch.watches(engine)


def test_an_engine_that_was_passed_over_is_forgotten_at_the_end_and_by_another_watch(
    real_process: None,
) -> None:
    deepspeed = fake_deepspeed()
    (model, optimizer), (other, its_optimizer) = made(), made()
    kept = [deepspeed.initialize(model, optimizer, {"zerowatch": QUIET})[0]]
    kept.append(deepspeed.initialize(other, its_optimizer, {"zerowatch": QUIET})[0])
    asked = zerowatch.watch(model, optimizer, QUIET)
    forgotten = entry_points._process.passed_over == []
    kept.append(deepspeed.initialize(*made(), {"zerowatch": QUIET})[0])
    entry_points.close_watch(failed=False)

    assert forgotten and not asked.is_open
    assert entry_points._process.passed_over == []
    assert entry_points._process.passed_over_hook is None


def test_an_error_while_the_next_engine_is_watched_does_not_reach_the_step(
    real_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no port")

    deepspeed = fake_deepspeed()
    for _ in range(2):
        model, optimizer = made()
        engine, *_ = deepspeed.initialize(model, optimizer, {"zerowatch": QUIET})
        for _ in range(2):
            train_step(model, optimizer)
        monkeypatch.setattr(entry_points, "_open_watch", fail)

    assert ["'watch' failed" in line for line in caplog.messages] == [True]
    assert engine.global_steps == 0  # it is not watched


def engine_with(config: object) -> Any:
    return SimpleNamespace(global_steps=0, config=config)


@pytest.mark.parametrize(
    ("config", "given", "port"),
    [
        ({"zerowatch": {"serve": {"port": 9544}}}, {}, 9544),
        ("ds.json", {}, 9464),
        ({}, {"settings": {"serve": {"port": 9555}}}, 9555),
        ({}, {"optimizer": {"serve": {"port": 9566}}}, 9566),
    ],
    ids=["ds config", "path of a ds config", "keyword", "second argument"],
)
def test_an_engine_is_watched_with_the_settings_that_it_is_given(
    config: object, given: dict[str, Any], port: int, process: Process
) -> None:
    engine = engine_with(config)

    opened = zerowatch.watch(engine, **given)

    assert process.calls == [("watched", engine, port)]
    assert engine.watch is opened is process.state.watch


@pytest.mark.parametrize(
    ("settings", "is_warned_of"),
    [(None, False), ({"serve": {"port": 9401}}, True), ({"serve": {"port": 9400}}, False)],
)
def test_an_engine_that_is_watched_already_keeps_its_watch(
    settings: dict[str, Any] | None,
    is_warned_of: bool,
    process: Process,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with({})
    process.state.settings = load_settings({"serve": {"port": 9400}})
    process.state.watch = process.watch_of(engine, process.state.settings)

    watch = zerowatch.watch(engine, settings=settings)

    assert watch is process.state.watch
    assert process.calls == []
    assert ("watched already, with other settings" in caplog.text) is is_warned_of


@pytest.mark.parametrize(("is_open", "is_same"), [(False, True), (True, False)])
def test_a_closed_watch_or_another_engine_is_watched_anew(
    is_open: bool, is_same: bool, process: Process
) -> None:
    engine = engine_with({})
    process.state.watch = process.watch_of(engine if is_same else None, is_open=is_open)

    zerowatch.watch(engine)

    assert [call[0] for call in process.calls] == ["watched"]


def test_a_torch_model_is_watched_with_its_optimizer_or_a_wrapper_of_it(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())

    accelerated = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    accelerated.optimizer = optimizer
    wrappers = (SimpleNamespace(optimizer=optimizer), accelerated)
    for given in (optimizer, *wrappers, SimpleNamespace(optimizer=accelerated)):
        process.state.watch = None
        zerowatch.watch(model, given)  # type: ignore[arg-type]

    assert [engine.optimizer for _, engine, _ in process.calls] == [optimizer] * 4
    assert [engine.model for _, engine, _ in process.calls] == [model] * 4
    assert not hasattr(model, "watch")
    assert caplog.messages == []


def test_an_optimizer_of_another_model_is_warned_of(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)

    zerowatch.watch(model, torch.optim.SGD(other.parameters()))

    assert "has no parameter of the watched model" in caplog.text


@pytest.mark.parametrize(
    ("engine", "optimizer", "message"),
    [
        (3, None, "takes a DeepSpeed engine, or a torch model and its optimizer, got int;"),
        (torch.nn.Linear(1, 1), None, "is a torch.optim.Optimizer, got NoneType;"),
        (torch.nn.Linear(1, 1), SimpleNamespace(optimizer=3), "Optimizer, got SimpleNamespace;"),
    ],
)
def test_what_cannot_be_watched_is_named(
    engine: Any, optimizer: Any, message: str, process: Process
) -> None:
    with pytest.raises(TypeError, match=message):
        zerowatch.watch(engine, optimizer)

    assert process.calls == []


@pytest.mark.parametrize(
    ("error", "failed", "closed"),
    [
        (None, False, (False, False)),
        (ValueError(), True, (True, False)),
        (KeyboardInterrupt(), True, (False, True)),
        (KeyboardInterrupt(), False, (False, False)),
    ],
)
def test_a_run_ends_as_failed_or_as_interrupted(
    error: BaseException | None,
    failed: bool,
    closed: tuple[bool, bool],
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = process.calls
    waits = Recorded(calls, "calls")
    process.state.collectives = Recorded(calls, "collectives", call_recorder=waits)
    process.state.watch = process.watch_of(None, uncaught_error=error)
    process.state.first_step_hook = Recorded(calls, "hook")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)  # an earlier cell's

    entry_points.close_watch(failed=failed)

    assert calls == [
        ("startup.stop",),
        ("hook.remove",),
        ("watch.close", ("failed", closed[0]), ("interrupted", closed[1]), ("at_exit", True)),
        ("collectives.close",),
        ("calls.wait_for_completion", 60.0),
    ]
    assert process.state.is_model_known


def test_a_close_at_exit_that_ctrl_c_has_ended_goes_on_as_interrupted(process: Process) -> None:
    interrupted: list[bool] = []

    def close(**options: bool) -> None:
        interrupted.append(options["interrupted"])
        if len(interrupted) == 1:
            raise KeyboardInterrupt

    process.state.watch = process.watch_of(None, close=close)

    with pytest.raises(KeyboardInterrupt):
        entry_points.close_watch(failed=False)

    assert interrupted == [False, True]


def test_a_process_without_a_watch_closes_without_one(process: Process) -> None:
    entry_points.close_watch(failed=False)

    assert process.calls == [("startup.stop",)]
    assert not process.state.is_model_known


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_process_that_ends_by_an_exception_closes_as_failed(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []
    monkeypatch.setattr(entry_points, "close_watch", lambda *, failed: ends.append(failed))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if has_failed:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)

    entry_points._close_at_exit()

    assert ends == [has_failed]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("model, optimizer = opened()\nsys.exit(1)", "exception"),
        (
            "model, optimizer = opened()\ntry: sys.exit(1)\nexcept SystemExit: train()",
            "completed",
        ),
        ("main()", "exception"),
        ("main_that_goes_on()", "completed"),
    ],
)
def test_a_script_that_exits_with_an_error_status_has_failed(
    tmp_path: Path, end: str, status: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"{EXITING_JOB}\n{end}\n")

    plain(script, tmp_path / "runs")

    [folder] = (tmp_path / "runs").iterdir()
    assert summary_of(folder).status == status


@pytest.mark.parametrize("last_cell_failed", [False, True])
def test_a_notebook_ends_as_failed_only_if_its_last_cell_raised(
    last_cell_failed: bool, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython sets last_value after each cell that raised."""
    ends: list[bool] = []
    monkeypatch.setattr(entry_points, "close_watch", lambda *, failed: ends.append(failed))
    monkeypatch.setattr(sys, "last_value", NameError("prnt"), raising=False)
    process.state.watch = process.watch_of(None, last_cell_failed=last_cell_failed)

    entry_points._close_at_exit()

    assert ends == [last_cell_failed]


EXITING_JOB = """
import sys, torch, zerowatch
def opened():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"serve": {"enabled": False}, "run_log": {"folder": sys.argv[1]}}
    zerowatch.watch(model, optimizer, settings)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer
def train():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
def main():
    own = opened()
    sys.exit(1)
def main_that_goes_on():
    global model, optimizer
    model, optimizer = opened()
    try: sys.exit(1)
    except SystemExit: train()
    del model, optimizer
"""


def in_child(ends: Any, end: Callable[[], object]) -> None:
    def close_watch(*, failed: bool) -> None:
        ends.put((failed, type(sys.exception()).__name__))

    entry_points.close_watch = close_watch
    process = entry_points._process = entry_points._Process()
    process.open_collectives()
    process.open_collectives()
    end()


def leave_after_an_error() -> None:
    """Ends as a process of torch.multiprocessing.start_processes does after an error."""
    try:
        raise ValueError("no good")
    except ValueError:
        sys.exit(1)


class SIGTERMException(SystemExit):
    """As Lightning's, which it raises in its loop after SIGTERM."""


def end_after_sigterm() -> None:
    raise SIGTERMException


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (int, (False, "NoneType")),
        (end_after_sigterm, (True, "SIGTERMException")),
        (sys.exit, (False, "SystemExit")),
        (partial(sys.exit, 1), (True, "SystemExit")),
        (partial(int, "no number"), (True, "ValueError")),
        (leave_after_an_error, (True, "ValueError")),
    ],
    ids=["return", "sigterm", "exit", "exit with an error", "error", "exit after an error"],
)
def test_a_child_of_multiprocessing_closes_once_at_its_end(
    end: Callable[[], object], expected: tuple[bool, str]
) -> None:
    context = multiprocessing.get_context("fork")
    ends = context.SimpleQueue()
    child = context.Process(target=in_child, args=(ends, end), daemon=True)

    child.start()
    child.join(60)
    found = [] if ends.empty() else [ends.get()]

    assert found == [expected]
    assert ends.empty()


def test_a_forked_child_drops_the_watch_and_the_collectives(process: Process) -> None:
    entry_points._close_after_fork()
    process.state.watch = process.watch_of(None)
    process.state.collectives = Recorded(process.calls, "collectives")

    entry_points._close_after_fork()

    assert process.calls == [("watch.close_after_fork",), ("collectives.close",)]


def test_forked_children_leave_the_run_of_their_parent_and_close_their_own(tmp_path: Path) -> None:
    done = plain(SCRIPTS / "monitor/fork_children.py", tmp_path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"targets": True, "is_open": True}
    ends = {folder.name: summary_of(folder).status for folder in tmp_path.iterdir()}
    names = ("before", "during", "during-mp", "grandchild", "parent", "handler")
    assert ends == dict.fromkeys(names, "completed")
    assert not list(tmp_path.glob("*/*.alive.json"))


def test_only_an_open_watch_is_the_current_one(process: Process) -> None:
    none = entry_points.current_watch()
    process.state.watch = process.watch_of(None)
    current = entry_points.current_watch()
    process.state.watch.is_open = False

    assert (none, entry_points.current_watch()) == (None, None)
    assert current is process.state.watch


@pytest.mark.parametrize(
    ("values", "has_stepped"),
    [
        (None, False),
        ({"is_open": True, "has_stepped": False}, False),
        ({"is_open": True, "has_stepped": True}, True),
        ({"is_open": False, "has_stepped": False}, True),
    ],
)
def test_a_process_has_stepped_if_its_watch_has_seen_a_step_or_is_closed(
    values: dict[str, Any] | None, has_stepped: bool
) -> None:
    state = entry_points._Process()
    if values is not None:
        watch: Any = SimpleNamespace(**values, forward_only_ns=11)
        state.watch = watch

    assert state.has_stepped() is has_stepped
    assert state.forward_only_ns() == (0 if values is None else 11)


def test_an_engine_of_a_script_by_run_is_watched_and_the_collectives_are_not_opened_before(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_that()

    def initialize(model: Any, config: Any = None) -> tuple[Any, ...]:
        process.calls.append(("deepspeed.initialize", model))
        return engine, 1, 2, 3

    deepspeed: Any = SimpleNamespace(initialize=initialize)
    entry_points.wrap_deepspeed(deepspeed)
    process.state.attached_settings = {"serve": {"port": 9577}}

    result = deepspeed.initialize(5, config={})

    assert result == (engine, 1, 2, 3)
    assert process.state.is_model_known
    assert process.calls == [
        ("startup.start",),
        ("startup.start", ("initializing", True)),
        ("deepspeed.initialize", 5),
        ("watched", engine, 9577),
    ]
    assert deepspeed.initialize.zerowatch_original is initialize
    assert deepspeed.initialize.__name__ == "initialize"


def test_a_script_whose_ds_config_switches_monitoring_off_is_left_alone(process: Process) -> None:
    engine = engine_that()
    deepspeed: Any = SimpleNamespace(initialize=lambda config: (engine,))
    entry_points.wrap_deepspeed(deepspeed)
    process.calls.clear()

    deepspeed.initialize({"zerowatch": {"enabled": False}})

    assert process.calls == []


def test_the_model_of_the_first_optimizer_that_steps_is_watched_once(process: Process) -> None:
    entry_points.instrument_torch()
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())

    try:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        process.state.first_step_hook.remove()

    opened, (_, engine, _) = process.calls
    assert opened == "collectives are open"
    assert (engine.model, engine.optimizer) == (model, optimizer)


def test_a_model_is_found_after_optimizers_of_tensors_without_one(process: Process) -> None:
    tensor = torch.ones(2, requires_grad=True)
    model, optimizer = made()
    entry_points.instrument_torch()

    try:
        own = torch.optim.SGD([tensor])
        for _ in range(2 * MAX_PASSED_OVER):
            own.step()
        for _ in range(2):
            train_step(model, optimizer)
    finally:
        process.state.first_step_hook.remove()

    assert [engine.model for _, engine, _ in process.calls[1:]] == [model]


def test_the_search_for_a_model_ends_after_ten_optimizers_with_one_warning(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.ones(2, requires_grad=True)

    for _ in range(MAX_PASSED_OVER - 1):
        entry_points._watch_torch_model(torch.optim.SGD([tensor]))
    silent = caplog.messages == [] and not process.state.is_model_known
    entry_points._watch_torch_model(torch.optim.SGD([tensor]))
    ended = process.state.is_model_known
    entry_points.expect_training()

    assert silent and ended
    assert ["zerowatch.watch(" in line for line in caplog.messages] == [True]
    assert process.calls == []
    assert not process.state.is_model_known


def test_an_optimizer_that_steps_beside_a_watched_engine_is_not_watched(process: Process) -> None:
    model = torch.nn.Linear(2, 3)
    process.state.watch = process.watch_of(engine_that())

    entry_points._watch_torch_model(torch.optim.SGD(model.parameters()))

    assert process.calls == []


@pytest.mark.parametrize(
    ("is_gone", "interactive", "is_watched"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_a_training_that_is_expected_is_watched_if_the_engine_is_gone_and_in_a_notebook(
    is_gone: bool,
    interactive: bool,
    is_watched: bool,
    process: Process,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry_points, "_is_interactive", lambda: interactive)
    model, optimizer = made()
    entry_points.instrument_torch()
    process.state.is_model_known = True
    process.state.watch = process.watch_of(None if is_gone else engine_that())
    process.calls.clear()

    try:
        train_step(model, optimizer)
        before = list(process.calls)
        entry_points.expect_training()
        train_step(model, optimizer)
    finally:
        process.state.first_step_hook.remove()

    assert before == []
    assert [call[0] for call in process.calls] == ["watched"] * is_watched


def test_a_model_that_is_watched_keeps_its_watch_in_a_notebook_too(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_points, "_is_interactive", lambda: True)
    model, optimizer = made()
    process.state.watch = process.watch_of(torch_engine(model, optimizer))

    entry_points._watch_torch_model(optimizer)

    assert process.calls == []


@pytest.mark.parametrize("name", ["DeepSpeedEngine", "ModelThatCountsSteps"])
def test_a_deepspeed_engine_that_goes_on_after_its_watch_is_not_watched_as_a_model(
    process: Process, name: str
) -> None:
    model, optimizer = made()
    model.global_steps = 7  # type: ignore[assignment]
    model.__class__ = type("Another", (type(name, (type(model),), {}),), {})
    process.state.watch = process.watch_of(model, is_open=False)

    entry_points._watch_torch_model(optimizer)

    assert (process.calls == []) == (name == "DeepSpeedEngine")


def test_disabled_monitoring_does_not_instrument_torch(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROWATCH_ENABLED", "false")
    deepspeed: Any = SimpleNamespace(initialize=lambda: None)

    entry_points.instrument_torch()
    entry_points.wrap_deepspeed(deepspeed)

    assert process.calls == []
    assert process.state.first_step_hook is None


def test_detaching_forgets_the_settings_and_removes_the_hook_of_the_first_step(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.initialize", of_this_version)
    settings = {"serve": {"port": 9588}}

    detach = entry_points.attach(settings)
    process.state.first_step_hook.remove()
    process.state.first_step_hook = Recorded(process.calls, "hook")
    process.calls.clear()
    attached = process.state.attached_settings
    detach()

    assert attached is settings
    assert process.state.attached_settings is None
    assert process.calls == [("hook.remove",)]


@pytest.mark.parametrize(("name", "is_notebook"), [("ps1", True), ("other", False)])
def test_a_prompt_shows_that_python_is_interactive(
    name: str, is_notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, name, ">", raising=False)

    assert entry_points._is_interactive() is is_notebook


def test_the_watch_closes_before_the_trackers_that_are_open_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(entry_points, "atexit", Recorded(calls, "atexit"))

    entry_points._close_at_exit_before_trackers()

    close = entry_points._close_at_exit
    assert calls == [("atexit.unregister", close), ("atexit.register", close)]
