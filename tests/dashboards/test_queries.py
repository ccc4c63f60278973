"""Tests of the PromQL that panels are made of: what is selected, kept and matched.

Covers `definitions/queries.py` and `promql.py`.
"""

from __future__ import annotations

import pytest

from zerowatch.dashboards import limits, promql
from zerowatch.dashboards.definitions import queries
from zerowatch.dashboards.grafana.panels import Step, above, below
from zerowatch.dashboards.recording_rules import RecordingRule
from zerowatch.dashboards.run_status import RunStatus
from zerowatch.metrics.catalog.training import STEPS, TOKENS
from zerowatch.metrics.thresholds import EXPOSED_COMM_RATIO_HIGH

RULE = RecordingRule(name="rule", expression=lambda timing: "1", labels=("run", "rank", "node"))
RUN = 'job="$job", run="$run"'
RANKS = f'{RUN}, node=~"$node", rank=~"$rank"'


def flat(expression: str) -> str:
    return " ".join(expression.split())


@pytest.mark.parametrize(
    ("select", "matchers"),
    [
        (queries.of_run, RUN),
        (queries.of_ranks, RANKS),
        (queries.of_first_rank, f'{RUN}, rank="0"'),
    ],
)
def test_series_of_a_rule_and_of_a_metric_are_selected_by_the_choices_of_the_dashboard(
    select, matchers
):
    assert select(RULE, 'phase="data"') == f'rule{{{matchers}, phase="data"}}'
    assert select(STEPS) == f"zerowatch_steps_total{{{matchers}}}"


@pytest.mark.parametrize(("label", "kept"), [("", "job, run"), ("state", "job, run, state")])
def test_the_highest_value_of_the_gpus_comes_before_that_of_the_hosts(label, kept):
    assert flat(queries.of_devices(RULE, 'a="b"', label=label)) == (
        f'max by ({kept}) (rule{{{RUN}, device!="cpu", a="b"}})'
        f' or on (job, run) max by ({kept}) (rule{{{RUN}, device="cpu", a="b"}})'
    )


@pytest.mark.parametrize(
    ("options", "chosen", "operation", "labels"),
    [
        ({}, RANKS, "topk(8", "rank, node"),
        ({"lowest": True}, RANKS, "bottomk(8", "rank, node"),
        ({"count": 3, "also": "device"}, RANKS, "topk(3", "rank, node, device"),
        ({"among": queries.of_run}, RUN, "topk(8", "rank, node"),
    ],
)
def test_the_worst_ranks_are_those_with_the_worst_mean_over_the_time_range(
    options, chosen, operation, labels
):
    series = f"rule{{{chosen}}}"

    assert flat(queries.worst(RULE, **options)) == (
        f"{series} and on (job, run, {labels})"
        f" {operation}, avg_over_time({series}[$__range] @ end()))"
    )


def test_a_limit_is_drawn_for_all_runs_or_for_those_with_a_series():
    line = f'{limits.ALERT_THRESHOLD.name}{{name="exposed_comm_ratio_high", {RUN}}}'

    always = queries.limit(EXPOSED_COMM_RATIO_HIGH)
    sometimes = queries.limit(EXPOSED_COMM_RATIO_HIGH, only_if="up")

    assert (always.expression, always.is_limit) == (line, True)
    assert flat(sometimes.expression) == f"{line} and on (job, run) up"


def test_counters_and_buckets_are_summed_over_the_chosen_ranks():
    steps = f"zerowatch_steps_total{{{RANKS}}}"
    assert flat(queries.rate_of_ranks(STEPS, operation="max")).endswith(
        f" or max by (job, run) (rate({steps}[5m])) ) and on (job, run) {steps}"
    )
    assert flat(queries.total(STEPS, "a")) == (
        f"sum by (job, run, a) ({steps}"
        f" or last_over_time({steps}[$__range]) unless on (job, run, rank) {steps})"
    )
    assert queries.by_node("max", RULE) == f"max by (job, run, node) (rule{{{RANKS}}})"
    assert queries.by_rank("max", RULE) == f"max by (job, run, rank, node) (rule{{{RANKS}}})"
    assert queries.quantile(0.9, RULE, "a") == (
        f"histogram_quantile(0.9, sum by (job, run, le, a) (rule{{{RUN}}}))"
    )
    assert queries.latest(RULE, 'a="b"') == (
        'max by (job, run) (last_over_time(rule{a="b"}[$__range]))'
    )


