"""Tests of the step log on real disks that fill up, vanish or fail."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zerowatch.metrics.settings import RunLogSettings, Settings
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.common.retried_files import RetriedFiles
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS, LogFile
from zerowatch.runtime.monitor.step_log import StepLog, keeps_every_step, write_settings

IDENTITY = {"rank": 3, "host": "here"}
# Bytes of lines, some larger than a segment of 4096 bytes.
LENGTHS = (100, 4000, 10, 2047, 2047, 1, 9000, 1, 1)


def record(step: int, loss: float | None = 1.0) -> StepRecord:
    return StepRecord(
        step=step,
        ended_at_unix_seconds=0.0,
        seconds=1.0,
        phase_seconds={"forward": 1.0},
        micro_batches=1,
        samples=None,
        tokens=None,
        loss=loss,
        nonfinite_loss=loss is not None and loss != loss,
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        skipped=False,
        collectives={},
        comm_seconds=None,
        comm_exposed_seconds=None,
        memory_bytes={},
        device_readings={},
    )


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if line]


def test_a_record_is_on_disk_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run", IDENTITY, RunLogSettings())

    log.append(record(1))
    log.append(record(2))

    assert log.path == tmp_path / "run" / "rank-3.jsonl"
    assert steps(log.path) == [1, 2]
    assert json.loads(log.path.read_text().splitlines()[0])["host"] == "here"
    log.close()


def test_a_restart_appends_after_a_partial_line(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings())
    log.append(record(1))
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')

    again = StepLog(tmp_path, IDENTITY, RunLogSettings())
    again.append(record(2))
    again.close()

    whole = [line for line in log.path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["step"] for line in whole] == [1, 2]


def test_a_nan_loss_is_null_with_a_flag(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings())

    log.append(record(1, loss=float("nan")))
    log.close()

    written = json.loads(log.path.read_text())
    assert written["loss"] is None
    assert written["nonfinite_loss"] is True


def test_segments_are_rotated_and_the_oldest_dropped(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings(segment_bytes=4096, max_segments=3))

    for step in range(60):
        log.append(record(step))
    log.close()

    files = {path.name: steps(path) for path in tmp_path.iterdir()}
    assert set(files) == {"rank-3.jsonl", "rank-3.1.jsonl", "rank-3.2.jsonl"}
    kept = files["rank-3.2.jsonl"] + files["rank-3.1.jsonl"] + files["rank-3.jsonl"]
    assert kept == list(range(kept[0], 60))
    assert kept[0] > 0


def test_a_folder_that_cannot_be_created_is_logged_once_and_its_records_are_counted(
    tmp_path: Path, caplog
) -> None:
    (tmp_path / "file").write_text("in the way")
    log = StepLog(tmp_path / "file" / "run", IDENTITY, RunLogSettings())

    for step in range(3):
        log.append(record(step))

    assert log.dropped == 3
    warnings = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "training goes on" in warnings[0].getMessage()


def test_writing_resumes_when_the_disk_works_again(tmp_path: Path, caplog) -> None:
    blocker = tmp_path / "run"
    blocker.write_text("in the way")
    now = [0.0]
    log = StepLog(blocker, IDENTITY, RunLogSettings(), now=lambda: now[0])
    log.append(record(1))

    blocker.unlink()
    log.append(record(2))
    now[0] += RETRY_SECONDS
    log.append(record(3))
    log.close()

    assert steps(log.path) == [3]
    assert log.dropped == 2


def test_a_full_disk_loses_records_and_nothing_else(tmp_path: Path) -> None:
    script = f"""
import resource, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_step_log import IDENTITY, record
from zerowatch.metrics.settings import RunLogSettings
from zerowatch.runtime.common.retried_files import RetriedFiles
from zerowatch.runtime.monitor.step_log import StepLog
from pathlib import Path
log = StepLog(Path({str(tmp_path)!r}), IDENTITY, RunLogSettings())
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel refuses more, as a full disk
for step in range(9):
    log.append(record(step))
