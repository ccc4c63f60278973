"""Runs the stack without containers: Prometheus and Alertmanager from PATH, with the same rules.

The processes run in the background and monitor the runs of the working directory. Everything they
write is in its folder `.zerowatch-stack`. Grafana and Tempo are not part of this stack.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from ...errors import CommandLineError
from . import stack_ports
from .alert_log import COMPOSE_URL, RUNBOOK_PATH
from .prometheus_config import prometheus_configuration
from .run_targets import newest_targets, write_if_changed
from .stack_health import RUNBOOK, answers, health_lines
from .stack_ports import LOOPBACK, Port, chosen, port_settings, refuse_taken

STATE_FOLDER = Path(".zerowatch-stack")
RENDERED = Path(__file__).resolve().parent.parent / "rendered"
READY_SECONDS = 30.0
# The file names of each program, in Debian and in its own releases, and the Debian package.
_PROGRAMS = {
    "prometheus": (("prometheus",), "prometheus"),
    "alertmanager": (("prometheus-alertmanager", "alertmanager"), "prometheus-alertmanager"),
}
STOP_SECONDS = 10.0  # after which a process is killed
# The kernel stores start times relative to boot, and the boot time is adjusted now and then.
_START_TOLERANCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A background process of the stack.

    Attributes:
        name: What it is called in reports and in the name of its log.
        pid: Its process id.
        started: Unix time of its start, because the pid may be reused by another process.
        command: The program and its arguments.
    """

    name: str
    pid: int
    started: float
    command: list[str]


class NativeProcesses:
    """The background processes of a stack, which outlive the command that started them.

    They are recorded in `stack.json` of the given folder, so that a later command can stop them.
    Their logs are in the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "stack.json"

    def known(self) -> list[Child]:
        """Return the recorded processes, whether they still run or not."""
        try:
            return [Child(**fields) for fields in json.loads(self._record.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def start(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start the commands, each with its output in a log.

        Args:
            commands: The program and arguments of each process, by its name.
        """
        children: list[Child] = []
        for name, command in commands.items():
            with self.log(name).open("a") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that Ctrl-C in this terminal does not stop it
                )
            started = psutil.Process(process.pid).create_time()
            child = Child(name=name, pid=process.pid, started=started, command=list(command))
            children.append(child)
            # Written after each start, so that `stop` finds it even if the next start fails.
            self._record.write_text(
                json.dumps([asdict(each) for each in children], indent=2) + "\n"
            )

    def stop(self) -> int:
        """Stop the recorded processes; return how many still ran. Safe to call twice."""
        processes = [process for child in self.known() if (process := process_of(child))]
        for process in processes:
            process.terminate()
        _, still_running = psutil.wait_procs(processes, timeout=STOP_SECONDS)
        for process in still_running:
            process.kill()
        psutil.wait_procs(still_running, timeout=STOP_SECONDS)
        self._record.unlink(missing_ok=True)
        return len(processes)

    def log(self, name: str) -> Path:
        """Return the file with the output of the process of that name."""
        return self._folder / f"{name}.log"


def process_of(child: Child) -> psutil.Process | None:
    """Return the process if it still runs; None if it ended or its pid was reused."""
    try:
        process = psutil.Process(child.pid)
        same_start = abs(process.create_time() - child.started) < _START_TOLERANCE_SECONDS
        command = process.cmdline()  # empty until the kernel has set it, after the start
        is_ours = same_start and (not command or _ends_with(command, child.command[1:]))
    except psutil.Error:
        return None
    return process if is_ours and process.status() != psutil.STATUS_ZOMBIE else None


