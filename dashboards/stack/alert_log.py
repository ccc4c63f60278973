"""Receives the webhook messages of Alertmanager and prints each alert as one line.

    python -m zerowatch.dashboards.stack.alert_log --port 9099 --runbook dashboards/runbook.md

It also serves the runbook, to which the alerts link.

It imports only the standard library, because compose runs this file in a plain Python image.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEFAULT_PORT = 9099
RUNBOOK_PATH = "/runbook"
COMPOSE_URL = f"http://alert-log:{DEFAULT_PORT}/"  # the address within the compose network
MAX_MESSAGE_BYTES = 8 * 2**20  # one message contains all alerts of a group
CLIENT_TIMEOUT_SECONDS = 10.0


def alert_line(alert: Mapping[str, Any]) -> str:
    """Return an alert as one line: time, status, severity, name, run, rank, node, texts, runbook.

    Args:
        alert: An element of the list `alerts` in a message. The format is documented at
            prometheus.io/docs/alerting/latest/configuration, webhook_config.
    """
    labels, notes = alert.get("labels", {}), alert.get("annotations", {})
    status = alert.get("status", "unknown")
    when = alert.get("endsAt" if status == "resolved" else "startsAt", "-")
    head = [
        _second(when),
        status.upper(),
        labels.get("severity", "-"),
        labels.get("alertname", "-"),
        *(f"{name}={labels[name]}" for name in ("run", "rank", "node") if name in labels),
    ]
    texts = [notes.get("summary"), notes.get("description")]
    if notes.get("runbook_url"):
        texts.append(f"Runbook: {notes['runbook_url']}")
    parts = [" ".join(head), *(text for text in texts if text)]
    # Replaces line breaks and repeated spaces by one space.
    return " | ".join(" ".join(printable(part).split()) for part in parts)


def parse_message(message: bytes) -> list[dict[str, Any]]:
    """Return the alerts of a message.

    Raises:
        ValueError: The message is not one of Alertmanager.
    """
    try:
        content = json.loads(message)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    alerts = content.get("alerts") if isinstance(content, dict) else None
    if not isinstance(alerts, list) or not all(isinstance(alert, dict) for alert in alerts):
        raise ValueError("there is no list `alerts`")
    for alert in alerts:
        for name in ("labels", "annotations"):
            if not _is_texts(alert.get(name, {})):
                raise ValueError(f"the {name} of an alert are not texts by name")
        for name in ("status", "startsAt", "endsAt"):
            if not isinstance(alert.get(name, ""), str):
                raise ValueError(f"{name} of an alert is no text")
    return alerts


def _is_texts(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(each, str) for each in values.values())


def _second(moment: str) -> str:
    """Return an RFC 3339 time in UTC without fractions of a second."""
    return moment[:19] + "Z" if len(moment) > 19 else moment


def printable(text: str) -> str:
    """Replace unprintable characters, so that a label cannot send control codes to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def runbook_page(markdown: str) -> str:
    """Return the runbook as an HTML page, whose headings are anchors.

    The text stays markdown. Links within the runbook can be followed.

    Args:
        markdown: The text of runbook.md.
    """
    text = html.escape(markdown, quote=False)
    text = re.sub(r"\[([^\]]+)\]\((#\w+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(
        r"^## (\w+)$",
        lambda found: f'<b id="{found[1].lower()}">{found[0]}</b>',
        text,
        flags=re.MULTILINE,
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>zerowatch runbook</title>'
        f'<pre style="max-width: 100ch; margin: auto; white-space: pre-wrap">{text}</pre>\n'
    )


class AlertLog(ThreadingHTTPServer):
    """An HTTP server: POST prints the alerts of a message, GET returns the number printed.

    GET of RUNBOOK_PATH returns the runbook. It listens as soon as it is created.

    Args:
        host: The address to listen on.
        port: The port; 0 takes any free port.
        runbook: The file runbook.md; None serves no runbook.

    Raises:
        OSError: The constructor cannot listen: the address is not of this machine, or taken.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, runbook: Path | None = None) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.address_family = family
        self.num_alerts = 0
        self.runbook = runbook
        super().__init__((host, port), _AlertHandler)

    def print_alerts(self, message: bytes) -> None:
        """Print the alerts of a message.

        Raises:
            ValueError: The message is not one of Alertmanager.
        """
        alerts = parse_message(message)
        self.num_alerts += len(alerts)
        # A single write, so that the lines of simultaneous messages do not mix.
        sys.stdout.write("".join(f"{alert_line(alert)}\n" for alert in alerts))
        sys.stdout.flush()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away; the output and the errors are for others."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _AlertHandler(BaseHTTPRequestHandler):
    server: AlertLog
    timeout = CLIENT_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        runbook = self.server.runbook
        if runbook is not None and self.path == RUNBOOK_PATH:
            page = runbook_page(runbook.read_text(encoding="utf-8"))
            self._answer(HTTPStatus.OK, page, content_type="text/html")
            return
        self._answer(HTTPStatus.OK, f"{self.server.num_alerts} alerts so far.\n")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        is_number = length.isdecimal() and len(length) <= len(str(MAX_MESSAGE_BYTES))
        if not is_number or int(length) > MAX_MESSAGE_BYTES:
            self._answer(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {MAX_MESSAGE_BYTES} bytes.\n"
            )
            return
        try:
            self.server.print_alerts(self.rfile.read(int(length)))
        except ValueError as error:  # json.JSONDecodeError is one
            self._answer(HTTPStatus.BAD_REQUEST, f"No message of Alertmanager's: {error}\n")
            return
        self._answer(HTTPStatus.OK, "")

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests, because the output is for alerts only."""

    def _answer(self, status: HTTPStatus, text: str, *, content_type: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Run the server until the process is terminated."""
    parser = argparse.ArgumentParser(
        prog="zerowatch.dashboards.stack.alert_log", description=__doc__
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--runbook", type=Path)
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # in place of an UnicodeEncodeError
    try:
        server = AlertLog(options.host, options.port, options.runbook)
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
