"""Who is slow, among few ranks and many, and nobody where there is only noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from zerowatch.metrics.catalog.labels import COMPARED_PHASES, PHASES
from zerowatch.runtime.cross_rank.call_report import StepTimes
from zerowatch.runtime.cross_rank.step_times import LEAST_STEPS, WARM_UP_STEPS, StepTimeSampler
from zerowatch.runtime.cross_rank.stragglers import Straggler, StragglerWatch, reference_of

STEP_SECONDS = 0.5
BUSY = {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.05}


def pace(*, noise: float = 0.0, chance: random.Random | None = None, **slower: float) -> StepTimes:
    """A rank's pace over 20 steps, each with noise; `slower` says by how many seconds it is so."""
    drawn = chance or random.Random(0)
    of_median = 1.253 * noise / math.sqrt(20)
    return StepTimes(
        steps=20,
        step_seconds=STEP_SECONDS,
        busy=tuple(
            BUSY[phase] + slower.get(phase, 0.0) + drawn.gauss(0, of_median)
            for phase in COMPARED_PHASES
        ),
        deviation=(0.6745 * noise,) * len(COMPARED_PHASES),
    )


def look(watch: StragglerWatch, paces: dict[int, StepTimes]) -> list[Straggler]:
    reference = reference_of(list(paces.values()))
    assert reference is not None
    return watch.look(paces, reference)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 64])
@pytest.mark.parametrize("phase", COMPARED_PHASES)
def test_a_rank_that_is_slow_twice_in_a_row_is_named(num_ranks: int, phase: str) -> None:
    watch = StragglerWatch()
    paces = {rank: pace() for rank in range(num_ranks - 1)}
    paces[num_ranks - 1] = pace(**{phase: 0.05})

    first, second = look(watch, paces), look(watch, paces)

    assert first == []
    assert second == [
        Straggler(
            rank=num_ranks - 1,
            phase=phase,
            seconds=pytest.approx(0.05),  # type: ignore[arg-type]
            score=pytest.approx(0.1),  # type: ignore[arg-type]
        )
    ]


def test_a_rank_that_was_quick_in_between_is_not_named() -> None:
    watch = StragglerWatch()
    slow = {0: pace(), 1: pace(forward=0.05)}

    found = [look(watch, paces) for paces in (slow, {0: pace(), 1: pace()}, slow)]

    assert found == [[], [], []]


def test_slow_in_one_phase_and_then_in_another_is_not_twice_in_a_row() -> None:
    watch = StragglerWatch()

    look(watch, {0: pace(), 1: pace(forward=0.05)})

    assert look(watch, {0: pace(), 1: pace(backward=0.05)}) == []


def test_less_than_a_twentieth_of_a_step_is_not_slow() -> None:
    watch = StragglerWatch()
    paces = {rank: pace() for rank in range(4)} | {4: pace(forward=0.024)}

    assert [look(watch, paces), look(watch, paces)] == [[], []]


def test_among_ranks_that_vary_much_one_must_stand_out_by_four_deviations() -> None:
    watch = StragglerWatch()
    # Median absolute deviation 0.02 s, or 0.04 of a step: 0.16 of a step, 0.08 s, is the limit.
    spread = {rank: pace(forward=0.02 * (rank % 3 - 1)) for rank in range(9)}

    for slower, named in ((0.075, []), (0.085, [9])):
        paces = spread | {9: pace(forward=slower)}
        look(watch, paces)
        assert [one.rank for one in look(watch, paces)] == named


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_noise_alone_names_nobody(num_ranks: int) -> None:
    chance = random.Random(11)
    watch = StragglerWatch()

    named = [
        look(watch, {rank: pace(noise=0.02, chance=chance) for rank in range(num_ranks)})
        for _ in range(50)
    ]

    assert named == [[]] * 50


def hiccups(chance: random.Random) -> dict[str, float]:
    """A step of 0.35 s whose data come 0.1 s late three times in a hundred."""
    data = 0.1 * (chance.random() < 0.03)
    return {"data": data, "forward": 0.1, "backward": 0.2, "optimizer": 0.05}


def uneven_batches(chance: random.Random) -> dict[str, float]:
    """A step of 0.35 s that is as long as its sequences, which vary by 15 %."""
    length = max(0.2, chance.gauss(1, 0.15))
    return {"forward": 0.1 * length, "backward": 0.2 * length, "optimizer": 0.05}


