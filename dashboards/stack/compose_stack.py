"""Runs the stack in containers, by `docker compose` with compose.yaml and the files in docker/."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import CommandLineError
from . import stack_ports
from .alert_log import RUNBOOK_PATH
from .stack_health import health_lines
from .stack_ports import ROOT, Port, chosen, port_settings, refuse_taken

PROJECT = "zerowatch"
# All services of compose.yaml except the demo, which is called trainer.
SERVICES = (
    "prometheus",
    "alertmanager",
    "alert-log",
    "node-exporter",
    "grafana",
    "tempo",
    "loki",
    "alloy",
)
# The services that only the compose file for GPUs has.
GPU_SERVICES = ("dcgm-exporter",)
_PORTS = (
    stack_ports.GRAFANA,
    stack_ports.PROMETHEUS,
    stack_ports.ALERTMANAGER,
    stack_ports.ALERT_LOG,
    stack_ports.TEMPO,
    stack_ports.OTLP,
)
_FILE, _GPU_FILE = "compose.yaml", "docker/compose.gpu.yaml"
# A file or folder of the checkout that a compose file mounts, on its own line or in an inline list.
_MOUNTED = re.compile(r'[ "]\./([^:"\s]+):[^",\s]+:ro\b')
# The variable of compose.yaml that is a label of the services. Compose replaces a container whose
# label has changed, but does not look into mounted files.
_DIGEST = "MOUNTED_FILES"
NATIVE = "`zerowatch stack up --native` needs prometheus and alertmanager instead of it"
OURS = f"label=com.docker.compose.project={PROJECT}"
SERVICE_FORMAT = '{{.Label "com.docker.compose.service"}}'


def up(*, with_trainer: bool = True, gpu: bool = False) -> list[str]:
    """Start all services in the background, and return lines with their addresses.

    Args:
        with_trainer: Whether to build and start the demo too.
        gpu: Whether the demo trains on the GPUs of this machine.

    Raises:
        CommandLineError: Docker or compose is missing, Docker does not answer, a port is taken, a
            service could not read its files, or compose fails.
    """
    compose = _compose(gpu=gpu)
    settings = port_settings()
    has_image = bool(settings.get("TRAINER_IMAGE", "").strip())
    if with_trainer and not has_image:
        _refuse_without_checkout(ROOT)
    _refuse_unreadable(ROOT, gpu=gpu)
    ports = [chosen(port, settings) for port in _PORTS]
    if with_trainer:
        ports.append(chosen(stack_ports.TRAINER, settings))
    refuse_taken(ports, running=_running())
    what = [*SERVICES, *(GPU_SERVICES if gpu else ())]
    if with_trainer:  # a given image is taken as it is
        what = [] if has_image else ["--build"]
    _run([*compose, "up", "--detach", *what], {_DIGEST: _digest(ROOT, gpu=gpu)})
    return _banner(compose)


def down(*, volumes: bool = False) -> None:
    """Stop and remove the containers.

    Args:
        volumes: Whether to remove their stored data too.

    Raises:
        CommandLineError: Docker or compose is missing, or Docker does not answer.
    """
    # Orphans are services of another compose file, such as those of compose.multi-node.yaml.
    _run([*_compose(), "down", "--remove-orphans", *(["--volumes"] if volumes else [])])


def status() -> list[str]:
    """Return lines on the services, the ranks that Prometheus reaches, failing rules and alerts.

    Raises:
        CommandLineError: Docker or compose is missing, or Docker does not answer.
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
        f"  runbook       {chosen(stack_ports.ALERT_LOG, settings).url}{RUNBOOK_PATH}",
    ]


def _compose(*, gpu: bool = False) -> list[str]:
    """Return the command of compose with its files.

    Raises:
        CommandLineError: Docker or compose is missing, or Docker does not answer.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise CommandLineError(f"stack: there is no docker on PATH; install it, or: {NATIVE}")
    version = subprocess.run(
        [docker, "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True
    )
    if version.returncode:
        reason = (version.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandLineError(
            f"stack: Docker's engine does not answer ({reason}); start it, or: {NATIVE}"
        )
    files = [word for name in _files(gpu=gpu) for word in ("--file", str(ROOT / name))]
    program = compose_program(docker)
    if not program:
        raise CommandLineError(
            "stack: this docker has no `compose`; install docker-compose-plugin (or docker-compose "
            f"from 1.29 on), or: {NATIVE}"
        )
    return [*program, "--project-name", PROJECT, *files]


def _files(*, gpu: bool) -> tuple[str, ...]:
    return (_FILE, _GPU_FILE) if gpu else (_FILE,)


def compose_program(docker: str = "docker") -> list[str]:
    """Return the command of compose: the plugin of docker, else docker-compose, else nothing."""
    plugin = subprocess.run([docker, "compose", "version"], capture_output=True)
    if plugin.returncode == 0:
        return [docker, "compose"]
    alone = shutil.which("docker-compose")
    return [] if alone is None else [alone]


def _refuse_without_checkout(root: Path) -> None:
    if not (root / "pyproject.toml").is_file():
        raise CommandLineError(
            "stack: zerowatch is installed without its sources, so the demo's image cannot be "
            "built; set TRAINER_IMAGE to an image that is, or start the rest by `zerowatch stack "
            "up --without-trainer` and watch a job of your own "
            f"({ROOT / 'docker' / 'prometheus' / 'prometheus.yml'} says how), or run this "
            "in a checkout"
        )


def _refuse_unreadable(root: Path, *, gpu: bool) -> None:
    """Refuse mounted files that only their owner can read, as after a clone with umask 077.

    The services run as users of their own. Docker Desktop, on other systems, hides the modes.
    """
    if sys.platform != "linux":
        return
    for path in _mounted(root, gpu=gpu):
        needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        if path.stat().st_mode & needed != needed:
            raise CommandLineError(
                f"stack: the services run as other users, who may not read {path}; run: "
                f"chmod -R o+rX {root / 'docker'} {root / 'dashboards'}"
            )


def _digest(root: Path, *, gpu: bool) -> str:
    """Return a hash of the mounted files and their names, which an upgrade changes."""
    digest = hashlib.sha256()
    for path in _mounted(root, gpu=gpu):
        if path.is_file():
            digest.update(f"{path.relative_to(root)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _mounted(root: Path, *, gpu: bool) -> Iterator[Path]:
    """Yield the files and folders that the services mount, and all that the folders contain."""
    for file in _files(gpu=gpu):
        for name in _MOUNTED.findall((root / file).read_text()):
            yield root / name
            yield from sorted((root / name).rglob("*"))


def _running() -> list[str]:
    return _docker("ps", "--filter", OURS, "--format", SERVICE_FORMAT)


def _published(port: Port) -> Port:
    """Return the port with the number of the running container.

    The environment may have changed since its start.

    Args:
        port: A port whose default number is also the number inside the container.
    """
    for line in _docker("ps", "--filter", OURS, "--format", "{{.Ports}}"):
        found = re.search(rf":(\d+)->{port.number}/tcp", line)
        if found:
            return replace(port, number=int(found[1]))
    return port


def _docker(*arguments: str) -> list[str]:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    return result.stdout.splitlines()


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Run a command whose output goes to the terminal; raise an error if it fails."""
    code = subprocess.run(command, env=os.environ | (variables or {})).returncode
    if code:
        raise CommandLineError(
            f"stack: `{_spelled(command)}` failed with exit code {code}; it says why above"
        )


def _spelled(command: Sequence[str]) -> str:
    """Return a command as a user would type it."""
    return " ".join([Path(command[0]).name, *command[1:]])
