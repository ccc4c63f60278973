"""Tests of the likely cause of a collective's error: this rank, or another one."""

from __future__ import annotations

import random

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog.communication import COLLECTIVE_MISMATCHES
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.error_analyzer import CollectiveErrorAnalyzer, attribute_failure

STEP = (("all_reduce", 4), ("all_reduce", 4000), ("all_gather", 96))


class FakeThread:
    """Counts the reports that it is asked for."""

    def __init__(self) -> None:
        self.num_reports = 0

    def report_now(self) -> None:
        self.num_reports += 1


def trained(steps: int = 5) -> FakeGroup:
    """A group whose members have issued the same calls in each step."""
    group = FakeGroup((0, 1, 2))
    for _ in range(steps):
        for op, size in STEP:
            group.run(op, size)
    return group


@pytest.mark.parametrize("skipped", range(len(STEP)))
def test_a_rank_that_skipped_a_call_detects_it_itself(skipped):
    group = trained()
    calls = [*STEP, *STEP]
    for op, size in calls[:skipped]:
        group.run(op, size)
    op, size = calls[skipped + 1]

    attribution = attribute_failure(1, group.issue(op, size))

    assert attribution is not None
    assert attribution.expected == f"{STEP[skipped][0]} of {STEP[skipped][1]} bytes (float32)"
    assert attribution.message().startswith(
        "rank 1 diverged from the common sequence of collectives at call"
    )


def test_a_rank_that_issued_its_usual_call_has_not_diverged():
    group = trained()

    attribution = attribute_failure(1, group.issue(*STEP[0]))

    assert attribution is not None
    assert attribution.expected is None
    assert "another rank died, or diverged" in attribution.message()


def test_of_two_ranks_the_other_is_named():
    group = FakeGroup((3, 5))
    for _ in range(5):
        group.run()

    attribution = attribute_failure(3, group.issue())

    assert attribution is not None
    assert "rank 5 died, or diverged" in attribution.message()


def test_a_call_that_was_never_issued_before_is_no_divergence():
    group = trained()

    attribution = attribute_failure(
        1, group.issue("barrier", 0)
    )  # the first checkpoint, in which a peer dies

    assert attribution is not None
    assert attribution.expected is None
    assert attribution.message() == (
        "barrier failed on rank 1 at call 16 of group dp: another rank died, or diverged from the "
        "common sequence of collectives there"
    )


def test_calls_issued_after_the_one_that_failed_do_not_matter():
    group = trained()
    failed = group.issue(*STEP[0])
    group.issue(*STEP[2])

    attribution = attribute_failure(1, failed)

    assert attribution is not None
    assert (attribution.sequence, attribution.expected) == (failed.sequence, None)


@pytest.mark.parametrize(("size", "mismatches"), [(4, 0), (4000, 1)])
def test_only_a_divergence_counts_as_a_mismatch(size, mismatches):
    group, recorder, thread = trained(), Recorder(), FakeThread()
    analyzer = CollectiveErrorAnalyzer(1, recorder, thread)

    failed = group.issue("all_reduce", size)
    analyzer.analyze(failed)
    analyzer.analyze(failed)  # an error that follows from the first

    assert recorder.snapshot().total(COLLECTIVE_MISMATCHES) == mismatches
    assert thread.num_reports == 1


def test_the_message_of_a_divergence_names_what_was_issued_and_what_was_usual() -> None:
    group = trained()

    attribution = attribute_failure(1, group.issue("all_gather", 96))

    assert attribution is not None
    assert attribution.message() == (
        "rank 1 diverged from the common sequence of collectives at call 16 of group dp: issued "
        "all_gather of 96 bytes (float32), where all_reduce of 4 bytes (float32) has followed so "
        "far; it skipped or added a collective"
    )


def test_the_message_of_a_peer_s_failure_names_the_call_in_its_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = FakeGroup((3, 5), role="tp")
    for _ in range(5):
        group.run("barrier", 0)
    analyzer = CollectiveErrorAnalyzer(3, Recorder(), FakeThread())

    analyzer.analyze(group.issue("barrier", 0))

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "ERROR",
            "barrier failed on rank 3 at call 6 of group tp, in its usual order: rank 5 died, or "
            "diverged from the common sequence of collectives there",
        )
    ]


def test_the_first_call_of_a_group_cannot_be_attributed() -> None:
    group, thread = FakeGroup((0, 1)), FakeThread()
    first = group.issue()

    assert attribute_failure(0, first) is None
    CollectiveErrorAnalyzer(0, Recorder(), thread).analyze(first)
    assert thread.num_reports == 1
    assert attribute_failure(0, group.issue()) is not None


def test_a_message_and_a_call_that_is_no_longer_recorded_cannot_be_attributed() -> None:
    group = trained()
    message = group.issue("send")
    gone = group.run()
    group.rank_set.recent.remove(gone)

    assert attribute_failure(1, message) is None
    assert attribute_failure(1, gone) is None


@pytest.mark.parametrize(
    ("before", "times", "has_diverged"), [(1, 3, False), (2, 2, False), (2, 3, True)]
)
def test_two_calls_in_an_order_seen_three_times_must_come_before_a_divergence(
    before: int, times: int, has_diverged: bool
) -> None:
    group = FakeGroup((0, 1, 2))
    known = [("all_reduce", size) for size in (8, 16)][-before:]
    step = [*known, ("all_gather", 96), ("reduce", 4)]
    for op, size in [("broadcast", 1), *times * step, *known]:
        group.run(op, size)

    attribution = attribute_failure(1, group.issue("reduce", 4))

    assert attribution is not None
    expected = "all_gather of 96 bytes (float32)" if has_diverged else None
    assert attribution.expected == expected


@pytest.mark.parametrize("phase", ["eval", "other"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_rank_whose_peer_dies_in_an_evaluation_has_not_diverged(
    is_known: bool, phase: str
) -> None:
    group, evaluation = FakeGroup((0, 1)), [("all_reduce", 4), ("all_reduce", 4)]
    group.run("broadcast", 400)
    if is_known:  # before training
        for op, size in evaluation:
            group.run(op, size, phase=phase)
    for _ in range(100):
        for op, size in STEP:
            group.run(op, size)

    group.run(*evaluation[0], phase=phase)
    attribution = attribute_failure(0, group.issue(*evaluation[1], phase=phase))

    assert attribution is not None
    assert attribution.expected is None
    assert "rank 1 died, or diverged" in attribution.message()


@pytest.mark.parametrize("num_sizes", [2, 4, 25])
def test_a_rank_whose_peer_dies_has_not_diverged_if_the_sizes_of_calls_change(
    num_sizes: int,
) -> None:
    named = 0
    for seed in range(50):
        chance, group = random.Random(seed), FakeGroup((0, 1), role="tp")
        for _ in range(150):
            size = 4096 * chance.randint(1, num_sizes)  # of the longest sample of the batch
            for _ in range(8):
                group.run("all_reduce", size)
        attribution = attribute_failure(0, group.issue("all_reduce", 4096))
        assert attribution is not None
        named += attribution.expected is not None

    assert named == 0
