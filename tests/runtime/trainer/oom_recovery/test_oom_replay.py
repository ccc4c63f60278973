"""Tests of the replay of windows until they fit in memory; each rank is a thread.

Covers `rng.py`.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.cuda_streams import FakeCuda
from fakes.memory_saving import FakeMemorySaving
from fakes.rank_threads import FakeHostGroup, on_ranks
from fakes.sleeping_collectives import ManualClock

from zerowatch.errors import PeerFailedError
from zerowatch.runtime.trainer.engine_change import EngineChange
from zerowatch.runtime.trainer.oom_recovery import collective_guard
from zerowatch.runtime.trainer.oom_recovery import replay as replay_module
from zerowatch.runtime.trainer.oom_recovery.collective_guard import (
    CollectiveGuard,
    PeerOutOfMemoryError,
    Vote,
)
from zerowatch.runtime.trainer.oom_recovery.escalation import ESCALATION_ORDER, EscalationPolicy
from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    CLEAN_WINDOWS,
    MemoryMeasurements,
    MicroBatchPlanner,
    PeakSample,
)
from zerowatch.runtime.trainer.oom_recovery.replay import (
    OomCapture,
    OomOrigin,
    OomReplay,
    oom_origin,
)
from zerowatch.runtime.trainer.run_end import RunEnd
from zerowatch.runtime.trainer.window.window_agreement import LocalBatches

pytestmark = pytest.mark.usefixtures("frozen_imports")  # each replay collects garbage

OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."


@pytest.fixture(autouse=True)
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the fake engines whose window was aborted."""
    engines: list[Any] = []
    monkeypatch.setattr(replay_module, "abort_window", engines.append)
    monkeypatch.setattr(
        replay_module, "abort_unsupported_reason", lambda engine: engine.unsupported_reason
    )
    return engines


