"""Compares step times by phase over the ranks, to find which rank is slow in which phase."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from statistics import median

import numpy as np
import numpy.typing as npt

from ...metrics.catalog.labels import COMPARED_PHASES, PHASES
from ...metrics.thresholds import STRAGGLER_SCORE_HIGH
from ..collectives.groups import RankSet
from ..common.phase_timer import NON_TRAINING

Table = npt.NDArray[np.float64]  # a row per rank, a column per phase of COMPARED_PHASES

# A median of fewer steps says little about a rank, because one hiccup or one long batch changes it.
MIN_STEPS = 8
# Maximum number of last steps that are kept until an exchange.
MAX_STEPS = 256
# Number of first steps that are ignored: they allocate memory, record traces and compile code.
WARM_UP_STEPS = 3
# A rank is slow if it is at least this many deviations above the reference.
DEVIATIONS = 4
# Number of exchanges in a row that must show a new status of a rank before its status changes.
EXCHANGES_TO_CONFIRM = 2

_COMPARED = tuple(PHASES.index(phase) for phase in COMPARED_PHASES)
# In rank sets with these roles all members do the same work, so their step times are comparable.
# For the whole job ("world"), this is true only if the job is not a pipeline.
_SAME_WORK_ROLES = ("dp", "world", "tp", "ep", "sp")
# Beside rank sets with these roles, the ranks of a mesh may do different work, though all of them
# are data parallel. The whole mesh is then not compared.
_ROLES_OF_OTHER_WORK = frozenset(("tp", "pp", "ep", "sp"))


# Not frozen, because frozen instances take twice as long to create, and one rank decodes a thousand
# of them at an exchange.
@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Step times of one rank: medians over its last `num_steps` steps, in seconds.

    Attributes:
        num_steps: Number of steps.
        step_seconds: Median duration of a step.
        busy_seconds: Median seconds of each of COMPARED_PHASES, without the time blocked in
            collectives.
        deviation_seconds: Median absolute deviation of `busy_seconds` over the steps.
    """

    num_steps: int
    step_seconds: float
    busy_seconds: tuple[float, ...]
    deviation_seconds: tuple[float, ...]


class StepTimeSampler:
    """Collects this rank's steps on the watch thread, until the comparison thread takes them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=MAX_STEPS)
        self._warm_up = WARM_UP_STEPS

    def add(self, phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
        """Add the nanoseconds of a step in each of PHASES, and the blocked part of each."""
        if self._warm_up:
            self._warm_up -= 1
            return
        step_ns = sum(phase_ns) - sum(phase_ns[index] for index in NON_TRAINING)
        busy = (max(0, phase_ns[index] - blocked_ns[index]) / 1e9 for index in _COMPARED)
        self._steps.append((step_ns / 1e9, *busy))

    def drain(self) -> StepTimes | None:
        """Return the medians of the steps since the last call, or None if there are too few."""
        if len(self._steps) < MIN_STEPS:
            return None
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        step_seconds, *columns = zip(*steps, strict=True)
        busy_seconds = tuple(median(column) for column in columns)
        return StepTimes(
            num_steps=len(steps),
            step_seconds=median(step_seconds),
            busy_seconds=busy_seconds,
            deviation_seconds=tuple(
                median(abs(value - middle) for value in column)
                for column, middle in zip(columns, busy_seconds, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeReference:
    """The median step and busy seconds by phase, with which the ranks are compared."""

    step_seconds: float
    busy_seconds: tuple[float, ...]

    def scores(self, step_times: StepTimes) -> tuple[float, ...]:
        """Return by what share of a step a rank is slower in each phase. Negative if faster."""
        return tuple(
            (busy - usual) / self.step_seconds
            for busy, usual in zip(step_times.busy_seconds, self.busy_seconds, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others by `seconds` per step in one phase."""

    rank: int
    phase: str
    seconds: float
    score: float

    def message(self) -> str:
        """Format the straggler for the log."""
        return (
            f"rank {self.rank} is slow in {self.phase}: {1000 * self.seconds:.0f} ms a step more "
            f"than the others, {100 * self.score:.0f} % of a step"
        )


def step_time_reference(step_times: Sequence[StepTimes]) -> StepTimeReference | None:
    """Return the median over the ranks, or the faster of two. None if no time was measured."""
    if not step_times:
        return None
    step_seconds = float(np.median([each.step_seconds for each in step_times]))
    busy = _table([each.busy_seconds for each in step_times])
    usual = np.median(busy, axis=0) if len(step_times) > 2 else busy.min(axis=0)
    return (
        StepTimeReference(step_seconds=step_seconds, busy_seconds=tuple(usual.tolist()))
        if step_seconds > 0
        else None
    )


