"""Tests of the view of an active run: figures of several ranks, and ranks that do not answer.

Covers `live_run.py` and `recent_seconds.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from live_runs import RUN_ID
from served_ranks import ServedRank, two_ranks

from zerowatch.metrics.catalog import communication, overhead, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.top import panels
from zerowatch.runtime.top.http_client import Access, HttpClient, NoAnswerError
from zerowatch.runtime.top.live_run import MAX_SCRAPES, LiveRun, Target
from zerowatch.runtime.top.recent_seconds import RecentSeconds
from zerowatch.runtime.top.run_source import ServedRun
from zerowatch.runtime.top.run_view import RunView


def read(rank: ServedRank) -> RunView:
    return ServedRun(rank.targets_url, HttpClient(Access()).get).read()


def test_phases_and_causes_are_means_over_all_ranks() -> None:
    with two_ranks() as ranks:
        view = read(ranks[0])

    assert view.run_id == RUN_ID
    assert view.status == "training"
    assert view.period == "since the start"
    phases = {share.name: (share.ratio, share.seconds_per_step) for share in view.phases}
    assert phases["backward"] == pytest.approx((0.6, 0.3))
    assert view.exposed is not None and view.exposed.ratio == pytest.approx(0.2)
    assert [cause.name for cause in view.causes][:2] == ["imbalance", "bandwidth"]
    assert view.causes[0].ratio == pytest.approx(0.15)
    assert sum(cause.ratio for cause in view.causes) == pytest.approx(view.exposed.ratio)


@pytest.mark.parametrize(
    ("role", "named"), [("dp", "tokens/s"), ("pp", "tokens/s"), ("tp", None), ("sp", None)]
)
def test_work_that_ranks_share_has_no_sum_over_ranks(role: str, named: str | None) -> None:
    with two_ranks() as ranks:
        ranks[0].recorder.set(training.WORLD_SIZE, 2)
        ranks[0].recorder.add(communication.COMM_SECONDS, 1.0, role)
        for rank in ranks:
            rank.recorder.add(training.SAMPLES, 160)
            rank.recorder.add(training.TOKENS, 20_480)
        facts = dict(read(ranks[0]).facts)

    assert next((name for name in facts if name.endswith("s/s")), None) == named


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_rank_whose_counters_are_no_numbers_has_no_figures(value: float) -> None:
    with two_ranks() as ranks:
        ranks[1].recorder.add(training.STEPS, value)
        first, second = read(ranks[0]).ranks

    assert (first.state, second.state) == ("running", "no answer")
    assert second.note == "its counters are no numbers"


def test_each_rank_has_its_own_figures() -> None:
    with two_ranks() as ranks:
        first, second = read(ranks[0]).ranks

    assert (first.rank, first.node, first.state, first.steps) == (0, "node-0", "running", 20)
    assert first.step_seconds == 0.5
    assert first.exposed_ratio == pytest.approx(0.2)
    assert first.wait_ratio == pytest.approx(0.1)
    assert first.memory_ratio == pytest.approx(0.325)
    assert first.risk_ratio == pytest.approx(0.02)
    assert (second.straggler_phase, second.straggler_score) == ("backward", 0.21)
    assert second.risk_ratio == pytest.approx(0.4)


def test_memory_is_that_of_the_rank_with_the_highest_risk() -> None:
    with two_ranks() as ranks:
        (row,) = read(ranks[0]).memory

    assert row.device == "cpu rank 1"
    assert row.risk_ratio == pytest.approx(0.4)
    assert row.limit_bytes == 2e9
    assert list(row.categories) == [
        "baseline", "optimizer", "activations", "parameters", "gradients",
    ]  # fmt: skip


def test_a_straggler_is_among_the_alerts() -> None:
    with two_ranks() as ranks:
        alerts = {alert.name: alert.text for alert in read(ranks[0]).alerts}

    assert "rank 1" in alerts["ZerowatchStragglerRank"]
    assert "21%" in alerts["ZerowatchStragglerRank"]


def test_a_rank_that_does_not_answer_is_named_with_the_reason() -> None:
    with two_ranks(second_answers=False) as ranks:
        view = read(ranks[0])

    assert [rank.state for rank in view.ranks] == ["running", "no answer"]
    assert "refused" in view.ranks[1].note
    assert view.ranks[1].steps is None
    assert any(a.severity == "critical" and "rank 1" in a.text for a in view.alerts)
    assert not any(name in ("tokens/s", "samples/s") for name, _ in view.facts)


def test_a_dead_monitoring_thread_and_lost_records_of_another_rank_are_among_the_alerts() -> None:
    with two_ranks() as ranks:
        ranks[1].recorder.set(overhead.DEAD_THREADS, 1)
        ranks[1].recorder.add(overhead.DROPPED_RECORDS, 437, "run_log")
        alerts = {alert.name: alert.text for alert in read(ranks[0]).alerts}

    assert "thread of rank 1 has ended" in alerts["ZerowatchMonitoringDead"]
    assert "rank 1 has lost 437 records" in alerts["ZerowatchRecordsLost"]


def test_a_rank_that_stops_to_answer_keeps_the_age_of_its_last_answer() -> None:
    clock = FakeClock()
    with two_ranks() as ranks:
        targets = [
            Target(rank=n, node="", url=f"http://{rank.address}/metrics")
            for n, rank in enumerate(ranks)
        ]
        run = LiveRun(RUN_ID, "", HttpClient(Access()).get, now=clock)
        run.read(targets)
        ranks[1].close()
        clock.seconds += 34

        view = run.read(targets)

    assert view.ranks[1].state == "no answer"
    assert view.ranks[1].age_seconds == pytest.approx(34)


def test_a_run_that_ends_keeps_its_last_values() -> None:
    with two_ranks() as ranks:
        source = ServedRun(ranks[0].targets_url, HttpClient(Access()).get)
        source.read()
        for rank in ranks:
            rank.recorder.set(training.RUN_ACTIVE, 0)
            rank.recorder.set_info(training.RUN_END_INFO, "completed")
            rank.server.wait_for_final_scrape()  # the next scrape renders the metrics again
        source.read()
        for rank in ranks:
            rank.close()

        view = source.read()

    assert view.status == "completed"
    assert "completed  2 ranks | last values" in panels.header(view, 200, view.at).plain
    assert [rank.state for rank in view.ranks] == ["ended", "ended"]
    assert view.ranks[0].steps == 20
    assert not view.notes


def test_an_address_at_which_another_program_serves_is_no_rank() -> None:
    run = LiveRun(RUN_ID, "", lambda url: b"up 1\n")

    view = run.read([Target(rank=0, node="", url="http://host:1/metrics")])

    assert view.status == "no answer"
    assert view.ranks[0].note == "its answer has no metrics of a run"


def test_text_that_is_not_of_prometheus_is_no_answer() -> None:
    run = LiveRun(RUN_ID, "", lambda url: b'zerowatch_run_active{rank="0} 1\n')

    view = run.read([Target(rank=0, node="", url="http://host:1/metrics")])

    assert view.ranks[0].state == "no answer"


def test_of_many_ranks_all_are_scraped_in_turn_and_rank_0_each_time() -> None:
    scraped: list[str] = []
    clock = FakeClock()

    def get(url: str) -> bytes:
        scraped.append(url)
        return b'zerowatch_run_active{rank="0"} 1.0\n'

    run = LiveRun(RUN_ID, "", get, now=clock)
    targets = [Target(rank=rank, node="", url=str(rank)) for rank in range(3 * MAX_SCRAPES)]

    for _ in range(4):
        run.read(targets)
        clock.seconds += 2

    assert len(scraped) == 4 * MAX_SCRAPES
    assert set(scraped) == {target.url for target in targets}
    assert scraped.count("0") == 4


def test_ranks_without_a_target_are_counted() -> None:
    with two_ranks() as ranks:
        ranks[0].listed.pop()

        view = read(ranks[0])

    assert view.notes == ["1 of 2 ranks are not among the targets"]


def test_figures_are_those_of_the_last_minute_once_enough_of_it_was_seen() -> None:
    recorder, recent = Recorder(), RecentSeconds()

    for now in range(0, 100, 2):
        seconds = 0.4 if now < 40 else 0.1
        recorder.add(training.STEPS, 2)
        recorder.add(training.PHASE_SECONDS, 2.0, "forward")
        recorder.add(communication.COMM_EXPOSED_SECONDS, 2 * seconds, "dp")
        recent.add(recorder.snapshot(), now=float(now))
        spent = recent.spent()
        assert spent.is_whole == (now < 20)

    assert spent.period_seconds == 60
    assert spent.steps == 60
    assert spent.exposed == pytest.approx(60 * 0.1, abs=0.7)


def test_a_restart_begins_the_minute_again() -> None:
    recent = RecentSeconds()
    for now, steps in ((0.0, 100), (60.0, 200), (62.0, 3)):
        recorder = Recorder()
        recorder.add(training.STEPS, steps)
        recent.add(recorder.snapshot(), now=now)

    assert recent.spent().is_whole
    assert recent.spent().steps == 3


def test_nothing_at_the_address_is_an_error_with_the_reason() -> None:
    source = ServedRun("http://127.0.0.1:9/targets", HttpClient(Access()).get)

    with pytest.raises(NoAnswerError, match=r"127\.0\.0\.1:9/targets: .*refused"):
        source.read()


def test_labels_of_a_rank_send_no_codes_to_the_terminal() -> None:
    with two_ranks() as ranks:
        view = read(ranks[0])
    slow = replace(view.ranks[1], straggler_score=0.5, straggler_phase="\x1b[2J")

    view = replace(view, ranks=[slow], status="\x1b[3J", facts=[("\x1b[4J", "\x1b[5J")])

    drawn = (
        panels.header(view, 200, view.at),
        panels.straggler_strip(view, 200),
        panels.ranks_rows(view, 200, "rank"),
    )
    assert not any("\x1b" in text.plain for text in drawn)
    assert [code in text.plain for code, text in zip(("[3J", "[2J", "[2J"), drawn, strict=True)]
