"""Tests of `EngineHolder`: attachments move to the engine that replaces the old engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.errors import RebuildError
from zerowatch.runtime.common.ds_config import training_config
from zerowatch.runtime.common.undo import FAILURES
from zerowatch.runtime.engine.live_settings.optimizer_state_offload import OffloadedOptimizerStates
from zerowatch.runtime.engine.rebuild.engine_replacement import UndoneRebuildError
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
    run_end = SimpleNamespace(end_in_rebuild=None)
    return EngineHolder(
        first, {}, host_group=None, metrics=metrics, make_engine=None, run_end=run_end
    )


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


class Run:
    """Engine holder of one rank, whose watch, metrics, engines and attachments log calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        replaced_by: Callable[[Any], Any] | None = None,
        device: str = "cpu",
        world_size: int = 1,
        **config: Any,
    ) -> None:
        self.log: list[Any] = []
        self.given: tuple[Any, ...] = ()
        self.first, self.second = self.engine("first", device), self.engine("second", device)
        self._replaced_by = replaced_by or (lambda run: run.second)
        group: Any = SimpleNamespace(world_size=world_size, all_max=lambda value: value)
        metrics: Any = SimpleNamespace(
            count_rebuild=lambda *args: self.log.append(("count", *args)),
            set_compression_error=lambda *args: self.log.append(("error", *args)),
        )
        self.group, self.make_engine = group, object()
        self.config = {"train_micro_batch_size_per_gpu": 4, **config}
        monkeypatch.setattr(engine_holder, "rebuild", self.rebuild)
        monkeypatch.setattr(engine_holder, "perf_counter", iter([100.0, 103.5]).__next__)
        make_engine: Any = self.make_engine
        run_end: Any = SimpleNamespace(
            end_without_engine=lambda error: self.log.append(f"end by {type(error).__name__}"),
            end_in_rebuild=lambda error: self.log.append(f"all end by {type(error).__name__}"),
        )
        self.holder = EngineHolder(self.first, self.config, group, metrics, make_engine, run_end)
        self.holder.on_engine_replaced.append(lambda: self.log.append("replaced"))

    def engine(self, name: str, device: str) -> Any:
        watch = SimpleNamespace(
            checkpoint_phase=self.phase,
            rebind_engine=lambda engine: self.log.append(f"watch {engine.name}"),
            discard_window=lambda: self.log.append("discard window"),
        )
        return SimpleNamespace(
            name=name, watch=watch, optimizer=object(), device=torch.device(device)
        )

    @contextmanager
    def phase(self) -> Iterator[None]:
        self.log.append("phase")
        yield
        self.log.append("phase ends")

    def rebuild(
        self,
        engine: Any,
        config: Any,
        *,
        make_engine: Any,
        host_group: Any,
        on_engine_lost: Callable[[Exception], object],
    ) -> Any:
        self.given = (engine, config, make_engine, host_group)
        self.on_engine_lost = on_engine_lost
        return self._replaced_by(self)

    def attachment(self, name: str, *, fails: bool = False, reason: str | None = None) -> Any:
        def attach(engine: Any) -> Callable[[], None]:
            if fails:
                raise RuntimeError("not attached")
            self.log.append(f"{name} on {engine.name}")
            return lambda: self.log.append(f"{name} off {engine.name}")

        return SimpleNamespace(attach=attach, unsupported_reason=lambda engine: reason)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_an_attachment_replaces_the_previous_one_and_each_change_counts(run: Run) -> None:
    change = EngineChange.MINIMAL_BUCKETS
    one, two = run.attachment("one"), run.attachment("two")
    counts = []

    for attachment in (one, two, None, None):
        run.holder.attach(change, attachment)
        counts.append(run.holder.num_changes)

    assert run.log == ["one on first", "one off first", "two on first", "two off first"]
    assert counts == [1, 3, 4, 4]
    assert run.holder.attached(change) is None


def test_if_an_attachment_fails_the_previous_one_is_attached_again(run: Run) -> None:
    change, one = EngineChange.MINIMAL_BUCKETS, run.attachment("one")
    run.holder.attach(change, one)

    with pytest.raises(RuntimeError, match="not attached"):
        run.holder.attach(change, run.attachment("two", fails=True))

    assert run.log == ["one on first", "one off first", "one on first"]
    assert run.holder.attached(change) is one


@pytest.mark.parametrize(("chosen", "modules"), [(True, None), ("blocks.*", "blocks.*")])
def test_activations_of_chosen_modules_are_checkpointed_until_false(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: Any, modules: Any
) -> None:
    monkeypatch.setattr(engine_holder, "ActivationCheckpointing", run.attachment)

    run.holder.checkpoint_activations(chosen)
    run.holder.checkpoint_activations(False)

    assert run.log == [f"{modules} on first", f"{modules} off first"]


