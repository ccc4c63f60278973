"""Windows run again until they come to their end, on ranks that stand in threads."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.escalation import FakeEscalation
from fakes.ranks import FakeHostGroup, on_ranks

from zerowatch.runtime.trainer.oom_recovery import replay as replay_module
from zerowatch.runtime.trainer.oom_recovery.collective_guard import CollectiveGuard, PeerOutOfMemory
from zerowatch.runtime.trainer.oom_recovery.escalation import (
    ESCALATION_ORDER,
    EngineChange,
    EscalationPolicy,
)
from zerowatch.runtime.trainer.oom_recovery.fit import MemoryMeasurements, PeakSample
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    BatchShares,
    MicroBatchPlanner,
)
from zerowatch.runtime.trainer.oom_recovery.oom_capture import OomCapture, whose_memory
from zerowatch.runtime.trainer.oom_recovery.oom_consensus import all_ranks_oom
from zerowatch.runtime.trainer.oom_recovery.replay import OomReplay

OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."


@pytest.fixture(autouse=True)
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep account of engines whose window was abandoned; there is no real one here."""
    engines: list[Any] = []
    monkeypatch.setattr(replay_module, "abort_window", engines.append)
    monkeypatch.setattr(replay_module, "can_abort", lambda engine: engine.why_not)
    return engines


