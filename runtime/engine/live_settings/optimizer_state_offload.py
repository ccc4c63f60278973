"""Offloads optimizer states: keeps them in host memory, except during the update.

The states are needed in `step()` only. Between two updates their storages on the device are emptied
and the bytes are kept on the host. With Adam these are 12 bytes per parameter: 8 bytes of moments
and 4 bytes of master weights. The price is two copies per step. The tensors stay the same objects
with the same views, so this works with any optimizer and ZeRO stage. DeepSpeed's own
`engine.offload_states` replaces the tensors, and under ZeRO 3 supports FusedAdam only.

The tensors must not be read while they are offloaded. Undo the setting, or call `reload`, before
anything but training: saving, loading, rebuilding, `safe_get_full_*`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ....errors import ZerowatchError
from ...common.deepspeed_internals import ENGINE, missing_reason, unknown_subclass_reason
from ...common.patching import AttributePatch

# Attributes with master weights: of ZeRO 1 and 2, ZeRO 3, BF16_Optimizer and FP16_Optimizer.
MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
)
_SMALLEST_BYTES = 4096  # step counts and other scalars are not worth a copy


class OptimizerStateOffload:
    """Makes an engine keep its optimizer states on the host between updates."""

    def unsupported_reason(self, engine: Any) -> str | None:
        """Return why offloading is not possible or would free no memory; None if it is useful."""
        if get_accelerator().device_name() == "cpu":
            return "the device's memory is the host's own, so nothing would be freed"
        missing = missing_reason(engine, ENGINE, "basic_optimizer")
        if missing is not None:
            return missing
        if engine.optimizer is None or not hasattr(engine.basic_optimizer, "state"):
            return "the engine has no optimizer with states"
        if getattr(engine, "pipeline_parallelism", False):
            return "a pipeline engine updates within train_batch"
        unknown = unknown_subclass_reason(engine.optimizer)
        if unknown is not None:
            return unknown
        offload = engine.zero_offload_optimizer()
        if offload is not None and str(offload.device) != "none":
            return "the optimizer is on the host or on NVMe already"
        return None

    def attach(self, engine: Any) -> OffloadedOptimizerStates:
        """Offload the states except during each update; the returned object is the undo.

        Raises:
            ZerowatchError: The states cannot be offloaded; the message has `unsupported_reason`.
        """
        reason = self.unsupported_reason(engine)
        if reason is not None:
            raise ZerowatchError(f"optimizer states cannot be offloaded: {reason}")
        return OffloadedOptimizerStates(engine)


class OffloadedOptimizerStates:
    """Undoes the offload: one engine's optimizer states are offloaded until this is called.

    Works on any device; on a CPU it only takes time.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._buffers: dict[int, _HostBuffer] = {}
        self._is_closed = False
        self.offload()  # before the patch, in case it fails
        self._patch = AttributePatch(engine.optimizer, "step", self._reload_for)

    def __call__(self) -> None:
        """Reload the states permanently, and restore the optimizer's `step`. Safe to call twice."""
        self._is_closed = True
        self.reload()
        self._buffers.clear()
        self._patch.restore()

    def reload(self) -> None:
        """Copy the states to the device until the next update has ended. Safe to call twice.

        After an out-of-memory error it can be called again.
        """
        for buffer in self._buffers.values():
            buffer.reload()

    def offload(self) -> None:
        """Move the states to the host, also if only some are on the device. Safe to call twice."""
        engine = self._engine()
        if engine is None or self._is_closed:
            return
        storages = {id(storage): storage for storage in _storages(engine)}
        # Buffers of states that a loaded checkpoint has replaced are dropped.
        self._buffers = {
            key: self._buffers.get(key) or _HostBuffer(storage) for key, storage in storages.items()
        }
        for buffer in self._buffers.values():
            buffer.fill()
        get_accelerator().synchronize()
        for buffer in self._buffers.values():
            buffer.free_storage()

    def _reload_for(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.reload()
            result = original(*args, **kwargs)
            self.offload()
            return result

        return step


class _HostBuffer:
    """Copies a storage to host memory and back."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        is_host = storage.device.type == "cpu"
        self._host = host if is_host else get_accelerator().pin_memory(host)

    def fill(self) -> None:
        if self._storage.nbytes():
            self._host.copy_(_bytes_of(self._storage), non_blocking=True)

    def free_storage(self) -> None:
        self._storage.resize_(0)

    def reload(self) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self._host.numel())
            _bytes_of(self._storage).copy_(self._host, non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(engine: Any) -> list[torch.UntypedStorage]:
    """Return each storage on the device that holds nothing but states and master weights."""
    device = torch.device(get_accelerator().current_device_name())
    used = {id(tensor.untyped_storage()) for tensor in _needed_outside_update(engine)}
    storages = {
        id(tensor.untyped_storage()): tensor.untyped_storage()
        for tensor in _states(engine)
        if tensor.device == device and tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES
    }
    return [storage for key, storage in storages.items() if key not in used]


def _states(engine: Any) -> Iterator[torch.Tensor]:
    for state in engine.basic_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for name in MASTER_WEIGHTS:
        yield from vars(engine.optimizer).get(name, ())


def _needed_outside_update(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of forward and backward. In fp32, stage 0 shares their storages."""
    for parameter in engine.module.parameters():
        held = (parameter, parameter.grad, getattr(parameter, "ds_tensor", None))
        yield from (tensor for tensor in held if tensor is not None)
    yield from engine.module.buffers()
