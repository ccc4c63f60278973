"""This rank's pace: its last steps by phase, without what collectives blocked; and who is alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from ...metrics.catalog.labels import COMPARED_PHASES, PHASES
from ..collectives.groups import RankSet
from .call_report import StepTimes

# A median of fewer steps says little of a rank: one hiccup, or one long batch, moves it.
LEAST_STEPS = 8
MOST_STEPS = 256
WARM_UP_STEPS = 3  # memory is allocated, traces are recorded, code is compiled
# Of these roles the members of a rank set do the same work, so that their step times compare. The
# whole job does so only if it is no pipeline.
_ALIKE = ("dp", "world", "tp", "ep", "sp")
_PLACES = tuple(PHASES.index(phase) for phase in COMPARED_PHASES)
_AWAY = tuple(PHASES.index(phase) for phase in ("eval", "checkpoint"))


class StepTimeSampler:
    """Collects steps on the watch thread; the exchange takes them as one pace."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=MOST_STEPS)
        self._warm_up = WARM_UP_STEPS

    def add(self, phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
        """Take a step: nanoseconds in each of PHASES, and how many of them were blocked."""
        if self._warm_up:
            self._warm_up -= 1
            return
        step_ns = sum(phase_ns) - sum(phase_ns[place] for place in _AWAY)
        busy = (max(0, phase_ns[place] - blocked_ns[place]) / 1e9 for place in _PLACES)
        self._steps.append((step_ns / 1e9, *busy))

    def take(self) -> StepTimes | None:
        """Return the pace since the last time; None while too few steps have ended for one."""
        if len(self._steps) < LEAST_STEPS:
            return None
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        step_seconds, *columns = zip(*steps, strict=True)
        busy = tuple(median(column) for column in columns)
        return StepTimes(
            steps=len(steps),
            step_seconds=median(step_seconds),
            busy=busy,
            deviation=tuple(
                median(abs(value - middle) for value in column)
                for column, middle in zip(columns, busy, strict=True)
            ),
        )


def largest_rank_set(rank_sets: Iterable[RankSet]) -> RankSet | None:
    """Return the rank set whose members' step times are compared: data parallel if there is one."""
    shared = [rank_set for rank_set in rank_sets if rank_set.size > 1]
    is_pipeline = any(rank_set.role == "pp" for rank_set in shared)
    alike = [role for role in _ALIKE if not (is_pipeline and role == "world")]
    return min(
        (rank_set for rank_set in shared if rank_set.role in alike),
        default=None,
        key=lambda rank_set: (alike.index(rank_set.role), -rank_set.size, rank_set.key),
    )
