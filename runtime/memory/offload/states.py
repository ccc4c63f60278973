"""How many bytes `engine.offload_states` and `reload_states` move, by kind of state."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from .transfer_sizes import Moves, counts_as_device


def states_offloaded(
    optimizer: Any, include: Container[str] | None = None, *_: Any, **__: Any
) -> Moves:
    """Tell what `offload_states` will move; its arguments are DeepSpeed's."""
    names = [
        name
        for name in _readers(optimizer)
        if name not in optimizer.offloaded_states and (include is None or name in include)
    ]
    on_device = filter(counts_as_device, _tensors(optimizer, names))
    return Moves(to_host=sum(tensor.nbytes for tensor in on_device))


def states_reloaded(optimizer: Any, *_: Any, **__: Any) -> Moves:
    """Tell what `reload_states` will move back."""
    names = [name for name in _readers(optimizer) if name in optimizer.offloaded_states]
    return Moves(to_device=sum(tensor.nbytes for tensor in _tensors(optimizer, names)))


def _tensors(optimizer: Any, names: Iterable[str]) -> Iterable[torch.Tensor]:
    readers = _readers(optimizer)
    tensors = chain.from_iterable(readers[name](optimizer) for name in names)
    return (tensor for tensor in tensors if tensor is not None)


def _readers(optimizer: Any) -> Mapping[str, Callable[[Any], Iterable[torch.Tensor]]]:
    return _STAGE_2 if hasattr(optimizer, "single_partition_of_fp32_groups") else _STAGE_3


def _gradients(optimizer: Any) -> Iterable[torch.Tensor]:
    groups = (group for group in optimizer.averaged_gradients.values() if group is not None)
    for group in groups:
        flat = getattr(group, "flat_partition", None)
        yield from group if flat is None else (flat,)


def _all_states(optimizer: Any) -> Iterable[torch.Tensor]:
    states = optimizer.optimizer.state.values()
    return (value for state in states for value in state.values() if torch.is_tensor(value))


def _adam_states(optimizer: Any) -> Iterable[torch.Tensor]:
    states = optimizer.optimizer.state.values()
    return (state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state)


_STAGE_2: Mapping[str, Callable[[Any], Iterable[torch.Tensor]]] = {
    "hp_params": lambda optimizer: optimizer.single_partition_of_fp32_groups,
    "lp_params": lambda optimizer: optimizer.bit16_groups_flat,
    "lp_grads": _gradients,
    "optim_states": _all_states,
}
# The bucket's buffer is dropped and made anew: nothing of it moves.
_STAGE_3: Mapping[str, Callable[[Any], Iterable[torch.Tensor]]] = {
    "hp_params": lambda optimizer: optimizer.fp32_partitioned_groups_flat,
    "lp_params": lambda optimizer: (optimizer.lp_param_buffer,),
    "lp_grads": lambda optimizer: (optimizer.grad_partitions_flat_buffer,),
    "optim_states": _adam_states,
}
