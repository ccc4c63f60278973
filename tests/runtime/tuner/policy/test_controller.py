"""Tests of the controller: trials, failures, memory pressure, interruptions.

Covers `trial.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fakes import tuned_job
from fakes.tuned_job import DONE, START, Job

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.catalog.tuner import TUNER_STATES
from zerowatch.runtime.tuner.policy.controller import TRANSITIONS
from zerowatch.runtime.tuner.policy.policy_types import State, SwitchResult, Value
from zerowatch.runtime.tuner.policy.proposals import HISTORY_REASON


def tried(job: Job) -> list[Mapping[str, Value]]:
    return [dict(decision.proposal.changes) for decision in job.decisions]


def test_a_change_that_helps_is_accepted_and_others_are_rolled_back() -> None:
    job = Job()

    job.run(300)

    assert job.now == {**START, "micro_batch_samples": 8}
    verdicts = {decision.verdict for decision in job.decisions}
    assert verdicts == {"accepted", "rolled_back"}
    assert job.controller.state == "observe"


def test_the_states_are_the_label_values_of_the_metric() -> None:
    assert sorted(State) == sorted(TUNER_STATES)
    assert set(TRANSITIONS) == set(State)


def test_a_transition_that_is_not_in_the_table_is_an_error() -> None:
    controller = Job().controller

    with pytest.raises(RuntimeError, match="from warmup to trial"):
        controller._enter(State.TRIAL)


def test_a_trial_passes_the_states_in_the_order_of_the_table() -> None:
    job = Job()

    job.run(300, until=lambda: "cooldown" in job.states)

    accepted = job.states.index("accept")
    assert job.states[0] == "warmup"
    assert job.states[accepted - 4 : accepted + 2] == [
        "propose", "preflight", "applied", "trial", "accept", "cooldown",
    ]  # fmt: skip


def test_the_best_configuration_of_the_history_is_tried_first() -> None:
    job = Job()
    job.run(300)
    ((context, kept),) = job.kept.items()
    best = {**kept.configuration, "activation_checkpointing": True}

    job.kept[context] = replace(kept, configuration=best)
    later = Job(after=job)
    later.run(100, until=lambda: bool(later.decisions))

    assert tried(later)[0] == {"micro_batch_samples": 8, "activation_checkpointing": True}
    assert later.decisions[0].verdict == "accepted"


def test_a_crashed_trial_is_not_tried_by_the_next_job(caplog) -> None:
    job = Job()
    job.until_trial()

    later = Job(after=job)
    later.run(300)

    assert job.trials == [{"micro_batch_samples": 8}]
    assert {"micro_batch_samples": 8} not in tried(later)
    assert "an earlier run crashed in a trial of micro_batch_samples=8" in caplog.text


def test_a_crashed_trial_of_the_best_configuration_is_not_tried_either() -> None:
    first = Job()
    first.run(300)
    second = Job(after=first)
    second.until_trial()

    third = Job(after=second)
    third.run(300)

    assert {"micro_batch_samples": 8} not in tried(third)
    assert [kept.configuration for kept in third.kept.values()] == [
        kept.configuration for kept in first.kept.values()
    ], "a run that measured nothing of it forgets nothing"


def test_a_trial_in_which_another_run_may_have_crashed_is_not_tried_until_it_goes_on(
    caplog,
) -> None:
    job = Job()
    job.crashed = [{"micro_batch_samples": 8}]

    job.run(300)
    tried_before, job.crashed = tried(job), ()
    job.run(300)

    assert {"micro_batch_samples": 8} not in tried_before
    assert {"micro_batch_samples": 8} in tried(job)
    assert caplog.text.count("may have crashed in a trial of micro_batch_samples=8") == 1


def test_each_step_of_a_trial_renews_its_record() -> None:
    job = Job()
    job.until_trial()
    renewals = []

    for _ in range(3):
        job.run(1)
        renewals.append(job.num_renewals)

    assert [each - renewals[0] for each in renewals] == [0, 1, 2]


def test_a_paused_trial_is_no_crash_until_it_goes_on() -> None:
    job = Job()
    job.until_trial()
    request = job.controller.pause_trial()
    assert request is not None
    recorded = [list(job.trials)]

    job.carry_out(request)
    recorded.append(list(job.trials))
    job.until_trial()
    recorded.append(list(job.trials))

    assert recorded == [[{"micro_batch_samples": 8}], [], [{"micro_batch_samples": 8}]]


def test_a_run_that_ends_normally_in_a_trial_did_not_crash() -> None:
    job = Job()
    job.until_trial()

    job.controller.close()

    assert not job.trials


def test_no_trial_starts_too_late_for_a_verdict() -> None:
    job = Job(total_steps=20)

    job.run(20)

    assert not job.trials and not job.decisions


def test_a_trial_is_rolled_back_after_a_failed_window() -> None:
    job = Job()
    job.until_trial()

    job.controller.on_window_failed()
    request = job.controller.pause_trial()
    assert request is not None
    job.carry_out(request)
    assert job.now == START and not job.trials
    job.run(300)

    assert tried(job).count({"micro_batch_samples": 8}) == 1
    assert job.decisions[0].reason == "a window with it ended by an error"
    excluded = {each for kept in job.kept.values() for each in kept.excluded}
    assert ("micro_batch_samples", 8) not in excluded, "it may not be to blame"


def test_memory_savings_of_a_failed_window_are_kept() -> None:
    job = Job()
    job.until_trial()
    job.now["activation_checkpointing"] = True

    job.controller.on_window_failed()

    request = job.controller.pause_trial()
    assert request is not None
    assert request.target == {**START, "activation_checkpointing": True}


def test_a_rejected_change_is_saved() -> None:
    job = Job()
    job.saving = 1.1

    job.run(300, until=lambda: bool(job.decisions))

    (kept,) = job.kept.values()
    assert not kept.configuration and not job.trials
    assert kept.excluded == {("micro_batch_samples", 8)}


def test_a_change_that_a_rank_refuses_is_not_tried_again() -> None:
    job = Job()
    job.answer = lambda request: (
        DONE
        if request.target["micro_batch_samples"] == 4
        else SwitchResult(done=False, refused=True)
    )

    job.run(300)

    assert tried(job).count({"micro_batch_samples": 8}) == 1
    assert job.now == START
    assert job.controller.state == "observe"


def test_a_rollback_is_reported_once_all_ranks_have_made_it() -> None:
    job = Job()
    job.saving = 1.1
    reported_while_in_use = []

    for _ in range(100):
        before, num = dict(job.now), len(job.decisions)
        job.run(1)
        if len(job.decisions) > num:
            reported_while_in_use.append(before != START and job.now != START)

    assert "rolled_back" in {one.verdict for one in job.decisions}
    assert not any(reported_while_in_use)


def test_a_change_that_cannot_be_undone_is_reported_as_in_use() -> None:
    job = Job()
    job.answer = lambda request: (
        DONE if request.checked else SwitchResult(done=False, reason="rank 0: not rebuilt")
    )

    job.run(200)

    (found,) = job.decisions
    assert job.now["micro_batch_samples"] == 8
    assert found.verdict == "not_undone"
    assert "micro_batch_samples=8" in found.reason
    assert "rank 0: not rebuilt" in found.reason
    assert job.configurations[-1] == job.now


def test_a_verdict_whose_rollback_fails_is_not_reported_as_rolled_back() -> None:
    job = Job()
    job.until_trial()
    job.answer = lambda _: SwitchResult(done=False, reason="stuck")
    job.replays = 1

    job.run(3)

    (found,) = job.decisions
    assert found.verdict == "not_undone"
    assert found.reason.startswith("memory ran out; training continues with micro_batch_samples=8")


def test_a_change_left_on_another_rank_alone_is_reported() -> None:
    job = Job()
    job.answer = lambda _: SwitchResult(
        done=False,
        reason="rank 0: no",
        undone=False,
        remaining_changes="rank 1: micro_batch_samples=8",
    )

    job.run(100)

    (found,) = job.decisions
    assert found.verdict == "not_undone"
    assert "rank 1: micro_batch_samples=8" in found.reason


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda job: job.controller.freeze(), "stop file"),
        (lambda job: job.controller.on_user_change(), "the script"),
        (lambda job: job.controller.close(), "the run ended"),
    ],
)
def test_a_trial_that_is_given_up_is_reported_with_its_reason(end, reason) -> None:
    job = Job()
    job.until_trial()

    end(job)
    job.run(3)

    first = job.decisions[0]
    assert first.verdict == "interrupted"
    assert reason in first.reason
    assert [one.verdict for one in job.decisions].count("interrupted") == 1


def test_each_trial_that_starts_ends_with_one_decision() -> None:
    job = Job()

    for step in range(600):
        job.pace = 3.0 if step // 97 % 2 else 1.0
        job.run(1)
        if step % 151 == 150:
            job.controller.freeze()
            job.controller.thaw()
    job.controller.close()

    assert job.num_trials > 5
    assert len(job.decisions) == job.num_trials


def test_after_two_changes_that_failed_nothing_more_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    job.answer = lambda _: SwitchResult(done=False, reason="rank 1: no")

    with caplog.at_level("WARNING"):
        job.run(300)

    stopped = [each for each in caplog.messages if "nothing more is tried" in each]
    assert len(stopped) == 1
    assert "rank 1: no" in stopped[0]

    assert len(job.decisions) == 2
    assert job.controller.state == "safe_mode"
    assert job.controller.configuration.pending_switch() is None


@pytest.mark.parametrize(("acts", "fails"), [(False, False), (True, True), (True, False)])
def test_rejected_changes_are_said_to_be_tried_again_only_if_they_are(
    acts: bool, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = Job(acts=acts)
    job.answer = lambda _: SwitchResult(done=False, reason="rank 1: no") if fails else DONE
    job.saving = 1.0
    job.run(600)

    job.pace = 3.0
    job.run(200)

    assert ("step times have become slower" in caplog.text) == (acts and not fails)


def test_after_an_incomplete_rollback_nothing_is_changed() -> None:
    job = Job()
    job.answer = lambda _: SwitchResult(done=False, reason="rank 1: no", undone=False)

    job.run(100)

    assert len(job.decisions) == 1
    assert job.controller.state == "safe_mode"
    assert not job.controller.needs_exchange


def test_a_failed_rollback_is_not_repeated() -> None:
    job = Job()
    job.answer = lambda request: (
        DONE if request.checked else SwitchResult(done=False, reason="stuck")
    )

    job.run(200)

    assert job.controller.state == "safe_mode"
    assert not job.controller.needs_exchange


@pytest.mark.parametrize("savings", [{}, {"activation_checkpointing": True}])
def test_a_change_that_runs_out_of_memory_is_rolled_back(savings: Mapping[str, Value]) -> None:
    job = Job()
    job.until_trial()
    job.now.update(savings)  # by the out-of-memory recovery
    job.replays = 1

    job.run(2)
    job.replays = 0
    job.run(1)

    (found,) = job.decisions
    assert (found.verdict, found.reason) == ("rolled_back", "memory ran out")
    assert job.now == {**START, **savings}


def test_a_change_that_the_recovery_itself_undoes_is_reported() -> None:
    job = Job()
    job.until_trial()
    job.now = dict(START)
    job.replays = 1

    job.run(1)

    assert [one.verdict for one in job.decisions] == ["rolled_back"]
    assert not job.controller.needs_exchange


def test_a_loss_that_jumps_rolls_back_another_rounding() -> None:
    job = Job()
    job.run(300, until=lambda: job.now["gradient_compression"] == "int8")
    job.loss = 2.0

    job.run(3)

    assert "the loss went up" in job.decisions[-1].reason


def test_nothing_is_on_trial_at_a_checkpoint() -> None:
    job = Job()
    job.until_trial()

    request = job.controller.pause_trial()

    assert request is not None and request.target == START
    job.carry_out(request)
    assert job.controller.pause_trial() is None
    job.run(300)
    assert job.now["micro_batch_samples"] == 8, "what was left was tried again"


def test_a_frozen_tuner_rolls_back_until_it_is_thawed() -> None:
    job = Job()
    job.until_trial()

    job.controller.freeze()
    job.run(100)
    assert job.now == START
    assert job.controller.state == "frozen"

    job.controller.thaw()
    job.run(300)
    assert job.now["micro_batch_samples"] == 8


def test_a_risk_of_oom_is_acted_on_without_a_trial() -> None:
    job = Job()
    job.oom_risk = 0.6

    job.run(3, until=lambda: job.now != START)

    assert job.decisions[0].result is None
    assert job.decisions[0].verdict == "accepted"
    assert job.now["activation_checkpointing"] or job.now["micro_batch_samples"] != 4


def test_a_risk_of_oom_rolls_back_the_trial_first() -> None:
    job = Job()
    job.until_trial()
    job.oom_risk = 0.6

    job.run(2, until=lambda: job.now == START)

    assert job.now == START


@pytest.mark.parametrize(("oom_risk", "is_tried"), [(0.0, True), (0.49, True), (0.5, False)])
def test_with_little_memory_left_changes_that_need_no_memory_are_tried(
    monkeypatch: pytest.MonkeyPatch, oom_risk: float, is_tried: bool
) -> None:
    options = {**tuned_job.OPTIONS, "reduce_scatter": (False, True)}
    monkeypatch.setattr(tuned_job, "OPTIONS", options)
    monkeypatch.setattr(tuned_job, "START", {**START, "reduce_scatter": False})
    job = Job()
    for spec, value in (
        (memory.MEMORY_LIMIT, 80e9),
        (memory.MEMORY_HEADROOM, 0.07 * 80e9),
        (memory.OOM_RISK, oom_risk),
    ):
        job._recorder.set(spec, value, "cuda:0")

    job.run(100)

    assert tried(job) == ([{"reduce_scatter": True}] if is_tried else [])


def test_advice_is_given_once_and_needs_no_exchange() -> None:
    job = Job(acts=False)
    job.oom_risk = 0.6

    job.run(200, until=lambda: job.controller.needs_exchange)

    assert not job.controller.needs_exchange
    assert [decision.verdict for decision in job.decisions] == ["advised"]


def test_stale_metrics_start_no_trial() -> None:
    job = Job()
    job.is_watched = False

    job.run(200)

    assert not job.decisions


def test_low_coverage_starts_no_trial() -> None:
    job = Job()
    job.coverage = 0.9

    job.run(200)

    assert not job.decisions


def test_the_users_changes_are_known_to_be_good() -> None:
    job = Job()
    job.until_trial()
    job.now = {**START, "activation_checkpointing": True}

    job.controller.on_user_change()
    job.run(300)

    assert job.now == {**START, "micro_batch_samples": 8, "activation_checkpointing": True}


def test_the_configuration_of_a_known_context_is_measured_again() -> None:
    job = Job()
    job.saving = 1.0  # nothing is to be had here
    job.run(300)
    job.pace, job.saving = 4.0, 0.5
    job.run(300)
    assert job.now["micro_batch_samples"] == 8
    num_before, job.pace = len(job.decisions), 1.0

    job.run(300)

    first = job.decisions[num_before]
    assert first.proposal.changes == {"micro_batch_samples": START["micro_batch_samples"]}
    assert first.proposal.reason == HISTORY_REASON
    assert first.verdict == "rolled_back"
    assert job.now["micro_batch_samples"] == 8
    job.run(1500)
    tries = [one.proposal.changes for one in job.decisions[num_before:]]
    assert tries.count(first.proposal.changes) == 1


@pytest.mark.parametrize(
    ("saving", "until"),
    [
        pytest.param(0.5, lambda job: len(job.states) > 1, id="before a trial"),
        pytest.param(0.98, lambda job: job.now != START, id="with the change on trial"),
        pytest.param(
            0.98,
            lambda job: job.controller.state == "trial" and job.now == START,
            id="with the old value",
        ),
        pytest.param(1.0, lambda job: job.decisions, id="between two trials"),
        pytest.param(
            0.5, lambda job: len(job.decisions) > 1 and job.now != START, id="after an accept"
        ),
    ],
)
def test_memory_savings_of_the_recovery_are_not_rolled_back_by_a_trial(saving, until) -> None:
    job = Job()
    job.saving = saving
    job.run(300, until=lambda: until(job))
    assert until(job)
    job.now["activation_checkpointing"] = True  # by a rank that found no other way
    job.replays = 1
    job.run(1)
    job.replays = 0
    kept = []

    for _ in range(300):
        job.run(1)
        kept.append(job.now["activation_checkpointing"])

    assert all(kept)
    assert len(job.decisions) == job.num_trials > 1


def test_a_trial_ends_if_the_recovery_changes_the_old_value() -> None:
    job = Job()
    job.saving = 0.98
    job.run(300, until=lambda: job.controller.state == "trial" and job.now == START)
    job.now["activation_checkpointing"] = True
    job.replays = 1

    job.run(1)

    (found,) = job.decisions
    assert (found.verdict, found.reason) == (
        "interrupted",
        "the out-of-memory recovery changed a setting",
    )


def test_a_memory_saving_is_no_shift_of_speed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    job = Job()
    job.saving = 1.0
    job.run(300)
    job.now["activation_checkpointing"], job.pace, job.replays = True, 1.3, 1
    job.run(1)
    job.replays = 0

    job.run(30)

    assert "step times have become" not in caplog.text


def test_the_next_trial_waits_for_usable_steps_after_a_rollback() -> None:
    job = Job()
    job.saving = 1.0
    job.run(300, until=lambda: bool(job.decisions))
    job.is_usable = False

    job.run(20)
    waiting = job.num_trials
    job.is_usable = True
    job.run(20)

    assert (waiting, job.num_trials) == (1, 2)


def test_a_refused_change_is_not_saved_as_rejected() -> None:
    job = Job()
    job.answer = lambda request: SwitchResult(done=False, refused=True, reason="no room")
    job.run(300)

    assert all(not kept.excluded for kept in job.kept.values())


def test_a_trial_is_discarded_when_the_speed_of_a_changes() -> None:
    job = Job()
    job.saving = 0.98
    job.until_trial()
    job.run(30, until=lambda: job.now == START)
    job.pace, num_before = 3.0, len(job.states)

    job.run(24, until=lambda: len(job.states) > num_before)

    assert job.states[num_before:] == ["observe"]
    assert [one.verdict for one in job.decisions] == ["interrupted"], "that was no verdict"
    assert "changed its speed" in job.decisions[0].reason
    assert not job.controller.configuration.is_on_trial


def test_observations_that_changes_of_speed_discard_are_counted_until_a_diagnosis() -> None:
    job = Job()

    for pace in (0.1, 0.15, 0.1, 0.15):  # 26 steps are shorter than an observation
        job.pace = pace
        job.run(26)
    discarded, trials = list(job.discarded), job.num_trials
    job.run(100, until=lambda: job.num_trials > 0)

    assert [num for num, _ in discarded] == [1, 2, 3]
    assert [seconds for _, seconds in discarded] == pytest.approx([2.5, 6.4, 9.0], abs=0.5)
    assert (trials, job.num_trials) == (0, 1)
    assert job.discarded == discarded
