"""Knobs of an engine: live settings, attachments, compression and Python's GC, without DeepSpeed.

`test_knobs_job.py` sets them on real engines.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.undo import Undo
from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.tuner.knobs import engine_knobs
from zerowatch.runtime.tuner.knobs.engine_knobs import (
    NO_COMPRESSOR,
    AsyncReductionKnob,
    AttachmentKnob,
    CompressionKnob,
    CompressorConfig,
    ConfigOfKnobs,
    DeepSpeedKnob,
    GcKnob,
    attachment_knobs,
    compressor_config,
    deepspeed_knobs,
    detach_compressor,
    powers_of_two,
    restore_attachments,
    set_compressor,
    value_in_config,
)
from zerowatch.runtime.tuner.policy.knob_registry import (
    ACTIVATION_CHECKPOINTING,
    PREFETCH_BUCKET_SIZE,
    REDUCE_BUCKET_SIZE,
    SPECS,
)

NUM_ELEMENTS = 3 * 5 + 5


class Setting:
    """A live setting, whose value is an attribute of the engine.

    Attributes:
        events: Each value that was set, and "undo" for each that was undone.
        reason: Why an engine does not have it.
    """

    def __init__(self, name: str = "reduce_bucket_size", minimum: int | None = 1) -> None:
        self.name, self.minimum = name, minimum
        self.events: list[object] = []
        self.reason: str | None = None

    def unsupported_reason(self, engine: Any) -> str | None:
        return self.reason

    def get(self, engine: Any) -> int:
        value: int = engine.value
        return value

    def apply(self, engine: Any, value: int) -> Undo:
        before, engine.value = engine.value, value
        self.events.append(value)

        def undo() -> None:
            self.events.append("undo")
            engine.value = before

        return undo

    def is_applied(self, engine: Any, value: int) -> bool:
        return bool(engine.value == value)

    def memory_bytes(self, engine: Any, value: int) -> int:
        return 4 * (value - engine.value)


def engine_of(value: int = 7) -> Any:
    return SimpleNamespace(value=value, module=torch.nn.Linear(3, 5), device="cpu")


def source_of(engine: Any, config: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(engine=engine, config=config or {})


def knob_of(setting: Setting, source: Any) -> DeepSpeedKnob:
    live: Any = setting
    return DeepSpeedKnob(live, source)


def test_changes_back_and_forth_undo_each_other_and_do_not_accumulate() -> None:
    setting = Setting()
    knob = knob_of(setting, source_of(engine_of(7)))

    for value in (9, 7, 9, 7, 7, 11, 12, 11):
        knob.set(value)

    assert setting.events == [9, "undo", 9, "undo", 11, 12, "undo"]
    assert (knob.get(), knob.is_set) == (11, True)


def test_a_setting_at_the_value_of_the_script_is_not_set() -> None:
    knob = knob_of(Setting(), source_of(engine_of(7)))
    never = knob.is_set

    undo = knob.set(9)
    during = knob.is_set
    undo()

    assert (never, during, knob.is_set, knob.get()) == (False, True, False, 7)


def test_the_undo_leaves_an_engine_without_the_setting_alone() -> None:
    setting, engine = Setting(), engine_of(7)
    undo = knob_of(setting, source_of(engine)).set(9)

    setting.reason = "not at stage 0"
    undo()

    assert engine.value == 9


@pytest.mark.parametrize(
    ("minimum", "options"),
    [
        (None, (False, True)),
        (1, (1, 2, 4, 7, 8, 16, 32)),
        (0, (0, 1, 2, 4, 7, 8, 16, 32)),
    ],
)
def test_sizes_go_up_to_the_power_of_two_that_holds_the_model(
    minimum: int | None, options: tuple[int, ...]
) -> None:
    knob = knob_of(Setting(minimum=minimum), source_of(engine_of(7)))  # 20 parameters

    assert knob.options() == options


@pytest.mark.parametrize(
    ("total", "sizes"),
    [(0, (1, 3)), (1, (1, 3)), (2, (1, 2, 3)), (64, (1, 2, 3, 4, 8, 16, 32, 64))],
)
def test_the_smallest_size_is_a_64th_but_at_least_one(total: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(total, 3) == sizes
    assert powers_of_two(2**20, 2**20) == tuple(2**power for power in range(14, 21))


def test_a_value_of_no_number_is_neither_set_nor_applied_nor_measured() -> None:
    knob = knob_of(Setting(), source_of(engine_of(7)))

    with pytest.raises(ZerowatchError, match="reduce_bucket_size cannot be set to None"):
        knob.set(None)
    assert (knob.is_applied(None), knob.memory_bytes(None)) == (False, None)
    assert (knob.is_applied(7), knob.is_applied(8), knob.memory_bytes(9)) == (True, False, 8)


@pytest.mark.parametrize(
    ("was_set", "config", "reason", "value"),
    [
        (True, {"reduce_bucket_size": 9}, None, 9),
        (False, {"reduce_bucket_size": 9}, None, 5),
        (True, {}, None, 5),
        (True, {"reduce_bucket_size": 9}, "not at stage 0", 5),
    ],
    ids=["set before", "never set", "not in the ds config", "not supported"],
)
def test_a_new_engine_gets_the_value_of_the_ds_config_if_it_was_set_before(
    was_set: bool, config: dict[str, Any], reason: str | None, value: int
) -> None:
    setting = Setting()
    source = source_of(engine_of(7), {"zero_optimization": config})
    knob = knob_of(setting, source)
    if was_set:
        knob.set(9)

    source.engine, setting.reason = engine_of(5), reason
    knob.on_engine_replaced()

    assert (source.engine.value, knob.is_set) == (value, was_set)


def test_a_change_of_the_previous_engine_is_not_undone_on_the_new_one() -> None:
    setting, source = Setting(), source_of(engine_of(7))
    knob = knob_of(setting, source)
    knob.set(9)

    source.engine = engine_of(9)
    knob.on_engine_replaced()
    knob.set(7)

    assert setting.events == [9, 7]


def test_each_knob_of_deepspeed_has_a_row_in_the_registry() -> None:
    names = [knob.name for knob in deepspeed_knobs(source_of(engine_of()))]

    assert {"reduce_bucket_size", "prefetch_bucket_size"} <= set(names) <= set(SPECS)
    assert len(set(names)) == len(names)


def test_the_longer_of_two_keys_of_stage_3_is_the_one_that_counts() -> None:
    both = {"stage3_prefetch_bucket_size": 3, "prefetch_bucket_size": 7}

    assert value_in_config(PREFETCH_BUCKET_SIZE, {"zero_optimization": both}) == 3


@pytest.mark.parametrize("value", ["auto", None, 2.5])
def test_a_value_that_is_no_number_is_not_known(value: object) -> None:
    config = {"zero_optimization": {"reduce_bucket_size": value}}

    assert value_in_config(REDUCE_BUCKET_SIZE, config) is None


def test_a_whole_number_may_be_a_float() -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 5e8}}

    value = value_in_config(REDUCE_BUCKET_SIZE, config)

    assert (value, type(value)) == (500_000_000, int)


class ConfigHolder:
    """Holds an engine and its ds config, and rebuilds the engine with another one."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.knobs: list[DeepSpeedKnob] = []
        self.use(config)
        self.written = ConfigOfKnobs(self)  # type: ignore[arg-type]

    def use(self, config: dict[str, Any]) -> None:
        self.config, self.engine = config, engine_of(7)
        self.engine.config = config

    def rebuild(self, config: dict[str, Any]) -> None:
        self.use(config)
        self.written.on_engine_replaced()
        for knob in self.knobs:
            knob.on_engine_replaced()

    def knob(self, name: str) -> DeepSpeedKnob:
        self.knobs.append(knob_of(Setting(name), self))
        return self.knobs[-1]


