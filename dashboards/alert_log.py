"""Receives Alertmanager's messages and prints each alert as one line.

    python -m zerowatch.dashboards.alert_log --port 9099

It imports nothing but the standard library: compose runs this very file in a plain Python image.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEFAULT_PORT = 9099
COMPOSE_URL = f"http://alert-log:{DEFAULT_PORT}/"  # where compose's Alertmanager finds it
MOST_BYTES = 8 * 2**20  # of one message; Alertmanager puts a group's alerts together
CLIENT_TIMEOUT_SECONDS = 10.0


def alert_line(alert: Mapping[str, Any]) -> str:
    """Write an alert as one line: when, FIRING or RESOLVED, how bad, which, where, what, what now.

    Args:
        alert: One of `alerts` in a message. Source: prometheus.io/docs/alerting/latest/
            configuration, webhook_config.
    """
    labels, notes = alert.get("labels", {}), alert.get("annotations", {})
    status = str(alert.get("status", "unknown"))
    when = alert.get("endsAt" if status == "resolved" else "startsAt", "-")
    head = [
        _second(str(when)),
        status.upper(),
        labels.get("severity", "-"),
        labels.get("alertname", "-"),
        *(f"{name}={labels[name]}" for name in ("run", "rank") if name in labels),
    ]
    texts = [notes.get("summary"), notes.get("description")]
    if "runbook_url" in notes:
        texts.append(f"Runbook: {notes['runbook_url']}")
    parts = [" ".join(head), *(text for text in texts if text)]
    # Spaces in a row become one, and so do the ends of lines.
    return " | ".join(" ".join(_printable(part).split()) for part in parts)


def _second(moment: str) -> str:
    """Cut what is finer than a second off an RFC 3339 time in UTC."""
    return moment[:19] + "Z" if len(moment) > 19 else moment


def _printable(text: str) -> str:
    """Replace what could move a terminal's cursor: labels are anybody's text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class AlertLog(ThreadingHTTPServer):
    """The server; it listens from its creation on. POST takes a message, GET returns their number.

    Raises:
        OSError: On creation: the address is not of this machine, or taken.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.address_family = family
        self.num_alerts = 0
        super().__init__((host, port), _Handler)

    def take(self, message: bytes) -> None:
        """Print the alerts of a message.

        Raises:
            ValueError: This is no message of Alertmanager's.
        """
        content = json.loads(message)
        alerts = content.get("alerts") if isinstance(content, dict) else None
        if not isinstance(alerts, list) or not all(isinstance(alert, dict) for alert in alerts):
            raise ValueError("there is no list `alerts`")
        self.num_alerts += len(alerts)
        # One write, so that messages that come together do not mix.
        sys.stdout.write("".join(f"{alert_line(alert)}\n" for alert in alerts))
        sys.stdout.flush()


class _Handler(BaseHTTPRequestHandler):
    server: AlertLog
    timeout = CLIENT_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        self._answer(HTTPStatus.OK, f"{self.server.num_alerts} alerts so far.\n")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {MOST_BYTES} bytes.\n")
            return
        try:
            self.server.take(self.rfile.read(int(length)))
        except ValueError as error:  # json.JSONDecodeError is one
            self._answer(HTTPStatus.BAD_REQUEST, f"No message of Alertmanager's: {error}\n")
            return
        self._answer(HTTPStatus.OK, "")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests: the output is for alerts."""

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="zerowatch.dashboards.alert_log", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    options = parser.parse_args()
    try:
        server = AlertLog(options.host, options.port)
    except OSError as error:
        parser.exit(1, f"alert_log: cannot listen on {options.host}:{options.port}: {error}\n")
    sys.stdout.write("alerts are shown here, one a line\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
