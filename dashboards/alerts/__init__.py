"""Alerts, as data. To add one, write a function here, a page in runbook.md and test cases.

An alert fires on what a person can act on, and states what to do. It does not fire while a run
warms up, after it has ended, or while another alert names the cause.
"""

from __future__ import annotations

from ..timing import Timing
from .alert import Alert
from .communication import communication_alerts
from .memory import memory_alerts
from .overhead import overhead_alerts
from .training import training_alerts


def alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return all alerts; `timing` sets their PromQL ranges."""
    return (
        *communication_alerts(timing),
        *training_alerts(timing),
        *memory_alerts(timing),
        *overhead_alerts(timing),
    )
