"""Tests of the split of samples into micro-batches, and of the exponent of their weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerowatch.errors import BatchError, NonFiniteLossError
from zerowatch.runtime.trainer.window.micro_batches import (
    LossSums,
    Window,
    _LossAccumulator,
    divide_and_step,
    evaluate_micro_batches,
    loss_and_weight,
    split_sizes,
    train_micro_batches,
    weight_exponent,
)


@pytest.mark.parametrize(
    ("samples", "micro_batch", "sizes"),
    [(8, 8, (8,)), (8, 3, (3, 3, 2)), (8, 1, (1,) * 8), (8, 100, (8,)), (7, 4, (4, 3))],
)
def test_no_micro_batch_is_larger_than_requested_and_all_are_as_even_as_possible(
    samples, micro_batch, sizes
):
    assert split_sizes(samples, -(-samples // micro_batch)) == sizes


def test_a_rank_with_fewer_samples_than_micro_batches_has_empty_ones():
    assert split_sizes(2, 5) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize(("weight", "exponent"), [(8, 0), (16, 1), (8 * 100, 7), (4, -1)])
def test_the_exponent_is_that_of_the_closest_power_of_two(weight, exponent):
    assert weight_exponent(weight, 8) == exponent


@pytest.mark.parametrize("weight", ["4", None, [4], 1j, torch.ones(2), torch.ones(1) * 1j])
def test_a_weight_that_is_no_number_is_an_error_that_names_it(weight):
    with pytest.raises(TypeError) as caught:
        loss_and_weight((torch.ones((), requires_grad=True), weight), 3)

    assert "weight" in str(caught.value)
    assert "number" in str(caught.value)
    assert (str(tuple(weight.shape)) if isinstance(weight, torch.Tensor) else repr(weight)) in str(
        caught.value
    )


@pytest.mark.parametrize("weight", [4, 4.0, np.float32(4), np.int64(4), torch.tensor([4])])
def test_a_number_of_any_kind_is_a_weight(weight):
    _, found = loss_and_weight((torch.ones((), requires_grad=True), weight), 3)

    assert found == 4


class SeenOperations(TorchDispatchMode):
    """Collects the names of the operations on tensors, and of those between two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.transfers: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.transfers.append(str(func))
        return result


# Torch shows a mode no copy of a number to a device, but the kernel that makes it there.
@pytest.mark.parametrize(
    ("weight", "kernel"),
    [
        (3, "aten.full.default"),
        (np.float32(3), "aten.full.default"),
        (torch.tensor(3.0), "aten.full.default"),
        (torch.tensor(3.0, device="meta"), "aten._to_copy.default"),
    ],
)
def test_the_weight_of_a_micro_batch_is_not_copied_from_the_host_to_the_device(
    monkeypatch, weight, kernel
):
    monkeypatch.setattr(_LossAccumulator, "read", lambda self: LossSums(1.0, 1.0))
    module = torch.nn.Identity()
    engine = SimpleNamespace(module=module, eval=module.eval, device=torch.device("meta"))
    mean = torch.ones((), device="meta")
    with SeenOperations() as seen:
        evaluate_micro_batches(
            engine, lambda *_: (mean, weight), torch.ones(4, 2, device="meta"), (2, 2)
        )

    assert seen.names.count(kernel) >= 2
    assert not seen.transfers


@pytest.mark.parametrize(("exponent", "divisor"), [(0, 6.0), (3, 48.0), (-1, 3.0)])
def test_the_divisor_is_the_samples_of_all_ranks_times_a_power_of_two(
    exponent: int, divisor: float
) -> None:
    assert window(torch.zeros(2), total_samples=6, exponent=exponent).divisor == divisor


def window(batch: Any, *, total_samples: int, exponent: int) -> Window:
    return Window(
        batch=batch,
        num_samples=len(batch),
        total_samples=total_samples,
        world_size=2,
        exponent=exponent,
        longest=1,
    )


