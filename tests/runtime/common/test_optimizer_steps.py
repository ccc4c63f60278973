"""Functions are called after steps of any optimizer, and may come and go during a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerowatch.runtime.common.optimizer_steps import METHOD, call_after_steps


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Torch is as before after each test."""
    before = vars(torch.optim.Optimizer)[METHOD]
    yield
    assert vars(torch.optim.Optimizer)[METHOD] is before


def optimizer() -> torch.optim.Optimizer:
    made = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for parameter in made.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    return made


def test_each_function_is_called_with_the_optimizer_that_has_stepped() -> None:
    calls: list[tuple[str, Any]] = []
    one, other = optimizer(), optimizer()
    first = call_after_steps(lambda stepped: calls.append(("first", stepped)))
    second = call_after_steps(lambda stepped: calls.append(("second", stepped)))

    one.step()
    first.remove()
    other.step()
    second.remove()
    one.step()

    assert calls == [("first", one), ("second", one), ("second", other)]


def test_the_weights_have_changed_by_then() -> None:
    stepped = optimizer()
    (weight, _) = stepped.param_groups[0]["params"]
    before, seen = weight.detach().clone(), []
    handle = call_after_steps(lambda _: seen.append(weight.detach().clone()))

    stepped.step()
    handle.remove()

    assert torch.equal(seen[0], before - 0.1)


def test_a_handle_is_removed_once() -> None:
    calls: list[int] = []
    first = call_after_steps(lambda _: calls.append(1))
    second = call_after_steps(lambda _: calls.append(2))

    first.remove()
    first.remove()
    optimizer().step()
    second.remove()

    assert calls == [2]


@pytest.mark.parametrize("when", ["in a hook of torch", "in a function"])
def test_functions_come_and_go_during_a_step_between_hooks_of_the_script(when: str) -> None:
    calls: list[str] = []
    going = call_after_steps(lambda _: calls.append("going"))
    coming: list[Any] = []

    def change(*_: object) -> None:
        going.remove()
        coming.append(call_after_steps(lambda _: calls.append("coming")))

    own = [
        register_optimizer_step_post_hook(change)
        if when == "in a hook of torch"
        else call_after_steps(change),
        register_optimizer_step_post_hook(lambda *_: calls.append("own")),
    ]

    optimizer().step()
    own[0].remove()
    optimizer().step()
    for handle in (*own, *coming):
        handle.remove()

    assert calls == ["going", "own", "coming", "own"]


def test_what_a_function_refers_to_is_released_with_its_handle() -> None:
    class Held:
        pass

    held = Held()
    released = weakref.ref(held)
    handle = call_after_steps(lambda _, held=held: None)  # type: ignore[misc]

    handle.remove()
    del handle, held
    gc.collect()

    assert released() is None
