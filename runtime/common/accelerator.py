"""Accesses the accelerator of this process. Only this module names torch.cuda.

`current` is the accelerator in use. `CudaAccelerator` supports NVIDIA GPUs and AMD GPUs (ROCm),
which torch presents as CUDA. To support another kind of accelerator, write a class with the members
of `Accelerator`, and add it to `_KINDS`. Phases, collectives and the memory in use need nothing
else. Peaks of memory then cover the whole run, so they belong to no step, phase or generation, and
there is no forecast: `devices/shared_peak_counters.py` resets the counters of CUDA only. A row in
`devices/device_probes.py` adds utilization and power, and `devices/peak_flops.py` adds the peak
FLOP/s. `training_device_index` also requires that DeepSpeed's accelerator is of this kind.
Importing this module does not initialize a device.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType

logger = logging.getLogger(__name__)

_CAPTURE_MODE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_DEFAULT_POOL = (0, 0)  # where the allocator places memory outside of private pools
_NOT_READY = 600  # cudaErrorNotReady, hipErrorNotReady
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: the stream does not wait for the default stream


class Stream(Protocol):
    """Queues work on the device. Declares the methods of `torch.cuda.Stream` that are used."""

    def synchronize(self) -> None:
        """Wait on the host until all work in the queue is done."""


class Event(Protocol):
    """Marks a moment in a stream. Declares the methods of `torch.cuda.Event` that are used."""

    def record(self, stream: Any = None) -> None:
        """Set the mark at the end of a stream, by default the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed the mark. Never waits."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two marks. The device must have passed both."""


