from __future__ import annotations

from zerowatch.runtime.common.fail_open import FailOpen


def test_a_hook_that_raises_is_counted_logged_once_and_not_called_again(caplog) -> None:
    calls = []

    def broken(value: int) -> int:
        calls.append(value)
        raise KeyError("gone")

    fail_open = FailOpen()
    guarded = fail_open.wrap("mine", broken)

    results = [guarded(1), guarded(2)]

    assert results == [None, None]
    assert calls == [1]
    assert fail_open.failures == {"mine": 1}
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


def test_a_hook_that_works_returns_its_value() -> None:
    fail_open = FailOpen()

    assert fail_open.wrap("mine", lambda value, more=0: value + more)(1, more=2) == 3
    assert not fail_open.failures


def test_system_exit_propagates() -> None:
    def leave() -> None:
        raise SystemExit(3)

    try:
        FailOpen().wrap("mine", leave)()
    except SystemExit as leaving:
        code = leaving.code

    assert code == 3
