"""Tests of `EngineHolder`: attachments move to the engine that replaces the old engine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from zerowatch.runtime.common.undo import FAILURES
from zerowatch.runtime.trainer import engine_holder
from zerowatch.runtime.trainer.checkpoint.plan_file import PlanFile
from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.engine_holder import EngineHolder


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> EngineHolder:
    watch = SimpleNamespace(checkpoint_phase=nullcontext, rebind_engine=lambda engine: None)
    first, second = (SimpleNamespace(watch=watch, optimizer=object()) for _ in range(2))
    monkeypatch.setattr(engine_holder, "rebuild", lambda *args, **options: second)
    metrics = SimpleNamespace(count_rebuild=lambda outcome, seconds: None)
    return EngineHolder(first, {}, host_group=None, metrics=metrics, make_engine=None)


@pytest.mark.parametrize("error", FAILURES)
def test_an_attachment_that_fails_on_the_new_engine_is_dropped_and_logged(holder, caplog, error):
    first = holder.engine

    class FailingAttachment:
        def attach(self, engine):
            if engine is not first:
                raise error("not enough pinned memory")
            return lambda: None

    holder.attach(EngineChange.OPTIMIZER_STATE_OFFLOAD, FailingAttachment())

    holder.rebuild_as({"zero_optimization": {"stage": 1}})

    assert holder.engine is not first
    assert holder.attached(EngineChange.OPTIMIZER_STATE_OFFLOAD) is None
    assert EngineChange.OPTIMIZER_STATE_OFFLOAD.value in caplog.text
    assert "not enough pinned memory" in caplog.text


@pytest.mark.parametrize("error", FAILURES)
def test_a_memory_saving_that_fails_is_not_attached_and_logged(holder, caplog, error):
    class FailingSaving:
        def unsupported_reason(self, engine):
            return None

        def attach(self, engine):
            raise error("not enough pinned memory")

    change = EngineChange.OPTIMIZER_STATE_OFFLOAD

    assert holder.try_attach(change, FailingSaving()) is False
    assert holder.attached(change) is None
    assert change.value in caplog.text
    assert "not enough pinned memory" in caplog.text


def test_the_run_folder_is_that_of_a_watch_opened_later(holder, tmp_path):
    holder.engine.watch = SimpleNamespace(run_folder=None)
    plan_file = PlanFile(holder)
    plan_file.write(None, steps=1)

    holder.engine.watch = SimpleNamespace(run_folder=tmp_path)
    plan_file.write(None, steps=2)

    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 2
