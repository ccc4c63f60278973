"""How a window begins: the ranks tell each other what they were given."""

from __future__ import annotations

from typing import Any

from ..errors import BatchError
from .recovery.plans import Share
from .window.agreement import Agreement
from .window.micro_batches import Window
from .window.samples import longest, num_samples


def open_window(
    agreement: Agreement,
    batch: Any,
    *,
    micro_batch_samples: int,
    exponent: int = 0,
    asks_for_guard: bool = False,
) -> tuple[Window, Share, bool]:
    """Return this rank's window, what all ranks know of it, and whether any asks for the guard.

    Args:
        agreement: Of all ranks; every one must call this.
        batch: This rank's share of the global batch.
        micro_batch_samples: What this rank would have a micro-batch hold at most.
        exponent: The same on all ranks; see `Window`.
        asks_for_guard: Whether this rank's memory is low.

    Raises:
        BatchError: A rank's share cannot be trained on; raised on all ranks.
    """
    problem, samples, length = _look(batch)
    own = [problem is not None, samples, micro_batch_samples, length, asks_for_guard]
    told = agreement.gather(own)
    _refuse(problem, told[:, 0])
    window = Window(
        batch=batch,
        num_samples=samples,
        total_samples=int(told[:, 1].sum()),
        world_size=agreement.world_size,
        exponent=exponent,
        longest=int(told[:, 3].max()),
    )
    share = Share(
        samples=[int(each) for each in told[:, 1]],
        wanted=[int(each) for each in told[:, 2]],
        length=window.longest,
    )
    return window, share, bool(told[:, 4].any())


def _look(batch: Any) -> tuple[BatchError | None, int, int]:
    """Return what is wrong with a batch, else its samples and length."""
    try:
        return None, num_samples(batch), longest(batch)
    except BatchError as problem:
        return problem, 0, 0


def _refuse(problem: BatchError | None, flags: Any) -> None:
    """Raise this rank's problem, or that of another."""
    if problem is not None:
        raise problem
    if flags.any():
        ranks = ", ".join(str(rank) for rank in flags.nonzero()[0])
        raise BatchError(f"the share of rank {ranks} cannot be trained on; see there")
