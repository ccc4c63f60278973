"""Tests of `HangMonitor`: a hang is counted, announced, reported and logged, and may abort."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes.hangs import CALL, WatchedRank
from fakes.scraper import eventually

from zerowatch.metrics.catalog import communication, training
from zerowatch.runtime.common.exit_notes import ExitNote, read_exit_notes
from zerowatch.runtime.common.liveness_file import current_process
from zerowatch.runtime.common.phase_timer import FORWARD
from zerowatch.runtime.cross_rank.hang import hang_monitor


def test_a_hang_is_counted_announced_reported_and_logged_once(tmp_path: Path, caplog: Any) -> None:
    rank = WatchedRank(tmp_path)

    rank.pass_seconds(29)
    early = rank.num_hangs, rank.context.announced[:]
    rank.pass_seconds(60)

    assert early == (0, [])
    assert (rank.num_hangs, rank.context.announced, rank.exits) == (1, [True], [])
    (report,) = tmp_path.iterdir()
    said = f"rank 1 has not arrived at {CALL}; it has sent no heartbeat for at least 33 s"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert caplog.messages == [f"training hangs: {said}", f"rank 0 hangs; report: {report}"]
    assert report.read_text().splitlines()[0] == said


def test_a_disabled_monitor_detects_nothing(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, enabled=False)

    rank.pass_seconds(100)

    assert communication.HANGS not in rank.recorder.snapshot().values
    assert list(tmp_path.iterdir()) == []


def test_without_a_writable_folder_the_summary_is_logged(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    rank = WatchedRank(tmp_path / "file" / "run")

    rank.pass_seconds(30)

    said, where = caplog.messages
    assert f"rank 1 has not arrived at {CALL}" in said
    assert "no report: it cannot be written" in where
    assert rank.num_hangs == 1


def test_an_announced_hang_is_reported_but_neither_counted_nor_announced(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)
    rank.pass_seconds(3)

    rank.context.hang_announced = True
    rank.pass_seconds(20)

    assert (rank.num_hangs, rank.context.announced, rank.exits) == (0, [], [])
    (report,) = tmp_path.iterdir()
    assert "another rank announced the hang" in report.read_text()


def test_an_announced_hang_that_passes_the_own_limit_is_counted_without_a_second_report(
    tmp_path: Path,
) -> None:
    rank = WatchedRank(tmp_path)
    rank.pass_seconds(28)

    rank.context.hang_announced = True
    rank.pass_seconds(40)

    assert (rank.num_hangs, rank.context.announced) == (1, [])
    assert len(list(tmp_path.iterdir())) == 1


def check_for_seconds(rank: WatchedRank, seconds: int) -> float | None:
    """Pass the time, and return hang_active."""
    for _ in range(seconds):
        rank.now_ns += 10**9
        rank.watch.check()
    return rank.recorder.snapshot().value(communication.HANG_ACTIVE)


def test_a_hang_is_active_until_training_resumes(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)

    found = [check_for_seconds(rank, seconds) for seconds in (0, 29, 2, 600)]
    rank.phase_timer.enter(FORWARD)

    assert found == [0, 0, 1, 1]
    assert check_for_seconds(rank, 1) == 0


def test_steps_that_are_replays_of_a_graph_are_no_hang_and_a_hang_within_one_is_found(
    tmp_path: Path,
) -> None:
    rank = WatchedRank(tmp_path)

    found = []
    for seconds in (20, 20, 29, 2):
        found.append(check_for_seconds(rank, seconds))
        if len(found) < 3:
            rank.phase_timer.mark_replay()

    assert found == [0, 0, 0, 1]


def test_the_rank_that_a_hang_waits_for_is_known_as_long_as_it_hangs(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)

    def awaited() -> float | None:
        return rank.recorder.snapshot().value(communication.HANG_AWAITED_RANK)

    check_for_seconds(rank, 29)
    before = awaited()
    check_for_seconds(rank, 2)
    meanwhile = awaited()
    rank.phase_timer.enter(FORWARD)
    check_for_seconds(rank, 1)

    assert (before, meanwhile, awaited()) == (None, 1, None)


def test_a_hang_ends_with_monitoring(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    check_for_seconds(rank, 40)

    rank.watch.close()

    assert check_for_seconds(rank, 0) == 0


def test_an_abort_is_the_reason_of_the_end_while_the_hang_is_active(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)

    active = check_for_seconds(rank, 60)

    assert (active, rank.exits) == (1, [70])
    assert rank.recorder.snapshot().value(training.RUN_END_INFO, "hang_abort") == 1


def test_abort_ends_the_process_at_a_second_limit(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)

    rank.pass_seconds(59)
    early = rank.exits[:]
    rank.pass_seconds(1)

    assert (early, rank.exits) == ([], [70])
    assert len(list(tmp_path.glob("hang-*"))) == 1


def test_an_abort_is_noted_for_the_report_at_the_next_start(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)

    rank.pass_seconds(60)

    process = current_process(rank.context.rank, socket.gethostname())
    assert process is not None
    (note,) = read_exit_notes(tmp_path, process)
    assert "hang.abort" in note.text
    assert not note.may_be_oom_kill


def test_a_rank_that_resumes_is_not_aborted(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)
    rank.pass_seconds(59)

    rank.phase_timer.enter(FORWARD)
    rank.pass_seconds(29)

    assert (rank.context.announced, rank.exits) == ([True, False], [])


def test_a_log_that_blocks_delays_neither_checks_nor_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stuck.wait()

    handler = Stuck()
    logging.getLogger("zerowatch").addHandler(handler)
    monkeypatch.setattr("zerowatch.runtime.cross_rank.hang.hang_monitor.FLUSH_SECONDS", 0.05)
    rank = WatchedRank(tmp_path, abort=True)
    monkeypatch.setattr(rank.watch, "close", lambda: None)
    try:
        rank.pass_seconds(60)

        assert rank.exits == [70]
    finally:
        logging.getLogger("zerowatch").removeHandler(handler)
        stuck.set()
        # They would log into the next test.
        for thread in threading.enumerate():
            if thread.name in ("zerowatch-hang", "zerowatch-abort"):
                thread.join()


def test_a_hang_is_logged_though_its_report_cannot_be_written_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    stuck, is_writing = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        is_writing.set()
        stuck.wait()

    monkeypatch.setattr(hang_monitor, "write_report", block)
    rank = WatchedRank(tmp_path)

    check_for_seconds(rank, 30)
    is_writing.wait()
    logged = caplog.messages[:]
    stuck.set()
    join_hang_threads()

    assert [line.partition(":")[0] for line in logged] == ["training hangs"]


def test_a_hang_in_which_the_driver_blocks_is_reported_without_collectives_and_aborted(
    tmp_path: Path,
) -> None:
    rank = WatchedRank(tmp_path, abort=True)
    rank.context.driver_blocks = True

    rank.pass_seconds(60)

    (report,) = tmp_path.glob("hang-*")
    lines = report.read_text().splitlines()
    assert lines[0].startswith("rank 0 makes no progress")
    assert "the driver does not answer" in lines[0]
    assert "  unknown: the driver does not answer" in lines
    assert (rank.num_hangs, rank.exits) == (1, [70])


def test_calls_are_left_out_of_a_report_whose_rank_sets_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = WatchedRank(tmp_path)
    monkeypatch.setattr(rank.context, "rank_sets", lambda: None)

    rank.pass_seconds(30)

    (report,) = tmp_path.iterdir()
    assert CALL not in report.read_text()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_hang_is_found_though_the_watch_thread_checks_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(hang_monitor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hang_monitor, "CHECK_SECONDS", 0.001)
    rank = WatchedRank(tmp_path, abort=True, enabled=enabled)
    seconds = itertools.count(rank.now_ns, 10**9)
    rank.watch._now_ns = lambda: next(seconds)

    rank.watch.start()
    found = enabled and eventually(lambda: bool(rank.exits))
    rank.watch.close()

    assert found == enabled
    assert rank.context.started == enabled
    assert not any(thread.name == "zerowatch-hang-checks" for thread in threading.enumerate())


def test_without_a_thread_for_the_report_a_hang_is_reported_and_aborted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rank = WatchedRank(tmp_path, abort=True)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    rank.pass_seconds(60)
    rank.phase_timer.enter(FORWARD)
    rank.pass_seconds(1)

    assert (rank.num_hangs, rank.exits) == (1, [70])
    assert len(list(tmp_path.iterdir())) == 1
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "training hangs",
        "rank 0 hangs; report",
        "rank 0",
    ]


def test_a_hang_is_described_once_to_those_who_ask_for_it(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)

    rank.pass_seconds(29)
    early = rank.said[:]
    rank.pass_seconds(100)

    assert early == []
    assert rank.said == [
        f"rank 1 has not arrived at {CALL}; it has sent no heartbeat for at least 33 s"
    ]


def test_the_report_has_the_moment_of_the_hang(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.phase_timer.enter(FORWARD)

    rank.pass_seconds(30)

    (report,) = tmp_path.iterdir()
    lines = report.read_text().splitlines()
    assert lines[2].startswith(f"rank 0 on {socket.gethostname()}, 20")
    assert lines[3:5] == [
        "last step that ended: 3; phase: forward",
        "no progress for 30.0 s; limit 30.0 s, expected pauses left out",
    ]


def test_the_end_of_a_hang_and_an_abort_are_logged_with_the_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed, aborted = WatchedRank(tmp_path / "a"), WatchedRank(tmp_path / "b", abort=True)

    resumed.pass_seconds(30)
    resumed.phase_timer.enter(FORWARD)
    resumed.pass_seconds(1)
    join_hang_threads()
    aborted.pass_seconds(60)

    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[2] == ("WARNING", "rank 0: training resumed")
    assert lines[-1] == ("ERROR", "rank 0 exits with code 70, as hang.abort is set")


def join_hang_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "zerowatch-hang":
            thread.join()


def test_a_report_says_whether_training_has_resumed_since(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    check_for_seconds(rank, 30)
    rank.phase_timer.enter(FORWARD)

    check_for_seconds(rank, 1)  # a hang that ends
    join_hang_threads()
    check_for_seconds(rank, 30)  # one that does not
    join_hang_threads()

    first, second = (path.read_text() for path in sorted(tmp_path.iterdir()))
    assert first.splitlines()[-1].startswith("training resumed, ")
    assert "training resumed" not in second


def test_what_happens_at_the_end_of_monitoring_is_no_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = WatchedRank(tmp_path)
    check_for_seconds(rank, 30)
    join_hang_threads()

    rank.watch.stop_checks()
    rank.phase_timer.enter(FORWARD)  # Ctrl-C leaves the phase in which the rank hung
    rank.pass_seconds(1)
    join_hang_threads()

    assert not any("resumed" in message for message in caplog.messages)
    assert "resumed" not in (tmp_path / "hang-rank-0-1.txt").read_text()


def test_a_run_keeps_no_more_reports_than_it_may_and_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, homeless = WatchedRank(tmp_path), WatchedRank(tmp_path)
    for number in range(1, 6):
        (tmp_path / f"hang-rank-0-{number}.txt").touch()
    monkeypatch.setattr(homeless.context, "folder", lambda: None)

    full.pass_seconds(30)
    homeless.pass_seconds(30)

    assert [line for line in caplog.messages if not line.startswith("training hangs")] == [
        "rank 0 hangs; no report: this rank has written as many as a run keeps",
        "rank 0 hangs; no report: no run folder is written",
    ]


def test_the_flight_recorder_is_written_next_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = WatchedRank(tmp_path)
    monkeypatch.setattr(rank.context, "flight_recorder_dump", lambda: b"{}")

    rank.pass_seconds(30)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hang-rank-0-1.flight.json",
        "hang-rank-0-1.txt",
    ]


def test_an_abort_is_noted_with_its_exit_code(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path, abort=True)

    rank.pass_seconds(60)

    process = current_process(0, socket.gethostname())
    assert process is not None
    assert read_exit_notes(tmp_path, process) == [
        ExitNote(
            text="ended itself with code 70, as training hung and hang.abort is set",
            may_be_oom_kill=False,
        )
    ]


def test_without_abort_a_hang_never_ends_the_process(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)

    rank.pass_seconds(600)

    assert (rank.exits, rank.recorder.snapshot().values.get(training.RUN_END_INFO)) == ([], None)


def test_the_driver_is_asked_for_a_report_until_it_is_written(tmp_path: Path) -> None:
    rank, events = WatchedRank(tmp_path), list[str]()
    is_asked, is_closed = threading.Event(), threading.Event()

    def dump() -> None:
        is_asked.set()
        is_closed.wait(0.2)
        events.append("asked")

    def close() -> None:
        events.append("closed")
        is_closed.set()

    rank.context.flight_recorder_dump = dump
    rank.context.close = close
    check_for_seconds(rank, 31)
    is_asked.wait()

    rank.watch.close(timeout_seconds=60.0)

    assert events == ["asked", "closed"]
