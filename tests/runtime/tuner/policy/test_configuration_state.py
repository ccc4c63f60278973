"""An accepted configuration is pending until all ranks use it, and may still fail."""

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
