"""Compares PromQL expressions with the thresholds of alerts, and shows thresholds in texts.

A threshold has a value for each run: the run's own from its settings, or the default. The recording
rule ALERT_THRESHOLD stores the value that applies, so that alerts and dashboards use the same one:

    above(EXPOSED_RATIO.select(), EXPOSED_COMM_RATIO_HIGH)
"""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics.thresholds import Threshold, Unit
from .promql import IDENTITY
from .recording_rules import ALERT_THRESHOLD

# How a value is written in the text of an alert, as functions of Prometheus' templates.
_WRITTEN: Mapping[Unit, str] = {
    "ratio": "humanizePercentage",
    "factor": 'printf "%.4g"',
    "count": 'printf "%.0f"',
    "seconds": "humanizeDuration",
    "bytes": 'humanize1024 | printf "%sB"',
    "celsius": 'printf "%.0f"',
}


def above(expression: str, threshold: Threshold, *, or_equal: bool = False) -> str:
    """Return the series of `expression` whose value is above the threshold of their run.

    The series keep their value and all their labels.

    Args:
        expression: PromQL without a comparison, `and`, `or` or `unless` outside of parentheses,
            because those are evaluated after this comparison.
        threshold: The threshold.
        or_equal: Whether to include values equal to the threshold.
    """
    return _compared(expression, ">=" if or_equal else ">", threshold)


def below(expression: str, threshold: Threshold, *, or_equal: bool = False) -> str:
    """Return the series of `expression` whose value is below the threshold of their run.

    The arguments are those of `above`.
    """
    return _compared(expression, "<=" if or_equal else "<", threshold)


def selected(threshold: Threshold, *matchers: str) -> str:
    """Return a selector of the threshold's value for each run."""
    return ALERT_THRESHOLD.select(f'name="{threshold.name}"', *matchers)


def shown(threshold: Threshold) -> str:
    """Return a template that shows the threshold of the run that an alert is about."""
    matchers = ", ".join(f"{label}=%q" for label in IDENTITY)
    labels = " ".join(f"$labels.{label}" for label in IDENTITY)
    query = f"`{selected(threshold, matchers)}`"
    written = _WRITTEN[threshold.unit]
    return (
        f"{{{{ with printf {query} {labels} | query }}}}"
        f"{{{{ . | first | value | {written} }}}}{{{{ end }}}}"
    )


def _compared(expression: str, operator: str, threshold: Threshold) -> str:
    return (
        f"{expression}\n{operator} on ({', '.join(IDENTITY)}) group_left () {selected(threshold)}"
    )
