"""Tests of the view of an active run: figures of several ranks, and ranks that do not answer.

Covers `live_run.py` and `recent_seconds.py`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from live_runs import RUN_ID
from served_ranks import ServedRank, two_ranks

from zerowatch.metrics.catalog import communication, devices, memory, overhead, training, tuner
from zerowatch.metrics.exporters.detail import served
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder, Snapshot
from zerowatch.metrics.settings import Detail
from zerowatch.runtime.live_page.step_history import Point
from zerowatch.runtime.top import panels
from zerowatch.runtime.top.http_client import Access, HttpClient, NoAnswerError, Page
from zerowatch.runtime.top.live_run import (
    MAX_SCRAPES,
    LiveRun,
    Target,
    format_seconds,
    with_rest,
)
from zerowatch.runtime.top.recent_seconds import RecentSeconds, Spent, combined
from zerowatch.runtime.top.run_source import ServedRun
from zerowatch.runtime.top.run_view import (
    AlertView,
    MemoryView,
    RankView,
    RunView,
    Share,
    TunerView,
)


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


@pytest.mark.parametrize("detail", ["full", "lean"])
@pytest.mark.parametrize(
    ("shared", "named"),
    [((), "tokens/s"), (("samples",), "tokens/s"), (("samples", "tokens"), None)],
)
def test_work_that_ranks_share_has_no_sum_over_ranks(
    shared: Sequence[str], named: str | None, detail: Detail
) -> None:
    ranks = [full_rank(0), full_rank(1)]
    for work in shared:
        ranks[0].set(training.SHARED_WORK, 1, work)

    view = read_ranks(ranks, detail=detail)

    facts = dict(view.facts)
    assert [each.state for each in view.ranks] == ["running", "running"]
    assert (facts["steps"], facts["loss"]) == ("20", "2.5")
    assert next((name for name in facts if name.endswith("s/s")), None) == named
    assert view.exposed is not None


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


class Answers:
    """Stands in for the ranks: each has a recorder, or the reason why it does not answer."""

    def __init__(self, *ranks: Recorder | str) -> None:
        self.ranks, self.clock = list(ranks), FakeClock()
        self.asked: list[int] = []
        self.ahead_seconds = 0.0
        self.run = LiveRun(RUN_ID, "", self.get, now=self.clock, unix_now=self.unix_now)

    def unix_now(self) -> float:
        return 1e9 + self.clock()

    def get(self, url: str) -> Page:
        rank = self.ranks[int(url)]
        self.asked.append(int(url))
        if isinstance(rank, str):
            raise NoAnswerError(rank)
        body = exposition(rank.snapshot(), int(url), "")[1]
        return Page(body, self.unix_now() + self.ahead_seconds)

    def read(self) -> RunView:
        return self.run.read(
            [Target(rank=rank, node="node", url=str(rank)) for rank in range(len(self.ranks))]
        )


def rank_after(steps: int, *, is_active: bool = True, **phase_seconds: float) -> Recorder:
    recorder = Recorder()
    recorder.set(training.RUN_ACTIVE, is_active)
    recorder.add(training.STEPS, steps)
    for phase, seconds in phase_seconds.items():
        recorder.add(training.PHASE_SECONDS, seconds, phase)
    return recorder


def test_a_run_that_has_ended_is_shown_again_when_it_is_started_again() -> None:
    answers = Answers(rank_after(20, is_active=False))
    ended = answers.read()
    answers.ranks = ["connection refused"]
    closed = answers.read()
    answers.ranks = [rank_after(3)]

    early = answers.read()
    answers.clock.seconds += 15
    again = answers.read()

    assert [view.status for view in (ended, closed, early)] == ["ended"] * 3
    assert len(answers.asked) == 3  # not at once: the servers of most runs are gone for good
    assert (again.status, again.ranks[0].state, again.ranks[0].steps) == ("training", "running", 3)
    assert again.period == "since the start"


def test_a_rank_that_was_not_scraped_yet_is_neither_silent_nor_an_alert() -> None:
    answers = Answers(*(rank_after(5) for _ in range(MAX_SCRAPES + 2)))

    view = answers.read()

    assert [rank.state for rank in view.ranks[-3:]] == ["running", "not read yet", "not read yet"]
    assert view.alerts == []
    assert "66 ranks, 2 not read yet | live" in panels.header(view, 200, view.at).plain
    rows = panels.ranks_rows(view, 80, "exposed").plain.split("\n")
    assert rows[-2:] == ["  64 not read yet", "  65 not read yet"]
    assert {rank.state for rank in answers.read().ranks} == {"running"}


@pytest.mark.parametrize("ahead_seconds", [-360.0, -40.0, 0.0, 40.0, 360.0])
def test_ages_are_those_by_the_clock_of_the_rank(ahead_seconds: float) -> None:
    rank = rank_after(5)
    answers = Answers(rank)
    answers.ahead_seconds = ahead_seconds
    for spec in (overhead.WATCH_LAST_UPDATE_TIMESTAMP, training.LAST_ACTIVITY_TIMESTAMP):
        rank.set(spec, answers.unix_now() + ahead_seconds)

    fresh = answers.read()
    answers.clock.seconds += 301
    stale = answers.read()

    assert (fresh.status, fresh.alerts) == ("training", [])
    assert (stale.status, [alert.name for alert in stale.alerts]) == (
        "stalled", ["ZerowatchMetricsStale"]
    )  # fmt: skip


def test_an_address_at_which_another_program_serves_is_no_rank() -> None:
    run = LiveRun(RUN_ID, "", lambda url: Page(b"up 1\n"))

    view = run.read([Target(rank=0, node="", url="http://host:1/metrics")])

    assert view.status == "no answer"
    assert view.ranks[0].note == "its answer has no metrics of a run"


def test_text_that_is_not_of_prometheus_is_no_answer() -> None:
    run = LiveRun(RUN_ID, "", lambda url: Page(b'zerowatch_run_active{rank="0} 1\n'))

    view = run.read([Target(rank=0, node="", url="http://host:1/metrics")])

    assert view.ranks[0].state == "no answer"


def test_of_many_ranks_all_are_scraped_in_turn_and_rank_0_each_time() -> None:
    scraped: list[str] = []
    clock = FakeClock()

    def get(url: str) -> Page:
        scraped.append(url)
        return Page(b'zerowatch_run_active{rank="0"} 1.0\n')

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


def test_ranks_that_left_the_job_are_not_shown() -> None:
    with two_ranks() as ranks:
        source = ServedRun(ranks[0].targets_url, HttpClient(Access()).get)
        first = source.read()
        ranks[1].close()
        ranks[0].listed.pop()

        view = source.read()

    assert [rank.rank for rank in first.ranks] == [0, 1]
    assert [rank.rank for rank in view.ranks] == [0]
    assert not any("rank 1" in alert.text for alert in view.alerts)


@pytest.mark.parametrize("answer", [b"[]", b"damaged"])
def test_all_ranks_are_shown_while_their_list_is_empty_or_cannot_be_read(answer: bytes) -> None:
    with two_ranks() as ranks:
        get, lists = (
            HttpClient(Access()).get,
            [Page(json.dumps(ranks[0].targets()).encode()), Page(answer)],
        )
        source = ServedRun(
            ranks[0].targets_url,
            lambda url: lists.pop(0) if url.endswith("/targets") else get(url),
        )
        source.read()

        view = source.read()

    assert [rank.state for rank in view.ranks] == ["running", "running"]


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


@pytest.mark.parametrize("step_seconds", [2, 8, 30, 600])
def test_the_last_minute_of_slow_steps_is_that_of_ten_steps(step_seconds: int) -> None:
    recorder, recent = rank_after(45_000, forward=1e6), RecentSeconds()

    for now in range(0, 12 * step_seconds + 60, 2):
        if now % step_seconds == 0:
            recorder.add(training.STEPS, 1)
            recorder.add(training.PHASE_SECONDS, step_seconds * 1.0, "data")
        recent.add(recorder.snapshot(), now=float(now))

    spent = recent.spent()
    assert not spent.is_whole
    assert spent.steps == max(10, 60 / step_seconds)
    assert spent.phases == {"forward": 0.0, "data": spent.steps * step_seconds}
    assert 60 <= spent.period_seconds <= max(62, 11 * step_seconds)


class Counted(Snapshot):
    """A snapshot that can be counted: by a weak reference, which one with slots has not."""


def test_a_run_that_stalls_does_not_pile_up_scrapes() -> None:
    recorder, recent = rank_after(0), RecentSeconds()
    added: list[weakref.ref[Counted]] = []

    for now in range(0, 3600, 2):
        recorder.add(training.STEPS, now < 100)
        snapshot = Counted(values=recorder.snapshot().values, distributions={})
        added.append(weakref.ref(snapshot))
        recent.add(snapshot, now=float(now))

    assert sum(each() is not None for each in added) <= 40
    assert recent.spent().steps == 10


def test_shares_since_the_start_are_no_problem_of_now() -> None:
    rank = rank_after(1000, data=500.0, forward=500.0)
    rank.add(training.NONFINITE_LOSSES, 1)
    answers = Answers(rank)

    names = []
    for seconds in range(0, 40, 2):
        answers.clock.seconds = float(seconds)
        rank.add(training.STEPS, 1)
        rank.add(training.PHASE_SECONDS, 2.0, "data" if seconds > 2 else "forward")
        names.append([alert.name for alert in answers.read().alerts])

    assert names[:10] == [[]] * 10
    assert names[10:] == [["ZerowatchDataBound"]] * 10


def test_a_loss_that_is_not_finite_is_a_problem_from_the_next_reading_on() -> None:
    rank = rank_after(1000, forward=500.0)
    rank.add(training.NONFINITE_LOSSES, 1)
    answers = Answers(rank)
    before = answers.read()
    rank.add(training.STEPS, 1)
    rank.add(training.NONFINITE_LOSSES, 1)

    answers.clock.seconds += 2
    seen = answers.read()
    answers.clock.seconds += 290
    (late,) = answers.read().alerts
    answers.clock.seconds += 20
    past = answers.read()

    assert before.alerts == past.alerts == []
    assert [(alert.severity, alert.name) for alert in seen.alerts] == [
        ("critical", "ZerowatchLossNotFinite")
    ]
    assert "290 s ago" in late.text


@pytest.mark.parametrize(
    ("attempt", "steps", "forward"), [(0, 3, 70.0), (1, 30, 70.0), (0, 30, 27.0)]
)
def test_a_restart_begins_the_minute_again(attempt: int, steps: int, forward: float) -> None:
    first, second = rank_after(12, forward=66.0), rank_after(steps, forward=forward)
    for rank, number in ((first, 0), (second, attempt)):
        rank.set(training.RUN_ATTEMPT, number)
    recent = RecentSeconds()

    recent.add(first.snapshot(), now=0.0)
    recent.add(second.snapshot(), now=60.0)

    spent = recent.spent()
    assert (spent.is_whole, spent.steps, spent.phases) == (True, steps, {"forward": forward})


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
        panels.straggler_strip(view, 200, 2),
        panels.ranks_rows(view, 200, "rank"),
    )
    assert not any("\x1b" in text.plain for text in drawn)
    assert [code in text.plain for code, text in zip(("[3J", "[2J", "[2J"), drawn, strict=True)]


def full_rank(number: int, *, steps: int = 20) -> Recorder:
    """A rank of two, in which no two figures are equal."""
    recorder = Recorder()
    recorder.set(training.RUN_ACTIVE, 1)
    recorder.set(training.WORLD_SIZE, 2)
    info = ("night-7", "0.1.0", "2.9.0", "0.19.3", "nccl", "cuda", "3", "2")
    recorder.set_info(training.RUN_INFO, *info)
    recorder.set(training.RUN_ATTEMPT, 1)
    recorder.add(training.STEPS, steps)
    recorder.set(training.STEP_DURATION_QUANTILE, 0.5 + number, "0.5")
    recorder.set(training.STEP_DURATION_QUANTILE, 0.75, "0.99")
    recorder.add(training.SKIPPED_STEPS, 3)
    recorder.set(training.LOSS, 2.5)
    recorder.set(training.GRADIENT_NORM, 1.25)
    recorder.set(training.LEARNING_RATE, 1e-4)
    recorder.set(training.MFU, (0.25, 0.5)[number])
    recorder.add(training.SAMPLES, 160)
    recorder.add(training.TOKENS, (20_480, 10_240)[number])
    seconds = {"data": 0.5, "forward": 2.0, "backward": 5.5, "eval": 1.5, "checkpoint": 0.5}
    for phase, spent in seconds.items():
        recorder.add(training.PHASE_SECONDS, spent * (1 + number), phase)
    recorder.add(communication.COMM_SECONDS, 4.0, "dp")
    recorder.add(communication.COMM_EXPOSED_SECONDS, (1.6, 2.0)[number], "dp")
    recorder.add(communication.COMM_WAIT_SECONDS, (0.8, 0.4)[number], "dp")
    recorder.add(communication.COMM_CAUSE_SECONDS, 1.2, "latency")
    recorder.add(communication.COMM_CAUSE_SECONDS, 0.3 * number, "bandwidth")
    recorder.set(communication.STRAGGLER_SCORE, (0.01, 0.07)[number], "data")
    recorder.set(communication.STRAGGLER_SCORE, -0.02, "forward")
    for device, peak, limit in (("cpu", 1e9, 4e9), ("cuda:0", (6e9, 7e9)[number], 8e9)):
        recorder.set(memory.MEMORY_PEAK, peak, device, "allocated")
        recorder.set(memory.MEMORY_LIMIT, limit, device)
        recorder.set(devices.DEVICE_UTILIZATION, (0.95, 0.6 + number / 10)[device != "cpu"], device)
    recorder.set(memory.OOM_RISK, (0.301, 0.299)[number], "cuda:0")
    recorder.set(memory.MEMORY_PREDICTED_PEAK, 7.5e9, "cuda:0")
    recorder.set(memory.MEMORY_BASELINE, 2e9, "cuda:0")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 1e9, "cuda:0", "parameters")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 3e9, "cuda:0", "activations")
    recorder.set(tuner.TUNER_STATE, 1, "trial")
    recorder.set(tuner.TUNER_SYMPTOM, 0.2, "data_bound")
    recorder.set(tuner.TUNER_SYMPTOM, 0.3, "comm_bandwidth")
    recorder.set(tuner.TUNER_KNOB_VALUE, 50_000, "reduce_bucket_size")
    recorder.set(tuner.TUNER_GAIN, 0.07, "reduce_bucket_size")
    recorder.set(tuner.TUNER_KNOB_VALUE, 2.0, "num_workers")
    recorder.add(tuner.TUNER_DECISIONS, 2, "accepted")
    recorder.add(tuner.TUNER_DECISIONS, 1, "rolled_back")
    return recorder


def read_ranks(
    recorders: Sequence[Recorder],
    *,
    unix_now: float = 5000.0,
    notes: Sequence[str] = (),
    detail: Detail = "full",
) -> RunView:
    texts = [
        exposition(served(each.snapshot(), detail), rank, "")[1]
        for rank, each in enumerate(recorders)
    ]
    run = LiveRun(
        "night-7",
        "http://a:1/targets",
        lambda url: Page(texts[int(url)]),
        now=FakeClock(),
        unix_now=lambda: unix_now,
    )
    targets = [Target(rank=rank, node=f"node-{rank}", url=str(rank)) for rank in range(len(texts))]
    return run.read(targets, notes)


def share(name: str, seconds: float) -> Share:
    """A share of the two ranks: 40 steps of 24 s of training."""
    return Share(
        name=name, ratio=pytest.approx(seconds / 24), seconds_per_step=pytest.approx(seconds / 40)
    )


def test_the_view_of_an_active_run_has_the_figures_of_all_ranks() -> None:
    view = read_ranks([full_rank(0), full_rank(1)], notes=["other runs"])

    assert view == RunView(
        run_id="night-7",
        status="training",
        source="http://a:1/targets",
        is_live=True,
        at=5000.0,
        period="since the start",
        facts=[
            ("steps", "20"),
            ("step p50", "500 ms"),
            ("p99", "750 ms"),
            ("tokens/s", "2,048"),  # 30,720 tokens in 15 s of each rank
            ("loss", "2.5"),
            ("MFU", "37.5%"),
            ("grad norm", "1.25"),
            ("lr", "0.0001"),
            ("skipped", "3"),
            ("ZeRO", "3"),
            ("backend", "nccl"),
            ("attempt", "1"),
        ],
        phases=[
            share("data", 1.5),
            share("forward", 6.0),
            share("backward", 16.5),
            replace(share("eval", 4.5), ratio=pytest.approx(0.15)),  # of 30 s of wall time
            replace(share("checkpoint", 1.5), ratio=pytest.approx(0.05)),
        ],
        exposed=share("exposed", 3.6),
        causes=[
            share("latency", 2.4),
            share("bandwidth", 0.3),
            share("imbalance", 0.0),
            share("redundancy", 0.0),
            share("unknown", 0.9),
        ],
        memory=[
            MemoryView(
                device="cuda:0 rank 1",  # equal risks in whole percents, and more in use
                peak_bytes=7e9,
                limit_bytes=8e9,
                predicted_bytes=7.5e9,
                risk_ratio=0.299,
                categories={"activations": 3e9, "baseline": 2e9, "parameters": 1e9},
            ),
            MemoryView(
                device="cpu rank 0",
                peak_bytes=1e9,
                limit_bytes=4e9,
                predicted_bytes=None,
                risk_ratio=None,
                categories={},
            ),
        ],
        ranks=[
            RankView(
                rank=0,
                node="node-0",
                state="running",
                age_seconds=0.0,
                steps=20,
                step_seconds=0.5,
                exposed_ratio=pytest.approx(0.2),
                wait_ratio=pytest.approx(0.1),
                data_ratio=pytest.approx(0.0625),
                memory_ratio=0.75,
                risk_ratio=0.301,
                utilization_ratio=0.6,
                mfu_ratio=0.25,
                straggler_score=0.01,
                straggler_phase="data",
            ),
            RankView(
                rank=1,
                node="node-1",
                state="running",
                age_seconds=0.0,
                steps=20,
                step_seconds=1.5,
                exposed_ratio=pytest.approx(0.125),
                wait_ratio=pytest.approx(0.025),
                data_ratio=pytest.approx(0.0625),
                memory_ratio=0.875,
                risk_ratio=0.299,
                utilization_ratio=0.7,
                mfu_ratio=0.5,
                straggler_score=0.07,
                straggler_phase="data",
            ),
        ],
        alerts=[
            AlertView(
                severity="warning",
                name="ZerowatchStragglerRank",
                text="rank 1 is slow in data: 7% of a step",
            )
        ],
        alerts_source="the ranks' own signals",
        tuner=TunerView(
            state="trial",
            symptoms={"comm_bandwidth": 0.3, "data_bound": 0.2},
            knobs={"reduce_bucket_size": "50,000 (+7%)", "num_workers": "2"},
            decisions=["decisions: 2 accepted, 1 rolled back"],
        ),
        straggler_threshold=0.05,
        notes=["other runs"],
    )
    assert list(view.tuner.symptoms) == ["comm_bandwidth", "data_bound"]
    assert list(view.memory[0].categories) == ["activations", "baseline", "parameters"]


def test_a_threshold_of_the_run_replaces_the_default() -> None:
    ranks = [full_rank(0), full_rank(1)]
    ranks[0].set(training.ALERT_THRESHOLD, 0.08, "straggler_score_high")

    view = read_ranks(ranks)

    assert (view.straggler_threshold, view.alerts) == (0.08, [])


@pytest.mark.parametrize(
    ("unexplained", "names"),
    [
        (0.004, ["latency", "bandwidth", "imbalance", "redundancy"]),
        (0.006, ["latency", "bandwidth", "imbalance", "redundancy", "unknown"]),
    ],
)
def test_a_rest_of_half_a_percent_is_no_cause(unexplained: float, names: list[str]) -> None:
    causes = [Share(name=name, ratio=ratio, seconds_per_step=None) for name, ratio in (
        ("latency", 1 - unexplained), ("bandwidth", 0.0), ("imbalance", 0.0), ("redundancy", 0.0),
    )]  # fmt: skip
    rest = Share(name="unknown", ratio=unexplained, seconds_per_step=None)

    assert [cause.name for cause in with_rest(causes, rest)] == names


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1234, "123 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.5349, "1.53 s"),
        (119.4, "119 s"),
        (120.0, "2.0 min"),
        (150.0, "2.5 min"),
    ],
)
def test_a_duration_has_three_digits_and_its_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def grown(steps: int, seconds: float) -> Recorder:
    """A rank after some steps, whose counters grow by other amounts with each step."""
    recorder = Recorder()
    recorder.add(training.STEPS, steps)
    recorder.add(training.PHASE_SECONDS, seconds, "forward")
    recorder.add(training.PHASE_SECONDS, seconds / 4, "eval")
    recorder.add(communication.COMM_EXPOSED_SECONDS, seconds / 8, "dp")
    recorder.add(communication.COMM_WAIT_SECONDS, seconds / 16, "dp")
    recorder.add(communication.COMM_CAUSE_SECONDS, seconds / 32, "latency")
    recorder.add(training.SAMPLES, 8 * steps)
    recorder.add(training.TOKENS, 64 * steps)
    recorder.add(training.NONFINITE_LOSSES, steps / 10)
    return recorder


def spent_between(old: tuple[int, float], new: tuple[int, float], seconds: float) -> Spent:
    recent = RecentSeconds()
    recent.add(grown(*old).snapshot(), now=100.0)
    recent.add(grown(*new).snapshot(), now=100.0 + seconds)
    return recent.spent()


def test_the_increases_between_two_scrapes_are_those_of_each_counter() -> None:
    spent = spent_between((10, 8.0), (40, 40.0), 24.0)

    assert spent == Spent(
        is_whole=False,
        period_seconds=24.0,
        ranks=1,
        steps=30,
        phases={"forward": 32.0, "eval": 8.0},
        exposed=4.0,
        wait=2.0,
        causes={"latency": 1.0},
        samples=240,
        tokens=1920,
        nonfinite_losses=3.0,
    )
    assert spent.training_seconds == 32.0


@pytest.mark.parametrize(
    ("steps", "seconds", "is_whole", "period"),
    [(20, 20.0, False, 20.0), (20, 19.0, True, 50.0), (19, 20.0, True, 50.0)],
)
def test_figures_are_of_the_whole_run_before_twenty_seconds_and_ten_steps(
    steps: int, seconds: float, is_whole: bool, period: float
) -> None:
    spent = spent_between((10, 8.0), (steps, 40.0), seconds)

    assert (spent.is_whole, spent.period_seconds) == (is_whole, period)


def test_the_sums_over_ranks_are_unknown_if_one_is() -> None:
    first, second = spent_between((0, 0.0), (4, 8.0), 1.0), spent_between((0, 0.0), (6, 16.0), 1.0)

    total = combined([first, replace(second, tokens=None)])

    assert total == Spent(
        is_whole=True,
        period_seconds=15.0,
        ranks=2,
        steps=10,
        phases={"forward": 24.0, "eval": 6.0},
        exposed=3.0,
        wait=1.5,
        causes={"latency": 0.75},
        samples=80,
        tokens=None,
        nonfinite_losses=pytest.approx(1.0),
    )
    assert combined([]) is None


def test_a_point_has_the_increases_of_a_rank() -> None:
    spent = spent_between((0, 0.0), (10, 8.0), 1.0)

    assert spent.point(77.0) == Point(
        step=0,
        ended_at=77.0,
        seconds=10.0,
        steps=10,
        phase_seconds=[0.0, 8.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0],
        timed_seconds=8.0,
        exposed_seconds=1.0,
        loss_sum=0.0,
        loss_steps=0,
        nonfinite_losses=1,
        samples=80,
        tokens=640,
        peak_bytes={},
    )
    assert replace(spent, exposed=None).point(77.0).timed_seconds == 0.0