def compared_rank_set(rank_sets: Iterable[RankSet]) -> RankSet | None:
    """Return the rank set over which step times are compared. Data parallel is preferred.

    A rank set is compared only if its first member chooses it, so all members must choose it. In a
    mesh of ranks, the distance of the first two members is the same in all rows, and the same in
    all columns.

    The ranks of a node are often slow together. If several rank sets have the same role, as in
    hybrid sharding, the one with the most distant ranks is compared: its ranks are on most nodes.
    """
    shared = [rank_set for rank_set in rank_sets if rank_set.size > 1]
    known_roles = {rank_set.role for rank_set in shared}
    found: list[RankSet] = []
    for role in _SAME_WORK_ROLES:
        if not found and not (role == "world" and "pp" in known_roles):
            found = _outermost([rank_set for rank_set in shared if rank_set.role == role])
    if not found:
        return None
    most_distant = max(
        found,
        key=lambda rank_set: (
            rank_set.members[1] - rank_set.members[0],
            rank_set.size,
            rank_set.key,
        ),
    )
    world = next((rank_set for rank_set in shared if rank_set.role == "world"), None)
    # A whole mesh has one median for all of its ranks. But of two replicas one may be slow, which
    # is half of the ranks: only pairs show which half.
    is_whole_mesh = (
        world is not None
        and len(found) > 1
        and most_distant.size > 2
        and world.size == prod(rank_set.size for rank_set in found)
        and not known_roles & _ROLES_OF_OTHER_WORK
    )
    return world if is_whole_mesh else most_distant


def _outermost(rank_sets: Sequence[RankSet]) -> list[RankSet]:
    """Return the rank sets that no larger one of them contains."""
    if len(rank_sets) < 2:  # the usual case, at each poll
        return list(rank_sets)
    members = [set(rank_set.members) for rank_set in rank_sets]
    return [
        rank_set
        for rank_set, own in zip(rank_sets, members, strict=True)
        if not any(own < other for other in members)
    ]


class StragglerDetector:
    """Finds ranks that are slow in the same phase at two exchanges in a row.

    A rank remains a straggler until it is below half of the limit at two exchanges in a row.
    """

    def __init__(self) -> None:
        self._slow: set[tuple[int, int]] = set()  # of rank and phase
        self._num_contradicted: Counter[tuple[int, int]] = Counter()  # in a row

    def update(
        self, step_times: Mapping[int, StepTimes], reference: StepTimeReference
    ) -> list[Straggler]:
        """Return the stragglers after one exchange, given the step times by rank."""
        rows = {rank: row for row, rank in enumerate(step_times)}
        busy = _table([each.busy_seconds for each in step_times.values()])
        scores = (busy - np.array(reference.busy_seconds)) / reference.step_seconds
        limits = _limits(step_times, scores, reference)
        self._slow = {key for key in self._slow if key[0] in rows}
        ranks = list(step_times)
        above = {(ranks[row], phase) for row, phase in np.argwhere(scores >= limits).tolist()}
        recovered = {
            (rank, phase)
            for rank, phase in self._slow
            if scores[rows[rank], phase] < limits[rows[rank], phase] / 2
        }
        self._toggle_confirmed((above - self._slow) | recovered)
        return [
            Straggler(
                rank=rank,
                phase=COMPARED_PHASES[phase],
                seconds=float(scores[rows[rank], phase]) * reference.step_seconds,
                score=float(scores[rows[rank], phase]),
            )
            for rank, phase in sorted(self._slow)
        ]

    def _toggle_confirmed(self, contradicted: set[tuple[int, int]]) -> None:
        """Change a status if enough exchanges in a row have contradicted it."""
        times = {key: self._num_contradicted[key] + 1 for key in contradicted}
        confirmed = {key for key in contradicted if times[key] >= EXCHANGES_TO_CONFIRM}
        self._slow ^= confirmed
        self._num_contradicted = Counter({key: times[key] for key in contradicted - confirmed})


def _limits(
    step_times: Mapping[int, StepTimes], scores: Table, reference: StepTimeReference
) -> Table:
    """Return, by rank and phase, the score from which on a rank counts as slow.

    With more than two ranks, the usual variation is the median absolute deviation of their scores.
    Each score is a median of few steps, so among many ranks some exceed the variation by chance. A
    score must therefore also exceed its own standard error. With two ranks, one rank is always
    faster, so only the error of the difference counts.
    """
    errors = _errors(step_times, reference)
    if len(step_times) > 2:
        spread = np.median(np.abs(scores - np.median(scores, axis=0)), axis=0)
    else:
        spread = np.sqrt(np.sum(errors**2, axis=0))
    limits: Table = np.maximum(STRAGGLER_SCORE_HIGH, DEVIATIONS * np.maximum(spread, errors))
    return limits


def _errors(step_times: Mapping[int, StepTimes], reference: StepTimeReference) -> Table:
    """Return, by rank and phase, the standard error of the score.

    A score is a median over steps: 1.253 sigma / sqrt(n), where sigma = 1.483 MAD.
    """
    deviations = _table([each.deviation_seconds for each in step_times.values()])
    num_steps = np.array([max(each.num_steps, 1) for each in step_times.values()])
    seconds: Table = 1.253 * 1.483 * deviations / np.sqrt(num_steps)[:, None]
    return seconds / reference.step_seconds


def _table(rows: Sequence[Sequence[float]]) -> Table:
    """Return the rows as one array. Twice as fast as letting numpy infer the shape."""
    return np.fromiter(chain.from_iterable(rows), np.float64).reshape(len(rows), -1)