class Rank:
    """One rank with an OomReplay, which records the number of micro-batches of each attempt."""

    def __init__(
        self,
        host_group: FakeHostGroup,
        *,
        fits: int,
        stage: int = 1,
        unsupported_reason: str | None = None,
        store: Any = None,
        **options: Any,
    ) -> None:
        engine = SimpleNamespace(
            optimizer=None,
            unsupported_reason=unsupported_reason,
            zero_optimization_partition_gradients=lambda: stage >= 2,
        )
        self.fits, self.rank = fits, host_group.rank
        self.asked: list[int] = []
        self.replay = OomReplay(
            engine_source=SimpleNamespace(engine=engine, config={}),
            host_group=host_group,
            guard=CollectiveGuard(host_group),
            planner=MicroBatchPlanner(),
            run_end=RunEnd(host_group, store or torch.distributed.HashStore()),
            **options,
        )

    def attempt(self, count: int) -> str:
        self.asked.append(count)
        if -(-8 // count) > self.fits:
            raise RuntimeError(OUT)
        return f"rank {self.rank}"


def local_batches(world_size: int = 1) -> LocalBatches:
    return LocalBatches(samples=[8] * world_size, micro_batch_samples=[8] * world_size, length=1)


def alone(**options: Any) -> Rank:
    (rank,) = on_ranks(1, lambda host_group: Rank(host_group, **options))
    return rank


def test_a_window_that_fits_is_run_once(aborted: list[Any]) -> None:
    rank = alone(fits=8)

    done = rank.replay.run_window(local_batches(), rank.attempt)

    assert (done.outcome, done.micro_batches, done.replays) == ("rank 0", 1, 0)
    assert done.lost_seconds == 0
    assert aborted == []


def test_a_window_that_does_not_fit_is_halved_until_it_does(
    aborted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = alone(fits=2)

    with caplog.at_level(logging.WARNING):
        done = rank.replay.run_window(local_batches(), rank.attempt)

    assert rank.asked == [1, 2, 4]
    assert (done.micro_batches, done.replays) == (4, 2)
    assert done.lost_seconds > 0
    assert len(aborted) == 2
    assert "out of memory on rank 0 with micro-batches of 8" in caplog.messages[0]
    assert "run again with micro-batches of 4" in caplog.messages[0]
    assert rank.replay.run_window(local_batches(), rank.attempt).replays == 0


def test_measured_peaks_predict_the_fitting_size_in_one_replay() -> None:
    peaks = [PeakSample(samples=size, length=1, peak_bytes=100 + 10 * size) for size in (1, 2)]
    measurements = MemoryMeasurements(peaks=peaks, limit_bytes=130 / 0.95 + 1)
    rank = alone(fits=3, memory=SimpleNamespace(measured=lambda: measurements))

    rank.replay.run_window(local_batches(), rank.attempt)

    assert rank.asked == [1, 3]


def test_random_generators_and_the_scripts_state_are_restored_before_each_attempt() -> None:
    rank = alone(fits=2)
    undone: list[int] = []
    rank.replay.on_window_abort.append(lambda: undone.append(len(rank.asked)))
    drawn: list[float] = []

    def attempt(count: int) -> str:
        drawn.append(random.random())
        return rank.attempt(count)

    rank.replay.run_window(local_batches(), attempt)

    assert undone == [1, 2]
    assert len(set(drawn)) == 1


def test_all_ranks_use_the_smaller_size_if_one_ran_out() -> None:
    def train(host_group: FakeHostGroup) -> tuple[list[int], int]:
        rank = Rank(host_group, fits=3 if host_group.rank == 1 else 8)
        done = rank.replay.run_window(local_batches(2), rank.attempt)
        return rank.asked, done.replays

    assert on_ranks(2, train) == [([1, 2, 4], 2), ([1, 2, 4], 2)]


class Backend:
    def all_reduce(self, tensor: object = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("issued", "asked"),
    [((1, 1), [1, 2]), ((2, 1), [1])],  # rank 0 would wait for rank 1 in NCCL's second collective
)
def test_a_pass_without_votes_is_replayed_only_if_all_ranks_have_issued_the_same_collectives(
    monkeypatch: pytest.MonkeyPatch, issued: tuple[int, int], asked: list[int]
) -> None:
    numbers = {}
    monkeypatch.setattr(
        collective_guard, "_sequence_numbers", lambda: {"0": numbers[threading.get_ident()]}
    )
    store = torch.distributed.HashStore()

    def train(host_group: FakeHostGroup) -> tuple[list[int], str]:
        rank, backend = Rank(host_group, fits=8, store=store), Backend()
        guard = rank.replay._guard
        guard.open(backend)
        numbers[threading.get_ident()] = 0

        def attempt(count: int) -> str:
            for _ in range(1 if guard.armed else issued[host_group.rank]):
                backend.all_reduce()
                numbers[threading.get_ident()] += 1
            return rank.attempt(count)

        for _ in range(CLEAN_WINDOWS + 1):
            rank.replay.run_window(local_batches(2), attempt)
        assert not guard.armed
        rank.asked.clear()
        rank.fits = 4
        try:
            rank.replay.run_window(local_batches(2), attempt)
        except RuntimeError as error:
            return rank.asked, str(error)
        return rank.asked, "replayed"

    result = "replayed" if len(asked) > 1 else OUT
    assert on_ranks(2, train) == [(asked, result)] * 2


def test_a_window_in_which_nccl_ran_out_of_memory_is_not_replayed_and_ends_the_run(
    aborted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    text = "NCCL error in: x.cpp:1\nLast error:\nFailed to CUDA calloc async 608 bytes"
    store = torch.distributed.HashStore()
    attempts = []

    def train(host_group: FakeHostGroup) -> tuple[str, bool]:
        rank = Rank(host_group, fits=8, store=store)

        def attempt(count: int) -> str:
            attempts.append(count)
            raise torch.distributed.DistBackendError(text)

        with pytest.raises(torch.distributed.DistBackendError) as raised:
            rank.replay.run_window(local_batches(2), attempt)
        return str(raised.value), host_group.is_closed

    assert on_ranks(2, train) == [(text, True)] * 2
    assert attempts == [1, 1]
    assert aborted == []
    assert "NCCL has run out of memory" in caplog.text


def test_an_error_of_a_kernel_ends_the_run_without_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    store = torch.distributed.HashStore()
    failed = threading.Barrier(2)

    def train(host_group: FakeHostGroup) -> tuple[bool, Vote]:
        rank = Rank(host_group, fits=8, store=store)

        def attempt(count: int) -> str:
            failed.wait(120)
            device.is_broken = True
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        with pytest.raises(torch.AcceleratorError):
            rank.replay.run_window(local_batches(2), attempt)
        return host_group.is_closed, rank.replay._guard.aborted_by

    ended, votes = zip(*on_ranks(2, train), strict=True)

    assert any(ended)  # a rank that learns of the other's error first raises its own error
    assert votes == (Vote.OK, Vote.OK)


def test_on_error_is_called_with_a_ranks_own_errors_only() -> None:
    def train(host_group: FakeHostGroup) -> list[str]:
        rank = Rank(host_group, fits=4 if host_group.rank == 1 else 8)
        errors: list[BaseException] = []
        rank.replay.on_error.append(errors.append)
        rank.replay.run_window(local_batches(2), rank.attempt)
        return [str(error) for error in errors]

    assert on_ranks(2, train) == [[], [OUT]]


def test_memory_savings_are_applied_in_order_if_one_sample_does_not_fit() -> None:
    def train(host_group: FakeHostGroup) -> tuple[list[int], list[EngineChange]]:
        rank = Rank(host_group, fits=0 if host_group.rank == 1 else 8)
        applied: list[EngineChange] = []

        def apply(change: EngineChange) -> bool:
            applied.append(change)
            rank.fits = 8
            return change is ESCALATION_ORDER[2]

        steps = [FakeMemorySaving(change, partial(apply, change)) for change in ESCALATION_ORDER]
        rank.replay._escalation = EscalationPolicy(steps)
        rank.replay.run_window(local_batches(2), rank.attempt)
        return rank.asked, applied

    assert on_ranks(2, train) == [([1, 2, 4, 8, 8], list(ESCALATION_ORDER[:3]))] * 2


def test_each_rank_raises_its_own_error_with_no_memory_saving_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(host_group: FakeHostGroup) -> BaseException:
        rank = Rank(host_group, fits=0 if host_group.rank == 1 else 8)
        with pytest.raises(RuntimeError) as raised:
            rank.replay.run_window(local_batches(2), rank.attempt)
        return raised.value

    peers, own = on_ranks(2, train)

    assert type(peers) is PeerOutOfMemoryError
    assert "out of memory on rank 1 with micro-batches of 1" in str(peers)
    assert "no memory saving left" in str(peers)
    assert (type(own), str(own)) == (RuntimeError, OUT)


def test_other_errors_propagate(aborted: list[Any]) -> None:
    rank = alone(fits=8)

    def attempt(count: int) -> str:
        raise ValueError("a bug of the script's")

    with pytest.raises(ValueError, match="a bug"):
        rank.replay.run_window(local_batches(), attempt)

    assert aborted == []


def test_another_error_on_one_rank_is_raised_on_all() -> None:
    def train(host_group: FakeHostGroup) -> Exception:
        rank = Rank(host_group, fits=8)

        def attempt(count: int) -> str:
            if host_group.rank == 1:
                raise ValueError("a bug of the script's")
            return rank.attempt(count)

        with pytest.raises((ValueError, PeerFailedError)) as raised:
            rank.replay.run_window(local_batches(3), attempt)
        return raised.value

    first, own, last = on_ranks(3, train)

    assert (type(own), str(own)) == (ValueError, "a bug of the script's")
    for peer in (first, last):
        assert isinstance(peer, PeerFailedError)
        assert (peer.rank, peer.failed_ranks) == (1, (1,))
        assert (peer.error_type, peer.error_text) == ("ValueError", "a bug of the script's")
        assert "train_batch failed on rank 1 with ValueError: a bug" in str(peer)


def test_another_error_ends_the_window_also_on_ranks_that_ran_out_of_memory() -> None:
    def train(host_group: FakeHostGroup) -> str:
        rank = Rank(host_group, fits=4 if host_group.rank == 0 else 8)

        def attempt(count: int) -> str:
            if host_group.rank == 1:
                raise ValueError("a bug of the script's")
            return rank.attempt(count)

        with pytest.raises((ValueError, PeerFailedError)) as raised:
            rank.replay.run_window(local_batches(2), attempt)
        return type(raised.value).__name__

    assert on_ranks(2, train) == ["PeerFailedError", "ValueError"]


def test_interrupts_are_not_voted_on() -> None:
    rank = alone(fits=8)

    def attempt(count: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank.replay.run_window(local_batches(), attempt)

    assert rank.replay._guard.aborted_by is Vote.OK


def test_a_failing_undo_on_one_rank_is_raised_on_all() -> None:
    def train(host_group: FakeHostGroup) -> str:
        rank = Rank(host_group, fits=4)

        def undo() -> None:
            if host_group.rank == 1:
                raise KeyError("count")

        rank.replay.on_window_abort.append(undo)
        with pytest.raises((KeyError, PeerFailedError)) as raised:
            rank.replay.run_window(local_batches(2), rank.attempt)
        return str(raised.value)

    peers, own = on_ranks(2, train)

    assert own == "'count'"
    assert peers.startswith("a function of on_window_abort failed on rank 1 with KeyError: 'count'")


def test_an_engine_whose_window_cannot_be_aborted_raises_its_own_error(
    aborted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    rank = alone(fits=2, unsupported_reason="it is a pipeline")

    with pytest.raises(RuntimeError, match="can't allocate"):
        rank.replay.run_window(local_batches(), rank.attempt)

    assert aborted == []
    assert "this window cannot be run again: it is a pipeline" in caplog.text


def test_tensors_in_the_frames_of_an_error_are_freed_before_the_next_attempt() -> None:
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
        rank.replay.run_window(local_batches(), attempt)
    finally:
        gc.enable()

    assert alive == [False, False]


def in_model() -> None:
    raise RuntimeError(OUT)


def wait() -> None:
    raise RuntimeError(OUT)  # as a collective in flight does, which the other ranks have entered


@pytest.mark.parametrize(("place", "is_issued"), [(in_model, True), (wait, False)])
def test_the_rest_of_a_pass_is_issued_unless_a_collective_raised_the_error(
    aborted: list[Any], place: Callable[[], None], is_issued: bool
) -> None:
    replay = alone(fits=8).replay
    issued: list[Any] = []
    replay._guard = SimpleNamespace(unfinished_reason=lambda: "", issue_rest=issued.append)
    replay._run_end = SimpleNamespace(publish=lambda *args, issued: True)
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1))

    replay._issue_rest(engine, ended_by(place))

    assert aborted == [engine] * is_issued  # frees memory first
    assert len(issued) == is_issued


@pytest.mark.parametrize("fails_in", ["issue_rest", "report"])
@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyError, KeyboardInterrupt])
def test_the_run_ends_if_the_rest_or_its_report_fails(
    fails_in: str, kind: type[BaseException]
) -> None:
    replay, error, ended = alone(fits=8).replay, ended_by(in_model), []

    def call(name: str, value: object) -> bool:
        if name == fails_in:
            raise kind("rest")
        return True

    replay._guard = SimpleNamespace(
        unfinished_reason=lambda: "",
        issue_rest=partial(call, "issue_rest"),
        report=partial(call, "report"),
    )
    replay._run_end = SimpleNamespace(
        end=lambda error, place: ended.append(error), publish=lambda *args, issued: True
    )
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1))

    with pytest.raises(BaseException) as raised:
        replay._issue_rest(engine, error)

    assert ended == [raised.value]
    if kind is KeyboardInterrupt:
        assert type(raised.value) is kind
    else:
        assert raised.value is error
        assert type(error.__cause__) is kind


