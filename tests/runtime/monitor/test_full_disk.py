"""Tests of a start on a full disk: what the run folder lacks is written once there is space.

Covers `retried_files.py`; `engine_checks.py` checks the same with an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts.trainer.full_disk import fill_bytes, fill_files, small_disk

from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common.liveness_file import LivenessFile, read_marker
from zerowatch.runtime.common.process_info import ProcessInfo, launcher_identity
from zerowatch.runtime.common.rank_store import RankStore, TargetDiscovery
from zerowatch.runtime.common.retried_files import RetriedFiles
from zerowatch.runtime.monitor.ds_config_file import write_ds_config
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS
from zerowatch.runtime.monitor.run_folder import LAUNCHERS_FOLDER, RunFolder

ALIVE = "rank-0.alive.json"
FILES = {"settings.json", "ds_config.json", "targets.json", "run.lock", ALIVE}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with small_disk(tmp_path):
            yield tmp_path
    except PermissionError as error:
        pytest.skip(f"no mounts here: {error}")


@pytest.mark.parametrize("fill", [fill_bytes, fill_files])
def test_a_run_that_starts_on_a_full_disk_writes_its_files_once_there_is_space(
    disk: Path, fill: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/agent/attempt_0/0/error.json")
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(seconds=0.0)
    fillers, path = disk / "fillers", disk / "runs" / "night-7"
    fillers.mkdir()
    fill(fillers, 0)

    folder = open_folder(disk / "runs", lambda: clock.seconds)
    write_ds_config(path, SimpleNamespace(config={"train_batch_size": 8}), folder.files)
    alive = LivenessFile(path, 0, "here")
    alive.open()
    folder.poll()
    before = contents(path)
    for file in fillers.iterdir():
        file.unlink()
    clock.seconds += RETRY_SECONDS
    folder.poll()
    alive.open()

    assert not before & (FILES - {"run.lock"})  # an empty file needs no space
    assert contents(path) >= FILES
    assert (path / LAUNCHERS_FOLDER / str(launcher_identity())).exists()
    assert read_marker(path / ALIVE) is not None
    assert caplog.text.count("cannot write") == 3
    assert caplog.text.count("is written now") == 3
    assert caplog.text.count("liveness file") == 1
    folder.close()
    alive.close()


def test_a_file_is_retried_with_its_last_content_and_logged_once(tmp_path: Path, caplog) -> None:
    files, target = RetriedFiles(), tmp_path / "runs" / "targets.json"
    (tmp_path / "runs").touch()  # no folder can be made here

    files.write(target, "first")
    files.write(target, "second")
    files.write(tmp_path / "runs" / "discarded", "")
    files.discard(tmp_path / "runs" / "discarded")
    files.retry()
    (tmp_path / "runs").unlink()
    files.retry()

    assert target.read_text() == "second"
    assert contents(tmp_path / "runs") == {"targets.json"}
    assert caplog.text.count(f"cannot write {target}") == 1


def open_folder(runs: Path, now: Callable[[], float]) -> RunFolder:
    process = ProcessInfo(rank=0, local_rank=0, world_size=1, host="here", attempt=0)
    store = RankStore(process, 0)
    targets = TargetDiscovery(store, process)
    targets.announce("127.0.0.1:9464")
    settings = Settings(run_id="night-7", run_log={"folder": runs})
    return RunFolder(settings, process, store, targets, now)


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*") if path.is_file()}
