"""The boards, in the order in which one would look at them."""

from __future__ import annotations

from .communication import BOARD as COMMUNICATION
from .devices import BOARD as DEVICES
from .memory import BOARD as MEMORY
from .overview import BOARD as OVERVIEW
from .step_anatomy import BOARD as STEP_ANATOMY
from .tuner import BOARD as TUNER
from .watch import BOARD as WATCH

BOARDS = (OVERVIEW, STEP_ANATOMY, COMMUNICATION, MEMORY, DEVICES, TUNER, WATCH)
