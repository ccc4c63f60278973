"""An order carried out by all ranks or by none: ranks are threads, hands are fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fakes.ranks import FakeHostGroup, on_ranks

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.undo import UndoStack
from zerowatch.runtime.tuner.policy.transaction import exchange_order
from zerowatch.runtime.tuner.policy.types import Order

BEFORE = {"bucket": 100, "overlap": False, "codec": None}
TARGET = {"bucket": 200, "overlap": True, "codec": "int8"}


class Telling(FakeHostGroup):
    """One that can also tell a text."""

    def __init__(self, host_group: FakeHostGroup) -> None:
        super().__init__(host_group.rank, host_group._meeting)

    def broadcast_text(self, text: str) -> str:
        return self._meeting.exchange(self.rank, text)[0]


class FakeHands:
    """Knobs in a dict; `faults` by method name are called first."""

    def __init__(self, **faults: Callable[[], Any]) -> None:
        self.knobs: dict[str, Any] = dict(BEFORE)
        self.calls: list[str] = []
        self._faults = faults

    def values(self) -> Mapping[str, Any]:
        return dict(self.knobs)

    def options(self) -> Mapping[str, Any]:
        return {}

    def unsupported_reason(self, target: Mapping[str, Any]) -> str | None:
        return self._call("unsupported_reason", None)

    def apply(self, target: Mapping[str, Any]) -> Callable[[], None]:
        self._call("apply", None)
        before = dict(self.knobs)
        self.knobs.update(target)

        def undo() -> None:
            self._call("undo", None)
            self.knobs = before

        return undo

    def verify(self, target: Mapping[str, Any]) -> bool:
        return bool(self._call("verify", self.knobs == dict(target)))

    def _call(self, name: str, otherwise: Any) -> Any:
        self.calls.append(name)
        return self._faults[name]() if name in self._faults else otherwise


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def met(hands: list[FakeHands], order: Order | None) -> list[Any]:
    """Let all ranks meet; only rank 0 has the order."""

    def body(host_group: FakeHostGroup) -> Any:
        own = order if host_group.rank == 0 else None
        return exchange_order(Telling(host_group), hands[host_group.rank], own, clock=lambda: 5.0)

    return on_ranks(len(hands), body)


def order(**changes: Any) -> Order:
    return Order(target=TARGET, why="a test", **changes)


def test_an_order_of_rank_0_is_done_on_all_ranks():
    hands = [FakeHands(), FakeHands(), FakeHands()]

    told = met(hands, order())

    assert [each.knobs for each in hands] == [TARGET] * 3
    assert {(each[0].target["codec"], each[1].done, each[1].reason) for each in told} == {
        ("int8", True, "")
    }


def test_without_an_order_nothing_is_done():
    hands = [FakeHands(), FakeHands()]

    assert met(hands, None) == [None, None]
    assert [each.calls for each in hands] == [[], []]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"unsupported_reason": lambda: "no room"}, "rank 1: no room"),
        ({"apply": raising(ZerowatchError("no such knob"))}, "rank 1: no such knob"),
        ({"apply": raising(RuntimeError("out of memory"))}, "rank 1: RuntimeError: out of memory"),
        ({"apply": raising(MemoryError())}, "rank 1: MemoryError:"),
        ({"apply": raising(AttributeError("gone"))}, "rank 1: AttributeError: gone"),
        ({"verify": lambda: False}, "rank 1: what was set does not read back"),
        ({"verify": raising(KeyError("state"))}, "rank 1: KeyError: 'state'"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_fails_on_one_rank_is_undone_on_all_and_all_know_why(world_size, fault, reason):
    hands = [FakeHands() for _ in range(world_size)]
    hands[1] = FakeHands(**fault)

    told = met(hands, order())

    assert [each.knobs for each in hands] == [BEFORE] * world_size
    assert {(each[1].done, each[1].reason, each[1].undone) for each in told} == {
        (False, reason, True)
    }


def test_nothing_is_touched_where_a_rank_refuses():
    hands = [FakeHands(), FakeHands(unsupported_reason=lambda: "no room")]

    met(hands, order())

    assert [each.calls for each in hands] == [["unsupported_reason"], ["unsupported_reason"]]


def test_the_way_back_is_not_asked_whether_it_fits():
    hands = [FakeHands(), FakeHands(unsupported_reason=lambda: "no room")]

    told = met(hands, order(checked=False))

    assert told[0][1].done
    assert "unsupported_reason" not in hands[1].calls


def test_all_ranks_know_where_one_could_not_undo():
    hands = [FakeHands(undo=raising(RuntimeError("stuck"))), FakeHands(verify=lambda: False)]

    told = met(hands, order())

    assert [each[1].undone for each in told] == [False, False]
    assert hands[1].knobs == BEFORE


def test_the_words_are_those_of_a_rank_that_failed_by_itself():
    echo = raising(ZerowatchError("the engine was not rebuilt: another rank has failed"))
    hands = [FakeHands(apply=echo), FakeHands(apply=raising(ZerowatchError("no room for it")))]

    told = met(hands, order())

    assert {each[1].reason for each in told} == {"rank 1: no room for it"}


def test_long_words_are_cut_and_odd_letters_survive():
    hands = [FakeHands(), FakeHands(unsupported_reason=lambda: "é" * 1000)]

    told = met(hands, order())

    assert told[0][1].reason == f"rank 1: {'é' * 150}"


def test_a_peer_that_is_gone_is_raised_when_this_rank_is_as_before():
    hands = FakeHands()

    class Alone:
        rank, world_size = 0, 2
        votes = 0

        def broadcast_text(self, text: str) -> str:
            return text

        def all_max(self, value: int) -> int:
            self.votes += 1
            if self.votes == 2:
                raise RuntimeError("Connection closed by peer")
            return value

    with pytest.raises(RuntimeError, match="closed by peer"):
        exchange_order(Alone(), hands, order())

    assert hands.calls == ["unsupported_reason", "apply", "undo"]
    assert hands.knobs == BEFORE


def test_of_several_changes_all_are_taken_back_though_one_cannot_be():
    undone: list[str] = []
    undos = UndoStack()
    undos.add(lambda: undone.append("first"))
    undos.add(raising(RuntimeError("stuck")))
    undos.add(lambda: undone.append("last"))

    with pytest.raises(RuntimeError, match="stuck"):
        undos()
    undos()

    assert undone == ["last", "first"]


def test_changes_before_one_that_fails_are_taken_back():
    undone: list[str] = []
    undos = UndoStack()

    with pytest.raises(ValueError, match="no"):
        undos.do([lambda: lambda: undone.append("first"), raising(ValueError("no"))])
    undos()

    assert undone == ["first"]
