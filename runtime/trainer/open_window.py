"""How a window begins: the ranks tell each other what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import BatchError
from ..common.host_group import HostGroup
from .oom_recovery.micro_batch_planner import BatchShares
from .window.micro_batches import Window
from .window.samples import max_length, num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAgreement:
    """A window about to begin.

    Attributes:
        window: This rank's.
        share: What all ranks know of it.
        guarded: Whether any rank asks for the guard.
        asides: What every rank told besides, by rank; the same on all.
    """

    window: Window
    share: BatchShares
    guarded: bool
    asides: Sequence[Sequence[float]]


def open_window(
    host_group: HostGroup,
    batch: Any,
    *,
    micro_batch_samples: int,
    exponent: int = 0,
    asks_for_guard: bool = False,
    asides: Sequence[float] = (),
) -> WindowAgreement:
    """Let the ranks tell each other what they were given.

    Args:
        host_group: Of all ranks; every one must call this.
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
    # Its caches are cold by now, so that each call of numpy on so little would take 20 us or more.
    told: list[list[float]] = host_group.all_gather([*own, *asides]).tolist()
    _refuse(problem, told)
    share = _share(told)
    window = Window(
        batch=batch,
        num_samples=samples,
        total_samples=sum(share.samples),
        world_size=host_group.world_size,
        exponent=exponent,
        longest=share.length,
    )
    guarded, others = any(rank[4] for rank in told), [rank[len(own) :] for rank in told]
    return WindowAgreement(window=window, share=share, guarded=guarded, asides=others)


def _share(told: Sequence[Sequence[float]]) -> BatchShares:
    return BatchShares(
        samples=[int(rank[1]) for rank in told],
        wanted=[int(rank[2]) for rank in told],
        length=int(max(rank[3] for rank in told)),
    )


def _look(batch: Any) -> tuple[BatchError | None, int, int]:
    """Return what is wrong with a batch, else its samples and length."""
    try:
        return None, num_samples(batch), max_length(batch)
    except BatchError as problem:
        return problem, 0, 0


def _refuse(problem: BatchError | None, told: Sequence[Sequence[float]]) -> None:
    """Raise this rank's problem, or that of another."""
    if problem is not None:
        raise problem
    having = [str(rank) for rank, (has_problem, *_) in enumerate(told) if has_problem]
    if having:
        ranks = ", ".join(having)
        raise BatchError(f"the share of rank {ranks} cannot be trained on; see there")
