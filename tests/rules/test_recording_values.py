"""The recording rules have the values that can be computed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from rules.history import (
    GONE,
    SCRAPE,
    counter,
    gauge,
    of_both,
    of_rank,
    training,
    training_rank,
)
from rules.promtool import RECORDING, RULE_FILES, failures, groups_of, needed_rules, written

from zerowatch.dashboards import recording_rules as recorded
from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.definitions.compare import step_of
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.recording_rules import GROUPS
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.thresholds import THRESHOLDS

MINUTES = 6
PHASES = "zerowatch_phase_seconds_total"
EXPOSED = "zerowatch_comm_exposed_seconds_total"
CALLS = "zerowatch_collective_calls_total"
COVERAGE = "zerowatch_comm_coverage_ratio"
ACTIVE = "zerowatch_run_active"
SAVED = "zerowatch_last_checkpoint_timestamp_seconds"
STEP_DURATION = "zerowatch_step_duration_seconds"


def growing(per_second: float) -> str:
    return counter((MINUTES, per_second))


def standing(value: float) -> str:
    return gauge((MINUTES, value))


def of(rank: int) -> str:
    """Return the labels of a rank."""
    return f'node="node-{rank}", rank="{rank}"'


def links(*bandwidths: float) -> dict[str, str]:
    """Return the estimates of the bandwidth by ranks of one group."""
    metric = "zerowatch_comm_link_bandwidth_bytes_per_second"
    series: dict[str, str] = {}
    for rank, bandwidth in enumerate(bandwidths):
        series |= of_rank(rank, metric, standing(bandwidth), group="dp")
    return series


def on_node_n(rank: int, instance: str, in_use: float) -> dict[str, str]:
    """Return the host memory of a rank that may use 8 GB."""
    place = {"device": "cpu", "node": "n", "instance": instance}
    return of_rank(
        rank, "zerowatch_memory_bytes", standing(in_use), state="allocated", **place
    ) | of_rank(rank, "zerowatch_memory_limit_bytes", standing(8e9), **place)


GENERATING = of_rank(0, PHASES, growing(0.5), phase="generate") | of_rank(
    1, PHASES, growing(0.25), phase="generate"
)
# By what is recorded: further series, and the values by their labels beside job and run.
CASES = {
    # 0.1 s of rank 0's second and 0.3 s of rank 1's: a fifth. A mean of ratios would give it too,
    # but for rank 1 being in an evaluation half of the time: then it is 0.4 of 1.5 seconds.
    recorded.EXPOSED_RATIO: (
        of_rank(0, EXPOSED, growing(0.1), group="dp")
        | of_rank(1, EXPOSED, growing(0.3), group="dp")
        | of_rank(1, PHASES, growing(0.1), phase="backward")
        | of_rank(1, PHASES, growing(0.5), phase="eval"),
        {"": 0.4 / 1.5},
    ),
    recorded.EXPOSED_RATIO_BY_GROUP: (
        of_both(EXPOSED, growing(0.2), group="dp") | of_both(EXPOSED, growing(0.1), group="tp"),
        {'group="dp"': 0.2, 'group="tp"': 0.1},
    ),
    recorded.EXPOSED_RATIO_BY_RANK: (
        of_rank(0, EXPOSED, growing(0.1), group="dp")
        | of_rank(0, EXPOSED, growing(0.2), group="tp"),
        {of(0): 0.3, of(1): 0.05},
    ),
    recorded.CAUSE_RATIO: (
        of_both("zerowatch_comm_cause_seconds_total", growing(0.03), cause="latency"),
        {'cause="latency"': 0.03},
    ),
    # The second lowest of three is usual, in each of the six minutes.
    recorded.LINK_SECOND_LOWEST: (links(3e8, 4e8, 9e8), {'group="dp"': 4e8}),
    recorded.LINK_BANDWIDTH_USUAL: (links(3e8, 4e8, 9e8), {'group="dp"': 4e8}),
    recorded.LINK_BANDWIDTH_RATIO: (
        links(3e8, 4e8, 9e8),
        {f'group="dp", {of(rank)}': ratio for rank, ratio in ((0, 0.75), (1, 1), (2, 1))},
    ),
    recorded.EXPOSED_RATIO_USUAL: (
        of_both(EXPOSED, growing(0.3), group="dp"),
        {"": 0.3},
    ),
    # Three ranks: the median waits for 0.2 of the time.
    recorded.WAIT_SHORTFALL: (
        of_both(COVERAGE, standing(1))
        | of_rank(0, "zerowatch_comm_wait_seconds_total", growing(0.2), group="dp")
        | of_rank(1, "zerowatch_comm_wait_seconds_total", growing(0.1), group="dp")
        | of_rank(2, "zerowatch_comm_wait_seconds_total", growing(0.5), group="dp")
        | of_rank(2, PHASES, growing(1), phase="backward"),
        {of(0): 0, of(1): 0.1, of(2): -0.3},
    ),
    # Half of rank 0's time and a quarter of rank 1's: 60 tokens in 0.75 s, of which it waits 0.3 s.
    recorded.GENERATION_SPEED: (
        GENERATING | of_both("zerowatch_generated_tokens_total", growing(30)),
        {"": 60 / 0.75},
    ),
    recorded.GENERATION_WAIT: (
        GENERATING | of_both("zerowatch_generate_comm_exposed_seconds_total", growing(0.15)),
        {"": 0.3 / 0.75},
    ),
    recorded.GENERATED_LENGTH: (
        of_both("zerowatch_generated_tokens_total", growing(30))
        | of_both("zerowatch_generated_sequences_total", growing(2)),
        {"": 15},
    ),
    # Other collectives, and gathers in other phases, are not counted; each rank takes 2 steps/s.
    recorded.GATHERS_OF_GENERATION: (
        of_both(CALLS, growing(40), op="all_gather", group="dp", phase="generate")
        | of_both(CALLS, growing(5), op="all_reduce", group="dp", phase="generate")
        | of_both(CALLS, growing(7), op="all_gather", group="dp", phase="forward"),
        {"": 20},
    ),
    recorded.MFU: (of_both("zerowatch_mfu_ratio", standing(0.4)), {"": 0.4}),
    recorded.MFU_USUAL: (of_both("zerowatch_mfu_ratio", standing(0.4)), {"": 0.4}),
    recorded.LOSS: (of_both("zerowatch_loss", standing(-2)), {"": -2}),
    recorded.LOSS_MEDIAN: (of_both("zerowatch_loss", standing(-2)), {"": -2}),
    recorded.LOSS_DEVIATION: (of_both("zerowatch_loss", standing(-2)), {"": 0}),
    # Two minutes of 3 after four of -2: 5 above the median, over the size of the median.
    recorded.LOSS_SPIKE: (of_both("zerowatch_loss", gauge((4, -2), (3, 3))), {"": 2.5}),
    recorded.GRADIENT_NORM: (of_both("zerowatch_gradient_norm", standing(2)), {"": 2}),
    recorded.GRADIENT_NORM_MEDIAN: (of_both("zerowatch_gradient_norm", standing(2)), {"": 2}),
    recorded.GRADIENT_NORM_RATIO: (
        of_both("zerowatch_gradient_norm", gauge((4, 2), (3, 30))),
        {"": 15},
    ),
    recorded.LAST_CHECKPOINT: (
        of_rank(0, SAVED, gauge((2, 100), (2, 220), (3, 340))),
        {"": 340},
    ),
    recorded.CHECKPOINT_INTERVAL: (
        of_rank(0, "process_start_time_seconds", standing(40))
        | of_rank(0, SAVED, standing(400))
        | of_rank(0, "zerowatch_checkpoints_total", standing(3), outcome="saved")
        | of_rank(0, "zerowatch_checkpoints_total", standing(2), outcome="failed"),
        {"": 120},
    ),
    # Of a process that has ended; the next one has saved none. The last checkpoint was saved at the
    # end, and read once, between two evaluations.
    recorded.LAST_CHECKPOINT_IN_WEEK: (
        of_rank(0, SAVED, gauge((2, 100), (1.6, 200), (SCRAPE, 215), (3, GONE))),
        {"": 215},
    ),
    recorded.CHECKPOINT_INTERVAL_IN_WEEK: (
        of_rank(0, "process_start_time_seconds", standing(40))
        | of_rank(0, SAVED, gauge((4, 400), (2, GONE)))
        | of_rank(0, "zerowatch_checkpoints_total", gauge((4, 3), (2, GONE)), outcome="saved"),
        {"": 120},
    ),
    # The second process is read 77 seconds after the first, which trained for 18 since its last
    # checkpoint.
    recorded.UNSAVED_SINCE: (
        of_rank(0, "process_start_time_seconds", gauge((4, 40), (1, GONE), (2, 300)))
        | of_rank(0, ACTIVE, gauge((4, 1), (1, GONE), (2, 1)))
        | of_rank(0, SAVED, gauge((2, 100), (2, 220), (3, GONE))),
        {"": 220 + 77},
    ),
    # The last scrape before the gap that an evaluation sees.
    recorded.RANK_0_ACTIVE_TIME: (
        of_rank(0, ACTIVE, gauge((4, 1), (2, GONE))) | of_rank(1, ACTIVE, standing(1)),
        {"": 238},
    ),
    # The scrapes of 357 s and 240 s.
    recorded.RANK_ACTIVE_TIME: (
        of_rank(1, ACTIVE, gauge((4.1, 1), (2, 0))),
        {f'instance="10.0.0.0:9464", {of(0)}': 357},
    ),
    recorded.RUN_ACTIVE_TIME: (of_rank(1, ACTIVE, gauge((4.1, 1), (2, 0))), {"": 357}),
    # The end was read once, 17 s before the evaluation, and the next scrape failed.
    recorded.RANK_ENDED_TIME: (
        of_both(ACTIVE, gauge((5.7, 1), (0.1, 0), (1, None)))
        | of_rank(
            0, "zerowatch_run_end_info", gauge((5.7, None), (0.1, 1), (1, None)), reason="exception"
        )
        | of_rank(
            1, "zerowatch_run_end_info", gauge((5.7, None), (0.1, 1), (1, None)), reason="completed"
        ),
        {of(1): 360},
    ),
    recorded.NODE_MEMORY_RATIO: (
        on_node_n(0, "10.0.0.0:9464", 3e9) | on_node_n(1, "10.0.0.0:9465", 3e9),
        {'node="n"': 0.75},
    ),
    recorded.COVERAGE: (
        of_rank(0, COVERAGE, standing(1)) | of_rank(1, COVERAGE, standing(0.9)),
        {"": 0.9},
    ),
    recorded.STRAGGLER_SCORE: (
        of_rank(1, "zerowatch_straggler_score_ratio", standing(0.2), phase="forward"),
        {f'phase="forward", {of(1)}': 0.2},
    ),
    recorded.SAMPLES_RATE: (of_both("zerowatch_samples_total", growing(16)), {"": 32}),
    # Both ranks take the same two steps a second.
    recorded.STEPS_RATE: ({}, {"": 2}),
    recorded.PHASE_RATIO: (
        {},
        {
            'phase="backward"': 0.6,
            'phase="data"': 0.02,
            'phase="forward"': 0.3,
            'phase="optimizer"': 0.05,
            'phase="other"': 0.03,
        },
    ),
    recorded.STEP_DURATION: (
        of_both(f"{STEP_DURATION}_sum", growing(1)) | of_both(f"{STEP_DURATION}_count", growing(2)),
        {"": 0.5},
    ),
    recorded.SKIPPED_RATIO: (
        of_both("zerowatch_skipped_steps_total", growing(0.5)),
        {"": 0.25},
    ),
    recorded.ACTIVE_RANKS: ({}, {"": 2}),
    recorded.DEVICE_UTILIZATION_BY_RANK: (
        of_rank(0, "zerowatch_device_seconds_total", growing(0.3), device="cpu", state="busy")
        | of_rank(0, "zerowatch_device_seconds_total", growing(0.6), device="cpu", state="idle"),
        {f'device="cpu", {of(0)}': 1 / 3},
    ),
    recorded.OOM_RISK: (
        of_rank(1, "zerowatch_oom_risk_ratio", standing(0.75), device="cuda:0"),
        {f'device="cuda:0", {of(1)}': 0.75},
    ),
    recorded.PEAK_RATIO: (
        of_rank(1, "zerowatch_memory_peak_bytes", standing(3e9), device="cpu", state="allocated")
        | of_rank(1, "zerowatch_memory_limit_bytes", standing(4e9), device="cpu"),
        {f'device="cpu", {of(1)}': 0.75},
    ),
    # Thresholds: the run's own value, and otherwise the default.
    recorded.ALERT_THRESHOLD: (
        of_rank(0, "zerowatch_alert_threshold", standing(0.35), name="exposed_comm_ratio_high"),
        {
            f'name="{name}"': 0.35 if name == "exposed_comm_ratio_high" else float(threshold)
            for name, threshold in THRESHOLDS.items()
        },
    ),
    # Only rank 0 reports what was lost, of its own second.
    recorded.REPLAY_RATIO: (
        of_rank(0, "zerowatch_replay_seconds_total", growing(0.1))
        | of_rank(1, PHASES, growing(0.5), phase="backward"),
        {"": 0.1},
    ),
    recorded.WATCH_RATIO_BY_RANK: (
        of_both("zerowatch_watch_seconds_total", growing(0.001), part="hooks")
        | of_both("zerowatch_watch_seconds_total", growing(0.002), part="collectives"),
        {of(0): 0.003, of(1): 0.003},
    ),
}


# When the run began, and the interval between the three checkpoints.
@pytest.mark.parametrize(("run_start", "interval"), [(10, 120), (160, 80)])
def test_checkpoints_are_counted_from_the_start_of_the_process_or_of_a_later_run(
    run_start, interval, some_rules, tmp_path
):
    series, _ = CASES[recorded.CHECKPOINT_INTERVAL]
    series = series | of_both("zerowatch_run_start_timestamp_seconds", standing(run_start))
    rule = recorded.CHECKPOINT_INTERVAL
    test = look(rule, training(MINUTES) | series, {"": interval})

    assert failures(some_rules(only=rule.name), [test], tmp_path) == ""


def test_the_last_checkpoint_is_that_which_a_run_saves_at_its_end(some_rules, tmp_path):
    lives = ((4, 1), (0.25, 0), (1.75, GONE))
    ranks = training_rank(0, *lives) | training_rank(1, *lives)
    saves = of_rank(0, SAVED, gauge((2, GONE), (2, 120), (0.25, 238), (1.75, GONE)))
    rule = recorded.LAST_CHECKPOINT_IN_WEEK
    test = look(rule, ranks | saves, {"": 238})

    assert failures(some_rules(only=rule.name), [test], tmp_path) == ""


def test_the_interval_between_checkpoints_outlasts_a_move_of_rank_0_to_another_address(
    some_rules, tmp_path
):
    """Nothing marks the end of the old series, as in a federation."""
    series, values = CASES[recorded.CHECKPOINT_INTERVAL]
    moved = {"node": "node-9", "instance": "10.0.0.9:9464"}
    later = of_rank(0, "process_start_time_seconds", gauge((5, GONE), (1, 410)), **moved)
    later |= of_rank(0, "zerowatch_run_active", gauge((5, GONE), (1, 1)), **moved)
    rule = recorded.CHECKPOINT_INTERVAL_IN_WEEK
    test = look(rule, training(MINUTES) | series | later, values)

    assert failures(some_rules(only=rule.name), [test], tmp_path) == ""


def late_rules(rule, some_rules, folder):
    """Return the rules as a server has them that stores results elsewhere.

    What one rule records is read at the next evaluation only.
    """
    files = {name: (some_rules(only=rule.name) / name).read_text() for name in RULE_FILES}
    groups = groups_of(files[RECORDING])
    late = [{**group, "rules": group["rules"][::-1]} for group in groups[::-1]]
    return written({**files, RECORDING: json.dumps({"groups": late})}, folder)


def test_pauses_are_left_out_where_a_group_does_not_read_its_own_results(some_rules, tmp_path):
    rule = recorded.UNSAVED_SINCE
    series, values = CASES[rule]
    test = look(rule, training(MINUTES) | series, values)

    assert failures(late_rules(rule, some_rules, tmp_path), [test], tmp_path) == ""


# The second process is read 763 seconds after the first. Results of more than ten minutes ago are
# not those of the evaluation before.
@pytest.mark.parametrize("late", [False, True])
def test_a_pause_of_more_than_ten_minutes_is_left_out(late, some_rules, tmp_path):
    rule = recorded.UNSAVED_SINCE
    series = of_rank(0, "process_start_time_seconds", gauge((4, 40), (12.5, GONE), (2, 970)))
    series |= of_rank(0, ACTIVE, gauge((4, 1), (12.5, GONE), (2, 1)))
    series |= of_rank(0, SAVED, gauge((2, 100), (2, 220), (14.5, GONE)))
    rules = late_rules(rule, some_rules, tmp_path) if late else some_rules(only=rule.name)
    test = look(rule, series, {"": 220 + 763}, at="18m")

    assert failures(rules, [test], tmp_path) == ""


# Here an hour is a minute long, and a week is 168.
@pytest.mark.parametrize(("at", "values"), [("168m", {"": 56}), ("170m", {})])
@pytest.mark.parametrize("rule", [recorded.RANK_0_ACTIVE_TIME, recorded.UNSAVED_SINCE])
def test_a_run_is_forgotten_a_week_after_rank_0_was_last_read(rule, at, values, tmp_path):
    rules = written(needed_rules(rule_files(Timing(scale=1 / 60)), only=rule.name), tmp_path)
    series = of_rank(0, ACTIVE, gauge((1, 1), (180, GONE)))
    series |= of_rank(0, "process_start_time_seconds", gauge((1, 1), (180, GONE)))
    series |= of_rank(0, SAVED, gauge((1, 56), (180, GONE)))

    assert failures(rules, [look(rule, series, values, at=at)], tmp_path) == ""


# Here an hour is a minute long, and a week is 168. The values of an hour last up to two hours more.
@pytest.mark.parametrize(("at", "known"), [("20m", True), ("170m", True), ("176m", False)])
@pytest.mark.parametrize(
    ("rule", "value"),
    [(recorded.LAST_CHECKPOINT_IN_WEEK, 400), (recorded.CHECKPOINT_INTERVAL_IN_WEEK, 120)],
)
def test_checkpoints_of_a_process_before_are_known_for_a_week(rule, value, at, known, tmp_path):
    rules = written(needed_rules(rule_files(Timing(scale=1 / 60)), only=rule.name), tmp_path)
    series = of_rank(0, ACTIVE, gauge((4, 1), (2, GONE), (172, 1)))
    series |= of_rank(0, "process_start_time_seconds", gauge((4, 40), (2, GONE), (172, 360)))
    series |= of_rank(0, SAVED, gauge((4, 400), (174, GONE)))
    series |= of_rank(
        0, "zerowatch_checkpoints_total", gauge((4, 3), (2, GONE), (172, 0)), outcome="saved"
    )
    values = {"": value} if known else {}

    assert failures(rules, [look(rule, series, values, at=at)], tmp_path) == ""


def test_a_time_to_come_does_not_stay(tmp_path):
    """A host whose clock was wrong has saved a checkpoint."""
    rule = recorded.UNSAVED_SINCE
    rules = written(needed_rules(rule_files(Timing(scale=1 / 60)), only=rule.name), tmp_path)
    series = of_rank(0, ACTIVE, gauge((180, 1)))
    series |= of_rank(0, "process_start_time_seconds", gauge((180, 1)))
    series |= of_rank(0, SAVED, gauge((2, 1e9), (178, 300)))

    assert failures(rules, [look(rule, series, {"": 300}, at="175m")], tmp_path) == ""


def test_the_memory_of_a_node_is_that_of_its_fullest_container(some_rules, tmp_path):
    series = on_node_n(0, "10.0.0.0:9464", 3e9) | on_node_n(1, "10.0.0.1:9464", 4e9)
    rule = recorded.NODE_MEMORY_RATIO
    test = look(rule, training(MINUTES) | series, {'node="n"': 0.5})

    assert failures(some_rules(only=rule.name), [test], tmp_path) == ""


def test_the_communication_of_a_run_of_an_earlier_version_is_the_sum_over_groups(
    some_rules, tmp_path
):
    seconds = "zerowatch_comm_seconds_total"
    series = of_both(seconds, growing(0.2), group="dp") | of_both(seconds, growing(0.1), group="tp")
    test = look(recorded.COMM_RATIO, training(MINUTES) | series, {"": 0.3})

    assert failures(some_rules(only=recorded.COMM_RATIO.name), [test], tmp_path) == ""


@pytest.mark.parametrize(("steps", "values"), [(7, {"": 7}), (0, {})])
def test_the_step_of_a_run_of_an_earlier_version_is_unknown_before_its_first(
    steps, values, some_rules, tmp_path
):
    """A process that resumes a run may not know the last step yet."""
    series = of_both("zerowatch_steps_total", standing(steps))
    test = look(recorded.STEPS_DONE, series, values)
    test["promql_expr_test"][0]["expr"] = f"1e6 * ({step_of()})"

    assert failures(some_rules(only=recorded.STEPS_DONE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)
def test_a_recording_rule_has_the_computed_value(rule, some_rules, tmp_path):
    own_series, values = CASES[rule]
    series = training(MINUTES) | own_series

    assert failures(some_rules(only=rule.name), [look(rule, series, values)], tmp_path) == ""


def stepping(
    rank: int,
    *processes: tuple[int, int, int],
    step: float = 0.5,
    first_step: float = 0,
    every: int = 15,
    minutes: int = 40,
    unread: tuple[int, int] = (0, 0),
) -> dict[str, str]:
    """Return the series of a rank that takes steps of `step` seconds, with 16 samples a second.

    Args:
        rank: The rank.
        processes: When a process begins to answer, when its first step begins, and when it ends.
        step: Seconds of a step.
        first_step: By how many seconds the first step of a process takes longer.
        every: Seconds between two scrapes.
        minutes: The length of the history.
        unread: When scrapes of the rank begin to fail, and when they no longer fail.
    """
    names = ("steps_total", "samples_total", "last_step_timestamp_seconds")
    names += ("step_duration_seconds_sum", "step_duration_seconds_count")
    values: dict[str, list[str]] = {name: [] for name in names}
    for now in range(0, 60 * minutes, every):
        scraped: dict[str, float] = {}
        for begin, first, end in processes:
            if begin <= now < end and not unread[0] <= now < unread[1]:
                scraped = {"steps_total": 0}
                if count := max(0, int((now - first - first_step) / step)):
                    seconds = count * step + first_step
                    figures = (count, 16 * count * step, first + seconds, seconds, count)
                    scraped = dict(zip(names, figures, strict=True))
        for name, stored in values.items():
            stale = "stale" if stored and stored[-1] not in ("stale", "_") else "_"
            stored.append(f"{scraped[name]:.10g}" if name in scraped else stale)
    series: dict[str, str] = {}
    for name, stored in values.items():
        series |= of_rank(rank, f"zerowatch_{name}", " ".join(stored))
    return series


def rates_of_samples(
    series: dict[str, str], moments: Iterable[int], low: float, high: float, *, every: int = 15
):
    """Return a test that the rate of samples is between `low` and `high` at these seconds."""
    name = recorded.SAMPLES_RATE.name
    wrong = f"({name} < {low} or {name} > {high}) or absent({name})"
    test = look(recorded.SAMPLES_RATE, series, {})
    test["interval"] = f"{every}s"
    test["promql_expr_test"] = [
        {"expr": wrong, "eval_time": f"{moment}s", "exp_samples": []} for moment in moments
    ]
    return test


END = 3600  # after each history
STARTS = {
    "a new run": ((1200, 1200, END),),
    "a late first step": ((0, 1200, END),),
    "a restart": ((0, 0, 600), (1200, 1200, END)),
    "a restart at once": ((0, 0, 1080), (1140, 1200, END)),
    "a restart without a pause": ((0, 0, 1140), (1170, 1200, END)),
}


@pytest.mark.parametrize("every", [5, 15, 30, 60])
@pytest.mark.parametrize("start", ["a new run", "a late first step", "a restart"])
def test_the_rate_of_samples_is_right_from_the_second_scrape(start, every, some_rules, tmp_path):
    series = stepping(0, *STARTS[start], every=every) | stepping(1, *STARTS[start], every=every)
    moments = range(1200 + 30 + 2 * every, 1200 + 600, 15)
    test = rates_of_samples(series, moments, 0.9 * 32, 1.1 * 32, every=every)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("every", [15, 60])
@pytest.mark.parametrize("start", ["a restart at once", "a restart without a pause"])
@pytest.mark.parametrize("first_step", [0, 60])
def test_after_a_restart_at_once_the_rate_of_samples_has_the_time_without_steps(
    start, every, first_step, some_rules, tmp_path
):
    (old, *_), new = STARTS[start], STARTS[start][-1]
    series: dict[str, str] = {}
    for rank in (0, 1):
        series |= stepping(rank, old, new, every=every, first_step=first_step)
    begun = range(1200 + first_step + 30 + 2 * every, 1200 + 375, 15)
    during = rates_of_samples(series, begun, 0, 1.1 * 32, every=every)
    moments = range(1200 + first_step + 375, 1200 + 900, 15)
    after = rates_of_samples(series, moments, 0.9 * 32, 1.1 * 32, every=every)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [during, after], tmp_path) == ""


@pytest.mark.parametrize("every", [15, 60])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("step", [60, 120, 240])
def test_the_rate_of_samples_is_not_too_high_after_a_long_first_step(
    step, start, every, some_rules, tmp_path
):
    """Five minutes may have a step more or less than on average."""
    long = {"step": step, "every": every}
    series = stepping(0, *STARTS[start], **long) | stepping(1, *STARTS[start], **long)
    name, highest = recorded.SAMPLES_RATE.name, 32 * (1 + step / 300)
    test = look(recorded.SAMPLES_RATE, series, {})
    test["interval"] = f"{every}s"
    test["promql_expr_test"] = [
        {"expr": f"{name} > {highest}", "eval_time": f"{moment}s", "exp_samples": []}
        for moment in range(1200, 1200 + 900, 15)
    ]

    assert failures(some_rules(only=name), [test], tmp_path) == ""


@pytest.mark.parametrize("missing", [(0, 0, 2), (1, 20, 21)], ids=["first scrapes", "one scrape"])
@pytest.mark.parametrize("every", [15, 60])
def test_ranks_of_different_totals_do_not_change_the_rate_of_samples(
    every, missing, some_rules, tmp_path
):
    """One rank has done more than the other when Prometheus starts, and may not answer."""
    rank, begin, end = missing
    series: dict[str, str] = {}
    for each, done in enumerate((1_250_000, 750_000)):
        values = [f"{done + 16 * every * scrape:g}" for scrape in range(3000 // every)]
        if each == rank:
            values[begin:end] = ["_"] * (end - begin)
        series |= of_rank(each, "zerowatch_samples_total", " ".join(values))
    moments = [*range(15 + 3 * every, 2400, 15), *range(every * 5 - 1, 2400, every)]
    early = rates_of_samples(series, moments, 0, (1.15 if every < 60 else 1.35) * 32, every=every)
    moments = [moment for moment in moments if moment > 300 + 2 * every]
    late = rates_of_samples(series, moments, 0.4 * 32, 1.15 * 32, every=every)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [early, late], tmp_path) == ""


@pytest.mark.parametrize("every", [15, 60])
def test_the_rate_of_samples_of_a_run_that_hangs_is_zero(every, some_rules, tmp_path):
    values = [f"{16 * min(1200, every * scrape):g}" for scrape in range(1, 3000 // every)]
    series = of_rank(0, "zerowatch_samples_total", "_ " + " ".join(values))
    name = recorded.SAMPLES_RATE.name
    test = rates_of_samples(series, range(1200 + 300 + 2 * every, 2400, 15), 0, 0.1, every=every)

    assert failures(some_rules(only=name), [test], tmp_path) == ""


@pytest.mark.parametrize("every", [15, 60])
def test_evaluations_between_steps_lower_the_rate_of_samples(every, some_rules, tmp_path):
    """30 steps of a second in each two minutes: a quarter of the rate within steps."""
    values: dict[int, float] = {
        now: 16 * (30 * (now // 120) + min(30, now % 120)) for now in range(every, 2400, every)
    }
    stored = "_ " + " ".join(f"{values[now]:g}" for now in sorted(values))
    series = of_rank(0, "zerowatch_samples_total", stored)
    test = rates_of_samples(series, range(360, 2400, 15), 0.75 * 4, 1.3 * 4, every=every)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("every", [15, 60])
@pytest.mark.parametrize("first_step", [60, 290])
def test_a_first_step_that_compiles_does_not_lower_the_rate_of_samples(
    first_step, every, some_rules, tmp_path
):
    start, compiling = STARTS["a restart"], {"first_step": first_step, "every": every}
    series = stepping(0, *start, **compiling) | stepping(1, *start, **compiling)
    moments = range(1200 + first_step + 2 * every + 30, 1200 + 900, 15)
    test = rates_of_samples(series, moments, 0.75 * 32, 1.1 * 32, every=every)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_after_a_restart_the_rate_of_samples_leaves_the_address_before_out(some_rules, tmp_path):
    before, after = ((0, 0, 1170),), ((1170, 1200, END),)
    moved = {
        name.replace("10.0.0.", "10.0.1."): values
        for rank in (0, 1)
        for name, values in stepping(rank, *after).items()
    }
    series = stepping(0, *before) | stepping(1, *before) | moved
    test = rates_of_samples(series, range(1230, 1800, 15), 0.75 * 32, 1.1 * 32)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("minutes", [1, 2, 3, 4, 6])
def test_failed_scrapes_of_a_rank_do_not_raise_the_rate_of_samples(minutes, some_rules, tmp_path):
    series: dict[str, str] = {}
    for rank in range(4):
        unread = (1200, 1200 + 60 * minutes) if rank == 0 else (0, 0)
        series |= stepping(rank, (0, 0, END), unread=unread)
    test = rates_of_samples(series, range(1200, 2100, 15), 3 * 16 * 0.99, 4 * 16 * 1.01)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_failed_scrapes_of_all_ranks_do_not_raise_the_rate_of_a_young_run(some_rules, tmp_path):
    start = ((1200, 1200, END),)
    series = stepping(0, *start, unread=(1290, 1380)) | stepping(1, *start, unread=(1290, 1380))
    test = rates_of_samples(series, range(1380, 1800, 15), 0.7 * 32, 1.1 * 32)

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_a_failed_scrape_does_not_raise_the_rate_of_samples(some_rules, tmp_path):
    steps, samples = (
        gauge(*((0.25, GONE if 24 <= i < 28 else growth * 15 * i) for i in range(40)), every=15)
        for growth in (2, 16)
    )
    series = of_both("zerowatch_steps_total", steps) | of_both("zerowatch_samples_total", samples)
    test = look(recorded.SAMPLES_RATE, series, {"": 32})
    test["interval"] = "15s"
    test["promql_expr_test"][0]["eval_time"] = "9m"

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("began", [0, 1110])
def test_the_last_rate_of_samples_of_an_ended_run_is_that_of_its_last_minutes(
    began, some_rules, tmp_path
):
    name, ended = recorded.SAMPLES_RATE.name, ((began, began, 1200),)
    series = stepping(0, *ended) | stepping(1, *ended)
    test = rates_of_samples(series, range(1185, 1200, 15), 0.95 * 32, 1.05 * 32)
    for figure in ("last", "min"):
        over = f"{figure}_over_time({name}[{1200 - began - 60}s] @ 1200)"
        wrong = f"({over} < {0.95 * 32} or {over} > {1.05 * 32}) or absent({over})"
        test["promql_expr_test"] += [{"expr": wrong, "eval_time": "30m", "exp_samples": []}]
    test["promql_expr_test"] += [{"expr": name, "eval_time": "20m15s", "exp_samples": []}]

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_the_rate_of_samples_falls_while_a_young_run_hangs(some_rules, tmp_path):
    """The last step ends two minutes after the first began."""
    series = {
        name: " ".join([*values.split()[:89], *[values.split()[88]] * 70])
        for rank in (0, 1)
        for name, values in stepping(rank, (1200, 1200, END)).items()
    }
    test = rates_of_samples(series, range(1320 + 105, 1320 + 165, 15), 0.4 * 32, 0.6 * 32)
    test["promql_expr_test"] += rates_of_samples(series, range(1695, 2000, 15), 0, 0.1)[
        "promql_expr_test"
    ]

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_samples_that_ranks_share_are_not_added_up(some_rules, tmp_path):
    series = of_both("zerowatch_samples_total", counter((5.5, 16), (1, None)))
    series |= of_both("zerowatch_shared_work", gauge((5.5, 1), (1, None)), of="samples")
    test = look(recorded.SAMPLES_RATE, training(MINUTES) | series, {})

    assert failures(some_rules(only=recorded.SAMPLES_RATE.name), [test], tmp_path) == ""


def test_no_rule_is_infinite_during_an_evaluation_without_steps(rules, tmp_path):
    """Infinity would break the scale of a graph and exceed the threshold of any alert."""
    series = dict.fromkeys(training(MINUTES), standing(1))
    series |= of_both(PHASES, growing(1), phase="eval") | of_both(EXPOSED, growing(0.1), group="dp")
    series |= of_both(f"{STEP_DURATION}_sum", standing(1))
    series |= of_both(f"{STEP_DURATION}_count", standing(1))
    every_rule = '{__name__=~"run.*:zerowatch_.+"}'
    unusable = f"count({every_rule}) != count({every_rule} < Inf)"  # NaN is not less either
    test = look(recorded.STEPS_RATE, series, {"": 0})
    test["promql_expr_test"] += [{"expr": unusable, "eval_time": f"{MINUTES}m", "exp_samples": []}]

    assert failures(rules, [test], tmp_path) == ""


def test_a_wrong_expected_value_fails(rules, tmp_path):
    wrong = look(recorded.STEPS_RATE, training(MINUTES), {"": 2.1})

    assert "FAILED" in failures(rules, [wrong], tmp_path)


def test_each_recording_rule_used_by_an_alert_has_a_case():
    """Every recording rule that an alert uses has a case above."""
    expressions = " ".join(alert.expression for alert in alerts(Timing()))
    needed = {rule for rules in GROUPS.values() for rule in rules if rule.name in expressions}

    # Over thirty minutes they are the same divisions.
    long = {recorded.EXPOSED_RATIO_LONG, recorded.REPLAY_RATIO_LONG}
    assert needed - CASES.keys() == long


def look(rule, series: dict[str, str], values: dict[str, float], at: str = f"{MINUTES}m"):
    """Round to millionths, because rates are not exact and promtool compares exactly."""
    expected = [
        {
            "labels": "{" + ", ".join(filter(None, ['job="zerowatch", run="night-7"', own])) + "}",
            "value": round(1e6 * value),
        }
        for own, value in values.items()
    ]
    return {
        "name": rule.name,
        "interval": "7s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round(1e6 * {rule.name})",
                "eval_time": at,
                "exp_samples": expected,
            }
        ],
    }
