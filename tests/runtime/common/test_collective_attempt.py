"""Tests of code that all ranks complete or no rank completes, with a fake host group.

Covers `host_group.py`.
"""

from __future__ import annotations

import pickle

import pytest
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.errors import CheckpointError
from zerowatch.runtime.common.collective_attempt import (
    CollectiveAttempt,
    PeerAttemptError,
    is_peer_failure,
    raise_on_all_ranks,
)


class HostGroupOfTwo:
    """Host group of two ranks whose other rank passes the given values to `all_max`."""

    rank, world_size = 0, 2

    def __init__(self, *others: int) -> None:
        self.passed: list[int] = []
        self._others = list(others)

    def all_max(self, value: int) -> int:
        self.passed.append(value)
        return max(value, self._others.pop(0) if self._others else 0)


def test_a_failure_on_this_rank_is_reported_to_the_other_ranks_once() -> None:
    host_group = HostGroupOfTwo(0)

    with CollectiveAttempt(host_group) as attempt:
        attempt.check_peers()
        raise MemoryError

    assert isinstance(attempt.error, MemoryError)
    assert host_group.passed == [0, 1]


def test_a_failure_on_another_rank_ends_the_attempt_at_the_next_check() -> None:
    host_group = HostGroupOfTwo(1)

    with CollectiveAttempt(host_group) as attempt:
        attempt.check_peers()
        pytest.fail("the attempt continued")

    assert isinstance(attempt.error, PeerAttemptError)
    assert host_group.passed == [0]


def test_a_failure_on_another_rank_is_found_at_the_end_of_the_attempt() -> None:
    host_group = HostGroupOfTwo(1)

    with CollectiveAttempt(host_group) as attempt:
        pass

    assert isinstance(attempt.error, PeerAttemptError)


def test_a_keyboard_interrupt_is_raised_unchanged() -> None:
    with pytest.raises(KeyboardInterrupt), CollectiveAttempt(HostGroupOfTwo()):
        raise KeyboardInterrupt


@pytest.mark.parametrize("last, expected", [(PeerAttemptError("rank 1"), True), (None, False)])
def test_a_peer_s_failure_is_found_among_causes_even_in_a_cycle(
    last: BaseException | None, expected: bool
) -> None:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, last or first

    assert is_peer_failure(first) is expected


ERRORS = [KeyError("x"), pickle.PicklingError("a lambda"), MemoryError(), RecursionError("deep")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_exception_on_one_rank_is_raised_there_unchanged_and_on_the_others(
    error: Exception,
) -> None:
    def save(host_group: FakeHostGroup) -> BaseException:
        with (
            pytest.raises(Exception) as raised,
            raise_on_all_ranks(host_group, "save", "Earlier ones stay"),
        ):
            if host_group.rank == 1:
                raise error
        return raised.value

    first, own, last = on_ranks(3, save)

    assert own is error
    for peer in (first, last):
        assert type(peer) is CheckpointError
        assert str(peer).startswith("cannot save: failed on rank 1, ")


def test_an_error_of_the_disk_becomes_a_checkpoint_error_on_all_ranks() -> None:
    def save(host_group: FakeHostGroup) -> str:
        with (
            pytest.raises(CheckpointError) as raised,
            raise_on_all_ranks(host_group, "save", "Earlier ones stay"),
        ):
            if host_group.rank == 1:
                raise OSError("disk full")
        return str(raised.value)

    peer, own = on_ranks(2, save)

    assert own == "cannot save: disk full. Earlier ones stay"
    assert "failed on rank 1" in peer


def test_the_block_s_own_exception_is_raised_if_the_exchange_fails_too() -> None:
    class Broken:
        def all_gather(self, values: list[bool]) -> None:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(KeyError, match="x") as raised, raise_on_all_ranks(Broken(), "save", ""):
        raise KeyError("x")

    assert str(raised.value.__cause__) == "connection closed by peer"


def test_an_interrupt_is_not_exchanged() -> None:
    with pytest.raises(KeyboardInterrupt), raise_on_all_ranks(HostGroupOfTwo(), "save", ""):
        raise KeyboardInterrupt


def test_without_a_failure_the_ranks_meet_at_each_check_and_at_the_end() -> None:
    host_group = HostGroupOfTwo()

    with CollectiveAttempt(host_group) as attempt:
        attempt.check_peers()

    assert attempt.error is None
    assert host_group.passed == [0, 0]


def test_without_a_failure_nothing_is_raised_on_any_rank() -> None:
    def save(host_group: FakeHostGroup) -> str:
        with raise_on_all_ranks(host_group, "save", "Earlier ones stay"):
            pass
        return "saved"

    assert on_ranks(2, save) == ["saved", "saved"]


def test_each_rank_that_failed_is_named_on_the_others() -> None:
    def save(host_group: FakeHostGroup) -> str:
        with (
            pytest.raises(CheckpointError) as raised,
            raise_on_all_ranks(host_group, "save", "Earlier ones stay"),
        ):
            if host_group.rank in (0, 2):
                raise CheckpointError(f"of rank {host_group.rank}")
        return str(raised.value)

    assert on_ranks(4, save) == [
        "of rank 0",
        "cannot save: failed on rank 0, 2, whose error has the reason. Earlier ones stay",
        "of rank 2",
        "cannot save: failed on rank 0, 2, whose error has the reason. Earlier ones stay",
    ]


def test_a_peer_s_failure_is_one_only_if_it_was_the_cause() -> None:
    peer = PeerAttemptError("another rank has failed")
    caused, unrelated = RuntimeError("one"), RuntimeError("two")
    caused.__cause__ = peer
    unrelated.__context__ = peer

    assert is_peer_failure(peer) and is_peer_failure(caused)
    assert not is_peer_failure(unrelated)
