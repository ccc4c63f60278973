"""Tests of the tuner's session: on all ranks or on none, and the OOM risk that it reports."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.clock import FakeClock
from fakes.foreign_files import forbid_to_write
from fakes.rank_threads import on_ranks

from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.tuner import session
from zerowatch.runtime.tuner.policy.history_file import HistoryEntry
from zerowatch.runtime.tuner.policy.policy_types import Numerics
from zerowatch.runtime.tuner.session import ReportedOomRisk


def test_an_oom_risk_of_steps_before_a_change_is_ignored() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9)
    assert reported.current(now=7, seconds=0.0) == 0.9

    reported.invalidate(now=8)

    assert reported.current(now=8, seconds=0.0) is None
    reported.update(step=8, risk=0.8)
    assert reported.current(now=9, seconds=0.0) is None
    reported.update(step=9, risk=0.7)
    assert reported.current(now=9, seconds=0.0) == 0.7


def test_an_oom_risk_that_is_not_updated_expires() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9, seconds=100.0)

    assert reported.current(now=8, seconds=10_000.0) == 0.9, "one long step"
    assert reported.current(now=60, seconds=101.0) == 0.9, "steps of milliseconds"
    assert reported.current(now=60, seconds=200.0) is None


@pytest.mark.parametrize(
    ("watched", "numerics", "tuned"),
    [
        ((True, True), ("bitwise", "bitwise"), True),
        ((True, False), ("bitwise", "bitwise"), False),
        ((True, True), ("bitwise", "reassociation"), False),
    ],
)
def test_all_ranks_are_tuned_or_none_is(
    watched: tuple[bool, bool],
    numerics: tuple[str, str],
    tuned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeSession:
        def __init__(self, *parts: Any) -> None:
            self.numerics = Numerics.of_setting(parts[4].tuner.numerics)

        def close(self) -> None:
            pass

    def rank(host_group: Any) -> bool:
        tuner = SimpleNamespace(mode="auto", numerics=numerics[host_group.rank])
        watch = SimpleNamespace(
            is_open=watched[host_group.rank],
            settings=SimpleNamespace(tuner=tuner),
            fail_open=FailOpen(),
        )
        changes: Any = SimpleNamespace(engine=SimpleNamespace(watch=watch))
        parts: Any = None
        return isinstance(
            session.create_tuner_session(changes, parts, host_group, parts), FakeSession
        )

    monkeypatch.setattr(session, "ActiveTunerSession", FakeSession)

    assert on_ranks(2, rank) == [tuned, tuned]


def engine_of(watch: Any, optimizer: object = None) -> Any:
    return SimpleNamespace(
        watch=watch,
        module=SimpleNamespace(named_parameters=list),
        basic_optimizer=optimizer,
        device=SimpleNamespace(type="cpu"),
    )


def made(monkeypatch: pytest.MonkeyPatch, watch: Any, runner: Any, **parts: Any) -> Any:
    """Return the session of rank 0, whose controller is `runner`."""
    knobs = SimpleNamespace(on_window_end=lambda: None, close=lambda: None)
    monkeypatch.setattr(session, "RunKnobs", lambda *_: knobs)
    facts = SimpleNamespace(world_size=1)
    monkeypatch.setattr(session, "job_facts", lambda _, **options: facts)
    new_runner = parts.pop("new_runner", lambda *_: runner)
    monkeypatch.setattr(session.ActiveTunerSession, "_new_runner", new_runner)
    status = SimpleNamespace(oom_risk=0.0, is_on_trial=False, exchanges_switch_request=False)
    known: Any = {
        "engine_holder": SimpleNamespace(engine=engine_of(watch), config={}, has_engine=True),
        "window_runner": SimpleNamespace(opened=SimpleNamespace(tuner_statuses=[status])),
        "host_group": SimpleNamespace(rank=0),
        "data": SimpleNamespace(has_requested_batch=True),
        "settings": Settings(run_log={"enabled": False}, tuner={"numerics": "bitwise"}),
    }
    return session.ActiveTunerSession(**{**known, **parts})


def watched() -> Any:
    return SimpleNamespace(
        generated_ns=0,
        fail_open=FailOpen(),
        subscribe_internal=lambda listener: None,
        on_good_end=[],
    )


RESULT: Any = SimpleNamespace(step=1, seconds=2.0, samples=8, replays=0, skipped=False, loss=1.0)


@pytest.mark.parametrize("has_engine", [True, False])
def test_a_trial_that_left_no_engine_counts_as_crashed(
    has_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    runner = SimpleNamespace(on_window_end=lambda _: None, close=lambda: ended.append("normally"))
    watch = watched()
    holder = SimpleNamespace(engine=engine_of(watch), config={}, has_engine=True)
    tuned = made(monkeypatch, watch, runner, engine_holder=holder)
    tuned.on_window_start()
    tuned.on_window_end(RESULT)

    holder.has_engine = has_engine
    tuned.close()

    assert ended == ["normally"] * has_engine


@pytest.mark.parametrize("is_in_window", [True, False])
def test_a_trial_of_a_run_that_is_not_closed_ends_with_the_watch(
    is_in_window: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    runner = SimpleNamespace(on_window_end=lambda _: None, close=lambda: ended.append("normally"))
    watch = watched()
    tuned = made(monkeypatch, watch, runner)
    tuned.on_window_start()
    tuned.on_window_end(RESULT)
    if is_in_window:
        tuned.on_window_start()

    for end in watch.on_good_end:
        end()

    assert ended == ["normally"] * (not is_in_window)


@pytest.mark.parametrize("is_requested", [True, False])
def test_the_time_of_a_step_is_without_the_generation_before_it(
    is_requested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps = FakeClock(), []
    monkeypatch.setattr(session, "perf_counter", clock)
    runner, watch = SimpleNamespace(on_window_end=steps.append), watched()
    data = SimpleNamespace(has_requested_batch=is_requested)
    tuned = made(monkeypatch, watch, runner, data=data)

    for _ in range(2):
        clock.seconds += 30.0  # generation
        watch.generated_ns += 30_000_000_000
        clock.seconds += 2.0
        tuned.on_window_start()
        tuned.on_window_end(RESULT)

    assert steps[1].usable == is_requested
    assert steps[1].seconds == pytest.approx(2.0)


def history_of_a_job(runs: Path, **tuner: Any) -> Any:
    module = SimpleNamespace(named_parameters=list)
    device = SimpleNamespace(type="cpu")
    engine = SimpleNamespace(module=module, basic_optimizer=None, device=device)
    return session.open_history(engine, Settings(run_log={"folder": runs}, tuner=tuner), 1, {})


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def key_of(model: torch.nn.Module, config: dict[str, Any] | None = None, **device: Any) -> str:
    engine = SimpleNamespace(
        module=model, basic_optimizer=None, device=SimpleNamespace(**{"type": "cpu", **device})
    )
    config = {"train_micro_batch_size_per_gpu": 4} if config is None else config
    key: str = session.open_history(engine, Settings(), 8, config)._key
    return key


def test_a_history_is_of_the_same_dtype_trained_parameters_layout_and_batch() -> None:
    frozen = small_model()
    frozen[0].requires_grad_(False)
    micro = {"train_micro_batch_size_per_gpu": 4}
    stage_2 = {**micro, "zero_optimization": {"stage": 2}}
    offload = {**micro, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    keys = [
        key_of(small_model()),
        key_of(small_model().bfloat16()),
        key_of(frozen),
        key_of(small_model(), {"train_micro_batch_size_per_gpu": 8}),
        key_of(small_model(), {**micro, "gradient_accumulation_steps": 2}),
        key_of(small_model(), stage_2),
        key_of(small_model(), offload),
    ]

    assert len(set(keys)) == len(keys)
    assert key_of(small_model()) == keys[0]
    assert key_of(small_model(), {**stage_2, "steps_per_print": 7}) == keys[5]


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_history_is_of_the_job_as_it_started_also_if_loading_rebuilds_the_engine(
    monkeypatch: pytest.MonkeyPatch, is_rebuilt: bool
) -> None:
    histories: list[Any] = []
    watch, config = watched(), {"zero_optimization": {"stage": 1}}
    runner = SimpleNamespace(on_window_end=lambda _: None, close=lambda: None)
    holder = SimpleNamespace(engine=engine_of(watch, object()), config=config, has_engine=True)
    tuned = made(
        monkeypatch,
        watch,
        runner,
        engine_holder=holder,
        new_runner=lambda _, history: histories.append(history) or runner,
    )

    if is_rebuilt:
        holder.engine = engine_of(watch, optimizer=[])
        holder.config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    tuned.on_window_start()
    tuned.on_window_end(RESULT)

    settings = Settings(run_log={"enabled": False}, tuner={"numerics": "bitwise"})
    before = session.open_history(engine_of(watch, object()), settings, 1, config)
    assert [each._key for each in histories] == [before._key]


def test_a_history_is_of_the_same_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(name: str, total_bytes: int) -> str:
        current = SimpleNamespace(current_device=lambda: 0, total_memory=lambda index: total_bytes)
        device = SimpleNamespace(device_name=lambda index: name, is_available=lambda: True)
        monkeypatch.setattr(session, "get_accelerator", lambda: current)
        monkeypatch.setattr(session.accelerator, "current", device)
        return key_of(small_model(), type="cuda")

    keys = [key("H100", 80), key("H100", 40), key("A100", 80)]

    assert len(set(keys)) == 3
    assert key("H100", 80) == keys[0]


def test_values_that_earlier_runs_exclude_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    entries = {
        context: HistoryEntry(configuration={}, excluded=frozenset([("zero_stage", 3)]))
        for context in "ab"
    }

    session._log_excluded({})
    session._log_excluded(entries)

    (message,) = caplog.messages
    assert message.endswith(": zero_stage=3")


@pytest.mark.parametrize(
    ("foreign", "folder"),
    [([], ".tuner"), ([".tuner"], ".tuner-{uid}"), ([".tuner", ".tuner-{uid}"], None)],
)
def test_the_history_is_in_a_folder_of_this_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    foreign: list[str],
    folder: str | None,
) -> None:
    folders = [tmp_path / name.format(uid=os.geteuid()) for name in foreign]
    for each in folders:
        each.mkdir()
    forbid_to_write(monkeypatch, *folders)

    history_of_a_job(tmp_path).save_trial({"zero_stage": 1})
    loaded = history_of_a_job(tmp_path).load_crashed_trials()

    assert loaded == ([] if folder is None else [{"zero_stage": 1}])
    assert [path.parent.name for path in tmp_path.glob("*/*")] == (
        [] if folder is None else [folder.format(uid=os.geteuid())]
    )
    assert len(caplog.messages) == (2 if folder is None else 0)  # one of each history


def test_the_folder_of_the_history_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_to_write(monkeypatch, tmp_path / "team")

    history_of_a_job(tmp_path, history_dir=tmp_path / "team").save_trial({"zero_stage": 1})

    assert len(list((tmp_path / "team").iterdir())) == 1
