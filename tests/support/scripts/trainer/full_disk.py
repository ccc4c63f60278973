"""Saves to a small disk that is full, or has no room for more files, in each part of a save."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.background_save import BackgroundSaver, copy_checkpoint
from zerowatch.runtime.trainer.checkpoint.folder_owner import FolderOwner
from zerowatch.runtime.trainer.checkpoint.load import find_checkpoint, load_checkpoint
from zerowatch.runtime.trainer.checkpoint.rank_exchange import StoreExchange
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

ALONE = SingleRankHostGroup()
PAGE_BYTES = 4096
DISK_BYTES, DISK_FILES = 512 * 1024, 64
# A checkpoint takes 2 pages of moments of the run, 5 of weights, 9 of moments, and 4 small files.
WIDTH, NOISE = 2048, 1024
MOST_PAGES, MOST_FILES = 20, 8

Save = Callable[[Path, PlainEngine, FolderOwner], None]


@dataclass(frozen=True)
class FullDiskOutcome:
    """What happened to the second save of a run, with little room on the disk.

    Attributes:
        room: Pages or files that were left.
        error: Why the save failed; None if it did not.
        loaded: Step of the checkpoint that was loaded then, and of its weights.
        recovered: The same after a third save, with room again.
        leftovers: Incomplete checkpoints after the third save.
    """

    room: int
    error: str | None
    loaded: tuple[int, float]
    recovered: tuple[int, float]
    leftovers: int

    @property
    def is_intact(self) -> bool:
        """Return whether nothing was lost."""
        allowed = [(1, 1.0), (2, 2.0)] if self.error else [(2, 2.0)]
        return self.loaded in allowed and self.recovered == (3, 3.0) and not self.leftovers


def waited_for(folder: Path, engine: PlainEngine, owner: FolderOwner) -> None:
    save_checkpoint(folder, engine, ALONE, state(engine), owner=owner)


def in_background(folder: Path, engine: PlainEngine, owner: FolderOwner) -> None:
    saver = BackgroundSaver()
    pending = copy_checkpoint(folder, engine, ALONE, state(engine), lambda: 2**30, owner=owner)
    saver.start(pending, StoreExchange(ALONE), lambda saved, seconds: None)
    saver.close()


def state(engine: PlainEngine) -> RunState:
    steps = engine.global_steps
    return RunState(
        steps=steps,
        samples=8 * steps,
        config={},
        micro_batch_plan={"micro_batch_samples": 4},
        client_state=torch.zeros(NOISE),
    )


def loaded(folder: Path) -> tuple[int, float]:
    engine = PlainEngine(WIDTH)
    found = find_checkpoint(folder, engine, ALONE)
    assert found is not None
    load_checkpoint(found, engine, ALONE)
    return found.state.steps, engine.module.weight.data.mean().item()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk at a folder. This needs root.

    Raises:
        PermissionError: This process may not mount.
    """
    options = f"size={DISK_BYTES},nr_inodes={DISK_FILES}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    gc.collect()
    gc.freeze()  # so that the collections below are fast
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()  # files that were loaded are mapped
        subprocess.run(["umount", str(folder)], check=True)


def without_bytes(disk: Path, save: Save) -> Iterator[FullDiskOutcome]:
    """Yield the outcomes of saves with a growing number of free pages."""
    for pages in range(MOST_PAGES + 1):
        yield _outcome(disk, save, pages, fill_bytes)


def without_files(disk: Path, save: Save) -> Iterator[FullDiskOutcome]:
    """Yield the outcomes of saves with a growing number of files that can still be created."""
    for files in range(MOST_FILES + 1):
        yield _outcome(disk, save, files, fill_files)


def _outcome(
    disk: Path, save: Save, room: int, fill: Callable[[Path, int], None]
) -> FullDiskOutcome:
    saves, fillers, owner = disk / "saves", disk / "fillers", FolderOwner("full")
    fillers.mkdir()
    engine = PlainEngine(WIDTH)
    engine.module.weight.data.zero_()
    engine.step()
    save(saves, engine, owner)
    gc.collect()  # deleted files that are still mapped would leave more room later
    fill(fillers, room)
    engine.step()
    error = None
    try:
        save(saves, engine, owner)
    except CheckpointError as raised:
        error = str(raised).replace(str(disk), "")
    after_failure = loaded(saves)
    shutil.rmtree(fillers)
    engine.step()
    save(saves, engine, owner)
    outcome = FullDiskOutcome(
        room=room,
        error=error,
        loaded=after_failure,
        recovered=loaded(saves),
        leftovers=len(list(saves.glob(".partial*"))),
    )
    owner.close()
    shutil.rmtree(saves)
    return outcome


def fill_bytes(fillers: Path, pages: int) -> None:
    """Fill a disk up to a number of free pages, by a file in a folder."""
    filler = fillers / "filler"
    filler.touch()
    filler.write_bytes(bytes((os.statvfs(fillers).f_bfree - pages) * PAGE_BYTES))


def fill_files(fillers: Path, files: int) -> None:
    """Leave room for a number of new files on a disk, by files in a folder."""
    for number in range(os.statvfs(fillers).f_ffree - files):
        (fillers / str(number)).touch()
