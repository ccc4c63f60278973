"""Writes a checkpoint: each rank writes its files, then one rename makes all files valid."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write, sync
from ...common.collective_attempt import raise_on_all_ranks
from ...common.gloo_interface import local_place
from ...common.host_group import HostCollectives
from .engine_files import engine_info, is_writer_rank, write_engine
from .folder import (
    CheckpointFolder,
    FileInfo,
    Manifest,
    checkpoint_name,
    file_info,
    partial_name,
)
from .folder_owner import FolderOwner
from .run_state import RunState, rank_file, write_rank
from .safe_load import load_plain

logger = logging.getLogger(__name__)

UNHARMED = "Earlier checkpoints are unchanged, and training may go on"
# A little more than the longest time for which NFS by default caches that a file does not exist.
VISIBLE_SECONDS = 65.0
_POLL_SECONDS = 0.5


class SaveNumbers(NamedTuple):
    """Save number of a checkpoint, and its repeat number among checkpoints of the same step."""

    save_number: int = 0
    repeat: int = 0


def save_checkpoint(
    folder: str | Path,
    engine: Any,
    host_group: HostCollectives,
    state: RunState,
    keep: int = 2,
    superseded: set[Path] | None = None,
    owner: FolderOwner | None = None,
) -> Path:
    """Write a checkpoint between two windows, and return its folder; all ranks must call it.

    A kill at any moment leaves either this checkpoint complete or the previous one unchanged.

    Args:
        folder: Folder that holds only this run's checkpoints.
        engine: A DeepSpeed engine, without the gradients of an open window.
        host_group: Group of all ranks.
        state: This rank's state of the run, except the engine.
        keep: How many checkpoints to keep, including this one; at least 1.
        superseded: Checkpoints that the load before passed over (`FoundCheckpoint.superseded`).
            Superseded checkpoints do not count toward `keep`. They are deleted, and removed from
            the set.
        owner: Reserves the folder for this run; None if the caller has reserved it.

    Raises:
        CheckpointError: `state` holds something that is not plain data, a rank cannot write, or the
            folder belongs to another run.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    what = f"save step {state.steps} to {checkpoints.path}"
    is_writer = is_writer_rank(engine)
    numbers = agreed_numbers(
        checkpoints,
        host_group,
        state.steps,
        what,
        owner if is_writer else None,
        is_writer=is_writer,
    )
    name = checkpoint_name(state.steps, numbers.repeat)
    partial = checkpoints.path / partial_name(name)
    try:
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_rank(partial, host_group.rank, state)
        written: dict[str, FileInfo] = {}
        with raise_on_all_ranks(host_group, what, UNHARMED):
            own = write_engine(engine, checkpoints.path, partial.name)
            for path in _own_part(partial):
                sync(path)
            written = checked(partial, [*own, rank_file(partial, host_group.rank)])
        plain = {file_name: asdict(info) for file_name, info in written.items()}
        texts = host_group.all_gather_text(json.dumps([is_writer, plain]))
        written = written_here(host_group.rank, map(json.loads, texts))
        with raise_on_all_ranks(host_group, what, UNHARMED):
            if is_writer:
                manifest = manifest_without_files(engine, numbers, state)
                commit(checkpoints, partial, name, manifest, written)
    except CheckpointError:
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_writer:
        prune(checkpoints, keep, set() if superseded is None else superseded)
    return checkpoints.path / name


def agreed_numbers(
    checkpoints: CheckpointFolder,
    host_group: HostCollectives,
    steps: int,
    what: str,
    owner: FolderOwner | None,
    *,
    is_writer: bool,
) -> SaveNumbers:
    """Reserve the folder, clean it up, and agree on the numbers of the next checkpoint."""
    own = SaveNumbers()
    with raise_on_all_ranks(host_group, what, UNHARMED):
        if is_writer:
            if owner is not None:
                owner.claim(checkpoints)
            checkpoints.prepare()
            save_number = 1 + max(checkpoints.save_numbers().values(), default=0)
            own = SaveNumbers(save_number, checkpoints.next_repeat(steps))
    return SaveNumbers._make(map(int, host_group.all_gather(own).max(axis=0)))


def _own_part(partial: Path) -> Iterator[Path]:
    """Yield the files that this rank syncs to the disk; the ranks of a node divide them."""
    files = sorted(files_of(partial))
    place = local_place(os.environ)
    yield from files[place.rank :: place.num_ranks]


