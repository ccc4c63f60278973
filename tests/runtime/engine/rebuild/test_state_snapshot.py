"""Tests of the copy of the training state, on torch optimizers of two ranks in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn, optim

from zerowatch.runtime.engine.rebuild.optimizer_layout import OptimizerTensor, ParamSlice
from zerowatch.runtime.engine.rebuild.state_snapshot import (
    HostSum,
    TrainingStateSnapshot,
    copy_counters,
    needed_host_bytes,
    restore_counters,
    restore_snapshot,
    split_state,
    take_snapshot,
    unequal_members,
)


class Model(nn.Module):
    """A weight of 2 x 3, a bias of 5, and a frozen table of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.bias = nn.Parameter(10 + torch.arange(5.0))
        self.table = nn.Parameter(20 + torch.arange(7.0), requires_grad=False)


class Engine(SimpleNamespace):
    """An engine of stage 0 in fp32."""


def engine(kind: type[optim.Optimizer] = optim.Adam, updates: int = 0, **options: Any) -> Engine:
    model = Model()
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "lr": 0.125},
        {"params": [model.bias], "lr": 0.25},
    ]
    optimizer = kind(groups, **options)  # type: ignore[call-arg]
    for _ in range(updates):
        for number, parameter in enumerate((model.weight, model.bias), 1):
            parameter.grad = torch.full_like(parameter, number)
        optimizer.step()
    return Engine(
        module=model,
        optimizer=optimizer,
        lr_scheduler=None,
        global_steps=11,
        global_samples=13,
        skipped_steps=3,
        micro_steps=17,
    )


class OtherRanks:
    """Adds the parts of the other ranks, which have taken their snapshots from the same state."""

    def __init__(self, *others: TrainingStateSnapshot) -> None:
        self._others, self._asked = others, list[str]()

    def add_up(self, parts: torch.Tensor) -> None:
        """Add what the other ranks have of the next tensor, in the order of the restore."""
        for other in self._others:
            name, key = self.order(other)[len(self._asked)]
            kept = other.parameters[name]
            own = kept.master if key == "" else kept.parts.get(key)
            if own is not None:
                parts[own.start : own.start + len(own.values)] += own.values
        self._asked.append("")

    @staticmethod
    def order(snapshot: TrainingStateSnapshot) -> list[tuple[str, str]]:
        """Return the parameter and state of each sum."""
        return [
            (name, key) for name, kept in snapshot.parameters.items() for key in ("", *kept.states)
        ]


def restored(target: Engine, *snapshots: TrainingStateSnapshot) -> list[str]:
    """Restore the state of several ranks on the first of them, and return the peers' checks."""
    checks: list[str] = []
    attempt: Any = SimpleNamespace(check_peers=lambda: checks.append("checked"))
    host_sum: Any = OtherRanks(*snapshots[1:])
    restore_snapshot(target, snapshots[0], host_sum, attempt)
    return checks


def state_of(made: Engine) -> list[Any]:
    values: list[Any] = [parameter.detach().clone() for parameter in made.module.parameters()]
    for group in made.optimizer.param_groups:
        for parameter in group["params"]:
            values += [
                made.optimizer.state[parameter][key]
                for key in sorted(made.optimizer.state[parameter])
            ]
    return values


@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
def test_the_parts_of_all_ranks_make_the_whole_state_again(num_ranks: int, rank: int) -> None:
    trained = engine(updates=3)
    snapshots = [take_snapshot(trained, each, num_ranks) for each in range(num_ranks)]
    fresh = engine()
    with torch.no_grad():
        for parameter in fresh.module.parameters():
            parameter.zero_()

    checks = restored(fresh, snapshots[rank], *snapshots[:rank], *snapshots[rank + 1 :])

    assert all(map(torch.equal, state_of(fresh), state_of(trained)))
    assert len(checks) == 3 + 2 * 2  # of each parameter, and of two moments of two of them


def test_each_rank_copies_a_part_of_each_parameter() -> None:
    trained = engine(updates=1)

    snapshot = take_snapshot(trained, 1, 2)

    parts = {
        name: None if kept.master is None else (kept.master.start, kept.master.values.tolist())
        for name, kept in snapshot.parameters.items()
    }
    weight, bias = trained.module.weight.flatten(), trained.module.bias
    assert parts == {
        "weight": (3, weight[3:].tolist()),
        "bias": (3, bias[3:].tolist()),
        "table": (4, [24.0, 25.0, 26.0]),
    }
    moments = 2 * (3 + 2)
    assert snapshot.num_bytes == 4 * (3 + 2 + 3 + moments)


