"""Parts of a rebuild that need no engine: shares, collective attempts, stripping of modules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from zerowatch.runtime.common.all_or_none import CollectiveAttempt, PeerFailedError
from zerowatch.runtime.engine.rebuild.optimizer_layout import rank_partition
from zerowatch.runtime.engine.rebuild.teardown import release_memory, strip_module, track_hooks


class Votes:
    """A host group whose other rank votes as given."""

    rank, world_size = 0, 2

    def __init__(self, *others: int) -> None:
        self.asked: list[int] = []
        self._others = list(others)

    def all_max(self, value: int) -> int:
        self.asked.append(value)
        return max(value, self._others.pop(0) if self._others else 0)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_cover_a_tensor_once(length: int, world_size: int) -> None:
    parts = [rank_partition(length, rank, world_size) for rank in range(world_size)]

    assert sum(count for _, count in parts) == length
    assert all(start + count == after for (start, count), (after, _) in pairwise(parts) if count)


def test_a_failure_on_this_rank_is_reported_to_the_others_once() -> None:
    votes = Votes(0)

    with CollectiveAttempt(votes) as attempt:
        attempt.check_peers()
        raise MemoryError

    assert isinstance(attempt.error, MemoryError)
    assert votes.asked == [0, 1]


def test_a_failure_elsewhere_ends_the_attempt_at_the_next_check_without_another_vote() -> None:
    votes = Votes(1)

    with CollectiveAttempt(votes) as attempt:
        attempt.check_peers()
        pytest.fail("it went on")

    assert isinstance(attempt.error, PeerFailedError)
    assert votes.asked == [0]


def test_a_failure_elsewhere_at_the_end_counts() -> None:
    votes = Votes(1)

    with CollectiveAttempt(votes) as attempt:
        pass

    assert isinstance(attempt.error, PeerFailedError)


def test_an_interrupt_passes_through() -> None:
    with pytest.raises(KeyboardInterrupt), CollectiveAttempt(Votes()):
        raise KeyboardInterrupt


def test_a_released_parameter_has_its_shape_and_one_element_of_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))

    release_memory(parameter, torch.Size((3, 5)))

    assert parameter.shape == (3, 5)
    assert parameter.untyped_storage().nbytes() == parameter.element_size()


def test_stripping_keeps_attributes_of_the_script() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.is_special = True
    model.weight.ds_id = 4
    model.weight.partition = print

    strip_module(model)

    assert vars(model.weight) == {"is_special": True}


def test_only_hooks_added_since_are_removed() -> None:
    model = torch.nn.Linear(2, 2)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("old"))
    undo = track_hooks(model)
    model.register_forward_hook(lambda *_: calls.append("new"))
    model.register_forward_pre_hook(lambda *_: calls.append("new"))
    model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("new"))

    undo()
    model(torch.ones(1, 2)).sum().backward()

    assert calls == ["old"]