def files_of(checkpoint: Path) -> Iterator[Path]:
    """Yield all files of a checkpoint."""
    return (path for path in checkpoint.rglob("*") if path.is_file())


def checked(partial: Path, written: Iterable[Path]) -> dict[str, FileInfo]:
    """Return size and checksum of files that this rank wrote.

    Raises:
        CheckpointError: A file holds objects, which `load` would refuse.
        OSError: A file cannot be read back.
    """
    checked = {}
    for path in written:
        load_plain(path)
        checked[str(path.relative_to(partial))] = file_info(path)
    return checked


def written_here(rank: int, rows: Iterable[Sequence[Any]]) -> dict[str, FileInfo]:
    """Return the files that the ranks wrote into this rank's folder, if this rank manages it.

    With local disks each node has a folder of its own, which the node's first rank manages.

    Args:
        rank: This rank.
        rows: For each rank, whether it manages a folder, and its files as plain dicts.
    """
    written: dict[str, FileInfo] = {}
    for other, (starts_folder, files) in enumerate(rows):
        if starts_folder and other > rank:
            break
        if other >= rank:
            written |= {name: FileInfo(**info) for name, info in files.items()}
    return written


def manifest_without_files(engine: Any, numbers: SaveNumbers, state: RunState) -> Manifest:
    """Return the manifest of a checkpoint before its files are written."""
    return Manifest(
        serial=numbers.save_number,
        steps=state.steps,
        samples=state.samples,
        micro_steps=int(engine.micro_steps),
        engine=engine_info(engine),
        config=state.config,
        config_changes=state.config_changes,
        files={},
    )


def commit(
    checkpoints: CheckpointFolder,
    partial: Path,
    name: str,
    manifest: Manifest,
    written: Mapping[str, FileInfo],
) -> None:
    """Write the manifest, and make the checkpoint complete; its files must be on the disk.

    Args:
        checkpoints: Folder of all checkpoints.
        partial: Folder of this checkpoint as long as it is incomplete.
        name: Name of this checkpoint.
        manifest: Manifest without files.
        written: Files of known size and checksum, which must be there; all others are read.

    Raises:
        CheckpointError: The ds config cannot be saved, or a file in `written` is not in the folder
            as this host sees it, or has another size.
        OSError: The disk fails.
    """
    _check_written(partial, written)
    names = {str(path.relative_to(partial)): path for path in files_of(partial)}
    others = {name: file_info(path) for name, path in names.items() if name not in written}
    complete = replace(manifest, files=dict(sorted({**others, **written}.items())))
    atomic_write(checkpoints.manifest(partial.name), complete.to_json(), durable=True)
    for folder in {path.parent for path in files_of(partial)}:
        sync(folder)
    checkpoints.commit(name)
    logger.info("checkpoint of step %d saved: %s", manifest.steps, checkpoints.path / name)


def _check_written(partial: Path, written: Mapping[str, FileInfo]) -> None:
    """Raise CheckpointError unless each file is there; wait for files of other hosts on NFS."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    for name, info in written.items():
        while (size := _size(partial / name)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if size is None:
            raise CheckpointError(
                f"{partial / name} does not exist on this host, but another rank has written it: "
                "save to a folder that all nodes share"
            )
        if size != info.size:
            raise CheckpointError(
                f"{partial / name} has {size} bytes, but the rank that wrote it counted "
                f"{info.size}: save to a folder that only this run uses"
            )


def _size(path: Path) -> int | None:
    """Return the size of a file in bytes, read from NFS's server; None if there is no file."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def prune(checkpoints: CheckpointFolder, keep: int, superseded: set[Path]) -> None:
    """Delete superseded checkpoints and the oldest ones; a failure does not stop training.

    A damaged checkpoint is among the superseded ones once a load has found the damage.
    """
    try:
        save_numbers = checkpoints.save_numbers()
    except OSError as error:
        logger.warning(
            "cannot list %s to delete old checkpoints: %s; the next save tries again",
            checkpoints.path,
            error,
        )
        return
    passed_over = {path.name for path in superseded if path.parent == checkpoints.path}
    oldest_first = sorted(save_numbers.keys() - passed_over, key=lambda name: save_numbers[name])
    for name in [*sorted(passed_over), *oldest_first[: -max(1, keep)]]:
        try:
            checkpoints.remove(name)
        except OSError as error:
            logger.warning(
                "cannot delete the checkpoint %s: %s; the next save tries again",
                checkpoints.path / name,
                error,
            )
        if not checkpoints.is_complete(name):
            superseded.discard(checkpoints.path / name)
