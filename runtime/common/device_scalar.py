"""Reads scalars from a device without waiting: starts a copy to the host, and reads it later."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import accelerator
from .accelerator import Event
from .hot_path import ScalarReader

# Numbers for which memory is pinned at once: the copies of a second or two.
_BLOCK_SIZE = 64


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


class _Slot(NamedTuple):
    """Pinned memory for one number, and the event at the end of a copy to it."""

    value: torch.Tensor
    done: Event
    slots: _Slots


class _Slots:
    """Lends pinned memory for numbers of one type that come from one device.

    To pin memory for each copy would take longer than the copy, and may synchronize the device.
    The memory is never freed (`_keep_for_ever`).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: deque[_Slot] = deque()
        self._dropped: deque[_Slot] = deque()
        self._unused: Iterator[torch.Tensor] = iter(())

    def take(self) -> _Slot:
        """Return a slot to which no copy is under way."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        for _ in range(len(self._dropped)):
            slot = self._dropped.popleft()
            (self._free if slot.done.query() else self._dropped).append(slot)
        return self._free.pop() if self._free else self._make()

    def give_back(self, slot: _Slot) -> None:
        """Let others use a slot whose copy is done."""
        self._free.append(slot)

    def drop(self, slot: _Slot) -> None:
        """Let others use a slot once its copy is done. This does not ask the device."""
        self._dropped.append(slot)

    def _make(self) -> _Slot:
        value = next(self._unused, None)
        if value is None:
            # The script may be in inference mode, and tensors that are made there stay there.
            with torch.inference_mode(False):
                block = torch.empty(_BLOCK_SIZE, dtype=self._dtype, device="cpu", pin_memory=True)
                _keep_for_ever(block)
                self._unused = iter(block.unbind())
            value = next(self._unused)
        return _Slot(value, accelerator.current.Event(), self)


# By type and device, because an event stays on the device of its first use.
_slots: dict[tuple[torch.dtype, torch.device], _Slots] = {}


class PendingScalar:
    """Copies a scalar from a device to the host. No method waits for the copy."""

    __slots__ = ("_is_lost", "_slot", "_value")

    def __init__(self, source: torch.Tensor) -> None:
        """Start copying a tensor with one element. This allocates no memory on the device."""
        self._value: complex | None = None
        self._is_lost = False
        self._slot: list[_Slot] = []  # empty once the copy is done
        key = (source.dtype, source.device)
        slots = _slots.get(key) or _slots.setdefault(key, _Slots(source.dtype))
        slot = slots.take()
        number = source.detach()
        slot.value.copy_(number if number.ndim == 0 else number.reshape(()), non_blocking=True)
        device = accelerator.current
        device.record_event(slot.done, device.current_stream())
        self._slot.append(slot)

    def arrived(self) -> bool:
        """Whether the copy is done, or lost."""
        if self._is_lost:
            return True
        try:
            slot = self._slot.pop()  # a thread that asks at the same time finds none
        except IndexError:
            return True
        if not slot.done.query():
            self._slot.append(slot)
            return False
        self._value = slot.value.item()
        slot.slots.give_back(slot)
        return True

    def read(self) -> float | None:
        """Return the value as a float, or None if the copy is not done or lost."""
        value = self.read_as_is()
        return None if value is None else float(value)  # type: ignore[arg-type]

    def read_as_is(self) -> complex | None:
        """Return the value in its own type, or None if the copy is not done or lost."""
        return self._value if self.arrived() else None

    def lose(self) -> None:
        """Stop asking the device for the copy. A copy that is not known to be done is lost."""
        self._is_lost = True

    def __del__(self) -> None:
        """Let others use the memory later."""
        for slot in self._slot:
            slot.slots.drop(slot)


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
