"""Tests of a watch over parts that write down their calls: what ends in which order, and how."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.scraper import eventually
from fakes.steps import step
from fakes.watch_contexts import PlainEngine

from zerowatch.errors import PeerFailedError
from zerowatch.metrics.catalog import devices, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.common.exit_notes import error_note
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.oom.oom_error import is_caused_by_oom
from zerowatch.runtime.monitor import watch as watch_module
from zerowatch.runtime.monitor.watch import EngineRef, NullWatch, ServedAt, Watch


class Part:
    """A part of a watch: each call is written into the list that all parts share."""

    def __init__(self, name: str, calls: list[Any], **attributes: Any) -> None:
        self._name, self._calls = name, calls
        self.__dict__.update(attributes)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *(f"{name}={value}" for name, value in kwargs.items())]
            self._calls.append((f"{self._name}.{method}", *given))
            return f"result of {self._name}.{method}"

        return call


class Job:
    """A watch of an engine. `calls` has the calls of its parts since the watch was made."""

    def __init__(
        self,
        folder: Path | None = None,
        rank: int = 0,
        is_abandoned: bool = False,
        **parts: Any,
    ) -> None:
        self.calls: list[Any] = []
        self.engine, self.recorder = PlainEngine(), Recorder()
        self.recorder.set(training.RUN_ACTIVE, 1)
        self.listeners: list[Callable[..., object]] = []
        made: dict[str, Any] = {
            name: Part(name, self.calls)
            for name in (
                *("server", "metrics_log", "run_info", "subscriptions", "sinks"),
                *("overhead", "comparison", "otel", "advisor", "exit_calls"),
            )
        }
        made["memory"] = Part("memory", self.calls, is_caused_by_oom=is_caused_by_oom)
        made["folder"] = Part("folder", self.calls, path=folder, rank=rank, run_id="night-7")
        made["thread"] = Part(
            "thread", self.calls, is_abandoned=is_abandoned, is_complete=not is_abandoned
        )
        made["instrumentation"] = Part(
            "instrumentation",
            self.calls,
            forward_only_ns=3,
            generated_ns=5,
            checkpoints=Part("checkpoints", self.calls, failed_lately=lambda: False),
        )
        made["collectives"] = Part(
            "collectives", self.calls, call_recorder=SimpleNamespace(drain=lambda: "last calls")
        )
        self.watch = Watch(
            engine=EngineRef(self.engine),
            settings=load_settings({}),
            recorder=self.recorder,
            fail_open=FailOpen(),
            served_at=ServedAt("here:9464", "http://here:9464/"),
            listeners=self.listeners,
            **(made | parts),
        )

    def value(self, spec: Any, *labels: str) -> float | None:
        return self.recorder.snapshot().value(spec, *labels)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture(autouse=True)
def no_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    reports: list[Any] = []

    def announce(folder: Path, *, is_ours: bool, console: str) -> None:
        reports.append((folder, is_ours, console))

    monkeypatch.setattr(watch_module, "announce_report", announce)
    return reports


HOOKS = [
    ("instrumentation.restore",),
    ("memory.close_hooks",),
    ("comparison.close_hooks",),
    ("collectives.close",),
    ("exit_calls.close",),
]


# At exit, once the server has closed.
LAST_EXPORT = [("otel.wait_for_end",), ("otel.give_up",)]


def test_a_run_that_ends_in_good_order_closes_its_parts_in_the_order_of_the_data() -> None:
    job = Job()

    job.watch.close()

    withdraw = job.watch._withdraw_targets
    assert job.calls == [
        *HOOKS,
        ("thread.enqueue_rest", "last calls"),
        ("thread.stop", "waits_for_device=True"),
        ("subscriptions.close",),
        ("sinks.close", "failed=False", "interrupted=False"),
        ("comparison.stop",),
        ("memory.close",),
        ("overhead.publish",),
        ("metrics_log.close",),
        ("folder.close", "is_complete=True"),
        ("otel.close",),
        ("overhead.publish",),
        ("server.close_after_final_scrape", withdraw),
    ]
    assert job.value(training.RUN_ACTIVE) == 0
    assert job.value(training.RUN_END_INFO, "completed") == 1
    assert not job.watch.is_open


def test_a_run_that_fails_reports_its_error_first_and_remains_active() -> None:
    job, error = Job(), ValueError("shapes differ")

    try:
        raise error
    except ValueError:
        job.watch.close()

    assert job.calls[:8] == [
        ("advisor.disable",),
        ("memory.on_run_error", error),
        ("otel.trace_run_error", error),
        *HOOKS,
    ]
    assert ("thread.stop", "waits_for_device=False") in job.calls
    assert ("sinks.close", "failed=True", "interrupted=False") in job.calls
    assert job.calls[-1] == ("server.close",)
    assert job.value(training.RUN_ACTIVE) == 1
    assert job.value(training.RUN_END_INFO, "exception") == 1


def test_a_run_that_is_said_to_fail_uses_the_last_error_of_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, error = Job(), MemoryError()
    monkeypatch.setattr(sys, "last_value", error, raising=False)

    job.watch.close(failed=True)

    assert ("memory.on_run_error", error) in job.calls
    assert job.value(training.RUN_END_INFO, "out_of_memory") == 1


def test_the_error_of_a_cell_before_the_run_is_not_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", MemoryError(), raising=False)
    job = Job()

    job.watch.close(failed=True)

    assert job.watch.uncaught_error is None
    assert ("memory.on_run_error", None) in job.calls
    assert job.value(training.RUN_END_INFO, "exception") == 1


@pytest.mark.parametrize("outer", [MemoryError(), KeyboardInterrupt()])
def test_a_run_within_the_handler_of_an_earlier_error_ends_in_good_order(
    outer: BaseException,
) -> None:
    try:
        raise outer
    except BaseException:
        job = Job()
        job.watch.close()

    assert "memory.on_run_error" not in job.names()
    assert ("sinks.close", "failed=False", "interrupted=False") in job.calls
    assert job.value(training.RUN_ACTIVE) == 0
    assert job.value(training.RUN_END_INFO, "completed") == 1


def test_a_run_within_a_handler_fails_by_an_error_of_its_own() -> None:
    try:
        raise MemoryError
    except MemoryError:
        job, error = Job(), ValueError("shapes differ")
        try:
            raise error
        except ValueError:
            job.watch.close()

    assert ("memory.on_run_error", error) in job.calls
    assert job.value(training.RUN_END_INFO, "exception") == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("shapes\ndiffer"), "failed with ValueError: shapes differ"),
        (
            PeerFailedError(1, "KeyError", "'x'", "train_batch", (1,)),
            "ended after rank 1 had failed in train_batch with KeyError: 'x'",
        ),
        (MemoryError(), None),
        (RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"), None),
    ],
)
def test_a_run_that_fails_notes_its_own_error_and_the_rank_whose_error_it_got(
    tmp_path: Path, error: Exception, text: str | None
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    job = Job(folder, rank=3)

    try:
        raise error
    except type(error):
        job.watch.close()

    notes = list(folder.glob(f"exits/rank-3-{os.getpid()}-*-error.note.json"))
    assert [json.loads(path.read_text())["text"] for path in notes] == ([text] if text else [])
    assert all(path.stat().st_mode & 0o077 == 0 for path in notes)
    assert error_note([folder], 3, os.getpid(), 0.0) == text
    assert error_note([folder], 3, os.getpid(), time.time() + 60) is None


def test_ctrl_c_is_no_failure() -> None:
    job = Job()

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        job.watch.close(failed=True, at_exit=True)

    assert "advisor.disable" not in job.names()
    assert ("sinks.close", "failed=False", "interrupted=True") in job.calls
    assert job.calls[-5:] == [
        ("server.wait_for_final_scrape", "interrupted=True"),
        ("folder.withdraw_targets",),
        ("server.close",),
        *LAST_EXPORT,
    ]
    assert job.value(training.RUN_ACTIVE) == 0
    assert job.value(training.RUN_END_INFO, "interrupted") == 1


def test_at_exit_the_process_waits_for_the_last_scrape() -> None:
    job = Job()
    job.watch.close()
    job.calls.clear()

    job.watch.close(at_exit=True)

    assert job.calls == [
        ("server.wait_for_final_scrape", "interrupted=False"),
        ("folder.withdraw_targets",),
        ("server.close",),
        *LAST_EXPORT,
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_that_ends_in_good_order_first_calls_what_waits_for_it(failed: bool) -> None:
    job = Job()
    job.watch.on_good_end.append(lambda: job.calls.append(("good end",)))

    for _ in range(2):
        job.watch.close(failed=failed)

    assert job.names().count("good end") == (not failed)
    assert (job.names()[0] == "good end") is not failed


def test_a_close_after_a_failure_does_not_wait() -> None:
    job = Job()
    job.watch.close(failed=True)
    job.calls.clear()

    job.watch.close(at_exit=True)

    assert job.calls == [("server.close",), *LAST_EXPORT]


def test_a_failure_by_a_fault_of_the_gpu_is_served_until_the_next_scrape() -> None:
    job = Job()
    job.recorder.set(devices.DEVICE_XID_ERRORS, 1, "cuda:0", "79")

    job.watch.close(failed=True)
    eventually(lambda: job.calls[-1] == ("server.close",))
    in_background = job.calls[-2:]
    job.calls.clear()
    job.watch.close(at_exit=True)

    assert in_background == [("server.wait_for_next_scrape",), ("server.close",)]
    assert job.calls == [*in_background, *LAST_EXPORT]
    assert job.value(training.RUN_ACTIVE) == 1


def test_a_failure_in_saving_a_checkpoint_is_served_until_the_next_scrape() -> None:
    job = Job()
    job.watch._instrumentation.checkpoints.failed_lately = lambda: True  # type: ignore[method-assign]

    job.watch.close(failed=True, at_exit=True)

    read = [("server.wait_for_next_scrape",), ("server.close",)]
    assert job.calls[-4:] == [*read, *LAST_EXPORT]
    assert job.value(training.RUN_ACTIVE) == 1


def test_the_targets_are_withdrawn_if_ctrl_c_ends_the_wait() -> None:
    job = Job()

    def interrupt(*, interrupted: bool) -> None:
        raise KeyboardInterrupt

    job.watch._server.wait_for_final_scrape = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.watch.close(at_exit=True)

    assert job.names()[-3:] == ["folder.withdraw_targets", "server.close", "otel.give_up"]


def test_the_metrics_log_and_the_ring_of_a_thread_that_did_not_end_stay() -> None:
    job = Job(is_abandoned=True)

    job.watch.close()

    assert "metrics_log.close" not in job.names()
    assert ("folder.close", "is_complete=False") in job.calls


def test_the_ring_of_a_thread_that_has_not_written_all_steps_stays() -> None:
    job = Job()
    job.watch._thread.is_complete = False  # type: ignore[misc]

    job.watch.close()

    assert "metrics_log.close" in job.names()
    assert ("folder.close", "is_complete=False") in job.calls


def test_a_change_of_memory_use_restarts_the_forecasts_and_the_peaks_of_the_next_sample() -> None:
    calls: list[Any] = []
    forecasts, hooks = Part("forecasts", calls), Part("hooks", calls)
    memory = Part("memory", [], analysis=SimpleNamespace(forecasts=forecasts), hooks=hooks)
    watch = Job(memory=memory).watch

    watch.restart_forecasts(after_step=3, use="smaller")

    assert calls == [
        ("forecasts.restart", "after_step=3", "use=smaller"),
        ("hooks.on_use_changed",),
    ]


def test_a_part_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    job = Job()

    def fail() -> None:
        raise OSError("broken")

    job.watch._thread.stop = fail  # type: ignore[method-assign]
    job.watch._memory.close_hooks = fail  # type: ignore[method-assign]

    job.watch.close()

    assert job.watch.fail_open.failures == {"close": 2}
    assert {"collectives.close", "memory.close", "otel.close"} <= set(job.names())


def interrupt_once(part: Any, method: str) -> None:
    """Let Ctrl-C end the first call of a method, as if the user had waited for it too long."""
    original, calls = getattr(part, method), []

    def interrupted(**keywords: Any) -> object:
        calls.append(method)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(**keywords)

    setattr(part, method, interrupted)


@pytest.mark.parametrize(
    ("part", "method"),
    [
        *(("instrumentation", "restore"), ("thread", "stop"), ("subscriptions", "close")),
        *(("sinks", "close"), ("memory", "close"), ("folder", "close"), ("otel", "close")),
    ],
)
@pytest.mark.parametrize("at_exit", [False, True])
def test_a_close_that_ctrl_c_has_ended_goes_on_at_the_next_call(
    tmp_path: Path, announced: list[Any], part: str, method: str, at_exit: bool
) -> None:
    whole, job = Job(folder=tmp_path), Job(folder=tmp_path)
    whole.watch.close()
    interrupt_once(getattr(job.watch, f"_{part}"), method)

    with pytest.raises(KeyboardInterrupt):
        job.watch.close()
    job.watch.close(at_exit=at_exit)

    assert job.names()[: len(whole.calls) - 1] == whole.names()[:-1]
    assert job.value(training.RUN_ACTIVE) == 0
    assert not job.watch.is_open
    reason = "completed" if part in ("folder", "otel") else "interrupted"
    assert job.value(training.RUN_END_INFO, reason) == 1
    assert [is_ours for _, is_ours, _ in announced] == [False, False]
    if at_exit:
        assert ("server.wait_for_final_scrape", "interrupted=True") in job.calls


def test_a_failed_run_whose_close_ctrl_c_has_ended_stays_a_failed_one() -> None:
    job = Job()
    interrupt_once(job.watch._thread, "stop")

    with pytest.raises(KeyboardInterrupt):
        job.watch.close(failed=True)
    job.watch.close(interrupted=True, at_exit=True)

    assert job.names().count("advisor.disable") == 1
    assert ("sinks.close", "failed=True", "interrupted=False") in job.calls
    assert job.value(training.RUN_ACTIVE) == 1
    assert job.value(training.RUN_END_INFO, "exception") == 1
    assert job.calls[-3:] == [("server.close",), *LAST_EXPORT]


def test_a_call_of_close_within_another_leaves_the_parts_to_it() -> None:
    """Such as by a signal handler of the script, or on the thread of a listener."""
    whole, job = Job(), Job()
    whole.watch.close()
    job.watch._thread.stop = job.watch.close  # type: ignore[method-assign]

    job.watch.close()

    once = [name for name in whole.names() if name != "thread.stop"]
    assert [name for name in job.names() if not name.startswith("server.")] == once[:-1]


@pytest.mark.parametrize(
    ("writes_report", "failed", "is_ours"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_the_report_of_a_run_is_ours_if_it_ends_in_good_order(
    tmp_path: Path, announced: list[Any], writes_report: bool, failed: bool, is_ours: bool
) -> None:
    job = Job(folder=tmp_path)
    job.watch.writes_report = writes_report

    job.watch.close(failed=failed)

    assert announced == [(tmp_path, is_ours, job.watch.settings.console)]


def test_an_interrupted_run_does_not_write_its_report(tmp_path: Path, announced: list[Any]) -> None:
    job = Job(folder=tmp_path)
    job.watch.writes_report = True

    job.watch.close(interrupted=True)

    assert [is_ours for _, is_ours, _ in announced] == [False]


@pytest.mark.parametrize(("rank", "has_folder"), [(1, True), (0, False)])
def test_another_rank_and_a_run_without_a_folder_announce_no_report(
    tmp_path: Path, announced: list[Any], rank: int, has_folder: bool
) -> None:
    Job(folder=tmp_path if has_folder else None, rank=rank).watch.close()

    assert announced == []


def test_a_forked_child_closes_the_sockets_and_hooks_and_can_still_log_values() -> None:
    job = Job()

    job.watch.close_after_fork()
    job.watch.close()
    job.watch.close(failed=True)
    job.watch.close(at_exit=True)

    assert job.calls == [
        ("server.close",),
        ("comparison.forget_hooks",),
        ("otel.close_after_fork",),
        ("sinks.continue_after_fork",),
        *HOOKS,
    ]
    assert not job.watch.is_open


def test_another_engine_is_watched_by_all_parts() -> None:
    job, engine = Job(), PlainEngine()

    job.watch.rebind_engine(engine)

    assert engine.watch is job.watch
    assert (job.watch.watches(engine), job.watch.watches(job.engine)) == (True, False)
    assert job.calls == [
        ("instrumentation.rebind_engine", engine),
        ("memory.rebind_engine", engine),
        ("comparison.rebind_engine", engine),
        ("run_info.rebind_engine",),
    ]


def test_a_closed_watch_follows_the_engine_and_stays_closed() -> None:
    job, engine = Job(), PlainEngine()
    job.watch.close()
    job.calls.clear()

    job.watch.rebind_engine(engine)

    assert (job.watch.watches(engine), job.calls) == (True, [])


def test_a_watch_keeps_no_engine_alive() -> None:
    engine = PlainEngine()
    reference = EngineRef(engine)

    del engine
    gc.collect()

    assert reference() is None


def test_the_public_calls_of_a_watch_go_to_the_part_that_does_the_work() -> None:
    job = Job()
    watch = job.watch

    assert watch.memory_limit_bytes("cpu") == "result of memory.limit_bytes"
    assert watch.checkpoint_phase() == "result of instrumentation.checkpoint_phase"
    assert watch.copying_checkpoint() == "result of checkpoints.copying"
    watch.on_checkpoint_written(saved=False, seconds=3.0, began_at=5.0)
    watch.discard_window()
    watch.log_values({"accuracy": 0.5}, 7)
    assert job.calls == [
        ("memory.limit_bytes", "cpu"),
        ("instrumentation.checkpoint_phase",),
        ("checkpoints.copying",),
        ("checkpoints.written", "saved=False", "seconds=3.0", "began_at=5.0"),
        ("instrumentation.discard_window",),
        ("sinks.log_values", {"accuracy": 0.5}, 7),
    ]
    assert (watch.forward_only_ns, watch.generated_ns) == (3, 5)
    assert (watch.run_id, watch.run_folder) == ("night-7", None)


def test_listeners_must_be_functions() -> None:
    job = Job()

    job.watch.subscribe(print)

    assert job.calls == [("subscriptions.add", print)]
    with pytest.raises(TypeError, match=r"takes a function of a StepRecord, got int"):
        job.watch.subscribe(3)  # type: ignore[arg-type]


def test_a_listener_of_zerowatch_is_called_on_the_watch_thread_and_guarded() -> None:
    job = Job()
    seen: list[object] = []

    def listen(record: object) -> None:
        seen.append(record)
        raise ValueError

    job.watch.subscribe_internal(listen)
    [listener] = job.listeners
    record = step(1)
    listener([record])

    assert seen == [record]
    assert job.watch.fail_open.failures == {"listener": 1}


@pytest.mark.parametrize("missing", ["open", "write", "close"])
def test_a_sink_must_have_its_methods(missing: str) -> None:
    job = Job()
    sink: Any = SimpleNamespace(open=print, write=print, close=print)
    job.watch.add_sink(sink)
    delattr(sink, missing)

    with pytest.raises(TypeError, match=f"got SimpleNamespace without {missing}"):
        job.watch.add_sink(sink)

    assert job.calls == [("sinks.add", sink, "SimpleNamespace")]


def test_a_watch_that_is_off_does_nothing() -> None:
    watch, engine = NullWatch(), PlainEngine()
    seen: list[object] = []

    watch.subscribe(seen.append)
    watch.subscribe_internal(seen.append)
    watch.rebind_engine(engine)
    with (
        watch.checkpoint_phase(),
        watch.saving_checkpoint(),
        watch.copying_checkpoint(),
        watch.waiting_for_checkpoint(),
    ):
        watch.close()

    assert engine.watch is watch
    assert not watch.watches(engine)
    assert not watch.is_open
    assert not watch.writes_report
    assert (watch.run_id, watch.run_folder, watch.address) == (None, None, None)
    assert (watch.generated_ns, watch.memory_limit_bytes("cpu"), seen) == (0, None, [])
    assert watch.snapshot().values == {}
    assert repr(watch) == "<zerowatch.Watch: monitoring is off>"
    assert watch._repr_html_() == "<b>zerowatch</b> &middot; monitoring is off"
