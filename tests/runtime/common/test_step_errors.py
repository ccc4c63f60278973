"""Tests of the errors that wait for the trace of their step."""

from __future__ import annotations

from zerowatch.runtime.common.step_errors import MAX_ERRORS, MAX_MESSAGE, StepError, StepErrors


def test_errors_are_taken_once_and_by_their_time():
    clock = [0]
    errors = StepErrors(unix_ns=lambda: clock[0])
    for clock[0] in (10, 20, 30):
        errors.add_exception("out_of_memory", MemoryError(f"at {clock[0]}"))

    taken = errors.take(15, 30)

    assert [(each.unix_ns, each.type_name, each.message) for each in taken] == [
        (20, "MemoryError", "at 20"),
        (30, "MemoryError", "at 30"),
    ]
    assert [each.unix_ns for each in errors.take(0, 99)] == [10]
    assert errors.take(0, 99) == []


def test_the_oldest_errors_and_the_ends_of_messages_are_dropped():
    errors = StepErrors(unix_ns=lambda: 1)
    for number in range(MAX_ERRORS + 1):
        errors.add("window_discarded", "a", f"{number} " + "x" * MAX_MESSAGE)

    taken = errors.take(0, 1)

    assert len(taken) == MAX_ERRORS
    assert taken[0].message.startswith("1 ")
    assert {len(each.message) for each in taken} == {MAX_MESSAGE}


def test_a_hang_is_passed_on_at_once():
    errors, seen = StepErrors(), []
    errors.on_hang = seen.append

    errors.add("hang", "zerowatch.Hang", "silent for 30 s")
    errors.add("window_discarded", "a", "b")

    assert [each.message for each in seen] == ["silent for 30 s"]


def test_an_exception_is_named_with_its_module():
    class TooLittle(RuntimeError):
        pass

    errors = StepErrors()
    errors.add_exception("run_failed", TooLittle("no"))

    [error] = errors.take(0, 2**63)
    assert error.type_name == f"{__name__}.{TooLittle.__qualname__}"


def test_an_interval_includes_both_its_ends_and_no_more() -> None:
    clock = iter((9, 10, 30, 31))
    errors = StepErrors(unix_ns=lambda: next(clock))
    for kind in ("hang", "out_of_memory", "run_failed", "window_discarded"):
        errors.add(kind, "a", "b")  # type: ignore[arg-type]

    assert errors.take(10, 30) == [
        StepError(kind="out_of_memory", unix_ns=10, type_name="a", message="b"),
        StepError(kind="run_failed", unix_ns=30, type_name="a", message="b"),
    ]


def test_a_message_that_is_not_utf_8_has_escapes() -> None:
    """The name of a file may be such a message. The encoding of a trace refuses its surrogates."""
    errors = StepErrors(unix_ns=lambda: 1)

    errors.add_exception("run_failed", OSError("/data/caf\udce9"))

    assert [each.message for each in errors.take(0, 1)] == [r"/data/caf\udce9"]
