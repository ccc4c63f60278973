"""The stack in containers: a thin wrapper around `docker compose` with the compose files here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import CommandLineError
from . import stack_ports
from .stack_health import health_lines
from .stack_ports import DOCKER_FOLDER, Port, chosen, port_settings, refuse_taken

PROJECT = "zerowatch"
SERVICES = ("prometheus", "alertmanager", "alert-log", "grafana", "tempo")  # all but the trainer
_PORTS = (
    stack_ports.GRAFANA,
    stack_ports.PROMETHEUS,
    stack_ports.ALERTMANAGER,
    stack_ports.TEMPO,
    stack_ports.OTLP,
)
NATIVE = "`zerowatch stack up --native` needs prometheus and alertmanager instead of it"
OURS = f"label=com.docker.compose.project={PROJECT}"
SERVICE_FORMAT = '{{.Label "com.docker.compose.service"}}'


def up(*, with_trainer: bool = True, gpu: bool = False) -> list[str]:
    """Start all services, and return a report.

    Args:
        with_trainer: Whether to build and start the demo too.
        gpu: Whether the demo trains on this machine's GPUs.

    Raises:
        CommandLineError: There is no Docker, its engine does not run, a port is taken, ...
    """
    compose = _compose(gpu=gpu)
    if with_trainer:
        _refuse_without_checkout(DOCKER_FOLDER.parent)
    settings = port_settings()
    ports = [chosen(port, settings) for port in _PORTS]
    if with_trainer:
        ports.append(chosen(stack_ports.TRAINER, settings))
    refuse_taken(ports, running=_running())
    what = ["--build"] if with_trainer else [*SERVICES]
    _run([*compose, "up", "--detach", *what])
    return _banner(compose)


def down(*, volumes: bool = False) -> None:
    """Stop and remove the containers; with `volumes` also what they have stored.

    Raises:
        CommandLineError: There is no Docker, or its engine does not run.
    """
    # Orphans: what an overlay has added, such as the second trainer of compose.multi-node.yaml.
    _run([*_compose(), "down", "--remove-orphans", *(["--volumes"] if volumes else [])])


def status() -> list[str]:
    """Say how each service is, which runs Prometheus reaches, and what is wrong.

    Raises:
        CommandLineError: There is no Docker, or its engine does not run.
    """
    compose = _compose()
    services = _docker(
        "ps", "--all", "--filter", OURS, "--format", SERVICE_FORMAT + "\t{{.Status}}"
    )
    if not services:
        return ["nothing is up; `zerowatch stack up` starts it"]
    no_run = (
        "Prometheus has found no run yet: nobody answers on http://trainer:9464/targets, nor on "
        f"port 9464 of this machine; see `{_spelled(compose)} logs trainer`"
    )
    return [
        *sorted(line.expandtabs(16) for line in services),
        *health_lines(
            _published(stack_ports.PROMETHEUS).url,
            _published(stack_ports.ALERTMANAGER).url,
            no_run=no_run,
        ),
    ]


def _banner(compose: Sequence[str]) -> list[str]:
    settings = port_settings()
    return [
        "zerowatch is starting; `zerowatch stack status` says how it is.",
        f"  Grafana       {chosen(stack_ports.GRAFANA, settings).url}  (no login needed)",
        f"  Prometheus    {chosen(stack_ports.PROMETHEUS, settings).url}",
        f"  Alertmanager  {chosen(stack_ports.ALERTMANAGER, settings).url}",
        f"  alerts        {_spelled(compose)} logs -f alert-log",
        f"  traces        ZEROWATCH_OTEL_ENDPOINT={chosen(stack_ports.OTLP, settings).url}",
    ]


def _compose(*, gpu: bool = False) -> list[str]:
    """Return the command of compose with our files, once its engine has answered.

    Raises:
        CommandLineError: There is none.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise CommandLineError(f"stack: there is no docker on PATH; install it, or: {NATIVE}")
    asked = subprocess.run(
        [docker, "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True
    )
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandLineError(
            f"stack: Docker's engine does not answer ({reason}); start it, or: {NATIVE}"
        )
    names = ["compose.yaml", *(["compose.gpu.yaml"] if gpu else [])]
    files = [word for name in names for word in ("--file", str(DOCKER_FOLDER / name))]
    program = compose_program(docker)
    if not program:
        raise CommandLineError(
            "stack: this docker has no `compose`; install docker-compose-plugin (or docker-compose "
            f"from 1.29 on), or: {NATIVE}"
        )
    return [*program, "--project-name", PROJECT, *files]


def compose_program(docker: str = "docker") -> list[str]:
    """Return the command of compose, as docker's plugin or alone; nothing where there is none."""
    plugin = subprocess.run([docker, "compose", "version"], capture_output=True)
    if plugin.returncode == 0:
        return [docker, "compose"]
    alone = shutil.which("docker-compose")
    return [] if alone is None else [alone]


def _refuse_without_checkout(root: Path) -> None:
    if not (root / "pyproject.toml").is_file():
        raise CommandLineError(
            "stack: zerowatch is installed without its sources, so the demo's image cannot be "
            "built; start the rest by `zerowatch stack up --without-trainer` and watch a job of "
            f"your own ({DOCKER_FOLDER / 'prometheus' / 'prometheus.yml'} says how), or run this "
            "in a checkout"
        )


def _running() -> list[str]:
    return _docker("ps", "--filter", OURS, "--format", SERVICE_FORMAT)


def _published(port: Port) -> Port:
    """Return the port with its current number, even if the environment has changed since.

    Args:
        port: One whose usual number is that inside the container.
    """
    for line in _docker("ps", "--filter", OURS, "--format", "{{.Ports}}"):
        found = re.search(rf":(\d+)->{port.number}/tcp", line)
        if found:
            return replace(port, number=int(found[1]))
    return port


def _docker(*arguments: str) -> list[str]:
    asked = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    return asked.stdout.splitlines()


def _run(command: Sequence[str]) -> None:
    """Run compose with its own output; raise if it fails."""
    code = subprocess.run(command).returncode
    if code:
        raise CommandLineError(
            f"stack: `{_spelled(command)}` failed with exit code {code}; it says why above"
        )


def _spelled(command: Sequence[str]) -> str:
    """Write a command as one would type it."""
    return " ".join([Path(command[0]).name, *command[1:]])
