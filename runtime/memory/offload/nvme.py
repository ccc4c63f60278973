"""Stands in for DeepSpeed's handles of asynchronous I/O, and tells what goes through them.

A handle is an object of a compiled class that takes no attributes, so another stands in its place.
DeepSpeed 0.19.8 reads and writes through `async_pread`, `async_pwrite` and `wait` alone; anything
else goes on to the handle unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ...common.patching import AttributePatch
from .transfer_sizes import NOTHING, Moves

OPTIMIZER_HANDLES = ("aio_handle", "read_aio_handle", "write_aio_handle")
PARAMETER_HANDLES = ("aio_read_handle", "aio_write_handle")


class Meter(Protocol):
    """What a stand-in tells: a call begins that submits or awaits `moves`; it has ended."""

    def begin_io(self, moves: Moves, submits: bool) -> bool:
        """Return whether `end_io` should be called."""

    def end_io(self) -> None:
        """End what began last."""


class NvmeHandle:
    """One handle and what was submitted to it since it was last waited for.

    Once the meter says no it does nothing but call the handle.
    """

    def __init__(self, handle: Any, meter: Meter) -> None:
        self._handle = handle
        self._meter = meter
        self._pending = NOTHING

    def __getattr__(self, name: str) -> Any:
        """Return what the handle has under this name."""
        return getattr(self._handle, name)

    def async_pread(self, buffer: Any, *args: Any) -> Any:
        """Submit a read."""
        return self._submit(self._handle.async_pread, Moves(from_nvme=buffer.nbytes), buffer, *args)

    def async_pwrite(self, buffer: Any, *args: Any) -> Any:
        """Submit a write."""
        return self._submit(self._handle.async_pwrite, Moves(to_nvme=buffer.nbytes), buffer, *args)

    def wait(self) -> Any:
        """Wait for all that was submitted."""
        pending, self._pending = self._pending, NOTHING
        begun = any(pending) and self._meter.begin_io(pending, submits=False)
        try:
            return self._handle.wait()
        finally:
            if begun:
                self._meter.end_io()

    def _submit(self, original: Any, moves: Moves, *args: Any) -> Any:
        begun = self._meter.begin_io(moves, submits=True)
        if begun:
            self._pending = Moves(
                to_nvme=self._pending.to_nvme + moves.to_nvme,
                from_nvme=self._pending.from_nvme + moves.from_nvme,
            )
        try:
            return original(*args)
        finally:
            if begun:
                self._meter.end_io()


def wrap_handles(optimizer: Any, meter: Meter) -> list[AttributePatch]:
    """Put stand-ins in the place of every handle through which this engine swaps."""
    stand_ins: dict[int, NvmeHandle] = {}

    def stand_in(handle: Any) -> NvmeHandle:
        # One for each handle, under whatever names it stands: a wait is for all that is pending.
        return stand_ins.setdefault(id(handle), NvmeHandle(handle, meter))

    return [AttributePatch(owner, name, stand_in) for owner, name in _places(optimizer)]


def _places(optimizer: Any) -> Iterator[tuple[Any, str]]:
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from ((swapper, name) for name in OPTIMIZER_HANDLES if hasattr(swapper, name))
        yield swapper.gradient_swapper, "aio_handle"
    params = optimizer.module.parameters()
    swappers = {id(p.nvme_swapper): p.nvme_swapper for p in params if hasattr(p, "nvme_swapper")}
    for swapper in swappers.values():
        if swapper is not None:
            yield from ((swapper, name) for name in PARAMETER_HANDLES)
