"""Tests of the command `report`: its forms, its files, and its exit codes for CI.

Covers `report_command.py`, `figure_options.py`, `fail_on.py`, `report_markdown.py` and
`write_report.py`.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import step_record, write_run

from zerowatch.__main__ import main
from zerowatch.runtime.reports.run_summary import FIGURES

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "night", steps=40)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zerowatch", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_the_page_is_written_into_the_run_folder(folder: Path, report: Command) -> None:
    code, out, _ = report(folder)

    page = (folder / "report.html").read_text()
    assert code == 0
    assert "Nothing holds this run back" in out and str(folder / "report.html") in out
    assert "var uPlot=" in page and "Nothing holds this run back" in page
    assert len(page) < 300_000


@pytest.mark.parametrize("form", ["--html", "--markdown", "--json"])
def test_an_encoding_that_lacks_a_character_is_no_error(
    monkeypatch: pytest.MonkeyPatch, folder: Path, report: Command, form: str
) -> None:
    log = folder / "rank-0.jsonl"
    log.write_text(log.read_text().replace("node-0", "node-\N{GREEK SMALL LETTER ALPHA}"))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))

    code, _, _ = report(folder, form)

    assert code == 0
    assert b"Nothing holds this run back" in printed.getvalue()


def test_only_its_owner_can_read_a_page_that_was_not_given_another_place(
    folder: Path, tmp_path: Path, report: Command
) -> None:
    own, published = folder / "report.html", tmp_path / "published.html"

    before = os.umask(0o022)
    try:
        report(folder)
        report(folder, "--output", published)
    finally:
        os.umask(before)

    assert own.stat().st_mode & 0o777 == 0o600
    assert published.stat().st_mode & 0o777 == 0o644


def test_a_terminal_shows_the_tables_the_ranks_and_what_is_missing(
    folder: Path, report: Command
) -> None:
    log = folder / "rank-1.jsonl"
    log.write_bytes(log.read_bytes()[:-9])

    _, out, _ = report(folder)

    lines = [line.split() for line in out.splitlines()]
    assert ["backward", "300", "ms", "60", "%"] in lines
    assert [line[:2] for line in lines if line[2:4] == ["500", "ms"]] == [["0", "40"], ["1", "39"]]
    assert "rank-1.jsonl: the last line is cut" in out


def test_without_a_folder_the_newest_run_is_reported_but_not_checked(
    folder: Path, report: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parents[1])

    code, out, _ = report()
    refused, _, err = report("--fail-on", "steps>1")

    assert code == 0
    assert "runs/night/report.html" in out
    assert refused == 2 and "needs RUN_DIR" in err


def test_the_page_loads_nothing_from_elsewhere(folder: Path, report: Command) -> None:
    _, page, _ = report(folder, "--output", "-")

    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert not any(f"{name}=" in page for name in ("src", "href", "@import", "action"))


def test_names_in_the_run_folder_are_text_and_never_markup(tmp_path: Path, report: Command) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    folder = write_run(tmp_path / "run", ranks=1)
    log = (folder / "rank-0.jsonl").read_text()
    for name in ("node-0", "forward", "all_reduce"):
        log = log.replace(f'"{name}"', json.dumps(f"{name}{evil}"))
    (folder / "rank-0.jsonl").write_text(log)
    (folder / "hang-rank-0-1.txt").write_text(evil)

    _, page, _ = report(folder, "--output", "-")
    _, markdown, _ = report(folder, "--markdown")

    assert "<img" not in page
    assert "<img" not in markdown
    assert page.count("</script>") == 3


def test_json_has_all_figures(folder: Path, report: Command) -> None:
    code, out, _ = report(folder, "--json")

    summary = json.loads(out)
    assert code == 0
    assert summary["schema"] == 1
    assert list(summary["figures"]) == list(FIGURES)
    assert summary["figures"]["step_seconds"] == pytest.approx(0.5)
    assert not (folder / "report.html").exists()


def test_markdown_has_the_verdict_and_the_tables(folder: Path, report: Command) -> None:
    _, out, _ = report(folder, "--markdown")

    assert out.startswith("## night: completed\n\n**Nothing holds this run back")
    assert "| backward | 60 % | 300 ms |" in out
    assert "| 1 | node-0 | 40 |" in out


def test_output_names_another_file(folder: Path, tmp_path: Path, report: Command) -> None:
    target = tmp_path / "reports" / "night.md"

    code, out, _ = report(folder, "--markdown", "--output", target)

    assert code == 0
    assert target.read_text().startswith("## night")
    assert str(target) in out


@pytest.mark.parametrize("through_link", [False, True])
def test_a_fifo_or_device_is_written_to_and_not_replaced(
    folder: Path, tmp_path: Path, report: Command, through_link: bool
) -> None:
    fifo = target = tmp_path / "fifo"
    os.mkfifo(fifo)
    if through_link:  # as /dev/stdout is one
        target = tmp_path / "link"
        target.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 2**20)

        code, _, _ = report(folder, "--json", "--output", target)

        assert code == 0
        assert stat.S_ISFIFO(fifo.stat().st_mode)
        assert json.loads(os.read(reader, 2**20))["run_id"] == "night"
    finally:
        os.close(reader)
    assert target.is_symlink() is through_link


@pytest.mark.parametrize("exists", [False, True])
def test_the_file_of_a_given_link_is_written(
    folder: Path, tmp_path: Path, report: Command, exists: bool
) -> None:
    target, link = tmp_path / "night.md", tmp_path / "newest.md"
    link.symlink_to(target)
    if exists:
        target.write_text("old")

    report(folder, "--markdown", "--output", link)

    assert link.is_symlink()
    assert target.read_text().startswith("## night")


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_a_link_at_the_name_of_the_page_is_not_followed(
    folder: Path, tmp_path: Path, report: Command, kind: str
) -> None:
    """Another user may have put it into the run folder."""
    precious = tmp_path / "precious"
    os.mkfifo(precious) if kind == "fifo" else precious.write_text("keep")
    (folder / "report.html").symlink_to(precious)

    report(folder)

    assert not (folder / "report.html").is_symlink()
    assert precious.is_fifo() or precious.read_text() == "keep"


def test_a_condition_that_holds_exits_with_code_3(folder: Path, report: Command) -> None:
    held, _, err = report(folder, "--fail-on", "comm_exposed_ratio>0.05")
    not_held, _, _ = report(folder, "--fail-on", "comm_exposed_ratio > 30 %")
    one_of_two, _, _ = report(folder, "--fail-on", "steps<1", "--fail-on", "step_seconds >= 0.4")

    assert (held, not_held, one_of_two) == (3, 0, 3)
    assert "comm_exposed_ratio > 0.05: it is 0.1" in err
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("comm_exposed>0.3", "did you mean comm_exposed_ratio"),
        ("comm_exposed_ratio", "is no condition"),
        ("comm_exposed_ratio>much", "is no condition"),
        ("comm_exposed_ratio>nan", "is no condition"),
        ("mfu_ratio<0.3", "mfu_ratio is not recorded in this run"),
    ],
)
def test_a_condition_that_cannot_be_checked_exits_with_code_2(
    folder: Path, report: Command, condition: str, expected: str
) -> None:
    code, _, err = report(folder, "--fail-on", condition)

    assert code == 2
    assert expected in err


def test_a_condition_that_cannot_be_checked_hides_none_that_holds(
    folder: Path, report: Command
) -> None:
    unknown = ("--fail-on", "mfu_ratio<0.3")
    holds, holds_not = ("--fail-on", "steps>1"), ("--fail-on", "steps<1")

    first, _, err = report(folder, *unknown, *holds)
    last, _, same = report(folder, *holds, *unknown)
    neither, _, _ = report(folder, *unknown, *holds_not)

    assert (first, last, neither) == (3, 3, 2)
    assert sorted(err.splitlines()) == sorted(same.splitlines())
    assert "steps > 1: it is " in err
    assert "so mfu_ratio < 0.3 is not checked" in err


def test_each_condition_that_cannot_be_checked_is_printed(folder: Path, report: Command) -> None:
    code, _, err = report(
        folder, "--fail-on", "mfu_ratio<0.3", "--fail-on", "comm_coverage_ratio<0.9"
    )

    assert code == 2
    assert [line.count("is not checked") for line in err.splitlines()] == [1, 1]


def test_the_figures_for_conditions_are_listed(report: Command) -> None:
    code, out, _ = report("--figures")

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(FIGURES)


def test_a_wrong_folder_is_named(
    tmp_path: Path, report: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without runs
    code, _, err = report(tmp_path)
    no_argument, _, _ = report()

    assert code == no_argument == 2
    assert "holds no run" in err


def test_a_folder_that_cannot_be_written_is_named(
    folder: Path, tmp_path: Path, report: Command
) -> None:
    (tmp_path / "file").write_text("")

    code, _, err = report(folder, "--output", tmp_path / "file" / "report.html")

    assert code == 2
    assert "cannot write" in err and "--output" in err


@pytest.mark.parametrize("form", ["--html", "--markdown", "--json"])
def test_a_cut_a_half_written_and_an_empty_run_say_what_is_missing(
    tmp_path: Path, report: Command, form: str
) -> None:
    cut = write_run(tmp_path / "cut", ranks=3)
    log = cut / "rank-0.jsonl"
    log.write_bytes(log.read_bytes()[:-50])
    (cut / "rank-1.jsonl").unlink()
    (cut / "settings.json").write_text('{"half": ')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "attempts.jsonl").touch()

    code, text, _ = report(cut, form, "--output", "-")
    empty_code, empty_text, _ = report(empty, form, "--output", "-")

    assert code == empty_code == 0
    for said in (
        "rank-0.jsonl",
        "last line is cut",
        "1 of 3 ranks",
        "settings.json",
        "metrics log",
    ):
        assert said in text.replace("\\", "")
    assert "No step was recorded" in empty_text


def test_numbers_that_are_not_finite_do_not_break_the_report(
    tmp_path: Path, report: Command
) -> None:
    folder = write_run(
        tmp_path / "run",
        record=lambda rank, step: step_record(step, loss=float("nan"), seconds=0.0),
    )

    code, out, _ = report(folder, "--json")

    assert code == 0
    assert json.loads(out)["figures"]["loss"] is None


def test_neither_torch_nor_deepspeed_is_loaded(folder: Path) -> None:
    script = (
        "import sys; from zerowatch.__main__ import commands\n"
        f"commands(['report', {str(folder)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", script], check=True)


def test_two_forms_together_are_refused(folder: Path, report: Command) -> None:
    code, out, err = report(folder, "--markdown", "--json")

    assert (code, out) == (2, "")
    assert "--markdown and --json cannot be used together" in err
