"""Tests of what a rebuild refuses before anything changes, each with its reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.runtime.engine.rebuild import preconditions
from zerowatch.runtime.engine.rebuild.preconditions import unsupported_reason

ZERO = "zero_optimization"


class Engine(SimpleNamespace):
    """An engine of one of four ranks, between two windows."""


def engine_of(**changes: Any) -> Engine:
    model = nn.Linear(3, 2)
    fields: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "client_optimizer": None,
        "has_moe_layers": False,
        "is_compiled": False,
        "seq_data_parallel_group": "dp",
        "managed_gradient_accumulation": lambda: True,
        "micro_steps": 6,
        "gradient_accumulation_steps": lambda: 3,
        "_unmanaged_backward_count": 0,
    }
    return Engine(**(fields | changes))


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {None: 4, "dp": 4, "half": 2}
    monkeypatch.setattr(
        preconditions, "dist", SimpleNamespace(get_world_size=lambda group=None: sizes[group])
    )
    monkeypatch.setattr(preconditions, "missing_for_rebuild", lambda engine: iter(()))
    monkeypatch.setattr(preconditions, "DeepSpeedConfig", dict)


def stage(number: int, **zero: Any) -> dict[str, Any]:
    return {ZERO: {"stage": number, **zero}}


def test_another_stage_is_allowed() -> None:
    assert unsupported_reason(engine_of(), stage(1), stage(3)) is None


class PipelineEngine(Engine):
    """An engine with layers on several ranks."""

    def train_batch(self) -> None: ...


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        (PipelineEngine(**vars(engine_of())), "pipeline engines"),
        (engine_of(has_moe_layers=True), "mixtures of experts"),
        (engine_of(is_compiled=True), "the engine is compiled"),
        (engine_of(optimizer=None), "the engine has no optimizer"),
        (engine_of(seq_data_parallel_group="half"), "only data parallelism can"),
        (engine_of(micro_steps=7), "a window is under way"),
        (engine_of(micro_steps=9), None),
        (
            engine_of(
                micro_steps=7,
                managed_gradient_accumulation=lambda: False,
                _unmanaged_backward_count=0,
            ),
            None,
        ),
        (
            engine_of(managed_gradient_accumulation=lambda: False, _unmanaged_backward_count=1),
            "a window is under way",
        ),
        (engine_of(optimizer=SimpleNamespace(param_groups=[])), "layout of SimpleNamespace"),
    ],
)
def test_an_engine_that_cannot_be_moved_has_a_reason(engine: Any, part: str | None) -> None:
    reason = unsupported_reason(engine, stage(1), stage(2))

    assert reason is None if part is None else part in (reason or "")


class FP16_UnfusedOptimizer:
    """DeepSpeed's optimizer of stage 0 in 16 bits, with an fp32 copy of each parameter it got."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.fp16_groups = [group["params"] for group in optimizer.param_groups]
        self.fp32_groups = [[each.detach().clone() for each in own] for own in self.fp16_groups]
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def with_bias(
    before: bool, now: bool, *, is_own: bool = False, wraps: bool = False, num_steps: int = 1
) -> Engine:
    """Return an engine whose bias was frozen or trained before, and is now.

    Args:
        before: Whether the bias was trained when the engine was built.
        now: Whether it is now.
        is_own: Whether the optimizer is the caller's, which has frozen parameters too.
        wraps: Whether DeepSpeed wraps the optimizer.
        num_steps: Updates before now.
    """
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(before)
    given = [each for each in model.parameters() if each.requires_grad or is_own]
    optimizer: Any = torch.optim.AdamW(given)
    for _ in range(num_steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    model.bias.requires_grad_(now)
    return engine_of(
        module=model,
        optimizer=FP16_UnfusedOptimizer(optimizer) if wraps else optimizer,
        client_optimizer=optimizer if is_own else None,
    )


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        (with_bias(True, False), "parameter bias was frozen after"),
        (with_bias(True, False, num_steps=0), "parameter bias was frozen after"),
        (with_bias(True, False, wraps=True), "parameter bias was frozen after"),
        (with_bias(True, False, is_own=True), "parameter bias was frozen after"),
        (with_bias(True, False, is_own=True, wraps=True), "parameter bias was frozen after"),
        (with_bias(False, False), None),
        (with_bias(False, False, wraps=True), None),
        (with_bias(False, False, is_own=True), None),
        (with_bias(False, True), "parameter bias was unfrozen after"),
        (with_bias(False, True, wraps=True), "parameter bias was unfrozen after"),
        (with_bias(False, True, is_own=True), None),  # its optimizer updates it from now on
    ],
)
def test_parameters_that_were_frozen_or_unfrozen_while_training_have_a_reason(
    engine: Any, part: str | None
) -> None:
    reason = unsupported_reason(engine, stage(0), stage(2))

    assert reason is None if part is None else part in (reason or "")