class Compressor:
    """Compressor that records how it was made and called."""

    error_ratio = 0.25

    def __init__(self, kind: str, *, asynchronous: bool = False) -> None:
        self.kind, self.asynchronous = kind, asynchronous
        self.calls: list[Any] = []

    def unsupported_reason(self, engine: Any) -> str | None:
        return "it has no buckets" if self.kind == "fp8" else None

    def attach(self, engine: Any) -> Callable[[], None]:
        return lambda: None

    def begin_window(self, unit: float) -> None:
        self.calls.append(unit)

    def abort_window(self) -> None:
        self.calls.append("abort")

    def commit_window(self) -> None:
        self.calls.append("commit")


@pytest.fixture
def compressed(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(engine_holder, "GradientCompressor", Compressor)
    return run


@pytest.mark.parametrize(
    ("kind", "options", "made"),
    [
        ("bf16", {}, ("bf16", False)),
        ("int8", {"asynchronous": True}, ("int8", True)),
        (None, {"asynchronous": True}, ("plain", True)),
    ],
)
def test_gradients_are_compressed_in_the_format_until_none(
    compressed: Run, kind: str | None, options: dict[str, bool], made: tuple[str, bool]
) -> None:
    holder = compressed.holder

    holder.compress(kind, **options)

    compressor: Any = holder.compressor
    assert (compressor.kind, compressor.asynchronous) == made
    assert holder.attached(EngineChange.GRADIENT_COMPRESSION) is compressor

    holder.compress(None)
    assert holder.compressor is None
    assert holder.attached(EngineChange.GRADIENT_COMPRESSION) is None


def test_a_compression_that_the_engine_does_not_support_leaves_the_previous_one(
    compressed: Run,
) -> None:
    compressed.holder.compress("bf16")
    before = compressed.holder.compressor

    with pytest.raises(ValueError, match=r"cannot be sent as fp8: it has no buckets"):
        compressed.holder.compress("fp8")

    assert compressed.holder.compressor is before


def test_the_windows_of_the_compressor_are_those_of_the_run(compressed: Run) -> None:
    holder = compressed.holder
    holder.compress("bf16")
    compressor: Any = holder.compressor

    holder.begin_window(0.5)
    holder.commit_window(skipped=False)
    holder.begin_window(2.0)
    holder.commit_window(skipped=True)
    holder.abort_window()

    assert compressor.calls == [0.5, "commit", 2.0, "abort", "abort"]
    assert compressed.log == [("error", "bf16", 0.25), ("error", "bf16", 0.25), "discard window"]


def test_a_run_without_compression_has_no_error_of_it(run: Run) -> None:
    run.holder.begin_window(0.5)
    run.holder.commit_window(skipped=False)
    run.holder.abort_window()

    assert run.log == ["discard window"]


def test_a_compressor_that_fails_on_the_new_engine_compresses_no_more(compressed: Run) -> None:
    compressed.holder.compress("bf16")
    compressor: Any = compressed.holder.compressor
    compressor.attach = compressed.attachment("bf16", fails=True).attach

    compressed.holder.rebuild_as({})

    assert compressed.holder.compressor is None


def test_a_rebuild_moves_watch_and_attachments_to_the_new_engine(run: Run) -> None:
    holder = run.holder
    holder.attach(EngineChange.MINIMAL_BUCKETS, run.attachment("one"))
    holder.attach(EngineChange.LEARNING_RATE, run.attachment("two"))
    config = {"train_micro_batch_size_per_gpu": 2}
    del run.log[:]

    holder.rebuild_as(config)

    assert run.log == [
        "two off first",
        "one off first",
        "phase",
        "phase ends",
        "watch second",
        "replaced",
        ("count", "committed", 3.5),
        "one on second",
        "two on second",
    ]
    assert run.given == (run.first, config, run.make_engine, run.group)
    assert holder.engine is run.second
    assert (holder.config, holder.num_changes) == (config, 5)
    assert holder.config_changes == config


def test_a_rebuild_that_was_undone_continues_with_an_engine_of_the_previous_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run: Run) -> Any:
        raise UndoneRebuildError("too large", run.second)

    run = Run(monkeypatch, replaced_by=fail)
    run.holder.attach(EngineChange.LEARNING_RATE, run.attachment("one"))
    del run.log[:]

    with pytest.raises(UndoneRebuildError):
        run.holder.rebuild_as({"zero_optimization": {"stage": 3}})

    assert run.log == [
        "one off first",
        "phase",
        "watch second",
        "replaced",
        ("count", "undone", 3.5),
        "one on second",
    ]
    assert run.holder.engine is run.second
    assert (run.holder.config, run.holder.config_changes) == (run.config, {})