def test_nothing_is_issued_if_the_other_ranks_cannot_be_notified() -> None:
    replay = alone(fits=8).replay
    replay._guard = SimpleNamespace(unfinished_reason=lambda: "")
    replay._run_end = SimpleNamespace(publish=lambda *args, issued: False)

    replay._issue_rest(SimpleNamespace(), ended_by(in_model))


def test_an_update_that_runs_out_of_memory_raises_and_is_not_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(host_group: FakeHostGroup) -> str:
        rank = Rank(host_group, fits=8)
        rank.replay._guard.armed = True

        def step() -> None:
            if host_group.rank == 1:
                raise RuntimeError(OUT)

        with pytest.raises(RuntimeError) as raised:
            rank.replay.update(step)
        assert rank.replay._run_end.has_ended
        assert not host_group.is_closed
        return type(raised.value).__name__

    assert on_ranks(2, train) == ["PeerOutOfMemoryError", "RuntimeError"]
    assert "out of memory within engine.step()" in caplog.text


def test_a_guarded_update_that_fails_on_one_rank_ends_the_run_on_all() -> None:
    own = ValueError("a bad gradient")

    def train(host_group: FakeHostGroup) -> Exception:
        rank = Rank(host_group, fits=8)
        rank.replay._guard.armed = True

        def step() -> None:
            if host_group.rank == 1:
                raise own

        with pytest.raises((ValueError, PeerFailedError)) as raised:
            rank.replay.update(step)
        assert rank.replay._run_end.has_ended
        assert not host_group.is_closed
        return raised.value

    first, failed, last = on_ranks(3, train)

    assert failed is own
    for peer in (first, last):
        assert isinstance(peer, PeerFailedError)
        assert (peer.rank, peer.place) == (1, "engine.step()")
        assert not peer.can_continue