def test_a_parameter_that_the_callers_optimizer_leaves_out_is_no_reason() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([model.weight])
    engine = engine_of(module=model, optimizer=optimizer, client_optimizer=optimizer)

    assert unsupported_reason(engine, stage(0), stage(2)) is None


def test_a_name_that_deepspeed_lacks_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "missing_for_rebuild", lambda engine: iter(["A.b", "A.c"]))

    reason = unsupported_reason(engine_of(), stage(1), stage(2))

    assert reason == "this version of DeepSpeed has no A.b, which a rebuild needs"


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"compile": {"deepcompile": True}}, "'compile': DeepCompile"),
        ({"tensor_parallel": {"autotp_size": 2}}, "'tensor_parallel'"),
        (stage(2, zenflow={"a": 1}), "zero_optimization.zenflow"),
        (stage(3, offload_param={"device": "nvme"}), "on NVMe (zero_optimization.offload_param)"),
        (stage(3, offload_optimizer={"device": "nvme"}), "on NVMe"),
        (stage(3, offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload"),
        (stage(0, offload_optimizer={"device": "cpu"}), "needs stage 1 or more, got 0"),
        (stage(2, offload_param={"device": "cpu"}), "needs stage 3 or more, got 2"),
        (stage(2, offload_optimizer={"device": "none"}), None),
    ],
)
def test_a_config_with_states_that_cannot_be_moved_has_a_reason(
    config: dict[str, Any], part: str | None
) -> None:
    old = unsupported_reason(engine_of(), config, stage(1))
    new = unsupported_reason(engine_of(), stage(1), config)

    if part is None:
        assert (old, new) == (None, None)
    else:
        assert (old or "").startswith("the present ds config") and part in (old or "")
        assert (new or "").startswith("the new ds config") and part in (new or "")


FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (BF16, {}, "'bf16' differs"),
        ({"optimizer": {"type": "Adam"}}, {"optimizer": {"type": "SGD"}}, "'optimizer' differs"),
        ({"scheduler": {}}, {}, None),  # an empty block is none
        ({}, {"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
        (stage(3), stage(3, zero_hpz_partition_size=2), None),
        (stage(3), stage(3, zero_hpz_partition_size=3), "must divide the 4 ranks, got 3"),
        (stage(3), stage(2, zero_hpz_partition_size=2), "needs stage 3"),
        (stage(3), stage(2, zero_hpz_partition_size=1), None),
        (FP16 | stage(0), FP16 | stage(1), "in fp16"),
        (FP16 | stage(2), FP16 | stage(0), "in fp16"),
        (FP16 | stage(1), FP16 | stage(3), None),
        (BF16 | stage(0), BF16 | stage(1), None),
        (BF16 | IN_FP32 | stage(1), BF16 | IN_FP32 | stage(0), "grad_accum_dtype"),
        (BF16 | IN_FP32 | stage(1), BF16 | IN_FP32 | stage(2), None),
        (IN_FP32 | stage(1), IN_FP32 | stage(0), None),
    ],
)
def test_a_change_of_the_training_itself_has_a_reason(
    old: dict[str, Any], new: dict[str, Any], part: str | None
) -> None:
    reason = unsupported_reason(engine_of(), old, new)

    assert reason is None if part is None else part in (reason or "")


