"""Loading of a run's last checkpoint: all ranks agree on one, check its files, and read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError
from ...common.all_or_none import raise_on_all_ranks
from ...common.host_group import HostCollectives
from .engine_files import engine_info, read_engine
from .folder import (
    LATEST,
    CheckpointFolder,
    Manifest,
    check_engine,
    check_files,
    read_manifest,
    recovery_hint,
)
from .run_state import RunState, read_rank

logger = logging.getLogger(__name__)

NOTHING_LOADED = "Nothing was loaded"


def load_checkpoint(
    folder: str | Path, engine: Any, host_group: HostCollectives
) -> RunState | None:
    """Load the last checkpoint of a run into an engine; all ranks must call it.

    Weights, optimizer, schedule and the engine's counts are loaded. Gradient clipping stays that of
    the engine's own ds config. The rest is returned.

    Args:
        folder: Folder that was passed to `save_checkpoint`.
        engine: A DeepSpeed engine of the same ds config, on as many ranks.
        host_group: Group of all ranks.

    Returns:
        This rank's state; None where no checkpoint was saved yet.

    Raises:
        CheckpointError: The checkpoint is damaged, or not of such an engine.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    name = _agreed_name(checkpoints, host_group)
    if name is None:
        return None
    path = checkpoints.path / name
    with raise_on_all_ranks(host_group, f"load {path}", NOTHING_LOADED):
        manifest = _checked_manifest(checkpoints, name)
        check_engine(path, manifest.engine, engine_info(engine))
        state = read_rank(path, host_group.rank)
        _check_consistent(path, manifest, state)
    read_engine(engine, checkpoints.path, name)
    engine.micro_steps = manifest.micro_steps
    engine.global_samples = manifest.samples
    if host_group.rank == 0:
        logger.info("checkpoint loaded, training resumes after step %d: %s", manifest.steps, path)
    return state


def saved_config(folder: str | Path, host_group: HostCollectives) -> Mapping[str, Any] | None:
    """Return the ds config that `load_checkpoint` needs, if that is not the caller's.

    That is so if the engine was rebuilt before the checkpoint was written.

    Args:
        folder: Folder that was passed to `save_checkpoint`.
        host_group: Group of all ranks.

    Returns:
        The ds config of the last checkpoint; None where it is the caller's, or where no checkpoint
        was saved yet.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    name = _agreed_name(checkpoints, host_group)
    if name is None:
        return None
    with raise_on_all_ranks(host_group, f"load {checkpoints.path / name}", NOTHING_LOADED):
        manifest = _checked_manifest(checkpoints, name)
    return manifest.config if manifest.rebuilt else None


def _agreed_name(checkpoints: CheckpointFolder, host_group: HostCollectives) -> str | None:
    """Return the checkpoint that all ranks have.

    A crash may leave nodes with local disks one checkpoint apart; then it is the earlier one.

    Raises:
        CheckpointError: No checkpoint is on all ranks.
    """
    serial = 0
    with raise_on_all_ranks(host_group, f"load from {checkpoints.path}", NOTHING_LOADED):
        name = checkpoints.latest()
        if name is not None:
            serial = _serial(checkpoints, name)
        elif checkpoints.names():
            logger.warning(
                "%s holds checkpoints, but no file `%s` that names the one to load: training "
                "starts from scratch. To resume, write the name of a checkpoint into that file",
                checkpoints.path,
                LATEST,
            )
    serials = host_group.all_gather([serial])[:, 0]
    common = int(serials.min())
    with raise_on_all_ranks(host_group, f"load from {checkpoints.path}", NOTHING_LOADED):
        if common == 0 and serials.max() > 0:
            ranks = ", ".join(str(rank) for rank in np.flatnonzero(serials == 0))
            raise CheckpointError(
                f"rank {ranks} finds no checkpoint in {checkpoints.path}, and other ranks do: use "
                "a folder that all ranks share"
            )
        if common != serial:
            name = _name_of(checkpoints, common)
    return name


def _serial(checkpoints: CheckpointFolder, name: str) -> int:
    if not checkpoints.is_complete(name):
        raise CheckpointError(
            f"{checkpoints.path / LATEST} names {name!r}, which is no complete checkpoint of a "
            f"TrainingRun. {recovery_hint(checkpoints.path / name)}"
        )
    return read_manifest(checkpoints.manifest(name)).serial


def _name_of(checkpoints: CheckpointFolder, serial: int) -> str:
    for name, found in checkpoints.serials().items():
        if found == serial:
            return name
    raise CheckpointError(
        f"{checkpoints.path} lacks checkpoint number {serial}, which other ranks would load; "
        "copy it here, or use a folder that all ranks share"
    )


def _checked_manifest(checkpoints: CheckpointFolder, name: str) -> Manifest:
    manifest = read_manifest(checkpoints.manifest(name))
    check_files(checkpoints.path / name, manifest.files)
    return manifest


def _check_consistent(path: Path, manifest: Manifest, state: RunState) -> None:
    if (state.steps, state.samples) != (manifest.steps, manifest.samples):
        raise CheckpointError(
            f"{path} mixes files of several checkpoints: this rank's state is of step "
            f"{state.steps}, the rest of step {manifest.steps}. {recovery_hint(path)}"
        )
