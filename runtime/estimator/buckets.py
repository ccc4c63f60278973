"""How ZeRO-1 and 2 cut gradients into buckets, and what becomes of a bucket.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from .options import Options
from .shapes import BYTES_OF, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """A param group as one flat buffer, cut into one equal part per rank.

    `offsets` gives the place of each parameter, by its index in the model.
    """

    offsets: Mapping[int, int]
    numel: int
    dtype: str
    part: int

    def slices(self, start: int, numel: int) -> Iterator[tuple[int, int]]:
        """Yield (owner, elements) of the parts that a range of the buffer touches."""
        end = start + numel
        while start < end:
            owner = start // self.part
            taken = min(end, (owner + 1) * self.part) - start
            yield owner, taken
            start += taken


def flatten(
    model: ModelShape, group: Sequence[int], options: Options, num_ranks: int, *, aligned: int = 2
) -> FlatGroup:
    """Lay a param group out as DeepSpeed's flat buffer (stage_1_and_2.py:440-560)."""
    dtype = options.model_dtype or model.parameters[group[0]].dtype
    order = list(group)
    if options.round_robin_gradients:
        order = [index for first in range(num_ranks) for index in order[first::num_ranks]]
    alignment = 16 // gcd(16, BYTES_OF[dtype]) if options.parameter_alignment else 1
    offsets, end = {}, 0
    for place, index in enumerate(order):
        offsets[index] = end
        end += model.parameters[index].numel
        if place < len(order) - 1:
            end += -end % alignment
    numel = end + -end % (aligned * num_ranks)
    return FlatGroup(offsets=offsets, numel=numel, dtype=dtype, part=numel // num_ranks)


def fill_buckets(order: Sequence[int], sizes: Mapping[int, int], limit: int) -> list[list[int]]:
    """Cut parameters, as their gradients come, into buckets of at most `limit` elements.

    A larger parameter has a bucket of its own.
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


def cut_above(sizes: Sequence[int], limit: int) -> list[int]:
    """Add up tensors into messages; one is closed once it holds more than `limit` elements."""
    messages, filled = [], 0
    for size in sizes:
        filled += size
        if filled > limit:
            messages.append(filled)
            filled = 0
    return [*messages, filled] if filled else messages
