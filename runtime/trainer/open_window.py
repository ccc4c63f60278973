"""Start of a window: the ranks exchange the sizes of their shares, and their notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import BatchError
from ..common.host_group import HostGroup
from .oom_recovery.sizing import BatchShares
from .window.micro_batches import Window
from .window.samples import max_length, num_samples


class RankNotice(NamedTuple):
    """What a rank's tuner sends to all ranks at the start of a window.

    Attributes:
        exchanges_order: Whether the ranks exchange the tuner's order after this window; rank 0's
            notice decides.
        oom_risk: Probability, from 0 to 1, that this rank runs out of memory soon.
        is_on_trial: Whether the window runs with a configuration on trial; rank 0's notice decides.
    """

    exchanges_order: bool
    oom_risk: float
    is_on_trial: bool


def no_notice() -> None:
    """Return no notice, as a run without a tuner does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAgreement:
    """Agreement of the ranks at the start of a window.

    Attributes:
        window: This rank's part of the window.
        share: Each rank's share of the batch.
        guard_requested: Whether any rank requests the guard.
        notices: Each rank's notice, in rank order, the same on all ranks; empty if none were sent.
    """

    window: Window
    share: BatchShares
    guard_requested: bool
    notices: Sequence[RankNotice]


class _RankShare(NamedTuple):
    """Message of each rank on its share of the batch."""

    is_unusable: bool
    samples: int
    micro_batch_samples: int
    length: int
    requests_guard: bool


def open_window(
    host_group: HostGroup,
    batch: Any,
    *,
    micro_batch_samples: int,
    exponent: int = 0,
    requests_guard: bool = False,
    notice: RankNotice | None = None,
) -> WindowAgreement:
    """Exchange the sizes of all ranks' shares of the batch, and their notices.

    Args:
        host_group: Group of all ranks; every rank must call this.
        batch: This rank's share of the global batch.
        micro_batch_samples: Samples that this rank's micro-batches are to hold at most.
        exponent: Exponent of the divisor of gradients, the same on all ranks; see `Window`.
        requests_guard: Whether this rank's memory is low.
        notice: Notice of the tuner; given on all ranks or on none.

    Raises:
        BatchError: A rank's share cannot be trained on; raised on all ranks.
    """
    problem, samples, length = _measure(batch)
    own = _RankShare(problem is not None, samples, micro_batch_samples, length, requests_guard)
    # Caches are cold by now, so each numpy call on so little data would take 20 us or more.
    rows: list[list[float]] = host_group.all_gather([*own, *(notice or ())]).tolist()
    shares = [_RankShare._make(row[: len(own)]) for row in rows]
    _raise_if_unusable(problem, shares)
    share = BatchShares(
        samples=[int(each.samples) for each in shares],
        wanted=[int(each.micro_batch_samples) for each in shares],
        length=int(max(each.length for each in shares)),
    )
    window = Window(
        batch=batch,
        num_samples=samples,
        total_samples=sum(share.samples),
        world_size=host_group.world_size,
        exponent=exponent,
        longest=share.length,
    )
    return WindowAgreement(
        window=window,
        share=share,
        guard_requested=any(each.requests_guard for each in shares),
        notices=[] if notice is None else [RankNotice._make(row[len(own) :]) for row in rows],
    )


def _measure(batch: Any) -> tuple[BatchError | None, int, int]:
    """Return why a batch cannot be used, else None, its samples and its length."""
    try:
        return None, num_samples(batch), max_length(batch)
    except BatchError as problem:
        return problem, 0, 0


def _raise_if_unusable(problem: BatchError | None, shares: Sequence[_RankShare]) -> None:
    """Raise this rank's problem, or name the ranks that have one."""
    if problem is not None:
        raise problem
    unusable = [str(rank) for rank, share in enumerate(shares) if share.is_unusable]
    if unusable:
        ranks = ", ".join(unusable)
        raise BatchError(f"the share of rank {ranks} cannot be trained on; see the error there")
