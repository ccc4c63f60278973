"""Lists the configurations of the static search, and why the others are left out.

Micro-batches of 4, 8 and 16 of the 16 samples; buckets of 0.5, 5 and 500 million elements; three
ways to reduce a bucket: one all-reduce, a reduce to each owner, an all-reduce without the owners'
slices; ZeRO 0 to 3; gradients as they are, as bf16, int8 and fp8, and asynchronously. Left out is
what sends the same bytes in the same calls:

- overlap_comm, on a device without streams: gloo's calls block the training thread (two visits);
- micro-batches of ZeRO 0 and 1, which reduce once a window (visits at one bucket);
- the ways of ZeRO 0, which has one; those of ZeRO 1 and 2 under compression, where two ranks'
  slices go straight to their owners, and without reduce_scatter twice as much is sent.

ZeRO 3 sends more than any other stage: it is visited at the larger micro-batches only.
"""

from __future__ import annotations

from typing import Any

Configuration = dict[str, Any]

MICRO_BATCHES = (4, 8, 16)
BUCKETS = (500_000, 5_000_000, 500_000_000)
START: Configuration = {
    "zero_stage": 2,
    "micro_batch_samples": 4,
    "reduce_bucket_size": 500_000_000,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "overlap_comm": False,
    "gradient_compression": None,
    "asynchronous_reduction": False,
}
TO_ALL = {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": True}
TO_OWNERS = {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": False}
WHOLE = {"reduce_scatter": False}
WAYS = (TO_ALL, TO_OWNERS, WHOLE)
KINDS = ("bf16", "int8", "fp8")


def at(
    stage: int = 2, micro_batch: int = 16, bucket: int = 500_000_000, **others: Any
) -> Configuration:
    """Return the start configuration with some knobs changed."""
    return START | {
        "zero_stage": stage,
        "micro_batch_samples": micro_batch,
        "reduce_bucket_size": bucket,
        **others,
    }


def live_knobs() -> list[Configuration]:
    """Return the configurations that need no rebuild."""
    every = [
        at(2, micro_batch, bucket, **way)
        for micro_batch in MICRO_BATCHES
        for bucket in BUCKETS
        for way in WAYS
    ]
    return [*every, at(2, 16, 5_000_000, overlap_comm=True), at(2, 4, overlap_comm=True)]


def rebuilt() -> list[Configuration]:
    """Return the further configurations that need a rebuild."""
    return [
        *(at(1, 16, bucket, **way) for bucket in BUCKETS for way in WAYS),
        *(at(1, micro_batch) for micro_batch in (4, 8)),
        *(at(0, 16, bucket) for bucket in BUCKETS),
        *(at(0, micro_batch) for micro_batch in (4, 8)),
        *(
            at(3, micro_batch, 5_000_000, **way)
            for micro_batch in (8, 16)
            for way in (TO_ALL, WHOLE)
        ),
        at(3, 16, 5_000_000, param_persistence_threshold=10**9),
    ]


def statistical() -> list[Configuration]:
    """Return the further configurations with other rounding, asynchronous if supported."""
    formats = [{"gradient_compression": kind} for kind in KINDS]
    asynchronous = {"asynchronous_reduction": True}
    return [
        *(
            at(2, micro_batch, bucket, **compression)
            for compression in formats
            for micro_batch in MICRO_BATCHES
            for bucket in BUCKETS
        ),
        *(
            at(2, micro_batch, 5_000_000, **asynchronous, **compression)
            for compression in (formats[1], {})
            for micro_batch in MICRO_BATCHES
        ),
        *(at(1, 16, bucket, **compression) for compression in formats for bucket in BUCKETS),
        *(at(1, 16, 5_000_000, **asynchronous, **compression) for compression in formats),
        *(at(3, 16, 5_000_000, **compression) for compression in formats),
        *(at(0, 16, bucket, **compression) for compression in formats for bucket in BUCKETS),
        *(at(0, micro_batch, **compression) for compression in formats for micro_batch in (4, 8)),
    ]


SPACES = {"live knobs": live_knobs, "rebuilds": rebuilt, "statistical": statistical}
