"""The boards, in the order in which one would look at them."""

from __future__ import annotations

from ..grafana.board import Board
from . import communication, devices, memory, overview, step_anatomy, tuner, watch

BOARDS: tuple[Board, ...] = (
    overview.BOARD,
    step_anatomy.BOARD,
    communication.BOARD,
    memory.BOARD,
    devices.BOARD,
    tuner.BOARD,
    watch.BOARD,
)
