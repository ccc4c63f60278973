"""Tests of the texts of single values and changes; whole tables are in `test_expected_texts.py`."""

from __future__ import annotations

import pytest

from zerowatch.runtime.reports.comparison_text import (
    cells,
    change_text,
    interval_text,
    value_text,
)
from zerowatch.runtime.reports.run_comparison import Change, Measure, Respect, Unit


def measure(
    unit: Unit = "seconds",
    change: Change | None = None,
    not_comparable: Respect | None = None,
) -> Measure:
    return Measure(
        group="phases",
        name="x",
        title="x",
        unit=unit,
        a=1.0,
        b=None,
        change=change,
        not_comparable=not_comparable,
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "seconds", "-"),
        (0.25, "seconds", "250 ms"),
        (2**20, "bytes", "1 MiB"),
        (0.25, "ratio", "25 %"),
        (999.44, "count", "999.4"),
        (1000.4, "per_second", "1,000"),
        (-1234.0, "", "-1,234"),
    ],
)
def test_a_value_has_its_unit(value: float | None, unit: Unit, text: str) -> None:
    assert value_text(value, unit) == text


@pytest.mark.parametrize(
    ("unit", "change", "text"),
    [
        ("seconds", Change(value=0.0, is_relative=False), "equal"),
        ("seconds", Change(value=-0.012, is_relative=False), "-12 ms"),
        ("seconds", Change(value=0.042, is_relative=True), "+4.2 %"),
        ("ratio", Change(value=-0.0125, is_relative=False), "-1.25 points"),
        ("bytes", Change(value=2048.0, is_relative=False), "+2 KiB"),
    ],
)
def test_a_change_has_a_sign_and_a_unit(unit: Unit, change: Change, text: str) -> None:
    assert change_text(measure(unit, change)) == text


def test_without_a_change_the_text_says_why() -> None:
    assert change_text(measure()) == "-"
    assert change_text(measure(not_comparable="batch")) == "not comparable"


@pytest.mark.parametrize(
    ("lower", "upper", "is_relative", "text"),
    [
        (None, None, True, ""),
        (0.0, 0.0, True, "0"),
        (0.031, 0.053, True, "+3.1 to +5.3 %"),
        (-0.002, 0.003, False, "-2 to +3 ms"),
        (-0.0005, 0.003, False, "-500 µs to +3 ms"),
    ],
)
def test_an_interval_names_a_common_unit_once(
    lower: float | None, upper: float | None, is_relative: bool, text: str
) -> None:
    change = Change(value=0.01, is_relative=is_relative, lower=lower, upper=upper)

    assert interval_text(measure(change=change)) == text


@pytest.mark.parametrize(("is_significant", "text"), [(True, "yes"), (False, "no"), (None, "")])
def test_the_cells_say_whether_a_change_is_significant(
    is_significant: bool | None, text: str
) -> None:
    change = Change(
        value=0.5, is_relative=True, lower=0.25, upper=0.75, is_significant=is_significant
    )

    assert cells(measure(change=change)) == ("1 s", "-", "+50.0 %", "+25.0 to +75.0 %", text)
