"""All alerts, as plain data that the build writes as Prometheus rules.

To add an alert, write a function in the module of its subject, a page in `runbook.md` and test
cases in `tests/rules/cases/`. An alert fires only if a person can do something about it, and its
description says what. It does not fire while a run warms up or after it has ended, and it is
inhibited while another alert names the cause.
"""

from __future__ import annotations

from ..timing import Timing
from .alert import Alert
from .communication import communication_alerts
from .hardware import hardware_alerts
from .liveness import liveness_alerts
from .memory import memory_alerts
from .numerics import numerics_alerts
from .overhead import overhead_alerts
from .prometheus import prometheus_alerts
from .training import training_alerts


def alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return all alerts; `timing` sets their PromQL ranges."""
    return (
        *communication_alerts(timing),
        *liveness_alerts(timing),
        *training_alerts(timing),
        *numerics_alerts(timing),
        *memory_alerts(timing),
        *hardware_alerts(timing),
        *overhead_alerts(timing),
        *prometheus_alerts(timing),
    )
