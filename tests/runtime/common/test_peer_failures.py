"""Tests of failures of the script's own code, which all ranks raise together."""

from __future__ import annotations

import pytest
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.errors import PeerFailedError
from zerowatch.runtime.common.peer_failures import FailureCapture, describe_error, raise_failures


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_of_the_block_is_kept_until_it_is_taken() -> None:
    error = ValueError("x")

    with FailureCapture() as capture:
        raise error

    assert capture.take() is error
    assert capture.take() is None


def test_without_an_exception_nothing_is_kept() -> None:
    with FailureCapture() as capture:
        pass

    assert capture.take() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_propagate(kind: type[BaseException]) -> None:
    capture = FailureCapture()

    with pytest.raises(kind), capture:
        raise kind

    assert capture.take() is None


def test_each_rank_raises_its_own_error_or_names_the_first_rank_that_failed() -> None:
    own = {1: ValueError("bad batch"), 3: KeyError("gone")}

    def body(host_group: FakeHostGroup) -> Exception:
        with pytest.raises(Exception) as raised:
            raise_failures(host_group, own.get(host_group.rank), "train_batch")
        return raised.value

    errors = on_ranks(4, body)

    assert [errors[1], errors[3]] == [own[1], own[3]]
    for peer in (errors[0], errors[2]):
        assert isinstance(peer, PeerFailedError)
        assert (peer.rank, peer.failed_ranks, peer.place) == (1, (1, 3), "train_batch")
        assert (peer.error_type, peer.error_text) == ("ValueError", "bad batch")


def test_without_a_failure_nothing_is_raised() -> None:
    assert on_ranks(2, lambda host_group: raise_failures(host_group, None, "x")) == [None, None]


class Broken:
    """A host group that another rank has left."""

    rank, world_size = 0, 2

    def all_gather_text(self, text: str, num_bytes: int | None = None) -> list[str]:
        raise RuntimeError("connection closed")


def test_an_own_error_comes_before_an_error_of_the_exchange() -> None:
    with pytest.raises(KeyError) as raised:
        raise_failures(Broken(), KeyError("x"), "loss")  # type: ignore[arg-type]

    assert str(raised.value.__cause__) == "connection closed"


def test_an_error_of_the_exchange_is_raised_by_a_rank_without_one_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        raise_failures(Broken(), None, "loss")  # type: ignore[arg-type]


def test_an_error_is_described_by_its_type_and_at_most_500_characters() -> None:
    assert describe_error(ValueError("x" * 600)) == ("ValueError", "x" * 500)
    assert describe_error(Unprintable()) == ("Unprintable", "<exception str() failed>")
