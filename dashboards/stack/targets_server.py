"""Serves the targets of all runs in a folder: one http_sd address for a machine or a cluster.

Rank 0 of each run serves its own targets, but its host and port change from job to job. Here the
address stays the same, and runs come and go.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from ...errors import CommandLineError
from ...metrics.exporters.http_connection import Request, RequestHandler, Response
from ...metrics.exporters.listener import Listener
from .run_targets import FORGET_SECONDS, POLL_SECONDS, RunTargets, TargetFiles, Targets

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9463
_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]*):(?P<port>\d{1,5})")


class TargetsServer:
    """An HTTP server with the targets of all runs. It listens as soon as it is created.

    While the folder cannot be listed, such as during a failure of a network file system, it answers
    503. Prometheus then keeps the targets that it has.

    Args:
        runs: The folder of run folders.
        host: The address to listen on.
        port: The port to listen on; 0 for any free port.
        forget_seconds: Drop a killed run if its rank 0 has written nothing for so long.
        now: A monotonic clock, in seconds.
        wall_clock: The Unix time.

    Raises:
        CommandLineError: The folder cannot be listed, or the server cannot listen there.
    """

    def __init__(
        self,
        runs: Path,
        host: str,
        port: int,
        *,
        forget_seconds: float = FORGET_SECONDS,
        now: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = runs
        self._now = now
        self._targets = RunTargets(TargetFiles(runs, wall_clock, forget_seconds), now)
        self._answered_at = 0.0
        self._answer: Response | None = None
        self._logged: set[str] = set()
        try:
            self._targets.read()
        except OSError as error:
            raise CommandLineError(
                f"targets: cannot list {runs} ({error.strerror}); give the folder in which "
                "the jobs write their runs (setting run_log.folder) by --runs FOLDER"
            ) from None
        site = RequestHandler(answer=self._respond, failed=self._on_failure, spent=lambda _: None)
        try:
            self._listener = Listener(host, port, site, None)
        except OSError as error:
            raise CommandLineError(
                f"targets: cannot listen on {host}:{port} ({error.strerror}); free the port, or "
                "give an address of this machine by --listen HOST:PORT"
            ) from None

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._listener.server_address[1])

    def serve(self) -> None:
        """Answer requests until `stop` is called."""
        self._listener.serve()

    def stop(self) -> None:
        """Make `serve` return. Any thread may call this."""
        self._listener.stop()

    def close(self) -> None:
        """Release the port."""
        self._listener.server_close()

    def _respond(self, request: Request) -> Response:
        match request.path.partition("?")[0]:
            case "/targets":
                return self._targets_response()
            case "/healthz":
                status = self._targets_response().status
                body = b"ok\n" if status == HTTPStatus.OK else b"the runs cannot be read\n"
                return Response(content_type="text/plain", body=body, status=status)
            case _:
                return Response(
                    content_type="text/plain",
                    body=b"No such page. There are /targets and /healthz.\n",
                    status=HTTPStatus.NOT_FOUND,
                )

    def _targets_response(self) -> Response:
        """Return the response to /targets, which is renewed at most every two seconds."""
        now = self._now()
        if self._answer is None or now - self._answered_at >= POLL_SECONDS:
            self._answer, self._answered_at = self._new_response(), now
        return self._answer

    def _new_response(self) -> Response:
        try:
            targets = self._targets.read()
        except OSError as error:
            text = f"cannot list {self._runs} ({error.strerror})"
            self._log_once(f"{text}; Prometheus keeps the targets that it has")
            return Response(
                content_type="text/plain",
                body=f"{text}\n".encode(),
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )
        self._warn_of_loopback(targets)
        return Response(content_type="application/json", body=json.dumps(targets).encode() + b"\n")

    def _warn_of_loopback(self, targets: Targets) -> None:
        """Log each run of another host whose ranks serve on their loopback address."""
        for target in targets:
            labels = target["labels"]
            node = labels.get("node", "")
            if node and node != socket.gethostname() and _is_loopback(target["targets"][0]):
                self._log_once(
                    f"run {labels.get('run', '-')} on {node} serves on {target['targets'][0]}, "
                    "which only that host can reach; set ZEROWATCH_SERVE_HOST=0.0.0.0 in the job, "
                    "and ZEROWATCH_SERVE_ADVERTISE_HOST if Prometheus cannot resolve its host name"
                )

    def _on_failure(self, error: BaseException | None) -> None:
        self._log_once(f"a request could not be answered: {error or 'too many clients at once'}")

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)


def listen_address(text: str) -> tuple[str, int]:
    """Return the host and port of "HOST:PORT" or ":PORT", which means all IPv4 addresses.

    Raises:
        ValueError: The text is no such address.

    Examples:
        >>> listen_address(":9463")
        ('0.0.0.0', 9463)
    """
    found = _LISTEN.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:{DEFAULT_PORT}")
    return found["host"].strip("[]") or "0.0.0.0", int(found["port"])


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
