"""Gives the parameters of a stripped module the memory that an engine wants to find."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init

from ...common.host_group import HostCollectives
from .snapshot import ParamSnapshot


def agree_on_ids(host_group: HostCollectives) -> None:
    """Let all ranks number modules and parameters from the same number on.

    DeepSpeed numbers them through all engines of a process, and refuses to train where ranks
    differ; they do after a rank got further than others with an engine that failed.
    """
    Init.param_id = host_group.all_max(Init.param_id)
    (count,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = host_group.all_max(count[0])


class _SingleRankGroup(torch.nn.Module):
    """Holds one parameter, as the way to partition parameters one at a time."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


def allocate_parameters(
    module: torch.nn.Module,
    parameters: Mapping[str, ParamSnapshot],
    config: Mapping[str, Any],
    *,
    partitioned: bool,
) -> None:
    """Give each parameter zeros of its shape; for stage 3 of one at a time, partitioned at once.

    The whole model is on no rank that way. The values come later: those of a model that DeepSpeed
    partitions itself would be broadcast, and then be overwritten.
    """
    first: Any = None
    for name, parameter in module.named_parameters():
        kept = parameters[name]
        parameter.data = torch.empty_strided(
            kept.shape, kept.stride, dtype=kept.dtype, device=kept.device
        ).zero_()
        if not partitioned:
            continue
        if first is None:
            first = parameter
            Init(
                module=_SingleRankGroup(parameter), config_dict_or_path=copy.deepcopy(dict(config))
            )
        else:
            first.convert_to_zero_parameters([parameter])
