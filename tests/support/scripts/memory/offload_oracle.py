"""An oracle for offload traffic: host and device memory, simulated on the CPU.

Tensors in DeepSpeed's host memory are identified by their storages; a copy between those and any
other counts. `.to(device)` makes a copy, where torch would return the tensor itself because both
are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

Tensors = Callable[[], Iterable[torch.Tensor | None]]


class TwoMemories:
    """Context manager that sums the bytes of copies between host tensors and all others.

    Replaces `Tensor.copy_` and `Tensor.to`, to see backward hooks too, where a torch function mode
    is not active.
    """

    def __init__(self, host_tensors: Tensors) -> None:
        self.moved = {"to_host": 0, "to_device": 0}
        self._host_tensors = host_tensors

    def __enter__(self) -> None:
        inherited_copy, inherited_to = torch.Tensor.copy_, torch.Tensor.to

        def copy_(target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._copy(target, source)
            return inherited_copy(target, source, *args, **kwargs)

        def to(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = inherited_to(source, *args, **kwargs)
            return self._move(result, source) if _names_a_device(args, kwargs) else result

        torch.Tensor.copy_, torch.Tensor.to = copy_, to

    def __exit__(self, *exc_info: object) -> None:
        del torch.Tensor.copy_, torch.Tensor.to  # both are inherited

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Replace the accelerator's `on_accelerator`."""
        held = (t for t in self._host_tensors() if t is not None and t.numel())
        return _place(tensor) not in {_place(t) for t in held}

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():
            return
        target_on_device, source_on_device = self.on_device(target), self.on_device(source)
        if target_on_device != source_on_device:
            self.moved["to_device" if target_on_device else "to_host"] += target.nbytes

    def _move(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not source.numel() or self.on_device(source):
            return moved
        self.moved["to_device"] += moved.nbytes
        return moved.clone()


class SeparateMemories:
    """Makes the accelerator distinguish host tensors from device tensors, as on a GPU."""

    def __init__(self, memories: TwoMemories) -> None:
        self._memories = memories

    def __enter__(self) -> None:
        get_accelerator().on_accelerator = self._memories.on_device

    def __exit__(self, *exc_info: object) -> None:
        del get_accelerator().on_accelerator


def held_on_host(optimizer: Any) -> Iterable[torch.Tensor | None]:
    """Yield what a ZeRO optimizer with offload keeps in the host's memory."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        masters = optimizer.single_partition_of_fp32_groups
        yield from optimizer.accumulated_grads_in_cpu.values()
        yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    else:
        masters = optimizer.fp32_partitioned_groups_flat if optimizer.offload_optimizer else ()
        if optimizer.offload_optimizer:
            yield optimizer.grad_partitions_flat_buffer
        if optimizer.offload_param:
            yield from (p.ds_tensor for p in optimizer.module.parameters())
            yield from optimizer.fp16_partitioned_groups_flat
        if optimizer.optimizer_swapper is not None:
            yield from optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
        swapper = next(optimizer.module.parameters()).nvme_swapper
        if swapper is not None:
            yield from (swapper.buffers, swapper.partitioned_swap_buffer)
    for master in masters:
        yield master
        yield master.grad
        yield from optimizer.optimizer.state.get(master, {}).values()


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _names_a_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return "device" in kwargs or any(isinstance(a, str | torch.device) for a in args)
