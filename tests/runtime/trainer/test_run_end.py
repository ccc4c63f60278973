"""Tests of the end of a run by a failure on one rank; each rank is a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from fakes.rank_threads import FakeHostGroup, on_ranks
from fakes.stores_without_clone import remove_clone

from zerowatch.errors import PeerFailedError, PeerOutOfMemoryError, ZerowatchError
from zerowatch.runtime.common.collective_attempt import PeerAttemptError
from zerowatch.runtime.trainer import run_end as run_end_module
from zerowatch.runtime.trainer.run_end import FailureNotice, RunEnd

PATIENCE_SECONDS = 120.0  # only ends a test that hangs


def run_ends(world_size: int, **options: object) -> list[RunEnd]:
    """Return the ends of one run on all ranks."""
    store = torch.distributed.HashStore()
    return on_ranks(world_size, lambda host_group: RunEnd(host_group, store, **options))


def raised_by(body: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:
        body()
    return raised.value


def call(run_end: RunEnd, body: Callable[[], object] = lambda: None) -> object:
    with run_end.call():
        return body()


def fail(error: Exception) -> None:
    raise error


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_failed_rank_raises_its_own_error_and_the_others_one_that_names_it() -> None:
    first, failed, last = run_ends(3)
    own = KeyError("labels")

    def fails() -> None:
        failed.end(own, "engine.step()")
        raise own

    assert raised_by(lambda: call(failed, fails)) is own
    for peer in (first, last):
        error = raised_by(lambda peer=peer: call(peer, lambda: fail(RuntimeError("closed"))))
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.error_type, error.error_text) == (1, "KeyError", "'labels'")
        assert error.place == "engine.step()"
        assert not error.can_continue
        assert "Restart it from its last checkpoint" in str(error)
        assert str(error.__cause__) == "closed"


def test_all_ranks_leave_the_group_and_later_calls_raise() -> None:
    peer, failed = run_ends(2)
    assert not failed.has_ended
    failed.end(KeyError("labels"), "train_batch")
    raised_by(lambda: call(peer, lambda: fail(RuntimeError("closed"))))

    assert failed.has_ended
    assert peer.has_ended
    assert failed._host_group.is_closed
    assert peer._host_group.is_closed
    later = raised_by(lambda: call(failed))
    assert type(later) is ZerowatchError
    assert "train_batch failed on this rank with KeyError" in str(later)
    assert isinstance(raised_by(lambda: call(peer)), PeerFailedError)


def test_errors_in_a_run_that_has_not_ended_are_raised_unchanged() -> None:
    peer, _ = run_ends(2)
    error = ValueError("a bad batch")

    assert raised_by(lambda: call(peer, lambda: fail(error))) is error
    assert call(peer, lambda: 7) == 7


def test_the_first_of_two_failures_ends_the_run_and_each_rank_has_its_own() -> None:
    first, second, peer = run_ends(3)
    own = ValueError("two")
    first.end(KeyError("one"), "train_batch")

    def fails() -> None:
        second.end(own, "train_batch")
        raise own

    assert raised_by(lambda: call(second, fails)) is own
    error = raised_by(lambda: call(peer, lambda: fail(RuntimeError("closed"))))
    assert (error.rank, error.error_type) == (0, "KeyError")


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("aborted"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ],
)
def test_the_failure_of_a_collective_is_not_taken_for_the_cause(error: Exception) -> None:
    peer, other = run_ends(2)
    other.end(error, "train_batch")

    assert peer.peer_failure() is None
    assert not other._host_group.is_closed


def test_runs_on_one_store_are_separate() -> None:
    store = torch.distributed.HashStore()
    earlier = on_ranks(2, lambda host_group: RunEnd(host_group, store))
    later = on_ranks(2, lambda host_group: RunEnd(host_group, store))

    earlier[1].end(KeyError("labels"), "train_batch")

    assert earlier[0].peer_failure() is not None
    assert later[0].peer_failure() is None


def test_a_single_rank_ends_nothing() -> None:
    (alone,) = run_ends(1)
    alone.start()
    alone.announce(1, {})
    alone.end(KeyError("labels"), "train_batch")

    assert call(alone, lambda: 7) == 7
    assert isinstance(raised_by(lambda: call(alone, lambda: fail(KeyError("x")))), KeyError)


def test_ranks_that_all_failed_reach_consensus() -> None:
    store = torch.distributed.HashStore()

    def ask(host_group: FakeHostGroup) -> bool:
        run_end = RunEnd(host_group, store)
        run_end.announce(7, {"world": 3})
        return run_end.all_failed(7)

    assert on_ranks(2, ask) == [True, True]


@pytest.mark.parametrize(
    ("issued", "is_same_point"),
    [
        ([{"world": 3}, {"world": 3}, {"world": 2}], False),
        ([{"world": 3, "a": 1}, {"world": 3, "a": 1}, {"world": 3, "b": 7}], True),
        ([{"world": 3, "a": 1}, {"world": 3, "a": 2}, {"world": 3, "b": 7}], False),
    ],
)
def test_ranks_that_have_issued_different_collectives_reach_no_consensus(
    issued: list[dict[str, int]], is_same_point: bool
) -> None:
    """NCCL returns before the others have entered a collective: who is ahead would wait forever."""
    ranks = run_ends(3)
    for run_end, numbers in zip(ranks, issued, strict=True):
        run_end.announce(7, numbers)

    assert [run_end.all_failed(7) for run_end in ranks] == [is_same_point] * 3


def test_a_collective_that_has_no_memory_ends_the_run() -> None:
    peer, failed = run_ends(2)

    failed.end(torch.distributed.DistBackendError("Failed to CUDA calloc async 608 bytes"), "step")

    assert peer.peer_failure() is not None


def test_a_rank_that_failed_alone_stops_waiting() -> None:
    run_end, _ = run_ends(2)
    run_end.announce(7, {})

    assert not run_end.all_failed(7, wait_seconds=0.05)


def test_a_rank_stops_waiting_for_the_others_once_the_run_has_ended() -> None:
    first, second, _ = run_ends(3)
    first.end(KeyError("labels"), "train_batch")
    second.announce(7, {})

    assert not second.all_failed(7, wait_seconds=PATIENCE_SECONDS)


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_end_module, "POLL_SECONDS", 0.001)


@pytest.mark.usefixtures("short_polls")
def test_a_call_that_another_rank_s_failure_leaves_waiting_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended, codes = threading.Event(), []

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    peer, failed = run_ends(2, exit_process=exit_process, exit_seconds=0.01)
    peer.start()

    def wait() -> None:
        failed.end(KeyError("labels"), "train_batch")
        assert ended.wait(PATIENCE_SECONDS)

    assert isinstance(raised_by(lambda: call(peer, wait)), PeerFailedError)
    assert codes == [1]
    assert "train_batch failed on rank 1 with KeyError" in caplog.text
    assert "rank 0 exits with code 1" in caplog.text
    peer.close()


@pytest.mark.usefixtures("short_polls")
def test_a_call_that_still_waits_after_the_failed_rank_has_left_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_end_module, "LEFT_SECONDS", 0.01)
    ended, codes = threading.Event(), []

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    peer, failed = run_ends(2, exit_process=exit_process, exit_seconds=10 * PATIENCE_SECONDS)
    peer.start()

    def wait() -> None:
        failed.end(KeyError("labels"), "train_batch")
        failed.close()
        assert ended.wait(PATIENCE_SECONDS)

    assert isinstance(raised_by(lambda: call(peer, wait)), PeerFailedError)
    assert codes == [1]
    peer.close()


@pytest.mark.usefixtures("short_polls")
def test_a_process_that_is_in_no_call_is_not_ended() -> None:
    codes: list[int] = []
    peer, failed = run_ends(2, exit_process=codes.append, exit_seconds=0.0)
    peer.start()

    failed.end(KeyError("labels"), "train_batch")
    wait_until(lambda: not peer._thread.is_alive())

    assert codes == []
    assert isinstance(raised_by(lambda: call(peer)), PeerFailedError)


@pytest.mark.usefixtures("short_polls")
def test_a_rank_that_a_failed_rank_waits_for_in_vain_ends_the_run_for_it() -> None:
    peer, failed, third = run_ends(3)
    asked: list[FailureNotice] = []
    peer.waits_in_vain = lambda notice: asked.append(notice) or len(asked) > 1
    for run_end in (peer, third):
        run_end.start()
    own = ValueError("full")

    def fails() -> None:
        assert failed.publish(7, own, "train_batch", {"world": 3})
        assert not failed.all_failed(7, wait_seconds=PATIENCE_SECONDS)
        failed.end(own, "train_batch")
        raise own

    assert raised_by(lambda: call(failed, fails)) is own
    assert asked == [FailureNotice(7, 1, "ValueError", "full", "train_batch", {"world": 3})] * 2
    for run_end in (peer, third):
        wait_until(lambda run_end=run_end: run_end._host_group.is_closed)
        error = raised_by(lambda run_end=run_end: call(run_end))
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.error_type, error.place) == (1, "ValueError", "train_batch")
        run_end.close()


@pytest.mark.usefixtures("short_polls")
def test_a_failed_rank_that_still_waits_after_the_end_of_the_run_exits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_end_module, "FAILED_EXIT_SECONDS", 0.01)
    ended, codes = threading.Event(), []

    def exit_process(code: int) -> None:
        codes.append(code)
        ended.set()

    peer, failed = run_ends(2, exit_process=exit_process)
    peer.waits_in_vain = lambda notice: True
    for run_end in (peer, failed):
        run_end.start()

    def waits() -> None:
        assert failed.publish(7, ValueError("full"), "train_batch", None)
        assert ended.wait(PATIENCE_SECONDS)

    call(failed, waits)
    assert codes == [1]
    assert failed._host_group.is_closed  # the other ranks may vote
    assert "rank 1 exits with code 1" in caplog.text
    for run_end in (peer, failed):
        run_end.close()


def test_a_notice_that_no_store_takes_is_reported() -> None:
    _, failed = run_ends(2)
    failed.close()

    assert not failed.publish(7, ValueError("full"), "train_batch", None)


@pytest.mark.usefixtures("short_polls")
def test_close_ends_the_thread_and_is_safe_twice() -> None:
    peer, _ = run_ends(2)
    peer.start()

    peer.close()
    peer.close()

    assert not peer._thread.is_alive()


@pytest.mark.usefixtures("short_polls")
def test_the_thread_ends_quietly_once_the_store_is_gone() -> None:
    class Gone:
        def clone(self) -> Gone:
            raise RuntimeError("connection refused")

    peer, _ = on_ranks(2, lambda host_group: RunEnd(host_group, Gone()))
    peer.start()

    wait_until(lambda: not peer._thread.is_alive())


class BrokenOnce:
    """Store of which the first connection of each rank breaks."""

    def __init__(self, store: torch.distributed.Store) -> None:
        self._store = store

    def clone(self) -> BrokenOnce | torch.distributed.Store:
        return _Broken(self._store)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class _Broken(BrokenOnce):
    def clone(self) -> torch.distributed.Store:
        return self._store

    def check(self, keys: list[str]) -> bool:
        raise torch.distributed.DistNetworkError("Connection reset by peer")


@pytest.mark.usefixtures("short_polls")
def test_the_thread_connects_again_if_its_connection_to_the_store_breaks() -> None:
    assert peer_finds_error_in(BrokenOnce(torch.distributed.HashStore()))


def peer_finds_error_in(store: torch.distributed.Store) -> bool:
    peer, failed = on_ranks(2, lambda host_group: RunEnd(host_group, store))
    peer.start()
    failed.end(KeyError("labels"), "train_batch")
    wait_until(lambda: peer.has_ended or not peer._thread.is_alive())
    has_ended = peer.has_ended
    peer.close()
    return has_ended


@pytest.mark.usefixtures("short_polls")
def test_an_error_is_found_in_a_store_without_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = torch.distributed.PrefixStore("worker/attempt_0", server)
    remove_clone(monkeypatch)

    assert peer_finds_error_in(store)


def test_after_an_interrupted_update_each_call_says_that_the_run_has_ended() -> None:
    (alone,) = run_ends(1)

    def interrupted() -> None:
        with alone.updating("engine.step()"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(alone, interrupted)

    for _ in range(2):
        error = raised_by(lambda: call(alone))
        assert isinstance(error, ZerowatchError)
        assert "KeyboardInterrupt" in str(error) and "checkpoint" in str(error)


def fail_in_update(run_end: RunEnd, error: Exception) -> None:
    with run_end.updating("engine.step()"):
        raise error


def test_an_error_in_an_update_is_raised_and_ends_the_run_of_one_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (alone,) = run_ends(1)
    own = ValueError("lr")

    assert raised_by(lambda: call(alone, lambda: fail_in_update(alone, own))) is own

    for _ in range(2):
        later = raised_by(lambda: call(alone))
        assert type(later) is ZerowatchError
        for part in ("engine.step()", "ValueError", "updated in part", "load the last checkpoint"):
            assert part in str(later)
    assert str(later) in caplog.text


def test_a_rebuild_that_leaves_no_engine_ends_the_run_of_one_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (alone,) = run_ends(1)

    alone.end_without_engine(KeyboardInterrupt())

    later = raised_by(lambda: call(alone))
    assert type(later) is ZerowatchError
    for part in ("rebuild", "KeyboardInterrupt", "weights", "load the last checkpoint"):
        assert part in str(later)
    assert str(later) in caplog.text


def test_a_rebuild_that_one_rank_leaves_without_an_engine_ends_the_run_on_all_ranks() -> None:
    peer, failed = run_ends(2)

    failed.end_without_engine(KeyboardInterrupt())

    assert "KeyboardInterrupt" in str(raised_by(lambda: call(failed)))
    error = raised_by(lambda: call(peer, lambda: fail(RuntimeError("closed"))))
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.can_continue) == (1, False)


def test_ranks_that_leave_a_rebuild_together_have_the_error_of_the_rank_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = torch.distributed.HashStore()
    own = RuntimeError("no state can be restored")

    def rebuild(host_group: FakeHostGroup) -> tuple[RunEnd, BaseException]:
        run_end = RunEnd(host_group, store)
        error = own if host_group.rank == 2 else PeerAttemptError("another rank has failed")

        def fails() -> None:
            try:
                run_end.end_in_rebuild(error)
            except Exception as raised:
                run_end.end_without_engine(raised)  # has no effect
                raise

        return run_end, raised_by(lambda: call(run_end, fails))

    ended = on_ranks(3, rebuild)

    *peers, (_, failed) = ended
    assert failed is own
    for _, error in peers:
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.error_type, error.error_text) == (2, "RuntimeError", str(own))
        assert not error.can_continue
    for run_end, _ in ended:
        assert run_end.peer_failure() is None
        assert not run_end._host_group.is_closed
        later = raised_by(lambda run_end=run_end: call(run_end))
        assert type(later) is ZerowatchError
        assert "weights of the model are lost" in str(later)
        assert "load the last checkpoint" in str(later)
    assert caplog.text.count("this run has ended") == 1  # by rank 0


@pytest.mark.parametrize("own", [None, RuntimeError("no state can be restored")])
def test_a_rebuild_that_ends_as_a_process_has_ended_needs_a_restart(
    own: RuntimeError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, _ = run_ends(2)
    closed = RuntimeError("gloo/transport: Connection closed by peer")
    monkeypatch.setattr(FakeHostGroup, "all_gather_text", lambda *_: fail(closed))
    error = own or PeerAttemptError("another rank has failed")

    raised = raised_by(lambda: call(survivor, lambda: survivor.end_in_rebuild(error)))

    assert raised is (own or closed)
    later = str(raised_by(lambda: call(survivor)))
    assert "Restart it from its last checkpoint" in later
    assert "Make the model" not in later


@pytest.mark.parametrize("name", ["end_in_update", "end_with_gradients"])
def test_ranks_that_leave_together_as_a_process_has_ended_need_a_restart(name: str) -> None:
    survivor, _ = run_ends(2)
    closed = RuntimeError("gloo/transport: Connection closed by peer")

    getattr(survivor, name)(closed, "engine.step()")

    assert "Restart it from its last checkpoint" in str(raised_by(lambda: call(survivor)))


def test_an_error_of_one_rank_in_an_update_ends_the_run_on_all_ranks() -> None:
    peer, failed = run_ends(2)
    own = ValueError("lr")

    assert raised_by(lambda: call(failed, lambda: fail_in_update(failed, own))) is own

    assert "ValueError" in str(raised_by(lambda: call(failed)))
    error = raised_by(lambda: call(peer, lambda: fail(RuntimeError("closed"))))
    assert isinstance(error, PeerFailedError)
    assert (error.rank, error.place, error.can_continue) == (1, "engine.step()", False)


def test_an_update_that_all_ranks_leave_ends_the_run_and_none_leaves_the_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = run_ends(3)
    peer = PeerFailedError(0, "ValueError", "lr", "engine.step()", (0,))
    errors = (ValueError("lr"), peer, PeerOutOfMemoryError("another rank"))

    for run_end, error in zip(ranks, errors, strict=True):

        def fails(run_end: RunEnd = run_end, error: Exception = error) -> None:
            with run_end.updating("engine.step()"):
                run_end.end_in_update(error, "engine.step()")
                raise error

        assert raised_by(lambda run_end=run_end, fails=fails: call(run_end, fails)) is error

    assert not peer.can_continue
    for run_end, error in zip(ranks, errors, strict=True):
        assert run_end.peer_failure() is None
        assert not run_end._host_group.is_closed
        later = raised_by(lambda run_end=run_end: call(run_end))
        assert type(later) is ZerowatchError
        assert type(error).__name__ in str(later) and "updated in part" in str(later)
    assert caplog.text.count("this run has ended") == 1  # by rank 0


def test_a_collective_that_fails_in_an_update_hides_no_failure_of_another_rank() -> None:
    waiting, failed = run_ends(2)
    failed.end(KeyError("labels"), "engine.step()")
    closed = RuntimeError("gloo/transport: Connection closed by peer")

    for _ in range(2):
        error = raised_by(lambda: call(waiting, lambda: fail_in_update(waiting, closed)))
        assert isinstance(error, PeerFailedError)
        assert "labels" in str(error)


def test_a_collective_that_fails_in_an_update_ends_the_run_of_its_rank() -> None:
    """A rank that was killed has written no error."""
    waiting, _ = run_ends(2)
    closed = RuntimeError("gloo/transport: Connection closed by peer")

    assert raised_by(lambda: call(waiting, lambda: fail_in_update(waiting, closed))) is closed

    later = raised_by(lambda: call(waiting))
    assert type(later) is ZerowatchError
    assert "Restart it from its last checkpoint" in str(later)


def test_after_a_window_that_keeps_its_gradients_each_rank_ends_and_none_leaves_the_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = run_ends(2)
    own = KeyError("labels")
    peer = PeerFailedError(0, "KeyError", "'labels'", "train_batch", (0,))

    for run_end, error in zip(ranks, (own, peer), strict=True):

        def fails(run_end: RunEnd = run_end, error: Exception = error) -> None:
            run_end.end_with_gradients(error, "Muon keeps state")
            raise error

        assert raised_by(lambda run_end=run_end, fails=fails: call(run_end, fails)) is error

    assert not peer.can_continue
    for run_end, name in zip(ranks, ("KeyError", "PeerFailedError"), strict=True):
        assert run_end.has_ended
        assert run_end.peer_failure() is None
        assert not run_end._host_group.is_closed
        later = raised_by(lambda run_end=run_end: call(run_end))
        assert type(later) is ZerowatchError
        assert name in str(later) and "Muon keeps state" in str(later)
    assert caplog.text.count("Muon keeps state") == 1  # by rank 0


def test_a_window_that_keeps_its_gradients_hides_no_failure_of_another_rank() -> None:
    waiting, failed = run_ends(2)
    failed.end(KeyError("labels"), "engine.step()")
    closed = RuntimeError("gloo/transport: Connection closed by peer")

    def fails() -> None:
        waiting.end_with_gradients(closed, "Muon keeps state")
        raise closed

    for _ in range(2):
        error = raised_by(lambda: call(waiting, fails))
        assert isinstance(error, PeerFailedError)
        assert "labels" in str(error) and not error.can_continue


def test_an_interrupted_window_that_keeps_its_gradients_ends_the_run_on_all_ranks() -> None:
    peer, interrupted = run_ends(2)

    interrupted.end_with_gradients(KeyboardInterrupt(), "Muon keeps state")

    assert peer.peer_failure() is not None
    assert "Muon keeps state" in str(raised_by(lambda: call(interrupted)))
