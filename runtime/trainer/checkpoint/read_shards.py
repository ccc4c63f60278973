"""Reads a checkpoint into an engine with another number of ranks than the one that wrote it.

DeepSpeed reads its shards only with the number of ranks that wrote them. Here each rank reads a
range of the shards, copies the parts of each parameter from them, and restores them as a rebuild of
the engine does. No code in the files is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....errors import CheckpointError
from ...common.collective_attempt import CollectiveAttempt, is_peer_failure, raise_on_all_ranks
from ...common.host_group import HostCollectives
from ...engine.rebuild.engine_replacement import guarded_collectives
from ...engine.rebuild.optimizer_layout import OptimizerTensor, base_optimizer
from ...engine.rebuild.state_snapshot import (
    SCALE_NAMES,
    EngineCounters,
    HostSlice,
    HostSum,
    ParamSnapshot,
    TrainingStateSnapshot,
    copy_updated,
    describe_parameters,
    restore_snapshot,
)
from .engine_files import PARTLY_LOADED
from .folder import Manifest
from .run_state import read_rank
from .safe_load import load_plain
from .shard_layout import group_options, read_shard_layout, shard_tensors

_OPTIMIZER_FILE = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_STAGE_3_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank of the run that wrote the checkpoint has saved of the engine.

    Attributes:
        tensors: The tensors that its optimizer updates.
        frozen: Its parts of parameters that no optimizer updates, flattened, by name.
        optimizer: DeepSpeed's file of the optimizer.
        model: DeepSpeed's file of the model. Below ZeRO 3 all ranks share one.
    """

    tensors: tuple[OptimizerTensor, ...]
    frozen: Mapping[str, HostSlice]
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any]


def read_shards(
    engine: Any, checkpoint: Path, manifest: Manifest, host_group: HostCollectives
) -> None:
    """Load the engine's part of a checkpoint of another number of ranks; all ranks must call it.

    Args:
        engine: An engine of ZeRO 1 to 3 with the ds config of the checkpoint.
        checkpoint: Folder of the checkpoint, whose files all ranks see.
        manifest: Its manifest.
        host_group: Group of all ranks.

    Raises:
        CheckpointError: A shard is missing, or is not as described; raised on all ranks.
    """
    read: list[tuple[TrainingStateSnapshot, Mapping[str, Any]]] = []
    with raise_on_all_ranks(host_group, f"load {checkpoint}", "Nothing was loaded"):
        numbers = shard_range(manifest.engine.world_size, host_group.rank, host_group.world_size)
        # A rank without shards needs the description of one, because all ranks restore together.
        shards = [_read_shard(checkpoint, manifest, each) for each in numbers or range(1)]
        snapshot = snapshot_of_shards(
            engine, shards, micro_steps=manifest.micro_steps, with_values=bool(numbers)
        )
        read.append((snapshot, shards[0].model))
    attempt = CollectiveAttempt(host_group)
    host_sum = HostSum(host_group.world_size)
    with closing(host_sum), attempt, guarded_collectives(attempt):
        for snapshot, model in read:
            restore_snapshot(engine, snapshot, host_sum, attempt)
            _load_buffers(engine.module, model["module"])
    error = attempt.error
    with raise_on_all_ranks(host_group, f"load {checkpoint}", PARTLY_LOADED):
        if error is not None and not is_peer_failure(error):
            raise CheckpointError(f"cannot load {checkpoint}: {error}. {PARTLY_LOADED}") from error