def zero_of(**entries: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **entries}}


@pytest.mark.parametrize("size", [9, 9e3, "9000"])
def test_entries_of_other_knobs_stay_as_given(size: Any) -> None:
    holder = ConfigHolder(zero_of(reduce_bucket_size=7))
    holder.knob("reduce_bucket_size")
    knob = holder.knob("prefetch_bucket_size")
    holder.rebuild(zero_of(reduce_bucket_size=size))

    knob.set(3)
    holder.written.write([knob])

    written = zero_of(reduce_bucket_size=size, stage3_prefetch_bucket_size=3)
    assert holder.config == holder.engine.config == written


@pytest.mark.parametrize("given", [{}, {"reduce_bucket_size": 7.0}, {"reduce_bucket_size": "7"}])
def test_a_knob_at_its_first_value_has_the_entry_of_the_last_rebuild(given: Any) -> None:
    holder = ConfigHolder(zero_of(reduce_bucket_size=5))
    knob = holder.knob("reduce_bucket_size")
    holder.rebuild(zero_of(**given))

    for value in (9, 7):
        knob.set(value)
        holder.written.write([knob])

    assert holder.config == zero_of(**given)


def test_writing_values_can_be_undone() -> None:
    holder = ConfigHolder(zero_of())
    before, knob = holder.config, holder.knob("reduce_bucket_size")

    knob.set(9)
    undo = holder.written.write([knob])
    during = holder.config, holder.engine.config
    undo()

    assert during == (zero_of(reduce_bucket_size=9),) * 2
    assert holder.config is before
    assert holder.engine.config is before


