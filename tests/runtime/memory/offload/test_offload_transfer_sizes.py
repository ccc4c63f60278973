"""Bytes of offload transfers that a CPU does not show, computed from fake optimizers."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.runtime.memory.offload.transfer_sizes import (
    NO_TRANSFER,
    TransferBytes,
    stage_2_accumulated,
    stage_3_fetched,
    stage_3_updated,
)


class Status(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


def part(numel: int, dtype: torch.dtype = torch.bfloat16, where: str | None = None) -> Any:
    tensor = torch.zeros(numel, dtype=dtype)
    tensor.ds_numel, tensor.final_location = numel, where
    return tensor


def parameter(tensor: Any, status: Status = Status.NOT_AVAILABLE, **others: Any) -> Any:
    return SimpleNamespace(ds_status=status, ds_tensor=tensor, ds_secondary_tensor=None, **others)


def test_a_partition_is_fetched_from_the_host_unless_available_or_on_the_device():
    on_device = torch.zeros(100, device="meta")
    on_device.final_location = None
    params = [parameter(part(100)), parameter(part(7), Status.AVAILABLE), parameter(on_device)]

    assert stage_3_fetched(params) == TransferBytes(to_device=200)


def test_a_quantized_partition_includes_its_scales():
    quantized = part(100, torch.int8)
    quantized.ds_quant_scale = torch.zeros(5)

    assert stage_3_fetched([parameter(quantized)]).to_device == 100 + 20


def test_the_secondary_partition_is_fetched_if_there_is_one():
    param = parameter(part(100))
    param.ds_secondary_tensor = part(400)

    assert stage_3_fetched([param]).to_device == 800


@pytest.mark.parametrize(("use_gds", "expected"), [(False, 200), (True, 0)])
def test_a_partition_on_nvme_passes_through_the_host_unless_gds_is_used(use_gds, expected):
    placeholder = part(1, torch.float16, "nvme")
    placeholder.ds_numel = 100
    swapper = SimpleNamespace(use_gds=use_gds, swap_element_size=2)

    assert stage_3_fetched([parameter(placeholder, nvme_swapper=swapper)]).to_device == expected


def stage_3(master: str, params_on_host: bool, **others: Any) -> Any:
    return SimpleNamespace(
        offload_optimizer=True,
        offload_param=params_on_host,
        subgroup_to_device={0: master},
        fp16_partitioned_groups_flat=[torch.zeros(8, dtype=torch.bfloat16)],
        fp32_partitioned_groups_flat=[torch.zeros(8)],
        **others,
    )


@pytest.mark.parametrize(
    ("master", "params_on_host", "expected"),
    [
        ("cpu", False, TransferBytes(to_device=16)),
        ("cpu", True, NO_TRANSFER),
        ("cuda", False, NO_TRANSFER),
        ("cuda", True, TransferBytes(to_host=32)),
    ],
)
def test_updated_parameters_are_copied_if_master_weights_are_elsewhere(
    master: str, params_on_host: bool, expected: TransferBytes
):
    assert stage_3_updated(stage_3(master, params_on_host), 0) == expected


def test_updated_parameters_on_nvme_are_not_copied():
    optimizer = stage_3("cpu", True)
    optimizer.fp16_partitioned_groups_flat = [None]

    assert stage_3_updated(optimizer, 0) == NO_TRANSFER


def test_with_16_bit_master_weights_only_this_rank_s_gradient_partition_is_moved():
    param = torch.zeros(100, dtype=torch.bfloat16)
    optimizer = SimpleNamespace(
        low_precision_master_weights_and_grads=True,
        master_weights_and_grads_dtype=torch.bfloat16,
        grad_position={0: [0, 10, 0, 30]},
        get_param_id=lambda param: 0,
        micro_step_id=1,
    )

    assert stage_2_accumulated(optimizer, param) == TransferBytes(to_host=60, to_device=60)
