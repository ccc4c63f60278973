"""Tests of `layout_knobs.py`: which layouts are offered, and what they would need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.errors import DsConfigError
from zerowatch.runtime.common.ds_config import training_config
from zerowatch.runtime.memory.oom.predicted_savings import Layout, LayoutBytes
from zerowatch.runtime.tuner.knobs import layout_knobs as module
from zerowatch.runtime.tuner.knobs.layout_knobs import ZeroLayouts, configured_layout, layout_knobs

PLANNED = {
    Layout(2): LayoutBytes(device_bytes=100, host_bytes=1),
    Layout(3): LayoutBytes(device_bytes=60, host_bytes=21),
    Layout(2, "cpu"): LayoutBytes(device_bytes=30, host_bytes=200),
}


def layouts_of(device: str = "cuda", world_size: int = 4) -> ZeroLayouts:
    engine = SimpleNamespace(
        device=torch.device(device),
        module=torch.nn.Linear(3, 2),
        zero_optimization_stage=lambda: 2,
    )
    source: Any = SimpleNamespace(engine=engine, config={"zero_optimization": {"stage": 2}})
    return ZeroLayouts(source, world_size, is_training_run=False)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The ds configs that were checked. A rebuild refuses stage 0."""
    configs: list[dict[str, Any]] = []

    def reason(engine: object, before: object, config: dict[str, Any]) -> str | None:
        configs.append(config)
        return "not at stage 0" if config["zero_optimization"]["stage"] == 0 else None

    monkeypatch.setattr(module, "unsupported_reason", reason)
    monkeypatch.setattr(module, "estimated_layouts", lambda engine: PLANNED)
    return configs


def test_a_layout_on_a_device_needs_the_difference_of_the_device_bytes() -> None:
    layouts = layouts_of()

    assert layouts.memory_bytes({"zero_stage": 3}) == -40
    assert layouts.memory_bytes({"offload_optimizer": True}) == -70
    assert layouts.memory_bytes({"zero_stage": 2}) == 0


def test_a_layout_on_a_host_needs_host_bytes_and_a_snapshot_of_the_states_too() -> None:
    layouts = layouts_of("cpu")
    snapshot = 12 * (3 * 2 + 2) // 4

    assert layouts.memory_bytes({"zero_stage": 3}) == snapshot  # 40 bytes less, 20 bytes more
    assert layouts.memory_bytes({"offload_optimizer": True}) == -70 + 199 + snapshot


def test_the_need_of_a_layout_without_an_estimate_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(engine: object) -> None:
        raise DsConfigError("not supported")

    layouts = layouts_of()
    unplanned = layouts.memory_bytes({"zero_stage": 1})
    layouts._source.config["zero_optimization"]["stage"] = 1
    from_unplanned = layouts.memory_bytes({"zero_stage": 3})
    monkeypatch.setattr(module, "estimated_layouts", fail)

    assert (unplanned, from_unplanned) == (None, None)
    assert layouts.memory_bytes({"zero_stage": 3}) is None


def test_a_layout_is_checked_once_per_engine(checked: list[dict[str, Any]]) -> None:
    layouts = layouts_of()

    reasons = [layouts.unsupported_reason({"zero_stage": stage}) for stage in (0, 0, 3, 3, 2)]
    num_checked = len(checked)
    layouts.on_engine_replaced()
    layouts.unsupported_reason({"zero_stage": 0})

    assert reasons == ["not at stage 0", "not at stage 0", None, None, None]
    assert (num_checked, len(checked)) == (2, 3)


@pytest.mark.parametrize(
    ("device", "offloads"), [("cuda", [False, True]), ("cpu", [False])], ids=["device", "host"]
)
def test_supported_stages_are_offered_and_offloads_unless_the_host_trains(
    device: str, offloads: list[bool]
) -> None:
    stage, optimizer, parameters = layout_knobs(layouts_of(device))

    assert stage.options() == [1, 2, 3]
    assert optimizer.options() == parameters.options() == offloads


@pytest.mark.parametrize(("world_size", "has_reason"), [(1, True), (2, False)])
def test_a_single_rank_has_no_stage_to_choose(world_size: int, has_reason: bool) -> None:
    stage, optimizer, _ = layout_knobs(layouts_of(world_size=world_size))

    assert (stage.unsupported_reason() is not None) == has_reason
    assert optimizer.unsupported_reason() is None


