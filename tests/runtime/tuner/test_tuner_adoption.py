"""From the verdict on until all ranks work with it, a change may still come to nothing."""

from __future__ import annotations

import pytest
from fakes.tuned_job import START, Job
from fakes.tuner_decisions import conclusion

from zerowatch.runtime.tuner.policy.configuration_state import ConfigurationState
from zerowatch.runtime.tuner.policy.pending_accept import PendingAccept


class Searching:
    """Notes what it learns."""

    def __init__(self) -> None:
        self.learned: list[str] = []

    def adopted(self, conclusion, configuration) -> None:
        self.learned.append("adopted")

    def failed(self, changes) -> None:
        self.learned.append("failed")


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def adoption(job: Job) -> PendingAccept:
    adoption = PendingAccept(ConfigurationState(job, job.configured), Searching(), job)
    adoption.begin(conclusion())
    return adoption


def test_it_is_due_until_the_job_works_with_it(job, adoption):
    assert not adoption.end()
    assert adoption.is_due
    assert not job.conclusions

    adoption._course.in_use = adoption._course.wanted

    assert adoption.end()
    assert not adoption.is_due
    assert adoption._search.learned == ["adopted"]
    assert [one.verdict for one in job.conclusions] == ["accepted"]


def test_one_that_cannot_be_set_is_told_of_and_not_tried_again(job, adoption):
    adoption.fail("no room")
    adoption.leave()

    assert adoption._search.learned == ["failed"]
    assert [(one.verdict, one.reason) for one in job.conclusions] == [
        ("rejected", "it could not be set: no room")
    ]


def test_one_that_something_else_came_before_is_told_of(job, adoption):
    adoption.leave()
    adoption.leave()

    assert [one.verdict for one in job.conclusions] == ["rolled_back"]
    assert not adoption.is_due
    assert adoption._course.known_good == START
