"""Reads scalars from a device without waiting: starts a copy to the host, and reads it later."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import accelerator
from .accelerator import Event
from .hot_path import ScalarReader

# Reads a dense float tensor in host memory without torch's dispatcher, which takes several times as
# long with cold caches. It returns None for any other tensor.
_read_host = (
    None if ScalarReader is None else ScalarReader(torch.Tensor, torch.float32, torch.float64)
)


class PendingScalar:
    """Copies a scalar from a device to the host. No method waits for the copy."""

    __slots__ = ("_copy", "_done", "_is_lost", "_value")

    def __init__(self, source: torch.Tensor) -> None:
        """Start copying a tensor with one element. This allocates no memory on the device."""
        self._value: float | None = None
        self._is_lost = False
        self._done: Event | None = None
        self._copy: torch.Tensor | None = torch.empty((), dtype=source.dtype, pin_memory=True)
        self._copy.copy_(source.detach().reshape(()), non_blocking=True)
        self._done = accelerator.current.Event()
        self._done.record()

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

    def __del__(self) -> None:
        """Keep the memory for ever if the device has failed.

        torch asks the device about pinned memory that it frees, and ends the process if that fails:
        the script's own error would not be seen.
        """
        if self._copy is None or self._done is None:
            return
        try:
            self._done.query()
        except RuntimeError:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._copy))


ScalarOrPending = float | PendingScalar | None


def scalar(source: Any) -> ScalarOrPending:
    """Convert a number, a one-element tensor or None. Start a copy if it is on a device."""
    if source is None or type(source) is float:
        return source
    if isinstance(source, torch.Tensor):
        if _read_host is not None and (value := _read_host(source)) is not None:
            known: float = value
            return known
        if source.device.type != "cpu":
            return _from_device(source)
        source = source.detach()  # torch warns about numbers with a gradient
    return float(source)


def _from_device(source: torch.Tensor) -> PendingScalar | None:
    """Start a copy if it cannot wait: on the accelerator, while no graph is captured."""
    device = accelerator.current
    if source.device.type != device.kind or device.is_capturing():
        return None
    return PendingScalar(source)


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
