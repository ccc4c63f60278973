"""Measures compression errors, and adds them to the next gradients (error feedback)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...common.device_scalar import ScalarOrPending, read, scalar


class Residuals:
    """Holds compression errors by parameter name, to be added to the gradients of the next window.

    A window works on a copy of the residuals. `commit` keeps the copy, and `discard` drops it, so
    that a window that is run again starts from the same residuals. Each of the two copies has as
    many values as the gradients. Together they take 8 bytes per parameter in fp32 and 4 bytes in
    bf16, on every rank at any ZeRO stage.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._committed: dict[str, torch.Tensor] = {}
        self._window: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # memory of earlier windows, for reuse

    def of(self, name: str, num_values: int, device: torch.device) -> torch.Tensor:
        """Return a parameter's errors in this window, to be read and written in place."""
        if name not in self._window:
            self._window[name] = self._copy_of_committed(name, num_values, device)
        return self._window[name]

    def _copy_of_committed(self, name: str, num_values: int, device: torch.device) -> torch.Tensor:
        own = self._spare.pop(name, None)
        if own is None or own.device != device:
            own = torch.empty(num_values, dtype=self._dtype, device=device)
        committed = self._committed.get(name)
        return own.zero_() if committed is None else own.copy_(committed)

    def commit(self) -> None:
        """Keep the window's residuals."""
        for name in self._window:
            if name in self._committed:
                self._spare[name] = self._committed[name]
        self._committed.update(self._window)
        self._window = {}

    def discard(self) -> None:
        """Drop the window's residuals."""
        self._spare.update(self._window)
        self._window = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the committed residuals, on the host."""
        return {name: kept.to("cpu", copy=True) for name, kept in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the residuals; each moves to its device as the next window starts."""
        self._committed = {name: kept.to(self._dtype, copy=True) for name, kept in state.items()}
        self._window, self._spare = {}, {}


class CompressionError:
    """Computes a window's relative compression error: norm of errors over norm of gradients.

    Squares are summed on the device, without waiting for it.
    """

    def __init__(self) -> None:
        self._values_squared: torch.Tensor | None = None
        self._errors_squared: torch.Tensor | None = None
        self._last: ScalarOrPending = None

    def add_values(self, values: torch.Tensor) -> None:
        """Add values that are about to be compressed."""
        square = torch.dot(values, values)
        before = self._values_squared
        self._values_squared = square if before is None else before + square

    def add_errors(self, errors: torch.Tensor) -> None:
        """Add the errors of compressed values."""
        square = torch.dot(errors, errors)
        before = self._errors_squared
        self._errors_squared = square if before is None else before + square

    def close(self) -> None:
        """End a window, and start to copy its ratio to the host."""
        if self._values_squared is not None and self._errors_squared is not None:
            self._last = scalar((self._errors_squared / self._values_squared).sqrt())
        self.discard()

    def discard(self) -> None:
        """Drop the window's sums."""
        self._values_squared = self._errors_squared = None

    def ratio(self) -> float | None:
        """Return the last window's ratio; None if unknown or if gradients were not finite."""
        last = read(self._last)
        return last if last is not None and math.isfinite(last) else None
