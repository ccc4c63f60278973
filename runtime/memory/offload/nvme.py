"""Proxies of DeepSpeed's asynchronous I/O handles that count the bytes read and written.

A handle is an object of a compiled class without attributes, so a proxy replaces it. DeepSpeed
0.19.8 reads and writes only through `async_pread`, `async_pwrite` and `wait`; all other methods go
to the handle directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ...common.patching import AttributePatch
from .transfer_sizes import NO_TRANSFER, TransferBytes

OPTIMIZER_HANDLES = ("aio_handle", "read_aio_handle", "write_aio_handle")
PARAMETER_HANDLES = ("aio_read_handle", "aio_write_handle")


class IoObserver(Protocol):
    """Observes the calls to a handle."""

    def on_io_start(self, transfer: TransferBytes, submits: bool) -> bool:
        """Handle the start of a call that submits or awaits a transfer.

        Returns:
            Whether `on_io_end` is to be called.
        """

    def on_io_end(self) -> None:
        """Handle the end of the call that started last."""


class NvmeHandleProxy:
    """Proxy of one handle; counts what is submitted between two waits.

    Once the observer returns False it only calls the handle.
    """

    def __init__(self, handle: Any, observer: IoObserver) -> None:
        self._handle = handle
        self._observer = observer
        self._pending = NO_TRANSFER

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the handle."""
        return getattr(self._handle, name)

    def async_pread(self, buffer: Any, *args: Any) -> Any:
        """Submit a read."""
        return self._submit(
            self._handle.async_pread, TransferBytes(from_nvme=buffer.nbytes), buffer, *args
        )

    def async_pwrite(self, buffer: Any, *args: Any) -> Any:
        """Submit a write."""
        return self._submit(
            self._handle.async_pwrite, TransferBytes(to_nvme=buffer.nbytes), buffer, *args
        )

    def wait(self) -> Any:
        """Wait for all submitted transfers."""
        pending, self._pending = self._pending, NO_TRANSFER
        started = any(pending) and self._observer.on_io_start(pending, submits=False)
        try:
            return self._handle.wait()
        finally:
            if started:
                self._observer.on_io_end()

    def _submit(self, original: Any, transfer: TransferBytes, *args: Any) -> Any:
        started = self._observer.on_io_start(transfer, submits=True)
        if started:
            self._pending = TransferBytes(
                to_nvme=self._pending.to_nvme + transfer.to_nvme,
                from_nvme=self._pending.from_nvme + transfer.from_nvme,
            )
        try:
            return original(*args)
        finally:
            if started:
                self._observer.on_io_end()


def wrap_handles(optimizer: Any, observer: IoObserver) -> list[AttributePatch]:
    """Replace every handle through which this engine swaps by a proxy."""
    proxies: dict[int, NvmeHandleProxy] = {}

    def proxy(handle: Any) -> NvmeHandleProxy:
        # One for each handle, which may have several names: a wait is for all pending transfers.
        return proxies.setdefault(id(handle), NvmeHandleProxy(handle, observer))

    return [AttributePatch(owner, name, proxy) for owner, name in _handle_attributes(optimizer)]


def _handle_attributes(optimizer: Any) -> Iterator[tuple[Any, str]]:
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from ((swapper, name) for name in OPTIMIZER_HANDLES if hasattr(swapper, name))
        yield swapper.gradient_swapper, "aio_handle"
    params = optimizer.module.parameters()
    swappers = {id(p.nvme_swapper): p.nvme_swapper for p in params if hasattr(p, "nvme_swapper")}
    for swapper in swappers.values():
        if swapper is not None:
            yield from ((swapper, name) for name in PARAMETER_HANDLES)
