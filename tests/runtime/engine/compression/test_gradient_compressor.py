"""Tests of the engines to which compression can be attached, and of its windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.runtime.common.deepspeed_internals import BF16, ENGINE, ZERO_1_AND_2, ZERO_3
from zerowatch.runtime.engine.compression import gradient_compressor
from zerowatch.runtime.engine.compression.gradient_compressor import (
    GradientCompressor,
    reducer_class,
    unsupported_reason,
)


class Optimizer(SimpleNamespace):
    """An optimizer with the attributes that a test gives it."""


def engine_of(stage: int = 0, module: nn.Module | None = None, **changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "optimizer": Optimizer(),
        "zero_optimization_stage": lambda: stage,
        "module": module or nn.Linear(3, 2),
        "has_moe_layers": False,
        "sequence_parallel_size": 1,
        "seq_data_parallel_group": "dp",
        "gradient_average": True,
        "gradient_predivide_factor": lambda: 1.0,
        "is_deepcompile_active": lambda: False,
        "_reduce_non_expert_gradients": lambda *_: None,
        "allreduce_bucket": lambda *_: None,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture(autouse=True)
def has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stand-ins have all names of DeepSpeed's own classes."""
    monkeypatch.setattr(gradient_compressor, "missing_names", lambda owner, path, names: [])


@pytest.mark.parametrize(
    ("engine", "reducer"),
    [
        (engine_of(0), ENGINE),
        (engine_of(1), ZERO_1_AND_2),
        (engine_of(2), ZERO_1_AND_2),
        (engine_of(3), ZERO_3),
        (engine_of(1, optimizer=Optimizer(fp32_groups_gradients_flat=[])), BF16),
    ],
)
def test_the_class_that_reduces_depends_on_the_stage(engine: Any, reducer: str) -> None:
    assert reducer_class(engine) == reducer


class PipelineEngine(SimpleNamespace):
    """An engine of the name of DeepSpeed's pipeline engine."""


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        (engine_of(), None),
        (PipelineEngine(**vars(engine_of())), "pipeline stages"),
        (engine_of(has_moe_layers=True), "experts"),
        (engine_of(sequence_parallel_size=2), "sequence parallelism"),
        (engine_of(gradient_predivide_factor=lambda: 2.0), "gradient_predivide_factor is set"),
        (engine_of(module=nn.Embedding(3, 2, sparse=True)), "sparse gradients"),
        (engine_of(is_deepcompile_active=lambda: True), "DeepCompile"),
        (engine_of(optimizer=Optimizer(optimizer=type("MuonWithAuxAdam", (), {})())), "Muon"),
        (engine_of(3, optimizer=Optimizer(zenflow=True)), "ZenFlow"),
        (engine_of(3, optimizer=Optimizer(all2all_process_group="all")), "ZeRO\\+\\+"),
    ],
)
def test_engines_that_sum_gradients_otherwise_have_a_reason(engine: Any, part: str | None) -> None:
    reason = unsupported_reason(engine, asynchronous=False)

    assert reason is None if part is None else part.replace("\\", "") in (reason or "")


BUCKETS = {"overlap_comm": False, "contiguous_gradients": True, "reduce_scatter": True}


@pytest.mark.parametrize(
    ("stage", "changes", "part"),
    [
        (1, {}, None),
        (2, {}, None),
        (0, {}, "only ZeRO 1 and 2"),
        (3, {}, "only ZeRO 1 and 2"),
        (2, {"overlap_comm": True}, "overlap_comm"),
        (2, {"contiguous_gradients": False}, "contiguous_gradients"),
        (2, {"reduce_scatter": False}, "reduce_scatter"),
    ],
)
def test_only_buckets_of_stages_1_and_2_are_reduced_asynchronously(
    stage: int, changes: dict[str, bool], part: str | None
) -> None:
    engine = engine_of(stage, optimizer=Optimizer(**(BUCKETS | changes)))

    reason = unsupported_reason(engine, asynchronous=True)

    assert unsupported_reason(engine, asynchronous=False) is None
    assert reason is None if part is None else part in (reason or "")


class Patch:
    """A patch that counts its calls."""

    made: Any = None

    def __init__(self, *given: Any, **options: Any) -> None:
        self.given, self.options = given, options
        self.num_closed = self.num_discarded = 0

    def close(self) -> None:
        self.num_closed += 1

    def discard(self) -> None:
        self.num_discarded += 1


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = SimpleNamespace(get_world_size={"dp": 2}.__getitem__)
    dist.get_world_size = lambda group: {"dp": 2, "alone": 1}[group]
    monkeypatch.setattr(gradient_compressor, "dist", dist)
    for name in ("Stage0Reduction", "Stage1And2Reduction", "Stage3Reduction"):
        monkeypatch.setattr(gradient_compressor, name, type(name, (Patch,), {}))


