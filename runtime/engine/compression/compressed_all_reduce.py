"""Sums over the ranks with compressed values on the wire.

First shot: each rank sends every other the values which that one sums (all-to-all), and adds up in
float32 what it gets to its own, which were never compressed. That is a reduce-scatter. Second shot:
it sends its sums to all (all-gather), and everybody takes them as decoded, so that all ranks have
the very same. Bytes and scales go in one buffer, so that a shot is one collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from deepspeed import comm as dist

from .collective_steps import CollectiveSteps
from .compression_error import CompressionError
from .formats import Format
from .kernels import decode, decode_onto, encode
from .shards import PIECE_VALUES, Span, chunks, even_sizes


class CompressedAllReduce:
    """Sums values over one group of ranks."""

    def __init__(self, form: Format, group: Any, tally: CompressionError) -> None:
        self._form = form
        self._group = group
        self._tally = tally
        self._rank = dist.get_rank(group=group)
        self.num_ranks = dist.get_world_size(group=group)

    def scatter(self, values: torch.Tensor, sizes: Sequence[int]) -> Iterator[CollectiveSteps]:
        """Yield the exchanges after which this rank's part of `values` is the sum over the ranks.

        The other parts end as the errors of what was sent.

        Args:
            values: float32, one dimension; the ranks' parts one after the other.
            sizes: How long they are, the same on all ranks.
        """
        for spans in chunks(sizes, _most(values)):
            yield self._reduce_scatter_phase(values, spans)

    def sum_for_all(self, values: torch.Tensor, result: torch.Tensor) -> Iterator[CollectiveSteps]:
        """Yield the exchanges after which `result` is the sum over the ranks, on all of them.

        `values` end as the errors of what this rank sent: its own values, and of its share the sum.
        """
        for spans in chunks(even_sizes(len(values), self.num_ranks), _most(values)):
            yield self._two_phase(values, result, spans)

    def _two_phase(
        self, values: torch.Tensor, result: torch.Tensor, spans: Sequence[Span]
    ) -> CollectiveSteps:
        yield from self._reduce_scatter_phase(values, spans)
        lengths = [self._form.wire_bytes(size) for _, size in spans]
        longest = max(lengths)
        own = torch.zeros(longest, dtype=torch.uint8, device=values.device)
        self._encode(values.narrow(0, *spans[self._rank]), own[: lengths[self._rank]])
        everybodys = own.new_empty(longest * self.num_ranks)
        yield dist.all_gather_into_tensor(everybodys, own, group=self._group, async_op=True)
        for wire, span, length in zip(everybodys.split(longest), spans, lengths, strict=True):
            decode(self._form, wire[:length], result.narrow(0, *span))

    def _reduce_scatter_phase(self, values: torch.Tensor, spans: Sequence[Span]) -> CollectiveSteps:
        lengths = [self._form.wire_bytes(size) for _, size in spans]
        own_length, lengths[self._rank] = lengths[self._rank], 0  # nobody sends to itself
        sent = torch.empty(sum(lengths), dtype=torch.uint8, device=values.device)
        for span, length, end in zip(spans, lengths, accumulate(lengths), strict=True):
            if length:
                self._encode(values.narrow(0, *span), sent[end - length : end])
        incoming = [own_length] * self.num_ranks
        incoming[self._rank] = 0
        received = sent.new_empty(sum(incoming))
        yield dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=incoming,
            input_split_sizes=lengths,
            group=self._group,
            async_op=True,
        )
        total = values.narrow(0, *spans[self._rank])
        for wire in received.split(own_length) if own_length else ():
            decode_onto(self._form, wire, total)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        if not len(values):
            return
        self._tally.will_send(values)
        encode(self._form, values, wire)
        self._tally.lost(values)


def _most(values: torch.Tensor) -> int | None:
    """On a GPU a message is launched for each piece, and NCCL cuts them itself."""
    return PIECE_VALUES if values.device.type == "cpu" else None
