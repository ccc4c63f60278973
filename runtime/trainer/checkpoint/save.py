"""Saving a run: every rank its files, then all of it at once, or nothing."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write, sync
from ...common.all_or_none import raise_on_all_ranks
from ...common.host_group import HostCollectives
from .engine_files import engine_facts, is_writer_rank, write_engine
from .folder import SaveFolder, partial_name, save_name
from .manifest import Manifest
from .rank_file import write_rank
from .state import RunState

logger = logging.getLogger(__name__)

UNHARMED = "Earlier saves are as they were, and training may go on"


def save_run(
    folder: str | Path, engine: Any, host_group: HostCollectives, state: RunState, keep: int = 2
) -> Path:
    """Save a run between two windows, and return the save's folder; all ranks must call it.

    Killed at any moment, it leaves this save whole, or the one before it as it was.

    Args:
        folder: Of this run's saves alone.
        engine: A DeepSpeed engine, without the gradients of an open window.
        host_group: Of all ranks.
        state: The rest of the run, of this rank.
        keep: How many saves to leave, this one included; at least 1.

    Raises:
        CheckpointError: Something in `state` is no plain data, or some rank cannot write.
    """
    saves = SaveFolder(Path(folder).absolute())
    what = f"save step {state.steps} to {saves.path}"
    leading = is_writer_rank(engine)
    serial, name = _number(saves, host_group, state.steps, what, leading=leading)
    half = saves.path / partial_name(name)
    try:
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_rank(half, host_group.rank, state)
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_engine(engine, saves.path, half.name)
            for path in _own_part(half):
                sync(path)
        with raise_on_all_ranks(host_group, what, UNHARMED):
            if leading:
                _commit(saves, half, name, _manifest(half, engine, serial, state))
    except CheckpointError:
        if leading:
            shutil.rmtree(half, ignore_errors=True)
        raise
    if leading:
        _prune(saves, keep)
    return saves.path / name


def _number(
    saves: SaveFolder, host_group: HostCollectives, steps: int, what: str, *, leading: bool
) -> tuple[int, str]:
    """Tidy the folder up, and agree on the number and the name of the next save."""
    serial = repeats = 0
    with raise_on_all_ranks(host_group, what, UNHARMED):
        if leading:
            saves.prepare()
            serial = 1 + max(saves.save_numbers().values(), default=0)
            repeats = saves.is_duplicate(steps)
    serial, repeats = map(int, host_group.all_gather([serial, repeats]).max(axis=0))
    return serial, save_name(steps, repeats)


def _own_part(half: Path) -> Iterator[Path]:
    """Yield this rank's part of the files, shared out over the ranks that share a machine."""
    files = sorted(_files(half))
    first, every = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    yield from files[first::every]


def _files(save: Path) -> Iterator[Path]:
    return (path for path in save.rglob("*") if path.is_file())


def _manifest(half: Path, engine: Any, serial: int, state: RunState) -> Manifest:
    return Manifest(
        serial=serial,
        steps=state.steps,
        samples=state.samples,
        micro_steps=int(engine.micro_steps),
        engine=engine_facts(engine),
        config=state.config,
        rebuilt=state.rebuilt,
        files={str(path.relative_to(half)): path.stat().st_size for path in sorted(_files(half))},
    )


def _commit(saves: SaveFolder, half: Path, name: str, manifest: Manifest) -> None:
    atomic_write(saves.manifest(half.name), manifest.to_json(), durable=True)
    for folder in {path.parent for path in _files(half)}:
        sync(folder)
    saves.commit(name)
    logger.info("step %d is saved in %s", manifest.steps, saves.path / name)


def _prune(saves: SaveFolder, keep: int) -> None:
    """Delete the oldest saves; that one cannot be deleted is no reason to stop."""
    serials = saves.save_numbers()
    oldest_first = sorted(serials, key=lambda name: serials[name])
    try:
        saves.remove(oldest_first[: -max(1, keep)])
    except OSError as error:
        logger.warning("an old save cannot be deleted: %s; delete it by hand", error)
