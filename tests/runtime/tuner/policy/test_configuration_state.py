"""Tests of the configurations of a job, and of an accepted one until all ranks use it."""

from __future__ import annotations

import pytest
from fakes.tuned_job import START, Job
from fakes.tuner_decisions import decision

from zerowatch.runtime.tuner.policy.configuration_state import ConfigurationState, PendingAccept


class FakeSearch:
    """Records its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_accepted(self, decision, configuration) -> None:
        self.events.append("accepted")

    def on_failed(self, changes, *, refused) -> None:
        self.events.append("failed")


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def pending(job: Job) -> PendingAccept:
    pending = PendingAccept(ConfigurationState(job, job), FakeSearch(), job)
    pending.start(decision())
    return pending


def test_it_is_pending_until_the_job_uses_it(job, pending):
    assert not pending.complete()
    assert pending.is_pending
    assert not job.decisions

    pending._configuration.in_use = pending._configuration.wanted

    assert pending.complete()
    assert not pending.is_pending
    assert pending._search.events == ["accepted"]
    assert [one.verdict for one in job.decisions] == ["accepted"]


def test_one_that_cannot_be_set_is_rejected_and_not_tried_again(job, pending):
    pending.fail("no room")
    pending.abandon()

    assert pending._search.events == ["failed"]
    assert [(one.verdict, one.reason) for one in job.decisions] == [
        ("rejected", "it could not be set: no room")
    ]


def test_an_interrupted_one_is_rolled_back(job, pending):
    pending.abandon()
    pending.abandon()

    assert [one.verdict for one in job.decisions] == ["rolled_back"]
    assert not pending.is_pending
    assert pending._configuration.known_good == START


A = {"zero_stage": 2, "reduce_bucket_size": 3000, "activation_checkpointing": False}
B = {**A, "zero_stage": 0}
B_READ = {**B, "reduce_bucket_size": 500_000_000}  # stage 0 has no buckets


@pytest.mark.parametrize(
    ("saved", "good", "in_use"),
    [
        pytest.param({}, A, B, id="nothing"),
        pytest.param(
            {"activation_checkpointing": True},
            {**A, "activation_checkpointing": True},
            {**B, "activation_checkpointing": True},
            id="a saving on the engine of the trial",
        ),
        pytest.param(
            {"zero_stage": 3, "reduce_bucket_size": 3000, "activation_checkpointing": True},
            A,
            {**A, "zero_stage": 3, "activation_checkpointing": True},
            id="the layout on trial itself",
        ),
    ],
)
def test_only_what_changes_during_a_trial_of_a_layout_is_kept(job, saved, good, in_use):
    job.now = dict(A)
    state = ConfigurationState(job, job)
    state.request(B, "a trial")
    job.now = dict(B_READ)
    state.on_applied(B)
    state.wanted = state.known_good

    job.now.update(saved)
    replaced = state.adopt_external()

    assert replaced == ({each: B_READ[each] for each in saved} if saved else None)
    assert state.known_good == state.wanted == good
    assert state.in_use == in_use
    assert state.adopt_external() is None


def test_a_layout_that_the_recovery_changes_is_kept_if_no_layout_is_on_trial(job):
    job.now = dict(A)
    state = ConfigurationState(job, job)

    job.now["zero_stage"] = 3
    state.adopt_external()

    assert state.known_good == state.wanted == state.in_use == {**A, "zero_stage": 3}
