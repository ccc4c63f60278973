"""Which rank is slow, and in which phase. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from ...metrics.catalog.labels import COMPARED_PHASES
from ...metrics.thresholds import STRAGGLER_SCORE_HIGH
from .call_report import StepTimes

Table = npt.NDArray[np.float64]

DEVIATIONS = 4
EXCHANGES_TO_TURN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeReference:
    """What the ranks of a group are compared with: seconds a step, by phase, and a median step."""

    step_seconds: float
    busy: tuple[float, ...]

    def scores(self, pace: StepTimes) -> tuple[float, ...]:
        """Return by how much of a step a rank is slower in each phase; negative if faster."""
        return tuple(
            (busy - usual) / self.step_seconds
            for busy, usual in zip(pace.busy, self.busy, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others by `seconds` a step in one phase."""

    rank: int
    phase: str
    seconds: float
    score: float

    def sentence(self) -> str:
        """Say it in words."""
        return (
            f"rank {self.rank} is slow in {self.phase}: {1000 * self.seconds:.0f} ms a step more "
            f"than the others, {100 * self.score:.0f} % of a step"
        )


def reference_of(paces: Sequence[StepTimes]) -> StepTimeReference | None:
    """Return the median rank's pace, of two ranks the faster one's; None where nothing was done."""
    if not paces:
        return None
    step_seconds = float(np.median([pace.step_seconds for pace in paces]))
    busy = _table([pace.busy for pace in paces])
    usual = np.median(busy, axis=0) if len(paces) > 2 else busy.min(axis=0)
    return (
        StepTimeReference(step_seconds=step_seconds, busy=tuple(usual.tolist()))
        if step_seconds > 0
        else None
    )


class StragglerWatch:
    """Names ranks that were slow in the same phase at two exchanges in a row.

    One that is named stays so until it was below half of the limit at two exchanges in a row.
    """

    def __init__(self) -> None:
        self._named: set[tuple[int, int]] = set()
        self._doubts: Counter[tuple[int, int]] = Counter()  # times that a status was contradicted

    def look(self, paces: Mapping[int, StepTimes], reference: StepTimeReference) -> list[Straggler]:
        """Return the stragglers of one exchange."""
        rows = {rank: row for row, rank in enumerate(paces)}
        busy = _table([pace.busy for pace in paces.values()])
        scores = (busy - np.array(reference.busy)) / reference.step_seconds
        limits = _limits(paces, scores, reference)
        self._named = {key for key in self._named if key[0] in rows}
        ranks = list(paces)
        slow = {(ranks[row], phase) for row, phase in np.argwhere(scores >= limits).tolist()}
        quick = {
            (rank, phase)
            for rank, phase in self._named
            if scores[rows[rank], phase] < limits[rows[rank], phase] / 2
        }
        self._turn((slow - self._named) | quick)
        return [
            Straggler(
                rank=rank,
                phase=COMPARED_PHASES[phase],
                seconds=float(scores[rows[rank], phase]) * reference.step_seconds,
                score=float(scores[rows[rank], phase]),
            )
            for rank, phase in sorted(self._named)
        ]

    def _turn(self, doubted: set[tuple[int, int]]) -> None:
        """Name, or no longer name, what was doubted so often in a row."""
        times = {key: self._doubts[key] + 1 for key in doubted}
        turned = {key for key in doubted if times[key] >= EXCHANGES_TO_TURN}
        self._named ^= turned
        self._doubts = Counter({key: times[key] for key in doubted - turned})


def _limits(paces: Mapping[int, StepTimes], scores: Table, reference: StepTimeReference) -> Table:
    """Return, by rank and phase, the score from which on a rank is slow.

    With more than two ranks, what the ranks vary anyway is the median absolute deviation of their
    scores. Among many ranks some would pass that by chance, as each is a median of few steps: it
    must also stand out against its own standard error. Of two ranks one is always the faster, and
    how far apart they are says nothing: then the error of the difference is all there is.
    """
    errors = _errors(paces, reference)
    if len(paces) > 2:
        spread = np.median(np.abs(scores - np.median(scores, axis=0)), axis=0)
    else:
        spread = np.sqrt(np.sum(errors**2, axis=0))
    limits: Table = np.maximum(STRAGGLER_SCORE_HIGH, DEVIATIONS * np.maximum(spread, errors))
    return limits


def _errors(paces: Mapping[int, StepTimes], reference: StepTimeReference) -> Table:
    """Return, by rank and phase, the standard error of the score.

    A score is a median over steps: 1.253 sigma / sqrt(n), where sigma = 1.483 MAD.
    """
    deviations = _table([pace.deviation for pace in paces.values()])
    steps = np.array([max(pace.steps, 1) for pace in paces.values()])
    errors: Table = 1.253 * 1.483 * deviations / np.sqrt(steps)[:, None] / reference.step_seconds
    return errors


def _table(rows: Sequence[Sequence[float]]) -> Table:
    """Return the rows as one array, in half the time that numpy takes to look for their shape."""
    return np.fromiter(chain.from_iterable(rows), np.float64).reshape(len(rows), -1)
