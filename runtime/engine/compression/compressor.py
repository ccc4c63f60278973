"""Gradients gathered into what one exchange carries, with the errors of earlier ones on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .compressed_all_reduce import CompressedAllReduce
from .compression_error import CompressionError
from .formats import Format
from .parameter_index import GradientSpan
from .residuals import Residuals


class Compressor:
    """Fills and empties the buffers of exchanges.

    Attributes:
        unit: What the gradients of this window are multiplied by; errors are kept without it.
    """

    def __init__(self, form: Format, residuals: Residuals | None, tally: CompressionError) -> None:
        """`residuals`: what was lost before; None to let errors be."""
        self._form = form
        self._residuals = residuals
        self._tally = tally
        self.unit = 1.0

    def exchange(self, group: Any) -> CompressedAllReduce:
        """Return an exchange between the ranks of a group."""
        return CompressedAllReduce(self._form, group, self._tally)

    def load(
        self,
        gradients: Sequence[torch.Tensor],
        places: Sequence[Sequence[GradientSpan]],
        divisor: float,
    ) -> torch.Tensor:
        """Return gradients over divisor, float32 and flat, with what earlier ones lost.

        Args:
            gradients: Stretches of them.
            places: Whose stretches they are.
            divisor: What makes an average of their sum.
        """
        total = sum(gradient.numel() for gradient in gradients)
        values = torch.empty(total, dtype=torch.float32, device=gradients[0].device)
        parts = values.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.reshape(-1))
        if divisor != 1.0:
            values.div_(divisor)
        for part, residual in self._stretches(values, places):
            part.add_(residual, alpha=self.unit)
        return values

    def keep(self, errors: torch.Tensor, places: Sequence[Sequence[GradientSpan]]) -> None:
        """Keep errors for the next time; those that are not finite are none."""
        if self._residuals is None:
            return
        errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for part, residual in self._stretches(errors, places):
            torch.mul(part, 1.0 / self.unit, out=residual)

    def _stretches(
        self, values: torch.Tensor, places: Sequence[Sequence[GradientSpan]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each stretch of the values with what is kept of it."""
        if self._residuals is None:
            return
        at = 0
        for place in (place for of_one in places for place in of_one):
            residual = self._residuals.of(place.name, place.size, values.device)
            yield (
                values.narrow(0, at, place.length),
                residual.narrow(0, place.start, place.length),
            )
            at += place.length
