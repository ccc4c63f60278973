"""Computes what a rank did in the last minute, from the counters of successive scrapes.

Of slow steps, the last minute is the time of at least ten steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...metrics.catalog import communication, training
from ...metrics.catalog.labels import CAUSE, NON_TRAINING_PHASES, PHASES
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Snapshot
from ..live_page.step_history import Point

# The period of ratios and rates.
WINDOW_SECONDS = 60.0
# Exposed seconds and their causes are published some seconds later than the phases, so that the
# ratio over a shorter period would be wrong. Until then, figures are those since the start.
MIN_SECONDS = 20.0
MIN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Increases of counters. Seconds are sums over the steps of one or several ranks.

    Attributes:
        is_whole: Whether it is the time since the start of the processes.
        period_seconds: The wall time that it covers.
        ranks: The number of ranks.
        exposed: None if no exposed time is known. So are samples and tokens.
        causes: Exposed seconds by cause; empty if none is known.
    """

    is_whole: bool
    period_seconds: float
    ranks: int
    steps: float
    phases: Mapping[str, float]
    exposed: float | None
    wait: float | None
    causes: Mapping[str, float]
    samples: float | None
    tokens: float | None
    nonfinite_losses: float

    @property
    def training_seconds(self) -> float:
        """Wall time of the steps, without evaluation and checkpoints."""
        return sum(s for phase, s in self.phases.items() if phase not in NON_TRAINING_PHASES)

    def point(self, ended_at: float) -> Point:
        """Return the increases of one rank as a point of its history, for the current problems."""
        return Point(
            step=0,
            ended_at=ended_at,
            seconds=sum(self.phases.values()),
            steps=int(self.steps),
            phase_seconds=[self.phases.get(phase, 0.0) for phase in PHASES],
            timed_seconds=0.0 if self.exposed is None else self.training_seconds,
            exposed_seconds=self.exposed or 0.0,
            loss_sum=0.0,
            loss_steps=0,
            nonfinite_losses=int(self.nonfinite_losses),
            samples=int(self.samples or 0),
            tokens=int(self.tokens or 0),
            peak_bytes={},
        )


class RecentSeconds:
    """The scrapes of one rank in the last minute, or longer if it has less than MIN_STEPS steps.

    Attributes:
        nonfinite_at: Time of the last scrape with more losses that are not finite than the scrape
            before; None without one.

    Examples:
        >>> recent = RecentSeconds()
        >>> recent.add(snapshot, now=12.0)
        >>> recent.spent().exposed
        0.4
    """

    def __init__(self) -> None:
        self._scrapes: deque[tuple[float, Snapshot]] = deque()
        self.nonfinite_at: float | None = None

    def add(self, snapshot: Snapshot, *, now: float) -> None:
        """Add a scrape, given the seconds of a monotonic clock."""
        kept, steps = self._scrapes, snapshot.total(training.STEPS)
        if kept and _is_restart(kept[-1][1], snapshot):
            kept.clear()
            self.nonfinite_at = None
        if kept and _increase(training.NONFINITE_LOSSES, kept[-1][1], snapshot) > 0:
            self.nonfinite_at = now
        # Of the scrapes during one step, the first and the last are enough.
        if len(kept) > 1 and kept[-2][1].total(training.STEPS) == steps:
            kept.pop()
        kept.append((now, snapshot))
        while (
            len(kept) > 2
            and now - kept[1][0] >= WINDOW_SECONDS
            and _increase(training.STEPS, kept[1][1], snapshot) >= MIN_STEPS
        ):
            kept.popleft()

    def spent(self) -> Spent:
        """Return the increases in the last minute, or since the start if too little is known."""
        now, new = self._scrapes[-1]
        then, old = self._scrapes[0]
        if now - then < MIN_SECONDS or _increase(training.STEPS, old, new) < MIN_STEPS:
            return _spent(new, None, None)
        return _spent(new, old, now - then)


def combined(spent: Iterable[Spent]) -> Spent | None:
    """Return the sums over ranks; None without any. All cover the last minute or the whole run."""
    parts = list(spent)
    if not parts:
        return None
    return Spent(
        is_whole=parts[0].is_whole,
        period_seconds=sum(part.period_seconds for part in parts) / len(parts),
        ranks=len(parts),
        steps=sum(part.steps for part in parts),
        phases=_sums(part.phases for part in parts),
        exposed=_sum(part.exposed for part in parts),
        wait=_sum(part.wait for part in parts),
        causes=_sums(part.causes for part in parts),
        samples=_sum(part.samples for part in parts),
        tokens=_sum(part.tokens for part in parts),
        nonfinite_losses=sum(part.nonfinite_losses for part in parts),
    )


def _is_restart(old: Snapshot, new: Snapshot) -> bool:
    """Whether another process has answered: counters begin again, or it is another attempt."""
    return old.value(training.RUN_ATTEMPT) != new.value(training.RUN_ATTEMPT) or any(
        new.values.get(spec, {}).get(labels, value) < value
        for spec in (training.STEPS, training.PHASE_SECONDS)
        for labels, value in old.values.get(spec, {}).items()
    )


def _increase(spec: MetricSpec, old: Snapshot, new: Snapshot) -> float:
    return new.total(spec) - old.total(spec)


def _spent(new: Snapshot, old: Snapshot | None, seconds: float | None) -> Spent:
    def increase(spec: MetricSpec) -> float | None:
        if spec not in new.values:
            return None
        return new.total(spec) - (old.total(spec) if old else 0.0)

    def by_label(spec: MetricSpec, names: Iterable[str]) -> dict[str, float]:
        then = (old.values if old else {}).get(spec, {})
        now = new.values.get(spec, {})
        return {name: now[name,] - then.get((name,), 0.0) for name in names if (name,) in now}

    phases = by_label(training.PHASE_SECONDS, PHASES)
    return Spent(
        is_whole=old is None,
        period_seconds=sum(phases.values()) if seconds is None else seconds,
        ranks=1,
        steps=increase(training.STEPS) or 0.0,
        phases=phases,
        exposed=increase(communication.COMM_EXPOSED_SECONDS),
        wait=increase(communication.COMM_WAIT_SECONDS),
        causes=by_label(communication.COMM_CAUSE_SECONDS, CAUSE.values),
        samples=increase(training.SAMPLES),
        tokens=increase(training.TOKENS),
        nonfinite_losses=increase(training.NONFINITE_LOSSES) or 0.0,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum, or None if a value is unknown: a sum without it would be too low."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
