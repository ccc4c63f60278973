"""Starts an accumulation window: the ranks exchange the sizes of their local batches.

The same gather carries the status of each rank's tuner. "Window" is defined in docs/concepts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....errors import BatchError
from ...common.host_group import HostGroup
from .batch_tree import max_length, num_samples
from .micro_batches import Window


class TunerStatus(NamedTuple):
    """Status that a rank's tuner sends to all ranks at the start of a window.

    Attributes:
        exchanges_switch_request: Whether the ranks exchange the tuner's switch request after this
            window; the value of rank 0 decides.
        oom_risk: Probability, from 0 to 1, that this rank runs out of memory soon; nan if unknown.
        is_on_trial: Whether the window runs with a configuration on trial; the value of rank 0
            decides.
    """

    exchanges_switch_request: bool
    oom_risk: float
    is_on_trial: bool


TunerStatusSource = Callable[[], TunerStatus | None]


def no_tuner_status() -> None:
    """Return None, the status in a run without a tuner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatches:
    """Sizes of the local batches of all ranks in one window, the same on all ranks.

    Attributes:
        samples: Samples of each rank's local batch.
        micro_batch_samples: Each rank's requested maximum size of a micro-batch, in samples.
        length: The longest sequence of all ranks.
    """

    samples: Sequence[int]
    micro_batch_samples: Sequence[int]
    length: int

    def largest(self, micro_batches: int) -> list[int]:
        """Return the samples of each rank's largest micro-batch."""
        return [-(-samples // micro_batches) for samples in self.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAgreement:
    """What the ranks agreed on at the start of a window.

    Attributes:
        window: This rank's part of the window.
        local_batches: Sizes of the local batches of all ranks.
        guard_requested: Whether any rank requests the guard of collectives.
        records_agree: Whether all ranks have the same records of collectives.
        records_missing: Whether a rank requests votes because it has no records yet.
        tuner_statuses: Status of each rank's tuner, in rank order, the same on all ranks; empty
            without a tuner.
    """

    window: Window
    local_batches: LocalBatches
    guard_requested: bool
    records_agree: bool
    records_missing: bool
    tuner_statuses: Sequence[TunerStatus]


class _RankReport(NamedTuple):
    """Report of a rank about its local batch."""

    is_unusable: bool
    samples: int
    micro_batch_samples: int
    length: int
    requests_guard: bool
    records: int


def open_window(
    host_group: HostGroup,
    batch: Any,
    *,
    micro_batch_samples: int,
    exponent: int = 0,
    requests_guard: bool = False,
    records: int = 0,
    tuner_status: TunerStatus | None = None,
) -> WindowAgreement:
    """Exchange the sizes of all ranks' local batches, and the status of their tuners.

    Args:
        host_group: Group of all ranks; every rank must call this.
        batch: This rank's local batch.
        micro_batch_samples: Maximum samples of this rank's micro-batches.
        exponent: Exponent of the divisor of gradients, the same on all ranks; see `Window`.
        requests_guard: Whether this rank requests the guard, because its memory is low.
        records: Digest of this rank's records of collectives, below 2**53; 0 without records, and
            negative to request votes instead.
        tuner_status: Status of this rank's tuner. Either all ranks pass a status or no rank does.

    Raises:
        BatchError: A rank's local batch cannot be trained on; raised on all ranks.
    """
    problem, samples, length = _measure(batch)
    own = _RankReport(
        problem is not None, samples, micro_batch_samples, length, requests_guard, records
    )
    # Use plain lists. The caches are cold here, and even on this little data a numpy call takes
    # 20 us.
    rows: list[list[float]] = host_group.all_gather([*own, *(tuner_status or ())]).tolist()
    reports = [_RankReport._make(row[: len(own)]) for row in rows]
    _raise_if_unusable(problem, reports)
    local_batches = LocalBatches(
        samples=[int(each.samples) for each in reports],
        micro_batch_samples=[int(each.micro_batch_samples) for each in reports],
        length=int(max(each.length for each in reports)),
    )
    window = Window(
        batch=batch,
        num_samples=samples,
        total_samples=sum(local_batches.samples),
        world_size=host_group.world_size,
        exponent=exponent,
        longest=local_batches.length,
    )
    has_tuner = tuner_status is not None
    return WindowAgreement(
        window=window,
        local_batches=local_batches,
        guard_requested=any(each.requests_guard for each in reports),
        records_agree=all(each.records == records for each in reports),
        records_missing=any(each.records < 0 for each in reports),
        tuner_statuses=[TunerStatus._make(row[len(own) :]) for row in rows] if has_tuner else [],
    )


def _measure(batch: Any) -> tuple[BatchError | None, int, int]:
    """Return the error of an unusable batch or None, the number of samples, and the length."""
    try:
        return None, num_samples(batch), max_length(batch)
    except BatchError as problem:
        return problem, 0, 0


def _raise_if_unusable(problem: BatchError | None, reports: Sequence[_RankReport]) -> None:
    """Raise this rank's own error, or an error that names the ranks with unusable batches."""
    if problem is not None:
        raise problem
    unusable = [str(rank) for rank, report in enumerate(reports) if report.is_unusable]
    if unusable:
        ranks = ", ".join(unusable)
        raise BatchError(f"the local batch of rank {ranks} cannot be trained on; see its error")
