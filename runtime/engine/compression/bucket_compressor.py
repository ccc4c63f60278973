"""Packs gradients into flat float32 buffers, and adds the residuals of earlier windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .compressed_all_reduce import CompressedAllReduce
from .encoding import WireFormat
from .error_feedback import CompressionError, Residuals

ParameterNames = dict[int, str]
"""Parameter names by the parameter's id()."""


class GradientSpan(NamedTuple):
    """Location of a contiguous part of one parameter's gradient.

    Attributes:
        name: Name of the parameter.
        size: Number of values of the whole gradient.
        start: Index of the first value.
        length: Number of values.
    """

    name: str
    size: int
    start: int
    length: int


class ParameterIndex:
    """Maps memory addresses to the parameters whose gradients are about to be reduced."""

    def __init__(self, gradients: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Index contiguous gradients by address. They must not move while the index is in use."""
        self._gradients = sorted(
            (gradient.data_ptr(), gradient.numel(), name)
            for name, gradient in gradients
            if gradient.numel()
        )
        self._addresses = [address for address, *_ in self._gradients]

    def spans_of(self, tensor: torch.Tensor) -> list[GradientSpan]:
        """Return the gradient spans that a contiguous tensor consists of, in the tensor's order.

        Raises:
            LookupError: Part of the tensor does not belong to an indexed gradient.
        """
        address, left = tensor.data_ptr(), tensor.numel()
        spans = []
        while left:
            at = bisect_right(self._addresses, address) - 1
            begin, size, name = self._gradients[at] if at >= 0 else (0, 0, "")
            start = (address - begin) // tensor.element_size()
            length = min(left, size - start)
            if at < 0 or length <= 0:
                raise LookupError("the tensor to reduce belongs to no gradient of its bucket")
            spans.append(GradientSpan(name, size, start, length))
            address += length * tensor.element_size()
            left -= length
        return spans


class BucketCompressor:
    """Packs gradients for a compressed reduction, and keeps the compression errors afterwards.

    Attributes:
        gradient_scale: Factor by which this window's gradients are multiplied. Residuals are kept
            without this factor, so that they fit a window with another factor.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        residuals: Residuals | None,
        compression_error: CompressionError,
    ) -> None:
        """Create a compressor; without `residuals` it has no error feedback."""
        self._wire_format = wire_format
        self._residuals = residuals
        self._compression_error = compression_error
        self.gradient_scale = 1.0

    def exchange(self, group: Any) -> CompressedAllReduce:
        """Return a compressed all-reduce between the ranks of a group."""
        return CompressedAllReduce(self._wire_format, group, self._compression_error)

    def pack(
        self,
        gradients: Sequence[torch.Tensor],
        spans: Sequence[Sequence[GradientSpan]],
        divisor: float,
    ) -> torch.Tensor:
        """Return gradients divided by `divisor`, flat and in float32, plus their residuals.

        Args:
            gradients: Parts of gradients.
            spans: The gradient spans that each part consists of.
            divisor: Divisor that turns the sum over the ranks into an average.
        """
        total = sum(gradient.numel() for gradient in gradients)
        values = torch.empty(total, dtype=torch.float32, device=gradients[0].device)
        parts = values.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.reshape(-1))
        if divisor != 1.0:
            values.div_(divisor)
        for part, residual in self._with_residuals(values, spans):
            part.add_(residual, alpha=self.gradient_scale)
        return values

    def keep_errors(self, errors: torch.Tensor, spans: Sequence[Sequence[GradientSpan]]) -> None:
        """Keep errors as residuals; an error that is not finite becomes 0."""
        if self._residuals is None:
            return
        errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for part, residual in self._with_residuals(errors, spans):
            torch.mul(part, 1.0 / self.gradient_scale, out=residual)

    def _with_residuals(
        self, values: torch.Tensor, spans: Sequence[Sequence[GradientSpan]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the values of each span with its residuals; nothing without error feedback."""
        if self._residuals is None:
            return
        at = 0
        for span in (span for of_one in spans for span in of_one):
            residual = self._residuals.of(span.name, span.size, values.device)
            yield (
                values.narrow(0, at, span.length),
                residual.narrow(0, span.start, span.length),
            )
            at += span.length
