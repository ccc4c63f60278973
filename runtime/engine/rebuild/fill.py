"""Puts a snapshot into an engine that was just made, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ...common.all_or_none import CollectiveAttempt
from .engine_counters import give_account
from .layout import OptimizerTensor, ParamSlice, base_optimizer, group_members, layout_of
from .ranks import HostSum
from .snapshot import ParamSnapshot, Slice, TrainingStateSnapshot

# Where a new engine's optimizer is of another class, as DeepSpeed's own on the host, what it counts
# its updates in may be a number or a tensor.
_OWN_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")
ADAMS = frozenset({*_OWN_ADAMS, "Adam", "AdamW"})


def fill(
    engine: Any, snapshot: TrainingStateSnapshot, mover: HostSum, attempt: CollectiveAttempt
) -> None:
    """Give an engine all the state of another; all ranks at the same time.

    Raises:
        ValueError: Its optimizer keeps other parameters or states than the old one's did.
        PeerFailedError: Another rank has failed.
    """
    layout = layout_of(engine)
    _check(engine, snapshot)
    _make_states(layout, snapshot)
    places: dict[str, list[tuple[OptimizerTensor, ParamSlice]]] = {}
    for holder in layout:
        for piece in holder.pieces:
            places.setdefault(piece.name, []).append((holder, piece))
    put = StateRestorer(mover, attempt)
    parameters = dict(engine.module.named_parameters())
    for name, kept in snapshot.parameters.items():
        if kept.updated:
            put.updated(kept, places.get(name, []), parameters[name])
        else:
            put.weights(kept, parameters[name])
    _let_partitions_follow(engine.optimizer)
    _give_options(engine.optimizer, snapshot)
    give_account(snapshot.account, engine)


class StateRestorer:
    """Puts one parameter after another into place."""

    def __init__(self, mover: HostSum, attempt: CollectiveAttempt) -> None:
        self._mover = mover
        self._attempt = attempt

    def updated(
        self, kept: ParamSnapshot, places: list[tuple[OptimizerTensor, ParamSlice]], parameter: Any
    ) -> None:
        """Put what the optimizer has of a parameter where this rank's optimizer has it."""

        def into(tensor_of: Callable[[OptimizerTensor], torch.Tensor], whole: torch.Tensor) -> None:
            for holder, piece in places:
                _write(tensor_of(holder), piece, whole[piece.start : piece.start + piece.length])

        whole = self._whole(kept, kept.master, kept.master_dtype)
        into(lambda holder: holder.tensor, whole)
        if not hasattr(parameter, "ds_tensor"):  # the model's own weights, rounded to their dtype
            parameter.data.copy_(whole.view(kept.shape))
        for key, dtype in kept.states.items():
            into(
                lambda holder, key=key: holder.state[holder.tensor][key],  # type: ignore[misc]
                self._whole(kept, kept.parts.get(key), dtype),
            )

    def weights(self, kept: ParamSnapshot, parameter: Any) -> None:
        """Put the weights of a parameter that no optimizer updates."""
        whole = self._whole(kept, kept.master, kept.dtype)
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            with torch.no_grad():
                parameter.copy_(whole.view(kept.shape))
            return
        start = partition.ds_numel * parameter.ds_zero_partition_rank
        length = max(0, min(partition.ds_numel, whole.numel() - start))
        partition.data[:length].copy_(whole[start : start + length])
        parameter.ds_secondary_tensor = None  # made of what was there before

    def _whole(self, kept: ParamSnapshot, mine: Slice | None, dtype: torch.dtype) -> torch.Tensor:
        """Put the ranks' parts together: one whole parameter, on the host."""
        whole = torch.zeros(kept.shape.numel(), dtype=dtype)
        if mine is not None:
            whole[mine.start : mine.start + mine.values.numel()] = mine.values
        self._attempt.check_peers()
        self._mover.add_up(whole)
        return whole


def _write(tensor: torch.Tensor, piece: ParamSlice, values: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.dim() == 1:
            tensor[piece.offset : piece.offset + piece.length].copy_(values)
        else:  # a parameter of its own, which may not lie in a row
            tensor.copy_(values.view(tensor.shape))


def _check(engine: Any, snapshot: TrainingStateSnapshot) -> None:
    made, before = type(base_optimizer(engine.optimizer)), snapshot.optimizer
    if made is not before and not {made.__name__, before.__name__} <= ADAMS:
        raise ValueError(f"its optimizer is {made.__name__}, and was {before.__name__}")
    updated = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in snapshot.members
    ]
    found = [
        {name for name in members if snapshot.parameters[name].updated}
        for members in group_members(engine)
    ]
    if found != updated:
        raise ValueError(
            f"its optimizer has {len(found)} parameter groups of {[*map(len, found)]} parameters, "
            f"and had {len(updated)} of {[*map(len, updated)]}"
        )


def _make_states(layout: list[OptimizerTensor], snapshot: TrainingStateSnapshot) -> None:
    """Make the states that an optimizer makes at its first update, of zeros."""
    for holder in layout:
        members = [snapshot.parameters[name] for name in holder.members]
        known = next((kept for kept in members if kept.states or kept.scalars), None)
        if known is None:
            continue  # nothing was updated yet
        own = holder.state.setdefault(holder.tensor, {})
        for key, dtype in known.states.items():
            if key not in own:
                own[key] = torch.zeros_like(holder.tensor, dtype=dtype, requires_grad=False)
        for key, value in known.scalars.items():
            own[key] = copy.deepcopy(value)


def _let_partitions_follow(optimizer: Any) -> None:
    """At stage 3 give this rank's part of the model's own weights what the master weights have."""
    if hasattr(optimizer, "_reassign_or_swap_out_partitioned_parameters"):
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.invalidate_secondary_tensor()


def _give_options(optimizer: Any, snapshot: TrainingStateSnapshot) -> None:
    base = base_optimizer(optimizer)
    same = type(base) is snapshot.optimizer
    others = [getattr(optimizer, "backup_optimizer", None)]
    for each in [base, *(other for other in others if other is not None)]:
        for group, options in zip(each.param_groups, snapshot.options, strict=True):
            wanted = options if same and each is base else options.keys() & group.keys()
            group.update({key: copy.deepcopy(options[key]) for key in wanted})
    if not same:
        _convert_counters(base)


def _convert_counters(base: Any) -> None:
    """Let Adam's count be what its class expects: a number in DeepSpeed's own, else a tensor."""
    as_number = type(base).__name__ in _OWN_ADAMS
    for own in base.state.values():
        if "step" in own:
            step = float(own["step"])
            own["step"] = int(step) if as_number else torch.tensor(step, dtype=torch.float32)
