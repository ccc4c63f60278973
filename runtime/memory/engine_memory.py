"""Sums the tensors that a DeepSpeed engine holds, in bytes by device and category.

This code runs on the training thread between two phases. It does not compute, copy, gather
parameters or wait, and keeps no tensor. A storage counts once and in full, even if several tensors
view it. An exception is a buffer on CPU: only the pages that were ever written count
(`devices/libc_memory.py`).

A path in the table of tensors consists of attributes, from one of three roots: the module's
`parameters`, its `buffers`, and the engine's `optimizer`. If an attribute is a list, tuple or dict,
the path continues from each element. A number selects one element of a list. Only the `__dict__` of
an object is read, so no property runs and nothing is created. Missing names are skipped. Under any
one ZeRO stage most names are missing.

The order of the table decides the category of a storage that has several names; the first match
counts. Buffers come first, because they stay for the next step with any content.
Parameters come before the optimizer: under stage 0 in fp32, and with fp32 weights under stage 3,
the optimizer updates the same tensors that the model computes with.

The table contains neither the tensors of ZenFlow, SuperOffload and DeepCompile nor the activations
of a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..devices.libc_memory import resident_bytes
from .categories import (
    COMM_BUFFERS,
    ENGINE_CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    EngineBytes,
)

_IN_FLIGHT = (
    "optimizer.parameter_offload.param_coordinator"
    "._PartitionedParameterCoordinator__inflight_param_registry.data"
)

TENSOR_PATHS: tuple[tuple[str, str], ...] = (
    ("optimizer.ipg_buckets.buffer", COMM_BUFFERS),  # stages 1, 2 and 3
    ("optimizer.temp_grad_buffer_for_cpu_offload", COMM_BUFFERS),
    ("optimizer.temp_grad_buffer_for_gpu_offload", COMM_BUFFERS),
    ("optimizer.param_buffer_of_bit16_for_cpu_offload_groups", COMM_BUFFERS),
    ("optimizer._muon_allgather_buffers", COMM_BUFFERS),
    (f"{_IN_FLIGHT}.partitions", COMM_BUFFERS),  # parameters being gathered
    (f"{_IN_FLIGHT}._AllGatherHandle__param_buffer", COMM_BUFFERS),
    ("optimizer.optimizer_swapper.swap_buffer_manager.all_buffers", COMM_BUFFERS),  # NVMe
    ("parameters.0.nvme_swapper.buffers", COMM_BUFFERS),
    ("parameters.0.nvme_swapper.partitioned_swap_buffer", COMM_BUFFERS),
    (
        "parameters.0.nvme_swapper.invalid_buffer",
        COMM_BUFFERS,
    ),  # placeholder for swapped-out parameters
    ("parameters", PARAMETERS),
    ("buffers", PARAMETERS),
    ("parameters.ds_tensor", PARAMETERS),  # stage 3: this rank's partition
    ("parameters.ds_tensor.ds_quant_scale", PARAMETERS),
    ("parameters.ds_secondary_tensor", PARAMETERS),  # hpZ: this rank's partition within the node
    ("parameters.ds_secondary_tensor.ds_quant_scale", PARAMETERS),
    ("optimizer.bit16_groups_flat", PARAMETERS),  # stages 1 and 2
    ("optimizer.bf16_groups_flat", PARAMETERS),  # BF16_Optimizer
    ("optimizer.fp16_groups_flat", PARAMETERS),  # FP16_Optimizer
    ("optimizer.lp_param_buffer", PARAMETERS),  # stage 3
    ("optimizer.param_groups_fp16_flat_cpu_memory", PARAMETERS),
    ("optimizer.lp_param_contiguous_pin_buffer", PARAMETERS),  # engine.offload_states
    ("parameters.grad", GRADIENTS),
    ("parameters.grad_accum", GRADIENTS),  # stage 1 with another accumulation dtype
    ("optimizer.averaged_gradients", GRADIENTS),  # stages 1, 2 and 3
    ("optimizer.all_grad_tensors", GRADIENTS),
    ("optimizer.grads_in_partition", GRADIENTS),
    ("optimizer.accumulated_grads_in_cpu", GRADIENTS),
    ("optimizer.norm_for_param_grads", GRADIENTS),
    ("optimizer.single_partition_of_fp32_groups.grad", GRADIENTS),
    ("optimizer.fp32_partitioned_groups_flat.grad", GRADIENTS),  # stage 3
    ("optimizer.grad_partitions_flat_buffer", GRADIENTS),
    ("optimizer.lp_grad_partitions_flat_pin_buffers", GRADIENTS),
    # Remainders that are too short for NVMe. Each keeps its whole fp32 gradient alive.
    ("optimizer.optimizer_swapper.swap_params_info.unswapped_gradients", GRADIENTS),
    ("optimizer.inf_or_nan_tracker", GRADIENTS),
    ("optimizer._global_grad_norm", GRADIENTS),
    ("optimizer.fp32_groups_gradients_flat", GRADIENTS),  # BF16_Optimizer
    ("optimizer.fp32_groups_flat_partition.grad", GRADIENTS),
    ("optimizer.fp32_groups_flat.grad", GRADIENTS),  # FP16_Optimizer
    ("optimizer.fp32_groups.grad", GRADIENTS),  # FP16_UnfusedOptimizer
    ("optimizer.single_partition_of_fp32_groups", OPTIMIZER),  # stages 1 and 2
    ("optimizer.fp32_partitioned_groups_flat", OPTIMIZER),  # stage 3
    ("optimizer.fp32_groups_flat_partition", OPTIMIZER),  # BF16_Optimizer
    ("optimizer.fp32_groups_flat", OPTIMIZER),  # FP16_Optimizer
    ("optimizer.fp32_groups", OPTIMIZER),  # FP16_UnfusedOptimizer
    ("optimizer.muon_momentum_buffer_partitioned_groups_flat", OPTIMIZER),
    ("optimizer._muon_pending_momentum", OPTIMIZER),
    ("optimizer.optimizer.state", OPTIMIZER),
    ("optimizer.optimizer._dummy_overflow_buf", OPTIMIZER),  # FusedAdam
    ("optimizer.backup_optimizer.state", OPTIMIZER),  # stage 3, partly offloaded
    ("optimizer.state", OPTIMIZER),  # stage 0: torch's optimizer itself
    ("optimizer._dummy_overflow_buf", OPTIMIZER),
)
_SPLIT_PATHS = tuple((path, path.split("."), category) for path, category in TENSOR_PATHS)
_CONTAINERS = (list, dict, tuple, deque)
_EMPTY: Mapping[str, Any] = {}
_CPU = torch.device("cpu")


def bytes_by_category(engine: Any) -> EngineBytes:
    """Return the bytes that an engine holds, by device ("cpu", "cuda:0") and category.

    Args:
        engine: A DeepSpeed engine of any ZeRO stage, with or without an optimizer.
    """
    seen: set[int] = set()
    held: dict[str, dict[str, int]] = {}
    for _, category, objects in engine_tensors(engine):
        for device, size in _new_bytes(objects, seen, as_buffers=category == COMM_BUFFERS).items():
            by_category = held.setdefault(str(device), dict.fromkeys(ENGINE_CATEGORIES, 0))
            by_category[category] += size
    return held


def engine_tensors(engine: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield each path of the table, its category and the objects found at the path."""
    parameters, buffers = _parameters_and_buffers(engine.module)
    roots = {"parameters": parameters, "buffers": buffers, "optimizer": [engine.optimizer]}
    for path, (root, *names), category in _SPLIT_PATHS:
        objects = roots[root]
        for name in names:
            objects = _attributes(objects, name)
            if not objects:
                break
        else:
            yield path, category, objects


