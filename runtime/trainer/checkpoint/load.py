"""Loads a run's last checkpoint: all ranks agree on it, check its files, and read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ....errors import CheckpointError
from ...common.collective_attempt import raise_on_all_ranks
from ...common.host_group import HostCollectives
from .engine_files import engine_info, is_writer_rank, read_engine
from .folder import (
    LATEST,
    Candidate,
    CheckpointFolder,
    DamagedCheckpointError,
    Manifest,
    check_engine,
    check_files,
    read_manifest,
    recovery_hint,
)
from .plan_file import check_plan
from .read_shards import read_shards
from .run_state import RunState, read_rank
from .safe_load import load_plain

logger = logging.getLogger(__name__)

NOTHING_LOADED = "Nothing was loaded"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint whose files were checked, and this rank's state in it.

    Attributes:
        path: Folder of the checkpoint.
        manifest: Manifest of the checkpoint. `load_checkpoint` needs an engine whose ds config
            has the changes in it.
        state: State of this rank, except the engine.
        superseded: Later checkpoints in the same parent folder that were passed over, because they
            are damaged or `latest` names an earlier checkpoint.
        is_resharded: Whether another number of ranks wrote it. `state` is then that of rank
            `rank % world_size` of that run.
    """

    path: Path
    manifest: Manifest
    state: RunState
    superseded: frozenset[Path] = frozenset()
    is_resharded: bool = False


def find_checkpoint(
    folder: str | Path, engine: Any, host_group: HostCollectives, *, fallback: bool = False
) -> FoundCheckpoint | None:
    """Return the last checkpoint of a run after a check of all its files.

    All ranks must call this. They divide the files among them and read each file once, which takes
    about 0.8 s per GiB and core.

    Args:
        folder: Folder that was passed to `save_checkpoint`.
        engine: The engine. Only the location of its files is used.
        host_group: Group of all ranks.
        fallback: If the last checkpoint is damaged, whether to take the last undamaged checkpoint
            before it.

    Returns:
        The checkpoint, the same on all ranks; None if no checkpoint was saved yet.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds objects, or `folder` is a file or
            itself a checkpoint; raised on all ranks.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    action = f"load from {checkpoints.path}"
    tried, checkpoint = None, None
    passed_over: set[Path] = set()
    own, error = _on_all_ranks(host_group, action, lambda: _last(checkpoints))
    if error is None:
        agreed = _agreed(checkpoints, own, host_group)
        if agreed is None:
            if host_group.rank == 0:
                logger.info("no checkpoint in %s: training does not resume", checkpoints.path)
            return None
        tried = agreed.name
        checkpoint, error = _checked(checkpoints, tried, engine, host_group)
    while error is not None:
        if not fallback:
            raise error
        before = partial(_before, checkpoints, tried, passed_over)
        own, failure = _on_all_ranks(host_group, action, before)
        agreed = _agreed(checkpoints, own, host_group)
        if failure is not None or agreed is None:
            raise error
        if host_group.rank == 0:
            logger.warning("%s; the earlier checkpoint %s is tried instead", error, agreed.name)
        tried = agreed.name
        checkpoint, error = _checked(checkpoints, tried, engine, host_group)
    if checkpoint is None:
        return None
    return replace(checkpoint, superseded=_later(checkpoints, checkpoint) | passed_over)


def load_checkpoint(checkpoint: FoundCheckpoint, engine: Any, host_group: HostCollectives) -> None:
    """Load a checkpoint into an engine; all ranks must call it.

    Weights, optimizer, schedule and the engine's counts are loaded. Gradient clipping stays that of
    the engine's own ds config.

    Args:
        checkpoint: The checkpoint.
        engine: A DeepSpeed engine of the same ds config, on any number of ranks.
        host_group: Group of all ranks.

    Raises:
        CheckpointError: The checkpoint was saved from another kind of engine, the model has experts
            and the number of ranks differs, or DeepSpeed cannot load it; raised on all ranks.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    with raise_on_all_ranks(host_group, f"load {path}", NOTHING_LOADED):
        check_engine(path, manifest.engine, engine_info(engine))
        # The ranks have other experts under the same names.
        if checkpoint.is_resharded and engine.has_moe_layers:
            raise CheckpointError(
                f"{path} is of a model with experts (MoE) on {manifest.engine.world_size} rank(s), "
                f"and can be loaded on as many only, not on {host_group.world_size}"
            )
    if checkpoint.is_resharded and manifest.engine.zero_stage > 0:
        read_shards(engine, path, manifest, host_group)
    else:
        read_engine(engine, path.parent, path.name, host_group)
    engine.micro_steps = manifest.micro_steps
    engine.global_samples = manifest.samples
    if checkpoint.is_resharded and host_group.rank == 0:
        logger.warning(
            "%s was written by %d rank(s) and is loaded by %d: updates are of the same batches, "
            "and equal up to rounding",
            path,
            manifest.engine.world_size,
            host_group.world_size,
        )
    if host_group.rank == 0:
        logger.info("checkpoint loaded, training resumes after step %d: %s", manifest.steps, path)


