"""Tests of `ExpectedPauses`: when a rank or a peer is expected to make no progress."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from fakes.hangs import WatchedRank, peer, run_as

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    EVAL,
    FORWARD,
    GENERATE,
    OTHER,
)
from zerowatch.runtime.cross_rank.hang.hang_evidence import RankSetSummary

COMPILER = ("/x/torch/_dynamo/convert_frame.py", "_compile")
ARRIVED, MISSING = {1: peer(1, 1234)}, {1: peer(1, 1233)}


@pytest.fixture
def rank(tmp_path: Path) -> WatchedRank:
    return WatchedRank(tmp_path)


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL, GENERATE])
def test_evaluation_generation_and_checkpoints_are_no_hang_for_ten_limits(
    rank: WatchedRank, phase: int
) -> None:
    rank.phase_timer.enter(phase)

    rank.pass_seconds(300)
    accepted = rank.num_hangs
    rank.pass_seconds(30)

    assert (accepted, rank.num_hangs) == (0, 1)


@pytest.mark.parametrize(("phase", "num_hangs"), [(OTHER, 0), (FORWARD, 1)])
def test_training_may_wait_for_a_checkpoint_of_another_thread_but_not_in_a_pass(
    rank: WatchedRank, phase: int, num_hangs: int
) -> None:
    rank.phase_timer.enter(phase)
    thread = Thread(target=rank.phase_timer.enter_pause, args=(CHECKPOINT,))
    thread.start()
    thread.join()

    rank.pass_seconds(50)  # the limit is 30 s

    assert rank.num_hangs == num_hangs


def test_a_pause_with_progress_is_accepted_again(rank: WatchedRank) -> None:
    for _ in range(10):
        rank.phase_timer.enter(EVAL)
        rank.pass_seconds(100)
        rank.phase_timer.leave()

    assert rank.num_hangs == 0


def test_a_module_in_evaluation_mode_is_no_hang_outside_the_engines_methods(
    rank: WatchedRank,
) -> None:
    rank.context.in_training_mode = False

    rank.pass_seconds(100)

    assert (rank.num_hangs, rank.watch.expected_pause()) == (0, "eval")


def test_a_hang_is_found_in_a_script_that_trains_in_evaluation_mode(rank: WatchedRank) -> None:
    rank.context.in_training_mode = False
    rank.phase_timer.enter(BACKWARD)
    rank.pass_seconds(1)
    rank.phase_timer.leave()

    rank.pass_seconds(31)

    assert (rank.num_hangs, rank.watch.expected_pause()) == (1, None)


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL, GENERATE])
@pytest.mark.parametrize(("peers", "hangs"), [(MISSING, 1), (ARRIVED, 0), (None, 0)])
def test_no_rank_pauses_in_a_collective_at_which_a_peer_has_not_arrived(
    rank: WatchedRank, phase: int, peers: object, hangs: int
) -> None:
    rank.phase_timer.enter(phase)
    rank.context.is_waiting, rank.context.known_peers = True, peers

    rank.pass_seconds(40)

    assert rank.num_hangs == hangs


def test_ranks_that_wait_in_a_checkpoint_for_the_one_that_writes_do_not_hang(
    rank: WatchedRank,
) -> None:
    rank.phase_timer.enter(CHECKPOINT)
    rank.context.is_waiting, rank.context.known_peers = True, {1: peer(1, 1233, pause="checkpoint")}

    rank.pass_seconds(200)

    assert rank.num_hangs == 0


def test_a_rank_announces_why_it_pauses(rank: WatchedRank) -> None:
    announced = {OTHER: rank.watch.expected_pause()}
    for phase in (EVAL, GENERATE, CHECKPOINT, FORWARD):
        rank.phase_timer.enter(phase)
        announced[phase] = rank.watch.expected_pause()

    expected = {EVAL: "eval", GENERATE: "generate", CHECKPOINT: "checkpoint"}
    assert announced == {OTHER: None, **expected, FORWARD: None}


@pytest.mark.parametrize("phase", [CHECKPOINT, EVAL, GENERATE])
def test_a_rank_that_waits_in_a_collective_for_half_the_limit_announces_no_pause(
    rank: WatchedRank, phase: int
) -> None:
    rank.phase_timer.enter(phase)
    rank.context.is_waiting = True

    rank.pass_seconds(15)
    before = rank.watch.expected_pause()
    rank.pass_seconds(1)

    assert (before, rank.watch.expected_pause()) == (PHASES[phase], None)


def test_a_pause_is_announced_for_ten_limits_even_without_checks(
    rank: WatchedRank,
) -> None:
    rank.phase_timer.enter(CHECKPOINT)
    rank.pass_seconds(1)

    rank.now_ns += 299 * 10**9
    before = rank.watch.expected_pause()
    rank.now_ns += 10**9

    assert (before, rank.watch.expected_pause()) == ("checkpoint", None)


def test_a_pausing_peer_prevents_a_hang_while_it_sends_heartbeats(
    rank: WatchedRank,
) -> None:
    rank.context.known_peers = {1: peer(1, 1233, age_seconds=3.0, pause="checkpoint")}
    rank.pass_seconds(100)
    while_it_lives = rank.num_hangs

    rank.context.known_peers = {1: peer(1, 1233, age_seconds=30.0, pause="checkpoint")}
    rank.pass_seconds(31)

    assert (while_it_lives, rank.num_hangs) == (0, 1)


def test_a_pausing_peer_with_one_heartbeat_prevents_a_hang(rank: WatchedRank) -> None:
    rank.context.known_peers = {1: peer(1, 1233, age_seconds=None, pause="eval")}

    rank.pass_seconds(40)

    assert rank.num_hangs == 0


def test_the_end_of_a_peers_script_does_not_prevent_a_hang(rank: WatchedRank) -> None:
    rank.context.known_peers = {1: peer(1, 1233, pause="the script's end")}

    rank.pass_seconds(30)

    assert rank.num_hangs == 1


def test_a_rank_that_evaluates_alone_in_a_collective_for_ever_is_found_by_the_others(
    rank: WatchedRank, tmp_path: Path
) -> None:
    evaluating = WatchedRank(tmp_path / "other")
    evaluating.phase_timer.enter(EVAL)
    evaluating.context.is_waiting = True

    for _ in range(31):
        evaluating.pass_seconds(1)
        rank.context.known_peers = {1: replace(ARRIVED[1], pause=evaluating.watch.expected_pause())}
        rank.pass_seconds(1)

    assert rank.num_hangs == 1


def test_a_rank_that_compiles_does_not_hang_and_announces_it(rank: WatchedRank) -> None:
    def compile_for_long() -> str | None:
        rank.pass_seconds(100)
        return rank.watch.expected_pause()

    pause = run_as(*COMPILER, compile_for_long)

    assert (rank.num_hangs, pause) == (0, "compilation")


def test_compilation_is_accepted_for_ten_limits(rank: WatchedRank) -> None:
    run_as(*COMPILER, lambda: rank.pass_seconds(299))
    accepted = rank.num_hangs
    run_as(*COMPILER, lambda: rank.pass_seconds(1))

    assert (accepted, rank.num_hangs) == (0, 1)


@pytest.mark.parametrize(("waits", "hangs"), [(False, 0), (True, 1)])
def test_a_prompt_may_stay_open_for_hours_unless_a_collective_is_in_flight(
    rank: WatchedRank, monkeypatch: pytest.MonkeyPatch, waits: bool, hangs: int
) -> None:
    monkeypatch.setattr(
        "zerowatch.runtime.cross_rank.hang.expected_pauses.silent_activity",
        lambda thread: "a prompt",
    )
    rank.context.is_waiting = waits

    rank.pass_seconds(3600)

    assert rank.num_hangs == hangs


@pytest.mark.parametrize(("waits", "hangs"), [(False, 0), (True, 1)])
def test_a_cell_without_training_is_no_hang_unless_a_collective_is_in_flight(
    rank: WatchedRank, waits: bool, hangs: int
) -> None:
    rank.phase_timer.stop()
    rank.context.is_waiting = waits

    rank.pass_seconds(3600)

    assert rank.num_hangs == hangs


@pytest.mark.parametrize(("age_seconds", "hangs"), [(14.9, 0), (15.0, 1)])
def test_a_pausing_peer_counts_as_such_for_fifteen_seconds_after_its_last_heartbeat(
    rank: WatchedRank, age_seconds: float, hangs: int
) -> None:
    rank.context.known_peers = {1: peer(1, 1233, age_seconds=age_seconds, pause="eval")}

    rank.pass_seconds(30)

    assert rank.num_hangs == hangs


def test_a_group_of_one_makes_nobody_wait(
    rank: WatchedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RankSetSummary(key="0", role="dp", members=(0,), issued=5, is_waiting=True)
    monkeypatch.setattr(rank.context, "rank_sets", lambda: [alone])
    rank.phase_timer.enter(EVAL)

    rank.pass_seconds(20)

    assert rank.watch.expected_pause() == "eval"


@pytest.mark.parametrize(("seconds", "pause"), [(2, None), (3, "compilation")])
def test_stacks_are_read_after_two_seconds_without_progress(
    rank: WatchedRank, monkeypatch: pytest.MonkeyPatch, seconds: int, pause: str | None
) -> None:
    monkeypatch.setattr(
        "zerowatch.runtime.cross_rank.hang.expected_pauses.silent_activity",
        lambda thread: "compilation",
    )

    rank.pass_seconds(seconds)

    assert rank.watch.expected_pause() == pause


def test_collectives_are_read_from_two_seconds_without_progress_on(
    rank: WatchedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    rank_sets = rank.context.rank_sets
    monkeypatch.setattr(rank.context, "rank_sets", lambda: read.append(1) or rank_sets())
    rank.phase_timer.enter(EVAL)

    counts = []
    for _ in range(3):
        rank.pass_seconds(1)
        counts.append(len(read))

    assert counts == [0, 1, 2]
