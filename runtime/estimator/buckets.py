"""Lays out parameters in flat buffers and gradients in buckets, as DeepSpeed's ZeRO does.

Traffic (`stage_*_traffic.py`) and memory (`gradient_memory.py`) are computed from both.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from .ds_options import DsOptions
from .model_shape import BYTES_OF, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """A param group as one flat buffer, divided into one equal part per rank.

    Attributes:
        offsets: Start of each parameter in the buffer, by its index in the model.
        numel: Elements of the buffer, padding included.
        dtype: Data type of the buffer.
        part: Elements of one rank's part.
    """

    offsets: Mapping[int, int]
    numel: int
    dtype: str
    part: int

    def slices(self, start: int, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (owner, elements) for each part that a range of the buffer overlaps."""
        end = start + numel
        while start < end:
            owner = start // self.part
            elements = min(end, (owner + 1) * self.part) - start
            yield owner, elements
            start += elements


def flatten(
    model: ModelShape, group: Sequence[int], options: DsOptions, num_ranks: int, *, aligned: int = 2
) -> FlatGroup:
    """Return the layout of a param group in DeepSpeed's flat buffer (stage_1_and_2.py:440-560)."""
    dtype = options.model_dtype or model.parameters[group[0]].dtype
    order = list(group)
    if options.round_robin_gradients:
        order = [index for first in range(num_ranks) for index in order[first::num_ranks]]
    alignment = 16 // gcd(16, BYTES_OF[dtype]) if options.parameter_alignment else 1
    offsets, end = {}, 0
    for position, index in enumerate(order):
        offsets[index] = end
        end += model.parameters[index].numel
        if position < len(order) - 1:
            end += -end % alignment
    numel = end + -end % (aligned * num_ranks)
    return FlatGroup(offsets=offsets, numel=numel, dtype=dtype, part=numel // num_ranks)


def fill_buckets(order: Sequence[int], sizes: Mapping[int, int], limit: int) -> list[list[int]]:
    """Divide parameters, in the order of their gradients, into buckets of at most `limit` elements.

    A larger parameter gets a bucket of its own.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in order:
        if not buckets or filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def combine_messages(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the elements of each message; one ends once it has more than `limit` elements."""
    messages, filled = [], 0
    for size in sizes:
        filled += size
        if filled > limit:
            messages.append(filled)
            filled = 0
    return [*messages, filled] if filled else messages