def test_a_rebuild_that_was_refused_continues_with_the_same_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run: Run) -> Any:
        raise RebuildError("no")

    run = Run(monkeypatch, replaced_by=fail)
    run.holder.attach(EngineChange.LEARNING_RATE, run.attachment("one"))
    del run.log[:]

    with pytest.raises(RebuildError):
        run.holder.rebuild_as({})

    assert run.log == ["one off first", "phase", ("count", "refused", 3.5), "one on first"]
    assert run.holder.engine is run.first
    assert (run.holder.config, run.holder.config_changes) == (run.config, {})


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_run_ends_and_nothing_is_attached_if_a_rebuild_leaves_no_engine(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(run: Run) -> Any:
        run.first.optimizer = None
        raise error

    run = Run(monkeypatch, replaced_by=fail)
    run.holder.attach(EngineChange.LEARNING_RATE, run.attachment("one"))

    with pytest.raises(error):
        run.holder.rebuild_as({})

    ended = f"end by {error.__name__}"
    assert run.log[1:] == ["one off first", "phase", ("count", "refused", 3.5), ended]


def test_the_ranks_end_together_if_the_rebuild_fails_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run: Run) -> Any:
        run.first.optimizer, error = None, RuntimeError()
        run.on_engine_lost(error)
        raise error

    run = Run(monkeypatch, replaced_by=fail)

    with pytest.raises(RuntimeError):
        run.holder.rebuild_as({})

    ended = ["all end by RuntimeError", ("count", "refused", 3.5), "end by RuntimeError"]
    assert run.log == ["phase", *ended]


@pytest.mark.parametrize("place", ["watch", "notify"])
def test_the_run_ends_if_the_replacement_of_the_engine_is_interrupted(run: Run, place: str) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    if place == "watch":
        run.first.watch.rebind_engine = interrupt
    else:
        run.holder.on_engine_replaced.append(interrupt)
    run.holder.attach(EngineChange.LEARNING_RATE, run.attachment("one"))

    def replace(run: Run) -> Any:
        run.first.optimizer = None
        return run.second

    run._replaced_by = replace

    with pytest.raises(KeyboardInterrupt):
        run.holder.rebuild_as({})

    assert not run.holder.has_engine
    assert run.log[-1] == "end by KeyboardInterrupt"


def test_a_rebuild_that_is_interrupted_before_anything_changed_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(run: Run) -> Any:
        raise KeyboardInterrupt

    run = Run(monkeypatch, replaced_by=interrupt)
    run.holder.attach(EngineChange.LEARNING_RATE, run.attachment("one"))

    with pytest.raises(KeyboardInterrupt):
        run.holder.rebuild_as({})

    assert run.log[1:] == ["one off first", "phase", ("count", "refused", 3.5), "one on first"]


def test_a_rebuild_with_a_config_that_cannot_be_used_is_refused_in_no_time(run: Run) -> None:
    with pytest.raises(RebuildError, match=r"the engine was not rebuilt: .*micro_batch"):
        run.holder.rebuild({"train_micro_batch_size_per_gpu": 0})

    assert run.log == [("count", "refused", 0.0)]


def test_a_rebuild_merges_the_changes_into_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, zero_optimization={"stage": 1, "reduce_bucket_size": 7})

    run.holder.rebuild({"zero_optimization": {"stage": 3}})

    config = run.given[1]
    assert config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 7}
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 1


def test_what_rebuilds_changed_is_known_until_it_is_changed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}
    run = Run(monkeypatch, zero_optimization=zero)
    monkeypatch.setattr(engine_holder, "perf_counter", lambda: 0.0)
    holder, known = run.holder, []

    for changed in (
        {"gradient_clipping": 0.5},
        {"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        {"zero_optimization": {**zero, "stage": 3}},
        {},
    ):
        holder.rebuild_as({**run.config, **changed})
        known.append(holder.config_changes)

    assert known == [
        {"gradient_clipping": 0.5},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3}},
        {},
    ]


