"""How a window begins: the ranks tell each other what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BatchError
from .recovery.plans import Share
from .window.agreement import Agreement
from .window.micro_batches import Window
from .window.samples import longest, num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A window about to begin.

    Attributes:
        window: This rank's.
        share: What all ranks know of it.
        guarded: Whether any rank asks for the guard.
        asides: What every rank told besides, of shape [world_size, numbers]; the same on all.
    """

    window: Window
    share: Share
    guarded: bool
    asides: npt.NDArray[np.float64]


def open_window(
    agreement: Agreement,
    batch: Any,
    *,
    micro_batch_samples: int,
    exponent: int = 0,
    asks_for_guard: bool = False,
    asides: Sequence[float] = (),
) -> Opened:
    """Let the ranks tell each other what they were given.

    Args:
        agreement: Of all ranks; every one must call this.
        batch: This rank's share of the global batch.
        micro_batch_samples: What this rank would have a micro-batch hold at most.
        exponent: The same on all ranks; see `Window`.
        asks_for_guard: Whether this rank's memory is low.
        asides: Numbers that others of the run want told; as many on all ranks.

    Raises:
        BatchError: A rank's share cannot be trained on; raised on all ranks.
    """
    problem, samples, length = _look(batch)
    own = [problem is not None, samples, micro_batch_samples, length, asks_for_guard]
    told = agreement.gather([*own, *asides])
    _refuse(problem, told[:, 0])
    share = _share(told)
    window = Window(
        batch=batch,
        num_samples=samples,
        total_samples=sum(share.samples),
        world_size=agreement.world_size,
        exponent=exponent,
        longest=share.length,
    )
    return Opened(
        window=window, share=share, guarded=bool(told[:, 4].any()), asides=told[:, len(own) :]
    )


def _share(told: npt.NDArray[np.float64]) -> Share:
    return Share(
        samples=[int(each) for each in told[:, 1]],
        wanted=[int(each) for each in told[:, 2]],
        length=int(told[:, 3].max()),
    )


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
