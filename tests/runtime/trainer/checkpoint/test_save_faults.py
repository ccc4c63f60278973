"""Tests of saves on a full disk and in a deleted folder: earlier checkpoints are never lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from scripts.trainer.full_disk import (
    ALONE,
    FullDiskOutcome,
    Save,
    in_background,
    loaded,
    small_disk,
    state,
    waited_for,
    without_bytes,
    without_files,
)
from scripts.trainer.full_disk import WIDTH as ENGINE_WIDTH
from scripts.trainer.resume_engine import PlainEngine

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.background_save import BackgroundSaver, copy_checkpoint
from zerowatch.runtime.trainer.checkpoint.folder_owner import FolderOwner
from zerowatch.runtime.trainer.checkpoint.rank_exchange import StoreExchange


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("disk")
    with ExitStack() as undo:
        try:
            undo.enter_context(small_disk(folder))
        except PermissionError as error:
            pytest.skip(f"no mounts here: {error}")
        yield folder


@pytest.mark.parametrize("save", [waited_for, in_background])
@pytest.mark.parametrize("without", [without_bytes, without_files])
def test_a_disk_that_is_full_in_any_part_of_a_save_loses_nothing(
    disk: Path, save: Save, without: Callable[[Path, Save], Iterator[FullDiskOutcome]]
) -> None:
    outcomes = list(without(disk, save))

    assert [each for each in outcomes if not each.is_intact] == []
    failed = [each.error is not None for each in outcomes]
    assert failed == sorted(failed, reverse=True)  # below some room, and not above it
    assert set(failed) == {False, True}


def test_a_folder_that_is_deleted_while_it_is_written_is_an_error_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    saves, owner, engine = tmp_path / "saves", FolderOwner("deleted"), PlainEngine(ENGINE_WIDTH)
    saver = BackgroundSaver()
    pending = copy_checkpoint(saves, engine, ALONE, state(engine), lambda: 2**30, owner=owner)
    shutil.rmtree(saves)
    saver.start(pending, StoreExchange(ALONE), lambda saved, seconds: None)

    with pytest.raises(CheckpointError, match="cannot save step 0"):
        saver.close()

    engine.module.weight.data.zero_()
    engine.step()
    in_background(saves, engine, owner)
    assert loaded(saves) == (1, 1.0)
    owner.close()
