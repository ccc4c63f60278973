"""Tests of the comparison of the ranks' data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.runtime.trainer.data.rank_differences import rank_differences


def compared(*values: dict[str, Any]) -> list[str | None]:
    """Return what each rank gets, with these values by rank."""

    def compare(host_group: FakeHostGroup) -> str | None:
        return rank_differences(host_group, values[host_group.rank])

    return on_ranks(len(values), compare)


def test_equal_values_have_no_differences() -> None:
    values = {"seed": np.int64(3), "sizes": [[0, 6]], "path": "a"}

    assert compared(values, dict(values), dict(values)) == [None] * 3


def test_each_differing_value_is_named_with_the_first_rank_that_differs() -> None:
    texts = compared(
        {"seed": 3, "shuffle": True, "samples": 8},
        {"seed": 3, "shuffle": True, "samples": 9},
        {"seed": 5, "shuffle": True, "samples": 11},
        {"seed": 7, "shuffle": True, "samples": 8},
    )

    assert (
        texts == ["seed is 3 on rank 0 and 5 on rank 2; samples is 8 on rank 0 and 9 on rank 1"] * 4
    )


@pytest.mark.parametrize("other", [{"seed": 3}, {"seed": 3, "length": None}])
def test_a_value_that_a_rank_does_not_have_is_not_compared(other: dict[str, Any]) -> None:
    first = {"seed": 3} if "length" in other else {"seed": 3, "length": 8}

    assert compared(first, other) == [None, None]
