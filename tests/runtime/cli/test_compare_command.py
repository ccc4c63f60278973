"""Tests of the command `compare`: its forms, its files, and its exit codes for CI.

Covers `compare_command.py`, `comparison_text.py` and `comparison_page.py`.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import step_record, write_run

from zerowatch.__main__ import main
from zerowatch.runtime.reports.run_comparison import COMPARISON_FIGURES

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of equal steps, of which the second is slower by a tenth."""
    return (
        write_run(tmp_path / "before", steps=100),
        write_run(
            tmp_path / "after",
            steps=100,
            record=lambda rank, step: step_record(step, seconds=0.55),
            settings={"enabled": False},
        ),
    )


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zerowatch", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_tables_are_printed(runs: tuple[Path, Path], compare: Command) -> None:
    code, out, _ = compare(*runs)

    assert code == 0
    assert "B processes 9.1 % fewer tokens per second than A" in out
    assert "time of a step" in out and "+10.0 %" in out
    assert "enabled" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("form", ["--text", "--markdown", "--json"])
def test_an_encoding_that_lacks_a_character_is_no_error(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[Path, Path], compare: Command, form: str
) -> None:
    for folder, name in zip(runs, ("before", "\N{GREEK SMALL LETTER ALPHA}"), strict=True):
        (folder / "settings.json").write_text(json.dumps({"label": name}))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))

    code, _, _ = compare(*runs, form)

    assert code == 0
    assert b"fewer tokens per second" in printed.getvalue()


def test_markdown_json_and_html_have_the_same_figures(
    runs: tuple[Path, Path], compare: Command, tmp_path: Path
) -> None:
    _, markdown, _ = compare(*runs, "--markdown")
    _, text, _ = compare(*runs, "--json")
    page_code, said, _ = compare(*runs, "--html")
    _, page, _ = compare(*runs, "--html", "--output", "-")

    content = json.loads(text)
    assert "| time of a step | 500 ms | 550 ms | +10.0 % |" in markdown
    assert content["schema"] == 1
    assert list(content["figures"]) == list(COMPARISON_FIGURES)
    assert content["figures"]["throughput_ratio"] == pytest.approx(0.5 / 0.55)
    assert page_code == 0
    assert str(tmp_path / "after" / "compare.html") in said
    assert (tmp_path / "after" / "compare.html").read_text() == page
    assert content["verdict"].replace(" %", "\N{NO-BREAK SPACE}%") in page


def test_a_condition_that_holds_exits_with_code_3(
    runs: tuple[Path, Path], compare: Command
) -> None:
    slower, _, err = compare(*runs, "--fail-on", "throughput_ratio<0.95")
    within, _, _ = compare(*runs, "--fail-on", "throughput_ratio<0.9")
    surely, _, _ = compare(*runs, "--fail-on", "throughput_ratio_upper<1")

    assert (slower, within, surely) == (3, 0, 3)
    assert "throughput_ratio < 0.95: it is 0.9091" in err


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("throughput<0.95", "did you mean throughput_ratio"),
        ("throughput_ratio", "'throughput_ratio<0.95'"),
        ("comm_exposed_ratio<1", "`zerowatch compare --figures` lists all"),
    ],
)
def test_a_condition_that_cannot_be_checked_exits_with_code_2(
    runs: tuple[Path, Path], compare: Command, condition: str, expected: str
) -> None:
    code, _, err = compare(*runs, "--fail-on", condition)

    assert code == 2
    assert expected in err


def test_wrong_arguments_are_named(runs: tuple[Path, Path], compare: Command) -> None:
    same, _, same_error = compare(runs[0], runs[0])
    one, _, one_error = compare(runs[0])
    figures, listed, _ = compare("--figures")

    assert (same, one, figures) == (2, 2, 0)
    assert "are the same run" in same_error
    assert "Missing argument 'B'" in one_error
    assert [line.split()[0] for line in listed.splitlines()] == list(COMPARISON_FIGURES)


def test_names_in_the_run_folder_are_text_and_never_markup(
    runs: tuple[Path, Path], compare: Command
) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    log = (runs[1] / "rank-0.jsonl").read_text()
    for name in ("node-0", "forward", "all_reduce", "after", "cpu"):
        log = log.replace(f'"{name}"', json.dumps(f"{name}{evil}"))
    (runs[1] / "rank-0.jsonl").write_text(log)
    (runs[1] / "settings.json").write_text(json.dumps({evil: evil}))

    _, page, _ = compare(*runs, "--html", "--output", "-")
    _, markdown, _ = compare(*runs, "--markdown")

    assert "<img" not in page
    assert "<img" not in markdown
    assert page.count("</script>") == 3


def test_neither_torch_nor_deepspeed_is_loaded(runs: tuple[Path, Path]) -> None:
    arguments = ["compare", *map(str, runs)]
    script = (
        "import sys; from zerowatch.__main__ import commands\n"
        f"commands({arguments!r}, standalone_mode=False)\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", script], check=True)
