"""Tests of step times and stragglers: which rank is slow in which phase, and none by noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog.labels import COMPARED_PHASES, PHASES
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.cross_rank.exchange.rank_messages import StepTimes
from zerowatch.runtime.cross_rank.stragglers import (
    MAX_STEPS,
    MIN_STEPS,
    WARM_UP_STEPS,
    StepTimeReference,
    StepTimeSampler,
    Straggler,
    StragglerDetector,
    compared_rank_set,
    step_time_reference,
)

STEP_SECONDS = 0.5
BUSY = {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.01}


def times_of(
    *, noise: float = 0.0, chance: random.Random | None = None, **slower: float
) -> StepTimes:
    """Step times over 20 steps with noise; `slower` has the extra seconds by phase."""
    of_median = 1.253 * noise / math.sqrt(20)
    return StepTimes(
        num_steps=20,
        step_seconds=STEP_SECONDS,
        busy_seconds=tuple(
            BUSY[phase] + slower.get(phase, 0.0) + (chance.gauss(0, of_median) if chance else 0.0)
            for phase in COMPARED_PHASES
        ),
        deviation_seconds=(0.6745 * noise,) * len(COMPARED_PHASES),
    )


def update(detector: StragglerDetector, step_times: dict[int, StepTimes]) -> list[Straggler]:
    reference = step_time_reference(list(step_times.values()))
    assert reference is not None
    return detector.update(step_times, reference)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 64])
@pytest.mark.parametrize("phase", COMPARED_PHASES)
def test_a_rank_that_is_slow_twice_in_a_row_is_named(num_ranks: int, phase: str) -> None:
    detector = StragglerDetector()
    step_times = {rank: times_of() for rank in range(num_ranks - 1)}
    step_times[num_ranks - 1] = times_of(**{phase: 0.05})

    first, second = update(detector, step_times), update(detector, step_times)

    assert first == []
    assert second == [
        Straggler(
            rank=num_ranks - 1,
            phase=phase,
            seconds=pytest.approx(0.05),  # type: ignore[arg-type]
            score=pytest.approx(0.1),  # type: ignore[arg-type]
        )
    ]


def test_a_rank_that_was_fast_in_between_is_not_named() -> None:
    detector = StragglerDetector()
    slow = {0: times_of(), 1: times_of(forward=0.05)}

    found = [
        update(detector, step_times) for step_times in (slow, {0: times_of(), 1: times_of()}, slow)
    ]

    assert found == [[], [], []]


def test_slow_in_one_phase_and_then_in_another_is_not_twice_in_a_row() -> None:
    detector = StragglerDetector()

    update(detector, {0: times_of(), 1: times_of(forward=0.05)})

    assert update(detector, {0: times_of(), 1: times_of(backward=0.05)}) == []


def test_less_than_a_twentieth_of_a_step_is_not_slow() -> None:
    detector = StragglerDetector()
    step_times = {rank: times_of() for rank in range(4)} | {4: times_of(forward=0.024)}

    assert [update(detector, step_times), update(detector, step_times)] == [[], []]


def test_among_ranks_that_vary_much_the_limit_is_four_deviations() -> None:
    detector = StragglerDetector()
    # Median absolute deviation 0.02 s, or 0.04 of a step: 0.16 of a step, 0.08 s, is the limit.
    spread = {rank: times_of(forward=0.02 * (rank % 3 - 1)) for rank in range(9)}

    for slower, named in ((0.075, []), (0.085, [9])):
        step_times = spread | {9: times_of(forward=slower)}
        update(detector, step_times)
        assert [one.rank for one in update(detector, step_times)] == named


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_noise_alone_names_no_rank(num_ranks: int, seed: int) -> None:
    chance = random.Random(seed)
    detector = StragglerDetector()

    named = [
        update(detector, {rank: times_of(noise=0.02, chance=chance) for rank in range(num_ranks)})
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
    """Ranks that step and compare their step_times, all with the same kind of noise."""

    def __init__(
        self, num_ranks: int, noise: Callable[[random.Random], dict[str, float]], seed: int
    ) -> None:
        self._chance, self._noise = random.Random(seed), noise
        self._samplers = [StepTimeSampler() for _ in range(num_ranks)]
        self._detector = StragglerDetector()
        self._step(WARM_UP_STEPS, None)

    def exchange(self, steps: int, *, slow: int | None = None) -> list[Straggler]:
        """Let all make some steps, of which `slow` takes a tenth longer, and compare."""
        self._step(steps, slow)
        taken = enumerate(sampler.drain() for sampler in self._samplers)
        step_times = {rank: times for rank, times in taken if times is not None}
        return update(self._detector, step_times) if step_times else []

    def _step(self, steps: int, slow: int | None) -> None:
        for rank, sampler in enumerate(self._samplers):
            for _ in range(steps):
                seconds = self._noise(self._chance)
                seconds["forward"] += 0.035 * (rank == slow)
                nanoseconds = [round(1e9 * seconds.get(phase, 0)) for phase in PHASES]
                sampler.add(nanoseconds, [0] * len(PHASES))


@pytest.mark.parametrize(
    ("num_ranks", "noise", "hours"),
    [
        pytest.param(512, hiccups, 0.1, id="hiccups"),
        pytest.param(8, uneven_batches, 2, id="uneven"),
    ],
)
def test_one_long_step_per_exchange_names_no_rank(
    num_ranks: int, noise: Callable[[random.Random], dict[str, float]], hours: float, seed: int
) -> None:
    ranks = Simulated(num_ranks, noise, seed)

    named = [ranks.exchange(1) for _ in range(round(hours * 720))]

    assert not any(named)


def test_one_in_five_hundred_that_takes_a_tenth_longer_is_named_at_the_second_exchange(
    seed: int,
) -> None:
    ranks = Simulated(512, hiccups, seed)
    ranks.exchange(MIN_STEPS)

    named = [ranks.exchange(MIN_STEPS, slow=300) for _ in range(2)]

    assert [[(one.rank, one.phase) for one in each] for each in named] == [[], [(300, "forward")]]


def test_of_many_ranks_with_short_medians_the_own_error_is_a_limit_too(seed: int) -> None:
    chance = random.Random(seed)
    detector = StragglerDetector()

    named = [
        update(detector, {rank: times_of(noise=0.1, chance=chance) for rank in range(256)})
        for _ in range(40)
    ]

    assert not any(named)


def test_a_straggler_stays_one_until_it_was_twice_below_half_of_the_limit() -> None:
    detector = StragglerDetector()
    named = []
    # The limit is 0.025 s, a twentieth of a step.
    for slower in (0.05, 0.05, 0.02, 0.02, 0.01, 0.02, 0.01, 0.01, 0.05, 0.05):
        named.append(bool(update(detector, {0: times_of(), 1: times_of(forward=slower)})))

    assert named == [False, *[True] * 6, False, False, True]


def test_a_straggler_that_no_longer_takes_part_is_not_named() -> None:
    detector = StragglerDetector()
    slow = {rank: times_of() for rank in range(3)} | {3: times_of(forward=0.05)}
    update(detector, slow)
    update(detector, slow)

    assert update(detector, {rank: times_of() for rank in range(3)}) == []


def test_of_two_ranks_the_faster_one_is_the_reference() -> None:
    reference = step_time_reference([times_of(forward=0.05), times_of(backward=0.03)])

    assert reference is not None
    assert reference.busy_seconds == pytest.approx(tuple(BUSY.values()))


def test_the_median_rank_has_no_score() -> None:
    step_times = [times_of(), times_of(forward=0.05), times_of(forward=0.1)]
    reference = step_time_reference(step_times)

    assert reference is not None
    assert [reference.scores(one)[1] for one in step_times] == pytest.approx([-0.1, 0.0, 0.1])


def test_without_step_times_there_is_no_reference() -> None:
    idle = StepTimes(
        num_steps=1, step_seconds=0.0, busy_seconds=(0.0,) * 4, deviation_seconds=(0.0,) * 4
    )

    assert step_time_reference([]) is None
    assert step_time_reference([idle, idle]) is None


def test_a_straggler_message_has_rank_phase_time_and_share() -> None:
    message = Straggler(rank=3, phase="forward", seconds=0.0496, score=0.0992).message()

    assert message == "rank 3 is slow in forward: 50 ms a step more than the others, 10 % of a step"


MS = 1_000_000


def by_phase(**milliseconds: float) -> list[int]:
    return [round(milliseconds.get(phase, 0) * MS) for phase in PHASES]


@pytest.fixture
def sampler() -> StepTimeSampler:
    made = StepTimeSampler()
    for _ in range(WARM_UP_STEPS):
        made.add(by_phase(forward=9000), by_phase())
    return made


def test_the_warm_up_steps_are_skipped(sampler: StepTimeSampler) -> None:
    assert sampler.drain() is None


def test_step_times_are_medians_of_the_steps(sampler: StepTimeSampler) -> None:
    for forward in (10, 12, 500) * 3:
        sampler.add(by_phase(forward=forward, other=1), by_phase())

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.num_steps == 9
    assert step_times.step_seconds == pytest.approx(0.013)
    assert dict(zip(COMPARED_PHASES, step_times.busy_seconds, strict=True))[
        "forward"
    ] == pytest.approx(0.012)
    assert step_times.deviation_seconds[COMPARED_PHASES.index("forward")] == pytest.approx(0.002)


def test_time_blocked_by_collectives_is_not_busy(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(backward=10, optimizer=2), by_phase(backward=7, optimizer=3))

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.busy_seconds == pytest.approx((0.0, 0.0, 0.003, 0.0, 0.0))
    assert step_times.step_seconds == pytest.approx(0.012)


def test_evaluation_and_checkpoints_are_no_part_of_a_step(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(forward=5, eval=1000, checkpoint=500), by_phase())

    step_times = sampler.drain()

    assert step_times is not None and step_times.step_seconds == pytest.approx(0.005)


def test_steps_are_drained_once(sampler: StepTimeSampler) -> None:
    for _ in range(MIN_STEPS):
        sampler.add(by_phase(forward=5), by_phase())
    sampler.drain()

    assert sampler.drain() is None


def test_long_steps_are_kept_until_they_are_enough_for_a_median(sampler: StepTimeSampler) -> None:
    drained = []
    for number in range(2 * MIN_STEPS):
        sampler.add(by_phase(forward=number), by_phase())
        drained.append(sampler.drain())

    assert [index for index, step_times in enumerate(drained) if step_times] == [7, 15]
    assert drained[15] is not None and drained[15].num_steps == MIN_STEPS
    assert drained[15].step_seconds == pytest.approx(0.0115)


def test_of_very_many_steps_the_last_are_kept(sampler: StepTimeSampler) -> None:
    for milliseconds in range(2 * MAX_STEPS):
        sampler.add(by_phase(forward=milliseconds), by_phase())

    step_times = sampler.drain()

    assert step_times is not None
    assert step_times.num_steps == MAX_STEPS
    assert step_times.step_seconds == pytest.approx((1.5 * MAX_STEPS - 0.5) / 1000)


@pytest.mark.parametrize(
    ("roles", "compared"),
    [
        (("dp", "world"), "dp"),
        (("world", "tp"), "world"),
        (("world", "pp", "tp"), "tp"),
        (("world", "pp", "dp"), "dp"),
        (("world", "pp"), None),
        (("other",), None),
        (("sp", "ep"), "ep"),
        (("sp", "pp"), "sp"),
        (("ep", "tp"), "tp"),
        (("tp", "world"), "world"),
    ],
)
def test_the_step_times_of_pipeline_stages_are_not_compared(
    roles: tuple[str, ...], compared: str | None
) -> None:
    rank_sets = [FakeGroup((0, 1), role=role).rank_set for role in roles]

    found = compared_rank_set(rank_sets)

    assert (found and found.role) == compared


def test_of_groups_with_the_same_role_the_larger_one_is_compared() -> None:
    sizes = [(0,), (0, 1), (0, 1, 2, 3), (0, 2)]
    rank_sets = [FakeGroup(members).rank_set for members in sizes]

    found = compared_rank_set(rank_sets)

    assert found is not None and found.members == (0, 1, 2, 3)
    assert compared_rank_set(rank_sets[:1]) is None


def test_of_several_groups_the_one_with_the_most_distant_ranks_is_compared() -> None:
    groups = [(0, 3), (0, 1, 2), (0, 2)]  # the ranks of a node are often slow together
    rank_sets = [FakeGroup(members).rank_set for members in groups]

    assert compared_rank_set(rank_sets) is rank_sets[0]


MESHES = [(2, 2), (4, 4), (8, 8), (16, 16), (2, 8), (4, 8), (16, 8)]


def rank_sets_of_mesh(
    replicas: int, shards: int, *, has_world: bool, world_size: int | None = None
) -> dict[int, list[RankSet]]:
    """Return, by rank, the rank sets of a mesh whose rows are nodes. Ranks share the objects."""
    num_ranks = replicas * shards
    groups = [FakeGroup(tuple(range(at, num_ranks, shards))) for at in range(shards)]
    groups += [FakeGroup(tuple(range(at, at + shards))) for at in range(0, num_ranks, shards)]
    world = FakeGroup(tuple(range(world_size or num_ranks)), role="world")
    groups += [world] if has_world else []
    rank_sets = [group.rank_set for group in groups]
    return {rank: [one for one in rank_sets if rank in one.members] for rank in range(num_ranks)}


@pytest.mark.parametrize("has_world", [False, True])
@pytest.mark.parametrize(("replicas", "shards"), MESHES, ids=str)
def test_each_rank_of_a_mesh_is_compared(replicas: int, shards: int, has_world: bool) -> None:
    known = rank_sets_of_mesh(replicas, shards, has_world=has_world)

    chosen = {rank: compared_rank_set(rank_sets) for rank, rank_sets in known.items()}

    # The first rank of a rank set compares its members.
    for rank, rank_set in chosen.items():
        assert rank_set is not None and chosen[rank_set.members[0]] is rank_set, rank


@pytest.mark.parametrize("has_world", [False, True])
@pytest.mark.parametrize(("replicas", "shards"), MESHES, ids=str)
@pytest.mark.parametrize("is_whole_node", [False, True])
def test_a_slow_rank_or_node_of_a_mesh_is_found(
    replicas: int, shards: int, has_world: bool, is_whole_node: bool
) -> None:
    known = rank_sets_of_mesh(replicas, shards, has_world=has_world)
    ranks = range(replicas * shards)
    slow = set(ranks[-shards:] if is_whole_node else ranks[-1:])
    step_times = {rank: times_of(forward=0.05 if rank in slow else 0.0) for rank in ranks}

    found: set[int] = set()
    for rank_set in {compared_rank_set(rank_sets) for rank_sets in known.values()}:
        assert rank_set is not None
        detector = StragglerDetector()
        for _ in range(2):
            stragglers = update(detector, {rank: step_times[rank] for rank in rank_set.members})
        found |= {straggler.rank for straggler in stragglers}

    assert found == slow


def test_a_mesh_of_all_ranks_is_compared_as_a_whole_if_they_do_the_same_work() -> None:
    (mesh, *_), (larger, *_) = (
        rank_sets_of_mesh(4, 8, has_world=True, world_size=size).values() for size in (32, 64)
    )
    column = mesh[0]
    others = {role: FakeGroup((0, 1), role=role).rank_set for role in ("tp", "pp", "ep", "sp")}

    assert (found := compared_rank_set(mesh)) and found.role == "world"
    assert (found := compared_rank_set(larger)) and found.members == column.members
    for role, other in others.items():
        assert compared_rank_set([*mesh, other]) is column, role
    assert compared_rank_set([*mesh, FakeGroup((0, 1), role="other").rank_set]) is mesh[-1]


def test_a_score_is_the_share_of_a_step_by_which_a_rank_is_slower() -> None:
    reference = StepTimeReference(step_seconds=0.5, busy_seconds=(0.1, 0.2, 0.3, 0.4))
    one = StepTimes(
        num_steps=9,
        step_seconds=0.7,
        busy_seconds=(0.15, 0.1, 0.3, 0.6),
        deviation_seconds=(0.0,) * 4,
    )

    assert reference.scores(one) == pytest.approx((0.1, -0.2, 0.0, 0.4))


@pytest.mark.parametrize(("slower", "is_named"), [(0.0749, False), (0.0755, True)])
def test_a_score_must_exceed_four_of_its_own_standard_errors(slower: float, is_named: bool) -> None:
    # Of two ranks the errors add up in squares: four times that is 0.0752 s.
    deviation = 0.0752 / 4 / math.sqrt(2) * 3 / (1.253 * 1.483)
    detector = StragglerDetector()
    step_times = {
        rank: StepTimes(
            num_steps=9,
            step_seconds=STEP_SECONDS,
            busy_seconds=(0.01, 0.1 + slower * rank, 0.2, 0.05),
            deviation_seconds=(0.0, deviation, 0.0, 0.0),
        )
        for rank in (0, 1)
    }

    found = [update(detector, step_times) for _ in range(2)][1]

    assert [one.rank for one in found] == ([1] if is_named else [])
