"""Chooses the ports of the stack on this machine, by variables that change the defaults."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CommandLineError
from .alert_log import DEFAULT_PORT

LOOPBACK = "127.0.0.1"
# The folder of compose.yaml: the repository, or the installed package.
ROOT = Path(__file__).resolve().parents[2]
ENV_FILE = ROOT / ".env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of 127.0.0.1 on which a service listens.

    Attributes:
        service: The name of the service in compose.yaml.
        variable: The environment variable that changes the number.
        number: The number; by default that in compose.yaml.
    """

    service: str
    variable: str
    number: int

    @property
    def url(self) -> str:
        """The address for a browser."""
        return f"http://{LOOPBACK}:{self.number}"


GRAFANA = Port(service="grafana", variable="GRAFANA_PORT", number=3000)
PROMETHEUS = Port(service="prometheus", variable="PROMETHEUS_PORT", number=9090)
ALERTMANAGER = Port(service="alertmanager", variable="ALERTMANAGER_PORT", number=9093)
TRAINER = Port(service="trainer", variable="TRAINER_PORT", number=9464)
TEMPO = Port(service="tempo", variable="TEMPO_PORT", number=3200)
OTLP = Port(service="alloy", variable="OTLP_PORT", number=4318)
ALERT_LOG = Port(service="alert-log", variable="ALERT_LOG_PORT", number=DEFAULT_PORT)


def chosen(port: Port, settings: Mapping[str, str]) -> Port:
    """Return the port with the number that its variable has in `settings`, if any.

    Raises:
        CommandLineError: The value is not a port number.
    """
    text = settings.get(port.variable, "").strip()
    if not text:
        return port
    if not text.isdigit() or not 0 < int(text) <= 65535:
        raise CommandLineError(
            f"stack: {port.variable} is {text!r}; it takes the number of a port, such as "
            f"{port.number}"
        )
    return Port(service=port.service, variable=port.variable, number=int(text))


def port_settings(env_file: Path = ENV_FILE) -> dict[str, str]:
    """Return the variables of an env file and of the environment, which takes precedence.

    The file is read by the rules of compose.
    """
    lines = env_file.read_text().splitlines() if env_file.is_file() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    from_file = {name.strip(): _value(text) for name, text in pairs}
    return from_file | dict(os.environ)


def _value(text: str) -> str:
    """Return the value after the "=" of a line, without quotes and comment."""
    return text.partition(" #")[0].strip().strip("'\"")


def refuse_taken(ports: Iterable[Port], running: Collection[str] = ()) -> None:
    """Raise an error if a port is in use by another program.

    Args:
        ports: The ports to check.
        running: The services of the stack that run already and so use their own ports.

    Raises:
        CommandLineError: A port is in use, or two services have the same port.
    """
    by_number: dict[int, Port] = {}
    for port in ports:
        other = by_number.setdefault(port.number, port)
        if other is not port:
            raise CommandLineError(
                f"stack: {other.variable} and {port.variable} are both {port.number}; choose two"
            )
        if port.service not in running and is_taken(port.number):
            raise CommandLineError(
                f"stack: port {port.number} of {LOOPBACK}, for {port.service}, is taken; free it, "
                f"or choose another: export {port.variable}=NUMBER"
            )


def is_taken(number: int) -> bool:
    """Return whether something listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores closed connections
        try:
            probe.bind((LOOPBACK, number))
        except OSError:
            return True
    return False