class Simulated:
    """Ranks that step and compare their paces, all with the same kind of noise."""

    def __init__(self, num_ranks: int, noise: Callable[[random.Random], dict[str, float]]) -> None:
        self._chance, self._noise = random.Random(7), noise
        self._keepers = [StepTimeSampler() for _ in range(num_ranks)]
        self._watch = StragglerWatch()
        self._step(WARM_UP_STEPS, None)

    def exchange(self, steps: int, *, slow: int | None = None) -> list[Straggler]:
        """Let all make some steps, of which `slow` takes a tenth longer, and compare."""
        self._step(steps, slow)
        taken = enumerate(keeper.take() for keeper in self._keepers)
        paces = {rank: pace for rank, pace in taken if pace is not None}
        return look(self._watch, paces) if paces else []

    def _step(self, steps: int, slow: int | None) -> None:
        for rank, keeper in enumerate(self._keepers):
            for _ in range(steps):
                seconds = self._noise(self._chance)
                seconds["forward"] += 0.035 * (rank == slow)
                nanoseconds = [round(1e9 * seconds.get(phase, 0)) for phase in PHASES]
                keeper.add(nanoseconds, [0] * len(PHASES))


@pytest.mark.parametrize(
    ("num_ranks", "noise", "hours"),
    [
        pytest.param(512, hiccups, 0.1, id="hiccups"),
        pytest.param(8, uneven_batches, 2, id="uneven"),
    ],
)
def test_where_each_exchange_holds_one_long_step_chance_names_nobody(
    num_ranks: int, noise: Callable[[random.Random], dict[str, float]], hours: float
) -> None:
    ranks = Simulated(num_ranks, noise)

    named = [ranks.exchange(1) for _ in range(round(hours * 720))]

    assert not any(named)


def test_one_in_five_hundred_that_takes_a_tenth_longer_is_named_at_the_second_exchange() -> None:
    ranks = Simulated(512, hiccups)
    ranks.exchange(LEAST_STEPS)

    named = [ranks.exchange(LEAST_STEPS, slow=300) for _ in range(2)]

    assert [[(one.rank, one.phase) for one in each] for each in named] == [[], [(300, "forward")]]


def test_many_ranks_of_short_medians_must_stand_out_against_their_own_error_too() -> None:
    chance = random.Random(3)
    watch = StragglerWatch()

    named = [
        look(watch, {rank: pace(noise=0.1, chance=chance) for rank in range(256)})
        for _ in range(40)
    ]

    assert not any(named)


def test_a_named_rank_stays_so_until_it_was_twice_below_half_of_the_limit() -> None:
    watch = StragglerWatch()
    named = []
    # The limit is 0.025 s, a twentieth of a step.
    for slower in (0.05, 0.05, 0.02, 0.02, 0.01, 0.02, 0.01, 0.01, 0.05, 0.05):
        named.append(bool(look(watch, {0: pace(), 1: pace(forward=slower)})))

    assert named == [False, *[True] * 6, False, False, True]


def test_a_named_rank_that_no_longer_takes_part_is_not_named() -> None:
    watch = StragglerWatch()
    slow = {rank: pace() for rank in range(3)} | {3: pace(forward=0.05)}
    look(watch, slow)
    look(watch, slow)

    assert look(watch, {rank: pace() for rank in range(3)}) == []


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    reference = reference_of([pace(forward=0.05), pace(backward=0.03)])

    assert reference is not None
    assert reference.busy == pytest.approx(tuple(BUSY.values()))


def test_the_median_rank_has_no_score() -> None:
    paces = [pace(), pace(forward=0.05), pace(forward=0.1)]
    reference = reference_of(paces)

    assert reference is not None
    assert [reference.scores(one)[1] for one in paces] == pytest.approx([-0.1, 0.0, 0.1])


def test_nothing_is_compared_where_nothing_was_done() -> None:
    idle = StepTimes(steps=1, step_seconds=0.0, busy=(0.0,) * 4, deviation=(0.0,) * 4)

    assert reference_of([]) is None
    assert reference_of([idle, idle]) is None


def test_a_straggler_is_told_in_words() -> None:
    told = Straggler(rank=3, phase="forward", seconds=0.0496, score=0.0992).sentence()

    assert told == "rank 3 is slow in forward: 50 ms a step more than the others, 10 % of a step"
