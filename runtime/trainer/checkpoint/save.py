"""Writing of a checkpoint: each rank writes its files, then one rename makes all of them valid."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write, sync
from ...common.all_or_none import raise_on_all_ranks
from ...common.host_group import HostCollectives
from .engine_files import engine_info, is_writer_rank, write_engine
from .folder import CheckpointFolder, Manifest, checkpoint_name, partial_name
from .run_state import RunState, write_rank

logger = logging.getLogger(__name__)

UNHARMED = "Earlier checkpoints are unchanged, and training may go on"


class _Numbers(NamedTuple):
    """Numbers of a checkpoint: its serial number, and how many others have the same step."""

    serial: int = 0
    repeat: int = 0


def save_checkpoint(
    folder: str | Path, engine: Any, host_group: HostCollectives, state: RunState, keep: int = 2
) -> Path:
    """Write a checkpoint between two windows, and return its folder; all ranks must call it.

    A kill at any moment leaves either this checkpoint complete or the previous one unchanged.

    Args:
        folder: Folder that holds only this run's checkpoints.
        engine: A DeepSpeed engine, without the gradients of an open window.
        host_group: Group of all ranks.
        state: This rank's state of the run, except the engine.
        keep: How many checkpoints to leave, this one included; at least 1.

    Raises:
        CheckpointError: `state` holds something that is not plain data, or a rank cannot write.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    what = f"save step {state.steps} to {checkpoints.path}"
    is_writer = is_writer_rank(engine)
    numbers = _agreed_numbers(checkpoints, host_group, state.steps, what, is_writer=is_writer)
    name = checkpoint_name(state.steps, numbers.repeat)
    partial = checkpoints.path / partial_name(name)
    try:
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_rank(partial, host_group.rank, state)
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_engine(engine, checkpoints.path, partial.name)
            for path in _own_part(partial):
                sync(path)
        with raise_on_all_ranks(host_group, what, UNHARMED):
            if is_writer:
                _commit(checkpoints, partial, name, _manifest(partial, engine, numbers, state))
    except CheckpointError:
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_writer:
        _prune(checkpoints, keep)
    return checkpoints.path / name


def _agreed_numbers(
    checkpoints: CheckpointFolder,
    host_group: HostCollectives,
    steps: int,
    what: str,
    *,
    is_writer: bool,
) -> _Numbers:
    """Clean the folder up, and agree on the numbers of the next checkpoint."""
    own = _Numbers()
    with raise_on_all_ranks(host_group, what, UNHARMED):
        if is_writer:
            checkpoints.prepare()
            serial = 1 + max(checkpoints.serials().values(), default=0)
            own = _Numbers(serial, checkpoints.next_repeat(steps))
    return _Numbers._make(map(int, host_group.all_gather(own).max(axis=0)))


def _own_part(partial: Path) -> Iterator[Path]:
    """Yield the files that this rank syncs to the disk; the ranks of a node divide them."""
    files = sorted(_files(partial))
    first, every = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    yield from files[first::every]


def _files(checkpoint: Path) -> Iterator[Path]:
    return (path for path in checkpoint.rglob("*") if path.is_file())


def _manifest(partial: Path, engine: Any, numbers: _Numbers, state: RunState) -> Manifest:
    files = sorted(_files(partial))
    return Manifest(
        serial=numbers.serial,
        steps=state.steps,
        samples=state.samples,
        micro_steps=int(engine.micro_steps),
        engine=engine_info(engine),
        config=state.config,
        rebuilt=state.rebuilt,
        files={str(path.relative_to(partial)): path.stat().st_size for path in files},
    )


def _commit(checkpoints: CheckpointFolder, partial: Path, name: str, manifest: Manifest) -> None:
    atomic_write(checkpoints.manifest(partial.name), manifest.to_json(), durable=True)
    for folder in {path.parent for path in _files(partial)}:
        sync(folder)
    checkpoints.commit(name)
    logger.info("checkpoint of step %d saved: %s", manifest.steps, checkpoints.path / name)


def _prune(checkpoints: CheckpointFolder, keep: int) -> None:
    """Delete the oldest checkpoints; a failure to do so does not stop training."""
    serials = checkpoints.serials()
    oldest_first = sorted(serials, key=lambda name: serials[name])
    try:
        checkpoints.remove(oldest_first[: -max(1, keep)])
    except OSError as error:
        logger.warning("an old checkpoint cannot be deleted: %s; delete it by hand", error)