def test_a_snapshot_has_the_groups_their_options_and_the_counters() -> None:
    trained = engine(updates=1)

    snapshot = take_snapshot(trained, 0, 2)

    assert snapshot.members == (("weight",), ("bias",))
    assert [options["lr"] for options in snapshot.options] == [0.125, 0.25]
    assert all("params" not in options for options in snapshot.options)
    assert snapshot.optimizer is optim.Adam
    assert [kept.updated for kept in snapshot.parameters.values()] == [True, True, False]
    assert snapshot.counters.counts == {
        "global_steps": 11,
        "global_samples": 13,
        "skipped_steps": 3,
        "micro_steps": 17,
    }


def test_a_snapshot_does_not_change_with_the_engine() -> None:
    trained = engine(updates=1)
    before = [value.clone() for value in state_of(trained)]
    snapshot = take_snapshot(trained, 0, 1)
    with torch.no_grad():
        for parameter in trained.module.parameters():
            parameter.zero_()
    trained.optimizer.param_groups[0]["lr"] = 9.0
    fresh = engine()

    restored(fresh, snapshot)

    assert all(map(torch.equal, state_of(fresh), before))
    assert fresh.optimizer.param_groups[0]["lr"] == 0.125


def test_an_optimizer_without_updates_gets_no_state() -> None:
    fresh = engine()

    restored(fresh, take_snapshot(engine(), 0, 1))

    assert dict(fresh.optimizer.state) == {}


def test_options_and_counters_are_restored() -> None:
    trained = engine(updates=1)
    trained.optimizer.param_groups[1]["lr"] = 0.5
    fresh = engine()
    fresh.global_steps = fresh.micro_steps = 0

    restored(fresh, take_snapshot(trained, 0, 1))

    assert [group["lr"] for group in fresh.optimizer.param_groups] == [0.125, 0.5]
    assert (fresh.global_steps, fresh.micro_steps) == (11, 17)


class DeepSpeedCPUAdam(optim.Adam):
    """An optimizer of the name of DeepSpeed's Adam on the host, which counts in numbers."""


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [(optim.Adam, DeepSpeedCPUAdam, int), (DeepSpeedCPUAdam, optim.Adam, torch.Tensor)],
)
def test_the_count_of_updates_has_the_form_of_the_new_adam(
    old: type[optim.Optimizer], new: type[optim.Optimizer], kind: type
) -> None:
    fresh = engine(new)

    restored(fresh, take_snapshot(engine(old, updates=3), 0, 1))

    steps = [state["step"] for state in fresh.optimizer.state.values()]
    assert [float(step) for step in steps] == [3.0, 3.0]
    assert all(isinstance(step, kind) for step in steps)


def test_an_optimizer_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="its optimizer is SGD, and was Adam"):
        restored(engine(optim.SGD), take_snapshot(engine(), 0, 1))


def test_other_groups_are_refused() -> None:
    other = engine()
    other.optimizer = optim.Adam([other.module.weight, other.module.bias])

    with pytest.raises(
        ValueError, match=r"has 1 groups of \[2\] parameters, and had 2 of \[1, 1\]"
    ):
        restored(other, take_snapshot(engine(), 0, 1))


def test_a_parameter_that_was_not_updated_before_is_refused() -> None:
    other = engine()
    other.module.table.requires_grad_(True)
    other.optimizer.add_param_group({"params": [other.module.table]})

    with pytest.raises(ValueError, match="its optimizer updates table, and did not before"):
        restored(other, take_snapshot(engine(), 0, 1))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_host_memory_that_is_needed_is_that_of_the_copy_and_of_the_largest_parameter(
    num_ranks: int,
) -> None:
    trained = engine(updates=1)

    needed = needed_host_bytes(trained, num_ranks)

    assert needed == take_snapshot(trained, 0, num_ranks).num_bytes + 7 * 4


def holder(**state: Any) -> OptimizerTensor:
    tensor = torch.zeros(6)
    piece = ParamSlice(name="weight", start=0, length=6, offset=0)
    return OptimizerTensor(
        tensor=tensor,
        state={tensor: state},
        group=0,
        members=("weight",),
        pieces=(piece,),
        replicated=True,
    )


def test_states_with_one_number_per_weight_are_split_from_the_others() -> None:
    moment, count, beta = torch.ones(6), torch.tensor(3.0), torch.tensor([0.5])

    tensors, scalars = split_state(holder(moment=moment, step=count, beta=beta, name="adam"))

    assert tensors == {"moment": moment}
    assert scalars == {"step": count, "beta": beta, "name": "adam"}


