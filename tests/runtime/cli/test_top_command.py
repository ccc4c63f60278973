"""Tests of the command `top`: its errors before the screen opens, and what it imports.

Covers `top_command.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import write_run

from zerowatch.__main__ import main
from zerowatch.runtime.cli import top_command
from zerowatch.runtime.top import http_client, screen
from zerowatch.runtime.top.http_client import Access, HttpClient
from zerowatch.runtime.top.run_source import WithAlerts

NO_ADDRESS = "127.0.0.1:9"


def error_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["zerowatch", "top", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Standard input and output that are a terminal, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(top_command, "has_terminal", lambda: True)


def test_without_textual_the_command_that_installs_it_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(top_command, "find_spec", lambda name: None)

    assert "pip install 'zerowatch[top]'" in error_of(monkeypatch, capsys)


def test_without_a_terminal_the_report_is_named(monkeypatch, capsys) -> None:
    error = error_of(monkeypatch, capsys)

    assert "needs a terminal" in error and "zerowatch report" in error


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "no run below runs"),
        (("runs/none",), "no folder and no address"),
        ((NO_ADDRESS,), "http://127.0.0.1:9/targets: connection refused"),
        ((NO_ADDRESS, "--token-file", "none"), "cannot read none"),
        ((NO_ADDRESS, "--ca-file", "none"), "cannot read certificates from none"),
        ((NO_ADDRESS, "--prometheus", "localhost:9090"), "such as http://localhost:9090"),
        ((NO_ADDRESS, "--prometheus", "//p:9090"), "such as http://p:9090"),
    ],
)
def test_what_is_missing_is_an_error_of_the_command_line(
    monkeypatch, capsys, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in error_of(monkeypatch, capsys, *arguments)


def test_neither_torch_nor_deepspeed_is_loaded() -> None:
    script = (
        "import sys, zerowatch.runtime.cli.top_command, zerowatch.runtime.top.screen;"
        "print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False", "False"]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("options", "token", "interval"),
    [
        ((), "settings", 2.0),
        (("--token-file", "own", "--interval", "5"), "own", 5.0),
    ],
)
def test_the_screen_gets_the_run_the_alerts_and_the_secrets(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    token: str,
    interval: float,
) -> None:
    for name in ("settings", "own", "alerts"):
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("ZEROWATCH_SERVE_AUTH_TOKEN_FILE", "settings")
    write_run(tmp_path / "runs" / "night")
    accesses: list[Access] = []
    shown: list[tuple[object, float]] = []

    class Client(HttpClient):
        def __init__(self, access: Access) -> None:
            accesses.append(access)

    class Screen:
        def __init__(self, source: object, *, interval_seconds: float) -> None:
            shown.append((source, interval_seconds))

        def run(self) -> None:
            """Show nothing."""

    monkeypatch.setattr(http_client, "HttpClient", Client)
    monkeypatch.setattr(screen, "TopScreen", Screen)
    given = ("--prometheus", "http://p:9090", "--prometheus-token-file", "alerts")
    monkeypatch.setattr(sys, "argv", ["zerowatch", "top", *given, "--ca-file", "own", *options])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 0
    assert accesses == [
        Access(token_file=Path(token), ca_file=Path("own")),
        Access(token_file=Path("alerts"), ca_file=Path("own")),
    ]
    [(source, seconds)] = shown
    assert isinstance(source, WithAlerts) and seconds == interval
