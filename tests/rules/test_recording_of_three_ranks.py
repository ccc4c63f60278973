"""Recording rules that add up, average or choose among ranks have the values computed by hand.

All of them are evaluated on the history of one run of three ranks, no two of which are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from rules.history import Series, counter, gauge, of_rank
from rules.promtool import failures

from zerowatch.dashboards import recording_rules as recorded
from zerowatch.dashboards.recording_rules import GROUPS
from zerowatch.dashboards.run_status import RunStatus
from zerowatch.metrics.catalog import communication as comm
from zerowatch.metrics.catalog import devices, memory, overhead, training, window
from zerowatch.metrics.catalog.spec import MetricSpec

MINUTES = 6


def standing(spec: MetricSpec, *values: float, **labels: str) -> Series:
    """Return a gauge of ranks 0, 1 and so on."""
    return of_ranks(spec.name, [gauge((MINUTES, value)) for value in values], **labels)


def growing(spec: MetricSpec, *values: float, suffix: str = "", **labels: str) -> Series:
    """Return a counter of ranks 0, 1 and so on, which grows by so much in a second."""
    return of_ranks(spec.name + suffix, [counter((MINUTES, value)) for value in values], **labels)


def of_ranks(name: str, texts: Iterable[str], **labels: str) -> Series:
    series: Series = {}
    for rank, text in enumerate(texts):
        series |= of_rank(rank, name, text, **labels)
    return series


def of(rank: int) -> str:
    return f'node="node-{rank}", rank="{rank}"'


# Each rank trains for all of its time; rank 1 evaluates besides, which is no training time.
HISTORY = {
    **growing(training.STEPS, 2, 2, 2),
    **standing(training.LAST_STEP, 1008, 1009, 1007),
    **growing(training.PHASE_SECONDS, 0.3, 0.3, 0.2, phase="forward"),
    **growing(training.PHASE_SECONDS, 0.6, 0.5, 0.7, phase="backward"),
    **growing(training.PHASE_SECONDS, 0.1, 0.2, 0.1, phase="data"),
    **growing(training.PHASE_SECONDS, 0, 0.5, 0, phase="eval"),
    **growing(comm.COMM_UNION_SECONDS, 0.3, 0.2, 0.4),
    **growing(comm.COMM_SECONDS, 0.4, 0.3, 0.5, group="dp"),
    **growing(comm.COMM_EXPOSED_SECONDS, 0.1, 0.3, 0.05, group="dp"),
    **growing(comm.COMM_WAIT_SECONDS, 0.04, 0.1, 0.2, group="dp"),
    **growing(comm.COMM_WAIT_SECONDS, 0.02, 0.01, 0.03, group="tp"),
    **growing(comm.COLLECTIVE_CALLS, 12, 18, 24, op="all_reduce", group="dp", phase="backward"),
    **growing(comm.COLLECTIVE_CALLS, 6, 6, 12, op="all_reduce", group="tp", phase="forward"),
    **growing(comm.COLLECTIVE_BYTES, 600, 900, 1200, op="all_reduce", group="dp"),
    **growing(comm.COLLECTIVE_WIRE_BYTES, 1200, 1500, 2400, op="all_reduce", group="dp"),
    **growing(comm.COLLECTIVE_DURATION, 3, 4, 6, suffix="_bucket", op="all_reduce", le="0.01"),
    **growing(comm.EXCHANGE_FAILURES, 0.1, 0.2, 0.4, reason="store"),
    **standing(comm.COMM_BUS_BANDWIDTH, 7e8, 5e8, 6e8, op="all_reduce", group="dp"),
    **standing(comm.COMM_VOLUME_RATIO, 1.25, 1.5, 1.375),
    **standing(comm.COMM_STEP_WIRE_BYTES, 3e8, 5e8, 4e8, kind="measured"),
    **standing(comm.COMM_LINK_BANDWIDTH, 4e8, 3e8, 8e8, group="dp"),
    **standing(comm.COMM_LINK_BEST_BANDWIDTH, 6e8, 9e8, 8e8, group="dp"),
    **standing(comm.COMM_LINK_LATENCY, 0.001, 0.003, 0.002, group="dp"),
    **standing(comm.PEER_HEARTBEAT_AGE, 5, 8, 6),
    **growing(training.STEP_DURATION, 3, 5, 7, suffix="_bucket", le="0.5"),
    **growing(training.STEP_DURATION, 1, 1.2, 0.8, suffix="_sum"),
    **growing(training.STEP_DURATION, 2, 4, 1, suffix="_count"),
    **standing(training.STEP_DURATION_QUANTILE, 0.4, 0.7, 0.6, quantile="0.5"),
    **standing(training.STEP_DURATION_QUANTILE, 0.8, 0.9, 1.5, quantile="0.99"),
    **standing(training.LOSS, 1, 2, 6),
    **standing(training.GRADIENT_NORM, 1, 5, 2),
    **standing(training.MFU, 0.25, 0.5, 0.375),
    **standing(training.RUN_START_TIMESTAMP, 20, 5, 9),
    **standing(training.RUN_ATTEMPT, 0, 0, 0),
    **growing(training.PRODUCTIVE_SECONDS, 0.3, 0.4, 0.2),
    **standing(training.WORLD_SIZE, 3, 5, 4),
    **standing(training.RUN_ACTIVE, 1, 1, 0),
    **standing(memory.MEMORY_HEADROOM, 1e9, -1e9, 3e9, device="cpu"),
    **standing(memory.MEMORY_LIMIT, 4e9, 8e9, 6e9, device="cpu"),
    **standing(memory.MEMORY_CATEGORY_BYTES, 1e9, 3e9, 2e9, device="cpu", category="other"),
    # Rank 0 has the most of the optimizer, and rank 1 the most of both categories together.
    **standing(memory.MEMORY_CATEGORY_BYTES, 6e9, 4e9, 1e9, device="cuda:0", category="optimizer"),
    **standing(memory.MEMORY_CATEGORY_BYTES, 1e9, 5e9, 2e9, device="cuda:0", category="other"),
    **standing(memory.MEMORY_BYTES, 2e9, 5e9, 3e9, device="cpu", state="allocated"),
    **standing(memory.MEMORY_PEAK, 3e9, 6e9, 4e9, device="cpu", state="allocated"),
    **standing(memory.MEMORY_PHASE_PEAK, 2e9, 7e9, 4e9, device="cpu", phase="forward"),
    **standing(memory.MEMORY_BASELINE, 3e8, 5e8, 4e8, device="cpu"),
    **standing(memory.MEMORY_FRAGMENTATION, 1e8, 6e8, 2e8, device="cpu"),
    **standing(memory.MEMORY_PREDICTED_PEAK, 3e9, 7e9, 5e9, device="cpu"),
    **standing(memory.MEMORY_PREDICTION_ERROR, 0.01, 0.05, 0.02, device="cpu"),
    **standing(memory.MEMORY_LEAK, 100, 700, 300, device="cpu", category="other"),
    **standing(memory.OOM_RISK, 0.25, 0.75, 0.5, device="cpu"),
    **growing(memory.OFFLOAD_SECONDS, 0.3, 0.6, 0.15, direction="to_host"),
    **growing(memory.OFFLOAD_BYTES, 600, 1800, 1200, direction="to_host"),
    **standing(window.MICRO_BATCH_SAMPLES, 3, 7, 4),
    **standing(window.BATCH_SHARE, 0.2, 0.5, 0.3),
    **standing(window.COMPRESSION_ERROR, 0.01, 0.04, 0.02, codec="int8"),
    **growing(window.REPLAY_SECONDS, 0.2),
    **growing(devices.DEVICE_SECONDS, 0.6, 0.3, 0.45, device="cpu", state="busy"),
    **growing(devices.DEVICE_SECONDS, 0.4, 0.7, 0.55, device="cpu", state="idle"),
    **standing(devices.DEVICE_POWER, 300, 500, 450, device="cpu"),
    **standing(devices.DEVICE_SM_ACTIVE, 0.2, 0.8, 0.35, device="cpu"),
    **standing(devices.DEVICE_TEMPERATURE, 61, 74, 66, device="cpu"),
    **standing(devices.DEVICE_CLOCK, 1.4e9, 1.1e9, 1.3e9, device="cpu"),
    **growing(
        devices.DEVICE_LINK_BYTES, 100, 300, 700, device="cpu", link="pcie", direction="sent"
    ),
    **growing(overhead.WATCH_SECONDS, 0.002, 0.006, 0.001, part="hooks"),
    **growing(overhead.WATCH_SECONDS, 0.001, 0.002, 0.006, part="watch_thread"),
}
CPU = 'device="cpu"'
# The values by their labels besides job and run. In a second, the ranks take 6 steps together, and
# train for 3 seconds.
VALUES = {
    recorded.EXPOSED_RATIO: {"": 0.15},
    recorded.EXPOSED_RATIO_LONG: {"": 0.15},
    recorded.COMM_RATIO: {"": 0.3},
    recorded.WAIT_RATIO_BY_RANK: {of(0): 0.06, of(1): 0.11, of(2): 0.23},
    recorded.CALLS_PER_STEP: {'op="all_reduce"': 13},
    recorded.COLLECTIVE_BUCKETS: {'le="0.01", op="all_reduce"': 13},
    recorded.BUS_BANDWIDTH: {'group="dp", op="all_reduce"': 5e8},
    recorded.VOLUME_RATIO: {"": 1.5},
    recorded.STEP_WIRE_BYTES: {'kind="measured"': 5e8},
    recorded.WIRE_BYTES_PER_STEP: {'group="dp", op="all_reduce"': 850},
    recorded.PAYLOAD_BYTES_PER_STEP: {'group="dp", op="all_reduce"': 450},
    recorded.LINK_SECOND_LOWEST: {'group="dp"': 4e8},
    recorded.LINK_BANDWIDTH: {'group="dp"': 3e8},
    recorded.LINK_BEST_BANDWIDTH: {'group="dp"': 9e8},
    recorded.LINK_LATENCY: {'group="dp"': 0.003},
    recorded.HEARTBEAT_AGE: {"": 8},
    recorded.EXCHANGE_FAILURES_RATE: {'reason="store"': 0.7},
    recorded.MFU: {"": 0.375},
    recorded.LOSS: {"": 3},
    recorded.GRADIENT_NORM: {"": 5},
    recorded.ACTIVE_RANKS: {"": 2},
    recorded.STEP_BUCKETS: {'le="0.5"': 15},
    recorded.STEP_DURATION: {"": 3 / 7},
    recorded.STEP_DURATION_BY_RANK: {of(0): 0.5, of(1): 0.3, of(2): 0.8},
    recorded.PHASE_SECONDS_PER_STEP: {
        'phase="forward"': 0.8 / 6,
        'phase="backward"': 0.3,
        'phase="data"': 0.4 / 6,
        'phase="eval"': 0.5 / 6,
    },
    recorded.DATA_RATIO_BY_RANK: {of(0): 0.1, of(1): 0.2, of(2): 0.1},
    recorded.HEADROOM_RATIO: {
        f"{CPU}, {of(0)}": 0.25,
        f"{CPU}, {of(1)}": -0.125,
        f"{CPU}, {of(2)}": 0.5,
    },
    recorded.PEAK_RATIO: {
        f"{CPU}, {of(0)}": 0.75,
        f"{CPU}, {of(1)}": 0.75,
        f"{CPU}, {of(2)}": 2 / 3,
    },
    recorded.OOM_RISK: {f"{CPU}, {of(0)}": 0.25, f"{CPU}, {of(1)}": 0.75, f"{CPU}, {of(2)}": 0.5},
    recorded.MEMORY_CATEGORIES: {
        f'category="other", {CPU}': 3e9,
        'category="optimizer", device="cuda:0"': 4e9,
        'category="other", device="cuda:0"': 5e9,
    },
    recorded.MEMORY_STATES: {f'{CPU}, state="allocated"': 5e9},
    recorded.MEMORY_PEAK: {f'{CPU}, state="allocated"': 6e9},
    recorded.MEMORY_LIMIT: {CPU: 4e9},
    recorded.PHASE_PEAK: {f'{CPU}, phase="forward"': 7e9},
    recorded.BASELINE: {CPU: 5e8},
    recorded.FRAGMENTATION: {CPU: 6e8},
    recorded.PREDICTED_PEAK: {CPU: 7e9},
    recorded.PREDICTION_ERROR: {CPU: 0.05},
    recorded.LEAK: {f'category="other", {CPU}': 700},
    recorded.OFFLOAD_RATIO: {'direction="to_host"': 0.35},
    recorded.OFFLOAD_BYTES_PER_STEP: {'direction="to_host"': 600},
    recorded.MICRO_BATCH_SAMPLES: {"": 7},
    recorded.LARGEST_SHARE: {"": 0.5},
    recorded.SMALLEST_SHARE: {"": 0.2},
    recorded.EVEN_SHARE: {"": 1 / 3},
    recorded.COMPRESSION_ERROR: {'codec="int8"': 0.04},
    recorded.REPLAY_RATIO: {"": 0.2},
    recorded.REPLAY_RATIO_LONG: {"": 0.2},
    recorded.DEVICE_UTILIZATION: {CPU: 0.45},
    recorded.DEVICE_UTILIZATION_BY_RANK: {
        f"{CPU}, {of(0)}": 0.6,
        f"{CPU}, {of(1)}": 0.3,
        f"{CPU}, {of(2)}": 0.45,
    },
    recorded.POWER: {"": 1250},
    recorded.SM_ACTIVE: {CPU: 0.45},
    recorded.TEMPERATURE_BY_RANK: {
        f"{CPU}, {of(0)}": 61,
        f"{CPU}, {of(1)}": 74,
        f"{CPU}, {of(2)}": 66,
    },
    recorded.CLOCK: {CPU: 1.1e9},
    recorded.LINK_BYTES_RATE: {'direction="sent", link="pcie"': 1100},
    recorded.WATCH_RATIO_BY_RANK: {of(0): 0.003, of(1): 0.008, of(2): 0.007},
    recorded.WATCH_RATIO_BY_PART: {'part="hooks"': 0.003, 'part="watch_thread"': 0.003},
    recorded.RUN_START: {"": 5},
    recorded.RUN_ATTEMPT: {"": 0},
    recorded.WORLD_SIZE: {"": 5},
    # The last scrape was three seconds ago.
    recorded.STEPS_DONE: {"": 2 * 357},
    recorded.LAST_STEP: {"": 1009},
    recorded.GOODPUT: {"": 0.4 * 357 / 355},
    recorded.STEP_QUANTILE_MIN: {'quantile="0.5"': 0.4, 'quantile="0.99"': 0.8},
    recorded.STEP_QUANTILE_MEDIAN: {'quantile="0.5"': 0.6, 'quantile="0.99"': 0.9},
    recorded.STEP_QUANTILE_MAX: {'quantile="0.5"': 0.7, 'quantile="0.99"': 1.5},
}
# By name, as dashboards of users read them: the labels besides job.
NAMES = """
run_name:zerowatch_alert_threshold:effective run name
run:zerowatch_comm_exposed_seconds:ratio_rate5m run
run:zerowatch_comm_exposed_seconds:ratio_rate30m run
run:zerowatch_comm_exposed_seconds:ratio_rate5m_median6h run
run_rank:zerowatch_comm_exposed_seconds:ratio_rate5m run rank node
run_group:zerowatch_comm_exposed_seconds:ratio_rate5m run group
run:zerowatch_comm_union_seconds:ratio_rate5m run
run_cause:zerowatch_comm_cause_seconds:ratio_rate5m run cause
run_rank:zerowatch_comm_wait_seconds:ratio_rate5m run rank node
run_rank:zerowatch_comm_wait_seconds:shortfall_rate5m run rank node
run_op:zerowatch_collective_calls:per_step_rate5m run op
run_op_le:zerowatch_collective_duration_seconds_bucket:rate5m run op le
run_group:zerowatch_comm_link_bandwidth_bytes_per_second:second_lowest run group
run_group:zerowatch_comm_link_bandwidth_bytes_per_second:p90_6h run group
run_rank_group:zerowatch_comm_link_bandwidth_bytes_per_second:usual_ratio run rank node group
run_op_group:zerowatch_comm_bus_bandwidth_bytes_per_second:min run op group
run:zerowatch_comm_volume_ratio:max run
run_kind:zerowatch_comm_step_wire_bytes:max run kind
run:zerowatch_comm_coverage_ratio:min run
run_rank_phase:zerowatch_straggler_score_ratio:max run rank node phase
run_op_group:zerowatch_collective_wire_bytes:per_step_rate5m run op group
run_op_group:zerowatch_collective_bytes:per_step_rate5m run op group
run_group:zerowatch_comm_link_bandwidth_bytes_per_second:min run group
run_group:zerowatch_comm_link_best_bandwidth_bytes_per_second:max run group
run_group:zerowatch_comm_link_latency_seconds:max run group
run:zerowatch_peer_heartbeat_age_seconds:max run
run_reason:zerowatch_exchange_failures:rate5m run reason
run:zerowatch_steps:rate5m run
run:zerowatch_mfu_ratio:avg run
run:zerowatch_mfu_ratio:median6h run
run:zerowatch_loss:avg run
run:zerowatch_loss:median1h run
run:zerowatch_loss:deviation run
run:zerowatch_loss:spike_ratio run
run:zerowatch_gradient_norm:max run
run:zerowatch_gradient_norm:median1h run
run:zerowatch_gradient_norm:median_ratio run
run:zerowatch_run_active:sum run
run_le:zerowatch_step_duration_seconds_bucket:rate5m run le
run:zerowatch_step_duration_seconds:mean_rate5m run
run_rank:zerowatch_step_duration_seconds:mean_rate5m run rank node
run_phase:zerowatch_phase_seconds:per_step_rate5m run phase
run_phase:zerowatch_phase_seconds:ratio_rate5m run phase
run_rank:zerowatch_phase_seconds:data_ratio_rate5m run rank node
run:zerowatch_generated_tokens:per_generate_second_rate5m run
run:zerowatch_generate_comm_exposed_seconds:per_generate_second_rate5m run
run:zerowatch_generated_tokens:per_sequence_rate5m run
run:zerowatch_collective_calls:generate_gathers_per_step_rate5m run
run:zerowatch_skipped_steps:ratio_rate5m run
run:zerowatch_last_checkpoint_timestamp_seconds:max run
run:zerowatch_last_checkpoint_timestamp_seconds:interval run
run:zerowatch_last_checkpoint_timestamp_seconds:max_hourly run
run:zerowatch_last_checkpoint_timestamp_seconds:interval_hourly run
run:zerowatch_last_checkpoint_timestamp_seconds:max_max7d run
run:zerowatch_last_checkpoint_timestamp_seconds:interval_last7d run
run_rank_instance:zerowatch_run_active:active_timestamp_seconds run rank node instance
run:zerowatch_run_active:active_timestamp_seconds run
run_rank:zerowatch_run_active:ended_timestamp_seconds run rank node
run:zerowatch_run_active:rank_0_active_timestamp_seconds run
run:zerowatch_last_checkpoint_timestamp_seconds:unsaved_since run
run_rank_device:zerowatch_memory_peak_bytes:limit_ratio run rank node device
run_rank_device:zerowatch_memory_headroom_bytes:limit_ratio run rank node device
run_rank_device:zerowatch_oom_risk_ratio:max run rank node device
run_node:zerowatch_memory_bytes:limit_ratio run node
run_device_category:zerowatch_memory_category_bytes:max run device category
run_direction:zerowatch_offload_seconds:ratio_rate5m run direction
run_direction:zerowatch_offload_bytes:per_step_rate5m run direction
run_device_state:zerowatch_memory_bytes:max run device state
run_device_state:zerowatch_memory_peak_bytes:max run device state
run_device:zerowatch_memory_limit_bytes:min run device
run_device_phase:zerowatch_memory_phase_peak_bytes:max run device phase
run_device:zerowatch_memory_baseline_bytes:max run device
run_device:zerowatch_memory_fragmentation_bytes:max run device
run_device:zerowatch_memory_predicted_peak_bytes:max run device
run_device:zerowatch_memory_prediction_error_ratio:max run device
run_device_category:zerowatch_memory_leak_bytes_per_step:max run device category
run:zerowatch_micro_batch_samples:max run
run:zerowatch_batch_share_ratio:max run
run:zerowatch_batch_share_ratio:min run
run:zerowatch_batch_share_ratio:avg run
run_codec:zerowatch_compression_error_ratio:max run codec
run:zerowatch_replay_seconds:ratio_rate5m run
run:zerowatch_replay_seconds:ratio_rate30m run
run_device:zerowatch_device_utilization_ratio:avg5m run device
run_rank_device:zerowatch_device_utilization_ratio:avg5m run rank node device
run:zerowatch_device_power_watts:sum run
run_device:zerowatch_device_sm_active_ratio:avg run device
run_rank_device:zerowatch_device_temperature_celsius:max run rank node device
run_device:zerowatch_device_clock_hertz:min run device
run_link_direction:zerowatch_device_link_bytes:rate5m run link direction
run:zerowatch_run_active:state run
run:zerowatch_run_start_timestamp_seconds:min run
run:zerowatch_run_attempt:max run
run:zerowatch_world_size:max run
run:zerowatch_steps_total:max run
run:zerowatch_last_step:max run
run:zerowatch_samples:rate5m run
run:zerowatch_productive_seconds_total:start_ratio run
run_quantile:zerowatch_step_duration_quantile_seconds:min run quantile
run_quantile:zerowatch_step_duration_quantile_seconds:median run quantile
run_quantile:zerowatch_step_duration_quantile_seconds:max run quantile
run_rank:zerowatch_watch_seconds:rate5m run rank node
run_part:zerowatch_watch_seconds:avg_rate5m run part
"""
ACTIVE = standing(training.RUN_ACTIVE, 1, 1)
STEPPING = growing(training.STEPS, 2, 2)
AT_WORK = standing(training.LAST_ACTIVITY_TIMESTAMP, 5 * 60, 60)
FREE = standing(comm.HANG_ACTIVE, 0, 0)
HANGING = standing(comm.HANG_ACTIVE, 0, 1)
IDLE = standing(training.LAST_ACTIVITY_TIMESTAMP, 59, 30)  # 301 and 330 s ago
NOT_YET_STALLED = standing(training.LAST_ACTIVITY_TIMESTAMP, 60, 30)  # 300 and 330 s ago
NO_STEP = standing(training.STEPS, 0, 0)
OVER = standing(training.RUN_ACTIVE, 0, 0)
# The end was read once, 17 s before the evaluation, and then no rank answered any more.
READ_ONCE = ((5.7, None), (0.1, 1), (1, None))
OVER_READ_ONCE = of_ranks(training.RUN_ACTIVE.name, [gauge((5.7, 1), (0.1, 0), (1, None))] * 2)
FAILED = of_ranks(training.RUN_ACTIVE.name, [gauge((5.8, 1), (1, None))] * 2)


def ended(*reasons: str, read: tuple[tuple[float, float | None], ...] = ((MINUTES, 1),)) -> Series:
    """Return the ends of ranks 0, 1 and so on."""
    series: Series = {}
    for rank, reason in enumerate(reasons):
        series |= of_rank(rank, training.RUN_END_INFO.name, gauge(*read), reason=reason)
    return series


STATES = {
    "training": (ACTIVE | STEPPING | AT_WORK | FREE, RunStatus.TRAINING, 1),
    "training, if activity was five minutes ago": (
        ACTIVE | STEPPING | NOT_YET_STALLED | FREE,
        RunStatus.TRAINING,
        1,
    ),
    "starting without a step": (ACTIVE | NO_STEP | AT_WORK | FREE, RunStatus.STARTING, 2),
    "stalled before starting": (ACTIVE | NO_STEP | IDLE | FREE, RunStatus.STALLED, 3),
    "stalled after steps": (ACTIVE | STEPPING | IDLE | FREE, RunStatus.STALLED, 3),
    "hanging before stalled": (ACTIVE | STEPPING | IDLE | HANGING, RunStatus.HANGING, 4),
    "active before ended": (
        of_rank(0, training.RUN_ACTIVE.name, gauge((MINUTES, 1)))
        | of_rank(1, training.RUN_ACTIVE.name, gauge((MINUTES, 0)))
        | STEPPING
        | AT_WORK
        | ended("completed"),
        RunStatus.TRAINING,
        1,
    ),
    "completed": (OVER | STEPPING | ended("completed", "completed"), RunStatus.COMPLETED, 10),
    "hanging ends with the run": (OVER | HANGING | ended("completed"), RunStatus.COMPLETED, 10),
    "interrupted": (OVER | ended("completed", "interrupted"), RunStatus.INTERRUPTED, 11),
    "peer failed": (OVER | ended("peer_failed", "interrupted"), RunStatus.PEER_FAILED, 12),
    "hang abort": (OVER | ended("hang_abort", "peer_failed"), RunStatus.HANG_ABORT, 13),
    "exception": (OVER | ended("peer_failed", "exception"), RunStatus.EXCEPTION, 14),
    "exception before hang abort": (
        OVER | ended("exception", "hang_abort"),
        RunStatus.EXCEPTION,
        14,
    ),
    "out of memory": (OVER | ended("out_of_memory", "exception"), RunStatus.OUT_OF_MEMORY, 15),
    "ended without a reason": (OVER | STEPPING, RunStatus.ENDED, 16),
    "completed, read once": (
        OVER_READ_ONCE | ended("completed", "completed", read=READ_ONCE),
        RunStatus.COMPLETED,
        10,
    ),
    "exception, read once": (
        FAILED | ended("exception", "peer_failed", read=READ_ONCE),
        RunStatus.EXCEPTION,
        14,
    ),
    "ended without a reason, read once": (OVER_READ_ONCE, RunStatus.ENDED, 16),
    "training again": (
        of_rank(0, training.RUN_ACTIVE.name, gauge((5.9, None), (1, 1)), instance="10.1.0.0:9464")
        | OVER_READ_ONCE
        | STEPPING
        | AT_WORK
        | ended("interrupted", "interrupted", read=READ_ONCE),
        RunStatus.TRAINING,
        1,
    ),
}


def look(name: str, series: Series, values: dict[Any, dict[str, float]]) -> dict[str, Any]:
    """Round to millionths, because rates are not exact and promtool compares exactly."""
    run = 'job="zerowatch", run="night-7"'
    return {
        "name": name,
        "interval": "7s",
        "input_series": [{"series": each, "values": text} for each, text in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round(1e6 * {rule.name})",
                "eval_time": f"{MINUTES}m",
                "exp_samples": [
                    {
                        "labels": f"{{{', '.join(filter(None, [run, labels]))}}}",
                        "value": round(1e6 * value),
                    }
                    for labels, value in expected.items()
                ],
            }
            for rule, expected in values.items()
        ],
    }


def test_the_figures_of_three_ranks_are_combined_as_computed_by_hand(rules, tmp_path):
    assert failures(rules, [look("three ranks", HISTORY, VALUES)], tmp_path) == ""


@pytest.mark.parametrize(
    ("rule", "values"),
    [(recorded.RUN_ATTEMPT, {"": 3}), (recorded.GOODPUT, {})],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_last_attempt_counts_and_after_a_restart_goodput_is_not_known(
    rule, values, some_rules, tmp_path
):
    restarted = HISTORY | standing(training.RUN_ATTEMPT, 1, 3, 2)

    test = look("restarted", restarted, {rule: values})

    assert failures(some_rules(only=rule.name), [test], tmp_path) == ""


def test_the_first_state_that_applies_is_that_of_the_run(some_rules, tmp_path):
    looks = [
        look(title, series, {recorded.RUN_STATE: {"": state}})
        for title, (series, state, _) in STATES.items()
    ]

    assert failures(some_rules(only=recorded.RUN_STATE.name), looks, tmp_path) == ""


def test_ranks_that_were_killed_have_no_state(some_rules, tmp_path):
    """Dashboards say that the run has vanished."""
    test = look("killed", FAILED | STEPPING | AT_WORK, {recorded.RUN_STATE: {}})

    assert failures(some_rules(only=recorded.RUN_STATE.name), [test], tmp_path) == ""


@pytest.mark.parametrize("title", STATES)
def test_the_number_of_a_state_is_that_of_stored_runs(title):
    _, state, number = STATES[title]

    assert state == number


def test_the_rules_have_the_names_and_labels_that_dashboards_of_users_read():
    listed = dict(line.split(maxsplit=1) for line in NAMES.strip().splitlines())

    assert {
        rule.name: " ".join(rule.labels) for rules in GROUPS.values() for rule in rules
    } == listed