class Rank:
    """One rank's replay, and what its attempts were asked for."""

    def __init__(
        self,
        host_group: FakeHostGroup,
        *,
        fits: int,
        stage: int = 1,
        why_not: str | None = None,
        **options: Any,
    ) -> None:
        engine = SimpleNamespace(
            why_not=why_not, zero_optimization_partition_gradients=lambda: stage >= 2
        )
        self.fits, self.rank = fits, host_group.rank
        self.asked: list[int] = []
        self.drawn: list[float] = []
        self.replay = OomReplay(
            engine=lambda: engine,
            host_group=host_group,
            guard=CollectiveGuard(host_group),
            plans=MicroBatchPlanner(),
            capture_rng=capture,
            **options,
        )

    def attempt(self, count: int) -> str:
        self.asked.append(count)
        self.drawn.append(random.Random(0).random())
        if -(-8 // count) > self.fits:
            raise RuntimeError(OUT)
        return f"rank {self.rank}"


def capture() -> Callable[[], None]:
    state = random.getstate()
    return lambda: random.setstate(state)


def share(world_size: int = 1) -> BatchShares:
    return BatchShares(samples=[8] * world_size, wanted=[8] * world_size, length=1)


def alone(**options: Any) -> Rank:
    (rank,) = on_ranks(1, lambda host_group: Rank(host_group, **options))
    return rank


def test_a_window_that_fits_is_run_once(aborted: list[Any]) -> None:
    rank = alone(fits=8)

    done = rank.replay.run(share(), rank.attempt)

    assert (done.outcome, done.micro_batches, done.replays) == ("rank 0", 1, 0)
    assert done.lost_seconds == 0
    assert aborted == []


def test_one_that_does_not_is_halved_until_it_does(
    aborted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = alone(fits=2)

    with caplog.at_level(logging.WARNING):
        done = rank.replay.run(share(), rank.attempt)

    assert rank.asked == [1, 2, 4]
    assert (done.micro_batches, done.replays) == (4, 2)
    assert done.lost_seconds > 0
    assert len(aborted) == 2
    assert (
        "out of memory on rank 0, in micro-batches of 8: the window is run again, with "
        in (caplog.messages[0])
    )
    assert rank.replay.run(share(), rank.attempt).replays == 0


def test_peaks_measured_before_tell_the_size_at_once() -> None:
    peaks = [PeakSample(samples=size, length=1, peak_bytes=100 + 10 * size) for size in (1, 2)]
    rank = alone(
        fits=3, measured=lambda: MemoryMeasurements(peaks=peaks, limit_bytes=130 / 0.95 + 1)
    )

    rank.replay.run(share(), rank.attempt)

    assert rank.asked == [1, 3]


def test_generators_and_the_script_s_own_state_are_put_back_before_each_attempt() -> None:
    rank = alone(fits=2)
    undone: list[int] = []
    rank.replay.on_window_abort.append(lambda: undone.append(len(rank.asked)))
    drawn: list[float] = []

    def attempt(count: int) -> str:
        drawn.append(random.random())
        return rank.attempt(count)

    rank.replay.run(share(), attempt)

    assert undone == [1, 2]
    assert len(set(drawn)) == 1


def test_if_one_rank_runs_out_all_take_the_smaller_size() -> None:
    def train(host_group: FakeHostGroup) -> tuple[list[int], int]:
        rank = Rank(host_group, fits=3 if host_group.rank == 1 else 8)
        done = rank.replay.run(share(2), rank.attempt)
        return rank.asked, done.replays

    assert on_ranks(2, train) == [([1, 2, 4], 2), ([1, 2, 4], 2)]


def test_errors_of_its_own_are_told_and_peers_are_not() -> None:
    def train(host_group: FakeHostGroup) -> list[str]:
        rank = Rank(host_group, fits=4 if host_group.rank == 1 else 8)
        told: list[BaseException] = []
        rank.replay.on_error.append(told.append)
        rank.replay.run(share(2), rank.attempt)
        return [str(error) for error in told]

    assert on_ranks(2, train) == [[], [OUT]]


def test_where_one_sample_is_too_much_escalations_are_applied() -> None:
    def train(host_group: FakeHostGroup) -> tuple[list[int], list[EngineChange]]:
        rank = Rank(host_group, fits=0 if host_group.rank == 1 else 8)
        taken: list[EngineChange] = []

        def apply(change: EngineChange) -> bool:
            taken.append(change)
            rank.fits = 8
            return change is ESCALATION_ORDER[2]

        steps = [FakeEscalation(change, partial(apply, change)) for change in ESCALATION_ORDER]
        rank.replay._escalation = EscalationPolicy(steps)
        rank.replay.run(share(2), rank.attempt)
        return rank.asked, taken

    assert on_ranks(2, train) == [([1, 2, 4, 8, 8], list(ESCALATION_ORDER[:3]))] * 2


def test_with_nothing_left_each_rank_raises_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    def train(host_group: FakeHostGroup) -> BaseException:
        rank = Rank(host_group, fits=0 if host_group.rank == 1 else 8)
        with pytest.raises(RuntimeError) as raised:
            rank.replay.run(share(2), rank.attempt)
        return raised.value

    peers, own = on_ranks(2, train)

    assert type(peers) is PeerOutOfMemory
    assert "out of memory on rank 1, in micro-batches of 1, with nothing left to give up" in (
        str(peers)
    )
    assert (type(own), str(own)) == (RuntimeError, OUT)


def test_other_errors_pass_untouched(aborted: list[Any]) -> None:
    rank = alone(fits=8)

    def attempt(count: int) -> str:
        raise ValueError("a bug of the script's")

    with pytest.raises(ValueError, match="a bug"):
        rank.replay.run(share(), attempt)

    assert aborted == []


def test_an_engine_that_cannot_leave_a_window_ends_by_its_own_error(
    aborted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = alone(fits=2, why_not="it is a pipeline")

    with pytest.raises(RuntimeError, match="can't allocate"):
        rank.replay.run(share(), rank.attempt)

    assert aborted == []
    assert "this window cannot be run again: it is a pipeline" in caplog.text


def test_what_the_frames_of_an_error_held_is_free_before_the_next_attempt() -> None:
    rank = alone(fits=4)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def attempt(count: int) -> str:
        alive.append(any(reference() is not None for reference in held))
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        return rank.attempt(count)

    gc.disable()
    try:
        rank.replay.run(share(), attempt)
    finally:
        gc.enable()

    assert alive == [False, False]


def test_an_update_that_runs_out_is_not_made_again(caplog: pytest.LogCaptureFixture) -> None:
    def train(host_group: FakeHostGroup) -> str:
        rank = Rank(host_group, fits=8)
        rank.replay._guard.armed = True

        def step() -> None:
            if host_group.rank == 1:
                raise RuntimeError(OUT)

        with pytest.raises(RuntimeError) as raised:
            rank.replay.update(step)
        return type(raised.value).__name__

    assert on_ranks(2, train) == ["PeerOutOfMemory", "RuntimeError"]
    assert "out of memory within engine.step()" in caplog.text


def test_an_update_that_is_made_returns_what_it_did() -> None:
    rank = alone(fits=8)
    for armed in (True, False):
        rank.replay._guard.armed = armed

        assert rank.replay.update(lambda: "stepped") == "stepped"


def ended_by(body: Callable[[], None]) -> BaseException:
    with pytest.raises(Exception) as raised:
        body()
    return raised.value


def test_memory_is_recognised_behind_what_is_raised_over_it() -> None:
    def own() -> None:
        try:
            raise RuntimeError(OUT)
        except RuntimeError:
            raise PeerOutOfMemory("while leaving")  # noqa: B904

    def peers() -> None:
        try:
            raise PeerOutOfMemory("a vote")
        except RuntimeError as error:
            raise ValueError("over it") from error

    def handled() -> None:
        try:
            raise RuntimeError(OUT)
        except RuntimeError:
            raise ValueError("only came after one")  # noqa: B904

    whose, error = whose_memory(ended_by(own))
    assert (whose, str(error)) == ("own", OUT)
    assert whose_memory(ended_by(peers))[0] == "peer"
    assert whose_memory(ended_by(handled)) == (None, None)
    assert whose_memory(KeyboardInterrupt()) == (None, None)


def test_trouble_keeps_the_lines_of_an_error_and_not_what_its_frames_held() -> None:
    def run_out() -> None:
        activations = torch.zeros(3)
        seen.append(weakref.ref(activations))
        raise RuntimeError(OUT)

    seen: list[weakref.ref[torch.Tensor]] = []
    with OomCapture() as trouble:
        run_out()

    trouble.clear_frames()

    assert seen[0]() is None
    assert trouble.error is not None
    assert trouble.error.__traceback__ is not None


def test_ranks_that_all_ran_out_unguarded_find_each_other() -> None:
    store = torch.distributed.HashStore()

    def ask(host_group: FakeHostGroup) -> bool:
        return all_ranks_oom(store, 7, rank=host_group.rank, world_size=2)

    assert on_ranks(2, ask) == [True, True]


def test_one_that_ran_out_alone_does_not_wait_for_ever() -> None:
    store = torch.distributed.HashStore()

    assert not all_ranks_oom(store, 7, rank=0, world_size=2, wait_seconds=0.05)
