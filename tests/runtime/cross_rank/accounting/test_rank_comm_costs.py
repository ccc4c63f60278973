"""Tests of `RankCommCosts`: a rank's reports and costs, against sums computed by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fakes.accounted_rank import PATIENCE, AccountedRank
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.labels import NON_TRAINING_PHASES
from zerowatch.runtime.collectives.groups import RECENT_CALLS
from zerowatch.runtime.cross_rank.accounting import call_sequence as call_sequence
from zerowatch.runtime.cross_rank.accounting.call_sequence import CallSequence
from zerowatch.runtime.cross_rank.accounting.comm_costs import MAX_MESSAGE_SIZES
from zerowatch.runtime.cross_rank.accounting.rank_comm_costs import LOGGED_FAILURES
from zerowatch.runtime.cross_rank.exchange.rank_messages import INEXACT, SequenceHash, signature


@pytest.fixture
def rank() -> AccountedRank:
    return AccountedRank(FakeGroup((0, 1)))


def test_a_wait_is_what_the_quickest_member_did_not_need(rank: AccountedRank) -> None:
    for milliseconds in (10, 4):
        rank.group.run(ms=milliseconds)
    rank.report()

    rank.match(1, 3, 4)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(14)
    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(7, abs=1e-5)
    assert rank.value(communication.COMM_TRANSFER_SECONDS, "dp") == pytest.approx(7, abs=1e-5)


@pytest.mark.parametrize(("waited", "is_pending"), [(PATIENCE, True), (PATIENCE + 1, False)])
def test_excused_time_is_added_to_the_wait_for_a_result(
    rank: AccountedRank, waited: float, is_pending: bool
) -> None:
    rank.group.run(ms=4)
    rank.report()
    rank.clock.seconds += 50
    rank.accounting.excuse(50 - 0.5)
    rank.clock.seconds += waited - 1

    rank.expire(PATIENCE)

    assert rank.accounting.has_pending() is is_pending


def test_a_rank_that_waits_no_longer_adds_excused_calls_too(rank: AccountedRank) -> None:
    rank.group.run(ms=4)
    rank.clock.seconds += 3  # the store was slow before the report
    rank.report()
    rank.clock.seconds += 1
    rank.accounting.excuse(4)

    rank.expire(0.0)

    assert not rank.accounting.has_pending()
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(4)


def test_causes_of_a_call_follow_the_formula() -> None:
    rank = AccountedRank(FakeGroup((0, 1)), volume_ratio=2.0)
    for _ in range(3):  # one size of 2 ms: that is the base latency from then on
        rank.group.run(ms=2)
    rank.report()
    rank.match(1, 2, 2, 2)
    before = rank.causes()
    rank.group.run(ms=16, exposed_ms=14)
    rank.report()
    rank.match(4, 10)

    after = rank.causes()

    # Of 16 ms 6 were waiting; of the 14 exposed, 10 are transfer: 2 latency, half of 8 redundant.
    assert {name: after[name] - before[name] for name in after} == pytest.approx(
        {"imbalance": 4, "latency": 2, "redundancy": 4, "bandwidth": 4}, abs=1e-4
    )


def test_causes_add_up_to_what_was_exposed(seed: int) -> None:
    chance = random.Random(seed)
    rank = AccountedRank(FakeGroup((0, 1, 2)), volume_ratio=1.5)
    ops = ("all_reduce", "all_gather", "broadcast", "send", "recv", "reduce", "barrier")
    for _ in range(40):
        for _ in range(20):
            milliseconds = chance.expovariate(0.2)
            size = chance.choice((8, 4096, 10**6))
            call = rank.group.run(
                chance.choice(ops), size, milliseconds, milliseconds * chance.choice((0, 0.5, 1))
            )
            if chance.random() < 0.1:
                call.timed = False
                call.settle()
        report = rank.report()
        if chance.random() < 0.8:
            least = report.durations * chance.random() * 1000
            rank.match(report.first_timed, *least.tolist())
        rank.clock.seconds += 5
        rank.expire(PATIENCE)
        exposed = rank.value(communication.COMM_EXPOSED_SECONDS, "dp")
        causes = rank.causes()

        assert min(causes.values()) >= 0
        assert sum(causes.values()) == pytest.approx(exposed, rel=1e-9)


def test_exposed_and_causes_are_published_together(rank: AccountedRank) -> None:
    rank.group.run(ms=10)
    rank.report()

    before = rank.value(communication.COMM_EXPOSED_SECONDS, "dp"), sum(rank.causes().values())
    rank.match(1, 10)
    after = rank.value(communication.COMM_EXPOSED_SECONDS, "dp"), sum(rank.causes().values())

    assert before == (0, 0)
    assert after == pytest.approx((10, 10))


@pytest.mark.parametrize("phase", NON_TRAINING_PHASES)
def test_calls_of_evaluations_and_checkpoints_block_no_training(
    rank: AccountedRank, phase: str
) -> None:
    rank.group.run(ms=3)
    rank.group.run(ms=100, phase=phase)
    rank.report()

    rank.match(1, 2, 60)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(3)
    assert sum(rank.causes().values()) == pytest.approx(3, abs=1e-4)
    # The others of its seconds would be more than the training time.
    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(1, abs=1e-4)
    assert rank.value(communication.COMM_TRANSFER_SECONDS, "dp") == pytest.approx(2, abs=1e-4)


def test_a_call_without_a_result_in_time_is_estimated_and_counted_as_unmatched(
    rank: AccountedRank,
) -> None:
    rank.group.run(ms=10)
    rank.report()
    rank.clock.seconds += PATIENCE - 1
    rank.expire(PATIENCE)
    too_early = rank.value(communication.COMM_EXPOSED_SECONDS, "dp")
    rank.clock.seconds += 1
    rank.expire(PATIENCE)

    assert too_early == 0
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(10)
    assert rank.accounting.unmatched == 1
    assert not rank.accounting.has_pending()


def test_a_late_result_changes_nothing(rank: AccountedRank) -> None:
    rank.group.run(ms=10)
    rank.report()
    rank.clock.seconds += PATIENCE
    rank.expire(PATIENCE)

    rank.match(1, 2)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(10)
    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == 0


def test_without_patience_the_rest_is_counted_and_is_no_failure(rank: AccountedRank) -> None:
    rank.group.run(ms=10)
    rank.report()

    rank.expire(0.0)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(10)
    assert rank.accounting.unmatched == 0


def test_a_result_that_starts_later_makes_the_calls_before_it_estimated(
    rank: AccountedRank,
) -> None:
    for _ in range(3):
        rank.group.run(ms=10)
    rank.report()

    rank.match(3, 4)

    # What the third shows of the link, 4 ms, explains the two before as well.
    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(18, abs=1e-5)
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(30)
    assert not rank.accounting.has_pending()


def test_messages_wait_for_what_the_quickest_of_their_size_did_not_need(
    rank: AccountedRank,
) -> None:
    for milliseconds in (5, 5, 5):
        rank.group.run("send", 1000, milliseconds)
        rank.group.run("send", 100_000, 4 * milliseconds)
    rank.report()
    rank.value(communication.COMM_WAIT_SECONDS, "dp")
    rank.group.run("send", 100_000, 50)
    rank.report()

    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(30)
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(125)


def test_messages_of_ever_new_sizes_do_not_accumulate(rank: AccountedRank) -> None:
    for size in range(10 * MAX_MESSAGE_SIZES):
        rank.group.run("send", 1000 + size, 1)
    rank.report()

    (costs,) = rank.accounting._states[rank.group.rank_set].costs.values()
    assert len(costs._messages) == MAX_MESSAGE_SIZES


def test_a_rooted_call_waits_for_what_the_link_does_not_explain(rank: AccountedRank) -> None:
    for size, milliseconds in ((1_000, 2), (1_000_000, 10)):
        for _ in range(3):
            rank.group.run("all_gather", size, milliseconds)
    rank.report()
    rank.match(1, 2, 2, 2, 10, 10, 10)
    rank.value(communication.COMM_WAIT_SECONDS, "dp")
    rank.group.run("broadcast", 1_000_000, 40)
    rank.report()
    rank.match(7, 39)

    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(30, rel=0.01)


def test_publishing_often_does_not_make_a_bandwidth_a_sustained_one(
    rank: AccountedRank,
) -> None:
    for size, milliseconds in ((1_000, 2), (1_000_000, 10)):
        rank.group.run("all_gather", size, milliseconds)
    rank.report()
    rank.match(1, 2, 10)

    best = [rank.value(communication.COMM_LINK_BEST_BANDWIDTH, "dp") for _ in range(5)]

    assert best == [0.0] * 5


def test_a_group_of_one_reports_nothing_and_all_of_it_is_transfer() -> None:
    rank = AccountedRank(FakeGroup((0,)))
    rank.group.run(ms=3)

    report = rank.report()

    assert report is None
    assert rank.value(communication.COMM_TRANSFER_SECONDS, "dp") == pytest.approx(3)
    assert not rank.accounting.has_pending()


def test_two_backends_of_the_same_ranks_have_links_of_their_own() -> None:
    fast = FakeGroup((0, 1), backend="nccl")
    slow = FakeGroup((0, 1), role="world", backend="gloo", rank_set=fast.rank_set)
    rank = AccountedRank(fast)
    for size in (1_000_000, 100_000_000):
        for group, bandwidth in ((fast, 1e11), (slow, 1e8)):
            group.run("all_gather", size, 1000 * size / 2 / bandwidth)
    report = rank.report()
    rank.match(1, *(1000 * report.durations).tolist())

    bandwidth = rank.value(communication.COMM_LINK_BANDWIDTH, fast.rank_set.role) / 1000

    assert bandwidth == pytest.approx(1e11, rel=0.01)


def test_calls_from_before_the_watch_are_not_reported() -> None:
    group = FakeGroup((0, 1))
    group.run()
    sequence = CallSequence(group.rank_set, from_now=True)
    group.run(size=8)

    report = sequence.drain_report()

    assert (report.first_issued, report.first_timed, report.prefix_hash) == (
        2,
        2,
        SequenceHash(since=2, crc=0),
    )
    assert sequence.names_in(report) == {
        signature("all_reduce", "float32", 8): "all_reduce of 8 bytes (float32)"
    }


def test_a_call_in_flight_is_reported_as_issued_and_later_with_its_duration() -> None:
    group = FakeGroup((0, 1))
    sequence = CallSequence(group.rank_set, from_now=False)
    group.run(ms=1)
    waiting = group.issue("barrier")
    first = sequence.drain_report()
    group.settle(waiting, 5)
    second = sequence.drain_report()

    assert (len(first.signatures), first.durations.tolist()) == (2, [pytest.approx(0.001)])
    assert (second.first_issued, len(second.signatures)) == (3, 0)
    assert (second.first_timed, second.durations.tolist()) == (2, [pytest.approx(0.005)])


def test_a_call_that_was_not_timed_is_reported_as_such(rank: AccountedRank) -> None:
    call = rank.group.issue()
    call.timed = False
    call.settle()

    assert np.isnan(rank.report().durations).tolist() == [True]


def test_messages_are_not_numbered(rank: AccountedRank) -> None:
    rank.group.run("send")
    rank.group.run("all_reduce")

    report = rank.report()

    assert (report.first_issued, len(report.signatures), len(report.durations)) == (1, 1, 1)


def test_ranks_may_give_an_all_to_all_different_sizes(rank: AccountedRank) -> None:
    for size in range(50):
        rank.group.run("all_to_all", size)

    assert len(set(rank.report().signatures.tolist())) == 1


def test_calls_lost_because_they_were_too_many_are_counted_and_numbers_stay_right() -> None:
    rank = AccountedRank(FakeGroup((0, 1)))
    open_call = rank.group.issue()
    rank.report()
    for _ in range(RECENT_CALLS + 10):
        rank.group.run()
    rank.group.settle(open_call, 1)
    before_the_gap, after_it = rank.report(), rank.report()
    rank.expire(PATIENCE)

    assert (before_the_gap.first_issued, before_the_gap.prefix_hash) == (12, None)
    assert (before_the_gap.first_timed, len(before_the_gap.durations)) == (1, 1)
    assert (after_it.first_timed, len(after_it.durations)) == (12, RECENT_CALLS)
    assert rank.accounting.unmatched == 1


def test_durations_on_both_sides_of_a_gap_are_not_one_report() -> None:
    rank = AccountedRank(FakeGroup((0, 1)))
    open_call = rank.group.issue()
    rank.report()
    for _ in range(RECENT_CALLS):
        rank.group.run()
    for _ in range(4):  # lost, as the others' record is full
        rank.group.rank_set.recent.popleft()
    rank.group.settle(open_call, 1)

    before, after = rank.report(), rank.report()

    assert (before.first_timed, len(before.durations)) == (1, 1)
    assert (after.first_timed, len(after.durations)) == (6, RECENT_CALLS - 4)


def test_a_call_that_never_settles_does_not_block_the_others() -> None:
    group = FakeGroup((0, 1))
    sequence = CallSequence(group.rank_set, from_now=False)
    group.issue()
    for _ in range(3):
        for _ in range(RECENT_CALLS // 2):
            group.run()
        sequence.drain_report()
    group.run()

    report = sequence.drain_report()

    assert report.durations.tolist() == [pytest.approx(0.001)]
    assert len(sequence._in_flight) == 0


def test_ever_new_sizes_do_not_accumulate_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_sequence, "MAX_SIGNATURES", 10)
    group = FakeGroup((0, 1))
    sequence = CallSequence(group.rank_set, from_now=False)
    for size in range(100):
        group.run(size=4 * size)
        report = sequence.drain_report()
        assert len(sequence.names_in(report)) == 1

    assert len(sequence.names) <= 11


def test_only_own_collectives_count_as_own(rank: AccountedRank) -> None:
    rank.group.run(ms=10)
    rank.report()

    rank.match(1, 3)

    assert communication.COMM_OWN_EXPOSED_SECONDS not in rank.recorder.snapshot().values


def test_own_collectives_of_unknown_wait_are_own_too(rank: AccountedRank) -> None:
    rank.group.role = "zerowatch"
    rank.group.run("all_gather", 80, ms=10)
    rank.report()

    rank.clock.seconds += 2 * PATIENCE
    rank.expire(PATIENCE)

    assert rank.value(communication.COMM_OWN_EXPOSED_SECONDS, "backward") == pytest.approx(10)


def test_own_collectives_have_causes_and_say_nothing_of_the_link(rank: AccountedRank) -> None:
    rank.group.role = "zerowatch"
    for milliseconds in (10, 4):
        rank.group.run("all_gather", 80, ms=milliseconds)
    rank.report()

    rank.match(1, 3, 4)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "zerowatch") == pytest.approx(14)
    assert rank.value(communication.COMM_OWN_EXPOSED_SECONDS, "backward") == pytest.approx(14)
    assert rank.causes() == pytest.approx(
        {"imbalance": 7, "latency": 7, "redundancy": 0, "bandwidth": 0}, abs=1e-4
    )
    assert communication.COMM_LINK_LATENCY not in rank.recorder.snapshot().values


def run_on_device(
    rank: AccountedRank, ms: float, exposed_ms: float, *, step: int = 0, is_bound: bool = False
) -> None:
    call = rank.group.issue()
    call.start_event, call.is_bound = object(), is_bound
    rank.group.settle(call, ms, exposed_ms, batch=step)


def wait_of_bound_call(rank: AccountedRank) -> float:
    """Return the milliseconds of wait that a call with only an upper bound adds."""
    before = rank.value(communication.COMM_WAIT_SECONDS, "dp")
    run_on_device(rank, 90, 5, is_bound=True)
    rank.match(rank.report().first_timed, 1000 * INEXACT)
    return rank.value(communication.COMM_WAIT_SECONDS, "dp") - before


def sample(rank: AccountedRank, step: int, *waits_ms: float) -> None:
    """Run a sampled step with calls of 1 ms, besides these waits."""
    for wait_ms in waits_ms:
        run_on_device(rank, wait_ms + 1, 1, step=step)
    rank.match(rank.report().first_timed, *(1.0 for _ in waits_ms))


def test_a_call_with_a_bound_counts_like_the_mean_of_exact_calls(rank: AccountedRank) -> None:
    run_on_device(rank, 50, 8, step=1)
    run_on_device(rank, 10, 8, step=2)
    run_on_device(rank, 6, 6, step=2)
    run_on_device(rank, 90, 5, step=3, is_bound=True)  # compute reached its wait late
    report = rank.report()

    rank.match(1, 4, 4, 4, report.durations[3])

    assert report.durations[3] == INEXACT
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(8 + 8 + 6 + 5)
    wait = rank.value(communication.COMM_WAIT_SECONDS, "dp")
    assert wait == pytest.approx(46 + 6 + 2 + 4, abs=1e-4)
    assert rank.value(communication.COMM_TRANSFER_SECONDS, "dp") == pytest.approx(16, abs=1e-4)
    assert sum(rank.causes().values()) == pytest.approx(8 + 8 + 6 + 5)
    assert rank.accounting.unmatched == 0


def test_a_call_with_a_bound_on_another_rank_is_not_an_exact_one(rank: AccountedRank) -> None:
    run_on_device(rank, 10, 8, step=1)
    run_on_device(rank, 10, 8, step=2)
    run_on_device(rank, 30, 8, step=3)
    rank.report()

    rank.match(1, 4, 4, 1000 * INEXACT)

    assert rank.value(communication.COMM_WAIT_SECONDS, "dp") == pytest.approx(6 + 6 + 6, abs=1e-4)
    assert rank.accounting.unmatched == 0


def test_the_wait_of_the_first_step_counts_once_and_in_no_other_step(rank: AccountedRank) -> None:
    sample(rank, 1, 20_000)

    before_the_second_sample = wait_of_bound_call(rank)
    sample(rank, 8, 3)

    assert before_the_second_sample == 0
    assert wait_of_bound_call(rank) == pytest.approx(3, abs=0.01)


def test_a_new_wait_counts_fully_after_four_sampled_steps(rank: AccountedRank) -> None:
    for step in range(1, 300):
        sample(rank, step, 1)
    sample(rank, 300, 41)
    after_one = wait_of_bound_call(rank)
    for step in range(301, 304):
        sample(rank, step, 41)

    assert after_one == pytest.approx(11, abs=0.01)
    assert wait_of_bound_call(rank) == pytest.approx(41, abs=0.01)


def test_each_sampled_step_counts_alike_whatever_its_number_of_calls(rank: AccountedRank) -> None:
    sample(rank, 1, 0)
    sample(rank, 2, *[2] * 30)
    sample(rank, 3, 6)

    assert wait_of_bound_call(rank) == pytest.approx(4, abs=0.01)


def test_calls_with_bounds_alone_have_no_wait_and_no_link(rank: AccountedRank) -> None:
    run_on_device(rank, 90, 5, is_bound=True)
    rank.report()

    rank.match(1, 1000 * INEXACT)

    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(5)
    snapshot = rank.recorder.snapshot()
    for absent in (communication.COMM_WAIT_SECONDS, communication.COMM_LINK_LATENCY):
        assert snapshot.value(absent, "dp") is None


def test_the_gauges_of_a_link_are_those_of_the_fit(rank: AccountedRank) -> None:
    for number in range(3):  # an all-gather of two ranks sends half of its bytes
        for _ in range(5):
            rank.group.run("all_gather", 2_000, 2)
        rank.group.run("all_gather", 2_000_000, 10)
        rank.report()
        rank.match(1 + 6 * number, 2, 2, 2, 2, 2, 10)
        with rank.recorder.commit():
            rank.accounting.publish()

    snapshot = rank.recorder.snapshot()
    seconds_per_byte = 8e-3 / 999_000
    found = {
        spec: snapshot.value(spec, "dp")
        for spec in (
            communication.COMM_LINK_LATENCY,
            communication.COMM_LINK_BANDWIDTH,
            communication.COMM_LINK_BEST_BANDWIDTH,
        )
    }
    assert found == pytest.approx(
        {
            communication.COMM_LINK_LATENCY: 2e-3 - 1_000 * seconds_per_byte,
            communication.COMM_LINK_BANDWIDTH: 1 / seconds_per_byte,
            communication.COMM_LINK_BEST_BANDWIDTH: 1 / seconds_per_byte,
        }
    )
    assert snapshot.values[communication.COMM_BUS_BANDWIDTH] == pytest.approx(
        {("all_gather", "dp"): 1e6 / 10e-3}
    )


def unmatched(rank: AccountedRank) -> float:
    return rank.value(communication.EXCHANGE_FAILURES, "unmatched") / 1000


def test_a_result_without_a_duration_of_the_first_call_is_a_failure(rank: AccountedRank) -> None:
    rank.group.run(ms=5)
    rank.report()

    rank.match(1, float("nan"))

    assert unmatched(rank) == 1
    assert rank.value(communication.COMM_EXPOSED_SECONDS, "dp") == pytest.approx(5)
    assert communication.COMM_WAIT_SECONDS not in rank.recorder.snapshot().values


@pytest.mark.parametrize(("seconds", "failures"), [(0.25, 0), (0.5, 1)])
def test_a_result_is_late_once_the_patience_is_over(
    rank: AccountedRank, seconds: float, failures: int
) -> None:
    rank.group.run(ms=5)
    rank.report()
    rank.clock.seconds += seconds

    rank.expire(0.5)

    assert unmatched(rank) == failures
    assert rank.accounting.has_pending() is (failures == 0)


def test_the_log_has_each_frequent_reason_for_unmatched_calls_once(
    rank: AccountedRank, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 2 * (LOGGED_FAILURES + 1) + 1):
        rank.group.run(ms=5)
        rank.report()
        if number % 2:
            rank.clock.seconds += 0.5
            rank.expire(0.5)
        else:
            rank.match(number, float("nan"))
        if number < 2 * LOGGED_FAILURES - 1:
            assert not caplog.messages

    assert unmatched(rank) == 2 * (LOGGED_FAILURES + 1)
    often = "calls of group dp are often not compared"
    assert caplog.messages == [
        f"{often}: no result came within 0.5 s",
        f"{often}: no rank has timed them, or the ranks have diverged",
    ]


def test_polls_between_reports_keep_calls_from_being_lost(rank: AccountedRank) -> None:
    for _ in range(2):
        for _ in range(RECENT_CALLS - 1):
            rank.group.run()
        rank.accounting.poll(is_compared=True)

    report = rank.report()
    rank.expire(PATIENCE)

    assert report is not None and len(report.durations) == 2 * RECENT_CALLS - 2
    assert unmatched(rank) == 0


def test_calls_of_a_group_of_one_are_counted_once() -> None:
    rank = AccountedRank(FakeGroup((0,)))
    rank.group.run(ms=3)

    for _ in range(3):
        rank.report()

    assert rank.value(communication.COMM_TRANSFER_SECONDS, "dp") == pytest.approx(3)


def test_the_number_of_the_last_call_is_known_for_each_group(rank: AccountedRank) -> None:
    for _ in range(3):
        rank.group.issue()

    assert rank.accounting.issued() == {rank.group.rank_set.key: 3}
