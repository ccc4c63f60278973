"""The dashboards, one module each, in the order in which to read them."""

from __future__ import annotations

from .communication import DASHBOARD as COMMUNICATION
from .compare import DASHBOARD as COMPARE
from .devices import DASHBOARD as DEVICES
from .memory import DASHBOARD as MEMORY
from .overhead import DASHBOARD as OVERHEAD
from .overview import DASHBOARD as OVERVIEW
from .runs import DASHBOARD as RUNS
from .step_anatomy import DASHBOARD as STEP_ANATOMY
from .tuner import DASHBOARD as TUNER

DASHBOARDS = (
    RUNS,
    OVERVIEW,
    STEP_ANATOMY,
    COMMUNICATION,
    MEMORY,
    DEVICES,
    TUNER,
    OVERHEAD,
    COMPARE,
)