def _ends_with(command: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether a command line ends with these arguments.

    The program itself is not compared, because the one on PATH may be a script that starts another.
    """
    return list(command[len(command) - len(arguments) :]) == list(arguments)


class NativeStack:
    """The stack of one working directory: starts, stops and describes its processes.

    Args:
        runs: The folder of run folders, setting `run_log.folder`.
        settings: Variables that choose ports; by default the environment and the file .env.
        folder: The folder for configuration, data, logs and process ids.
    """

    def __init__(
        self, runs: Path, settings: Mapping[str, str] | None = None, folder: Path = STATE_FOLDER
    ) -> None:
        self._runs = runs.absolute()
        self._folder = folder.absolute()
        self._processes = NativeProcesses(self._folder)
        self._settings = port_settings() if settings is None else settings
        self._kept_ports = self._folder / "ports.json"
        self._targets, self._rules = self._folder / "targets.json", self._folder / "rules"
        self._set_ports(self._ports_of_last_start() or self._settings)

    def _set_ports(self, settings: Mapping[str, str]) -> None:
        self._prometheus = chosen(stack_ports.PROMETHEUS, settings)
        self._alertmanager = chosen(stack_ports.ALERTMANAGER, settings)
        self._alert_log = chosen(stack_ports.ALERT_LOG, settings)

    def _ports_of_last_start(self) -> dict[str, str]:
        """Return the ports of the running stack, because the environment may have changed since."""
        try:
            kept = dict(json.loads(self._kept_ports.read_text()))
        except (OSError, ValueError):
            return {}
        return kept if self._processes.known() else {}

    def up(self) -> list[str]:
        """Start the processes, wait until they answer, and return lines with their addresses.

        A stack that is up is started again if an upgrade has changed what it reads.

        Raises:
            CommandLineError: A program or file is missing, a port is taken, a file cannot be
                written, or a program does not start.
        """
        children = self._processes.known()
        running = [child.name for child in children if process_of(child)]
        is_up = bool(children) and len(running) == len(children)
        if is_up and not self._is_outdated():
            return ["it is up already.", *self._banner()[1:]]
        used = {port.number for port in self._ports if port.service in running}
        self._set_ports(self._settings)
        # What may fail, before the stack that runs is stopped.
        commands = self._commands()
        self._configuration()
        refuse_taken(self._ports, [port.service for port in self._ports if port.number in used])
        self.down()
        try:
            self._start(commands)
        except (CommandLineError, OSError) as error:
            reason = str(error) if isinstance(error, CommandLineError) else f"stack: {error}"
            stopped = "; the stack that was up has been stopped" if running else ""
            raise CommandLineError(f"{reason}{stopped}") from error
        restarted = ["restarted, because the version or its files have changed."] if is_up else []
        return [*restarted, *self._banner()]

    def down(self) -> list[str]:
        """Stop the processes; their stored data stays. Safe to call twice."""
        stopped = self._processes.stop()
        if not stopped:
            return [f"nothing is up that was started in {self._folder.parent}"]
        return [f"stopped; what was stored stays in {self._folder}"]

    def status(self) -> list[str]:
        """Return lines on the processes, reachable ranks, failing rules and alerts."""
        children = self._processes.known()
        if not children:
            return [
                f"nothing is up that was started in {self._folder.parent}; "
                "`zerowatch stack up --native` starts it"
            ]
        prometheus, alertmanager = self._prometheus.url, self._alertmanager.url
        return [
            *(self._state(child) for child in children),
            *health_lines(prometheus, alertmanager, no_run=self._why_no_run()),
        ]

    def _why_no_run(self) -> str:
        if newest_targets(self._runs):
            return f"Prometheus has not read the runs in {self._runs} yet; it does within seconds"
        if any(self._runs.glob("*/targets.json")):
            return f"Prometheus has nothing to scrape: all runs in {self._runs} have ended"
        return (
            f"Prometheus has found no run yet: no folder in {self._runs} holds a targets.json; a "
            "job that is started in this directory writes one"
        )

    @property
    def _runbook_url(self) -> str:
        return f"{self._alert_log.url}{RUNBOOK_PATH}"

    @property
    def _ports(self) -> tuple[Port, ...]:
        return self._prometheus, self._alertmanager, self._alert_log

    def _start(self, commands: Mapping[str, Sequence[str]]) -> None:
        refuse_taken(self._ports)
        self._write_configuration()
        with ExitStack() as undo:  # stops the started processes if a later step fails
            undo.callback(self.down)
            self._processes.start(commands)
            self._wait_until_ready()
            undo.pop_all()

    def _state(self, child: Child) -> str:
        if process_of(child):
            return f"{child.name:<16}up, process {child.pid}"
        return f"{child.name:<16}has ended; {self._processes.log(child.name)} may say why"

    def _banner(self) -> list[str]:
        return [
            f"zerowatch watches the runs in {self._runs}",
            "what it sees: `zerowatch stack status --native`",
            f"  Prometheus    {self._prometheus.url}",
            f"  Alertmanager  {self._alertmanager.url}",
            f"  alerts        {self._prometheus.url}/alerts",
            f"  as lines      tail -f {self._processes.log('alert-log')}",
            f"  runbook       {self._runbook_url}",
        ]

    def _commands(self) -> dict[str, list[str]]:
        """Return the command of each process by its name.

        Raises:
            CommandLineError: A program is missing.
        """
        # -P: a checkout in the working directory must not replace the installed package.
        folder, module = self._folder, [sys.executable, "-P", "-m"]
        return {
            "prometheus": [
                _program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                "--storage.tsdb.retention.time=15d",
                "--storage.tsdb.retention.size=5GB",
                "--enable-feature=exemplar-storage",
                f"--web.listen-address={_listen(self._prometheus)}",
                f"--web.external-url={self._prometheus.url}",
            ],
            "alertmanager": [
                _program("alertmanager"),
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={_listen(self._alertmanager)}",
                f"--web.external-url={self._alertmanager.url}",
                "--cluster.listen-address=",  # a single Alertmanager, without peers
            ],
            "alert-log": [
                *(*module, "zerowatch.dashboards.stack.alert_log"),
                f"--port={self._alert_log.number}",
                f"--runbook={RUNBOOK}",
            ],
            "run-targets": [
                *(*module, "zerowatch.dashboards.stack.run_targets"),
                *("--runs", str(self._runs), "--to", str(self._targets)),
            ],
        }

    def _write_configuration(self) -> None:
        files = self._configuration()
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / ".gitignore").write_text("*\n")
        kept = {port.variable: str(port.number) for port in self._ports}
        self._kept_ports.write_text(json.dumps(kept) + "\n")
        write_if_changed(self._targets, newest_targets(self._runs))
        self._rules.mkdir(exist_ok=True)
        for old in self._old_rules(files):
            old.unlink()
        for path, text in files.items():
            path.write_text(text)

    def _is_outdated(self) -> bool:
        """Whether the processes read other files than a start would write now."""
        files = self._configuration()
        return bool(self._old_rules(files)) or any(
            not path.is_file() or path.read_text() != text for path, text in files.items()
        )

    def _old_rules(self, files: Mapping[Path, str]) -> list[Path]:
        """Return the files of rules that are not among the given ones."""
        return sorted(set(self._rules.glob("*.yaml")) - files.keys())

    def _configuration(self) -> dict[Path, str]:
        """Return the text of each file that a start writes for the processes, by its path.

        The version is among them, because the processes run code of it.

        Raises:
            CommandLineError: The files were not built.
        """
        alertmanager = RENDERED / "alertmanager" / "alertmanager.yml"
        if not alertmanager.is_file():
            raise CommandLineError(
                f"stack: {alertmanager} is missing; `zerowatch dashboards build` makes it"
            )
        prometheus = prometheus_configuration(
            rules=self._rules,
            targets=self._targets,
            prometheus=_listen(self._prometheus),
            alertmanager=_listen(self._alertmanager),
            runbook=self._runbook_url,
        )
        rules = (RENDERED / "prometheus").glob("*.yaml")
        return {
            **{self._rules / file.name: file.read_text() for file in rules},
            # JSON is valid YAML.
            self._folder / "prometheus.yml": json.dumps(prometheus, indent=2) + "\n",
            self._folder / "alertmanager.yml": alertmanager.read_text().replace(
                COMPOSE_URL, f"{self._alert_log.url}/"
            ),
            self._folder / "version": version("zerowatch") + "\n",
        }

    def _wait_until_ready(self) -> None:
        pages = [f"{port.url}/-/ready" for port in (self._prometheus, self._alertmanager)]
        pages.append(self._alert_log.url)
        deadline = time.monotonic() + READY_SECONDS
        while pages:
            pages = [page for page in pages if not answers(page)]
            for child in self._processes.known():
                if process_of(child) is None:
                    raise CommandLineError(self._why(child.name, "has ended at once"))
            if pages and time.monotonic() > deadline:
                raise CommandLineError(
                    f"stack: {pages[0]} does not answer after {READY_SECONDS:g} s; see the logs in "
                    f"{self._folder}"
                )
            time.sleep(0.1)

    def _why(self, name: str, what: str) -> str:
        lines = self._processes.log(name).read_text().splitlines() or ["it wrote nothing"]
        return f"stack: {name} {what}: {lines[-1]} (all of it: {self._processes.log(name)})"


def _program(name: str) -> str:
    names, package = _PROGRAMS[name]
    for spelling in names:
        path = shutil.which(spelling)
        if path is not None:
            return path
    raise CommandLineError(
        f"stack: there is no {name} on PATH (looked for {' and '.join(names)}); on Debian or "
        f"Ubuntu: apt-get install {package}; else from https://prometheus.io/download"
    )


def _listen(port: Port) -> str:
    return f"{LOOPBACK}:{port.number}"
