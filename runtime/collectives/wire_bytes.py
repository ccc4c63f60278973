"""What a collective costs on the wire, by the backend's algorithm."""

from __future__ import annotations

import math

_GLOO_SEGMENT_BYTES = 1 << 20  # gloo's kMaxSegmentSize


def wire_factor(op: str, backend: str, group_size: int, payload_bytes: int = 0) -> float:
    """Return bytes sent per rank over payload bytes, with n the size of the group.

    Ring algorithms send 2(n-1)/n of the payload for all_reduce and (n-1)/n for its halves
    (nccl-tests, PERFORMANCE.md). gloo runs reduce_scatter as a full all_reduce. Rooted operations
    (broadcast, reduce, gather, scatter) are averages over the ranks. `payload_bytes` matters to
    gloo's reduce only.
    """
    if group_size < 2:
        return 0.0
    share = (group_size - 1) / group_size
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        return 2 * share
    if op == "reduce" and backend == "gloo":
        return _gloo_reduce_factor(group_size, payload_bytes)
    if op in ("gather", "scatter"):  # the payload is all parts, and only the root has them
        return share / group_size
    if op == "send":
        return 1.0
    if op in ("recv", "barrier"):
        return 0.0
    return share


def _gloo_reduce_factor(group_size: int, payload_bytes: int) -> float:
    """Follow gloo/reduce.cc: all but two segments go round the ring, then each part to the root.

    Segments are of 1 MiB at most, two or more for each rank, and as many for each.
    """
    needed = max(math.ceil(payload_bytes / _GLOO_SEGMENT_BYTES), 2 * group_size)
    num_segments = math.ceil(needed / group_size) * group_size
    return 1 - 2 / num_segments + (group_size - 1) / group_size**2