def test_a_stage_is_in_use_if_ds_config_and_engine_have_it() -> None:
    layouts = layouts_of()
    stage, *_ = layout_knobs(layouts)

    before = stage.is_applied(2), stage.is_applied(3)
    layouts._source.engine.zero_optimization_stage = lambda: 1

    assert before == (True, False)
    assert not stage.is_applied(2)


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cpu", False)])
def test_only_what_changes_is_written_to_the_ds_config(device: str, is_pinned: bool) -> None:
    layouts = layouts_of(device)

    changed = layouts.changed_config({"offload_optimizer": True})

    block = {"device": "cpu", "pin_memory": is_pinned}
    assert changed == {"zero_optimization": {"stage": 2, "offload_optimizer": block}}
    assert layouts.changed_config({"zero_stage": 2}) is None
    assert layouts.changed_config({"zero_stage": 3}) == {"zero_optimization": {"stage": 3}}


def test_a_removed_offload_has_the_device_none() -> None:
    layouts = layouts_of("cpu")
    block = {"device": "nvme", "nvme_path": "/x"}
    layouts._source.config["zero_optimization"]["offload_optimizer"] = block
    _, optimizer, _ = layout_knobs(layouts)

    changed = layouts.changed_config({"offload_optimizer": False})

    assert optimizer.options() == [False, True]  # the value in use is always offered
    assert changed is not None
    assert changed["zero_optimization"]["offload_optimizer"]["device"] == "none"


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_stage_that_is_put_back_overlaps_as_before(overlaps: bool) -> None:
    zero = {"stage": 2, "overlap_comm": overlaps}
    config = training_config({"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero})
    source: Any = SimpleNamespace(engine=None, config=config)
    layouts = ZeroLayouts(source, 4, is_training_run=True)

    layouts.note_overlap()
    source.config = layouts.changed_config({"zero_stage": 1})
    below = source.config["zero_optimization"]
    layouts.on_engine_replaced()
    source.config = layouts.changed_config({"zero_stage": 0})
    layouts.on_engine_replaced()
    changed_back = layouts.changed_config({"zero_stage": 2})

    assert below == {"stage": 1, "overlap_comm": False}
    assert changed_back == config


def test_a_stage_that_is_raised_after_one_rank_listed_its_options_is_the_same_on_all_ranks() -> (
    None
):
    zero = {"stage": 2, "overlap_comm": True}
    config = training_config({"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero})
    engine = SimpleNamespace(device=torch.device("cuda"))
    ranks: Any = [SimpleNamespace(engine=engine, config=config) for _ in range(2)]
    layouts = [ZeroLayouts(rank, 2, is_training_run=True) for rank in ranks]

    layout_knobs(layouts[0])[0].options()
    for rank, layout in zip(ranks, layouts, strict=True):
        rank.config = training_config({**config, "zero_optimization": {"stage": 1}})
        layout.on_engine_replaced()
    first, second = (layout.changed_config({"zero_stage": 2}) for layout in layouts)

    assert first == second


def test_a_stage_that_is_put_back_overlaps_as_in_the_last_rebuild_of_the_script() -> None:
    def config(stage: int, *, overlaps: bool) -> dict[str, Any]:
        zero = {"stage": stage, "overlap_comm": overlaps}
        return training_config({"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero})

    source: Any = SimpleNamespace(engine=None, config=config(2, overlaps=True))
    layouts = ZeroLayouts(source, 4, is_training_run=True)
    layouts.note_overlap()
    for rebuilt in (config(3, overlaps=False), config(1, overlaps=False)):
        source.config = rebuilt
        layouts.on_engine_replaced()

    changed = layouts.changed_config({"zero_stage": 2})

    assert changed == config(2, overlaps=False)


@pytest.mark.parametrize("block", [{}, {"pin_memory": False}, {"pin_memory": True, "ratio": 0.5}])
def test_an_offload_that_is_put_back_is_the_one_of_before(block: dict[str, Any]) -> None:
    layouts: Any = layouts_of()
    source = layouts._source
    source.config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **block}
    before = source.config

    source.config = layouts.changed_config({"offload_optimizer": False})
    changed_back = layouts.changed_config({"offload_optimizer": True})

    assert changed_back == before


@pytest.mark.parametrize(
    ("zero", "layout"),
    [
        (None, (0, False, False)),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, (1, True, False)),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, (3, False, True)),
        ({"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {}}, (3, 0, 0)),
        ({"stage": 2, "offload_optimizer": None}, (2, False, False)),
    ],
)
def test_the_layout_of_a_ds_config_is_read(
    zero: dict[str, Any] | None, layout: tuple[int, bool, bool]
) -> None:
    config = {} if zero is None else {"zero_optimization": zero}

    assert tuple(configured_layout(config).values()) == layout
