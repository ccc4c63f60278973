"""Entries of a ds config are read and replaced by their path, in a copy."""

from __future__ import annotations

from typing import Any

import pytest

from zerowatch.runtime.engine.live_settings.config_entry import MISSING, entry_in, with_entry

PREFETCH = ("zero_optimization", "stage3_prefetch_bucket_size")


@pytest.mark.parametrize(
    ("zero", "entry"),
    [
        ({"stage3_prefetch_bucket_size": 5e7}, 5e7),
        ({"prefetch_bucket_size": "auto"}, "auto"),
        ({"prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 3}, 3),
        ({"stage": 3}, MISSING),
        (True, MISSING),
        (None, MISSING),
    ],
)
def test_an_entry_is_found_as_given_with_or_without_the_prefix(zero: Any, entry: Any) -> None:
    assert entry_in({"zero_optimization": zero}, PREFETCH) is entry


@pytest.mark.parametrize(
    ("zero", "changed"),
    [
        ({"stage": 3}, {"stage": 3, "stage3_prefetch_bucket_size": 9}),
        ({"prefetch_bucket_size": 7}, {"prefetch_bucket_size": 9}),
        (True, {"stage": 1, "stage3_prefetch_bucket_size": 9}),
        (None, {"stage3_prefetch_bucket_size": 9}),
    ],
)
def test_an_entry_is_replaced_in_a_copy(zero: Any, changed: dict[str, Any]) -> None:
    config = {"zero_optimization": zero}

    copy = with_entry(config, PREFETCH, 9)

    assert copy == {"zero_optimization": changed}
    assert config["zero_optimization"] is zero
    assert entry_in(with_entry(copy, PREFETCH, MISSING), PREFETCH) is MISSING


def test_nested_blocks_are_made_and_a_new_key_is_removed_without_a_trace() -> None:
    config = {"zero_optimization": {"stage": 2}}

    timed = with_entry(config, ("timers", "throughput", "synchronized"), False)
    there = with_entry(config, PREFETCH, 9)

    assert timed == config | {"timers": {"throughput": {"synchronized": False}}}
    assert with_entry(there, PREFETCH, MISSING) == config
