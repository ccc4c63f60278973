"""Unlucky moments for a tuner: saves, stop files, memory pressure, missing measurements."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.ranks import on_ranks
from fakes.tuned_job import DONE, START, Job

from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.tuner import session
from zerowatch.runtime.tuner.controller_runner import ControllerRunner, StopFile
from zerowatch.runtime.tuner.knobs.data_knobs import MicroBatchKnob
from zerowatch.runtime.tuner.policy.diagnose import diagnose
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.proposals import TunerInput, propose
from zerowatch.runtime.tuner.policy.types import JobFacts, Numerics, SwitchRequest, SwitchResult
from zerowatch.runtime.tuner.session import ReportedOomRisk
from zerowatch.runtime.tuner.transaction import apply_switch


def test_a_memory_saving_right_before_a_save_is_applied_then() -> None:
    job = Job()
    job.oom_risk = 0.6
    job.run(1)
    job.oom_risk = 0.0

    request = job.controller.pause_trial()

    assert request is not None
    job.carry_out(request)
    assert job.decisions[0].verdict == "accepted"
    job.run(60, until=lambda: job.controller.state == "applied")
    assert job.controller.configuration.known_good == request.target, (
        "what is on trial is not good yet"
    )


def test_a_frozen_tuner_saves_no_memory_even_in_safe_mode() -> None:
    job = Job()
    job.answer = lambda _: SwitchResult(done=False, reason="rank 1: no")
    job.run(300)
    assert job.controller.state == "safe_mode"
    job.answer = lambda _: DONE

    job.controller.freeze()
    job.oom_risk = 0.9
    job.run(50)
    assert job.now == START

    job.oom_risk = 0.0
    job.controller.thaw()
    job.run(300)
    assert job.controller.state == "safe_mode"
    assert job.now == START


def test_a_failed_rollback_leaves_a_frozen_tuner_frozen() -> None:
    job = Job()
    job.until_trial()
    job.controller.freeze()
    job.answer = lambda _: SwitchResult(done=False, reason="stuck")

    job.run(5)

    assert job.controller.state == "frozen"
    job.controller.thaw()
    assert job.controller.state == "safe_mode"


def test_a_change_under_memory_pressure_is_tried_once() -> None:
    job = Job()

    for _ in range(400):
        job.oom_risk = 0.6 if job.now["micro_batch_samples"] == 8 else 0.0
        job.run(1)

    tries = [one for one in job.decisions if one.proposal.changes == {"micro_batch_samples": 8}]
    assert len(tries) == 1
    assert job.now["micro_batch_samples"] == 4


def test_a_rejected_value_may_still_save_memory() -> None:
    job = Job()
    job.run(300)
    assert job.now["micro_batch_samples"] == 8, "after which 4 is denied, as slower"
    job.now = {**job.now, "activation_checkpointing": True}
    job.controller.on_user_change()
    job.oom_risk = 0.6

    job.run(5, until=lambda: job.now["micro_batch_samples"] == 4)

    assert job.now["micro_batch_samples"] == 4


def test_the_best_configuration_is_not_restored_if_it_takes_too_much_memory() -> None:
    job = Job()
    job.run(300)
    job.now = {**job.now, "activation_checkpointing": True}
    job.controller.on_user_change()

    for _ in range(400):
        job.oom_risk = 0.6 if job.now["micro_batch_samples"] == 8 else 0.0
        job.run(1)

    reliefs = [one for one in job.decisions if "risk of running out" in one.reason]
    assert len(reliefs) == 1
    assert job.now["micro_batch_samples"] == 4


def test_a_refused_memory_saving_is_ordered_once() -> None:
    job = Job()
    job.answer = lambda _: SwitchResult(done=False, refused=True)
    job.oom_risk = 0.6
    asked = []

    for _ in range(100):
        if job.controller.needs_exchange:
            asked.append(job.controller.configuration.pending_switch())
        job.run(1)

    targets = [request.target for request in asked if request is not None]
    assert all(targets.count(each) == 1 for each in targets)


def test_a_trial_interrupted_by_frequent_saves_is_given_up() -> None:
    job = Job()
    switches = 0
    for _ in range(100):
        before = job.now
        job.run(3)
        switches += job.now != before
        request = job.controller.pause_trial()
        if request is not None:
            job.carry_out(request)

    assert job.now == START
    assert switches < 20, "each may be a rebuild"
    assert all(one.verdict != "accepted" for one in job.decisions)


def test_a_trial_without_usable_windows_is_given_up() -> None:
    job = Job()
    job.until_trial()
    job.is_usable = False

    job.run(100)

    assert job.now == START
    assert job.decisions[0].verdict == "rolled_back"


def test_the_configuration_state_shows_a_trial() -> None:
    job = Job()
    assert not job.controller.configuration.is_on_trial
    job.until_trial()
    assert job.controller.configuration.is_on_trial

    job.run(300)

    assert job.now != START
    assert not job.controller.configuration.is_on_trial


def test_a_stop_file_that_cannot_be_read_does_not_end_training(tmp_path: Path) -> None:
    stop_file = StopFile(tmp_path / ("long" * 100), SimpleNamespace(run_folder=tmp_path))
    runner = ControllerRunner(Job().controller, FailOpen(), stop_file)

    runner._poll_stop_file()

    assert stop_file.exists() is None
    assert not runner.needs_exchange


def compressed(kind: str | None, numerics: Numerics) -> TunerInput:
    reading = MetricsDelta(
        exposed_ratio=0.6,
        comm_ratio=0.6,
        cause_ratios={"bandwidth": 0.3, "latency": 0.3},
        coverage=1.0,
        world_size=2,
    )
    return TunerInput(
        configuration={"reduce_bucket_size": 1 << 16, "gradient_compression": kind},
        options={
            "reduce_bucket_size": (1 << 16, 1 << 20),
            "gradient_compression": (None, "int8"),
        },
        facts=JobFacts(world_size=2, backend="gloo", gradient_bytes=10**8, parameter_bytes=10**8),
        numerics=numerics,
        allows_rebuild=True,
        symptoms=diagnose(reading),
        reading=reading,
        samples_per_rank=8,
    )


def test_bucket_sizes_stay_under_bitwise_with_compression() -> None:
    """Buckets decide which values are rounded together."""
    assert propose(compressed(None, Numerics.BITWISE))
    assert not propose(compressed("int8", Numerics.BITWISE))
    assert propose(compressed("int8", Numerics.REASSOCIATION))


def test_a_rank_that_fails_without_a_reason_fails_like_any_other() -> None:
    def rank(host_group: Any) -> SwitchResult:
        knobs = SimpleNamespace(
            values=dict, unsupported_reason=lambda _: "" if host_group.rank else None
        )
        return apply_switch(SwitchRequest(target={}, why="test"), cast(Any, knobs), host_group)

    for result in on_ranks(2, rank):
        assert not result.done
        assert result.reason


def test_micro_batch_sizes_that_differ_between_ranks_are_no_knob() -> None:
    windows: Any = SimpleNamespace(micro_batch_samples=4, opened=None)
    knob = MicroBatchKnob(windows)
    assert knob.unsupported_reason() is None

    windows.opened = SimpleNamespace(local_batches=SimpleNamespace(micro_batch_samples=[4, 4]))
    assert knob.unsupported_reason() is None
    windows.opened = SimpleNamespace(local_batches=SimpleNamespace(micro_batch_samples=[4, 2]))
    assert knob.unsupported_reason() is not None


def test_an_oom_risk_of_steps_before_a_change_is_ignored() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9)
    assert reported.current(now=7, seconds=0.0) == 0.9

    reported.invalidate(now=8)

    assert reported.current(now=8, seconds=0.0) == 0.0
    reported.update(step=8, risk=0.8)
    assert reported.current(now=9, seconds=0.0) == 0.0
    reported.update(step=9, risk=0.7)
    assert reported.current(now=9, seconds=0.0) == 0.7


def test_an_oom_risk_that_is_not_updated_expires() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9, seconds=100.0)

    assert reported.current(now=8, seconds=10_000.0) == 0.9, "one long step"
    assert reported.current(now=60, seconds=101.0) == 0.9, "steps of milliseconds"
    assert reported.current(now=60, seconds=200.0) == 0.0


@pytest.mark.parametrize(
    ("watched", "numerics", "tuned"),
    [
        ((True, True), ("bitwise", "bitwise"), True),
        ((True, False), ("bitwise", "bitwise"), False),
        ((True, True), ("bitwise", "reassociation"), False),
    ],
)
def test_all_ranks_are_tuned_or_none(
    watched: tuple[bool, bool],
    numerics: tuple[str, str],
    tuned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Made:
        def __init__(self, *parts: Any) -> None:
            self.numerics = Numerics.of_setting(parts[-1].tuner.numerics)

        def close(self) -> None:
            pass

    def rank(host_group: Any) -> bool:
        tuner = SimpleNamespace(mode="auto", numerics=numerics[host_group.rank])
        watch = SimpleNamespace(
            is_open=watched[host_group.rank],
            settings=SimpleNamespace(tuner=tuner),
            fail_open=SimpleNamespace(wrap=lambda _, body: body),
        )
        changes: Any = SimpleNamespace(engine=SimpleNamespace(watch=watch))
        parts: Any = None
        return isinstance(session.create_tuner_session(changes, parts, host_group, parts), Made)

    monkeypatch.setattr(session, "ActiveTunerSession", Made)

    assert on_ranks(2, rank) == [tuned, tuned]