print(log.dropped)
"""

    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600
    )

    assert finished.returncode == 0, finished.stderr
    whole = [x for x in (tmp_path / "rank-3.jsonl").read_text().splitlines() if x.endswith("}")]
    assert len(whole) >= 1
    assert int(finished.stdout) == 9 - len(whole)


def test_a_deleted_file_is_noticed_counted_and_made_again(tmp_path: Path, caplog) -> None:
    log = StepLog(tmp_path / "run", IDENTITY, RunLogSettings())
    for step in (1, 2, 3):
        log.append(record(step))

    log.path.unlink()
    log.append(record(4))
    shutil.rmtree(log.path.parent)
    log.append(record(5))
    log.close()

    assert steps(log.path) == [5]
    assert log.dropped == 4
    [warning] = caplog.records
    assert str(log.path) in warning.getMessage()


def test_after_a_rename_the_log_goes_on_under_its_name(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings())
    log.append(record(1))

    log.path.rename(tmp_path / "rank-3.jsonl.1")  # as logrotate does
    log.append(record(2))
    log.path.rename(tmp_path / "rank-3.jsonl.2")
    log.path.touch()  # with `create`
    log.append(record(3))
    log.close()

    assert steps(tmp_path / "rank-3.jsonl.1") == [1]
    assert steps(tmp_path / "rank-3.jsonl.2") == [2]
    assert steps(log.path) == [3]
    assert log.dropped == 0


def test_a_truncated_file_counts_as_empty(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings(segment_bytes=4096, max_segments=2))
    for step in range(100):
        log.append(record(step))
        os.truncate(log.path, 0)  # as logrotate does with `copytruncate`
    log.append(record(100))
    log.close()

    assert steps(log.path) == [100]
    assert [path.name for path in tmp_path.iterdir()] == [log.path.name]


def test_in_a_folder_that_was_moved_the_open_file_goes_on(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run", IDENTITY, RunLogSettings())
    log.append(record(1))

    (tmp_path / "run").rename(tmp_path / "moved")
    log.append(record(2))
    log.close()

    assert steps(tmp_path / "moved" / log.path.name) == [1, 2]


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_what_is_no_regular_file_is_not_written_to(tmp_path: Path, caplog, kind: str) -> None:
    target = tmp_path / "target"
    log = StepLog(tmp_path, IDENTITY, RunLogSettings())
    if kind == "link":
        target.write_text("keep\n")
    if kind == "pipe":
        os.mkfifo(log.path)
    else:
        log.path.symlink_to(target)

    log.append(record(1))

    assert log.dropped == 1
    assert len(caplog.records) == 1
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "keep\n"


def test_many_ranks_write_every_tenth_step_except_one_per_node(tmp_path: Path) -> None:
    log = StepLog(tmp_path, IDENTITY, RunLogSettings(), every_step=keeps_every_step(65, 3))

    for step in range(25):
        log.append(record(step))
    log.close()

    assert steps(log.path) == [0, 10, 20]
    assert keeps_every_step(65, 0)
    assert keeps_every_step(64, 3)


def test_the_settings_file_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    write_settings(tmp_path / "run", Settings(run_id="mine"), RetriedFiles())

    path = tmp_path / "run" / "settings.json"
    assert json.loads(path.read_text())["run_id"] == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["environ", "argv"])
def test_the_settings_hold_no_command_line_and_no_environment(tmp_path: Path, text: str) -> None:
    write_settings(tmp_path, Settings(), RetriedFiles())

    assert text not in (tmp_path / "settings.json").read_text()


def test_a_segment_is_full_once_it_has_its_size(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.jsonl", RunLogSettings(segment_bytes=4096, max_segments=4))

    for number in range(1, 5):
        log.append(lambda _, number=number: bytes([48 + number]) * 2047 + b"\n")
    log.append(lambda _: b"5\n")
    log.close()

    found = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert {name: [line[0] for line in lines] for name, lines in found.items()} == {
        "a.2.jsonl": ["1", "2"],
        "a.1.jsonl": ["3", "4"],
        "a.jsonl": ["5"],
    }


def test_of_one_segment_nothing_older_is_kept(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.jsonl", RunLogSettings(segment_bytes=4096, max_segments=1))

    log.append(lambda _: b"x" * 4095 + b"\n")
    log.append(lambda _: b"new\n")
    log.close()

    assert [path.read_text() for path in tmp_path.iterdir()] == ["new\n"]


def test_a_line_knows_whether_it_is_the_first_of_its_file(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.jsonl", RunLogSettings(segment_bytes=4096, max_segments=2))
    firsts: list[bool] = []

    def line(is_first: bool) -> bytes:
        firsts.append(is_first)
        return b"x" * 2047 + b"\n"

    for _ in range(5):
        log.append(line)
    log.close()
    log.append(line)
    os.truncate(log.path, 0)
    log.append(line)
    log.append(line)
    log.close()

    assert firsts == [True, False, True, False, True, True, True, False]


@pytest.mark.parametrize(("seconds", "is_written"), [(9.9, False), (10.0, True)])
def test_after_an_error_the_disk_is_tried_again_after_ten_seconds(
    tmp_path: Path, seconds: float, is_written: bool
) -> None:
    folder, now = tmp_path / "run", [500.0]
    folder.write_text("in the way")
    log = LogFile(folder / "a.jsonl", RunLogSettings(), now=lambda: now[0])
    log.append(lambda _: b"1\n")
    folder.unlink()
    now[0] += seconds

    log.append(lambda _: b"2\n")
    log.close()

    assert log.dropped == (1 if is_written else 2)
    assert log.path.exists() is is_written


def test_each_deleted_file_is_reported_to_its_owner(tmp_path: Path) -> None:
    deleted: list[str] = []
    log = LogFile(
        tmp_path / "a.jsonl", RunLogSettings(), on_deleted=lambda: deleted.append("deleted")
    )
    log.append(lambda _: b"1\n")
    log.path.rename(tmp_path / "b.jsonl")
    log.append(lambda _: b"2\n")
    renamed = list(deleted)
    log.path.unlink()
    log.append(lambda _: b"3\n")
    log.close()

    assert (renamed, deleted, log.dropped) == ([], ["deleted"], 1)


def test_many_lines_in_one_write_fill_the_same_segments_as_single_lines(tmp_path: Path) -> None:
    settings = RunLogSettings(segment_bytes=4096, max_segments=4)
    lines = [bytes([48 + number]) * size + b"\n" for number, size in enumerate(LENGTHS)]
    single = LogFile(tmp_path / "single" / "a.jsonl", settings)
    together = LogFile(tmp_path / "together" / "a.jsonl", settings)

    for line in lines:
        single.append_all([line])
    together.append_all(lines[:1])
    together.append_all(lines[1:])
    together.append_all([])
    single.close()
    together.close()

    expected = contents(tmp_path / "single")
    assert len(expected) == 4
    assert contents(tmp_path / "together") == expected
    assert together.dropped == single.dropped == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_steps_of_a_second_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sizes = os.write, []

    def counted(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    log = StepLog(tmp_path, IDENTITY, RunLogSettings())
    monkeypatch.setattr("zerowatch.runtime.monitor.log_file.os.write", counted)
    log.append(*map(record, range(20)))
    log.close()

    assert steps(log.path) == list(range(20))
    assert sizes == [log.path.stat().st_size]


def test_a_disk_that_is_full_in_the_middle_of_many_lines_loses_only_the_rest(
    tmp_path: Path,
) -> None:
    script = f"""
import resource
from pathlib import Path
from zerowatch.metrics.settings import RunLogSettings
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS, LogFile
now = [0.0]
log = LogFile(Path({str(tmp_path)!r}) / "a.jsonl", RunLogSettings(), now=lambda: now[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 2000))  # the kernel refuses more, as a full disk
log.append_all([bytes([48 + number]) * 299 + b"\\n" for number in range(6)])
log.append_all([b"6\\n"])
print(log.dropped)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
now[0] += RETRY_SECONDS
log.append_all([b"7\\n", b"8\\n"])
log.close()
print(log.dropped)
"""

    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600
    )

    assert finished.stdout.split() == ["4", "4"], finished.stderr
    assert [(line[0], len(line)) for line in (tmp_path / "a.jsonl").read_text().split()] == [
        *(("0", 299), ("1", 299), ("2", 299)),
        ("3", 100),  # the line in flight is ended, as after a kill
        *(("7", 1), ("8", 1)),
    ]
