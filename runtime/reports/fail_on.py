"""Reads conditions such as "comm_exposed_ratio>0.3", and checks them against figures."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import CommandLineError, cut
from .run_summary import FIGURES

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_EXAMPLES = {"report": "comm_exposed_ratio>0.3", "compare": "throughput_ratio<0.95"}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([-+.\w]+)\s*(%?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on a figure of a run, or of a comparison.

    Attributes:
        figure: Name of the figure, such as one of `FIGURES`.
        sign: Such as ">".
        limit: The number that the figure is compared with.
    """

    figure: str
    sign: str
    limit: float

    @classmethod
    def parse(
        cls, text: str, figures: Mapping[str, str] = FIGURES, command: str = "report"
    ) -> Condition:
        """Return the condition that a text states.

        Args:
            text: Such as "comm_exposed_ratio>0.3" or "comm_exposed_ratio > 30 %".
            figures: The figures that there are, by name.
            command: The command that lists them with --figures.

        Raises:
            CommandLineError: It is no condition, or its figure does not exist.

        Examples:
            >>> Condition.parse("step_seconds>=0.5").limit
            0.5
        """
        match = _CONDITION.fullmatch(text)
        try:
            limit = float(match[3]) if match else None
        except ValueError:
            limit = None
        if match is None or limit is None or limit != limit:
            raise CommandLineError(
                f"--fail-on {cut(repr(text))} is no condition; write FIGURE>NUMBER, such as "
                f"'{_EXAMPLES[command]}'"
            )
        if match[1] not in figures:
            close = difflib.get_close_matches(match[1], figures, n=3, cutoff=0.4)
            advice = f"did you mean {' or '.join(close)}? " if close else ""
            raise CommandLineError(
                f"--fail-on {cut(repr(text))}: there is no figure {cut(match[1])}; {advice}"
                f"`zerowatch {command} --figures` lists all"
            )
        return cls(figure=match[1], sign=match[2], limit=limit / 100 if match[4] else limit)

    def holds(self, figures: Mapping[str, float | None]) -> bool:
        """Whether the condition holds.

        Raises:
            CommandLineError: The figure is not known.
        """
        value = figures[self.figure]
        if value is None:
            raise CommandLineError(f"--fail-on: {self._reason(figures)}, so {self} is not checked")
        return _OPERATORS[self.sign](value, self.limit)

    def _reason(self, figures: Mapping[str, float | None]) -> str:
        """Return why the figure is not known."""
        if self.figure == "loss" and figures.get("nonfinite_losses"):
            return "the loss of the last steps was nan or inf"
        if self.figure == "loss_ratio":
            return (
                "loss_ratio is only known if the loss of the last common steps of both runs is "
                "finite and above 0, and their batches are equal"
            )
        return f"{self.figure} is not recorded in this run"

    def __str__(self) -> str:
        """Return it as it may be written."""
        return f"{self.figure} {self.sign} {self.limit:g}"
