"""A switch request is applied on all ranks or on none; ranks are threads, knobs are fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.collective_attempt import PeerAttemptError
from zerowatch.runtime.common.undo import UndoStack
from zerowatch.runtime.tuner.policy.policy_types import SwitchRequest, SwitchResult
from zerowatch.runtime.tuner.transaction import apply_switch, switch_all_ranks

BEFORE = {"bucket": 100, "overlap": False, "codec": None}
TARGET = {"bucket": 200, "overlap": True, "codec": "int8"}


class TextHostGroup(FakeHostGroup):
    """Can broadcast a text, too."""

    def __init__(self, host_group: FakeHostGroup) -> None:
        super().__init__(host_group.rank, host_group._meeting)

    def broadcast_text(self, text: str) -> str:
        return self._meeting.exchange(self.rank, text)[0]


class FakeKnobs:
    """Knobs in a dict; `faults` by method name are called first."""

    has_engine = True

    def __init__(self, **faults: Callable[[], Any]) -> None:
        self.current: dict[str, Any] = dict(BEFORE)
        self.calls: list[str] = []
        self._faults = faults

    def values(self) -> Mapping[str, Any]:
        return dict(self.current)

    def options(self) -> Mapping[str, Any]:
        return {}

    def unsupported_reason(self, target: Mapping[str, Any]) -> str | None:
        return self._call("unsupported_reason", None)

    def apply(self, target: Mapping[str, Any]) -> Callable[[], None]:
        self._call("apply", None)
        before = dict(self.current)
        self.current.update(target)

        def undo() -> None:
            self._call("undo", None)
            self.current = before

        return undo

    def verify(self, target: Mapping[str, Any]) -> bool:
        return bool(self._call("verify", self.current == dict(target)))

    def _call(self, name: str, otherwise: Any) -> Any:
        self.calls.append(name)
        return self._faults[name]() if name in self._faults else otherwise


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def exchange(knobs: list[FakeKnobs], request: SwitchRequest | None) -> list[Any]:
    """Exchange a switch request that only rank 0 has."""

    def body(host_group: FakeHostGroup) -> Any:
        own = request if host_group.rank == 0 else None
        return switch_all_ranks(
            TextHostGroup(host_group), knobs[host_group.rank], own, clock=lambda: 5.0
        )

    return on_ranks(len(knobs), body)


def request(**changes: Any) -> SwitchRequest:
    return SwitchRequest(target=TARGET, reason="a test", **changes)


def test_a_request_of_rank_0_is_applied_on_all_ranks():
    knobs = [FakeKnobs(), FakeKnobs(), FakeKnobs()]

    ended = exchange(knobs, request())

    assert [each.current for each in knobs] == [TARGET] * 3
    assert {(each[0].target["codec"], each[1].done, each[1].reason) for each in ended} == {
        ("int8", True, "")
    }


def test_without_a_request_nothing_is_done():
    knobs = [FakeKnobs(), FakeKnobs()]

    assert exchange(knobs, None) == [None, None]
    assert [each.calls for each in knobs] == [[], []]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"unsupported_reason": lambda: "no room"}, "rank 1: no room"),
        ({"apply": raising(ZerowatchError("no such knob"))}, "rank 1: no such knob"),
        ({"apply": raising(RuntimeError("out of memory"))}, "rank 1: RuntimeError: out of memory"),
        ({"apply": raising(MemoryError())}, "rank 1: MemoryError:"),
        ({"apply": raising(AttributeError("gone"))}, "rank 1: AttributeError: gone"),
        ({"verify": lambda: False}, "rank 1: the values read back are not those set"),
        ({"verify": raising(KeyError("state"))}, "rank 1: KeyError: 'state'"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_failure_of_one_rank_is_undone_on_all_with_its_reason(world_size, fault, reason):
    knobs = [FakeKnobs() for _ in range(world_size)]
    knobs[1] = FakeKnobs(**fault)

    ended = exchange(knobs, request())

    assert [each.current for each in knobs] == [BEFORE] * world_size
    assert {(each[1].done, each[1].reason, each[1].undone) for each in ended} == {
        (False, reason, True)
    }


@pytest.mark.parametrize("phase", ["apply", "undo"])
def test_a_failure_that_leaves_no_engine_is_raised(phase: str) -> None:
    lost = RuntimeError("no state can be restored")

    def fail() -> None:
        knobs.has_engine = False
        raise lost

    knobs = FakeKnobs(**{phase: fail, "verify": lambda: False})

    with pytest.raises(RuntimeError) as raised:
        exchange([knobs], request())

    assert raised.value is lost
    assert knobs.calls[-1] == phase


def test_nothing_is_changed_if_a_rank_refuses():
    knobs = [FakeKnobs(), FakeKnobs(unsupported_reason=lambda: "no room")]

    ended = exchange(knobs, request())

    assert [each.calls for each in knobs] == [["unsupported_reason"], ["unsupported_reason"]]
    assert [each[1].refused for each in ended] == [True, True]


@pytest.mark.parametrize("phase", ["apply", "verify"])
def test_a_failure_after_the_check_is_no_refusal(phase):
    knobs = [FakeKnobs(), FakeKnobs(**{phase: raising(ZerowatchError("no"))})]

    ended = exchange(knobs, request())

    assert [each[1].refused for each in ended] == [False, False]


def test_a_rollback_is_not_checked():
    knobs = [FakeKnobs(), FakeKnobs(unsupported_reason=lambda: "no room")]

    ended = exchange(knobs, request(checked=False))

    assert ended[0][1].done
    assert "unsupported_reason" not in knobs[1].calls


def test_all_ranks_learn_that_one_could_not_undo():
    knobs = [FakeKnobs(undo=raising(RuntimeError("stuck"))), FakeKnobs(verify=lambda: False)]

    ended = exchange(knobs, request())

    assert [each[1].undone for each in ended] == [False, False]
    assert {each[1].remaining_changes for each in ended} == {
        'rank 0: bucket=200, codec="int8", overlap=true'
    }
    assert knobs[1].current == BEFORE


def test_the_reason_is_that_of_a_rank_that_failed_by_itself():
    echo = ZerowatchError("the engine was not rebuilt")
    echo.__cause__ = PeerAttemptError("another rank has failed")
    own = ZerowatchError("no room for it")
    knobs = [FakeKnobs(apply=raising(each)) for each in (echo, own)]

    ended = exchange(knobs, request())

    assert {each[1].reason for each in ended} == {"rank 1: no room for it"}


def test_a_long_reason_is_cut_at_a_whole_character():
    knobs = [FakeKnobs(), FakeKnobs(unsupported_reason=lambda: "é" * 1000)]

    ended = exchange(knobs, request())

    assert ended[0][1].reason == f"rank 1: {'é' * 150}"


def test_a_lost_peer_raises_after_this_rank_is_as_before():
    knobs = FakeKnobs()

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
        switch_all_ranks(Alone(), knobs, request())

    assert knobs.calls == ["unsupported_reason", "apply", "undo"]
    assert knobs.current == BEFORE


def test_of_several_changes_all_are_undone_though_one_cannot_be():
    undone: list[str] = []
    undos = UndoStack()
    undos.add(lambda: undone.append("first"))
    undos.add(raising(RuntimeError("stuck")))
    undos.add(lambda: undone.append("last"))

    with pytest.raises(RuntimeError, match="stuck"):
        undos()
    undos()

    assert undone == ["last", "first"]


def test_changes_before_a_failed_one_are_undone():
    undone: list[str] = []
    undos = UndoStack()

    with pytest.raises(ValueError, match="no"):
        undos.do([lambda: lambda: undone.append("first"), raising(ValueError("no"))])
    undos()

    assert undone == ["first"]


def test_a_rank_that_fails_without_a_reason_fails_like_any_other() -> None:
    def rank(host_group: Any) -> SwitchResult:
        knobs = SimpleNamespace(
            values=dict, unsupported_reason=lambda _: "" if host_group.rank else None
        )
        return apply_switch(SwitchRequest(target={}, reason="test"), cast(Any, knobs), host_group)

    for result in on_ranks(2, rank):
        assert not result.done
        assert result.reason