def shard_range(num_shards: int, rank: int, world_size: int) -> range:
    """Return the shards that a rank reads: a range without gaps, as equal as possible."""
    return range(num_shards * rank // world_size, num_shards * (rank + 1) // world_size)


def snapshot_of_shards(
    engine: Any, shards: Sequence[Shard], *, micro_steps: int, with_values: bool = True
) -> TrainingStateSnapshot:
    """Return this rank's part of the training state in consecutive shards.

    Args:
        engine: The engine that the state is restored in. Its parameters are described.
        shards: The shards, in order.
        micro_steps: DeepSpeed's own count of micro-batches.
        with_values: Whether this rank restores the values in the shards, or only takes part.

    Raises:
        CheckpointError: The shards have other parameters than the engine, or parts with gaps.
    """
    parameters = describe_parameters(engine.module)
    for shard in shards:
        parts = describe_parameters(engine.module)
        for tensor in shard.tensors:
            copy_updated(tensor, parts, 0, 1)
        for name, frozen in shard.frozen.items():
            if name in parts and not parts[name].updated:
                parts[name].master = frozen
                parts[name].master_dtype = frozen.values.dtype
        for name, part in parts.items():
            _append(name, parameters[name], part, with_values=with_values)
    first = shards[0]
    options = group_options(first.optimizer)
    members: list[tuple[str, ...]] = [() for _ in options]
    for tensor in first.tensors:
        members[tensor.group] += tensor.members
    return TrainingStateSnapshot(
        parameters=parameters,
        options=options,
        members=tuple(members),
        optimizer=type(base_optimizer(engine.optimizer)),
        counters=_counters(first, micro_steps),
    )


def _append(name: str, kept: ParamSnapshot, part: ParamSnapshot, *, with_values: bool) -> None:
    """Append the part of the next shard to what the shards before it have of a parameter."""
    kept.updated, kept.master_dtype = part.updated, part.master_dtype
    kept.states, kept.scalars = kept.states or part.states, kept.scalars or part.scalars
    if not with_values:
        return
    kept.master = _joined(name, kept.master, part.master)
    keys = kept.parts.keys() | part.parts.keys()
    joined = {key: _joined(name, kept.parts.get(key), part.parts.get(key)) for key in keys}
    kept.parts = {key: value for key, value in joined.items() if value is not None}


def _joined(name: str, before: HostSlice | None, after: HostSlice | None) -> HostSlice | None:
    if before is None or after is None:
        return before or after
    if before.start + before.values.numel() != after.start:
        raise CheckpointError(
            f"the shards of {name} are not consecutive: one ends before element "
            f"{before.start + before.values.numel()}, the next begins at {after.start}"
        )
    return HostSlice(before.start, torch.cat([before.values, after.values]))


def _counters(shard: Shard, micro_steps: int) -> EngineCounters:
    model, scaler = shard.model, shard.optimizer.get("loss_scaler")
    is_dynamic = bool(getattr(scaler, "dynamic", False))
    return EngineCounters(
        counts={
            "global_steps": model["global_steps"],
            "global_samples": model["global_samples"],
            "skipped_steps": model["skipped_steps"],
            "micro_steps": micro_steps,
        },
        scheduler=model.get("lr_scheduler"),
        schedule_rates={},
        scale=(
            {each: getattr(scaler, each) for each in SCALE_NAMES if hasattr(scaler, each)}
            if is_dynamic
            else {}
        ),
        overrides={},
        autocast_scale=None,
    )


def _read_shard(checkpoint: Path, manifest: Manifest, number: int) -> Shard:
    layout = read_shard_layout(read_rank(checkpoint, number).shard)
    is_partitioned = manifest.engine.zero_stage == 3
    model_file = (
        _file_of(checkpoint, manifest, _STAGE_3_FILE, number)
        if is_partitioned
        else checkpoint / _MODEL_FILE
    )
    model = load_plain(model_file)
    state = load_plain(_file_of(checkpoint, manifest, _OPTIMIZER_FILE, number))
    optimizer = state["optimizer_state_dict"]
    return Shard(
        tensors=shard_tensors(layout, optimizer),
        frozen=_frozen_parts(model, number, manifest, is_partitioned=is_partitioned),
        optimizer=optimizer,
        model=model,
    )


def _file_of(checkpoint: Path, manifest: Manifest, pattern: re.Pattern[str], number: int) -> Path:
    for name in manifest.files:
        match = pattern.fullmatch(name)
        if match is not None and int(match[1]) == number:
            return checkpoint / name
    raise CheckpointError(
        f"{checkpoint} lacks the shard of rank {number}. With another number of ranks, each rank "
        "reads the files of others: save to a folder that all nodes share"
    )


def _frozen_parts(
    model: Mapping[str, Any], number: int, manifest: Manifest, *, is_partitioned: bool
) -> dict[str, HostSlice]:
    """Return the parts of parameters that may be frozen; below ZeRO 3 the first shard has all."""
    shapes = manifest.engine.parameters
    if not is_partitioned:
        if number > 0:
            return {}
        module = model["module"]
        return {name: HostSlice(0, module[name].reshape(-1)) for name in shapes if name in module}
    parts = {}
    for name, fragment in (model.get("frozen_param_fragments") or {}).items():
        numel = torch.Size(shapes[name]).numel()
        start = fragment.numel() * number
        length = min(fragment.numel(), numel - start)
        if length > 0:
            parts[name] = HostSlice(start, fragment.reshape(-1)[:length].clone())
    return parts


def _load_buffers(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in state:  # buffers that are not persistent are not saved
                buffer.copy_(state[name])
