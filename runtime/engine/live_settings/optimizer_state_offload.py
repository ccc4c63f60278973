"""The optimizer's states on the host, but for the moment of the update.

They are needed in `step()` only. Between two updates their storages on the device are emptied and
the bytes lie on the host: 8 of the 12 bytes that Adam keeps per parameter, and the 4 of the master
weights, at the price of two copies per step. The tensors stay the very same objects with the same
views, so that nothing has to be linked anew, with any optimizer and under every stage;
`engine.offload_states` makes other tensors, and under ZeRO 3 takes FusedAdam only.

Nobody may read these tensors while they sleep. Undo it, or call `wake`, before anything but
training: saving, loading, rebuilding, `safe_get_full_*`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ....errors import ZerowatchError
from ...common.deepspeed_internals import ENGINE
from ...common.deepspeed_internals_live_settings import missing
from ...common.patching import AttributePatch

# Master weights, by the optimizer that has them: ZeRO 1 and 2, ZeRO 3, BF16_Optimizer, FP16's.
MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
)
_SMALLEST_BYTES = 4096  # step counts and the like are not worth a copy


def unavailable(engine: Any) -> str | None:
    """Say why the optimizer's states cannot sleep, or would free nothing; None where they can."""
    if get_accelerator().device_name() == "cpu":
        return "the device's memory is the host's own, so nothing would be given back"
    return unsupported_reason(engine)


def unsupported_reason(engine: Any) -> str | None:
    """Say why this engine's states cannot be moved, whatever the device."""
    gone = missing(engine, ENGINE, "basic_optimizer")
    if gone is not None:
        return gone
    if engine.optimizer is None or not hasattr(engine.basic_optimizer, "state"):
        return "the engine has no optimizer with states"
    if getattr(engine, "pipeline_parallelism", False):
        return "a pipeline engine updates within train_batch"
    offload = engine.zero_offload_optimizer()
    if offload is not None and str(offload.device) != "none":
        return "the optimizer is on the host or on NVMe already"
    return None


def memory_bytes(engine: Any) -> int | None:
    """Return the bytes of device memory that sleep would give back, negative; None without any."""
    if unavailable(engine) is not None:
        return None
    return -sum(storage.nbytes() for storage in _storages(engine))


def apply(engine: Any) -> OptimizerStateOffload:
    """Let the states sleep but for each update; what is returned is the undo.

    Raises:
        ZerowatchError: They cannot, for the reason that `unavailable` gives.
    """
    reason = unavailable(engine)
    if reason is not None:
        raise ZerowatchError(f"the optimizer cannot sleep: {reason}")
    return OptimizerStateOffload(engine)


class OptimizerStateOffload:
    """Moves the states to and fro until it is called, which wakes them for good.

    Works on any device; on a CPU it only costs time.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._beds: dict[int, _HostBuffer] = {}
        self._is_over = False
        self.lie_down()  # first: where that fails nothing is wrapped
        self._wrap = AttributePatch(engine.optimizer, "step", self._around_update)

    def __call__(self) -> None:
        """Wake them, and restore the optimizer's `step`. Safe to call twice."""
        self._is_over = True
        self.wake()
        self._beds.clear()
        self._wrap.restore()

    def wake(self) -> None:
        """Bring them back until the next update has ended; where they are awake does nothing.

        An out-of-memory error on the way leaves it to be called again.
        """
        for bed in self._beds.values():
            bed.reload()

    def _around_update(self, original: Any) -> Any:
        def step(*given: Any, **named: Any) -> Any:
            self.wake()
            result = original(*given, **named)
            self.lie_down()
            return result

        return step

    def lie_down(self) -> None:
        """Move them to the host, also where only some are awake. Safe to call twice."""
        engine = self._engine()
        if engine is None or self._is_over:
            return
        found = {id(storage): storage for storage in _storages(engine)}
        # States that a loaded checkpoint replaced leave their beds.
        self._beds = {
            key: self._beds.get(key) or _HostBuffer(storage) for key, storage in found.items()
        }
        for bed in self._beds.values():
            bed.fill()
        get_accelerator().synchronize()
        for bed in self._beds.values():
            bed.lie_down()


class _HostBuffer:
    """The place on the host for one storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        host = torch.empty(storage.nbytes(), dtype=torch.uint8)
        is_host = storage.device.type == "cpu"
        self._host = host if is_host else get_accelerator().pin_memory(host)

    def fill(self) -> None:
        if self._storage.nbytes():
            self._host.copy_(_bytes_of(self._storage), non_blocking=True)

    def lie_down(self) -> None:
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
    used = {id(tensor.untyped_storage()) for tensor in _needed(engine)}
    found = {
        id(tensor.untyped_storage()): tensor.untyped_storage()
        for tensor in _states(engine)
        if tensor.device == device and tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES
    }
    return [storage for key, storage in found.items() if key not in used]


def _states(engine: Any) -> Iterator[torch.Tensor]:
    for state in engine.basic_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for name in MASTER_WEIGHTS:
        yield from vars(engine.optimizer).get(name, ())


def _needed(engine: Any) -> Iterator[torch.Tensor]:
    """Yield what forward and backward use, in case it shares a storage: fp32 under stage 0 does."""
    for parameter in engine.module.parameters():
        held = (parameter, parameter.grad, getattr(parameter, "ds_tensor", None))
        yield from (tensor for tensor in held if tensor is not None)
    yield from engine.module.buffers()
