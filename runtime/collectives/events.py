"""CUDA events for timing: pooled, recorded on the issuing stream, read later, never waited for."""

from __future__ import annotations

import ctypes
import logging
from collections import deque

import torch

logger = logging.getLogger(__name__)

POOL_SIZE = 4096
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class EventPool:
    """Timing events that are used again once they were read.

    Attributes:
        disabled: Set where events cannot be read, so that none should be recorded.
    """

    def __init__(self) -> None:
        self.disabled = False
        self._free: deque[torch.cuda.Event] = deque(maxlen=POOL_SIZE)
        self._record = torch.cuda.Event.record  # as it is before we wrap it

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Mark this moment on a stream, by default on the current one."""
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        self._record(event, stream)
        return event

    def release(self, event: torch.cuda.Event) -> None:
        """Let a read event be used again."""
        self._free.append(event)


def allow_queries_while_capturing() -> bool:
    """Let this thread query events while another captures a CUDA graph.

    In the default mode a query by any thread invalidates the capture. Returns whether that worked;
    if not, this thread must not query events.
    """
    try:
        runtime = ctypes.CDLL(None)  # torch has loaded libcudart into the process
        exchange = runtime.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        logger.info("no cudaThreadExchangeStreamCaptureMode: collectives on CUDA are not timed")
        return False
    mode = ctypes.c_int(_RELAXED)
    return bool(exchange(ctypes.byref(mode)) == 0)