def _new_bytes(objects: list[Any], seen: set[int], *, as_buffers: bool) -> dict[torch.device, int]:
    """Sum up the storages whose addresses are not in `seen`, and add the addresses to `seen`."""
    sums: dict[torch.device, int] = {}
    for tensor in objects:
        if not isinstance(tensor, torch.Tensor):  # such as a step count
            continue
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: this rank's shard
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            # A sparse gradient has several storages. A tensor without data has no storage.
            parts = _new_bytes(_sparse_parts(tensor), seen, as_buffers=as_buffers)
            for device, size in parts.items():
                sums[device] = sums.get(device, 0) + size
            continue
        if address == 0 or address in seen:  # 0: partitioned, or on the meta device
            continue
        seen.add(address)
        device, size = tensor.device, storage.nbytes()
        if as_buffers and device == _CPU:
            size = resident_bytes(address, size)
        sums[device] = sums.get(device, 0) + size
    return sums


def _sparse_parts(tensor: torch.Tensor) -> list[Any]:
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else []


def _attributes(owners: list[Any], name: str) -> list[Any]:
    """Return the values of an attribute of each owner as a flat list."""
    if name.isdigit():
        return owners[int(name) : int(name) + 1]
    if name == "grad":  # a property of tensors in C, not in their __dict__
        values = [owner.grad for owner in owners if isinstance(owner, torch.Tensor)]
    else:
        values = [getattr(owner, "__dict__", _EMPTY).get(name) for owner in owners]
    return _flatten(values)


def _parameters_and_buffers(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return parameters and buffers. Shared parameters may be listed several times.

    This function reads `__dict__` directly, because `Module.parameters` takes three times as long.
    """
    parameters: list[Any] = []
    buffers: list[Any] = []
    pending, seen = [module], {id(module)}
    while pending:
        own = pending.pop().__dict__
        # Use `values` rather than items: stage 3 gathers a parameter when its item is read.
        parameters.extend(own["_parameters"].values())
        buffers.extend(own["_buffers"].values())
        for child in own["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return _flatten(parameters), _flatten(buffers)


def _flatten(values: list[Any]) -> list[Any]:
    """Replace containers by their elements, and remove None."""
    flat: list[Any] = []
    pending = values
    while pending:
        inner: list[Any] = []
        for value in pending:
            if value is None:
                continue
            if isinstance(value, _CONTAINERS):
                inner.extend(value.values() if isinstance(value, dict) else value)
            else:
                flat.append(value)
        pending = inner
    return flat
