"""Tests of the conditions of --fail-on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from zerowatch.errors import CommandLineError
from zerowatch.runtime.reports.fail_on import Condition


@pytest.mark.parametrize(
    ("sign", "below", "equal", "above"),
    [
        (">", False, False, True),
        (">=", False, True, True),
        ("<", True, False, False),
        ("<=", True, True, False),
        ("==", False, True, False),
        ("!=", True, False, True),
    ],
)
def test_a_sign_compares_the_figure_with_the_limit(
    sign: str, below: bool, equal: bool, above: bool
) -> None:
    condition = Condition.parse(f"step_seconds{sign}0.5")

    held = [condition.holds({"step_seconds": value}) for value in (0.25, 0.5, 0.75)]

    assert held == [below, equal, above]


@pytest.mark.parametrize(
    ("text", "sign", "limit", "shown"),
    [
        ("mfu_ratio>30%", ">", 0.3, "mfu_ratio > 0.3"),
        ("  mfu_ratio  <=  2.5 % ", "<=", 0.025, "mfu_ratio <= 0.025"),
        ("mfu_ratio!=-1e3", "!=", -1000.0, "mfu_ratio != -1000"),
    ],
)
def test_a_condition_has_spaces_percent_and_signs(
    text: str, sign: str, limit: float, shown: str
) -> None:
    condition = Condition.parse(text)

    assert (condition.figure, condition.sign) == ("mfu_ratio", sign)
    assert condition.limit == pytest.approx(limit)
    assert str(condition) == shown


@pytest.mark.parametrize("text", ["mfu_ratio", "mfu_ratio>", "mfu_ratio>nan", "mfu_ratio>x", ">1"])
def test_a_text_without_a_figure_a_sign_and_a_number_is_no_condition(text: str) -> None:
    with pytest.raises(CommandLineError, match=r"write FIGURE>NUMBER, such as 'comm_exposed"):
        Condition.parse(text)


def test_a_figure_that_does_not_exist_is_named_with_those_like_it() -> None:
    with pytest.raises(CommandLineError) as raised:
        Condition.parse("mfu>1")
    assert str(raised.value) == (
        "--fail-on 'mfu>1': there is no figure mfu; did you mean mfu_ratio? `zerowatch report "
        "--figures` lists all"
    )

    with pytest.raises(CommandLineError, match=r"no figure qqqq; `zerowatch report"):
        Condition.parse("qqqq>1")


def test_a_figure_that_is_not_recorded_is_not_checked() -> None:
    with pytest.raises(CommandLineError, match=r"so mfu_ratio > 0.3 is not checked"):
        Condition.parse("mfu_ratio>30%").holds({"mfu_ratio": None})


@pytest.mark.parametrize(
    ("text", "figures", "reason"),
    [
        (
            "loss>3",
            {"loss": None, "nonfinite_losses": 7.0},
            "the loss of the last steps was nan or inf",
        ),
        ("loss>3", {"loss": None, "nonfinite_losses": 0.0}, "loss is not recorded in this run"),
        ("loss_ratio>1.1", {"loss_ratio": None}, "of both runs is finite and above 0"),
    ],
)
def test_the_error_on_an_unknown_loss_says_why_it_may_be_unknown(
    text: str, figures: Mapping[str, float | None], reason: str
) -> None:
    condition = Condition.parse(text, dict.fromkeys(figures, ""))

    with pytest.raises(CommandLineError, match=rf"{reason}.* is not checked"):
        condition.holds(figures)
