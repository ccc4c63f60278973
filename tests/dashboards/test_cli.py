"""Tests of the commands `dashboards` and `stack`: options, error messages and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerowatch.dashboards.cli import dashboards, stack
from zerowatch.errors import CommandLineError


@pytest.mark.parametrize(
    "words", [["up", "--native", "--gpu"], ["up", "--native", "--without-trainer"]]
)
def test_native_with_trainer_options_is_rejected(words: list[str]) -> None:
    done = CliRunner().invoke(stack, words)

    assert done.exit_code == 2
    assert "--native starts no trainer" in done.output


def test_native_down_with_volumes_is_rejected_and_names_the_folder() -> None:
    done = CliRunner().invoke(stack, ["down", "--native", "--volumes"])

    assert done.exit_code == 2
    assert ".zerowatch-stack" in done.output


def test_without_docker_the_native_command_is_suggested_if_a_native_stack_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no docker
    without = CliRunner().invoke(stack, ["status"])
    (tmp_path / ".zerowatch-stack").mkdir()

    beside = CliRunner().invoke(stack, ["status"])

    assert "status --native" not in str(without.exception)
    assert "`zerowatch stack status --native`" in str(beside.exception)


def test_check_passes_after_a_build(tmp_path: Path) -> None:
    CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path)])

    done = CliRunner().invoke(dashboards, ["build", "--check", "--out", str(tmp_path)])

    assert (done.exit_code, done.output) == (0, "")


def test_a_file_edited_by_hand_is_reported_with_what_to_do(tmp_path: Path) -> None:
    assert CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path)]).exit_code == 0
    edited = tmp_path / "prometheus" / "alerts.yaml"
    edited.write_text(edited.read_text() + "# mine\n")

    done = CliRunner().invoke(dashboards, ["build", "--check", "--out", str(tmp_path)])

    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith(str(edited))
    assert "zerowatch dashboards build" in line


def test_links_of_alerts_lead_to_the_given_addresses(tmp_path: Path) -> None:
    urls = ["--grafana", "https://grafana.here/", "--runbook", "https://wiki.here/runbook"]

    done = CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path), *urls])

    alerts = (tmp_path / "prometheus" / "alerts.yaml").read_text()
    assert done.exit_code == 0
    assert "https://grafana.here/d/zerowatch-overview?" in alerts
    assert "https://wiki.here/runbook#zerowatchrankvanished" in alerts
    assert "127.0.0.1:3000" not in alerts


@pytest.mark.parametrize("option", ["--grafana", "--runbook"])
@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("g.example.com", "https://g.example.com"),
        ("g.example.com:3000/a", "https://g.example.com:3000/a"),
        ("//g.example.com", "https://g.example.com"),
        ("ftp://g.example.com", "https://g.example.com"),
        ("https:/g.example.com", "https://g.example.com"),
        ("https://g.example .com", "https://g.example.com"),
        ("https://", "https://g.example.com"),
        ("", "https://g.example.com"),
    ],
)
def test_an_address_that_no_message_can_link_to_is_rejected(
    option: str, address: str, instead: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path), option, address])

    assert done.exit_code == 2
    assert option in done.output
    assert f"write {instead}\n" in done.output
    assert not list(tmp_path.iterdir())


def test_set_changes_the_default_in_the_rules_and_the_colors_of_the_dashboards(
    tmp_path: Path,
) -> None:
    changes = ["--set", "WATCH_RATIO_HIGH=0.25", "--set", "restarts_high=7"]

    done = CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path), *changes])

    rules = (tmp_path / "prometheus" / "recording.yaml").read_text()
    overhead = json.loads((tmp_path / "grafana" / "zerowatch-overhead.json").read_text())
    cost = next(panel for panel in overhead["panels"] if panel["type"] == "stat")
    assert done.exit_code == 0
    assert '+ 0.25, "name", "watch_ratio_high"' in rules
    assert '+ 7, "name", "restarts_high"' in rules
    assert '+ 0.2, "name", "exposed_comm_ratio_high"' in rules
    assert cost["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("COMM_RATIO_HIGH=0.3", "--set: 'COMM_RATIO_HIGH' is no threshold of an alert; did you"),
        ("WATCH_RATIO_HIGH=much", "--set: WATCH_RATIO_HIGH must be a number, got 'much'"),
    ],
)
def test_a_faulty_set_is_rejected_with_what_is_allowed(
    text: str, message: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path), "--set", text])

    assert done.exit_code == 2
    assert message in done.output


def test_link_options_without_out_are_rejected() -> None:
    done = CliRunner().invoke(dashboards, ["build", "--grafana", "https://grafana.here"])

    assert done.exit_code == 2
    assert "--out" in done.output


def test_a_folder_that_cannot_be_written_is_reported_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    done = CliRunner().invoke(dashboards, ["build", "--out", str(tmp_path / "file" / "out")])

    assert isinstance(done.exception, CommandLineError)
    assert f"cannot write {tmp_path / 'file' / 'out'}" in str(done.exception)
    assert "Not a directory; choose another folder by --out" in str(done.exception)


def test_build_without_its_extra_names_the_missing_package() -> None:
    script = (
        "import sys; sys.modules['yaml'] = None; from zerowatch.dashboards.cli import dashboards; "
        "dashboards(['build', '--check'], standalone_mode=False)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert "CommandLineError: dashboards build: yaml is missing; pip install" in done.stderr


def test_help_imports_neither_grafanalib_nor_torch() -> None:
    script = (
        "import sys; from zerowatch.dashboards.cli import stack; stack(['--help'], "
        "standalone_mode=False); print(*sys.modules)"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()

    assert {"grafanalib", "torch", "yaml", "pydantic"}.isdisjoint(loaded)


def test_control_characters_in_names_of_runs_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = "run a\x1b]0;title\x07\x1b[2J\x9b31m\rrank 0: up"
    monkeypatch.setattr("zerowatch.dashboards.stack.compose_stack.status", lambda: [hostile])

    done = CliRunner().invoke(stack, ["status"])

    assert done.output == "run a ]0;title  [2J 31m rank 0: up\n"
