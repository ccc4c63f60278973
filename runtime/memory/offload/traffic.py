"""Counts the bytes that the ZeRO offload of one engine moves, and the seconds, by direction.

`OffloadTraffic` patches methods of the engine's optimizer. `transfer_sizes.py` computes the bytes
of each method, and `transfer_timer.py` adds up bytes and seconds. NVMe swapping goes through
asynchronous I/O handles, objects of a compiled class without attributes: a proxy,
`NvmeHandleProxy`, replaces each. DeepSpeed 0.19.8 reads and writes only through `async_pread`,
`async_pwrite` and `wait`; all other methods go to the handle directly.

Counted: gradients copied to the host and back, updated parameters copied to the device, partitions
fetched for gathers, `engine.offload_states` and `reload_states`, and NVMe reads and writes.

Seconds are those of DeepSpeed's code that copies, without what is counted inside it: on CUDA the
time on its stream, by events, else the host's. For gradients at stage 3 they include their norms,
for updated parameters the host's cast to 16 bits, and for states garbage collection. For NVMe they
are the time that the host was blocked in submitting and waiting, not that of the transfer, which
overlaps. A synchronous gather has bytes and no seconds: its copies cannot be separated from the
collective.

Not counted: ZenFlow, SuperOffload, DeepCompile and Muon on the host, which copy elsewhere;
activation checkpoints on the host; loading of checkpoints; DeepSpeed's `safe_get` and `safe_set`
functions; changes under `GatheredParameters`; everything before the watch started.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from ....metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS
from ....metrics.recorder import Recorder
from ...collectives.event_pool import EventPool
from ...common import accelerator
from ...common.fail_open import FailOpen
from ...common.patching import AttributePatch
from . import transfer_sizes
from .transfer_sizes import NO_TRANSFER, TransferBytes
from .transfer_timer import DIRECTIONS, OffloadTimer

# Attributes of DeepSpeed's swappers that hold asynchronous I/O handles.
OPTIMIZER_HANDLES = ("aio_handle", "read_aio_handle", "write_aio_handle")
PARAMETER_HANDLES = ("aio_read_handle", "aio_write_handle")
STAGE_1_AND_2 = "DeepSpeedZeroOptimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
SizeFunction = Callable[..., TransferBytes]
STATE_METHODS: Mapping[str, SizeFunction] = {
    "offload_states": transfer_sizes.states_offloaded,
    "reload_states": transfer_sizes.states_reloaded,
}
STAGE_1_AND_2_METHODS: Mapping[str, SizeFunction] = {
    "async_accumulate_grad_in_cpu_via_gpu": transfer_sizes.stage_2_accumulated,
    "async_inplace_copy_grad_to_fp32_buffer_from_gpu": transfer_sizes.stage_2_finished,
    "_restore_cpu_offload_grad_to_gpu": transfer_sizes.stage_2_restored,
}
COMPACT_METHODS: Mapping[str, SizeFunction] = {  # for 16-bit gradients accumulated in fp32
    "copy_grads_in_partition": transfer_sizes.stage_2_in_partition,
}
STAGE_3_GRADIENT_METHODS: Mapping[str, SizeFunction] = {
    "partition_grads": transfer_sizes.stage_3_partitioned,
    "_finalize_offload_gradient_accumulation": transfer_sizes.stage_3_finalized,
}
# `step()` at stages 1 and 2 copies updated parameters to the device between these two calls.
UPDATE = "_optimizer_step"
RELEASE = "_release_preflattened_grad_buffers"
# Methods of the gradient swapper and of the optimizer swapper that copy to the host for NVMe.
NVME_STAGING = "_swap_out_tensor", transfer_sizes.staged_for_nvme
NVME_REMAINDERS = "_retrieve_unswapped_grad_partitions", transfer_sizes.kept_off_nvme
STAGE_3_UPDATE = "_reassign_or_swap_out_partitioned_parameters"


class OffloadTraffic:
    """Counts the traffic of one engine, by patching its optimizer until `restore`.

    Attributes:
        cost_ns: Nanoseconds that the hooks took on the training thread.
    """

    def __init__(self, engine: Any, fail_open: FailOpen, events: EventPool) -> None:
        """Patch the optimizer; without offload only the methods that move states.

        Args:
            engine: A DeepSpeed engine.
            fail_open: Wraps the code that runs in training.
            events: Pool of the device's events.
        """
        self.cost_ns = 0
        self._open = True
        self._copying_back = False
        self._directions: set[str] = set()
        self._patches: list[AttributePatch] = []
        on_device = torch.device(engine.device).type == accelerator.current.kind
        self._timer = OffloadTimer(events if on_device else None)
        self._bytes_copied_back = partial(self._optimizer_size, transfer_sizes.stage_2_updated)
        # One wrapper for all: after a failure no transfer starts that would not stop.
        self._wrapped = fail_open.wrap("offload", lambda body, *args: body(*args))
        with ExitStack() as undo:  # restore what is patched if the rest fails
            undo.callback(self.restore)
            self._patch(engine.optimizer)
            undo.pop_all()

    def rebind_engine(self, engine: Any) -> None:
        """Move the patches from one engine to another; the sums continue."""
        self.restore()
        self._copying_back = False
        self._open = True
        with ExitStack() as undo:
            undo.callback(self.restore)
            self._patch(engine.optimizer)
            undo.pop_all()

    def publish(self, recorder: Recorder) -> None:
        """Publish the sums of the directions that this engine uses."""
        self._timer.read_events()
        sums = zip(DIRECTIONS, self._timer.bytes, self._timer.seconds(), strict=True)
        with recorder.commit():
            for direction, num_bytes, seconds in sums:
                if num_bytes or direction in self._directions:
                    recorder.set(OFFLOAD_BYTES, num_bytes, direction)
                    recorder.set(OFFLOAD_SECONDS, seconds, direction)

    def restore(self) -> None:
        """Remove every patch; keep the sums."""
        self._open = False
        for patch in reversed(self._patches):
            patch.restore()
        self._patches.clear()

    def on_io_start(self, transfer: TransferBytes, submits: bool) -> bool:
        """Start timing a call to an asynchronous I/O handle; return whether it is timed."""
        if not self._open:
            return False
        entered_ns = perf_counter_ns()
        started = self._wrapped(self._start_io, transfer, submits)
        self.cost_ns += perf_counter_ns() - entered_ns
        return bool(started)

    def on_io_end(self) -> None:
        """Stop timing the call that started last."""
        self._stop()

    def _patch(self, optimizer: Any) -> None:
        kind = type(optimizer).__name__  # not subclasses, which copy differently
        if kind not in (STAGE_1_AND_2, STAGE_3) or getattr(optimizer, "zenflow", False):
            return
        self._optimizer = weakref.ref(optimizer)
        self._patch_methods(optimizer, STATE_METHODS)
        if kind == STAGE_1_AND_2 and optimizer.cpu_offload:
            self._directions |= {"to_host", "to_device"}
            self._patch_methods(optimizer, STAGE_1_AND_2_METHODS)
            groups = range(len(optimizer.bit16_groups))
            if any(optimizer._use_compact_grad_partition_buffer(i) for i in groups):
                self._patch_methods(optimizer, COMPACT_METHODS)
            self._patches += [
                AttributePatch(optimizer, UPDATE, self._hooked_update),
                AttributePatch(optimizer, RELEASE, self._hooked_release),
            ]
        if kind == STAGE_3 and (optimizer.offload_optimizer or optimizer.offload_param):
            self._directions |= {"to_host", "to_device"}
            self._patch_stage_3(optimizer)

    def _patch_stage_3(self, optimizer: Any) -> None:
        self._patch_methods(optimizer, {STAGE_3_UPDATE: transfer_sizes.stage_3_updated})
        if optimizer.offload_optimizer:
            self._patch_methods(optimizer, STAGE_3_GRADIENT_METHODS)
        if optimizer.offload_param:
            for param in optimizer.module.parameters():
                self._patch_gathers(param)
        swapper = optimizer.optimizer_swapper
        if swapper is not None:
            self._patch_one(swapper.gradient_swapper, *NVME_STAGING)
            self._patch_one(swapper, *NVME_REMAINDERS)
        handles = wrap_handles(optimizer, self)
        if handles:
            self._directions |= {"to_nvme", "from_nvme"}
        self._patches += handles

    def _patch_methods(self, optimizer: Any, methods: Mapping[str, SizeFunction]) -> None:
        for name, size_of in methods.items():
            self._patch_one(optimizer, name, partial(self._optimizer_size, size_of))

    def _patch_gathers(self, param: Any) -> None:
        """Patch both methods that gather one parameter, or a list of them."""
        if hasattr(param, "all_gather"):
            size_of = partial(_gathered, weakref.ref(param))
            self._patch_one(param, "all_gather", size_of, timed=False)
            self._patch_one(param, "all_gather_coalesced", size_of)

    def _patch_one(self, owner: Any, name: str, size_of: SizeFunction, timed: bool = True) -> None:
        self._patches.append(AttributePatch(owner, name, partial(self._timed, size_of, timed)))

    def _optimizer_size(self, size_of: SizeFunction, *args: Any, **kwargs: Any) -> TransferBytes:
        return size_of(self._optimizer(), *args, **kwargs)

    def _timed(self, size_of: SizeFunction, timed: bool, original: Any) -> Any:
        """Wrap a method whose transfer `size_of` computes from its arguments."""
        is_compiling = torch.compiler.is_compiling

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            started = self._wrapped(self._start, size_of, timed, args, kwargs)
            self.cost_ns += perf_counter_ns() - entered_ns
            try:
                return original(*args, **kwargs)
            finally:
                if started:
                    self._stop()

        return hooked

    def _hooked_update(self, original: Any) -> Any:
        """Wrap the update of a group; the copy to the device follows in the caller's code."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._copying_back:  # after a failed copy the release was not called
                self._stop_copy_back()
            result = original(*args, **kwargs)
            if self._open:
                entered_ns = perf_counter_ns()
                started = self._wrapped(self._start, self._bytes_copied_back, True, args, kwargs)
                self._copying_back = bool(started)
                self.cost_ns += perf_counter_ns() - entered_ns
            return result

        return hooked

    def _hooked_release(self, original: Any) -> Any:
        """Wrap the method that the caller calls after that copy."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._copying_back:
                self._stop_copy_back()
            return original(*args, **kwargs)

        return hooked

    def _stop_copy_back(self) -> None:
        self._copying_back = False
        self._stop()

    def _start(
        self, size_of: SizeFunction, timed: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        transfer = size_of(*args, **kwargs)
        if not any(transfer):
            return False
        self._timer.add(transfer)
        if timed:
            self._timer.start(transfer)
        return timed

    def _start_io(self, transfer: TransferBytes, submits: bool) -> bool:
        if submits:
            self._timer.add(transfer)
        self._timer.start(transfer, on_stream=False)
        return True

    def _stop(self) -> None:
        entered_ns = perf_counter_ns()
        self._wrapped(self._timer.stop)
        self.cost_ns += perf_counter_ns() - entered_ns


def _gathered(parameter: Callable[[], Any], *args: Any, **kwargs: Any) -> TransferBytes:
    """Return the bytes fetched by `param.all_gather_coalesced(...)` or `param.all_gather(...)`."""
    params = args[0] if args else kwargs.get("params", kwargs.get("param_list"))
    if params is None:
        params = [parameter()]
    if not isinstance(params, list | tuple | set | dict):
        return NO_TRANSFER  # an iterator, which DeepSpeed will consume
    return transfer_sizes.stage_3_fetched(params)


class NvmeHandleProxy:
    """Replaces one I/O handle, and counts the bytes submitted between two waits.

    Once the observer returns False it only calls the handle.
    """

    def __init__(self, handle: Any, observer: OffloadTraffic) -> None:
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


def wrap_handles(optimizer: Any, observer: OffloadTraffic) -> list[AttributePatch]:
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
