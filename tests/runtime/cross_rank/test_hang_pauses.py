"""Which ranks may lawfully stand still: this one and its peers, each asked as the watch asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.hangs import Rank, peer, run_as

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.phase_timer import BACKWARD, CHECKPOINT, EVAL, FORWARD, OTHER

COMPILER = ("/x/torch/_dynamo/convert_frame.py", "_compile")
ARRIVED, MISSING = {1: peer(1, 1234)}, {1: peer(1, 1233)}


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL])
def test_evaluation_and_checkpoints_are_no_hang_for_ten_limits(rank: Rank, phase: int) -> None:
    rank.clock.enter(phase)

    rank.pass_seconds(300)
    believed = rank.hangs
    rank.pass_seconds(30)

    assert (believed, rank.hangs) == (0, 1)


def test_a_pause_that_moves_is_believed_anew(rank: Rank) -> None:
    for _ in range(10):
        rank.clock.enter(EVAL)
        rank.pass_seconds(100)
        rank.clock.leave()

    assert rank.hangs == 0


def test_a_module_in_evaluation_mode_is_no_hang_outside_the_engines_methods(rank: Rank) -> None:
    rank.training = False

    rank.pass_seconds(100)

    assert (rank.hangs, rank.hang.pause) == (0, "eval")


def test_a_hang_is_found_in_a_script_that_trains_in_evaluation_mode(rank: Rank) -> None:
    rank.training = False
    rank.clock.enter(BACKWARD)
    rank.pass_seconds(1)
    rank.clock.leave()

    rank.pass_seconds(31)

    assert (rank.hangs, rank.hang.pause) == (1, None)


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL])
@pytest.mark.parametrize(("peers", "hangs"), [(MISSING, 1), (ARRIVED, 0), (None, 0)])
def test_no_rank_pauses_in_a_collective_at_which_a_peer_has_not_arrived(
    rank: Rank, phase: int, peers: object, hangs: int
) -> None:
    rank.clock.enter(phase)
    rank.waits, rank.peers = True, peers

    rank.pass_seconds(40)

    assert rank.hangs == hangs


def test_ranks_that_wait_in_a_checkpoint_for_the_one_that_writes_do_not_hang(rank: Rank) -> None:
    rank.clock.enter(CHECKPOINT)
    rank.waits, rank.peers = True, {1: peer(1, 1233, pause="checkpoint")}

    rank.pass_seconds(200)

    assert rank.hangs == 0


def test_a_rank_says_to_the_others_why_it_pauses(rank: Rank) -> None:
    told = {OTHER: rank.hang.pause}
    for phase in (EVAL, CHECKPOINT, FORWARD):
        rank.clock.enter(phase)
        told[phase] = rank.hang.pause

    assert told == {OTHER: None, EVAL: "eval", CHECKPOINT: "checkpoint", FORWARD: None}


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL])
def test_a_rank_that_waits_in_a_collective_for_half_the_limit_tells_of_no_pause(
    rank: Rank, phase: int
) -> None:
    rank.clock.enter(phase)
    rank.waits = True

    rank.pass_seconds(15)
    before = rank.hang.pause
    rank.pass_seconds(1)

    assert (before, rank.hang.pause) == (PHASES[phase], None)


def test_a_rank_tells_of_a_pause_for_ten_limits_even_where_its_own_looks_have_ended(
    rank: Rank,
) -> None:
    rank.clock.enter(CHECKPOINT)
    rank.pass_seconds(1)

    rank.now_ns += 299 * 10**9
    before = rank.hang.pause
    rank.now_ns += 10**9

    assert (before, rank.hang.pause) == ("checkpoint", None)


def test_a_peer_that_pauses_excuses_the_ranks_that_wait_for_it_while_it_lives(rank: Rank) -> None:
    rank.peers = {1: peer(1, 1233, age=3.0, pause="checkpoint")}
    rank.pass_seconds(100)
    while_it_lives = rank.hangs

    rank.peers = {1: peer(1, 1233, age=30.0, pause="checkpoint")}
    rank.pass_seconds(31)

    assert (while_it_lives, rank.hangs) == (0, 1)


def test_a_peer_that_was_heard_only_once_is_believed(rank: Rank) -> None:
    rank.peers = {1: peer(1, 1233, age=None, pause="eval")}

    rank.pass_seconds(40)

    assert rank.hangs == 0


def test_nobody_waits_for_a_peer_at_the_end_of_its_script(rank: Rank) -> None:
    rank.peers = {1: peer(1, 1233, pause="the script's end")}

    rank.pass_seconds(30)

    assert rank.hangs == 1


def test_a_rank_that_evaluates_alone_in_a_collective_for_ever_is_found_by_the_others(
    rank: Rank, tmp_path: Path
) -> None:
    evaluating = Rank(tmp_path / "other")
    evaluating.clock.enter(EVAL)
    evaluating.waits = True

    for _ in range(31):
        evaluating.pass_seconds(1)
        rank.peers = {1: replace(ARRIVED[1], pause=evaluating.hang.pause)}
        rank.pass_seconds(1)

    assert rank.hangs == 1


def test_a_rank_that_compiles_does_not_hang_and_says_so(rank: Rank) -> None:
    def compile_for_long() -> str | None:
        rank.pass_seconds(100)
        return rank.hang.pause

    pause = run_as(*COMPILER, compile_for_long)

    assert (rank.hangs, pause) == (0, "compilation")


def test_compilation_is_believed_for_ten_limits(rank: Rank) -> None:
    run_as(*COMPILER, lambda: rank.pass_seconds(299))
    believed = rank.hangs
    run_as(*COMPILER, lambda: rank.pass_seconds(1))

    assert (believed, rank.hangs) == (0, 1)


@pytest.mark.parametrize(("waits", "hangs"), [(False, 0), (True, 1)])
def test_a_person_may_sit_at_a_prompt_for_hours_unless_a_collective_is_under_way(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, waits: bool, hangs: int
) -> None:
    monkeypatch.setattr(
        "zerowatch.runtime.cross_rank.hang.expected_pauses.excuse", lambda thread: "a prompt"
    )
    rank.waits = waits

    rank.pass_seconds(3600)

    assert rank.hangs == hangs