def test_the_config_of_the_engine_keeps_what_a_memory_saving_has_lowered() -> None:
    holder = ConfigHolder(zero_of(reduce_bucket_size=7))
    knob = holder.knob("prefetch_bucket_size")
    holder.engine.config = zero_of(reduce_bucket_size=1)

    knob.set(3)
    holder.written.write([knob])

    sizes = [
        value_in_config(REDUCE_BUCKET_SIZE, config)
        for config in (holder.config, holder.engine.config)
    ]
    assert sizes == [7, 1]


class Holder:
    """Holds an engine, its attachments and its compressor; records what is attached."""

    def __init__(self, compressor: Any = None) -> None:
        self.engine = engine_of(7)
        self.compressor = compressor
        self.attachments: dict[EngineChange, Any] = {}
        self.events: list[object] = []

    def attached(self, change: EngineChange) -> Any:
        return self.attachments.get(change)

    def attach(self, change: EngineChange, attachment: Any) -> None:
        self.events.append((change, attachment))
        self.attachments[change] = attachment

    def set_compressor(self, compressor: Any) -> None:
        self.events.append(compressor)
        self.compressor = compressor

    def compress(self, kind: str | None, *, asynchronous: bool) -> None:
        self.set_compressor(SimpleNamespace(kind=kind, asynchronous=asynchronous))


PLAIN = "plain"  # the kind of a compressor that only reorders
CHECKPOINTING = EngineChange.ACTIVATION_CHECKPOINTING


def attachment_knob(holder: Any, attachment: Any) -> AttachmentKnob:
    return AttachmentKnob(ACTIVATION_CHECKPOINTING, holder, CHECKPOINTING, attachment)


def test_an_attachment_is_switched_on_and_off_and_undone() -> None:
    holder = Holder()
    attachment = SimpleNamespace(unsupported_reason=lambda engine: "no module")
    knob = attachment_knob(holder, attachment)
    reasons = [knob.unsupported_reason()]

    on = knob.set(True)
    knob.set(True)
    reasons.append(knob.unsupported_reason())
    off = knob.set(False)
    off()
    was_on = knob.get()
    on()
    on()

    assert (reasons, was_on, knob.get()) == (["no module", None], True, False)
    assert [attached for _, attached in holder.events] == [attachment, None, attachment, None]


def test_the_attachment_that_was_switched_off_is_switched_on_again() -> None:
    holder = Holder()
    chosen = SimpleNamespace(unsupported_reason=lambda engine: None)
    holder.attachments[CHECKPOINTING] = chosen
    default = SimpleNamespace(unsupported_reason=lambda engine: "no repeated block")
    knob = attachment_knob(holder, default)

    knob.set(False)
    reason = knob.unsupported_reason()
    knob.set(True)

    assert (reason, holder.attached(CHECKPOINTING)) == (None, chosen)


