"""How large a window's errors were beside its gradients, without waiting for a device."""

from __future__ import annotations

import math

import torch

from ...common.device_scalar import Number, number, read


class CompressionError:
    """Adds up squares of what was sent and what was lost of it, on the device."""

    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None
        self._last: Number = None

    def will_send(self, values: torch.Tensor) -> None:
        """Count values that are about to be compressed."""
        square = torch.dot(values, values)
        self._sent = square if self._sent is None else self._sent + square

    def lost(self, errors: torch.Tensor) -> None:
        """Count what compressing them lost."""
        square = torch.dot(errors, errors)
        self._lost = square if self._lost is None else self._lost + square

    def close(self) -> None:
        """End a window, and begin to read its ratio."""
        if self._sent is not None and self._lost is not None:
            self._last = number((self._lost / self._sent).sqrt())
        self.drop()

    def drop(self) -> None:
        """Forget the window."""
        self._sent = self._lost = None

    def ratio(self) -> float | None:
        """Return the last window's ratio; None if not known yet, or gradients were not finite."""
        last = read(self._last)
        return last if last is not None and math.isfinite(last) else None