def test_a_count_of_updates_is_no_moment_of_a_single_weight() -> None:
    tensor = torch.zeros(1)
    one = OptimizerTensor(
        tensor=tensor,
        state={tensor: {"step": torch.tensor([3.0]), "moment": torch.tensor([5.0])}},
        group=0,
        members=("weight",),
        pieces=(),
        replicated=True,
    )

    tensors, scalars = split_state(one)

    assert (list(tensors), list(scalars)) == (["moment"], ["step"])


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rows' has the shape \(2,\) for weights of \(6,\)"):
        split_state(holder(rows=torch.ones(2)))


def test_a_parameter_with_another_number_of_updates_is_named() -> None:
    model = Model()
    optimizer = optim.Adam([model.weight, model.bias])
    trained = engine()
    trained.module, trained.optimizer = model, optimizer
    for updated in ([model.weight, model.bias], [model.bias]):
        optimizer.zero_grad()
        for parameter in updated:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    assert unequal_members(take_snapshot(trained, 0, 1)) == "bias"
    assert unequal_members(take_snapshot(engine(updates=2), 0, 1)) is None


class FusedAdam(optim.Adam):
    """An optimizer that keeps the count of a group in its last tensor."""


def test_counts_of_an_optimizer_that_keeps_them_in_the_last_tensor_may_differ() -> None:
    model = Model()
    trained = engine()
    trained.module, trained.optimizer = model, FusedAdam([model.weight, model.bias])
    for parameter, step in ((model.weight, 1), (model.bias, 4)):
        trained.optimizer.state[parameter] = {"step": step, "exp_avg": torch.ones_like(parameter)}

    assert unequal_members(take_snapshot(trained, 0, 1)) is None


def scaler(**state: Any) -> SimpleNamespace:
    return SimpleNamespace(dynamic=True, cur_scale=8.0, cur_iter=5, **state)


def test_the_scale_of_the_loss_and_the_schedule_are_restored() -> None:
    old, new = engine(), engine()
    for made in (old, new):
        made.optimizer.loss_scaler = scaler()
        made.optimizer.custom_loss_scaler = False
        made.lr_scheduler = optim.lr_scheduler.StepLR(made.optimizer, 1)
    old.optimizer.loss_scaler.cur_scale = 4096.0
    old.optimizer.custom_loss_scaler = True
    old.lr_scheduler.last_epoch = 7
    old.torch_autocast_z0_gradscaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    new.torch_autocast_z0_gradscaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    restore_counters(copy_counters(old), new)

    assert vars(new.optimizer.loss_scaler) == {"dynamic": True, "cur_scale": 4096.0, "cur_iter": 5}
    assert new.optimizer.custom_loss_scaler is True
    assert new.lr_scheduler.last_epoch == 7
    old_scale = old.torch_autocast_z0_gradscaler.state_dict()
    assert new.torch_autocast_z0_gradscaler.state_dict() == old_scale


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (lr_schedules.WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": 3}),
        (lr_schedules.WarmupLR, {"warmup_num_steps": 9}),
        (lr_schedules.LRRangeTest, {"lr_range_test_step_size": 3}),
        (lr_schedules.OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    ],
)
def test_a_schedule_of_deepspeed_goes_on_from_the_rates_it_was_made_with(
    kind: Any, options: dict[str, Any]
) -> None:
    old, new = engine(), engine()
    old.lr_scheduler = kind(old.optimizer, **options)
    for _ in range(4):
        old.lr_scheduler.step()
    for group, other in zip(new.optimizer.param_groups, old.optimizer.param_groups, strict=True):
        group["lr"] = other["lr"]
    new.lr_scheduler = kind(new.optimizer, **options)

    restore_counters(copy_counters(old), new)
    for each in (old, new):
        each.lr_scheduler.step()

    assert new.lr_scheduler.optimizer is new.optimizer
    assert new.lr_scheduler.get_last_lr() == old.lr_scheduler.get_last_lr()
    assert [group["lr"] for group in new.optimizer.param_groups] == [
        group["lr"] for group in old.optimizer.param_groups
    ]


def test_a_scale_that_the_ds_config_fixes_is_not_copied() -> None:
    old, new = engine(), engine()
    old.optimizer.loss_scaler = SimpleNamespace(dynamic=False, cur_scale=4096.0)
    new.optimizer.loss_scaler = SimpleNamespace(dynamic=False, cur_scale=8.0)

    restore_counters(copy_counters(old), new)

    assert new.optimizer.loss_scaler.cur_scale == 8.0


def test_one_rank_has_nothing_to_add_up() -> None:
    host_sum, parts = HostSum(1), torch.tensor([3.0, -0.0])

    host_sum.add_up(parts)
    host_sum.close()
    host_sum.close()

    assert parts.tolist() == [3.0, -0.0]
