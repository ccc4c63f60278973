"""Tests of exponential buckets, against the mapping of OpenTelemetry's SDK."""

from __future__ import annotations

import math
import random

import pytest
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import (
    LogarithmMapping,
)

from zerowatch.metrics.exponential_buckets import SCALE, ExponentialBuckets, bucket_index


def test_the_index_is_that_of_the_sdk(seed):
    sdk, random_numbers = LogarithmMapping(SCALE), random.Random(seed)

    for _ in range(2000):
        value = 10 ** random_numbers.uniform(-9, 9)
        assert bucket_index(value) == sdk.map_to_index(value)


@pytest.mark.parametrize("exponent", [-20, -1, 0, 1, 20])
def test_a_power_of_two_is_the_upper_bound_of_its_bucket(exponent):
    index = bucket_index(2.0**exponent)

    assert (index + 1) / 2**SCALE == exponent


def test_only_positive_finite_numbers_are_counted():
    buckets = ExponentialBuckets()

    for value in (0.0, -1.0, math.nan, math.inf, 1.0, 1.0):
        buckets.observe(value)

    assert buckets.freeze() == {-1: 2}
