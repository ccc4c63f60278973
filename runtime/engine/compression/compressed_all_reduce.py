"""Reduce-scatters and all-reduces compressed values, in steps that can overlap.

A compressed all-reduce has two phases, and each rank owns one part of the values.

In the reduce-scatter phase, each rank sends the other owners' parts to their owners (all-to-all).
The owner adds the received values in float32 to its own values, which are never compressed. In the
all-gather phase, each owner sends its sums to all ranks. Every rank uses the decoded sums, so that
all ranks have equal values. Codes and scales share one buffer, so each phase is one collective.

An exchange is a generator that starts a collective, yields its handle, and continues after the
collective has completed. Several exchanges overlap: while the bytes of one exchange are in flight,
the next exchange is encoded. All ranks run the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from deepspeed import comm as dist

from .encoding import BLOCK, WireFormat, decode, decode_add, encode
from .error_feedback import CompressionError

# Values of a rank's part in one message between CPUs: 256 KB of int8. Two messages in flight keep a
# link of 200 Mbit/s busy. With one message, gloo sends in one direction and then in the other, and
# a third to half of the link stays idle (measured).
CHUNK_VALUES = 1024 * BLOCK
# Values of all ranks' parts in one message between devices. NCCL splits messages itself. The limit
# bounds the memory for encoding, which is three times the float32 values of a part.
DEVICE_MESSAGE_VALUES = 2**26
_VALUE_BYTES = torch.float32.itemsize
_TEMPORARY_COPIES = 3  # of the float32 values that are encoded or decoded at once


Span = tuple[int, int]
"""Start and number of a rank's values."""

CollectiveSteps = Generator[Any, None, None]
"""Exchange that yields the handle of each collective it has started."""


class CompressedAllReduce:
    """Sums values over a process group, with compressed values in the messages."""

    def __init__(
        self, wire_format: WireFormat, group: Any, compression_error: CompressionError
    ) -> None:
        self._wire_format = wire_format
        self._group = group
        self._compression_error = compression_error
        self._rank = dist.get_rank(group=group)
        self.num_ranks = dist.get_world_size(group=group)

    def reduce_scatter(
        self, values: torch.Tensor, sizes: Sequence[int]
    ) -> Iterator[CollectiveSteps]:
        """Yield the exchanges after which this rank's part of `values` is the sum over the ranks.

        The other parts of `values` then hold the compression errors of the sent values.

        Args:
            values: float32, one dimension: the ranks' parts one after the other.
            sizes: Number of values of each part, the same on all ranks.
        """
        for spans in chunks(sizes, chunk_values(values.device.type, self.num_ranks)):
            yield self._reduce_scatter_phase(values, spans)

    def all_reduce(self, values: torch.Tensor, result: torch.Tensor) -> Iterator[CollectiveSteps]:
        """Yield the exchanges after which `result` is the sum over the ranks, on every rank.

        `values` then hold the compression errors of what this rank sent. In its own part this is
        the error of the sum, in the other parts the error of its own values.
        """
        step = chunk_values(values.device.type, self.num_ranks)
        for spans in chunks(even_sizes(len(values), self.num_ranks), step):
            yield self._two_phase(values, result, spans)

    def _two_phase(
        self, values: torch.Tensor, result: torch.Tensor, spans: Sequence[Span]
    ) -> CollectiveSteps:
        yield from self._reduce_scatter_phase(values, spans)
        lengths = [self._wire_format.wire_bytes(size) for _, size in spans]
        longest = max(lengths)
        own = torch.zeros(longest, dtype=torch.uint8, device=values.device)
        self._encode(values.narrow(0, *spans[self._rank]), own[: lengths[self._rank]])
        gathered = own.new_empty(longest * self.num_ranks)
        yield dist.all_gather_into_tensor(gathered, own, group=self._group, async_op=True)
        for wire, span, length in zip(gathered.split(longest), spans, lengths, strict=True):
            decode(self._wire_format, wire[:length], result.narrow(0, *span))

    def _reduce_scatter_phase(self, values: torch.Tensor, spans: Sequence[Span]) -> CollectiveSteps:
        lengths = [self._wire_format.wire_bytes(size) for _, size in spans]
        own_length, lengths[self._rank] = lengths[self._rank], 0  # no rank sends to itself
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
            decode_add(self._wire_format, wire, total)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        if not len(values):
            return
        self._compression_error.add_values(values)
        encode(self._wire_format, values, wire)
        self._compression_error.add_errors(values)


