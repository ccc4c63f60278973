"""Tests of the abort of a window: supported engines, and DeepSpeed internals."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from class_source import source_of

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.deepspeed_internals import INTERNALS
from zerowatch.runtime.trainer.oom_recovery.abort_window import (
    _drop_offloaded,
    abort_unsupported_reason,
    abort_window,
)

NAMES = [
    (place, name) for place, names in INTERNALS["trainer/oom_recovery"].items() for name in names
]


def resolve(place: str) -> Any:
    module, _, attribute = place.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(("place", "name"), NAMES)
def test_deepspeed_still_has_the_internals_that_aborting_a_window_needs(
    place: str, name: str
) -> None:
    owner = resolve(place)
    sources = [source_of(kind) for kind in owner.__mro__[:-1]]

    set_on_self = any(f"self.{name}" in source or f"{name}:" in source for source in sources)
    assert hasattr(owner, name) or set_on_self, f"{place} has no {name}"


class Engine:
    """Fake engine with the attributes that `abort_unsupported_reason` reads."""

    __module__, __qualname__ = "deepspeed.runtime.engine", "DeepSpeedEngine"

    def __init__(self, optimizer: Any = None, **differs: Any) -> None:
        self.optimizer = optimizer or SimpleNamespace()
        self.basic_optimizer = differs.pop("basic_optimizer", None)
        self.has_moe_layers = self.zenflow = self._running_engine_step = False
        self._unmanaged_backward_count = 0
        self._manual_backward_expected = False
        self.timers = self.tput_timer = None
        self.is_managed = False
        vars(self).update(differs)

    def managed_gradient_accumulation(self) -> bool:
        return self.is_managed


class HybridEngine(Engine):
    """Fake hybrid engine."""

    __module__, __qualname__ = "deepspeed.runtime.hybrid_engine", "DeepSpeedHybridEngine"


def named(name: str) -> Any:
    return type(name, (), {"__module__": "deepspeed.runtime.somewhere"})()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (SimpleNamespace(), "only DeepSpeedEngine is supported"),
        (HybridEngine(), "the hybrid engine replaces layers for generation"),
        (Engine(is_managed=True), "set managed_gradient_accumulation to false"),
        (Engine(has_moe_layers=True), "mixture-of-experts"),
        (Engine(zenflow=True), "ZenFlow"),
        (Engine(basic_optimizer=named("MuonWithAuxAdam")), "Muon"),
        (Engine(named("SuperOffloadOptimizer_Stage3")), "SuperOffloadOptimizer_Stage3 is not"),
    ],
)
def test_an_unsupported_engine_raises_with_the_reason(engine: Any, reason: str) -> None:
    assert reason in (abort_unsupported_reason(engine) or "")

    with pytest.raises(ZerowatchError, match="cannot be aborted"):
        abort_window(engine)


def test_an_engine_without_a_private_name_is_unsupported() -> None:
    engine = Engine()
    del engine._manual_backward_expected

    assert "has no _manual_backward_expected" in (abort_unsupported_reason(engine) or "")


def test_a_torch_optimizer_is_supported() -> None:
    assert (
        abort_unsupported_reason(Engine(torch.optim.SGD([torch.zeros(2, requires_grad=True)])))
        is None
    )


def test_gradients_on_the_host_of_parameters_that_the_window_has_not_used_stay() -> None:
    partition = SimpleNamespace(grad=torch.ones(5))
    optimizer = SimpleNamespace(
        reset_cpu_buffers=lambda: None,
        accumulated_grads_in_cpu={7: torch.ones(2), 8: torch.ones(3)},
        grad_position={7: [0, 0, 0, 2], 8: [0, 0, 2, 3]},
        single_partition_of_fp32_groups=[partition],
        _offload_accumulated_param_ids={8},
    )

    _drop_offloaded(optimizer)

    assert partition.grad.tolist() == [1, 1, 0, 0, 0]
    assert optimizer.accumulated_grads_in_cpu[7].tolist() == [1, 1]
    assert optimizer.accumulated_grads_in_cpu[8].tolist() == [0, 0, 0]
    assert optimizer._offload_accumulated_param_ids == set()
