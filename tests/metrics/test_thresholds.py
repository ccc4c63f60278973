"""Tests of the thresholds: names, errors about values that are not allowed, and copies."""

from __future__ import annotations

import copy
import math

import pytest

from zerowatch.metrics import thresholds
from zerowatch.metrics.thresholds import (
    EXPOSED_COMM_RATIO_HIGH,
    THRESHOLDS,
    Threshold,
    checked_thresholds,
    parsed_thresholds,
)


def test_the_table_lists_every_threshold_by_the_name_of_its_constant():
    defined = {
        name.lower(): value for name, value in vars(thresholds).items() if type(value) is Threshold
    }

    assert defined == THRESHOLDS
    assert all(threshold.name == name for name, threshold in THRESHOLDS.items())


# As documentation and runbook state them.
DEFAULTS = """
exposed_comm_ratio_high 0.2 ratio
link_bandwidth_low 0.5 ratio
comm_coverage_low 0.99 ratio
straggler_score_high 0.05 ratio
data_ratio_high 0.1 ratio
device_utilization_low 0.7 ratio
oom_risk_high 0.5 ratio
oom_risk_critical 0.8 ratio
replay_ratio_high 0.05 ratio
restarts_high 3 count
loss_scale_low 16 factor
loss_scale_fall 0.0625 ratio
throttled_ratio_high 0.1 ratio
temperature_margin_low 5 celsius
nvlink_crc_errors_high 100 count
pcie_replays_high 8 count
comm_rise_high 1.5 factor
mfu_drop_low 0.7 ratio
loss_spike_high 0.5 factor
gradient_norm_high 10 factor
skipped_ratio_high 0.5 ratio
host_memory_node_high 0.9 ratio
checkpoint_delay_high 3 factor
checkpoint_age_high 86400 seconds
watch_ratio_high 0.02 ratio
monitoring_failures_high 10 count
records_lost_high 100 count
"""


def test_each_threshold_has_the_documented_default_and_unit():
    found = [f"{each.name} {each:g} {each.unit}" for each in THRESHOLDS.values()]

    assert found == DEFAULTS.strip().splitlines()


def test_severities_are_listed_with_the_worst_first():
    assert thresholds.SEVERITIES == ("critical", "warning", "info")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exposed_comm_ratio_high", 0),
        ("exposed_comm_ratio_high", 1),
        ("restarts_high", 0),
        ("comm_rise_high", 35),
    ],
)
def test_the_ends_of_a_range_are_allowed_and_only_ratios_end_at_one(name, value):
    assert checked_thresholds({name: value}) == {name: float(value)}


@pytest.mark.parametrize("value", [1.001, -0.001])
def test_a_ratio_beyond_its_range_is_rejected(value):
    with pytest.raises(ValueError, match="exposed_comm_ratio_high"):
        checked_thresholds({"exposed_comm_ratio_high": value})


def test_thresholds_that_are_no_table_are_reported_with_an_example():
    with pytest.raises(ValueError) as caught:
        checked_thresholds(["exposed_comm_ratio_high"])

    assert str(caught.value) == (
        "must be a table of names and numbers, such as {exposed_comm_ratio_high = 0.35}"
    )


def test_a_threshold_is_its_default_as_a_number_and_copies_as_one():
    assert EXPOSED_COMM_RATIO_HIGH == 0.2
    assert f"{EXPOSED_COMM_RATIO_HIGH:.0%}" == "20%"
    assert type(copy.deepcopy(EXPOSED_COMM_RATIO_HIGH)) is float


def test_values_are_read_from_texts_in_upper_and_lower_case():
    assert parsed_thresholds(["EXPOSED_COMM_RATIO_HIGH=0.35", "restarts_high = 5"]) == {
        "exposed_comm_ratio_high": 0.35,
        "restarts_high": 5.0,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exposed_comm_ratio_high", "is no NAME=VALUE, such as exposed_comm_ratio_high=0.35"),
        (
            "EXPOSED_COM_RATIO_HIGH=0.3",
            "'EXPOSED_COM_RATIO_HIGH' is no threshold of an alert; "
            "did you mean EXPOSED_COMM_RATIO_HIGH?",
        ),
        (
            "exposed_com_ratio_high=0.3",
            "'exposed_com_ratio_high' is no threshold of an alert; "
            "did you mean exposed_comm_ratio_high?",
        ),
        ("RESTARTS_HIGH=-1", "RESTARTS_HIGH must be a finite number from 0 on, got -1"),
        ("xyzzy=1", "'xyzzy' is no threshold of an alert; there are exposed_comm_ratio_high, "),
        (
            "exposed_comm_ratio_high=much",
            "exposed_comm_ratio_high must be a number, got 'much'",
        ),
        (
            "exposed_comm_ratio_high=35",
            "exposed_comm_ratio_high is a ratio from 0 to 1, got 35; for 35 % write 0.35",
        ),
        ("restarts_high=-1", "restarts_high must be a finite number from 0 on, got -1"),
        ("restarts_high=nan", "restarts_high must be a finite number from 0 on, got nan"),
    ],
)
def test_a_faulty_text_is_reported_with_what_is_allowed(text, message):
    with pytest.raises(ValueError) as caught:
        parsed_thresholds([text])

    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, True, [], math.inf])
def test_a_value_that_is_no_finite_number_is_rejected(value):
    with pytest.raises(ValueError, match="exposed_comm_ratio_high must be a"):
        checked_thresholds({"exposed_comm_ratio_high": value})
