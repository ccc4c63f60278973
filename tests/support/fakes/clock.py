"""A clock that changes only when a test sets it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


class FakeClock:
    """Manual clock; calling it returns the seconds that the test has set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def set_clock(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[[], float]
) -> None:
    """Replace functions of `time` for one module: `set_clock(monkeypatch, log_file, time=clock)`.

    For the whole process they must not be replaced: a wait with a limit, such as for a process that
    the garbage collector ends, would wait forever.
    """
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
