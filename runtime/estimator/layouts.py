"""Model states under every ZeRO stage and offload that a live engine could have."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch.distributed as dist

from ...errors import DsConfigError
from ..memory.oom.would_fit import Layout, LayoutBytes
from .engine_plan import engine_config, engine_shape
from .peak import peak_of
from .shapes import Topology
from .step import plan_step

_STAGES = (0, 1, 2, 3)


# Optimizer and parameters on the device, on the host, or on NVMe, which takes stage 3.
_HOMES = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))


_NVME_HOMES = (("nvme", "none"), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


def planned_layouts(engine: Any) -> Mapping[Layout, LayoutBytes]:
    """Plan model states for every stage and offload that this engine could have."""
    config, shape = engine_config(engine), engine_shape(engine)
    ranks = dist.get_world_size(engine.seq_data_parallel_group)
    topology = Topology(world_size=ranks, backend=str(dist.get_backend()))
    planned: dict[Layout, LayoutBytes] = {}
    homes = [*product(_STAGES, _HOMES), *product((3,), _NVME_HOMES)]
    for stage, (optimizer, parameters) in homes:
        changed = _with_offload(config, optimizer, parameters)
        try:
            memory = plan_step(shape, changed, topology, stage=stage, origin="engine").memory
        except DsConfigError:  # this stage cannot do that
            continue
        peak = peak_of(memory, micro_batches=config["gradient_accumulation_steps"])
        planned[Layout(stage, optimizer, parameters)] = LayoutBytes(
            device_bytes=peak.device_bytes, host_bytes=peak.host_bytes
        )
    return planned


def _with_offload(config: Mapping[str, Any], optimizer: str, parameters: str) -> dict[str, Any]:
    zero = dict(config.get("zero_optimization", {}))
    for key, home in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        zero[key] = {**(zero.get(key) or {}), "device": home}
    return {**config, "zero_optimization": zero}
