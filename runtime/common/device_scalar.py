"""Reads scalars from a device without waiting: starts a copy to the host, and reads it later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from . import accelerator
from .accelerator import Event
from .hot_path import ScalarReader


def _no_value(source: Any) -> float | None:
    """Return None. Replaces the reader in C where that was not built."""


# Returns the value of a dense float tensor with one element in host memory without torch's
# dispatcher, which takes several times as long with cold caches, and None for anything else.
host_value: Callable[[Any], float | None] = (
    _no_value if ScalarReader is None else ScalarReader(torch.Tensor, torch.float32, torch.float64)
)


def _keep_for_ever(
    tensor: torch.Tensor,
    increase: Callable[[Any], None] = ctypes.pythonapi.Py_IncRef,
    as_object: Callable[[Any], Any] = ctypes.py_object,
) -> None:
    """Never free a tensor in pinned memory.

    torch asks the device about such memory when it is freed, and ends the process if the device has
    failed: the script's own error would not be seen.
    """
    increase(as_object(tensor))


class PendingScalar:
    """Copies a scalar from a device to the host. No method waits for the copy."""

    __slots__ = ("_copy", "_done", "_is_capturing", "_is_lost", "_value")

    def __init__(self, source: torch.Tensor) -> None:
        """Start copying a tensor with one element. This allocates no memory on the device."""
        self._value: float | None = None
        self._is_lost = False
        self._done: Event | None = None
        self._copy: torch.Tensor | None = None
        device = accelerator.current
        self._is_capturing = device.is_capturing
        self._copy = torch.empty((), dtype=source.dtype, device="cpu", pin_memory=True)
        try:
            self._copy.copy_(source.detach().reshape(()), non_blocking=True)
            self._done = device.Event()
            self._done.record(device.current_stream())  # torch takes longer to find the stream
        except RuntimeError:
            _keep_for_ever(self._copy)
            raise

    def arrived(self) -> bool:
        """Whether the copy is done, or lost."""
        if self._done is None or self._is_lost:
            return True
        if self._done.query() and self._copy is not None:
            self._value = float(self._copy)
            self._done = self._copy = None
        return self._done is None

    def read(self) -> float | None:
        """Return the value, or None if the copy is not done or lost."""
        return self._value if self.arrived() else None

    def lose(self) -> None:
        """Stop asking the device for the copy. A copy that is not known to be done is lost."""
        self._is_lost = True

    # The function is bound here, because a module has no names any more when the interpreter ends.
    def __del__(self, keep: Callable[[torch.Tensor], None] = _keep_for_ever) -> None:
        """Keep the memory if the device has failed."""
        if self._copy is None or self._done is None:
            return
        try:
            if self._is_capturing():  # no thread may ask for an event then
                keep(self._copy)
            else:
                self._done.query()
        except RuntimeError:
            keep(self._copy)


ScalarOrPending = float | PendingScalar | None


def scalar(source: Any) -> ScalarOrPending:
    """Convert a number, a one-element tensor or None. Start a copy if it is on a device.

    Returns:
        The number or the copy. None if reading the tensor would wait, need a collective or use
        another device than the current one.
    """
    if source is None or type(source) is float:
        return source
    if (value := host_value(source)) is not None:
        return value
    if isinstance(source, torch.Tensor):
        if type(source) is not torch.Tensor and hasattr(source, "to_local"):
            local = _replica(source)
            if local is None:
                return None
            source = local
        if source.device.type != "cpu":
            return _from_device(source)
        source = source.detach()  # torch warns about numbers with a gradient
    return float(source)


def _replica(source: Any) -> torch.Tensor | None:
    """Return this rank's copy of a DTensor; None unless each rank has the value."""
    if not all(placement.is_replicate() for placement in source.placements):
        return None
    with torch.no_grad():
        local: torch.Tensor = source.to_local()
    return local if local.numel() == 1 else None  # it is empty on a rank outside of the mesh


def _from_device(source: torch.Tensor) -> PendingScalar | None:
    """Start a copy if it cannot wait: on the current device, while no graph is captured.

    The event at the end of the copy is recorded on a stream of the current device.
    """
    device, place = accelerator.current, source.device
    if place.type != device.kind or device.is_capturing():
        return None
    return PendingScalar(source) if place.index == device.current_device() else None


def arrived(one: ScalarOrPending) -> bool:
    """Whether a scalar can be read because its copy to the host, if any, is done."""
    return not isinstance(one, PendingScalar) or one.arrived()


def read(one: ScalarOrPending) -> float | None:
    """Return the value, or None if the scalar is None or its copy is not done."""
    return one.read() if isinstance(one, PendingScalar) else one


def lose(one: ScalarOrPending) -> None:
    """Stop asking the device for a scalar, because it is late or the device raises errors."""
    if isinstance(one, PendingScalar):
        one.lose()


def total(numbers: list[ScalarOrPending]) -> float | None:
    """Return the sum of the known values, or None if no value is known."""
    known = _known(numbers)
    return sum(known) if known else None


def mean(numbers: list[ScalarOrPending]) -> float | None:
    """Return the mean of the known values, or None if no value is known."""
    known = _known(numbers)
    return sum(known) / len(known) if known else None


def _known(numbers: list[ScalarOrPending]) -> list[float]:
    return [value for value in map(read, numbers) if value is not None]