def test_a_successful_update_returns_its_result() -> None:
    rank = alone(fits=8)
    for armed in (True, False):
        rank.replay._guard.armed = armed

        assert rank.replay.update(lambda: "stepped") == "stepped"

    assert not rank.replay._run_end.has_ended


def ended_by(body: Callable[[], None]) -> BaseException:
    with pytest.raises(Exception) as raised:
        body()
    return raised.value


def test_an_out_of_memory_error_is_found_in_the_chain_of_later_errors() -> None:
    def own() -> None:
        try:
            raise RuntimeError(OUT)
        except RuntimeError:
            raise PeerOutOfMemoryError("during cleanup")  # noqa: B904

    def peers() -> None:
        try:
            raise PeerOutOfMemoryError("a vote")
        except RuntimeError as error:
            raise ValueError("a later error") from error

    def handled() -> None:
        try:
            raise RuntimeError(OUT)
        except RuntimeError:
            raise ValueError("unrelated")  # noqa: B904

    origin, error = oom_origin(ended_by(own))
    assert (origin, str(error)) == (OomOrigin.OWN, OUT)
    assert oom_origin(ended_by(peers))[0] is OomOrigin.PEER
    assert oom_origin(ended_by(handled)) == (None, None)
    assert oom_origin(KeyboardInterrupt()) == (None, None)


def test_a_capture_keeps_the_traceback_of_an_error_and_frees_its_frames() -> None:
    def run_out() -> None:
        activations = torch.zeros(3)
        seen.append(weakref.ref(activations))
        raise RuntimeError(OUT)

    seen: list[weakref.ref[torch.Tensor]] = []
    with OomCapture() as capture:
        run_out()

    capture.clear_frames()

    assert seen[0]() is None
    assert capture.error is not None
    assert capture.error.__traceback__ is not None
