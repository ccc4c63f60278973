"""Traces where leaking memory is allocated. Tracing is slow, and runs only on request.

On the host, tracemalloc finds the Python lines whose objects grow. Python does not count the memory
of tensors, so the garbage collector's list of objects shows which tensors grow in number. On CUDA,
torch's memory history is recorded for torch's memory viewer.
"""

from __future__ import annotations

import gc
import logging
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from pathlib import Path

import torch

from ..common import accelerator
from ..common.format_numbers import format_bytes
from ..common.report_files import write_or_warn
from ..devices.cuda_allocator import dump_snapshot

logger = logging.getLogger(__name__)

TRACE_SECONDS = 60.0
TOP_SITES = 15
FRAMES = 8
_PACKAGE = str(Path(__file__).parents[1])
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
TensorKind = tuple[str, tuple[int, ...], str]


class LeakTracer:
    """Traces allocations once, for one minute. Used on the watch thread."""

    def __init__(self, rank: int, folder: Callable[[], Path | None]) -> None:
        self._rank = rank
        self._folder = folder
        self._baseline: tracemalloc.Snapshot | None = None
        self._tensors: Counter[TensorKind] = Counter()
        self._has_history = False
        self._started_at = 0.0
        self._done = False

    def start(self, *, on_device: bool) -> bool:
        """Start tracing. Return False if it has run before, or if the script uses tracemalloc."""
        if self._done or self._baseline is not None or tracemalloc.is_tracing():
            return False
        self._started_at = time.monotonic()
        self._tensors = _live_tensors()
        tracemalloc.start(FRAMES)
        self._baseline = tracemalloc.take_snapshot()
        if on_device:
            self._has_history = accelerator.current.start_memory_history(max_entries=100_000)
        return True

    def write_when_due(self) -> None:
        """Write the findings after TRACE_SECONDS, and stop tracing."""
        if self._baseline is not None and time.monotonic() - self._started_at >= TRACE_SECONDS:
            self.close()

    def close(self) -> None:
        """Write the findings and stop tracing. Safe to call twice."""
        baseline, self._baseline = self._baseline, None
        if baseline is None:
            return
        self._done = True
        try:
            self._write(baseline)
        finally:
            tracemalloc.stop()
            if self._has_history:
                self._has_history = False
                accelerator.current.stop_memory_history()

    def _write(self, baseline: tracemalloc.Snapshot) -> None:
        traced = tracemalloc.take_snapshot()
        tracemalloc.stop()
        folder = self._folder()
        if folder is None:
            return
        path = folder / "memory" / f"leak-rank-{self._rank}.txt"
        grown = _live_tensors() - self._tensors
        write_or_warn(path, _report_text(traced, baseline, grown), mode=0o600)
        logger.warning("allocation sites of leaking memory written to %s", path)
        if self._has_history:
            _write_device_history(path.with_suffix(".pickle"))


def _write_device_history(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)  # of an earlier attempt
    if not dump_snapshot(accelerator.current.kind, path):
        logger.warning("allocations on the device could not be written to %s", path)


def _report_text(
    traced: tracemalloc.Snapshot, baseline: tracemalloc.Snapshot, grown: Counter[TensorKind]
) -> str:
    ignored = [
        tracemalloc.Filter(False, f"{_PACKAGE}/*"),
        tracemalloc.Filter(False, "*/tracemalloc.py"),
    ]
    changes = traced.filter_traces(ignored).compare_to(baseline.filter_traces(ignored), "traceback")
    lines = [
        "Allocation sites of memory that is still held, since a leak was suspected",
        "",
        "Tensors that grew in number (tensors held only by an autograd graph are not seen):",
        *(_tensor_lines(grown) or ["  none"]),
        "",
        "Python lines whose objects grew (the memory of tensors is not counted here):",
    ]
    growing = [change for change in changes if change.size_diff > 0][:TOP_SITES]
    for change in growing:
        lines.append(f"  +{format_bytes(change.size_diff)} in {change.count_diff:+d} objects")
        lines.extend(f"    {frame}" for frame in reversed(change.traceback))
    return "\n".join([*lines, *([] if growing else ["  none"])]) + "\n"


def _tensor_lines(grown: Counter[TensorKind]) -> list[str]:
    def size(kind: TensorKind) -> int:
        dtype, shape, _ = kind
        itemsize: int = getattr(torch, dtype).itemsize
        return prod(shape) * itemsize * grown[kind]

    return [
        f"  {grown[kind]} x {kind[0]}{list(kind[1])} on {kind[2]}: {format_bytes(size(kind))}"
        for kind in sorted(grown, key=size, reverse=True)[:TOP_SITES]
    ]


def _live_tensors() -> Counter[TensorKind]:
    return Counter(map(_kind, _plain_tensors(gc.get_objects())))


def _kind(tensor: torch.Tensor) -> TensorKind:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), str(tensor.device)


def _plain_tensors(objects: Iterable[object]) -> Iterable[torch.Tensor]:
    # By exact type: isinstance reads `__class__`, which may run code of lazy objects. A subclass
    # may raise when its shape is read, as lazy parameters do.
    return (each for each in objects if type(each) in _TENSOR_TYPES)  # type: ignore[misc]
