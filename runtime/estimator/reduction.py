"""What gradients take while ZeRO-1 and 2 reduce them, bucket by bucket, at the fullest moment.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (lines below).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .buckets import FlatGroup, fill_buckets
from .options import Options
from .shapes import BYTES_OF, ModelShape

_NORM_BYTES = 8  # norms are taken in fp64 (zero/utils.py:59), of a copy of one tensor at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One reduction of all gradients, in the order `order`.

    Attributes:
        sizes: Elements of each parameter that is trained.
        owners: The ranks of which each owns a piece.
        order: Parameters as they are put into buckets.
        part: Elements of a rank's part.
        width: Bytes of an element of a gradient.
        options: The configuration.
    """

    sizes: Mapping[int, int]
    owners: Mapping[int, Collection[int]]
    order: Sequence[int]
    part: int
    width: int
    options: Options

    @classmethod
    def of(
        cls, model: ModelShape, groups: Sequence[FlatGroup], options: Options, width: int
    ) -> Reduction:
        """Read what a reduction depends on."""
        sizes = {index: model.parameters[index].numel for g in groups for index in g.offsets}
        as_they_come = options.stage == 2 or options.overlap_comm
        return cls(
            sizes=sizes,
            owners={
                index: {owner for owner, _ in group.slices(offset, sizes[index])}
                for group in groups
                for index, offset in group.offsets.items()
            },
            order=model.gradient_order() if as_they_come else list(sizes),
            part=sum(group.part for group in groups),
            width=width,
            options=options,
        )

    @property
    def compact(self) -> bool:
        """Whether sums are kept in fp32, as the rank's part (line 1258)."""
        return self.width < BYTES_OF[self.options.accumulation_dtype] == BYTES_OF["fp32"]

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is offloaded."""
        return self.options.offload_optimizer != "none"

    @property
    def contiguous(self) -> bool:
        """Whether gradients are copied into buckets."""
        return self.options.contiguous_gradients or self.offloads

    @property
    def staged_width(self) -> int:
        """Bytes of an element in a bucket; ZeRO-1 puts its accumulators there."""
        first = self.options.stage == 1
        return BYTES_OF[self.options.accumulation_dtype] if first else self.width

    @property
    def owned(self) -> int:
        """Elements of the parameters of which a rank owns at least a piece; the most of any."""
        return max(self._owned_by_rank().values(), default=0)

    def peak(self) -> int:
        """Return the bytes of gradients and copies at the fullest moment, of the fullest rank."""
        owned = self._owned_by_rank()
        # With many ranks the ends and the one that owns most stand for all.
        ranks = {min(owned), max(owned), max(owned, key=lambda rank: owned[rank])} if owned else ()
        return max((bytes_ for rank in ranks for bytes_ in self._course(rank, owned)), default=0)

    def _owned_by_rank(self) -> dict[int, int]:
        owned: dict[int, int] = {}
        for index, owners in self.owners.items():
            for owner in owners:
                owned[owner] = owned.get(owner, 0) + self.sizes[index]
        return owned

    def _course(self, rank: int, owned: Mapping[int, int]) -> Iterator[int]:
        """Yield the bytes as each bucket is reduced, and after it."""
        first = self.options.stage == 1
        collected = sum(self.sizes.values()) * self.staged_width if first else 0
        kept = self.part * BYTES_OF["fp32"] if self.compact else 0
        copies = not self.compact and not self.offloads
        for bucket in fill_buckets(self.order, self.sizes, self.options.reduce_bucket_size):
            elements = sum(self.sizes[index] for index in bucket)
            own = [index for index in bucket if rank in self.owners[index]]
            fits = self.contiguous and elements <= self.options.reduce_bucket_size
            waiting = 0 if first or fits else elements * self.width
            if first and fits:  # copied into the bucket, which frees them
                collected -= elements * self.staged_width
            yield collected + kept + waiting + self._copies(bucket, own)
            if own and copies and self.contiguous:  # allocated whole for the first (line 2192)
                kept = owned[rank] * self.width
            elif copies and not first:
                kept += sum(self.sizes[index] for index in own) * self.width
            yield collected + kept + (waiting if self.contiguous else 0)
            if first and self.contiguous and not fits:
                collected -= sum(self.sizes[index] for index in own) * self.staged_width

    def _copies(self, bucket: Sequence[int], own: Sequence[int]) -> int:
        """Return the message of a bucket, or what is done with it afterwards if that takes more.

        A bucket is copied unless all of it goes to one owner. Offloading takes the norm of each
        gradient on the device (line 1889).
        """
        elements = sum(self.sizes[index] for index in bucket)
        owners = {owner for index in bucket for owner in self.owners[index]}
        several = (len(owners) > 1 and self.options.reduce_scatter) or self.compact
        copied = several if self.contiguous else len(bucket) > 1
        largest = max((self.sizes[index] for index in own), default=0)
        in_fp32 = self.compact * min(largest, self.part) * BYTES_OF["fp32"]  # line 1326
        message = elements * self.staged_width * copied + in_fp32
        return max(message, self.offloads * largest * _NORM_BYTES)
