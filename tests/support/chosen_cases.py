"""Cases of a job by tier: the quick ones run in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters for `parametrize`; those that are not `quick` are marked slow.

    Example:
        >>> CASES = tiers(["stage 0", "stage 1", "stage 3"], quick=["stage 3"])
        >>> each_case = pytest.mark.parametrize("name", CASES)
    """
    listed = list(cases)
    unknown = [case for case in quick if case not in listed]
    if unknown:
        raise ValueError(f"no such case: {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in quick else pytest.mark.slow,
        )
        for case in listed
    ]


def chosen(request: pytest.FixtureRequest, *parameters: str) -> list[Any]:
    """Return the cases that the selected tests of this file have, each once and in order.

    A fixture that runs a job for all cases of its file runs no case that nothing asks for.

    Args:
        request: The fixture's own `request`.
        parameters: Names of the parameters. Of several, the cases are tuples.
    """
    cases: list[Any] = []
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in parameters):
            several = tuple(values[name] for name in parameters)
            case = several if len(several) > 1 else several[0]
            if case not in cases:
                cases.append(case)
    return cases
