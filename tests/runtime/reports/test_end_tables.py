"""Tests of the tables at the end of a run."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_metrics import RecordedRank
from recorded_runs import step_record, write_run

from zerowatch.metrics.catalog import communication, training
from zerowatch.metrics.catalog.tuner import TUNER_SYMPTOM
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.cli.run_end import print_run_end
from zerowatch.runtime.common import launcher_link
from zerowatch.runtime.monitor.final_report import announce_report
from zerowatch.runtime.reports.end_tables import MAX_RANKS, PLAIN_WIDTH, print_end_tables
from zerowatch.runtime.reports.report_markdown import report_markdown
from zerowatch.runtime.reports.run_summary import summary_of


def waiting(rank: int, step: int) -> StepRecord:
    """A step of 0.5 s that waits 0.2 s for communication."""
    return step_record(step, comm_exposed_seconds=0.2, comm_exposed_phase_seconds={"backward": 0.2})


def printed_tables(folder: Path) -> str:
    stream = io.StringIO()
    print_end_tables(summary_of(folder), stream)
    return stream.getvalue()


def test_the_tables_show_where_the_time_went_and_what_to_try(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "night", record=waiting)
    with RecordedRank(folder) as rank:
        rank.recorder.add(training.STEPS, 10)
        rank.recorder.add(training.PHASE_SECONDS, 5.0, "backward")
        rank.recorder.add(communication.COMM_EXPOSED_SECONDS, 2.0, "dp")
        rank.recorder.add(communication.COMM_CAUSE_SECONDS, 1.5, "imbalance")

    lines = printed_tables(folder).splitlines()

    def row(start: str) -> list[str]:
        (line,) = [line for line in lines if line.strip().startswith(start)]
        return line.split()[-3:]

    assert row("backward") == ["ms", "60", "%"]
    assert row("of which training waited for it") == ["ms", "40", "%"]
    assert row("imbalance: another rank was late") == ["ms", "30", "%"]
    at = lines.index("What to try next")
    assert "1. " in lines[at + 1]


def test_communication_takes_no_less_than_the_wait_for_it(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        seconds = 4.0 if (rank, step) == (1, 1) else 0.5  # it waited for the start of rank 0
        waited = seconds - 0.4
        return step_record(
            step,
            seconds=seconds,
            phase_seconds={"backward": seconds},
            comm_seconds=waited,
            comm_exposed_seconds=waited,
            comm_exposed_phase_seconds={"backward": waited},
        )

    lines = printed_tables(write_run(tmp_path / "night", record=record)).splitlines()

    communication = next(line for line in lines if "of which communication" in line)
    wait = next(line for line in lines if "of which training waited" in line)
    assert communication.split()[-4:] == wait.split()[-4:]


def test_a_run_with_the_tuner_says_what_it_did(tmp_path: Path) -> None:
    auto = {"tuner": {"mode": "auto"}}
    observed = write_run(tmp_path / "observed", settings=auto, steps=100)
    with RecordedRank(observed) as rank:
        rank.recorder.set(TUNER_SYMPTOM, 0.0, "comm_latency")
    (write_run(tmp_path / "changed", settings=auto) / "decisions.jsonl").write_text(
        "".join(json.dumps(decision(verdict)) + "\n" for verdict in ("accepted", "rolled_back"))
    )

    assert "found nothing that holds the run back" in printed_tables(observed)
    assert "kept 1 of 2 changes" in printed_tables(tmp_path / "changed")
    with RecordedRank(write_run(tmp_path / "other")) as rank:
        rank.recorder.add(training.STEPS, 10)
    assert "tuner" not in printed_tables(tmp_path / "other").lower()


def decision(verdict: str) -> dict[str, object]:
    return {
        "number": 1,
        "step": 5,
        "changes": [{"knob": "zero_stage", "before": 2, "after": 0}],
        "verdict": verdict,
        "symptom": {"name": "comm_latency"},
        "reason": "measured",
        "numerics": "reassociation",
    }


def test_a_whole_report_of_many_ranks_shows_the_slowest_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "night", ranks=MAX_RANKS + 4)
    with RecordedRank(folder, MAX_RANKS + 1) as rank:
        rank.recorder.set(communication.STRAGGLER_SCORE, 0.4, "forward")
    stream = io.StringIO()

    print_end_tables(summary_of(folder), stream, is_whole=True)

    printed = stream.getvalue()
    rows = printed[printed.index("Ranks") : printed.index("16 of 20 ranks")].splitlines()[3:-1]
    assert [row.split()[0] for row in rows] == [
        *map(str, range(MAX_RANKS - 1)),
        str(MAX_RANKS + 1),
    ]
    assert "+40.0 % in forward" in rows[-1]


def test_a_log_file_gets_neither_control_characters_nor_spaces_at_line_ends(tmp_path: Path) -> None:
    text = printed_tables(write_run(tmp_path / "night"))

    assert not {"\r", "\x1b"} & set(text)
    assert all(line == line.rstrip() and len(line) <= PLAIN_WIDTH for line in text.split("\n"))


def test_a_closed_stream_does_not_raise(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    print_end_tables(summary_of(write_run(tmp_path / "night")), Closed())


def test_a_stream_that_was_closed_does_not_raise(tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()

    print_end_tables(summary_of(write_run(tmp_path / "night")), stream)


def test_a_stream_without_the_signs_of_the_tables_gets_the_figures(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    print_end_tables(summary_of(write_run(tmp_path / "night")), stream)

    stream.seek(0)
    assert "300 ms" in stream.read()


def test_a_closed_pipe_does_not_change_the_exit_code_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())

    print_run_end(write_run(tmp_path / "night"), is_in_order=True, console="lines")


def test_a_training_run_prints_its_tables_and_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "night")

    with caplog.at_level(logging.INFO):
        announce_report(folder, is_ours=True, console="summary")

    assert "Where the time went" in capsys.readouterr().err
    assert "report.html" in caplog.text
    assert (folder / "report.html").is_file()


def test_off_leaves_only_the_line_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        announce_report(write_run(tmp_path / "night"), is_ours=True, console="off")

    assert capsys.readouterr().err == ""
    assert len(caplog.records) == 1


def test_under_zerowatch_run_the_launcher_prints_the_end_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "night")

    with launcher_link.receive_run_folder(Path("runs")) as receiver, caplog.at_level(logging.INFO):
        launcher_link.send_run_folder(folder, rank=0)
        announce_report(folder, is_ours=True, console="summary")
        in_rank = capsys.readouterr().err
        (received,) = receiver.folders()
        print_run_end(received, is_in_order=True, console="summary")

    assert (in_rank, caplog.text) == ("", "")
    printed = capsys.readouterr().err
    assert printed.count("Where the time went") == 1
    assert printed.count("zerowatch report ") == 1
    assert not launcher_link.has_launcher()


def test_after_a_failure_the_launcher_prints_one_line_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_run_end(write_run(tmp_path / "night"), is_in_order=False, console="summary")

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zerowatch: report of this run: zerowatch report ")


def test_a_run_without_a_step_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_run_end(tmp_path, is_in_order=True, console="summary")

    assert capsys.readouterr().err == ""


def test_a_launcher_whose_rank_0_is_elsewhere_receives_no_folder() -> None:
    with launcher_link.receive_run_folder(Path("runs")) as receiver:
        assert receiver.folders() == []


def test_communication_per_step_is_the_mean_of_the_ranks_as_the_phases_are(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        late = rank == 1 and step == 1  # rank 0 began later, which rank 1 waited for
        seconds = 10.5 if late else 0.5
        return step_record(
            step,
            seconds=seconds,
            phase_seconds={"forward": 0.5, **({"other": 10.0} if late else {})},
            comm_seconds=seconds - 0.5,
            comm_exposed_seconds=seconds - 0.5,
            comm_exposed_phase_seconds={"other": seconds - 0.5},
        )

    printed = printed_tables(write_run(tmp_path / "run", record=record))

    assert re.search(r"of which communication +500 ms +50 %", printed)
    assert re.search(r"of which training waited for it +500 ms +50 %", printed)


def test_a_job_that_a_rank_starts_does_not_answer_to_the_launcher(tmp_path: Path) -> None:
    answers = (
        "from pathlib import Path; from zerowatch.runtime.common import launcher_link as link\n"
        "link.send_run_folder(Path('inner'), rank=0); print(link.has_launcher())"
    )
    rank = (
        "import subprocess, sys; from pathlib import Path\n"
        "from zerowatch.runtime.common import launcher_link as link\n"
        "link.send_run_folder(Path('outer'), rank=0); print(link.has_launcher(), flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {answers!r}], check=True)"
    )

    with launcher_link.receive_run_folder(Path("runs")) as receiver:
        done = subprocess.run(
            [sys.executable, "-c", rank], check=True, capture_output=True, text=True
        )
        folders = receiver.folders()

    assert done.stdout.split() == ["True", "False"]
    assert folders == [Path("outer")]


@pytest.mark.parametrize(("seconds", "is_shown"), [(0.00024, False), (0.00026, True)])
def test_a_phase_below_a_two_thousandth_of_the_time_is_left_out(
    tmp_path: Path, seconds: float, is_shown: bool
) -> None:
    folder = write_run(
        tmp_path / "run",
        record=lambda rank, step: step_record(
            step, phase_seconds={"forward": 0.5 - seconds, "data": seconds}
        ),
    )

    assert (" data " in printed_tables(folder)) is is_shown


@pytest.mark.parametrize(
    ("num_damaged", "more"), [(0, None), (3, None), (5, "2 more in the report")]
)
def test_the_end_of_a_run_names_what_is_missing(
    tmp_path: Path, num_damaged: int, more: str | None
) -> None:
    folder = write_run(tmp_path / "night", ranks=5)
    for number in range(5):
        with RecordedRank(folder, number) as rank:
            rank.recorder.add(training.STEPS, 10)
    for number in range(num_damaged):
        with (folder / f"rank-{number}.jsonl").open("a", encoding="utf-8") as log:
            log.write("damaged\n")

    text = printed_tables(folder)

    missing = text.partition("What is missing")[2]
    assert missing.count("1 damaged line(s) are left out") == min(num_damaged, 3)
    assert more is None or more in missing
    assert ("more in the report" in missing) is (more is not None)
    assert bool(missing) is bool(num_damaged)


@pytest.mark.parametrize(("ranks", "is_cut"), [(16, False), (17, True)])
@pytest.mark.parametrize("has_scores", [False, True])
def test_sixteen_ranks_are_shown(
    tmp_path: Path, ranks: int, is_cut: bool, has_scores: bool
) -> None:
    folder = write_run(tmp_path / "run", ranks=ranks)
    for number in range(ranks if has_scores else 1):
        with RecordedRank(folder, number, world_size=ranks) as rank:
            rank.recorder.set(communication.STRAGGLER_SCORE, 0.0, "forward")
    stream = io.StringIO()

    print_end_tables(summary_of(folder), stream, is_whole=True)

    text = " ".join(stream.getvalue().split())
    assert ("the slowest 16 of 17 ranks" in text) is (is_cut and has_scores)
    assert ("16 of 17 ranks: those known" in text) is (is_cut and not has_scores)
    assert (f"How far {ranks - 1} of {ranks} ranks" in text) is not has_scores


def test_of_ranks_without_a_score_those_that_waited_least_are_shown(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        ranks=40,
        record=lambda rank, step: step_record(step) if rank == 33 else waiting(rank, step),
    )
    stream = io.StringIO()

    print_end_tables(summary_of(folder), stream, is_whole=True)

    printed = stream.getvalue()
    rows = printed[printed.index("Ranks") : printed.index("16 of 40 ranks")].splitlines()[3:-1]
    assert [row.split()[0] for row in rows] == [*map(str, range(15)), "33"]


@pytest.mark.parametrize(("ranks", "more"), [(64, ""), (66, "2 more ranks are in the JSON report")])
def test_markdown_shows_sixty_four_ranks(tmp_path: Path, ranks: int, more: str) -> None:
    text = report_markdown(summary_of(write_run(tmp_path / "run", ranks=ranks, steps=2)))

    assert text.count("| node-0 |") == 64
    assert ("more ranks" in text) is bool(more) and more in text


@pytest.mark.parametrize("width", [60, 300])
def test_on_a_terminal_the_tables_have_its_width_up_to_a_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()

    summary = replace(summary_of(write_run(tmp_path / "night")), verdict="a b " * 100)

    print_end_tables(summary, stream)

    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert "\x1b[1m" in stream.getvalue()
    assert max(map(len, lines)) == min(width, 100)
