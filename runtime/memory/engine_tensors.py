"""Where a DeepSpeed engine keeps its tensors, and what each of them is.

A place is a path of attributes from one of three roots: the module's `parameters`, its `buffers`,
and the engine's `optimizer`. It goes through every element of a list, tuple or dict on the way; a
number takes one element of a list. Only what stands in an object's own dictionary is looked at, so
that no property runs and nothing is made that was not there: a name that is missing, as most are
under any one ZeRO stage, is passed over.

The order of the table decides what a storage is that has several names; the first one counts.
Buffers come first: whatever lies in them for the moment, they are there for the next as well.
Parameters come before the optimizer: under stage 0 in fp32, and with fp32 weights under stage 3,
the optimizer updates the very tensors that the model computes with.

Not in the table: tensors of ZenFlow, SuperOffload and DeepCompile, the pipeline's activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .categories import COMM_BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS

_IN_FLIGHT = (
    "optimizer.parameter_offload.param_coordinator"
    "._PartitionedParameterCoordinator__inflight_param_registry.data"
)

PLACES: tuple[tuple[str, str], ...] = (
    ("optimizer.ipg_buckets.buffer", COMM_BUFFERS),  # stages 1, 2 and 3
    ("optimizer.temp_grad_buffer_for_cpu_offload", COMM_BUFFERS),
    ("optimizer.temp_grad_buffer_for_gpu_offload", COMM_BUFFERS),
    ("optimizer.param_buffer_of_bit16_for_cpu_offload_groups", COMM_BUFFERS),
    ("optimizer._muon_allgather_buffers", COMM_BUFFERS),
    (f"{_IN_FLIGHT}.partitions", COMM_BUFFERS),  # of parameters that are being gathered
    (f"{_IN_FLIGHT}._AllGatherHandle__param_buffer", COMM_BUFFERS),
    ("optimizer.optimizer_swapper.swap_buffer_manager.all_buffers", COMM_BUFFERS),  # NVMe
    ("parameters.0.nvme_swapper.buffers", COMM_BUFFERS),
    ("parameters.0.nvme_swapper.partitioned_swap_buffer", COMM_BUFFERS),
    ("parameters.0.nvme_swapper.invalid_buffer", COMM_BUFFERS),  # in place of what is swapped out
    ("parameters", PARAMETERS),
    ("buffers", PARAMETERS),
    ("parameters.ds_tensor", PARAMETERS),  # stage 3: this rank's partition
    ("parameters.ds_tensor.ds_quant_scale", PARAMETERS),
    ("parameters.ds_secondary_tensor", PARAMETERS),  # hpZ: this rank's part within the node
    ("parameters.ds_secondary_tensor.ds_quant_scale", PARAMETERS),
    ("optimizer.bit16_groups_flat", PARAMETERS),  # stages 1 and 2
    ("optimizer.bf16_groups_flat", PARAMETERS),  # BF16_Optimizer
    ("optimizer.fp16_groups_flat", PARAMETERS),  # FP16_Optimizer
    ("optimizer.lp_param_buffer", PARAMETERS),  # stage 3
    ("optimizer.param_groups_fp16_flat_cpu_memory", PARAMETERS),
    ("optimizer.lp_param_contiguous_pin_buffer", PARAMETERS),  # engine.offload_states
    ("parameters.grad", GRADIENTS),
    ("parameters.grad_accum", GRADIENTS),  # stage 1 where it accumulates in another dtype
    ("optimizer.averaged_gradients", GRADIENTS),  # stages 1, 2 and 3
    ("optimizer.all_grad_tensors", GRADIENTS),
    ("optimizer.grads_in_partition", GRADIENTS),
    ("optimizer.accumulated_grads_in_cpu", GRADIENTS),
    ("optimizer.norm_for_param_grads", GRADIENTS),
    ("optimizer.single_partition_of_fp32_groups.grad", GRADIENTS),
    ("optimizer.fp32_partitioned_groups_flat.grad", GRADIENTS),  # stage 3
    ("optimizer.grad_partitions_flat_buffer", GRADIENTS),
    ("optimizer.lp_grad_partitions_flat_pin_buffers", GRADIENTS),
    # Ends too short for NVMe, each of which keeps its whole fp32 gradient alive.
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
    ("optimizer.state", OPTIMIZER),  # stage 0 has torch's optimizer itself
    ("optimizer._dummy_overflow_buf", OPTIMIZER),
)
_STEPS = tuple((place, place.split("."), category) for place, category in PLACES)
_CONTAINERS = (list, dict, tuple, deque)
_NO_DICTIONARY: Mapping[str, Any] = {}


def engine_tensors(engine: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Tell place, category and what stands there, tensors among it, in the table's order."""
    parameters, buffers = _of_module(engine.module)
    roots = {"parameters": parameters, "buffers": buffers, "optimizer": [engine.optimizer]}
    for place, (root, *names), category in _STEPS:
        found = roots[root]
        for name in names:
            found = _next(found, name)
            if not found:
                break
        else:
            yield place, category, found


def _next(owners: list[Any], name: str) -> list[Any]:
    """Go one name further from each of the owners."""
    if name.isdigit():
        return owners[int(name) : int(name) + 1]
    if name == "grad":  # of tensors, in C and not in their dictionary
        values = [owner.grad for owner in owners if isinstance(owner, torch.Tensor)]
    else:
        values = [getattr(owner, "__dict__", _NO_DICTIONARY).get(name) for owner in owners]
    return _flat(values)


def _of_module(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return parameters and buffers; one that is shared may come more than once.

    By hand, as `Module.parameters` costs three times as much.
    """
    parameters: list[Any] = []
    buffers: list[Any] = []
    pending, seen = [module], {id(module)}
    while pending:
        own = pending.pop().__dict__
        # `values` and never an item: stage 3 gathers a parameter when its item is taken.
        parameters.extend(own["_parameters"].values())
        buffers.extend(own["_buffers"].values())
        for child in own["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return _flat(parameters), _flat(buffers)


def _flat(values: list[Any]) -> list[Any]:
    """Take containers apart, and leave None out."""
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
