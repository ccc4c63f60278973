"""Which knobs are bit-exact: told from checksums, agreed over ranks, with every knob put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from fakes.ranks import FakeAgreement, on_ranks

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.tuner.bitwise_check import bitwise_invariant_knobs
from zerowatch.runtime.tuner.dry_run_window import checksum_of
from zerowatch.runtime.tuner.policy.types import Configuration, Value

BEFORE = {"size": 4, "switch": False}
KNOBS: Mapping[str, Sequence[Value]] = {"size": [4, 8, 16], "switch": [True]}


class FakeHands:
    """Turns two knobs; `refused` cannot be turned."""

    def __init__(self, refused: str | None = None) -> None:
        self.now: dict[str, Value] = dict(BEFORE)
        self.refused = refused

    def values(self) -> Configuration:
        return dict(self.now)

    def options(self) -> Mapping[str, Sequence[Value]]:
        return {}

    def refusal(self, target: Configuration) -> str | None:
        return None

    def apply(self, target: Configuration) -> Callable[[], None]:
        if self.refused is not None and target[self.refused] != self.now[self.refused]:
            raise ZerowatchError("it cannot be turned")
        before, self.now = self.now, dict(target)

        def undo() -> None:
            self.now = before

        return undo

    def verify(self, target: Configuration) -> bool:
        return True


def find(gradients: Callable[[int, Configuration], int | None], refused_on: int = -1) -> list:
    """Test on two ranks; return what each found, with its knobs as they are then."""

    def test(agreement: FakeAgreement) -> tuple[frozenset[str], Configuration]:
        hands = FakeHands("switch" if agreement.rank == refused_on else None)
        found = bitwise_invariant_knobs(
            lambda: gradients(agreement.rank, hands.values()), hands, agreement, KNOBS
        )
        return found, hands.values()

    return on_ranks(2, test)


def test_a_knob_is_exact_if_no_value_changes_any_rank_s_gradients():
    assert find(lambda rank, now: 7 + rank) == [({"size", "switch"}, BEFORE)] * 2


def test_a_value_that_changes_one_rank_s_gradients_rules_its_knob_out_on_all():
    def gradients(rank: int, now: Configuration) -> int:
        return int(rank == 1 and now["size"] == 16)

    assert find(gradients) == [({"switch"}, BEFORE)] * 2


def test_a_knob_that_one_rank_cannot_turn_is_not_exact_and_is_turned_back():
    assert find(lambda rank, now: 7, refused_on=1) == [({"size"}, BEFORE)] * 2


def test_where_memory_does_not_suffice_nothing_is_exact():
    assert find(lambda rank, now: None) == [(frozenset(), BEFORE)] * 2
    some = find(lambda rank, now: None if now["size"] == 8 else 7)
    assert some == [({"switch"}, BEFORE)] * 2


def test_a_knob_whose_passes_fail_is_turned_back():
    hands = FakeHands()

    def gradients() -> int:
        if hands.now["switch"]:
            raise ValueError("by the script's own loss")
        return 7

    def test(agreement: FakeAgreement) -> None:
        bitwise_invariant_knobs(gradients, hands, agreement, {"switch": [True]})

    with pytest.raises(ValueError):
        on_ranks(1, test)
    assert hands.now == BEFORE


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_tells_every_bit_and_every_place(kind: torch.dtype):
    tensors = [torch.arange(9).to(kind).reshape(3, 3), torch.ones(2, dtype=kind)]
    same = [each.clone() for each in tensors]
    minus_zero = [tensors[0].clone(), tensors[1]]
    minus_zero[0][0, 0] = -0.0
    swapped = [tensors[0].flip(0), tensors[1]]

    expected = checksum_of(iter(tensors))

    assert checksum_of(iter(same)) == expected
    assert checksum_of(iter(minus_zero)) != expected
    assert checksum_of(iter(swapped)) != expected
    assert checksum_of(iter(reversed(tensors))) != expected
