"""Tests of `NotebookCells`, with IPython's own events."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import IPython
import pytest
from IPython.core.events import EventManager, available_events
from IPython.core.interactiveshell import ExecutionResult

from zerowatch.runtime.instrumentation.notebook_cells import NotebookCells


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> EventManager:
    shell = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return shell.events


def test_the_function_is_called_at_the_end_of_each_cell_until_restore(events: EventManager) -> None:
    ended: list[str] = []
    cells = NotebookCells(lambda: ended.append("cell"))

    events.trigger("pre_run_cell", None)
    events.trigger("post_run_cell", ExecutionResult(None))
    events.trigger("post_run_cell", ExecutionResult(None))
    cells.restore()
    cells.restore()
    events.trigger("post_run_cell", ExecutionResult(None))

    assert ended == ["cell", "cell"]
    assert not events.callbacks["post_run_cell"]


def test_only_the_last_cell_counts_as_failed(events: EventManager) -> None:
    cells = NotebookCells(lambda: None)
    failed = [cells.last_failed]

    for error in (None, NameError("prnt"), None, KeyboardInterrupt(), SystemExit(0)):
        result = ExecutionResult(None)
        result.error_in_exec = error
        events.trigger("post_run_cell", result)
        failed.append(cells.last_failed)

    assert failed == [None, False, True, False, True, False]


def test_outside_ipython_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    NotebookCells(lambda: None).restore()  # a script that imports IPython has no shell

    monkeypatch.delitem(sys.modules, "IPython")
    NotebookCells(lambda: None).restore()