def _on_all_ranks(
    host_group: HostCollectives, action: str, function: Callable[[], T]
) -> tuple[T | None, CheckpointError | None]:
    """Return the function's result, or return an error on all ranks if any rank finds damage.

    Raises:
        CheckpointError: The function failed on a rank for another reason; raised on all ranks.
    """
    result: T | None = None
    damage: Exception | None = None
    with raise_on_all_ranks(host_group, action, NOTHING_LOADED):
        try:
            result = function()
        except (DamagedCheckpointError, OSError) as error:
            damage = error
    try:
        with raise_on_all_ranks(host_group, action, NOTHING_LOADED):
            if damage is not None:
                raise damage
    except CheckpointError as error:
        return None, error
    return result, None


def _last(checkpoints: CheckpointFolder) -> Candidate | None:
    """Return the checkpoint that `latest` names; without that file, the newest checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or the path is no folder of checkpoints.
    """
    checkpoints.refuse_other_paths()
    name = checkpoints.latest()
    if name is None:
        newest = checkpoints.newest()
        if newest is not None:
            logger.warning(
                "%s has no file `%s`: the newest checkpoint is loaded, %s",
                checkpoints.path,
                LATEST,
                newest.name,
            )
        return newest
    if not checkpoints.is_complete(name):
        raise DamagedCheckpointError(
            f"{checkpoints.path / LATEST} names {name[:80]!r}, which is no complete checkpoint of "
            f"a TrainingRun in {checkpoints.path}. {recovery_hint(checkpoints.path)}"
        )
    return Candidate(read_manifest(checkpoints.manifest(name)).serial, name)


def _before(
    checkpoints: CheckpointFolder, tried: str | None, passed_over: set[Path]
) -> Candidate | None:
    """Return the newest checkpoint before a damaged checkpoint, or before the name in `latest`.

    The damaged checkpoint is added to `passed_over`, because its save number may be unreadable.
    """
    damaged = tried or checkpoints.latest() or ""
    if checkpoints.is_complete(damaged):
        passed_over.add(checkpoints.path / damaged)
    return checkpoints.newest(before=damaged)


def _later(checkpoints: CheckpointFolder, checkpoint: FoundCheckpoint) -> frozenset[Path]:
    save_numbers = checkpoints.save_numbers().items()
    return frozenset(
        checkpoints.path / name
        for name, save_number in save_numbers
        if save_number > checkpoint.manifest.serial
    )


def _agreed(
    checkpoints: CheckpointFolder, own: Candidate | None, host_group: HostCollectives
) -> Candidate | None:
    """Return the checkpoint that all ranks have.

    If the nodes have local disks, a crash may leave the last checkpoint on some nodes only. Then
    the checkpoint before it is returned.

    Raises:
        CheckpointError: No checkpoint is on all ranks.
    """
    save_numbers = host_group.all_gather([own.save_number if own else 0])[:, 0]
    common = int(save_numbers.min())
    with raise_on_all_ranks(host_group, f"load from {checkpoints.path}", NOTHING_LOADED):
        if common == 0 and save_numbers.max() > 0:
            ranks = ", ".join(str(rank) for rank in np.flatnonzero(save_numbers == 0))
            raise CheckpointError(
                f"rank {ranks} finds no undamaged checkpoint in {checkpoints.path}, and other "
                "ranks do: use a folder that all ranks share"
            )
        if own is not None and common != own.save_number:
            return Candidate(common, _name_of(checkpoints, common))
    return own


def _name_of(checkpoints: CheckpointFolder, save_number: int) -> str:
    for name, other in checkpoints.save_numbers().items():
        if other == save_number:
            return name
    raise CheckpointError(
        f"{checkpoints.path} lacks checkpoint number {save_number}, which other ranks would load; "
        "copy it here, or use a folder that all ranks share"
    )


def _checked(
    checkpoints: CheckpointFolder, name: str, engine: Any, host_group: HostCollectives
) -> tuple[FoundCheckpoint | None, CheckpointError | None]:
    """Check a checkpoint, and read this rank's state; on damage return an error on all ranks."""
    path = checkpoints.path / name
    first, every = _share(engine, host_group)

    def check() -> FoundCheckpoint:
        manifest = read_manifest(checkpoints.manifest(name))
        names = sorted(manifest.files)[first::every]
        check_files(path, {file_name: manifest.files[file_name] for file_name in names})
        for file_name in names:
            if file_name.endswith(".pt"):
                load_plain(path / file_name)
        world_size = manifest.engine.world_size
        state = read_rank(path, host_group.rank % world_size)
        _check_consistent(path, manifest, state)
        check_plan(state.micro_batch_plan, path)
        is_resharded = world_size != host_group.world_size
        return FoundCheckpoint(path=path, manifest=manifest, state=state, is_resharded=is_resharded)

    return _on_all_ranks(host_group, f"load {path}", check)


def _share(engine: Any, host_group: HostCollectives) -> tuple[int, int]:
    """Return this rank's position among the ranks that see the same folder, and their number."""
    starts_folder = host_group.all_gather([is_writer_rank(engine)])[:, 0] > 0
    starts = [0, *np.flatnonzero(starts_folder), len(starts_folder)]
    first = max(start for start in starts if start <= host_group.rank)
    end = min(start for start in starts if start > host_group.rank)
    return host_group.rank - int(first), int(end - first)


def _check_consistent(path: Path, manifest: Manifest, state: RunState) -> None:
    if (state.steps, state.samples) != (manifest.steps, manifest.samples):
        raise DamagedCheckpointError(
            f"{path} mixes files of several checkpoints: this rank's state is of step "
            f"{state.steps}, the rest of step {manifest.steps}. {recovery_hint(path.parent)}"
        )
