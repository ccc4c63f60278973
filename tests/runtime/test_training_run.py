"""Tests of `TrainingRun`: what it hands to its parts, in which order, and what it closes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerowatch
from zerowatch.errors import BatchError, RebuildError, ZerowatchError
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime import training_run
from zerowatch.runtime.monitor.watch import NullWatch
from zerowatch.runtime.trainer.window.step_result import StepResult
from zerowatch.runtime.training_run import TrainingRun

MICRO_BATCH = "train_micro_batch_size_per_gpu"


class Call:
    """Context of a collective call."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class Part:
    """A part of the run: it logs each call of a method, and has the given attributes."""

    def __init__(self, name: str, log: list[Any], **attributes: Any) -> None:
        self._name, self._log = name, log
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> None:
            self._log.append((f"{self._name}.{name}", *args, *([kwargs] if kwargs else [])))

        return call


class Parts:
    """The parts of a run, and what they were made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.made: dict[str, tuple[Any, ...]] = {}
        self.options: dict[str, Any] = {}
        self.failing: str | None = None
        self.watch = Part("watch", self.log, recorder=Recorder(), watches=lambda engine: True)
        self.module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        self.module[0].requires_grad_(False)
        self.engine = SimpleNamespace(watch=self.watch, module=self.module, global_steps=17)
        self.group = self.part("group", world_size=2)
        self.run_end = self.part("run_end", call=Call)
        planner = self.part("planner")
        replay = SimpleNamespace(planner=planner, on_window_abort=[])
        self.runner = self.part("runner", replay=replay, steps=3, samples=15, passes_seconds=2.5)
        self.holder = self.part("holder", engine=self.engine, config={})
        self.data, self.checkpoints = self.part("data"), self.part("checkpoints")
        self.tuner = self.part("tuner", is_on_trial=False)
        for name, part in (
            ("HostGroup", self.group),
            ("RunEnd", self.run_end),
            ("EngineHolder", self.holder),
            ("WindowRunner", self.runner),
            ("TrainingData", self.data),
            ("CheckpointManager", self.checkpoints),
            ("create_tuner_session", self.tuner),
        ):
            monkeypatch.setattr(training_run, name, self.maker(name, part))
        for name in ("prepare_engine", "warn_of_batch_statistics"):
            monkeypatch.setattr(
                training_run, name, lambda given, name=name: self.log.append((name, given))
            )
        monkeypatch.setattr(training_run, "training_run_refusal", lambda: None)
        for name in ("initialize", "initialize_unwatched"):
            monkeypatch.setattr(training_run, name, self.maker(name, (self.engine, None)))

    def part(self, name: str, **attributes: Any) -> Any:
        return Part(name, self.log, **attributes)

    def maker(self, name: str, part: Any) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            if name == self.failing:
                raise RuntimeError(name)
            self.made[name] = args
            self.options[name] = options
            return part

        return make

    def new_run(self, **options: Any) -> TrainingRun:
        config = options.pop("config", {MICRO_BATCH: 4})
        run = TrainingRun(self.module, config=config, loss=loss, **options)
        del self.log[:]
        return run

    @property
    def names(self) -> list[str]:
        """The names of the logged calls."""
        return [entry[0] for entry in self.log]


def loss(model: Any, batch: Any) -> Any:
    raise NotImplementedError


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


@pytest.fixture
def run(parts: Parts) -> TrainingRun:
    return parts.new_run()


def test_a_run_is_made_of_its_parts_with_the_arguments_of_the_caller(parts: Parts) -> None:
    optimizer, scheduler = object(), object()
    run = TrainingRun(
        parts.module,
        config={MICRO_BATCH: 4, "train_batch_size": 32},
        loss=loss,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        settings={"checkpoint": {"background": True}},
        balance=True,
        compression="bf16",
        activation_checkpointing="blocks.*",
        tuner="advise",
        numerics="reassociation",
        loss_decomposable=False,
    )

    config = {
        MICRO_BATCH: 4,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
    }
    given = parts.options["initialize"]
    assert given.pop("model_parameters") == list(parts.module[1].parameters())
    assert given == {
        "model": parts.module,
        "config": config,
        "settings": {
            "checkpoint": {"background": True},
            "tuner": {"mode": "advise", "numerics": "reassociation"},
        },
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
    }
    assert parts.made["EngineHolder"][:3] == (parts.engine, config, parts.group)
    assert parts.made["RunEnd"] == (parts.group,)
    assert parts.made["WindowRunner"][:3] == (loss, parts.holder, parts.group)
    assert parts.made["WindowRunner"][4] is parts.run_end
    assert parts.options["WindowRunner"] == {
        "micro_batch_samples": 4,
        "activation_checkpointing": "blocks.*",
    }
    assert parts.made["TrainingData"] == (parts.group, parts.holder)
    assert parts.options["TrainingData"] == {"balance": True}
    assert parts.made["CheckpointManager"] == (
        parts.holder,
        parts.runner,
        parts.data,
        parts.group,
    )
    assert parts.options["CheckpointManager"] == {"background": True}
    assert parts.made["create_tuner_session"] == (
        parts.holder,
        parts.runner,
        parts.group,
        parts.data,
    )
    assert parts.options["create_tuner_session"] == {"loss_decomposable": False}
    assert parts.log == [
        ("warn_of_batch_statistics", parts.module),
        ("prepare_engine", parts.engine),
        ("holder.checkpoint_activations", "blocks.*"),
        ("holder.compress", "bf16"),
        ("run_end.start",),
    ]
    assert parts.watch.writes_report is True
    assert run.client_state is None


def test_the_defaults_of_a_run_switch_nothing_on(parts: Parts) -> None:
    TrainingRun(parts.module, config={MICRO_BATCH: 4}, loss=loss)

    assert parts.options["CheckpointManager"] == {"background": False}
    assert parts.options["TrainingData"] == {"balance": False}
    assert parts.options["create_tuner_session"] == {"loss_decomposable": True}
    assert ("holder.checkpoint_activations", False) in parts.log
    assert ("holder.compress", None) in parts.log


def test_close_closes_the_parts_in_reverse_order_once(run: TrainingRun, parts: Parts) -> None:
    run.close()
    run.close()

    closed = ("tuner", "checkpoints", "data", "runner", "holder", "run_end", "group", "watch")
    assert parts.log == [(f"{name}.close",) for name in closed]


@pytest.mark.parametrize(
    ("failing", "closed"),
    [
        ("HostGroup", ["watch"]),
        ("RunEnd", ["group", "watch"]),
        ("WindowRunner", ["run_end", "group", "watch"]),
        ("TrainingData", ["runner", "holder", "run_end", "group", "watch"]),
        ("CheckpointManager", ["data", "runner", "holder", "run_end", "group", "watch"]),
        (
            "create_tuner_session",
            ["checkpoints", "data", "runner", "holder", "run_end", "group", "watch"],
        ),
    ],
)
def test_if_a_part_cannot_be_made_the_parts_before_it_are_closed(
    parts: Parts, failing: str, closed: list[str]
) -> None:
    parts.failing = failing

    with pytest.raises(RuntimeError, match=failing):
        TrainingRun(parts.module, config={MICRO_BATCH: 4}, loss=loss)

    assert [name for name in parts.names if name.endswith(".close")] == [
        f"{name}.close" for name in closed
    ]


def test_a_run_shows_the_state_of_its_parts(run: TrainingRun, parts: Parts) -> None:
    vars(parts.runner)["micro_batch_samples"] = 11

    assert run.engine is parts.engine
    assert run.module is parts.module
    assert run.watch is parts.watch
    assert run.config is parts.holder.config
    assert (run.steps, run.samples, run.micro_batch_samples) == (3, 15, 11)
    assert repr(run) == f"<zerowatch.TrainingRun: 3 steps, 15 samples, {parts.watch}>"


def test_a_notebook_shows_the_watch_of_the_run(run: TrainingRun, parts: Parts) -> None:
    vars(parts.watch)["_repr_html_"] = lambda: "<b>watch</b>"

    assert run._repr_html_() == "<b>watch</b>"


def result(replays: int) -> StepResult:
    return StepResult(
        step=4,
        loss=0.5,
        samples=16,
        weight=16.0,
        micro_batches=(3, 3, 2),
        replays=replays,
        skipped=False,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("stage", "replays", "seconds", "is_inside"),
    [(0, 0, 2.5, False), (1, 1, None, False), (2, 0, 2.5, True), (3, 2, None, True)],
)
def test_a_window_is_trained_measured_saved_and_judged_in_this_order(
    run: TrainingRun,
    parts: Parts,
    stage: int,
    replays: int,
    seconds: float | None,
    is_inside: bool,
) -> None:
    batch, made = object(), result(replays)
    parts.holder.config = {"zero_optimization": {"stage": stage}}
    parts.runner.train = lambda given: parts.log.append(("train", given)) or made

    assert run.train_batch(batch) is made

    measured = {
        "step": 17,
        "num_samples": 8,
        "seconds": seconds,
        "collectives_inside": is_inside,
    }
    assert parts.log == [
        ("tuner.on_window_start",),
        ("train", batch),
        ("data.on_window_end", measured),
        ("checkpoints.on_window_end",),
        ("tuner.on_window_end", made),
    ]


def test_a_batch_whose_window_fails_is_not_marked_as_used(run: TrainingRun, parts: Parts) -> None:
    def fail(batch: object) -> None:
        raise KeyboardInterrupt

    parts.runner.train = fail

    with pytest.raises(KeyboardInterrupt):
        run.train_batch(object())

    assert parts.names == ["tuner.on_window_start"]


def test_nothing_is_written_while_the_tuner_tries_a_configuration(
    run: TrainingRun, parts: Parts
) -> None:
    parts.tuner.is_on_trial = True
    parts.runner.train = lambda given: result(0)

    run.train_batch(object())

    assert parts.names == ["tuner.on_window_start", "data.on_window_end", "tuner.on_window_end"]


def test_an_evaluation_does_not_count_as_time_of_a_step(run: TrainingRun, parts: Parts) -> None:
    batch = object()
    parts.runner.evaluate = lambda given: parts.log.append(("evaluate", given)) or 0.25

    assert run.evaluate(batch) == 0.25
    assert parts.log == [("tuner.exclude_step_time",), ("evaluate", batch)]


def test_a_loader_gets_all_options_and_ends_the_trial_of_the_tuner(
    run: TrainingRun, parts: Parts
) -> None:
    dataset, made = object(), object()
    parts.data.loader = lambda *args, **options: parts.log.append((args, options)) or made

    assert run.loader(dataset, batch_samples=12, seed=3) is made
    assert parts.log == [
        ("tuner.pause_trial",),
        ((dataset,), {"batch_samples": 12, "resume": True, "seed": 3}),
        ("tuner.on_user_change",),
    ]


def test_a_new_micro_batch_size_ends_the_trial_of_the_tuner(run: TrainingRun, parts: Parts) -> None:
    run.set_micro_batch(1)

    assert parts.runner.micro_batch_samples == 1
    assert parts.log == [("tuner.pause_trial",), ("tuner.on_user_change",)]


@pytest.mark.parametrize("size", [0, -3, 2.0, "4", None, True])
def test_a_micro_batch_size_that_is_no_count_changes_nothing(
    run: TrainingRun, parts: Parts, size: Any
) -> None:
    with pytest.raises(BatchError, match="must be a whole number, 1 or more, got "):
        run.set_micro_batch(size)

    assert parts.log == []


CHANGES: list[tuple[Callable[[TrainingRun], None], tuple[Any, ...]]] = [
    (lambda run: run.compress("bf16"), ("holder.compress", "bf16", {"asynchronous": False})),
    (
        lambda run: run.compress(None, asynchronous=True),
        ("holder.compress", None, {"asynchronous": True}),
    ),
    (
        lambda run: run.checkpoint_activations("blocks.*"),
        ("holder.checkpoint_activations", "blocks.*"),
    ),
    (lambda run: run.rebuild({"fp16": {}}), ("holder.rebuild", {"fp16": {}})),
]


@pytest.mark.parametrize(("change", "call"), CHANGES)
def test_a_change_of_the_engine_ends_the_trial_and_forgets_which_sizes_fit(
    run: TrainingRun,
    parts: Parts,
    change: Callable[[TrainingRun], None],
    call: tuple[Any, ...],
) -> None:
    change(run)

    assert parts.log == [
        ("tuner.pause_trial",),
        call,
        ("planner.invalidate",),
        ("tuner.on_user_change",),
    ]


def test_a_change_that_fails_leaves_what_is_known(run: TrainingRun, parts: Parts) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no such format")

    parts.holder.compress = fail

    with pytest.raises(ValueError, match="no such format"):
        run.compress("bf16")

    assert parts.log == [("tuner.pause_trial",)]


def test_changes_that_are_no_mapping_rebuild_nothing(run: TrainingRun, parts: Parts) -> None:
    changes: Any = ["stage", 3]

    with pytest.raises(RebuildError, match=r"changes must be a mapping .* got \['stage', 3\]"):
        run.rebuild(changes)

    assert parts.log == []


def test_a_checkpoint_is_saved_outside_of_trials_with_all_options(
    run: TrainingRun, parts: Parts
) -> None:
    folder = Path("checkpoints")
    parts.checkpoints.save = lambda *args, **options: (
        parts.log.append((args, options)) or folder / "step-3"
    )

    assert run.save(folder, client_state={"n": 1}, keep=5, background=True) == folder / "step-3"
    run.save(folder)
    run.wait_for_save()

    assert parts.log == [
        ("tuner.pause_trial",),
        ((folder, {"n": 1}, 5), {"background": True}),
        ("tuner.pause_trial",),
        ((folder, None, 2), {"background": None}),
        ("checkpoints.wait",),
    ]


@pytest.mark.parametrize("folder", [3, None, b"checkpoints"])
def test_a_folder_that_is_no_path_is_named(run: TrainingRun, parts: Parts, folder: Any) -> None:
    for call in (run.save, run.load):
        with pytest.raises(
            TypeError, match=f"folder must be a path, a str or a .*Path, got {folder!r}"
        ):
            call(folder)

    assert parts.log == []


@pytest.mark.parametrize("wrong", [{"data": None}, {"data": [1]}, {"data": 0}, {"fallback": "no"}])
def test_a_choice_that_is_neither_true_nor_false_is_named(
    run: TrainingRun, parts: Parts, wrong: dict[str, Any]
) -> None:
    ((name, value),) = wrong.items()

    with pytest.raises(TypeError) as caught:
        run.load("checkpoints", **wrong)

    assert str(caught.value).startswith(name)
    assert "True or False" in str(caught.value) and repr(value) in str(caught.value)
    assert parts.log == []


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_number_of_checkpoints_to_keep_that_is_no_count_is_refused(
    run: TrainingRun, parts: Parts, keep: Any
) -> None:
    with pytest.raises(ValueError, match=f"keep must be a whole number, 1 or more, .* got {keep}"):
        run.save("checkpoints", keep=keep)

    assert parts.log == []


@pytest.mark.parametrize(
    ("state", "steps", "client_state"),
    [(SimpleNamespace(steps=42, client_state={"n": 1}), 42, {"n": 1}), (None, None, None)],
)
def test_a_loaded_checkpoint_has_its_step_and_the_callers_state(
    run: TrainingRun, parts: Parts, state: Any, steps: int | None, client_state: Any
) -> None:
    parts.checkpoints.load = lambda *args, **options: parts.log.append((args, options)) or state

    assert run.load("checkpoints", fallback=True) == steps
    assert run.client_state == client_state
    assert parts.log == [
        ("tuner.pause_trial",),
        (("checkpoints",), {"fallback": True, "data": True}),
        ("tuner.on_user_change",),
    ]


def test_a_function_to_undo_forward_passes_is_registered(run: TrainingRun, parts: Parts) -> None:
    run.on_window_abort(print)

    assert parts.runner.replay.on_window_abort == [print]


COLLECTIVES: list[Callable[[TrainingRun], object]] = [
    lambda run: run.train_batch(None),
    lambda run: run.evaluate(None),
    lambda run: run.loader(None, batch_samples=1),
    lambda run: run.compress(None),
    lambda run: run.checkpoint_activations(False),
    lambda run: run.rebuild({}),
    lambda run: run.save("folder"),
    lambda run: run.wait_for_save(),
    lambda run: run.load("folder"),
]


@pytest.mark.parametrize("call", COLLECTIVES)
def test_a_call_of_a_run_that_another_rank_has_ended_raises_that_ranks_failure(
    run: TrainingRun, parts: Parts, call: Callable[[TrainingRun], object]
) -> None:
    class Ended(Call):
        def __enter__(self) -> None:
            raise ZerowatchError("rank 1 failed")

    parts.run_end.call = Ended

    with pytest.raises(ZerowatchError, match="rank 1 failed"):
        call(run)

    assert parts.log == []


@pytest.mark.parametrize("is_open", [True, False])
def test_a_run_without_a_watch_of_its_own_has_a_null_watch_and_a_line_says_why(
    parts: Parts, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    vars(parts.watch).update(watches=lambda engine: False, is_open=is_open)

    run = parts.new_run()

    assert isinstance(run.watch, NullWatch)
    assert ("close() its TrainingRun or watch before you make" in caplog.text) is is_open


def test_a_replacement_is_built_like_the_first_engine_but_without_a_watch(parts: Parts) -> None:
    optimizer, scheduler = object(), object()
    parts.new_run(optimizer=optimizer, lr_scheduler=scheduler)
    make = parts.made["EngineHolder"][4]
    config = {MICRO_BATCH: 2, "optimizer": {"type": "Adam"}}

    assert make(parts.module, config) is parts.engine

    given = parts.options["initialize_unwatched"]
    assert given.pop("model_parameters") == list(parts.module[1].parameters())
    assert given == {
        "model": parts.module,
        "config": config,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
    }
    assert given["config"] is not config
    assert given["config"]["optimizer"] is not config["optimizer"]


def test_a_deepspeed_that_is_too_old_is_refused(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "training_run_refusal", lambda: "DeepSpeed is too old")

    with pytest.raises(zerowatch.ZerowatchError, match="DeepSpeed is too old"):
        parts.new_run()

    assert "initialize" not in parts.made
