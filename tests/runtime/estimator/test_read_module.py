"""Tests of what is read from a torch module: calls in forward, and what is not modeled."""

from __future__ import annotations

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

from zerowatch.runtime.estimator.read_module import forward_order, read_model_shape

SEVERAL_TIMES = "a module with parameters runs several times, and is counted once"


class Loop(nn.Module):
    """Runs one layer several times, as ALBERT does, and an activation without parameters."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.last = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)
        self.activation = nn.ReLU()

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(1, 3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.activation(self.layer(x))
        return self.activation(self.last(x))


class OwnMoE(MoE):
    """Has the class of DeepSpeed's layer, without its groups of ranks."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class OwnPipeline(PipelineModule):
    """Has the class of DeepSpeed's module, without its groups of ranks."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(2, 3)


def loop(times: int) -> Loop:
    with torch.device("meta"):
        return Loop(times)


def test_each_call_of_forward_is_listed() -> None:
    assert forward_order(loop(2)) == (
        "", "layer", "activation", "layer", "activation", "last", "activation",
    )  # fmt: skip


@pytest.mark.parametrize(("times", "unmodeled"), [(1, ()), (2, (SEVERAL_TIMES,))])
def test_a_module_with_parameters_that_runs_several_times_is_named(
    times: int, unmodeled: tuple[str, ...]
) -> None:
    module = loop(times)

    shape = read_model_shape(module, order=forward_order(module))

    assert (shape.unmodeled, shape.unmodeled_in_stage_3) == ((), unmodeled)
    assert [child.name for child in shape.root.children] == ["layer", "activation", "last"]


def test_buffers_are_read_with_the_bytes_that_they_have_in_the_engine() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    module.register_buffer("angles", torch.zeros(5, dtype=torch.complex64, device="cpu"))
    module.register_buffer("same", module.angles, persistent=False)

    shape = read_model_shape(module)

    measured = sum(each.nbytes for each in module.buffers())
    assert sum(each.bytes_in_training(None) for each in shape.buffers) == measured
    measured = sum(each.nbytes for each in module.bfloat16().buffers())
    assert sum(each.bytes_in_training("bf16") for each in shape.buffers) == measured


def test_lazy_buffers_count_once_they_have_a_size() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d(affine=False))

    before = read_model_shape(module)
    module(torch.ones(2, 2, device="cpu"))

    assert sum(each.numel for each in before.buffers) == 1  # the number of batches
    assert sum(each.numel for each in read_model_shape(module).buffers) == 1 + 2 * 3


def test_mixtures_of_experts_of_deepspeed_are_named() -> None:
    shape = read_model_shape(nn.Sequential(OwnMoE(), nn.Linear(2, 3)))

    assert shape.unmodeled == ("mixtures of experts are not modeled",)


def test_a_pipeline_of_deepspeed_is_recognized() -> None:
    modules = (OwnPipeline(), nn.Linear(2, 3))

    assert [read_model_shape(module).is_pipeline for module in modules] == [True, False]


@pytest.mark.parametrize(
    ("dtype", "name", "width", "width_in_bf16"),
    [
        (torch.float64, "fp64", 8, 2),
        (torch.bfloat16, "bf16", 2, 2),
        (torch.float8_e4m3fn, "fp8", 1, 2),
        (torch.uint8, "uint8", 1, 1),
        (torch.int8, "int8", 1, 1),
        (torch.int32, "int32", 4, 4),
    ],
)
def test_the_engine_casts_parameters_of_floats_and_keeps_integers(
    dtype: torch.dtype, name: str, width: int, width_in_bf16: int
) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(3, dtype=dtype, device="cpu"), requires_grad=False)

    (parameter,) = read_model_shape(module).parameters

    assert parameter.dtype == name
    assert parameter.width_in_training(None) == width
    assert parameter.width_in_training("bf16") == width_in_bf16
    assert module.bfloat16().weight.element_size() == width_in_bf16
