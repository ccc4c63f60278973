"""What was laid on an engine goes along to another, as far as it can be there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from zerowatch.runtime.trainer import engine_holder
from zerowatch.runtime.trainer.engine_holder import EngineHolder
from zerowatch.runtime.trainer.oom_recovery.escalation import EngineChange


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> EngineHolder:
    watch = SimpleNamespace(suspended=nullcontext, rebind_engine=lambda engine: None)
    first, second = (SimpleNamespace(watch=watch, optimizer=object()) for _ in range(2))
    monkeypatch.setattr(engine_holder, "rebuild", lambda *args, **options: second)
    figures = SimpleNamespace(rebuilt=lambda outcome, seconds: None)
    return EngineHolder(first, {}, host_group=None, figures=figures, make_engine=None)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_what_cannot_be_laid_on_another_engine_is_left_off_and_told_of(changes, caplog, error):
    first = changes.engine

    class Unmovable:
        def attach(self, engine):
            if engine is not first:
                raise error("no room for pinned memory")
            return lambda: None

    changes.attach(EngineChange.OPTIMIZER_STATE_OFFLOAD, Unmovable())

    changes.rebuild_as({"zero_optimization": {"stage": 1}})

    assert changes.engine is not first
    assert changes.attached(EngineChange.OPTIMIZER_STATE_OFFLOAD) is None
    assert EngineChange.OPTIMIZER_STATE_OFFLOAD.value in caplog.text
    assert "no room for pinned memory" in caplog.text
