"""Numbers that live on a device, read later: a copy is started now and looked at once done."""

from __future__ import annotations

from typing import Any

import torch


class Deferred:
    """A number that may not have arrived yet. Never waits for the device."""

    __slots__ = ("_copy", "_done", "_value")

    def __init__(self, source: Any) -> None:
        """Start reading.

        Args:
            source: A number, a tensor with one element, or None.
        """
        self._done: torch.cuda.Event | None = None
        self._copy: torch.Tensor | None = None
        self._value: float | None = None
        if isinstance(source, torch.Tensor) and source.is_cuda:
            self._start_copy(source.detach())
        elif source is not None:
            self._value = float(source)

    def _start_copy(self, source: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        self._copy = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._copy.copy_(source.reshape(()).to(torch.float64), non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @property
    def ready(self) -> bool:
        """Whether `value` may be read."""
        return self._done is None or self._done.query()

    @property
    def value(self) -> float | None:
        """The number; None if there is none, or if it has not arrived."""
        if self._copy is None:
            return self._value
        return float(self._copy) if self.ready else None


def mean(numbers: list[Deferred]) -> float | None:
    """Average the numbers that are there; None if there are none."""
    values = [value for value in (number.value for number in numbers) if value is not None]
    return sum(values) / len(values) if values else None
