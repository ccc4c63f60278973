"""Tests of optimizer states that are created before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.runtime.trainer.oom_recovery.prepare_engine import (
    materialise_optimizer_states,
    prepare_engine,
)


def trained(
    kind: Any, options: dict[str, Any], seed: int, *, materialized: bool
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    parameters = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    optimizer = kind(parameters, **options)
    if materialized:
        engine = SimpleNamespace(optimizer=optimizer, basic_optimizer=optimizer)
        assert materialise_optimizer_states(engine) is None
        assert all(optimizer.state[parameter] for parameter in parameters)
        assert all(parameter.grad is None for parameter in parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return parameters, optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
    ],
)
def test_training_is_bitwise_equal_if_states_are_created_before_the_first_step(
    kind: Any, options: dict[str, Any], seed: int
) -> None:
    expected, expected_state = trained(kind, options, seed, materialized=False)

    parameters, state = trained(kind, options, seed, materialized=True)

    assert all(map(torch.equal, parameters, expected))
    assert str(state) == str(expected_state)


def test_an_optimizer_that_creates_state_in_its_update_gives_a_reason_and_is_unchanged() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    sgd = torch.optim.SGD([parameter], momentum=0.9)

    reason = materialise_optimizer_states(SimpleNamespace(optimizer=sgd, basic_optimizer=sgd))

    assert reason is not None
    assert reason.startswith("SGD ")
    assert len(sgd.state) == 0


def test_an_unsupported_optimizer_gives_a_reason() -> None:
    unknown = SimpleNamespace(
        param_groups=[{"params": [torch.zeros(1)]}], state={}, swap_optimizer=False
    )

    engine = SimpleNamespace(optimizer=unknown, basic_optimizer=unknown)

    assert materialise_optimizer_states(engine) == "SimpleNamespace is not supported"


def test_an_engine_that_cannot_discard_a_batch_is_logged_with_the_errors_that_end_its_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)])

    prepare_engine(SimpleNamespace(optimizer=sgd, basic_optimizer=sgd))

    (line,) = caplog.messages
    for part in ("train_batch", "out of memory", "not finite", "SimpleNamespace runs its own"):
        assert part in line
