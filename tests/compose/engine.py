"""Starts a compose project for the time of a test, and queries its servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers.free_port import free_port

from zerowatch.dashboards.stack.compose_stack import compose_program

VARIABLES = (
    "GRAFANA_PORT",
    "PROMETHEUS_PORT",
    "ALERTMANAGER_PORT",
    "TRAINER_PORT",
    "TEMPO_PORT",
    "OTLP_PORT",
)


def why_no_engine() -> str | None:
    """Return the reason why containers cannot run on this machine, or None."""
    if shutil.which("docker") is None:
        return "needs docker on PATH"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if asked.returncode:
        return f"needs a running Docker engine: {asked.stderr.strip().splitlines()[-1]}"
    return None if compose_program() else "needs `docker compose` or docker-compose"


class Project:
    """A compose project of its own name, on free ports."""

    def __init__(self, name: str, *files: Path) -> None:
        self.name = name
        named = [word for file in files for word in ("--file", str(file))]
        self._compose = [*compose_program(), "--project-name", name, *named]
        self.environment = {variable: str(free_port()) for variable in VARIABLES}
        self.prometheus = f"http://127.0.0.1:{self.environment['PROMETHEUS_PORT']}"
        self.alertmanager = f"http://127.0.0.1:{self.environment['ALERTMANAGER_PORT']}"

    def compose(self, *arguments: str, **environment: str) -> str:
        """Run compose and return its output; raises CalledProcessError with it."""
        done = subprocess.run(
            [*self._compose, *arguments],
            env=os.environ | self.environment | environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise AssertionError(f"compose {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        return self.compose("ps", "-q", service).strip()

    def state(self, service: str) -> dict[str, Any]:
        """Return the engine's State of a service's container."""
        text = docker("inspect", "--format", "{{json .State}}", self.container(service))
        return dict(json.loads(text))

    def is_healthy(self, service: str) -> bool:
        """Whether the service's own health check passes."""
        return self.state(service).get("Health", {}).get("Status") == "healthy"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        found = get_json(
            f"{self.prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        )
        return list(found["data"]["result"]) if found else []

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts in Alertmanager."""
        return list(get_json(f"{self.alertmanager}/api/v2/alerts") or [])

    def leftovers(self) -> list[str]:
        """Return the containers, volumes and networks of this project that there still are."""
        label = f"label=com.docker.compose.project={self.name}"
        return [
            *docker("ps", "--all", "--quiet", "--filter", label).split(),
            *docker("volume", "ls", "--quiet", "--filter", label).split(),
            *docker("network", "ls", "--quiet", "--filter", label).split(),
        ]


def docker(*arguments: str) -> str:
    """Run docker and return its output."""
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def has_image(name: str) -> bool:
    """Whether an image is present or can be pulled."""
    here = subprocess.run(["docker", "image", "inspect", name], capture_output=True)
    return (
        here.returncode == 0
        or subprocess.run(["docker", "pull", "--quiet", name], capture_output=True).returncode == 0
    )


def get_json(url: str) -> Any:
    """Return the JSON at a URL; None while nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def seconds_until(condition: Callable[[], object], *, within: float, what: str) -> float:
    """Wait for a condition and return how long it took; fail after the time limit."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > within:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(0.5)
    return time.monotonic() - begun
