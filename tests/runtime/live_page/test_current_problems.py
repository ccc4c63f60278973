"""Tests of the problems that the page names: alerts that would fire if the present lasted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import STARTED, step_record

from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
)
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.live_page.current_problems import (
    current_problems,
    limit_of,
    problems_of_rank,
)
from zerowatch.runtime.live_page.step_history import CAUSES, Point, StepHistory

NOW = STARTED + 60
ALERTS = {alert.name: alert for alert in alerts(Timing())}


@pytest.fixture
def recorder():
    recorder = Recorder()
    recorder.set(training.RUN_ACTIVE, 1)
    return recorder


def last_minute(**changes):
    history = StepHistory(lambda: [0.0] * len(CAUSES))
    for step in range(1, 21):
        history.add(step_record(step, **changes))
    return history.last_seconds(60.0, min_steps=1)


HEALTHY = last_minute(comm_exposed_seconds=0.05)


def problems(recorder, *, recent=HEALTHY, slow=None, thresholds=None, nonfinite_at=None):
    return current_problems(
        recorder.snapshot(),
        recent=recent,
        slow=slow or {},
        thresholds=thresholds or {},
        now=NOW,
        nonfinite_at=nonfinite_at,
    )


def names(*arguments, **options):
    return [problem.alert for problem in problems(*arguments, **options)]


def test_a_healthy_run_has_no_problems(recorder):
    recorder.set(communication.COMM_COVERAGE_RATIO, 1.0)
    recorder.set(memory.OOM_RISK, 0.01, "cpu")
    recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 1)
    recorder.add(communication.COLLECTIVE_MISMATCHES, 0)
    recorder.set(tuner.TUNER_STATE, 0, "safe_mode")

    assert names(recorder) == []
    assert names(recorder, recent=None) == []


@pytest.mark.parametrize(
    ("spec", "value", "labels", "alert"),
    [
        (overhead.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 31, (), "ZerowatchMetricsStale"),
        (communication.HANG_ACTIVE, 1, (), "ZerowatchRankHung"),
        (overhead.DEAD_THREADS, 1, (), "ZerowatchMonitoringDead"),
        (overhead.DROPPED_RECORDS, 101, ("run_log",), "ZerowatchRecordsLost"),
        (tuner.TUNER_STATE, 1, ("safe_mode",), "ZerowatchTunerSafeMode"),
        (communication.COMM_COVERAGE_RATIO, 0.98, (), "ZerowatchCommCoverageLow"),
        (communication.COLLECTIVE_MISMATCHES, 1, (), "ZerowatchCollectiveMismatch"),
        (memory.OOM_RISK, 0.6, ("cpu",), "ZerowatchOomRiskHigh"),
        (memory.OOM_RISK, 0.81, ("cpu",), "ZerowatchOomRiskCritical"),
        (across_ranks.RANKS_OOM_RISK, 0.6, ("max",), "ZerowatchOomRiskHigh"),
        (memory.MEMORY_LEAK, 1e6, ("cpu", "other"), "ZerowatchMemoryLeak"),
        (devices.DEVICE_LOST, 1, ("cuda:0",), "ZerowatchGpuLost"),
        (devices.DEVICE_XID_ERRORS, 1, ("cuda:0", "79"), "ZerowatchGpuXid"),
        (
            devices.DEVICE_ECC_ERRORS,
            1,
            ("cuda:0", "uncorrected"),
            "ZerowatchGpuUncorrectableEcc",
        ),
    ],
)
def test_a_metric_beyond_its_threshold_is_a_problem(recorder, spec, value, labels, alert):
    recorder.set(spec, value, *labels)

    [problem] = problems(recorder)

    assert problem.alert == alert
    assert problem.severity == ALERTS[alert].severity


@pytest.mark.parametrize(
    ("changes", "alert"),
    [
        ({"comm_exposed_seconds": 0.11}, "ZerowatchCommBottleneck"),
        (
            {"comm_exposed_seconds": 0.0, "phase_seconds": {"data": 0.06, "forward": 0.44}},
            "ZerowatchDataBound",
        ),
        ({"comm_exposed_seconds": 0.0, "nonfinite_loss": True}, "ZerowatchLossNotFinite"),
    ],
)
def test_steps_of_the_last_minute_beyond_a_threshold_are_a_problem(recorder, changes, alert):
    [problem] = problems(recorder, recent=last_minute(**changes))

    assert problem.alert == alert
    assert problem.severity == ALERTS[alert].severity


def test_a_slow_rank_is_a_problem(recorder):
    [problem] = problems(recorder, slow={3: {"backward": 0.25}})

    assert problem.text == "rank 3 is slow in backward: 25% of a step"
    assert problem.severity == ALERTS[problem.alert].severity


def test_thresholds_of_the_settings_replace_the_defaults(recorder):
    slow_steps = last_minute(comm_exposed_seconds=0.11)

    assert names(recorder, recent=slow_steps, thresholds={"exposed_comm_ratio_high": 0.3}) == []


def test_critical_problems_come_first(recorder):
    recorder.set(communication.COMM_COVERAGE_RATIO, 0.98)
    recorder.set(memory.OOM_RISK, 0.6, "cpu")
    recorder.set(communication.HANG_ACTIVE, 1)

    assert [problem.severity for problem in problems(recorder)] == ["critical", "warning", "info"]


def test_the_highest_risk_names_its_rank(recorder):
    recorder.set(across_ranks.RANKS_OOM_RISK, 0.9, "max")
    recorder.set(across_ranks.RANKS_EXTREME, 5, "oom_risk", "max")

    assert problems(recorder)[0].text.startswith("rank 5 ")


def test_a_run_that_has_ended_has_no_problems(recorder):
    recorder.set(communication.HANG_ACTIVE, 1)
    recorder.set(training.RUN_ACTIVE, 0)

    assert names(recorder) == []


def test_a_loss_that_was_not_finite_is_a_problem_for_as_long_as_in_the_alert(recorder):
    history = StepHistory(lambda: [0.0] * len(CAUSES))
    history.add(step_record(1, nonfinite_loss=True, ended_at_unix_seconds=NOW - 200))

    [problem] = problems(recorder, nonfinite_at=history.nonfinite_at)

    assert (problem.alert, problem.severity) == ("ZerowatchLossNotFinite", "critical")
    assert "200 s ago" in problem.text
    assert names(recorder, nonfinite_at=NOW - 301) == []


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([(overhead.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 30)], []),
        (
            [(overhead.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 31)],
            ["the metrics were last updated 31 s ago"],
        ),
        ([(overhead.DROPPED_RECORDS, 100, "steps")], []),
        (
            [(overhead.DROPPED_RECORDS, 1101, "steps")],
            ["rank 0 has lost 1,101 records since the start (steps); its log has the reason"],
        ),
        (
            [(communication.HANG_ACTIVE, 1), (communication.HANG_AWAITED_RANK, 3)],
            [
                "rank 0 makes no progress and waits for rank 3; the first line of "
                "hang-rank-0-*.txt in the run folder names the ranks that are missing"
            ],
        ),
        (
            [(communication.HANG_ACTIVE, 1)],
            [
                "rank 0 makes no progress; the first line of hang-rank-0-*.txt in the run folder "
                "names the ranks that are missing"
            ],
        ),
        ([(communication.COMM_COVERAGE_RATIO, 0.99)], []),
        (
            [(communication.COMM_COVERAGE_RATIO, 0.985)],
            ["only 98.5% of the collectives are recorded"],
        ),
        (
            [(communication.COLLECTIVE_MISMATCHES, 7)],
            ["the collectives differed between ranks 7 times since the start"],
        ),
        ([(memory.OOM_RISK, 0.5, "cpu")], []),
        (
            [(memory.OOM_RISK, 0.75, "cuda:0"), (memory.OOM_RISK, 0.1, "cpu")],
            ["rank 0 runs out of memory within 50 steps with a probability of 75%"],
        ),
        (
            [
                (memory.OOM_RISK, 0.9, "cuda:0"),
                (across_ranks.RANKS_OOM_RISK, 0.8, "max"),
                (across_ranks.RANKS_EXTREME, 6, "oom_risk", "max"),
            ],
            ["rank 6 runs out of memory within 50 steps with a probability of 80%"],
        ),
        (
            [(memory.MEMORY_LEAK, 3 * 2**19, "cuda:0", "other")],
            ["memory on cuda:0 grows by 1.5 MiB per step (other)"],
        ),
        (
            [
                (devices.DEVICE_LOST, 0, "cuda:0"),
                (devices.DEVICE_XID_ERRORS, 9, "cuda:0", "31"),
                (devices.DEVICE_XID_ERRORS, 0, "cuda:0", "79"),
                (devices.DEVICE_ECC_ERRORS, 9, "cuda:0", "corrected"),
                (devices.DEVICE_ECC_ERRORS, 0, "cuda:0", "uncorrected"),
            ],
            [],
        ),
        (
            [
                (devices.DEVICE_XID_ERRORS, 1, "cuda:0", "79"),
                (devices.DEVICE_ECC_ERRORS, 1, "cuda:0", "uncorrected"),
            ],
            [
                "XID 79 on cuda:0 of rank 0, 1 time since the start: The GPU fell off the PCIe "
                "bus; drain the node",
                "1 uncorrected memory error on cuda:0 of rank 0 since the start",
            ],
        ),
        (
            [
                (devices.DEVICE_LOST, 1, "cuda:0"),
                (devices.DEVICE_XID_ERRORS, 3, "cuda:0", "79"),
                (devices.DEVICE_ECC_ERRORS, 1500, "cuda:0", "uncorrected"),
            ],
            [
                "the driver no longer reaches cuda:0 of rank 0, or must reset it first",
                "XID 79 on cuda:0 of rank 0, 3 times since the start: The GPU fell off the PCIe "
                "bus; drain the node",
                "1,500 uncorrected memory errors on cuda:0 of rank 0 since the start",
            ],
        ),
    ],
)
def test_a_problem_has_its_figures_and_none_at_its_limit(
    recorder: Recorder, metrics: list[tuple[Any, ...]], expected: list[str]
) -> None:
    for spec, value, *labels in metrics:
        recorder.set(spec, value, *labels)

    assert [problem.text for problem in problems(recorder)] == expected


@pytest.mark.parametrize(
    ("risk", "alert"), [(0.8, "ZerowatchOomRiskHigh"), (0.81, "ZerowatchOomRiskCritical")]
)
def test_a_risk_of_more_than_four_fifths_is_critical(
    recorder: Recorder, risk: float, alert: str
) -> None:
    recorder.set(memory.OOM_RISK, risk, "cpu")

    assert names(recorder) == [alert]


def point_of(*, steps: int = 16, exposed: float = 0.0, data: float = 0.0, bad: int = 0) -> Point:
    """A minute of 8 s of training and 2 s of evaluation."""
    return Point(
        step=steps,
        ended_at=NOW,
        seconds=10.0,
        steps=steps,
        phase_seconds=[data, 8 - data, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0],
        timed_seconds=4.0,
        exposed_seconds=exposed,
        loss_sum=0.0,
        loss_steps=0,
        nonfinite_losses=bad,
        samples=0,
        tokens=0,
        peak_bytes={},
    )


@pytest.mark.parametrize(
    ("recent", "expected"),
    [
        (point_of(exposed=1.0, data=2.0), []),
        (point_of(exposed=1.1, data=2.4, steps=9), []),
        (
            point_of(exposed=1.1, steps=10),
            ["28% of the last minute was exposed communication, above 25%"],
        ),
        (point_of(data=2.4), ["30% of the last minute was spent loading data, above 25%"]),
        (point_of(bad=3), ["3 of the last 16 steps had a loss that is not finite"]),
    ],
)
def test_the_last_minute_has_a_problem_beyond_a_limit_and_from_ten_steps_on(
    recorder: Recorder, recent: Point, expected: list[str]
) -> None:
    limits = {"exposed_comm_ratio_high": 0.25, "data_ratio_high": 0.25}

    found = problems(recorder, recent=recent, thresholds=limits)

    assert [problem.text for problem in found] == expected


@pytest.mark.parametrize(("age", "count"), [(299.0, 1), (300.0, 0)])
def test_a_loss_that_was_not_finite_is_a_problem_for_five_minutes(
    recorder: Recorder, age: float, count: int
) -> None:
    assert len(names(recorder, nonfinite_at=NOW - age)) == count


def test_other_ranks_are_named_by_their_number(recorder: Recorder) -> None:
    recorder.set(overhead.DEAD_THREADS, 1)
    recorder.set(communication.HANG_ACTIVE, 1)

    found = problems_of_rank(recorder.snapshot(), 5, limit_of({}))

    hung, dead = (problem.text for problem in found)
    assert hung.startswith("rank 5 makes") and "hang-rank-5-*" in hung
    assert dead == (
        "a monitoring thread of rank 5 has ended: some of its figures no longer change; its log "
        "has the reason"
    )


def test_a_fault_of_the_gpu_of_another_rank_is_a_problem(recorder: Recorder) -> None:
    recorder.set(devices.DEVICE_LOST, 1, "cuda:5")

    [problem] = problems_of_rank(recorder.snapshot(), 13, limit_of({}))

    assert problem.alert == "ZerowatchGpuLost"
    assert "rank 13" in problem.text and "cuda:5" in problem.text


def test_the_guide_lists_the_alerts_that_the_page_covers() -> None:
    root = Path(__file__).parents[3]
    source = (root / "runtime/live_page/current_problems.py").read_text()
    guide = (root / "docs/guides/live-page.md").read_text()

    listed = re.findall(r"^\| `(Zerowatch\w+)` \|", guide, re.MULTILINE)
    covered = set(re.findall(r'"(Zerowatch\w+)"', source))

    assert sorted(listed) == sorted(covered)
    assert covered <= ALERTS.keys()
