"""Tests of the catalog: promised metrics, naming rules and the number of series per rank."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

import pytest

from zerowatch.metrics.catalog import (
    CATALOG,
    across_ranks,
    communication,
    devices,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.spec import MetricSpec

# What the design promises, written out a second time: dashboards and alerts of users rely on it.
PROMISED = """
run_info info run_id version torch deepspeed backend accelerator zero_stage world_size
run_active gauge
run_end_info info reason
run_start_timestamp_seconds gauge
run_attempt gauge
world_size gauge
productive_seconds_total counter
checkpoints_total counter outcome
checkpoint_seconds_total counter
last_checkpoint_timestamp_seconds gauge
last_checkpoint_bytes gauge
alert_threshold gauge name
steps_total counter
last_step gauge
shared_work gauge of
samples_total counter
tokens_total counter
skipped_steps_total counter
step_duration_seconds histogram
step_duration_quantile_seconds summary quantile
phase_seconds_total counter phase
loss gauge
gradient_norm gauge
learning_rate gauge
loss_scale gauge
last_step_timestamp_seconds gauge
flops_total counter
mfu_ratio gauge
collective_calls_total counter op group phase
collective_bytes_total counter op group
collective_wire_bytes_total counter op group
collective_duration_seconds histogram op
comm_seconds_total counter group
comm_union_seconds_total counter
comm_exposed_seconds_total counter group
comm_own_exposed_seconds_total counter phase
comm_wait_seconds_total counter group
comm_transfer_seconds_total counter group
comm_cause_seconds_total counter cause
comm_bus_bandwidth_bytes_per_second gauge op group
comm_volume_ratio gauge
comm_coverage_ratio gauge
collective_mismatches_total counter
comm_link_latency_seconds gauge group
comm_link_bandwidth_bytes_per_second gauge group
comm_link_best_bandwidth_bytes_per_second gauge group
comm_exposed_error_ratio gauge
step_time_ratio gauge part
comm_step_wire_bytes gauge kind
straggler_score_ratio gauge phase
exchange_failures_total counter reason
peer_heartbeat_age_seconds gauge
hangs_total counter
hang_active gauge
memory_bytes gauge device state
memory_peak_bytes gauge device state
memory_limit_bytes gauge device
memory_category_bytes gauge device category
memory_headroom_bytes gauge device
oom_risk_ratio gauge device
oom_eta_steps gauge device
alloc_retries_total counter device
ooms_total counter device outcome
offload_bytes_total counter direction
offload_seconds_total counter direction
device_utilization_ratio gauge device
device_seconds_total counter device state
device_sm_active_ratio gauge device
device_power_watts gauge device
device_temperature_celsius gauge device
device_clock_hertz gauge device
device_energy_joules_total counter device
device_link_bytes_total counter device link direction
device_info info device uuid pci_bus_id name driver
device_temperature_limit_celsius gauge device
device_throttled_seconds_total counter device reason
device_ecc_errors_total counter device kind
device_remapped_rows gauge device kind
device_row_remap gauge device state
device_link_errors_total counter device link kind
device_xid_errors_total counter device xid
device_lost gauge device
tuner_state gauge state
tuner_knob_value gauge knob
tuner_gain_ratio gauge knob
tuner_decisions_total counter verdict
tuner_exploration_seconds_total counter
tuner_discarded_observations_total counter
micro_batch_samples gauge
accumulation_steps gauge
batch_share_ratio gauge
window_replays_total counter outcome
engine_rebuilds_total counter outcome
replay_seconds_total counter
engine_rebuild_seconds_total counter
restarts_total counter
compression_error_ratio gauge codec
checkpoint_background_seconds_total counter
nonfinite_losses_total counter
last_activity_timestamp_seconds gauge
device_peak_flops_per_second gauge device
generate_calls_total counter
generated_sequences_total counter
generated_tokens_total counter
generate_comm_exposed_seconds_total counter
hang_awaited_rank gauge
memory_baseline_bytes gauge device
memory_phase_peak_bytes gauge device phase
memory_fragmentation_bytes gauge device
memory_predicted_peak_bytes gauge device
memory_prediction_error_ratio gauge device
memory_leak_bytes_per_step gauge device category
oom_next_batch_risk_ratio gauge device
ranks_step_duration_seconds gauge stat
ranks_exposed_comm_ratio gauge stat
ranks_comm_wait_ratio gauge stat
ranks_data_ratio gauge stat
ranks_memory_peak_ratio gauge stat
ranks_oom_risk_ratio gauge stat
ranks_device_utilization_ratio gauge stat
ranks_device_temperature_celsius gauge stat
ranks_mfu_ratio gauge stat
ranks_samples_per_second gauge stat
ranks_reporting gauge figure
ranks_extreme gauge figure stat
ranks_same_loss gauge
tuner_gain_lower_bound_ratio gauge knob
tuner_symptom_ratio gauge symptom
exporter_failures_total counter exporter
watch_last_update_timestamp_seconds gauge
watch_seconds_total counter part
hook_failures_total counter hook
dropped_records_total counter part
dead_threads gauge
"""
PROMISED_VALUES = {
    "group": "dp tp pp ep sp world other zerowatch",
    "phase of phase_seconds_total": "data forward backward optimizer eval generate "
    "checkpoint other",
    "phase of comm_own_exposed_seconds_total": "data forward backward optimizer eval generate "
    "checkpoint other",
    "phase of straggler_score_ratio": "data forward backward optimizer other",
    "part of step_time_ratio": "compute comm overlap idle",
    "kind of comm_step_wire_bytes": "measured predicted reference",
    "reason of run_end_info": "completed interrupted exception out_of_memory peer_failed "
    "hang_abort",
    "quantile": "0.5 0.9 0.99",
    "of": "samples tokens",
    "outcome of checkpoints_total": "saved failed",
    "cause": "latency bandwidth imbalance redundancy",
    "state of memory_bytes": "allocated reserved inactive_split",
    "state of memory_peak_bytes": "allocated reserved",
    "category": "parameters gradients optimizer activations comm_buffers other",
    "link": "nvlink pcie",
    "direction of device_link_bytes_total": "sent received",
    "direction of offload_bytes_total": "to_host to_device to_nvme from_nvme",
    "verdict": "accepted rolled_back rejected interrupted not_undone advised",
    "outcome of ooms_total": "replayed fatal killed raised",
    "outcome of window_replays_total": "committed gave_up",
    "outcome of engine_rebuilds_total": "committed undone refused",
    "codec": "bf16 fp16 int8 fp8",
    "op": "all_reduce all_gather reduce_scatter reduce broadcast all_to_all gather scatter send "
    "recv barrier",
    "phase of collective_calls_total": "data forward backward optimizer eval generate "
    "checkpoint other",
    "phase of memory_phase_peak_bytes": "data forward backward optimizer eval generate "
    "checkpoint other",
    "reason of exchange_failures_total": "store peer unmatched",
    "direction of offload_seconds_total": "to_host to_device to_nvme from_nvme",
    "state of device_seconds_total": "busy idle",
    "reason of device_throttled_seconds_total": "power_cap hw_slowdown hw_thermal sw_thermal "
    "power_brake",
    "kind of device_ecc_errors_total": "corrected uncorrected",
    "kind of device_remapped_rows": "corrected uncorrected",
    "state of device_row_remap": "pending failed",
    "kind of device_link_errors_total": "crc replay recovery",
    **{
        f"stat of ranks_{figure}": "min median max"
        for figure in (
            "step_duration_seconds",
            "exposed_comm_ratio",
            "comm_wait_ratio",
            "data_ratio",
            "memory_peak_ratio",
            "oom_risk_ratio",
            "device_utilization_ratio",
            "device_temperature_celsius",
            "mfu_ratio",
            "samples_per_second",
        )
    },
    "stat of ranks_extreme": "min max",
    "figure": "step_duration exposed_comm comm_wait data memory_peak oom_risk "
    "device_utilization device_temperature mfu samples_per_second",
    "state of tuner_state": "warmup observe propose preflight applied trial accept rollback "
    "cooldown safe_mode frozen",
    "symptom": "comm_bandwidth comm_redundancy comm_latency comm_imbalance device_idle "
    "host_bound data_bound memory_pressure memory_idle straggler",
    "part of watch_seconds_total": "hooks collectives watch_thread cross_rank_thread http_thread "
    "otlp_thread monitoring_process",
    "part of dropped_records_total": "collectives steps timing graph_capture run_log otlp "
    "listeners sinks",
}
# Counters of events and of what a run always has: `increase` sees their first event.
FROM_ZERO = """
productive_seconds_total checkpoints_total checkpoint_seconds_total
checkpoint_background_seconds_total steps_total skipped_steps_total nonfinite_losses_total
phase_seconds_total window_replays_total replay_seconds_total engine_rebuilds_total
engine_rebuild_seconds_total restarts_total generate_calls_total generated_sequences_total
generated_tokens_total generate_comm_exposed_seconds_total collective_mismatches_total
exchange_failures_total hangs_total ooms_total tuner_decisions_total
tuner_exploration_seconds_total tuner_discarded_observations_total hook_failures_total
exporter_failures_total
"""
# What `serve.detail = "lean"` serves of metrics that it does not serve whole.
LEAN_WITHOUT = {
    "comm_seconds_total": ("group",),
    "comm_exposed_seconds_total": ("group",),
    "comm_wait_seconds_total": ("group",),
    "watch_seconds_total": ("part",),
}
LEAN_ONLY = {
    "device_ecc_errors_total": {"kind": ("uncorrected",)},
    "exchange_failures_total": {"reason": ("store", "unmatched")},
    "dropped_records_total": {"part": ("steps", "run_log")},
    "memory_bytes": {"state": ("allocated",)},
    "memory_peak_bytes": {"state": ("allocated",)},
}
# Units that Prometheus' own guide uses instead of a base unit, and their short forms.
NO_BASE_UNIT = re.compile(
    r"_(ms|us|ns|sec|secs|millis\w*|micros\w*|nanos\w*|minutes|hours|kb|mb|gb|kib|mib|gib|kilo\w*|"
    r"mega\w*|giga\w*|percent|pct|mhz|ghz|fahrenheit|kelvin|bits|pages)(_|$)"
)

# A rank's budget, with at most two group roles, and what rank 0 has on top of it for the tuner and
# for what all ranks do together.
SERIES_BUDGET = 400
RANK_ZERO_SERIES_BUDGET = 550
ON_RANK_ZERO = (*tuner.METRICS, *window.ON_RANK_ZERO, *across_ranks.METRICS)
# Sets that only a run knows. Two devices: the GPU and the host. One hook failed at most: a hook
# that fails is dropped, and what fails is a defect that fails on every rank alike.
OPEN_SETS = {"device": 2, "hook": 2, "exporter": 1, "knob": 12}
# Metrics of GPUs alone: the host has no series of these.
GPU_METRICS = (
    devices.DEVICE_INFO,
    devices.DEVICE_SM_ACTIVE,
    devices.DEVICE_TEMPERATURE_LIMIT,
    devices.DEVICE_THROTTLED_SECONDS,
    devices.DEVICE_ECC_ERRORS,
    devices.DEVICE_REMAPPED_ROWS,
    devices.DEVICE_ROW_REMAP,
    devices.DEVICE_LINK_ERRORS,
    devices.DEVICE_XID_ERRORS,
    devices.DEVICE_LOST,
)
# The collectives of a big ordinary job: ZeRO-3 that also evaluates, checkpoints and logs by
# all_reduce. The closed sets alone do not bound it: 11 ops x 7 groups x 7 phases never all happen.
COLLECTIVES_OF_A_JOB = [
    ("all_gather", "dp", ("forward", "backward", "optimizer", "eval", "checkpoint", "other")),
    ("reduce_scatter", "dp", ("backward", "optimizer")),
    ("all_reduce", "dp", ("backward", "optimizer", "eval", "checkpoint", "other")),
    ("broadcast", "dp", ("optimizer", "checkpoint", "other")),
    ("reduce", "dp", ("backward",)),
    ("all_reduce", "world", ("data", "eval", "checkpoint", "other")),
    ("broadcast", "world", ("checkpoint", "other")),
    ("barrier", "world", ("eval", "checkpoint", "other")),
]

every_metric = pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)


def named(name: str) -> MetricSpec:
    return next(spec for spec in CATALOG if spec.name == f"zerowatch_{name}")


@pytest.mark.parametrize("line", PROMISED.strip().splitlines(), ids=lambda line: line.split()[0])
def test_every_promised_metric_is_there_with_its_kind_and_labels(line):
    name, kind, *labels = line.split()

    spec = named(name)

    assert (spec.kind, spec.label_names) == (kind, tuple(labels))


@pytest.mark.parametrize("where", PROMISED_VALUES)
def test_labels_have_the_promised_values(where):
    label_name, _, metric = where.partition(" of ")

    sets = {
        label.values
        for spec in CATALOG
        for label in spec.labels
        if label.name == label_name and (not metric or spec.name == f"zerowatch_{metric}")
    }

    assert sets == {tuple(PROMISED_VALUES[where].split())}


def test_no_metric_and_no_closed_set_of_values_is_missing_in_the_lists_above():
    promised = {f"zerowatch_{line.split()[0]}" for line in PROMISED.strip().splitlines()}
    closed = {
        f"{label.name} of {spec.name.removeprefix('zerowatch_')}"
        for spec in CATALOG
        for label in spec.labels
        if label.values and label.name not in PROMISED_VALUES
    }

    assert {spec.name for spec in CATALOG} == promised
    assert closed == {where for where in PROMISED_VALUES if " of " in where}


def test_exactly_the_listed_counters_start_at_zero():
    assert {spec.name for spec in CATALOG if spec.from_zero} == {
        f"zerowatch_{name}" for name in FROM_ZERO.split()
    }


def test_what_lean_leaves_out_of_a_metric_is_as_listed():
    lean = {
        spec.name.removeprefix("zerowatch_"): spec.lean for spec in CATALOG if spec.lean is not None
    }

    assert {name: each.without for name, each in lean.items() if each.without} == LEAN_WITHOUT
    assert {name: dict(each.only) for name, each in lean.items() if each.only} == LEAN_ONLY


def test_no_two_metrics_share_a_name_or_a_family():
    # OpenMetrics takes these endings off a family's name, so a_total and gauge a would clash.
    families = Counter(re.sub(r"_(total|info)$", "", spec.name) for spec in CATALOG)

    assert [name for name, count in families.items() if count > 1] == []


@every_metric
def test_names_are_lower_case_words_with_the_product_in_front(spec):
    assert re.fullmatch(r"zerowatch(_[a-z]+)+", spec.name)


@every_metric
def test_exactly_the_counters_end_in_total(spec):
    assert spec.name.endswith("_total") == (spec.kind == "counter")


@every_metric
def test_exactly_the_info_metrics_end_in_info(spec):
    assert spec.name.endswith("_info") == (spec.kind == "info")


@every_metric
def test_units_are_base_units(spec):
    assert not NO_BASE_UNIT.search(spec.name)


@every_metric
def test_the_help_text_is_one_line_that_ends_with_a_full_stop(spec):
    assert re.fullmatch(r"[A-Z0-9][^\n]*\.", spec.help)


@every_metric
def test_every_metric_has_its_usual_values_in_short_sentences(spec):
    assert re.fullmatch(r"[A-Z0-9`+-][^\n|]*\.", spec.usual)
    assert len(spec.usual) <= 240


@every_metric
def test_labels_are_unique_and_leave_rank_to_the_exporter(spec):
    assert len(set(spec.label_names)) == len(spec.label_names)
    assert "rank" not in spec.label_names


@every_metric
def test_only_histograms_have_buckets_and_those_ascend(spec):
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_the_buckets_of_collectives_are_two_for_each_power_of_ten_from_10_us_to_3_s():
    bounds = [mantissa * 10.0**power for power in range(-5, 1) for mantissa in (1, 3)]

    assert named("collective_duration_seconds").buckets == pytest.approx(bounds)


def test_the_buckets_of_steps_are_six_for_each_power_of_ten_from_10_ms_to_2_minutes():
    mantissas = (1, 1.5, 2.2, 3.3, 4.7, 6.8)
    bounds = [mantissa * 10.0**power for power in range(-2, 3) for mantissa in mantissas]

    assert named("step_duration_seconds").buckets == pytest.approx([*bounds[:25], 120])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("step_duration_seconds", "seconds"),
        ("phase_seconds_total", "seconds"),
        ("memory_bytes", "bytes"),
        ("mfu_ratio", "ratio"),
        ("device_power_watts", "watts"),
        ("device_temperature_celsius", "celsius"),
        ("device_clock_hertz", "hertz"),
        ("device_energy_joules_total", "joules"),
        ("comm_bus_bandwidth_bytes_per_second", ""),
        ("steps_total", ""),
        ("loss", ""),
    ],
)
def test_the_unit_of_a_metric_is_the_last_word_of_its_name_but_for_rates(name, unit):
    assert named(name).unit == unit


@pytest.mark.parametrize("spec", [each for each in CATALOG if each.from_zero], ids=lambda s: s.name)
def test_only_counters_with_few_series_start_at_zero(spec):
    assert spec.kind == "counter"
    assert prod(len(label.values) or 1 for label in spec.labels) <= 16


def test_the_series_of_a_rank_in_a_large_job_are_within_the_budget():
    series = {spec.name: series_of(spec) for spec in CATALOG if spec not in ON_RANK_ZERO}

    assert sum(series.values()) <= SERIES_BUDGET, dict(Counter(series).most_common(8))


def test_series_of_rank_zero_alone_fit_into_its_additional_limit():
    alone = sum(map(series_of, ON_RANK_ZERO))

    assert alone <= RANK_ZERO_SERIES_BUDGET - SERIES_BUDGET


def series_of(spec: MetricSpec) -> int:
    """Return the maximum number of series of a metric on one rank of the job above."""
    lines = len(spec.buckets) + len(("+Inf", "sum", "count")) if spec.buckets else 1
    names = set(spec.label_names)
    if spec.name == "zerowatch_memory_leak_bytes_per_step":  # a device leaks in one category
        return OPEN_SETS["device"]
    if spec is overhead.DROPPED_RECORDS:  # without listeners, which only a script adds
        return len(spec.labels[0].values) - 1
    if spec in (window.COMPRESSION_ERROR, training.RUN_END_INFO):  # one codec, one end at a time
        return 1
    if spec is communication.COMM_OWN_EXPOSED_SECONDS:  # of a TrainingRun alone
        return 0
    if not names & {"op", "group"}:
        sets = OPEN_SETS | ({"device": 1} if spec in GPU_METRICS else {})
        sizes = (len(label.values) or sets.get(label.name, 1) for label in spec.labels)
        return lines * prod(sizes)
    calls = (
        {"op": op, "group": group, "phase": phase}
        for op, group, phases in COLLECTIVES_OF_A_JOB
        for phase in phases
    )
    return lines * len({tuple(call[name] for name in sorted(names)) for call in calls})
