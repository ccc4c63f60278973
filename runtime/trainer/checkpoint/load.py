"""Taking a run up again from its last save."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError
from ...common.all_or_none import raise_on_all_ranks
from ...common.host_group import HostCollectives
from .engine_files import engine_facts, read_engine
from .folder import LATEST, SaveFolder
from .manifest import Manifest, check_engine, check_files, read_manifest, recovery_hint
from .rank_file import read_rank
from .state import RunState

logger = logging.getLogger(__name__)

NOTHING_DONE = "Nothing was loaded"


def load_run(folder: str | Path, engine: Any, host_group: HostCollectives) -> RunState | None:
    """Load the last save of a run into an engine; all ranks must call it.

    Weights, optimizer, schedule and the engine's counts are loaded; the clipping of gradients stays
    that of the engine's own configuration. The rest is returned, for whoever owns it.

    Args:
        folder: What `save_run` was given.
        engine: A DeepSpeed engine of the same configuration, on as many ranks.
        host_group: Of all ranks.

    Returns:
        This rank's state; None where nothing was saved yet.

    Raises:
        CheckpointError: The save is damaged, or none of this engine.
    """
    saves = SaveFolder(Path(folder).absolute())
    name = _agreed_name(saves, host_group)
    if name is None:
        return None
    save = saves.path / name
    with raise_on_all_ranks(host_group, f"load {save}", NOTHING_DONE):
        manifest = _checked(saves, name)
        check_engine(save, manifest.engine, engine_facts(engine))
        state = read_rank(save, host_group.rank)
        _check_parts(save, manifest, state)
    read_engine(engine, saves.path, name)
    engine.micro_steps = manifest.micro_steps
    engine.global_samples = manifest.samples
    if host_group.rank == 0:
        logger.info("training goes on after step %d, saved in %s", manifest.steps, save)
    return state


def saved_config(folder: str | Path, host_group: HostCollectives) -> Mapping[str, Any] | None:
    """Return the configuration that `load_run` needs, where an engine was rebuilt before the save.

    Args:
        folder: What `save_run` was given.
        host_group: Of all ranks.

    Returns:
        The configuration in force at the last save; None where it is the caller's, or where nothing
        was saved yet.

    Raises:
        CheckpointError: The save is damaged.
    """
    saves = SaveFolder(Path(folder).absolute())
    name = _agreed_name(saves, host_group)
    if name is None:
        return None
    with raise_on_all_ranks(host_group, f"load {saves.path / name}", NOTHING_DONE):
        manifest = _checked(saves, name)
    return manifest.config if manifest.rebuilt else None


def _agreed_name(saves: SaveFolder, host_group: HostCollectives) -> str | None:
    """Return the save that all ranks have; of disks that a crash left one save apart, the earlier.

    Raises:
        CheckpointError: There is none.
    """
    serial = 0
    with raise_on_all_ranks(host_group, f"load from {saves.path}", NOTHING_DONE):
        name = saves.latest()
        if name is not None:
            serial = _serial(saves, name)
        elif saves.saves():
            logger.warning(
                "%s holds saves, but no file `%s` that names the one to load: training begins "
                "anew. Write a name into that file to go on from there",
                saves.path,
                LATEST,
            )
    serials = host_group.all_gather([serial])[:, 0]
    common = int(serials.min())
    with raise_on_all_ranks(host_group, f"load from {saves.path}", NOTHING_DONE):
        if common == 0 and serials.max() > 0:
            raise CheckpointError(_not_shared(saves, serials))
        if common != serial:
            name = _name_of(saves, common)
    return name


def _serial(saves: SaveFolder, name: str) -> int:
    if not saves.is_whole(name):
        raise CheckpointError(
            f"{saves.path / LATEST} names {name!r}, which is no whole save of a TrainingRun. "
            f"{recovery_hint(saves.path / name)}"
        )
    return read_manifest(saves.manifest(name)).serial


def _name_of(saves: SaveFolder, serial: int) -> str:
    for name, found in saves.save_numbers().items():
        if found == serial:
            return name
    raise CheckpointError(
        f"{saves.path} does not hold the save number {serial} that other ranks would go on from; "
        "copy it here, or use a folder that all ranks share"
    )


def _not_shared(saves: SaveFolder, serials: Any) -> str:
    without = ", ".join(str(rank) for rank in np.flatnonzero(serials == 0))
    return (
        f"rank {without} sees no save in {saves.path}, and other ranks do: use a folder that all "
        "ranks share"
    )


def _checked(saves: SaveFolder, name: str) -> Manifest:
    manifest = read_manifest(saves.manifest(name))
    check_files(saves.path / name, manifest.files)
    return manifest


def _check_parts(save: Path, manifest: Manifest, state: RunState) -> None:
    if (state.steps, state.samples) != (manifest.steps, manifest.samples):
        raise CheckpointError(
            f"{save} is put together from several saves: this rank's state is of step "
            f"{state.steps}, the rest of step {manifest.steps}. {recovery_hint(save)}"
        )
