"""Tests of the calls that the sink of W&B makes, with a fake library; W&B is an extra."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.wandb_sink import WandbSink

RUN = SinkRun(run_id="run-7", folder=None)


class UsageError(Exception):
    """Raised by a run that is finished."""


class FakeRun:
    """A run that keeps the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_finished = False

    def define_metric(self, name: str, **options: object) -> None:
        self.calls.append(("define", name, options))

    def log(self, row: dict[str, float], *, commit: bool) -> None:
        self.calls.append(("log", row, commit))
        if self.is_finished:
            raise UsageError("Run is finished")

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


class FakeWandb(ModuleType):
    """The functions of W&B that the sink uses."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: FakeRun | None = None
        self.begun = FakeRun()
        self.options: dict[str, object] = {}
        self.has_key = True
        self.prompts: list[bool] = []
        self.errors = SimpleNamespace(UsageError=UsageError)

    def init(self, **options: object) -> FakeRun:
        self.options = options
        return self.begun

    def login(self, prompt: bool = True) -> bool:
        self.prompts.append(prompt)
        return self.has_key

    def Settings(self, **options: object) -> dict[str, object]:
        return options


DEFINED = [
    ("define", "zerowatch/step", {"hidden": True}),
    ("define", "zerowatch/*", {"step_metric": "zerowatch/step"}),
]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def write_two(sink: WandbSink) -> None:
    sink.write({"zerowatch/loss": 2.5}, step=3, unix_seconds=1.0)
    sink.write({"zerowatch/loss": 1.5}, step=5, unix_seconds=2.0)


def test_the_run_of_the_script_gets_uncommitted_values_and_is_not_finished(
    wandb: FakeWandb,
) -> None:
    wandb.run = FakeRun()
    sink = WandbSink()

    sink.open(RUN)
    write_two(sink)
    sink.close(failed=True)

    assert wandb.run.calls == [
        *DEFINED,
        ("log", {"zerowatch/step": 3.0, "zerowatch/loss": 2.5}, False),
        ("log", {"zerowatch/step": 5.0, "zerowatch/loss": 1.5}, False),
    ]
    assert wandb.options == {}


def test_a_given_run_has_precedence_over_the_run_of_the_script(wandb: FakeWandb) -> None:
    wandb.run, given = FakeRun(), FakeRun()
    sink = WandbSink(given)  # type: ignore[arg-type]

    sink.open(RUN)
    sink.close(failed=False)

    assert (given.calls, wandb.run.calls) == (DEFINED, [])


def test_a_run_of_its_own_has_the_name_of_the_run_and_no_console(wandb: FakeWandb) -> None:
    WandbSink().open(RUN)

    assert wandb.options == {
        "name": "run-7",
        "config": {"zerowatch_run_id": "run-7"},
        "reinit": "create_new",
        "mode": None,
        "settings": {"console": "off", "silent": True},
    }
    assert wandb.begun.calls == DEFINED


@pytest.mark.parametrize("failed", (False, True))
def test_a_run_of_its_own_gets_committed_rows_and_ends_with_the_exit_code(
    wandb: FakeWandb, failed: bool
) -> None:
    sink = WandbSink()

    sink.open(RUN)
    write_two(sink)
    sink.close(failed=failed)

    assert wandb.begun.calls[2:] == [
        ("log", {"zerowatch/step": 3.0, "zerowatch/loss": 2.5}, True),
        ("log", {"zerowatch/step": 5.0, "zerowatch/loss": 1.5}, True),
        ("finish", int(failed)),
    ]


def test_a_run_that_the_script_has_finished_is_tried_once_and_logged_once(
    wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.run = FakeRun()
    wandb.run.is_finished = True
    sink = WandbSink()
    sink.open(RUN)

    with caplog.at_level(logging.INFO):
        write_two(sink)

    assert len(wandb.run.calls) == len(DEFINED) + 1
    (record,) = caplog.records
    assert (record.levelname, "Run is finished" in record.message) == ("INFO", True)


@pytest.mark.parametrize(
    ("mode", "has_key", "passed", "prompts", "num_warnings"),
    [
        ("", True, None, [False], 0),
        ("", False, "offline", [False], 1),
        ("online", False, None, [], 0),  # W&B reads the variable by itself
    ],
)
def test_without_a_key_the_values_are_stored_offline_and_nobody_is_asked(
    wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    has_key: bool,
    passed: str | None,
    prompts: list[bool],
    num_warnings: int,
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.has_key = has_key

    WandbSink().open(RUN)

    assert (wandb.options["mode"], wandb.prompts) == (passed, prompts)
    assert len(caplog.records) == num_warnings


def test_each_training_of_a_process_has_the_run_that_it_finds_or_one_of_its_own(
    wandb: FakeWandb,
) -> None:
    own, script = wandb.begun, FakeRun()
    script.is_finished = True
    sink = WandbSink()
    for run in (script, None, FakeRun()):
        wandb.run = run
        sink.open(RUN)
        write_two(sink)
        sink.close(failed=False)

    assert len(script.calls) == len(DEFINED) + 1
    assert [call[0] for call in own.calls] == ["define", "define", "log", "log", "finish"]
    assert wandb.run is not None
    assert [call[0] for call in wandb.run.calls] == ["define", "define", "log", "log"]


def test_a_run_that_could_not_begin_does_not_make_the_run_of_the_script_its_own(
    wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(**options: object) -> FakeRun:
        raise OSError("network is unreachable")

    sink = WandbSink()
    monkeypatch.setattr(wandb, "init", unreachable)
    with pytest.raises(OSError, match="unreachable"):
        sink.open(RUN)
    wandb.run = FakeRun()

    sink.open(RUN)
    write_two(sink)
    sink.close(failed=False)

    assert [call[2] for call in wandb.run.calls[2:]] == [False, False]
