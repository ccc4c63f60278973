"""Code sections that all ranks complete or none, with a fake host group."""

from __future__ import annotations

import pytest

from zerowatch.runtime.common.all_or_none import (
    CollectiveAttempt,
    PeerAttemptError,
    is_peer_failure,
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
