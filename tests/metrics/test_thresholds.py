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
            "did you mean exposed_comm_ratio_high?",
        ),
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