class Accelerator(Protocol):
    """Accesses one kind of accelerator. Only `empty_cache` may wait for the device.

    Attributes:
        kind: torch's type of device, such as "cuda".
        collective_backend: The process group backend whose collectives run on streams. Its name is
            also the prefix of its kernels' names.
        module: torch's module for the device, which has `synchronize`. It must allow weak
            references.
        Stream: The class of its streams, with `wait_stream` and `synchronize`.
        Event: The class of its events, with `record`, `wait` and `synchronize`.
        Graph: The class of its graphs, with `capture_begin`, `capture_end`, `replay` and `reset`.
        captured_graphs: The graphs that still hold what they have captured, of those whose capture
            monitoring has seen, by their ids.
        profiler_device: torch's profiler type of work that runs on the device.
    """

    kind: str
    collective_backend: str
    module: Any
    Stream: Any
    Event: Any
    Graph: Any
    captured_graphs: weakref.WeakValueDictionary[int, Any]
    profiler_device: Any

    def is_built(self) -> bool:
        """Return whether torch was built for this kind."""

    def is_available(self) -> bool:
        """Return whether a device of this kind and its driver are present."""

    def is_initialized(self) -> bool:
        """Return whether this process already uses the device."""

    def device_count(self) -> int:
        """Return how many devices this process may use."""

    def current_device(self) -> int:
        """Return the index of the current device."""

    def device_name(self, index: int) -> str:
        """Return the product name that the driver gives."""

    def device_uuid(self, index: int) -> str:
        """Return the id, without a prefix, that identifies the device on its host."""

    def is_slice(self, index: int) -> bool:
        """Return whether the device is a part of a physical device, such as a MIG slice."""

    def hardware_id(self, index: int) -> str:
        """Return the id of a device as its vendor's tools print it: its `hw.id` in OTLP data."""

    def current_stream(self) -> Any:
        """Return the stream to which this thread submits work: one object for each stream."""

    def record_event(self, event: Any, stream: Any) -> None:
        """Mark this moment on a stream, unseen by wrappers of `Event.record`."""

    def query_event(self, event: Any) -> bool:
        """Return what `Event.query` does. While the driver blocks, other threads can run."""

    def ask_driver(self) -> None:
        """Return once the driver answers. While it blocks, other threads can run."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which a stream is this thread's current stream."""

    def private_stream(self) -> Any:
        """Return a stream that nobody else uses, or None if there is none.

        The stream is never destroyed, because the allocator may still refer to it.
        """

    def has_one_queue(self) -> bool:
        """Return whether all streams share one queue, so that one that waits holds the others."""

    def stream_handle(self, stream: Any) -> int | None:
        """Return a number that identifies a stream, or None for a stream of another class."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured into a graph."""

    def prepare_thread(self, index: int) -> bool:
        """Let this thread query events of a device, also while another thread captures a graph.

        A thread of monitoring calls this before its first other call of the device. The device
        becomes the thread's current one. If the result is False, the thread must not query events.
        """

    def memory_stats(self, index: int) -> dict[str, Any]:
        """Return the allocator's statistics, nested as torch.cuda.memory_stats_as_nested_dict's.

        The result is empty before the device is initialized.
        """

    def memory_info(self, index: int) -> tuple[int, int]:
        """Return the free and total bytes of the device, over all processes."""

    def memory_fraction(self, index: int) -> float:
        """Return the fraction of the device's memory that this process may use, 0 to 1."""

    def has_expandable_segments(self) -> bool:
        """Return whether the allocator can return free parts of a segment to the device."""

    def private_pool_bytes(self, index: int) -> int:
        """Return the free bytes in private pools of the allocator, such as those of graphs.

        Bytes that count as `inactive_split_bytes` are left out. Reads all blocks with the
        interpreter lock held, which may take 0.3 s for 100,000 blocks.
        """

    def empty_cache(self) -> None:
        """Return the allocator's free blocks to the device. May wait: cudaFree synchronizes."""

    def start_memory_history(self, max_entries: int) -> bool:
        """Record the stack of each allocation; return False if the script does so already."""

    def stop_memory_history(self) -> None:
        """Stop recording allocations."""

    def dump_memory_snapshot(self, path: str) -> None:
        """Write the allocator's blocks and history to a file, for torch's memory viewer."""

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the current device's random generator."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the current device's random generator."""


class CudaAccelerator:
    """Accesses NVIDIA and AMD GPUs through torch.cuda.

    `current_stream`, `on_stream` and `is_capturing` run for each collective. On an H200's host,
    torch.cuda.current_stream takes 3.3 microseconds and torch.cuda.stream 7.4, because they make an
    object and ask for devices; here they take a sixth of that. The other methods look up torch's
    function by name at each call.
    """

    kind = "cuda"
    collective_backend = "nccl"
    module: Any = torch.cuda
    Stream: Any = torch.cuda.Stream
    Event: Any = torch.cuda.Event
    Graph: Any = torch.cuda.CUDAGraph
    profiler_device: Any = DeviceType.CUDA

    is_capturing: Callable[[], bool] = staticmethod(torch.cuda.is_current_stream_capturing)
    record_event: Callable[[Any, Any], None] = staticmethod(torch.cuda.Event.record)

    def __init__(self) -> None:
        # By device and handle. torch's streams are never destroyed, and the stream of a handle that
        # the runtime gives out again is the same for torch.
        self._streams: dict[tuple[int, int], Any] = {}
        self.captured_graphs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def current_stream(self) -> Any:
        """Return what `torch.cuda.current_stream` does: the same object each time."""
        device = torch.cuda.current_device()
        key = (device, torch._C._cuda_getCurrentRawStream(device))
        stream = self._streams.get(key)
        if stream is None:  # another thread may make one too
            stream = self._streams.setdefault(key, torch.cuda.current_stream())
        return stream

    def query_event(self, event: Any) -> bool:
        """Query an event by the runtime's function, without the interpreter lock.

        `torch.cuda.Event.query` keeps the lock, and blocks while another thread holds the lock of
        the context, as in cudaStreamSynchronize: then no thread of Python would run. To get the
        interpreter lock again may take 5 ms, so threads that query often use torch's function.

        Raises:
            RuntimeError: A kernel has failed.
        """
        query, clear_error = self._event_functions
        handle = getattr(event, "cuda_event", None)
        if query is None or clear_error is None or handle is None:
            return bool(event.query())
        if not handle:  # torch makes it when it is recorded
            return True
        status = query(ctypes.c_void_p(handle))
        if status == 0:
            return True
        clear_error()  # as torch does, so that a later call does not report it
        if status != _NOT_READY:
            raise RuntimeError(f"the query of an event returned the error {status}")
        return False

    def ask_driver(self) -> None:
        """Make an event of the runtime's own, for which it needs the lock of the context."""
        create, destroy = (_runtime_function(name) for name in ("EventCreate", "EventDestroy"))
        if create is None or destroy is None:
            return
        handle = ctypes.c_void_p()
        if create(ctypes.byref(handle)) == 0:
            destroy(handle)
        elif (clear_error := self._event_functions[1]) is not None:
            clear_error()  # as in `query_event`

    @cached_property
    def _event_functions(self) -> list[Callable[..., int] | None]:
        return [_runtime_function(name) for name in ("EventQuery", "GetLastError")]

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager for a stream of the current device."""
        return _OnStream(stream)

    def private_stream(self) -> Any:
        """Return a stream of CUDA's, or None if the runtime cannot be called.

        torch's own streams come from a pool of 32, so that two of its users may share a stream.
        """
        create = _runtime_function("StreamCreateWithFlags")
        handle = ctypes.c_void_p()
        if create is None or create(ctypes.byref(handle), _STREAM_NON_BLOCKING) != 0:
            return None
        return torch.cuda.ExternalStream(handle.value)

    def has_one_queue(self) -> bool:
        """Return whether CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron requires."""
        return not torch.version.hip and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"

    @staticmethod
    def stream_handle(stream: Any) -> int | None:
        """Return the `cudaStream_t`, or None for a generic `torch.Stream`, which has none."""
        return getattr(stream, "cuda_stream", None)

    def is_built(self) -> bool:
        """Return whether torch was built with CUDA or ROCm."""
        return bool(torch.backends.cuda.is_built())

    def is_available(self) -> bool:
        """Return whether there is a GPU and a driver for it."""
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        """Return whether this process uses CUDA already."""
        return bool(torch.cuda.is_initialized())

    def device_count(self) -> int:
        """Return how many GPUs this process may use."""
        return torch.cuda.device_count()

    def current_device(self) -> int:
        """Return the index of the current GPU."""
        return torch.cuda.current_device()

    def device_name(self, index: int) -> str:
        """Return the product name, such as "NVIDIA H100 80GB HBM3"."""
        return torch.cuda.get_device_name(index)

    def device_uuid(self, index: int) -> str:
        """Return the UUID without "GPU-"."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def is_slice(self, index: int) -> bool:
        """Return whether the device is a MIG slice."""
        return " MIG " in self.device_name(index)

    def hardware_id(self, index: int) -> str:
        """Return the UUID as nvidia-smi prints it."""
        return ("MIG-" if self.is_slice(index) else "GPU-") + self.device_uuid(index)

    def prepare_thread(self, index: int) -> bool:
        """Make a GPU this thread's current one, and relax the thread's mode of captures.

        The current GPU of a new thread is GPU 0, where the first call of the runtime would create
        a context of half a gigabyte. In the default mode, a query by any thread invalidates the
        capture of a CUDA graph.

        ROCm before 7.2.1 ignores the mode: there a query by any thread can still invalidate a
        capture, as can a query by the watchdog thread of torch itself.

        Returns:
            Whether both were set. If not, this thread must not query events.
        """
        try:
            torch.cuda.set_device(index)
        except RuntimeError as error:  # a kernel has failed, or the GPU is lost
            logger.info("a thread of monitoring cannot use cuda:%d: %s", index, error)
            return False
        exchange = _runtime_function("ThreadExchangeStreamCaptureMode")
        if exchange is None:
            return False
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        return bool(exchange(ctypes.byref(mode)) == 0)

    def memory_stats(self, index: int) -> dict[str, Any]:
        """Return `torch.cuda.memory_stats_as_nested_dict`."""
        return torch.cuda.memory_stats_as_nested_dict(index)

    def memory_info(self, index: int) -> tuple[int, int]:
        """Return `torch.cuda.mem_get_info`: a call of the driver."""
        return torch.cuda.mem_get_info(index)

    def memory_fraction(self, index: int) -> float:
        """Return the fraction that `set_per_process_memory_fraction` has set."""
        # torch 2.6 can set this fraction, but has no function that returns it.
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return float(get_fraction(index)) if get_fraction else 1.0

    def has_expandable_segments(self) -> bool:
        """Return whether the allocator was set to `expandable_segments:True`."""
        get_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if get_settings is not None:
            settings = str(get_settings())
        else:  # torch before 2.9
            names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
            settings = ",".join(os.environ.get(name, "") for name in names)
        return "expandable_segments:true" in settings.lower().replace(" ", "")

    def private_pool_bytes(self, index: int) -> int:
        """Add up the free segments of private pools, and the free parts of expandable segments."""
        parameters = inspect.signature(torch.cuda.memory_snapshot).parameters
        options = {"include_traces": False} if "include_traces" in parameters else {}
        try:
            segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(**options)
        except RuntimeError:  # the allocator is cudaMallocAsync, which has no segments
            return 0
        return sum(
            each["total_size"] - each["allocated_size"]
            for each in segments
            if each["device"] == index
            and tuple(each["segment_pool_id"]) != _DEFAULT_POOL
            and (each["is_expandable"] or not each["active_size"])
        )

    def empty_cache(self) -> None:
        """Return the allocator's free blocks to the GPU, if CUDA is initialized."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def start_memory_history(self, max_entries: int) -> bool:
        """Record the stack of each allocation; return False if the script does so already."""
        if torch._C._cuda_isHistoryEnabled():
            return False
        torch.cuda.memory._record_memory_history(max_entries=max_entries)
        return True

    def stop_memory_history(self) -> None:
        """Stop recording allocations."""
        torch.cuda.memory._record_memory_history(enabled=None)

    def dump_memory_snapshot(self, path: str) -> None:
        """Write the allocator's blocks, and their history if it is recorded."""
        torch.cuda.memory._dump_snapshot(path)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the current GPU's random generator."""
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the current GPU's random generator."""
        torch.cuda.set_rng_state(state)