def even_sizes(num_values: int, num_ranks: int) -> list[int]:
    """Divide values evenly over ranks, in whole blocks; the last ranks may get fewer or none."""
    per_rank = -(-num_values // (num_ranks * BLOCK)) * BLOCK
    left = [max(0, num_values - rank * per_rank) for rank in range(num_ranks)]
    return [min(per_rank, rest) for rest in left]


def direct_is_cheaper(sizes: Sequence[int]) -> bool:
    """Return whether to send sums directly to their owners, instead of a two-phase all-reduce.

    In a direct reduction, each owner receives its part from all other ranks. This is cheap if the
    parts are of similar size, and expensive if one rank owns most of the bucket. In two phases each
    rank sums a part of equal size, which is sent twice.

    Args:
        sizes: Number of values whose sum each rank needs.
    """
    total, num_ranks = sum(sizes), len(sizes)
    direct = max(max((num_ranks - 1) * size, total - size) for size in sizes)
    return direct <= 2 * (num_ranks - 1) * total / num_ranks


def chunks(sizes: Sequence[int], step: int) -> Iterator[list[Span]]:
    """Yield the spans of all ranks that go in one message.

    Args:
        sizes: Number of values of each rank; the ranks' values follow each other.
        step: Values of a rank per message.
    """
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    for begin in range(0, max(sizes), step):
        yield [
            (start + min(begin, size), max(0, min(step, size - begin)))
            for start, size in zip(starts, sizes, strict=True)
        ]


def chunk_values(device_type: str, num_ranks: int) -> int:
    """Return the values of a rank's part in one message, a multiple of BLOCK.

    Args:
        device_type: Type of the device of the values, such as "cuda".
        num_ranks: Number of ranks that exchange them.
    """
    if device_type == "cpu":
        return CHUNK_VALUES
    return max(1, DEVICE_MESSAGE_VALUES // num_ranks // BLOCK) * BLOCK


def workspace_bytes(
    wire_format: WireFormat, num_values: int, num_ranks: int, device_type: str
) -> int:
    """Return an upper bound of the memory that reducing one bucket takes.

    These are the gradients and the sums in float32, the sent and the received codes, and temporary
    copies of the part that is encoded or decoded.

    Args:
        wire_format: The wire format of the values.
        num_values: Number of values in the bucket.
        num_ranks: Number of ranks that reduce it.
        device_type: Type of the bucket's device, such as "cuda".
    """
    part = min(even_sizes(num_values, num_ranks)[0], chunk_values(device_type, num_ranks))
    values = 2 * num_values + _TEMPORARY_COPIES * part
    padding = num_ranks * BLOCK  # each rank's part is padded to whole blocks
    return values * _VALUE_BYTES + 2 * wire_format.wire_bytes(num_values + padding)


class Reduction(Protocol):
    """Reduces one bucket, in one or more exchanges."""

    def exchanges(self) -> Iterable[CollectiveSteps]:
        """Return the exchanges to run."""

    def finish(self) -> None:
        """Use the results, once all exchanges have completed."""


class InFlightExchange:
    """Runs the collectives of an exchange one after another, each started by `advance`."""

    def __init__(self, steps: CollectiveSteps) -> None:
        """Start the first collective."""
        self._steps = steps
        self._work = next(steps, None)

    def advance(self) -> bool:
        """Wait for the present collective and start the next; return whether one was started."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = next(self._steps, None)
        return self._work is not None

    def discard(self) -> None:
        """Wait for the collective in flight, and discard its result."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._steps.close()


class InFlightReduction:
    """Reduces one bucket by exchanges that run at the same time."""

    def __init__(self, reduction: Reduction) -> None:
        """Start all exchanges of the reduction."""
        self._reduction = reduction
        self._in_flight = [InFlightExchange(steps) for steps in reduction.exchanges()]

    def advance(self) -> None:
        """Wait for the present collective of each exchange, and start its next collective."""
        self._in_flight = [exchange for exchange in self._in_flight if exchange.advance()]

    def complete(self) -> None:
        """Wait for all exchanges, and use the results."""
        while self._in_flight:
            self.advance()
        self._reduction.finish()

    def discard(self) -> None:
        """Wait for the collectives in flight, and discard their results."""
        for exchange in self._in_flight:
            exchange.discard()
        self._in_flight = []


def run_collective_steps(exchanges: Iterable[CollectiveSteps]) -> None:
    """Run exchanges to completion, each started before the earlier ones are waited for."""
    in_flight: list[InFlightExchange] = []
    for steps in exchanges:
        newest = InFlightExchange(steps)
        in_flight = [exchange for exchange in in_flight if exchange.advance()]
        in_flight.append(newest)
    while in_flight:
        in_flight = [exchange for exchange in in_flight if exchange.advance()]
