"""The least that a ZeRO stage must send: the denominator of the volume ratio.

Source: section 7 of the ZeRO paper (arXiv 1910.02054), with rings, per rank.
"""

from __future__ import annotations


def least_wire_bytes(
    stage: int, *, gradient_bytes: int, parameter_bytes: int, micro_batches: int, num_ranks: int
) -> float:
    """Return the bytes that one rank must send in one step.

    With f = (n-1)/n, a reduce-scatter or an all-gather sends f of its payload. Stage 0 needs both
    for the gradients, stage 1 one for the gradients and one for the parameters. From stage 2 on
    gradients are partitioned, so each micro-batch scatters its own; in stage 3 each also gathers
    the parameters twice.

    Args:
        stage: ZeRO stage.
        gradient_bytes: Of all gradients, in the type in which they are sent.
        parameter_bytes: Of all parameters that are sent, likewise.
        micro_batches: Of one step on one rank.
        num_ranks: Data-parallel ranks.
    """
    share = (num_ranks - 1) / num_ranks
    if stage == 0:
        return 2 * share * gradient_bytes
    if stage == 1:
        return share * (gradient_bytes + parameter_bytes)
    if stage == 2:
        return share * (micro_batches * gradient_bytes + parameter_bytes)
    return micro_batches * share * (2 * parameter_bytes + gradient_bytes)