class _OnStream:
    """Makes a stream of the current device the current one, as `torch.cuda.stream` does."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before)


def _runtime_function(name: str) -> Callable[..., int] | None:
    """Return a function of the CUDA or HIP runtime, such as "StreamCreateWithFlags"."""
    full_name = ("hip" if torch.version.hip else "cuda") + name
    # torch has loaded the runtime: CUDA's for the whole process, HIP's perhaps for itself only.
    for library in (None, torch._C.__file__):
        try:
            function: Callable[..., int] = getattr(ctypes.CDLL(library), full_name)
        except (OSError, AttributeError):
            continue
        return function
    logger.info("the runtime has no %s", full_name)
    return None


# The class for each of torch's types of device. Without any device it is the first.
_KINDS: dict[str, type[Accelerator]] = {"cuda": CudaAccelerator}


def _of_this_build() -> Accelerator:
    """Return the accelerator for which torch was built."""
    return _KINDS.get(_kind_of_this_build(), CudaAccelerator)()


def _kind_of_this_build() -> str:
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, on a machine without a device
        found = None
    return "cpu" if found is None else found.type


# Other modules read `accelerator.current` at each use. Classes that run for each collective read
# `accelerator.current` once, in their constructors.
current: Accelerator = _of_this_build()


def training_device_index(module: torch.nn.Module | None = None) -> int | None:
    """Return the index of the device that this rank trains on, or None on CPU.

    If DeepSpeed is loaded, its choice of device counts: DS_ACCELERATOR may be "cpu" although the
    machine has a GPU.

    Args:
        module: The model, if its script may not have made its device the current one. Without a
            model, or with one that has no parameter on a device, it is the current device.
    """
    if device_kind() != current.kind or not current.is_available():
        return None
    devices = () if module is None else (one.device for one in module.parameters())
    index = next((device.index for device in devices if device.type == current.kind), None)
    return current.current_device() if index is None else index


def has_failed() -> bool:
    """Return whether a kernel of this process has failed, as in a device-side assert.

    Each further call of the device then raises the same error, until the process ends. This
    function does not wait for the device.
    """
    if not current.is_initialized():
        return False
    try:
        current.Event().record()
    except RuntimeError:
        return True
    return False


def device_uuid(index: int) -> str | None:
    """Return the UUID of a device of this process without a prefix, or None without a device."""
    return current.device_uuid(index) if current.is_available() else None


def device_is_slice(index: int) -> bool:
    """Return whether a device is available, and only a part of a physical device."""
    return current.is_available() and current.is_slice(index)


def device_kind() -> str:
    """Return the kind of device that training uses, such as "cuda" or "cpu"."""
    deepspeed = sys.modules.get("deepspeed.accelerator")
    if deepspeed is not None:
        return str(deepspeed.get_accelerator().device_name())
    kind = _kind_of_this_build()
    # A build for a device may run where there is none.
    return kind if kind != "cpu" and torch.accelerator.is_available() else "cpu"
