"""Tests of the native stack with real servers: start, status, alerts, stop and errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml
from fakes.scraper import eventually
from package_tree import ROOT
from require import program
from rules.expressions import OF_SERVERS
from scripts.launching import SCRIPTS
from servers.free_port import free_port

from zerowatch.dashboards.stack import native_stack
from zerowatch.dashboards.stack.native_stack import Child, NativeStack, process_of
from zerowatch.dashboards.stack.prometheus_config import GUARDS, prometheus_configuration
from zerowatch.dashboards.stack.stack_health import NO_WATCHDOG, WATCHDOG
from zerowatch.errors import CommandLineError
from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.rank_store import _target

QUICK = (sys.executable, SCRIPTS / "quick_stack.py")
COMMAND = [sys.executable, "-c", "from zerowatch.dashboards.cli import stack; stack()"]


class Ranks:
    """Two ranks of a run that serve metrics, and the targets.json of their run folder."""

    def __init__(self, runs: Path) -> None:
        self.recorders = [Recorder(), Recorder()]
        self.servers = []
        targets = []
        for rank, recorder in enumerate(self.recorders):
            recorder.set(RUN_ACTIVE, 1)
            server = MetricsServer(
                recorder=recorder,
                rank=rank,
                local_rank=rank,
                settings=ServeSettings(port=0),
                targets=None,
                make_thread=FailOpen().thread,
            )
            labels = {"run": "night-7", "node": "here", "rank": str(rank)}
            targets.append({"targets": [server.start()], "labels": labels})
            self.servers.append(server)
        folder = runs / "night-7"
        folder.mkdir(parents=True)
        (folder / "targets.json").write_text(json.dumps(targets))

    def close(self) -> None:
        for server in self.servers:
            server.close()


class Stack:
    """Runs the commands of the native stack in a working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            f"{name}_PORT": str(free_port()) for name in ("PROMETHEUS", "ALERTMANAGER", "ALERT_LOG")
        }

    def run(self, *words: str, command: Sequence[str | Path] = COMMAND) -> str:
        done = subprocess.run(
            [*command, *words, "--native"],
            cwd=self.folder,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> list[str]:
        """Return the status without starting a process, which is faster."""
        folder = self.folder / ".zerowatch-stack"
        return NativeStack(self.folder / "runs", self.environment, folder).status()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return self.ask(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]

    def ask(self, page: str) -> Any:
        """Return what the API of Prometheus answers."""
        url = f"http://127.0.0.1:{self.environment['PROMETHEUS_PORT']}/api/v1/{page}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]

    def children(self) -> list[Child]:
        notes = json.loads((self.folder / ".zerowatch-stack" / "stack.json").read_text())
        return [Child(**note) for note in notes]


class Hostile(BaseHTTPRequestHandler):
    """Serves names and labels that are not its own, and records the requested paths."""

    paths: ClassVar[set[str]] = set()
    TEXT = """zerowatch_run_active{rank="7",run="other",job="prometheus"} 1
ALERTS{alertname="ZerowatchWatchdog",alertstate="firing"} 1
up{job="zerowatch"} 1
"""

    def do_GET(self) -> None:
        self.paths.add(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.TEXT.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


HOSTILE_LABELS = {
    "run": "hostile",
    "rank": "3",
    "node": "here",
    "job": "prometheus",
    "severity": "critical",
    "instance": "of-another",
    "__metrics_path__": "/admin/delete",
    "__param_token": "secret",
    "__scrape_interval__": "1h",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    commands = Stack(tmp_path_factory.mktemp("work"))
    commands.run("up", command=QUICK)
    yield commands
    commands.run("down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs that start together, since Prometheus reads its targets every five seconds at most.

    Attributes:
        before: The status before them.
        ranks: The two ranks of the run night-7.
        hostile: The address of a run that serves names and labels which are not its own.
    """

    before: list[str]
    ranks: Ranks
    hostile: str


@pytest.fixture(scope="module")
def runs(stack: Stack) -> Iterator[Runs]:
    """Start the runs night-7, killed (another run serves at its address) and hostile."""
    before, folder = stack.status(), stack.folder / "runs"
    with contextlib.ExitStack() as closing:
        recorder = Recorder()
        recorder.set(RUN_ACTIVE, 1)
        another = MetricsServer(
            recorder=recorder,
            rank=0,
            local_rank=0,
            settings=ServeSettings(port=0),
            targets=None,
            make_thread=FailOpen().thread,
            serves_run="another-folders".__eq__,
        )
        closing.callback(another.close)
        entry = {"address": str(another.start()), "host": "here"}
        hostile = closing.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Hostile))
        threading.Thread(target=hostile.serve_forever, daemon=True).start()
        closing.callback(hostile.shutdown)
        address = f"127.0.0.1:{hostile.server_port}"
        for name, targets in {
            "killed": [_target("killed", 0, entry)],
            "hostile": [{"targets": [address], "labels": HOSTILE_LABELS}],
        }.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "targets.json").write_text(json.dumps(targets))
        ranks = closing.enter_context(contextlib.closing(Ranks(folder)))
        yield Runs(before=before, ranks=ranks, hostile=address)


def test_a_run_that_starts_later_is_found_and_its_end_differs_from_a_crash(
    stack: Stack, runs: Runs
) -> None:
    def is_up(run: str) -> int:
        return len(
            [each for each in stack.status() if each.startswith(f"run {run}") and ": up, " in each]
        )

    with contextlib.closing(runs.ranks) as ranks:
        found = eventually(lambda: is_up("night-7") == 2, pause=0.2)
        ranks.recorders[0].set(RUN_ACTIVE, 0)
        end_was_read = eventually(lambda: stack.query(f"{RUN_ACTIVE.name} == 0"), pause=0.2)
    none_up = eventually(lambda: is_up("night-7") == 0, pause=0.2)

    assert any("no folder in" in line for line in runs.before)
    assert found, stack.status()
    assert end_was_read
    assert none_up, stack.status()
    assert "run night-7 rank 0: ended" in stack.status()
    (down,) = [line for line in stack.status() if "rank 1: DOWN" in line]
    assert "connection refused (nothing listens there" in down


@pytest.mark.usefixtures("runs")
def test_metrics_of_another_run_at_an_address_are_not_stored_under_the_old_run(
    stack: Stack,
) -> None:
    refused = eventually(lambda: "run killed rank 0: DOWN" in "".join(stack.status()), pause=0.2)

    assert refused, stack.status()
    (line,) = [line for line in stack.status() if line.startswith("run killed")]
    assert "another run or program serves at that address" in line
    assert stack.query(f'{RUN_ACTIVE.name}{{run="killed"}}') == []


def test_status_lists_the_processes_and_no_failing_rule(stack: Stack) -> None:
    printed = stack.run("status")

    for name in ("prometheus", "alertmanager", "alert-log", "run-targets"):
        assert f"{name:<16}up, process " in printed
    assert ", 0 of them fail" in printed
    assert int(printed.partition("rules: ")[2].partition(",")[0]) > 0


def test_an_alert_reaches_the_alert_log(stack: Stack) -> None:
    alert = {"labels": {"alertname": "ZerowatchTried", "severity": "critical", "run": "night-7"}}
    url = f"http://127.0.0.1:{stack.environment['ALERTMANAGER_PORT']}/api/v2/alerts"
    headers = {"Content-Type": "application/json"}

    sent = urllib.request.Request(url, json.dumps([alert]).encode(), headers)
    with urllib.request.urlopen(sent, timeout=60):
        pass

    log = stack.folder / ".zerowatch-stack" / "alert-log.log"
    assert eventually(
        lambda: "FIRING critical ZerowatchTried run=night-7" in log.read_text(), pause=0.2
    )


def test_the_runbook_to_which_alerts_link_is_served(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.environment['ALERT_LOG_PORT']}/runbook"

    external_labels = stack.ask("status/config")["yaml"]
    with urllib.request.urlopen(url, timeout=60) as response:
        page = response.read().decode()

    assert f"zerowatch_runbook: {url}" in external_labels
    assert 'id="zerowatchtrainingstalled"' in page
    assert any(
        f"runbook       {url}" in line for line in stack.run("up", command=QUICK).splitlines()
    )


def test_the_watchdog_reaches_alertmanager_without_the_addresses_of_links(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.environment['ALERTMANAGER_PORT']}/api/v2/alerts"

    def watchdog() -> dict[str, Any] | None:
        with urllib.request.urlopen(url, timeout=60) as response:
            alerts = json.load(response)
        return next((each for each in alerts if each["labels"]["alertname"] == WATCHDOG), None)

    assert eventually(lambda: watchdog() is not None, pause=0.5)
    (alert,) = [watchdog()]
    assert alert is not None
    assert alert["receivers"] == [{"name": "watchdog"}]
    assert alert["labels"]["cluster"] == "local"
    assert not any(name.startswith("zerowatch_") for name in alert["labels"])
    assert alert["annotations"]["runbook_url"].endswith("/runbook#zerowatchwatchdog")
    assert alert["annotations"]["dashboard_url"] == ""  # this stack has no Grafana
    assert NO_WATCHDOG not in stack.status()


def test_the_servers_export_the_metrics_on_which_alerts_rely(stack: Stack) -> None:
    # Prometheus exports failures of HTTP discovery only with an http_sd_config, and errors of
    # notifications with the first notification.
    later = {"prometheus_sd_refresh_failures_total", "prometheus_notifications_errors_total"}

    def exported() -> set[str]:
        both = '{job=~"prometheus|alertmanager"}'
        return {series["metric"]["__name__"] for series in stack.query(both)}

    assert eventually(lambda: exported() >= OF_SERVERS.keys() - later, pause=0.5)
    for name, labels in OF_SERVERS.items():
        for series in stack.query(name):
            assert series["metric"].keys() - {"__name__"} <= labels


def test_a_job_cannot_choose_its_path_its_labels_or_names_of_others(
    stack: Stack, runs: Runs
) -> None:
    own = {"job": "zerowatch", "run": "hostile", "rank": "3", "node": "here"}
    assert eventually(lambda: stack.query('zerowatch_run_active{run="hostile"}'), pause=0.2)
    (active,) = stack.query('zerowatch_run_active{run="hostile"}')
    stored = stack.query(
        f'{{instance="{runs.hostile}", __name__!~"scrape_.+|zerowatch_.+|run_rank_instance:.+"}}'
    )

    assert active["metric"] == {
        "__name__": "zerowatch_run_active",
        "instance": runs.hostile,
        **own,
    }
    assert [series["metric"]["__name__"] for series in stored] == ["up"]
    assert Hostile.paths == {"/metrics?run=hostile"}


def test_runs_that_were_not_read_yet_or_have_ended_are_reported_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    reasons = []
    for content in ("[]", '[{"targets": ["127.0.0.1:1"], "labels": {"run": "one"}}]'):
        (folder / "targets.json").write_text(content)
        reasons.append(here(tmp_path)._why_no_run())

    assert "all runs in" in reasons[0]
    assert "not read" in reasons[1]
    assert not any("holds a targets.json" in reason for reason in reasons)


def test_a_second_up_changes_nothing_and_reports_it(stack: Stack) -> None:
    before = stack.children()

    printed = stack.run("up", command=QUICK)

    assert printed.startswith("it is up already.")
    assert stack.children() == before


def test_an_up_after_an_upgrade_starts_new_processes_with_the_new_rules_only(
    tmp_path: Path,
) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    installed = tmp_path / "rendered"
    shutil.copytree(native_stack.RENDERED, installed)
    code = f"""from pathlib import Path
from zerowatch.dashboards.cli import stack
from zerowatch.dashboards.stack import native_stack
native_stack.RENDERED = Path({str(installed)!r})
stack()"""
    commands, up = Stack(tmp_path), (sys.executable, "-c", code)
    commands.run("up", command=up)
    before = {child.pid for child in commands.children()}
    rules = installed / "prometheus"
    (rules / "alerts.yaml").rename(rules / "new.yaml")

    printed = commands.run("up", command=up)

    after = {child.pid for child in commands.children()}
    read = {Path(group["file"]).name for group in commands.ask("rules")["groups"]}
    commands.run("down")
    assert printed.startswith("restarted, ")
    assert len(after) == 4 and after.isdisjoint(before)
    assert read == {path.name for path in rules.glob("*.yaml")} >= {"new.yaml"}


def test_what_a_start_has_written_is_outdated_in_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = here(tmp_path)
    stack._write_configuration()
    same = stack._is_outdated()

    monkeypatch.setattr(native_stack, "version", lambda name: "0.0.0")

    assert (same, stack._is_outdated()) == (False, True)


def test_status_uses_the_ports_of_the_start_if_the_environment_has_changed(stack: Stack) -> None:
    without = NativeStack(stack.folder / "runs", {}, stack.folder / ".zerowatch-stack")

    assert any(", 0 of them fail" in line for line in without.status())


def test_the_state_folder_is_ignored_by_git(stack: Stack) -> None:
    assert (stack.folder / ".zerowatch-stack" / ".gitignore").read_text() == "*\n"


def test_down_stops_all_processes_and_can_be_called_twice(tmp_path: Path) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    commands = Stack(tmp_path)
    commands.run("up")
    pids = [child.pid for child in commands.children()]

    printed = [commands.run("down"), commands.run("down")]

    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert printed[0].startswith("stopped;")
    assert printed[1].startswith("nothing is up")
    assert "`zerowatch stack up --native` starts it" in commands.run("status")


def test_a_process_with_a_reused_pid_is_not_recognized() -> None:
    own = psutil.Process()
    ours = Child(name="x", pid=own.pid, started=own.create_time(), command=own.cmdline())

    assert process_of(ours) is not None
    assert process_of(Child(name="x", pid=own.pid, started=1.0, command=own.cmdline())) is None
    other = ["y", "--config.file=y.yml"]
    assert (
        process_of(Child(name="x", pid=own.pid, started=own.create_time(), command=other)) is None
    )


def test_a_process_whose_arguments_are_not_known_yet_is_recognized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = psutil.Process()
    ours = Child(name="x", pid=own.pid, started=own.create_time(), command=["x", "60"])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])

    assert process_of(ours) is not None


def test_a_program_started_by_a_script_on_path_is_recognized(tmp_path: Path) -> None:
    script = tmp_path / "prometheus"
    script.write_text('#!/bin/sh\nexec sleep "$@"\n')
    script.chmod(0o755)
    command = [str(script), "60"]

    with subprocess.Popen(command) as process:
        started = psutil.Process(process.pid)
        ours = Child(name="x", pid=process.pid, started=started.create_time(), command=command)
        became = eventually(lambda: started.name() == "sleep", pause=0.02)
        is_ours = process_of(ours) is not None
        process.terminate()

    assert became
    assert is_ours
    assert process_of(ours) is None


def here(tmp_path: Path, **settings: str) -> NativeStack:
    ports = {name: str(free_port()) for name in ("PROMETHEUS_PORT", "ALERTMANAGER_PORT")}
    settings = ports | {"ALERT_LOG_PORT": str(free_port())} | settings
    return NativeStack(tmp_path / "runs", settings, tmp_path / "state")


def test_a_missing_program_is_reported_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(
        CommandLineError, match=r"no prometheus on PATH.*apt-get install prometheus"
    ):
        here(tmp_path).up()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outdated:
    """A stack of an earlier version that is up, in whose place a process sleeps."""

    stack: NativeStack
    child: Child

    @property
    def is_up(self) -> bool:
        return process_of(self.child) is not None


@pytest.fixture
def outdated(tmp_path: Path) -> Iterator[Outdated]:
    folder, command = tmp_path / "state", ["/bin/sleep", "600"]
    folder.mkdir()
    with subprocess.Popen(command) as process:
        started = psutil.Process(process.pid).create_time()
        child = Child(name="prometheus", pid=process.pid, started=started, command=command)
        (folder / "stack.json").write_text(json.dumps([asdict(child)]))
        yield Outdated(stack=here(tmp_path), child=child)
        process.kill()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put files on PATH that have the names of Prometheus and Alertmanager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("prometheus", "alertmanager"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_stack_stays_up_if_a_program_for_the_new_one_is_missing(
    outdated: Outdated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(CommandLineError, match="no prometheus on PATH") as raised:
        outdated.stack.up()

    assert outdated.is_up
    assert "stopped" not in str(raised.value)


@pytest.mark.usefixtures("programs")
def test_a_stack_stays_up_if_a_port_of_the_new_one_is_taken(
    outdated: Outdated, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])

        with pytest.raises(CommandLineError, match=f"port {port} .*, for alert-log, is taken"):
            here(tmp_path, ALERT_LOG_PORT=port).up()

    assert outdated.is_up


@pytest.mark.usefixtures("programs")
def test_a_stack_stays_up_if_the_files_of_the_new_one_are_missing(
    outdated: Outdated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_stack, "RENDERED", tmp_path / "rendered")

    with pytest.raises(CommandLineError, match="is missing; `zerowatch dashboards build` makes it"):
        outdated.stack.up()

    assert outdated.is_up


@pytest.mark.usefixtures("programs")
def test_if_a_file_cannot_be_written_the_error_says_that_the_old_stack_was_stopped(
    outdated: Outdated, tmp_path: Path
) -> None:
    (tmp_path / "state" / "rules").write_text("no folder")

    with pytest.raises(
        CommandLineError, match=r"^stack: .*rules'; the stack that was up has been stopped$"
    ):
        outdated.stack.up()

    assert not outdated.is_up


@pytest.mark.usefixtures("programs")
def test_if_a_file_cannot_be_written_and_nothing_is_up_the_error_names_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "rules").write_text("no folder")

    with pytest.raises(CommandLineError, match=r"^stack: .*rules'$"):
        here(tmp_path).up()


@pytest.mark.usefixtures("programs")
def test_if_a_port_is_not_free_later_the_error_says_that_the_old_stack_was_stopped(
    outdated: Outdated, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])  # it seems to be that of the prometheus that runs

        with pytest.raises(
            CommandLineError, match=r"for prometheus, is taken.*; the stack that was up .* stopped"
        ):
            here(tmp_path, PROMETHEUS_PORT=port).up()

    assert not outdated.is_up


def test_a_port_in_use_is_reported_before_anything_is_started(tmp_path: Path) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])

        with pytest.raises(
            CommandLineError, match=f"port {port} .*alert-log, is taken.*export ALERT_LOG_PORT="
        ) as raised:
            here(tmp_path, ALERT_LOG_PORT=port).up()

    assert ".env" not in str(raised.value)  # of an installed package, which nobody edits
    assert not (tmp_path / "state").exists()


def test_runs_are_found_from_the_start_of_the_stack(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    targets = [{"targets": ["127.0.0.1:1"], "labels": {"run": "one"}}]
    (folder / "targets.json").write_text(json.dumps(targets))

    here(tmp_path)._write_configuration()

    assert json.loads((tmp_path / "state" / "targets.json").read_text()) == targets


def test_the_same_port_for_two_services_is_rejected(tmp_path: Path) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    port = str(free_port())

    with pytest.raises(CommandLineError, match=f"PROMETHEUS_PORT and ALERT_LOG_PORT .*{port}"):
        here(tmp_path, PROMETHEUS_PORT=port, ALERT_LOG_PORT=port).up()


def test_a_server_that_ends_at_once_is_reported_with_its_output_and_the_rest_is_stopped(
    tmp_path: Path,
) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    commands = Stack(tmp_path)
    (tmp_path / ".zerowatch-stack").mkdir()
    (tmp_path / ".zerowatch-stack" / "prometheus").write_text("no folder")

    with pytest.raises(AssertionError, match=r"prometheus has ended at once: .*prometheus\.log"):
        commands.run("up")

    assert commands.run("down").startswith("nothing is up")


def test_an_incomplete_ports_file_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    gone = {"name": "prometheus", "pid": 1, "started": 1.0, "command": ["prometheus", "--x"]}
    (folder / "stack.json").write_text(json.dumps([gone]))
    (folder / "ports.json").write_text('{"PROMETHEUS_PORT": "90')
    port = str(free_port())

    ended, silent = here(tmp_path, PROMETHEUS_PORT=port).status()

    assert "has ended" in ended
    assert silent.startswith(f"Prometheus does not answer on http://127.0.0.1:{port}")


def test_missing_rule_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    monkeypatch.setattr(native_stack, "RENDERED", tmp_path / "rendered")

    with pytest.raises(CommandLineError, match="is missing; `zerowatch dashboards build` makes it"):
        here(tmp_path).up()


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    promtool = program("promtool", apt="prometheus")
    configuration = prometheus_configuration(
        rules=native_stack.RENDERED / "prometheus",
        targets=tmp_path / "targets.json",
        prometheus="127.0.0.1:9090",
        alertmanager="127.0.0.1:9093",
        runbook="http://127.0.0.1:9099/runbook",
    )
    (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))
    (tmp_path / "targets.json").write_text("[]")

    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_the_configuration_guards_against_jobs_like_that_of_compose() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())

    by_name = {each["job_name"]: each for each in compose["scrape_configs"]}

    for name in ("trainer-optional", "zerowatch-optional"):
        assert {key: by_name[name].get(key) for key in GUARDS} == GUARDS
    assert by_name.keys() >= {"prometheus", "alertmanager"}
    assert by_name["trainer-optional"].get("honor_labels", False) is False