def gathering(*rows: tuple[float, float]) -> Any:
    """Return a host group that gathers these sums."""
    return SimpleNamespace(all_gather=lambda own: np.array([own, *rows]))


def test_the_mean_loss_is_the_weighted_sum_over_the_weights_of_all_ranks() -> None:
    sums = LossSums(weight=3.0, weighted_loss=5.0).over_ranks(gathering((11.0, 30.0)))

    assert sums == LossSums(weight=14.0, weighted_loss=35.0)
    assert sums.mean_loss == 2.5


@pytest.mark.parametrize("own", [-11.0, -12.0])
def test_weights_that_add_up_to_0_or_less_are_an_error_that_states_their_sum(own: float) -> None:
    with pytest.raises(BatchError, match=f"add up to {own + 11.0}"):
        LossSums(weight=own, weighted_loss=5.0).over_ranks(gathering((11.0, 30.0)))


@pytest.mark.parametrize("weight", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_left_to_the_next_check(weight: float) -> None:
    sums = LossSums(weight=weight, weighted_loss=5.0).over_ranks(gathering((11.0, 30.0)))

    assert not math.isfinite(sums.weight)


@pytest.mark.parametrize(
    ("weight", "weighted_loss", "overflow_is_skipped", "is_rejected"),
    [
        (4.0, 6.0, False, False),
        (4.0, math.nan, False, True),
        (4.0, math.inf, False, True),
        (4.0, math.inf, True, False),
        (math.inf, 6.0, False, True),
        (math.nan, 6.0, True, True),
    ],
)
def test_a_loss_that_is_not_finite_is_rejected_unless_the_engine_skips_it(
    weight: float, weighted_loss: float, overflow_is_skipped: bool, is_rejected: bool
) -> None:
    sums = LossSums(weight=weight, weighted_loss=weighted_loss)

    with pytest.raises(NonFiniteLossError) if is_rejected else nullcontext():
        sums.check_finite(7, overflow_is_skipped=overflow_is_skipped)


def test_the_error_of_a_loss_that_is_not_finite_has_the_step_and_the_loss() -> None:
    with pytest.raises(NonFiniteLossError, match="the loss of step 7 is inf; no update was made"):
        LossSums(weight=4.0, weighted_loss=math.inf).check_finite(7)


class RecordingEngine:
    """Engine that records the losses that it runs backward on."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.losses: list[tuple[float, torch.dtype, bool]] = []

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        assert loss.requires_grad
        self.losses.append((loss.item(), loss.dtype, scale_wrt_gas))


def mean_of(seen: list[list[float]], weight: Any = None) -> Callable[[Any, torch.Tensor], Any]:
    """Return a loss, the mean of a micro-batch, that records its micro-batches."""

    def loss(engine: Any, micro_batch: torch.Tensor) -> Any:
        seen.append(micro_batch.tolist())
        mean = micro_batch.mean() * torch.ones((), requires_grad=True)
        return mean if weight is None else (mean, weight)

    return loss


def test_a_loss_without_weight_is_weighted_by_its_samples() -> None:
    """The gradients of both ranks are averaged: 2 samples of 8, at 2 ranks, count 2 * 2 / 8."""
    engine, seen = RecordingEngine(), list[list[float]]()
    batch = torch.tensor([1.0, 2.0, 4.0])

    sums = train_micro_batches(
        engine, mean_of(seen), window(batch, total_samples=8, exponent=1), (2, 1, 0)
    )

    assert seen == [[1.0, 2.0], [4.0], [1.0]]  # the last runs for its collectives only
    assert [loss for loss, *_ in engine.losses] == [1.5 * 4 / 16, 4.0 * 2 / 16, 0.0]
    assert {scaled for *_, scaled in engine.losses} == {False}
    assert sums == LossSums(weight=3.0, weighted_loss=7.0)


@pytest.mark.parametrize("weight", [5.0, torch.tensor(5)])
def test_the_weight_that_a_loss_returns_replaces_the_samples(weight: Any) -> None:
    engine, seen = RecordingEngine(), list[list[float]]()

    sums = train_micro_batches(
        engine,
        mean_of(seen, weight),
        window(torch.tensor([2.0, 4.0, 9.0]), total_samples=3, exponent=0),
        (2, 1, 0),
    )

    losses = [loss for loss, *_ in engine.losses]
    assert losses == pytest.approx([3.0 * 5 * 2 / 3, 9.0 * 5 * 2 / 3, 0.0])
    assert {dtype for _, dtype, _ in engine.losses} == {torch.float32}
    assert sums == LossSums(weight=10.0, weighted_loss=60.0)


def test_an_evaluation_has_no_gradients_and_restores_the_mode_of_each_module() -> None:
    frozen, trained = torch.nn.Dropout().eval(), torch.nn.Dropout()
    module, seen, modes = torch.nn.Sequential(frozen, trained), list[list[float]](), []
    engine = SimpleNamespace(module=module, eval=module.eval, device=torch.device("cpu"))
    mean = mean_of(seen)

    def loss(given: Any, micro_batch: torch.Tensor) -> Any:
        modes.append((trained.training, torch.is_grad_enabled()))
        return mean(given, micro_batch)

    sums = evaluate_micro_batches(engine, loss, torch.tensor([3.0, 5.0, 11.0]), (2, 1, 0))

    assert seen == [[3.0, 5.0], [11.0], [3.0]]
    assert sums == LossSums(weight=3.0, weighted_loss=19.0)
    assert modes == [(False, False)] * 3
    assert (module.training, frozen.training, trained.training) == (True, False, True)


def test_an_evaluation_that_fails_restores_the_mode_of_each_module() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout())
    engine = SimpleNamespace(module=module, eval=module.eval, device=torch.device("cpu"))

    with pytest.raises(TypeError):
        evaluate_micro_batches(engine, lambda *_: "no loss", torch.zeros(2), (2,))

    assert module.training and module[0].training


@pytest.mark.parametrize(
    ("returned", "description"),
    [
        (torch.ones(2, requires_grad=True), "a tensor of shape (2,) with a gradient"),
        (torch.ones(()), "a tensor of shape () with no gradient"),
        ((torch.ones((), requires_grad=True), 1.0, 2.0), "tuple"),
        (0.5, "float"),
    ],
)
def test_what_is_no_loss_is_an_error_that_describes_it(returned: Any, description: str) -> None:
    with pytest.raises(TypeError) as raised:
        loss_and_weight(returned, 3)

    assert str(raised.value).endswith(f"or (mean loss, weight); got {description}")


def test_an_evaluated_loss_needs_no_gradient_and_becomes_a_scalar() -> None:
    mean, weight = loss_and_weight(torch.tensor([2.5]), 3, needs_gradient=False)

    assert (mean.shape, mean.item(), weight) == ((), 2.5, 3)


def test_a_weight_on_the_host_is_a_scalar_of_double_precision_without_gradient() -> None:
    _, weight = loss_and_weight(
        (torch.ones((), requires_grad=True), torch.tensor([4.0], requires_grad=True)), 3
    )

    assert (weight.shape, weight.dtype, weight.requires_grad) == ((), torch.float64, False)


class SteppingEngine:
    """Engine whose step records the loss scale and the gradients with which it is called."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.module = torch.nn.Linear(2, 1)
        self.module.weight.grad = torch.tensor([[6.0, 15.0]])
        self.gradient: list[float] = []
        self.scale: Any = None

    def step(self) -> None:
        self.gradient = self.module.weight.grad.flatten().tolist()
        names = ("custom_loss_scaler", "external_loss_scale")
        self.scale = [getattr(self.optimizer, name, None) for name in names]


def test_the_loss_scale_of_zero_is_multiplied_by_the_divisor_during_the_step() -> None:
    zero = SimpleNamespace(loss_scale=8, custom_loss_scaler=False, external_loss_scale=None)
    engine = SteppingEngine(zero)

    divide_and_step(engine, 3.0)

    assert engine.scale == [True, 24.0]
    assert engine.gradient == [6.0, 15.0]
    assert (zero.custom_loss_scaler, zero.external_loss_scale) == (False, None)


@pytest.mark.parametrize(
    "optimizer",
    [SimpleNamespace(), SimpleNamespace(external_loss_scale=None, loss_scale_config=object())],
    ids=["without a loss scale", "with another loss scale"],
)
def test_other_optimizers_get_divided_gradients(optimizer: Any) -> None:
    engine = SteppingEngine(optimizer)  # its bias has no gradient

    divide_and_step(engine, 3.0)

    assert engine.gradient == [2.0, 5.0]
    assert engine.scale == [None, None]


def test_the_gradients_that_bf16_accumulates_in_float32_are_divided() -> None:
    flat = [torch.tensor([6.0, 15.0]), torch.tensor([33.0])]
    engine = SteppingEngine(SimpleNamespace(fp32_groups_gradients_flat=flat))

    divide_and_step(engine, 3.0)

    assert [group.tolist() for group in flat] == [[2.0, 5.0], [11.0]]
    assert engine.gradient == [6.0, 15.0]


def test_a_divisor_of_1_leaves_the_loss_scale_alone() -> None:
    zero = SimpleNamespace(loss_scale=8, custom_loss_scaler=False, external_loss_scale=None)
    engine = SteppingEngine(zero)

    divide_and_step(engine, 1.0)

    assert engine.scale == [False, None]


class ScalingEngine:
    """Engine at stage 0 with a GradScaler, which steps as DeepSpeed's."""

    def __init__(self, *, fused: bool) -> None:
        self.module = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=fused)
        self.torch_autocast_z0_gradscaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.skipped_steps = 0
        self.skipped_seen: list[int] = []  # by hooks around `step`

    def backward(self, factor: float) -> None:
        scaler = self.torch_autocast_z0_gradscaler
        scaler.scale(factor * self.module(torch.ones(1, 2)).sum()).backward()

    def step(self) -> None:
        self.torch_autocast_z0_gradscaler.step(self.optimizer)
        self.torch_autocast_z0_gradscaler.update()
        self.optimizer.zero_grad()
        self.skipped_seen.append(self.skipped_steps)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_a_grad_scaler_skips_is_counted_within_the_engines_step(
    fused: bool,
) -> None:
    engine = ScalingEngine(fused=fused)
    weights = []
    for factor in (1.0, math.inf, 1.0, math.inf):
        engine.backward(factor)
        divide_and_step(engine, 2.0)
        weights.append(engine.module.weight.detach().clone())

    assert engine.skipped_seen == [0, 1, 1, 2]
    assert [torch.equal(*each) for each in itertools.pairwise(weights)] == [True, False, True]
    assert engine.torch_autocast_z0_gradscaler.get_scale() == 1.0
    assert "step" not in vars(engine.torch_autocast_z0_gradscaler)
    assert not engine.optimizer._optimizer_step_pre_hooks


def test_an_error_of_the_optimizer_is_no_skipped_update() -> None:
    engine = ScalingEngine(fused=False)
    engine.backward(1.0)
    engine.optimizer.register_step_pre_hook(lambda *_: [][0])

    with pytest.raises(IndexError):
        divide_and_step(engine, 1.0)

    assert engine.skipped_steps == 0
    assert len(engine.optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize(("overflow", "scale", "clean_steps"), [(True, 4.0, 0), (False, 8.0, 1)])
def test_the_grad_scaler_of_zero_backs_off_after_an_overflow(
    overflow: bool, scale: float, clean_steps: int
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1})
    scaler.scale(torch.ones(1))
    engine = SteppingEngine(SimpleNamespace(torch_autocast_gradscaler=scaler, overflow=overflow))

    divide_and_step(engine, 1.0)

    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (scale, clean_steps)
    assert scaler.scale(torch.ones(1)).item() == scale