def test_activation_checkpointing_and_the_optimizer_s_states_are_attachments() -> None:
    holder: Any = Holder()
    checkpointing, offload = attachment_knobs(holder, lambda module: [])

    assert (checkpointing.name, offload.name) == (
        "activation_checkpointing",
        "optimizer_state_offload",
    )
    checkpointing.set(True)
    offload.set(True)
    assert list(holder.attachments) == [CHECKPOINTING, EngineChange.OPTIMIZER_STATE_OFFLOAD]


def test_present_attachments_are_restored_where_they_have_changed() -> None:
    buckets, compressor = object(), object()
    holder: Any = Holder(compressor)
    holder.attachments[EngineChange.MINIMAL_BUCKETS] = buckets
    undo = restore_attachments(holder)

    holder.attachments.clear()
    holder.attachments[EngineChange.OPTIMIZER_STATE_OFFLOAD] = object()
    holder.compressor = None
    undo()
    undo()

    assert holder.attachments == {
        EngineChange.MINIMAL_BUCKETS: buckets,
        EngineChange.OPTIMIZER_STATE_OFFLOAD: None,
    }
    assert len(holder.events) == 3
    assert holder.compressor is compressor


@pytest.mark.parametrize(
    ("compressor", "config"),
    [
        (None, (None, False)),
        (SimpleNamespace(kind=PLAIN, asynchronous=True), (None, True)),
        (SimpleNamespace(kind="int8", asynchronous=False), ("int8", False)),
    ],
)
def test_the_configuration_of_a_compressor_is_read(compressor: Any, config: Any) -> None:
    assert compressor_config(compressor) == CompressorConfig(*config)
    assert NO_COMPRESSOR == (None, False)


def test_a_compressor_is_detached_and_put_back() -> None:
    compressor = SimpleNamespace(kind="int8", asynchronous=False)
    holder: Any = Holder(compressor)

    undo = detach_compressor(holder)
    during = holder.compressor
    undo()

    assert (during, holder.compressor) == (None, compressor)


@pytest.mark.parametrize(
    ("config", "is_reused"),
    [(CompressorConfig("int8", True), True), (CompressorConfig("int8", False), False)],
)
def test_a_compressor_of_the_same_configuration_is_used_again(
    config: CompressorConfig, is_reused: bool
) -> None:
    previous: Any = SimpleNamespace(kind="int8", asynchronous=True)
    other: Any = SimpleNamespace(kind="fp8", asynchronous=False)
    holder: Any = Holder(other)

    undo = set_compressor(holder, config, previous)
    during = holder.compressor
    undo()

    assert (during is previous) is is_reused
    assert compressor_config(during) == config
    assert holder.compressor is other


def test_only_the_order_of_reduction_changes_without_a_kind_of_compression() -> None:
    holder: Any = Holder()

    set_compressor(holder, CompressorConfig(None, True), None)

    assert (holder.compressor.kind, holder.compressor.asynchronous) == (None, True)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> dict[bool, str | None]:
    """Why an engine's gradients are not accessible, asynchronously or not."""
    reasons: dict[bool, str | None] = {False: None, True: None}
    monkeypatch.setattr(
        engine_knobs, "unsupported_reason", lambda engine, *, asynchronous: reasons[asynchronous]
    )
    monkeypatch.setattr(engine_knobs, "zero_1_2_optimizer", lambda engine: object())
    return reasons


def test_a_single_rank_has_nothing_to_compress(refusals: dict[bool, str | None]) -> None:
    holder: Any = Holder()
    single = CompressionKnob(holder, 1), AsyncReductionKnob(holder, 1)

    assert [knob.unsupported_reason() for knob in single] == ["a single rank sends nothing"] * 2


def test_gradients_that_are_not_accessible_are_not_compressed(
    refusals: dict[bool, str | None],
) -> None:
    holder: Any = Holder()
    compression, reduction = CompressionKnob(holder, 2), AsyncReductionKnob(holder, 2)
    before = compression.unsupported_reason(), reduction.unsupported_reason()

    refusals[False] = "its own hooks"
    refused = compression.unsupported_reason(), reduction.unsupported_reason()
    holder.compressor = SimpleNamespace(kind="int8", asynchronous=True)

    assert (before, refused) == ((None, None), ("its own hooks", "its own hooks"))
    assert compression.unsupported_reason() is None
    assert (compression.get(), reduction.get()) == ("int8", True)