def test_the_devices_of_dead_ranks_are_counted_by_their_uuid():
    steps, place = f"zerowatch_steps_total{{{RANKS}}}", "job, run, rank, node, device"
    info, of_any = (f"zerowatch_device_info{{{ranks}}}" for ranks in (RANKS, RUN))
    last = f"last_over_time({steps}[$__range]) unless on (job, run, rank) {steps}"
    known = f"last_over_time({info}[$__range])"
    free = f"topk by ({place}) (1, {known} unless on (job, run, uuid) {of_any})"

    assert flat(queries.total_of_devices(STEPS, "a")) == (
        f"sum by (job, run, a) ({steps}"
        f" or max by (job, run, uuid, a) (({last}) * on ({place}) group_left (uuid) {free})"
        f" or max by ({place}, a) ({last} unless on ({place}) {known}))"
    )


def test_a_rate_of_what_ranks_share_has_no_result():
    shared = f'zerowatch_shared_work{{{RUN}, of="tokens"}}'
    tokens = f"zerowatch_tokens_total{{{RANKS}}}"

    assert flat(queries.rate_of_ranks(TOKENS, "tokens")).endswith(
        f" or sum by (job, run) (rate({tokens}[5m])) ) and on (job, run) {tokens}"
        f" unless on (job, run) last_over_time({shared}[5m])"
    )


def test_the_goodput_of_a_run_is_its_last_one_unless_it_was_restarted():
    goodput, attempt = (
        f'max by (job, run) (last_over_time({rule.name}{{a="b"}}[$__range]))'
        for rule in (queries.GOODPUT, queries.RUN_ATTEMPT)
    )

    assert flat(queries.last_goodput('a="b"')) == f"{goodput} unless on (job, run) {attempt} > 0"


def test_the_state_of_a_run_without_answers_is_its_end_or_vanished():
    state = queries.RUN_STATE.name + '{a="b"}'
    last = f"max by (job, run) (last_over_time({state}[$__range]))"

    assert flat(queries.state_of('a="b"')) == (
        f"max by (job, run) (last_over_time({state}[2m]))"
        f" or on (job, run) {last} >= {RunStatus.COMPLETED:d}"
        f" or on (job, run) {RunStatus.VANISHED:d} * {last} ^ 0"
    )


def test_a_selector_has_braces_only_with_matchers():
    assert promql.select(STEPS) == "zerowatch_steps_total"
    assert promql.select(STEPS, 'a="b"', part="_sum") == 'zerowatch_steps_total_sum{a="b"}'


def test_an_aggregation_that_keeps_the_rank_keeps_its_node_after_it():
    assert promql.by("sum", "up", "rank", "phase") == "sum by (job, run, rank, node, phase) (up)"
    assert promql.by("sum", "up", "node", "rank") == "sum by (job, run, node, rank) (up)"
    assert promql.by("sum", "up", "phase") == "sum by (job, run, phase) (up)"


def test_a_division_by_zero_has_no_result():
    assert flat(promql.ratio("a", "b", "rank")) == (
        "a / on (job, run, rank, node) group_left () (b > 0)"
    )


def test_only_the_recorded_name_of_a_rate_loses_total():
    assert promql.recorded_name("run", STEPS, "rate5m") == "run:zerowatch_steps:rate5m"
    assert promql.recorded_name("run", STEPS, "max") == "run:zerowatch_steps_total:max"


@pytest.mark.parametrize("or_equal", [False, True])
def test_a_comparison_with_a_threshold_is_made_run_by_run(or_equal):
    value = limits.selected(EXPOSED_COMM_RATIO_HIGH)
    sign = "=" if or_equal else ""

    assert flat(limits.above("up", EXPOSED_COMM_RATIO_HIGH, or_equal=or_equal)) == (
        f"up >{sign} on (job, run) group_left () {value}"
    )
    assert flat(limits.below("up", EXPOSED_COMM_RATIO_HIGH, or_equal=or_equal)) == (
        f"up <{sign} on (job, run) group_left () {value}"
    )


def test_a_value_with_one_limit_is_green_or_red():
    assert above(3) == (Step("green"), Step("red", 3))
    assert below(3) == (Step("red"), Step("green", 3))
