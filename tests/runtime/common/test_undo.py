"""Tests of reversible changes: their order, errors among them, and what a restore leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from zerowatch.runtime.common.undo import (
    Undo,
    UndoOnce,
    UndoStack,
    apply_all,
    chain,
    own_attributes,
    restore_attributes,
    set_attributes,
)


class Engine:
    kind = "class"


def change(log: list[str], name: str) -> Callable[[], Undo]:
    def make() -> Undo:
        log.append(name)
        return lambda: log.append(f"undo {name}")

    return make


def failing(error: BaseException) -> Callable[[], Undo]:
    def fail() -> Undo:
        raise error

    return fail


def test_an_undo_runs_once_and_releases_what_it_restores() -> None:
    calls: list[int] = []
    engine = Engine()
    gone = weakref.ref(engine)
    undo = UndoOnce(lambda engine=engine: calls.append(id(engine)))  # type: ignore[misc]
    del engine

    undo()
    undo()
    gc.collect()

    assert len(calls) == 1
    assert gone() is None


def test_changes_are_undone_in_reverse_order_and_once() -> None:
    log: list[str] = []

    undo = apply_all([change(log, "a"), change(log, "b"), change(log, "c")])
    made = log[:]
    undo()
    undo()

    assert made == ["a", "b", "c"]
    assert log == ["a", "b", "c", "undo c", "undo b", "undo a"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyError("y"), AssertionError()], ids=repr)
def test_if_a_change_fails_the_earlier_ones_are_undone_and_older_ones_stay(
    error: Exception,
) -> None:
    log: list[str] = []
    stack = UndoStack()
    stack.add(lambda: log.append("undo older"))

    with pytest.raises(type(error)) as caught:
        stack.do([change(log, "a"), change(log, "b"), failing(error), change(log, "c")])
    before = log[:]
    stack()

    assert caught.value is error
    assert before == ["a", "b", "undo b", "undo a"]
    assert log[4:] == ["undo older"]


def test_changes_that_were_made_together_are_undone_before_older_ones() -> None:
    log: list[str] = []
    stack = UndoStack()

    stack.add(lambda: log.append("undo older"))
    stack.do([change(log, "a"), change(log, "b")])
    stack.add(lambda: log.append("undo newer"))
    stack()

    assert log[2:] == ["undo newer", "undo b", "undo a", "undo older"]


def test_an_undo_that_fails_does_not_keep_the_others_and_the_first_error_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    first, second = ValueError("first"), OSError("second")
    stack = UndoStack()
    for undo in (lambda: log.append("undone"), failing(second), failing(first)):
        stack.add(undo)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="first"):
        stack()

    assert log == ["undone"]
    assert caplog.messages == [
        "undoing a change failed: ValueError: first",
        "undoing a change failed: OSError: second",
    ]


def test_a_chain_calls_its_undos_in_reverse_order_once() -> None:
    log: list[str] = []

    undo = chain([lambda: log.append("a"), lambda: log.append("b")])
    undo()
    undo()

    assert log == ["b", "a"]


def test_attributes_are_restored_to_the_very_same_objects_and_absent_names_are_removed() -> None:
    engine, own = Engine(), object()
    engine.own = own  # type: ignore[attr-defined]

    undo = set_attributes(engine, own=1, kind="mine", new=2)
    during = dict(vars(engine))
    undo()
    engine.own = "later"  # type: ignore[attr-defined]
    undo()

    assert during == {"own": 1, "kind": "mine", "new": 2}
    assert vars(engine) == {"own": "later"}
    assert engine.kind == "class"


def test_an_unused_undo_of_attributes_does_not_keep_their_owner_alive() -> None:
    engine = Engine()
    gone = weakref.ref(engine)

    undo = set_attributes(engine, own=1)
    del engine
    gc.collect()

    assert gone() is None
    undo()


def test_attributes_that_are_absent_before_and_after_stay_absent() -> None:
    engine = Engine()
    engine.own = 3  # type: ignore[attr-defined]
    before = own_attributes(engine, ["own", "kind"])
    engine.own, engine.other = 4, 5  # type: ignore[attr-defined]

    restore_attributes(engine, before)

    assert vars(engine) == {"own": 3, "other": 5}
