"""Sees where CUDA streams and the host wait for other streams, by wrapping torch's names for that.

Not seen: waits issued from C++ or by `torch.accelerator`, and events recorded there. The wrappers
that are closed, or run inside one another, are pass-throughs.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from ..common.fail_open import FailOpen
from ..common.patching import AttributePatch
from .stream_waits import StreamWaitTracker


class Inside(Protocol):
    """Whether this thread is inside a wrapped function already."""

    value: bool


class StreamHooks:
    """Wraps and restores. Opening does nothing where torch was built without CUDA.

    Attributes:
        cost_ns: Nanoseconds that noting took.
    """

    def __init__(self, fail_open: FailOpen, stalls: StreamWaitTracker, inside: Inside) -> None:
        self.cost_ns = 0
        self._inside = inside
        self._open = False
        self._wraps: list[AttributePatch] = []
        joins_device = fail_open.wrap("streams", lambda *_, **__: stalls.on_device_sync())
        # `Stream.wait_event` calls `Event.wait`, and `Stream.record_event` calls `Event.record`.
        self._names: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("Stream", "wait_stream", fail_open.wrap("streams", stalls.on_stream_wait)),
            ("Stream", "synchronize", fail_open.wrap("streams", stalls.on_stream_sync)),
            ("Event", "record", fail_open.wrap("streams", stalls.records)),
            ("Event", "wait", fail_open.wrap("streams", stalls.on_event_wait)),
            ("Event", "synchronize", fail_open.wrap("streams", stalls.on_event_sync)),
            ("", "synchronize", joins_device),
        )

    def open(self) -> None:
        """Wrap."""
        if self._open or not torch.backends.cuda.is_built():
            return
        self._open = True
        for owner, name, begins in self._names:
            place = getattr(torch.cuda, owner) if owner else torch.cuda
            self._wraps.append(AttributePatch(place, name, self._wrapper(begins)))

    def close(self) -> None:
        """Restore every name."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    def _wrapper(self, begins: Callable[..., Any]) -> Callable[[Any], Any]:
        is_compiling, inside = torch.compiler.is_compiling, self._inside

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*args: Any, **kwargs: Any) -> Any:
                if is_compiling() or not self._open or inside.value:
                    return original(*args, **kwargs)
                inside.value = True
                try:
                    entered_ns = perf_counter_ns()
                    begins(*args, **kwargs)
                    self.cost_ns += perf_counter_ns() - entered_ns
                    return original(*args, **kwargs)
                finally:
                    inside.value = False

            return hooked

        return make
