"""A real Prometheus on a free port of loopback, for as long as a test needs it.

with closing(Prometheus(folder, config)) as prometheus:
    prometheus.series("up")
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

from require import program
from servers.free_port import free_port


class PrometheusError(RuntimeError):
    """Prometheus refused a query; the text holds its reason."""


class Prometheus:
    """A Prometheus process; it starts at once, and answers queries once `is_ready` is true.

    Args:
        folder: Where its configuration, log and data go; rule files are named relative to it.
        config: The text of prometheus.yml.
        flags: More command-line flags, such as a retention.
    """

    def __init__(self, folder: Path, config: str, *flags: str) -> None:
        binary = program("prometheus", apt="prometheus")
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(config)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                    "--enable-feature=exemplar-storage",
                    *flags,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_ready(self) -> bool:
        return bool(self.ask("status/buildinfo"))

    def ask(self, path: str, **parameters: object) -> Any:
        """Return the data of an API call; empty as long as Prometheus is starting."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=120) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return {}
            raise PrometheusError(f"{path} {parameters}: {error.read().decode()}") from None
        except OSError:
            return {}

    def series(self, expression: str, **parameters: object) -> list[dict[str, Any]]:
        """Return the series of an instant query: {"metric": labels, "value": [time, text]}."""
        return list(self.ask("query", query=expression, **parameters).get("result", []))

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
