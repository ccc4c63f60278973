"""Which parameters a piece of a gradient bucket belongs to, by its address in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch


class GradientSpan(NamedTuple):
    """A stretch of one parameter's gradient.

    Attributes:
        name: The parameter's.
        size: How many values it has in all.
        start: Where the stretch begins.
        length: Its values.
    """

    name: str
    size: int
    start: int
    length: int


class ParameterIndex:
    """Knows the gradients that are about to be reduced."""

    def __init__(self, gradients: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Note where they are; they are contiguous, and stay there while this is used."""
        known = sorted(
            (gradient.data_ptr(), gradient.numel(), name)
            for name, gradient in gradients
            if gradient.numel()
        )
        self._addresses = [address for address, *_ in known]
        self._known = known

    def of(self, piece: torch.Tensor) -> list[GradientSpan]:
        """Return what a contiguous piece consists of, in its order.

        Raises:
            LookupError: Part of it is no gradient that was noted.
        """
        address, left = piece.data_ptr(), piece.numel()
        found = []
        while left:
            at = bisect_right(self._addresses, address) - 1
            begin, size, name = self._known[at] if at >= 0 else (0, 0, "")
            start = (address - begin) // piece.element_size()
            length = min(left, size - start)
            if at < 0 or length <= 0:
                raise LookupError("a gradient is reduced that is in no bucket of this reduction")
            found.append(GradientSpan(name, size, start, length))
            address += length * piece.element_size()
            left -= length
        return found
