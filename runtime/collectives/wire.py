"""What a collective costs on the wire, by the backend's algorithm."""

from __future__ import annotations


def wire_factor(op: str, backend: str, group_size: int) -> float:
    """Return bytes sent per rank over payload bytes, with n the size of the group.

    Ring algorithms send 2(n-1)/n of the payload for all_reduce and (n-1)/n for its halves
    (nccl-tests, PERFORMANCE.md). gloo runs reduce_scatter as a full all_reduce; its reduce was
    measured on loopback counters to send 0.89 of the payload for n = 2 and 0.94 for n = 4. Rooted
    operations (broadcast, gather, scatter) are averages over the ranks.
    """
    if group_size < 2:
        return 0.0
    share = (group_size - 1) / group_size
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        return 2 * share
    if op == "reduce" and backend == "gloo":
        return 0.89 if group_size == 2 else 0.94
    if op in ("gather", "scatter"):  # the payload is all parts, and only the root has them
        return share / group_size
    if op == "send":
        return 1.0
    if op in ("recv", "barrier"):
        return 0.0
    return share
