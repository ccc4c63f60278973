"""The controller where events coincide: checkpoints, stop file, memory pressure, bad steps."""

from __future__ import annotations

from fakes.tuned_job import DONE, START, Job

from zerowatch.runtime.tuner.policy.policy_types import SwitchResult


def test_a_memory_saving_right_before_a_checkpoint_is_applied_then() -> None:
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


def test_a_change_that_runs_out_of_memory_costs_no_memory_saving() -> None:
    job = Job()
    job.until_trial()
    job.oom_risk, job.replays = 0.6, 1
    job.run(1)
    job.oom_risk = job.replays = 0

    job.run(3)

    assert [one.verdict for one in job.decisions] == ["rolled_back"]
    assert job.now == START


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
    assert job.now["micro_batch_samples"] == 8, "after which 4 is excluded, as slower"
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

    savings = [one for one in job.decisions if "risk of running out" in one.reason]
    assert len(savings) == 1
    assert job.now["micro_batch_samples"] == 4


def test_a_refused_memory_saving_is_requested_once() -> None:
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


def test_a_trial_interrupted_by_frequent_checkpoints_is_aborted() -> None:
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


def test_a_trial_without_usable_steps_is_aborted() -> None:
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
