"""Tests of the plan file: the plan in use, and the failures that ended earlier processes."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from scripts.trainer.resume_engine import SingleRankHostGroup

from zerowatch.runtime.common.ds_config import merged, training_config
from zerowatch.runtime.trainer import engine_holder
from zerowatch.runtime.trainer.checkpoint.manager import CheckpointManager
from zerowatch.runtime.trainer.checkpoint.plan_file import (
    Failure,
    MicroBatchPlan,
    PersistedPlan,
    PlanFile,
    check_plan,
)
from zerowatch.runtime.trainer.engine_holder import EngineHolder
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import MicroBatchLimits

ALONE = SingleRankHostGroup()
PLAN = MicroBatchPlan(
    micro_batch_samples=8, sizing=MicroBatchLimits(bounds={128: 4, 256: 2}, failing={128: 8})
)
SMALL = MicroBatchPlan(micro_batch_samples=2)
WRITTEN = {"format": 1, "steps": 12, "plan": asdict(PLAN), "config_changes": {}, "failures": []}


def plan_file(folder: Path | None) -> PlanFile:
    return PlanFile(SimpleNamespace(run_folder=folder))


def test_a_plan_is_read_back_with_integer_keys(tmp_path: Path) -> None:
    plan_file(tmp_path / "runs" / "night").write(PLAN, steps=12, config_changes={"stage": 3})

    plan = plan_file(tmp_path / "runs" / "night").read(ALONE)

    assert plan == PersistedPlan(steps=12, plan=PLAN, config_changes={"stage": 3})


@pytest.mark.parametrize("config", [None, {"stage": 3}])
def test_a_plan_of_the_version_before_is_read_with_its_failures(
    tmp_path: Path, config: dict[str, int] | None
) -> None:
    written = {**WRITTEN, "config": config, "failures": [{"length": 128, "samples": 8}]}
    del written["config_changes"]
    (tmp_path / "plan.json").write_text(json.dumps(written))

    failures = (Failure(length=128, samples=8),)
    assert plan_file(tmp_path).read(ALONE) == PersistedPlan(
        steps=12, plan=PLAN, config_changes=config or {}, failures=failures
    )


def test_the_first_attempt_finds_no_plan(tmp_path: Path) -> None:
    assert plan_file(tmp_path).read(ALONE) is None
    assert list(tmp_path.iterdir()) == []


def test_a_plan_in_which_a_single_sample_failed_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    proven = MicroBatchLimits(proven={6: 4, 7: 1, 8: 1})
    sizing = proven.after_out_of_memory(length=100, failing=1, next_size=1)
    plan = MicroBatchPlan(micro_batch_samples=8, sizing=sizing)

    assert check_plan(asdict(plan), tmp_path) == plan


def test_a_proven_size_of_0_in_a_checkpoint_counts_as_none(tmp_path: Path) -> None:
    """Written by earlier versions after a single sample had failed."""
    values = {"micro_batch_samples": 8, "sizing": {"bounds": {7: 1}, "proven": {7: 0, 8: 0}}}

    sizing = check_plan(values, tmp_path).sizing

    assert sizing.bound(100) == 1
    assert sizing.after_success(100, largest=1).proven[7] == 1
    assert sizing.after_out_of_memory(200, failing=4, next_size=2).proven == {}
    assert sizing.after_out_of_memory(200, failing=4, next_size=2).bounds == {7: 1, 8: 2}


def test_failures_are_added_to_the_plan(tmp_path: Path) -> None:
    plan_file(tmp_path).write(PLAN, steps=12)

    plan_file(tmp_path).add_failure(length=200, samples=2)
    plan_file(tmp_path).add_failure(length=100, samples=4)
    plan_file(tmp_path).add_failure(length=200, samples=2)

    plan = plan_file(tmp_path).read(ALONE)
    assert plan is not None
    assert plan.plan == PLAN
    assert plan.failures == (Failure(length=100, samples=4), Failure(length=200, samples=2))


def test_a_failure_is_recorded_even_without_a_plan(tmp_path: Path) -> None:
    plan_file(tmp_path).add_failure(length=100, samples=4)

    plan = plan_file(tmp_path).read(ALONE)

    assert plan == PersistedPlan(failures=(Failure(length=100, samples=4),))


def test_writing_a_plan_drops_only_the_failures_that_were_read(tmp_path: Path) -> None:
    plan_file(tmp_path).add_failure(length=100, samples=4)
    second_attempt = plan_file(tmp_path)
    second_attempt.read(ALONE)

    plan_file(tmp_path).add_failure(length=300, samples=2)  # by another rank, after the read
    second_attempt.write(PLAN, steps=3)

    plan = plan_file(tmp_path).read(ALONE)
    assert plan is not None
    assert plan.failures == (Failure(length=300, samples=2),)


def test_failures_of_several_ranks_at_the_same_time_are_all_recorded(tmp_path: Path) -> None:
    together = Barrier(8)

    def fail(rank: int) -> None:
        together.wait()
        plan_file(tmp_path).add_failure(length=rank, samples=1)

    with ThreadPoolExecutor(8) as ranks:
        list(ranks.map(fail, range(8)))

    plan = plan_file(tmp_path).read(ALONE)
    assert plan is not None
    assert [failure.length for failure in plan.failures] == list(range(8))


def test_nodes_with_local_disks_use_the_newest_plan_and_all_failures(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    plan_file(here).write(PLAN, steps=12)
    plan_file(there).write(SMALL, steps=30)
    plan_file(here).add_failure(length=100, samples=4)

    for own, other in ((here, there), (there, here)):
        plan = plan_file(own).read(_Two((other / "plan.json").read_text()))
        assert plan == PersistedPlan(
            steps=30, plan=SMALL, failures=(Failure(length=100, samples=4),)
        )


class _Two:
    """Host group of rank 1 of two, where rank 0 sends a text."""

    rank = 1

    def __init__(self, text: str) -> None:
        self._text = text

    def all_gather_text(self, text: str) -> list[str]:
        return [self._text, text]


def test_a_run_without_a_folder_has_no_plan_file() -> None:
    plans = plan_file(None)

    plans.write(PLAN, steps=1)
    plans.add_failure(length=1, samples=1)

    assert plans.read(ALONE) is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"", b"null", b"7", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"plan":' * 100_000),
        *(
            json.dumps({**WRITTEN, key: value}).encode()
            for key, value in (
                *(("format", 2), ("extra", 1), ("steps", None), ("steps", "many"), ("plan", 3)),
                *(("plan", {}), ("plan", {"micro_batch_samples": 0})),
                ("plan", {"micro_batch_samples": 2**70}),
                ("plan", {"micro_batch_samples": 2, "sizing": {"evil": 1}}),
                ("plan", {"micro_batch_samples": 2, "sizing": {"bounds": {"a": 1}}}),
                ("plan", {"micro_batch_samples": 2, "sizing": {"bounds": {"128": 0}}}),
                *(("config_changes", 3), ("failures", 3), ("failures", [{"length": 1}])),
                ("failures", [{"length": 1, "samples": 0}]),
                ("failures", [{"length": "x", "samples": 1, "other": 2}]),
            )
        ),
    ],
)
def test_a_damaged_file_or_one_of_another_version_is_logged_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "plan.json").write_bytes(content)

    with caplog.at_level(logging.WARNING):
        assert plan_file(tmp_path).read(ALONE) is None
        plan_file(tmp_path).add_failure(length=7, samples=2)

    assert f"{tmp_path / 'plan.json'} ignored" in caplog.text
    found = plan_file(tmp_path).read(ALONE)
    assert found == PersistedPlan(failures=(Failure(length=7, samples=2),))


def test_a_write_error_is_logged_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    plans = plan_file(tmp_path / "file")

    with caplog.at_level(logging.WARNING):
        plans.write(PLAN, steps=1)
        plans.write(PLAN, steps=2)

    assert caplog.text.count("cannot write") == 1


def test_a_config_that_is_not_json_is_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plan_file(tmp_path).write(PLAN, steps=1, config_changes={"dtype": object()})

    assert "cannot write" in caplog.text


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    plan_file(tmp_path).write(PLAN, steps=12)

    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(WRITTEN))


NONSENSE: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": "x"}},
    {"zero_optimization": {"stage": 1, "overlap_comm": True}, "train_micro_batch_size_per_gpu": []},
    {"train_micro_batch_size_per_gpu": "many"},
)


def resuming(folder: Path, given: dict[str, Any]) -> tuple[CheckpointManager, EngineHolder, Any]:
    """Return the parts of a run that resumes from the plan file in `folder`."""
    watch = SimpleNamespace(
        run_folder=folder,
        run_id="mine",
        checkpoint_phase=nullcontext,
        rebind_engine=lambda engine: None,
    )
    engine: Any = SimpleNamespace(
        watch=watch, global_rank=0, use_node_local_storage=lambda: False, optimizer=object()
    )
    runner: Any = SimpleNamespace(
        steps=0,
        micro_batch_samples=4,
        replay=SimpleNamespace(planner=SimpleNamespace(limits=MicroBatchLimits())),
        on_fatal_oom=[],
    )
    metrics: Any = SimpleNamespace(count_rebuild=lambda *_: None)
    run_end: Any = SimpleNamespace(end_in_rebuild=None)
    holder = EngineHolder(
        engine, given, host_group=ALONE, metrics=metrics, make_engine=None, run_end=run_end
    )
    data: Any = SimpleNamespace(set_start=lambda start: None)
    return CheckpointManager(holder, runner, data, ALONE, background=False), holder, runner


@pytest.mark.parametrize(
    ("changes", "num_rebuilds"),
    [
        ({}, 0),
        ({"zero_optimization": {"stage": 2}}, 0),
        ({"zero_optimization": {"stage": 3}}, 1),
        ({"zero_optimization": {"stage": 3}, "communication_data_type": "bf16"}, 1),
    ],
)
def test_a_resumed_run_has_the_ds_config_of_its_caller_with_what_rebuilds_had_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    num_rebuilds: int,
) -> None:
    rebuilt: list[Any] = []

    def rebuild(engine: Any, config: Any, **options: Any) -> Any:
        rebuilt.append(config)
        return engine

    monkeypatch.setattr(engine_holder, "rebuild", rebuild)
    plan_file(tmp_path).write(PLAN, steps=3, config_changes=changes)
    given = training_config(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 7},
        }
    )
    manager, holder, _ = resuming(tmp_path, given)

    manager.load(tmp_path / "no checkpoints yet", fallback=False)

    assert len(rebuilt) == num_rebuilds
    assert holder.config == merged(given, changes)


@pytest.mark.parametrize("config", NONSENSE)
def test_a_ds_config_that_no_engine_can_have_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    plan_file(tmp_path).write(PLAN, steps=3, config_changes=config)
    given = {"train_micro_batch_size_per_gpu": 4}
    manager, holder, runner = resuming(tmp_path, given)

    with caplog.at_level(logging.WARNING):
        state = manager.load(tmp_path / "no checkpoints yet", fallback=False)

    assert (state, holder.config, holder.config_changes) == (None, given, {})
    assert runner.micro_batch_samples == 8
    (line,) = caplog.messages
    assert str(tmp_path / "plan.json") in line
    assert "ignored" in line