def test_saved_changes_are_restored_in_the_first_config(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = {"stage": 1, "sub_group_size": (7,)}
    given = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    run = Run(monkeypatch, **training_config(given))
    monkeypatch.setattr(engine_holder, "perf_counter", lambda: 0.0)
    holder, stages = run.holder, []
    for changes in ({}, {"zero_optimization": {"stage": 3}}, {"gradient_clipping": 0.5}, {}):
        before = holder.num_changes
        holder.restore_changes(json.loads(json.dumps(changes)))
        stages.append((holder.config["zero_optimization"]["stage"], holder.num_changes - before))
        assert holder.config_changes == changes
        holder.restore_changes(changes)  # which it has

    assert stages == [(1, 0), (3, 1), (1, 1), (1, 1)]


def test_saved_changes_that_cannot_be_used_are_refused(run: Run) -> None:
    with pytest.raises(RebuildError, match=r"the engine was not rebuilt: .*micro_batch"):
        run.holder.restore_changes({"train_micro_batch_size_per_gpu": 0})

    assert run.log == [("count", "refused", 0.0)]


class Offloaded(OffloadedOptimizerStates):
    """Offloaded states that record what is done with them."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def offload(self) -> None:
        self.log.append("offload")

    def reload(self) -> None:
        self.log.append("reload")

    def __call__(self) -> None:
        self.log.append("undo")


def test_offloaded_states_are_on_the_device_only_while_they_are_read(run: Run) -> None:
    attachment: Any = SimpleNamespace(attach=lambda engine: Offloaded(run.log))
    run.holder.attach(EngineChange.OPTIMIZER_STATE_OFFLOAD, attachment)

    with run.holder.optimizer_states_on_device():
        run.log.append("read")
    with pytest.raises(KeyError), run.holder.optimizer_states_on_device():
        raise KeyError
    run.holder.reload_optimizer_states()
    run.holder.abort_window()

    assert run.log == [
        *("reload", "read", "offload"),
        *("reload", "offload"),
        "reload",
        *("discard window", "offload"),
    ]


def test_close_detaches_everything_in_reverse_order_once(run: Run) -> None:
    for name, change in (("one", EngineChange.LEARNING_RATE), ("two", EngineChange.REBUILD)):
        run.holder.attach(change, run.attachment(name))
    del run.log[:]

    run.holder.close()
    run.holder.close()

    assert run.log == ["two off first", "one off first"]


def test_a_memory_saving_is_attached_once(run: Run) -> None:
    change, saving = EngineChange.MINIMAL_BUCKETS, run.attachment("one")

    assert run.holder.try_attach(change, saving) is True
    assert run.holder.try_attach(change, run.attachment("two")) is False
    assert run.log == ["one on first"]
    assert run.holder.attached(change) is saving


def test_an_unsupported_memory_saving_is_not_attached(run: Run) -> None:
    saving = run.attachment("one", reason="it would free nothing")

    assert run.holder.try_attach(EngineChange.MINIMAL_BUCKETS, saving) is False
    assert run.log == []


@pytest.mark.parametrize(
    ("stage", "changes"),
    [(1, {}), (2, {}), (3, {"zero_optimization": {"stage": 3}})],
    ids=["lower", "same", "higher"],
)
def test_a_saving_by_a_rebuild_is_outdated_unless_the_stage_is_higher(
    monkeypatch: pytest.MonkeyPatch, stage: int, changes: dict[str, Any]
) -> None:
    config = training_config({"train_micro_batch_size_per_gpu": 4})
    run = Run(monkeypatch, **config, zero_optimization={"stage": 2})

    assert run.holder.try_rebuild({"zero_optimization": {"stage": stage}}) is bool(changes)
    assert run.holder.config_changes == changes


def test_a_saving_by_a_rebuild_at_the_same_stage_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, zero_optimization={"stage": 2})

    assert run.holder.try_rebuild({"zero_optimization": {"offload_optimizer": {}}}) is True


def test_a_saving_by_a_rebuild_that_fails_is_logged(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.holder.try_rebuild({"train_micro_batch_size_per_gpu": 0}) is False
    assert "memory saving by a rebuild failed: the engine was not rebuilt" in caplog.text


@pytest.mark.parametrize(("device", "num_rebuilds"), [("cpu", 1), ("meta", 3)])
def test_the_memory_savings_of_a_run_depend_on_its_config_and_device(
    monkeypatch: pytest.MonkeyPatch, device: str, num_rebuilds: int
) -> None:
    run = Run(monkeypatch, device=device, world_size=2, zero_optimization={"stage": 2})

    savings = run.holder.memory_savings("blocks.*")

    assert [saving.change for saving in savings] == [
        EngineChange.ACTIVATION_CHECKPOINTING,
        EngineChange.MINIMAL_BUCKETS,
        EngineChange.OPTIMIZER_STATE_OFFLOAD,
        *[EngineChange.REBUILD] * num_rebuilds,
    ]
    assert savings[3].apply() is True
    assert run.holder.config["zero_optimization"] == {"stage": 3}


def test_the_activations_of_the_chosen_modules_are_a_memory_saving(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_holder, "ActivationCheckpointing", run.attachment)

    assert run.holder.memory_savings("blocks.*")[0].apply() is True
    assert run.log == ["blocks.* on first"]
