"""Tests of the tuner's session: on all ranks or on none, and the OOM risk that it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes.rank_threads import on_ranks

from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.tuner import session
from zerowatch.runtime.tuner.policy.policy_types import Numerics
from zerowatch.runtime.tuner.session import ReportedOomRisk


def test_an_oom_risk_of_steps_before_a_change_is_ignored() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9)
    assert reported.current(now=7, seconds=0.0) == 0.9

    reported.invalidate(now=8)

    assert reported.current(now=8, seconds=0.0) == 0.0
    reported.update(step=8, risk=0.8)
    assert reported.current(now=9, seconds=0.0) == 0.0
    reported.update(step=9, risk=0.7)
    assert reported.current(now=9, seconds=0.0) == 0.7


def test_an_oom_risk_that_is_not_updated_expires() -> None:
    reported = ReportedOomRisk()
    reported.update(step=7, risk=0.9, seconds=100.0)

    assert reported.current(now=8, seconds=10_000.0) == 0.9, "one long step"
    assert reported.current(now=60, seconds=101.0) == 0.9, "steps of milliseconds"
    assert reported.current(now=60, seconds=200.0) == 0.0


@pytest.mark.parametrize(
    ("watched", "numerics", "tuned"),
    [
        ((True, True), ("bitwise", "bitwise"), True),
        ((True, False), ("bitwise", "bitwise"), False),
        ((True, True), ("bitwise", "reassociation"), False),
    ],
)
def test_all_ranks_are_tuned_or_none_is(
    watched: tuple[bool, bool],
    numerics: tuple[str, str],
    tuned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeSession:
        def __init__(self, *parts: Any) -> None:
            self.numerics = Numerics.of_setting(parts[-1].tuner.numerics)

        def close(self) -> None:
            pass

    def rank(host_group: Any) -> bool:
        tuner = SimpleNamespace(mode="auto", numerics=numerics[host_group.rank])
        watch = SimpleNamespace(
            is_open=watched[host_group.rank],
            settings=SimpleNamespace(tuner=tuner),
            fail_open=FailOpen(),
        )
        changes: Any = SimpleNamespace(engine=SimpleNamespace(watch=watch))
        parts: Any = None
        return isinstance(
            session.create_tuner_session(changes, parts, host_group, parts), FakeSession
        )

    monkeypatch.setattr(session, "ActiveTunerSession", FakeSession)

    assert on_ranks(2, rank) == [tuned, tuned]
