"""The dashboards, one module each, in the order in which to read them."""

from __future__ import annotations

from .communication import DASHBOARD as COMMUNICATION
from .devices import DASHBOARD as DEVICES
from .memory import DASHBOARD as MEMORY
from .overhead import DASHBOARD as OVERHEAD
from .overview import DASHBOARD as OVERVIEW
from .step_anatomy import DASHBOARD as STEP_ANATOMY
from .tuner import DASHBOARD as TUNER

DASHBOARDS = (OVERVIEW, STEP_ANATOMY, COMMUNICATION, MEMORY, DEVICES, TUNER, OVERHEAD)