@pytest.mark.parametrize(
    ("stage", "kind", "name"),
    [
        (0, "int8", "Stage0Reduction"),
        (1, "int8", "Stage1And2Reduction"),
        (2, "plain", "Stage1And2Reduction"),
        (3, "int8", "Stage3Reduction"),
        (0, "plain", "NoneType"),
        (3, "plain", "NoneType"),
    ],
)
@pytest.mark.usefixtures("two_ranks")
def test_an_engine_is_patched_until_the_undo(stage: int, kind: str, name: str) -> None:
    compressor, engine = GradientCompressor(kind), engine_of(stage)

    undo = compressor.attach(engine)
    patch = compressor._patch
    undo()
    undo()

    assert type(patch).__name__ == name
    assert patch is None or (patch.num_closed, compressor._patch) == (1, None)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("two_ranks")
def test_names_of_parameters_are_given_to_the_patch() -> None:
    compressor, engine = GradientCompressor("int8", asynchronous=True), engine_of(1)
    engine.optimizer = Optimizer(**BUCKETS)

    compressor.attach(engine)

    patch: Any = compressor._patch
    weight, bias = engine.module.parameters()
    assert patch.given[0] is engine.optimizer
    assert patch.given[2] == {id(weight): "weight", id(bias): "bias"}
    assert patch.options == {"asynchronous": True}


@pytest.mark.usefixtures("two_ranks")
def test_one_rank_sends_nothing_and_may_attach_again() -> None:
    compressor, engine = GradientCompressor("int8"), engine_of(1, seq_data_parallel_group="alone")

    compressor.attach(engine)()

    assert compressor._patch is None
    compressor.attach(engine)


@pytest.mark.usefixtures("two_ranks")
def test_a_compressor_is_attached_to_one_engine_at_a_time() -> None:
    compressor = GradientCompressor("int8")
    compressor.attach(engine_of(1))

    with pytest.raises(ValueError, match="attached already"):
        compressor.attach(engine_of(1))


def test_an_unsupported_engine_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="cannot be sent as int8: gradients of experts"):
        GradientCompressor("int8").attach(engine_of(has_moe_layers=True))


@pytest.mark.parametrize(
    ("kind", "feedback", "has_feedback"),
    [
        ("int8", None, True),
        ("int8", False, False),
        ("bf16", None, False),
        ("bf16", True, True),
        ("plain", True, False),
    ],
)
def test_8_bits_have_feedback_unless_it_is_chosen(
    kind: str, feedback: bool | None, has_feedback: bool
) -> None:
    compressor = GradientCompressor(kind, feedback=feedback)
    compressor.load_state_dict({"a": torch.tensor([3.0])})

    assert bool(compressor.state_dict()) is has_feedback


@pytest.mark.usefixtures("two_ranks")
def test_a_window_begins_without_what_the_last_one_left() -> None:
    compressor, engine = GradientCompressor("int8"), engine_of(1)
    engine.optimizer = Optimizer(loss_scaler=SimpleNamespace(cur_scale=8.0))
    compressor.attach(engine)
    residuals: Any = compressor._residuals
    residuals.of("a", 1, torch.device("cpu")).fill_(5.0)
    compressor.commit_window()
    residuals.of("a", 1, torch.device("cpu")).fill_(7.0)

    compressor.begin_window(gradient_scale=3.0)

    patch: Any = compressor._patch
    assert patch.num_discarded == 1
    assert compressor._compressor is not None
    assert compressor._compressor.gradient_scale == 3.0 * 8.0
    assert compressor.state_dict()["a"].tolist() == [5.0]
    assert residuals.of("a", 1, torch.device("cpu")).tolist() == [5.0]


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        (Optimizer(), 1.0),
        (Optimizer(cur_scale=16.0), 16.0),
        (Optimizer(loss_scaler=SimpleNamespace(cur_scale=8.0), cur_scale=16.0), 8.0),
    ],
)
@pytest.mark.usefixtures("two_ranks")
def test_the_scale_of_a_window_has_that_of_fp16(optimizer: Optimizer, scale: float) -> None:
    compressor = GradientCompressor("int8")
    compressor.attach(engine_of(0, optimizer=optimizer))

    compressor.begin_window()

    assert compressor._compressor is not None
    assert compressor._compressor.gradient_scale == scale


def test_before_the_first_window_there_is_no_error_ratio() -> None:
    assert GradientCompressor("int8").error_ratio is None