def test_reduction_is_asynchronous_only_where_buckets_are_waited_for(
    refusals: dict[bool, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder: Any = Holder()
    knob = AsyncReductionKnob(holder, 2)
    possible = knob.options()

    refusals[True] = "overlap_comm"
    impossible = knob.options()
    holder.compressor = SimpleNamespace(kind=PLAIN, asynchronous=True)
    in_use = knob.options()
    monkeypatch.setattr(engine_knobs, "zero_1_2_optimizer", lambda engine: None)

    assert (possible, impossible, in_use) == ((False, True), (False,), (False, True))
    assert "only ZeRO 1 and 2" in (knob.unsupported_reason() or "")


def test_the_data_type_in_use_is_offered_too() -> None:
    holder: Any = Holder()
    knob = CompressionKnob(holder, 2)
    usual = knob.options()

    holder.compressor = SimpleNamespace(kind="int8", asynchronous=False)
    of_a_kind = knob.options()
    holder.compressor = SimpleNamespace(kind="other", asynchronous=False)

    assert usual == of_a_kind == (None, "bf16", "int8", "fp8")
    assert knob.options() == (None, "bf16", "int8", "fp8", "other")


def test_compression_needs_a_workspace_for_a_bucket_and_residuals_of_8_bytes_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def workspace(wire: Any, num_values: int, world_size: int, device: str) -> int:
        asked.append((num_values, world_size, device))
        return 1000

    monkeypatch.setattr(engine_knobs, "workspace_bytes", workspace)
    setting = SimpleNamespace(get=lambda engine: engine.value)
    monkeypatch.setattr(engine_knobs, "REDUCE_BUCKET_SIZE_SETTING", setting)
    holder: Any = Holder()
    knob = CompressionKnob(holder, 4)

    needs = [knob.memory_bytes(value) for value in (None, "bf16", "int8", "fp8")]
    holder.compressor = SimpleNamespace(kind="int8", asynchronous=False)
    holder.engine.value = 50

    assert needs == [0, 1000, 1000 + 8 * NUM_ELEMENTS, 1000 + 8 * NUM_ELEMENTS]
    assert knob.memory_bytes(None) == -1000 - 8 * NUM_ELEMENTS
    assert set(asked) == {(7, 4, "cpu"), (NUM_ELEMENTS, 4, "cpu")}


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations that were collected; nothing is frozen."""
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation: collected.append(generation))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    yield collected
    gc.enable()


def test_each_hundredth_window_is_collected_in_full(collections: list[int]) -> None:
    knob = GcKnob()
    knob.on_window_end()
    before = list(collections)

    knob.set("between_steps")
    for _ in range(201):
        knob.on_window_end()
    knob.close()
    knob.on_window_end()

    assert before == []
    assert collections == [2, *[1] * 99, 2, *[1] * 99, 2, 1]


def test_a_trial_that_switches_repeatedly_collects_all_objects_once(
    collections: list[int],
) -> None:
    knob = GcKnob()

    for value in ("between_steps", "automatic", "between_steps", "between_steps", "automatic"):
        knob.set(value)

    assert collections == [2, 1]
    assert gc.isenabled()


def test_a_collector_that_the_script_disabled_stays_disabled(collections: list[int]) -> None:
    knob = GcKnob()
    gc.disable()

    knob.set("between_steps")
    is_ours = knob.unsupported_reason() is None
    knob.close()

    assert is_ours
    assert not gc.isenabled()


def test_a_script_that_enables_the_collector_again_has_it_automatic(
    collections: list[int],
) -> None:
    knob = GcKnob()
    knob.set("between_steps")

    gc.enable()

    assert (knob.get(), knob.options()) == ("automatic", ("automatic", "between_steps"))
    assert knob.memory_bytes("between_steps") == 0
    knob.close()