@pytest.mark.parametrize(
    ("number", "overlaps", "supported"), [(1, True, False), (2, True, True), (1, False, True)]
)
def test_a_caller_that_ends_windows_overlaps_from_stage_2_on(
    number: int, overlaps: bool, supported: bool
) -> None:
    managed = {"managed_gradient_accumulation": False}
    new = managed | stage(number, overlap_comm=overlaps)

    reason = unsupported_reason(engine_of(), managed | stage(3), new)

    assert (reason is None) is supported


def test_an_optimizer_whose_state_depends_on_the_stage_is_refused() -> None:
    muon = type("MuonWithAuxAdam", (torch.optim.SGD,), {})
    model = nn.Linear(3, 2)

    reason = unsupported_reason(
        engine_of(module=model, optimizer=muon(model.parameters())), stage(1), stage(2)
    )

    assert reason == "Muon's momentum is laid out by stage and cannot be moved"


def test_what_deepspeed_itself_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def refuse(config: Any) -> None:
        given.append(config)
        raise AssertionError

    monkeypatch.setattr(preconditions, "DeepSpeedConfig", refuse)
    new = stage(2)

    reason = unsupported_reason(engine_of(), stage(1), new)

    assert reason == "DeepSpeed refuses it: AssertionError"
    assert given == [new]
    assert given[0][ZERO] is not new[ZERO]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("is_allowed", [None, False, True])
def test_zero_takes_an_untested_optimizer_only_if_the_ds_config_allows_it(
    number: int, is_allowed: bool | None
) -> None:
    model = nn.Linear(3, 2)
    engine = engine_of(module=model, optimizer=torch.optim.SGD(model.parameters()))
    allowed = {} if is_allowed is None else {"zero_allow_untested_optimizer": is_allowed}

    reason = unsupported_reason(engine, allowed | stage(0), allowed | stage(number))

    if number and not is_allowed:
        assert reason is not None and "SGD" in reason and "zero_allow_untested_optimizer" in reason
    else:
        assert reason is None


UNTESTED = {"zero_allow_untested_optimizer": True}


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """An optimizer of the name of DeepSpeed's Adam on the host."""


@pytest.mark.parametrize(
    ("kind", "is_client", "changes", "offload", "part"),
    [
        (torch.optim.AdamW, False, {}, {}, None),
        (torch.optim.SGD, False, {}, {}, "DeepSpeed offloads SGD with a class of its own"),
        (torch.optim.AdamW, True, {}, {}, "DeepSpeed refuses to offload AdamW"),
        (torch.optim.SGD, True, {"zero_force_ds_cpu_optimizer": False}, {}, None),
        (DeepSpeedCPUAdam, True, {}, {}, None),
        (DeepSpeedCPUAdam, True, {}, {"ratio": 0.5}, None),
        (
            torch.optim.AdamW,
            True,
            {"zero_force_ds_cpu_optimizer": False},
            {"ratio": 0.5},
            "ratio needs DeepSpeedCPUAdam, got AdamW",
        ),
        (torch.optim.SGD, False, {}, {"device": "none"}, None),
    ],
)
def test_only_some_optimizers_move_to_the_host(
    kind: Any, is_client: bool, changes: dict[str, Any], offload: dict[str, Any], part: str | None
) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    engine = engine_of(
        module=model, optimizer=optimizer, client_optimizer=optimizer if is_client else None
    )
    new = UNTESTED | changes | stage(2, offload_optimizer={"device": "cpu"} | offload)

    reason = unsupported_reason(engine, UNTESTED | changes | stage(1), new)

    assert reason is None if part is None else part in (reason or "")
