"""Tests of the alert log: the printed lines, and the HTTP server that receives the messages."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.scraper import eventually
from package_tree import ROOT
from servers.free_port import free_port

from zerowatch.dashboards.stack.alert_log import alert_line, runbook_page

RUNBOOK = ROOT / "dashboards" / "runbook.md"

FIRING = {
    "status": "firing",
    "labels": {
        "alertname": "ZerowatchRankVanished",
        "severity": "critical",
        "run": "night-7",
        "rank": "1",
    },
    "annotations": {
        "summary": "Rank 1 does not answer",
        "description": "It was training.\nSee its log.",
        "runbook_url": "https://example.org/runbook.md#zerowatchrankdown",
    },
    "startsAt": "2026-11-21T21:43:45.123456789Z",
    "endsAt": "0001-01-01T00:00:00Z",
}
RESOLVED = FIRING | {"status": "resolved", "endsAt": "2026-11-21T21:50:00Z"}


class Log:
    """The alert log in a process of its own, started by its file as compose does."""

    def __init__(self, output: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}/"
        self._output = output
        file = str(ROOT / "dashboards" / "stack" / "alert_log.py")
        self._errors = output.with_suffix(".errors")
        with output.open("w") as written, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, file, "--port", str(port), "--runbook", str(RUNBOOK)],
                stdout=written,
                stderr=errors,
            )
        assert eventually(self.answers, pause=0.05)

    def answers(self) -> bool:
        try:
            return "alerts so far" in self.get()
        except OSError:
            return False

    def get(self, path: str = "") -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return str(response.read().decode())

    def post(self, body: bytes) -> int:
        try:
            with urllib.request.urlopen(self.url, data=body, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def lines(self) -> list[str]:
        return self._output.read_text().splitlines()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    running = Log(tmp_path / "alerts")
    yield running
    running.close()


def message(*alerts: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "status": "firing", "alerts": list(alerts)}).encode()


def test_a_line_has_time_severity_name_rank_texts_and_runbook() -> None:
    assert alert_line(FIRING) == (
        "2026-11-21T21:43:45Z FIRING critical ZerowatchRankVanished run=night-7 rank=1"
        " | Rank 1 does not answer | It was training. See its log."
        " | Runbook: https://example.org/runbook.md#zerowatchrankdown"
    )


def test_a_resolved_alert_is_printed_with_its_end_time() -> None:
    assert alert_line(RESOLVED).startswith("2026-11-21T21:50:00Z RESOLVED critical Zerowatch")


def test_an_alert_without_zerowatch_labels_is_printed() -> None:
    assert alert_line({"status": "firing", "labels": {"alertname": "Watchdog"}}) == (
        "- FIRING - Watchdog"
    )


def test_control_characters_in_a_label_are_removed() -> None:
    line = alert_line(FIRING | {"labels": {"alertname": "\x1b[2JGone"}})

    assert "\x1b" not in line


def test_each_alert_of_a_message_is_printed_on_its_own_line(log: Log) -> None:
    code = log.post(message(FIRING, RESOLVED))

    assert code == 200
    assert [line.split()[1] for line in log.lines[1:]] == ["FIRING", "RESOLVED"]
    assert log.get() == "2 alerts so far.\n"


def test_an_invalid_message_is_rejected_and_not_printed(log: Log) -> None:
    bodies = {
        "empty": b"",
        "no JSON": b"no json",
        "no UTF-8": b'{"alerts": [{"labels": {"alertname": "\xff"}}]}',
        "nested too deep": b'{"alerts": ' + 100_000 * b"[",
        "a list": b"[]",
        "no list of alerts": b'{"alerts": {}}',
        "an alert that is a number": b'{"alerts": [1]}',
        "labels that are a list": message(FIRING, FIRING | {"labels": [1]}),
        "labels that are null": message(FIRING | {"labels": None}),
        "annotations that are a text": message(FIRING | {"annotations": "x"}),
        "a label that is a number": message(FIRING | {"labels": {"alertname": 5}}),
        "an annotation that is a list": message(FIRING | {"annotations": {"summary": ["x"]}}),
        "a time that is a number": message(FIRING | {"startsAt": 5}),
        "a status that is a list": message(FIRING | {"status": []}),
    }

    codes = {name: log.post(body) for name, body in bodies.items()}

    assert codes == dict.fromkeys(bodies, 400)
    assert len(log.lines) == 1
    assert log.get() == "0 alerts so far.\n"
    assert log.errors == ""


@pytest.mark.parametrize("length", ["-1", "1.5", "x", "9" * 5000])
def test_an_impossible_length_is_rejected(log: Log, length: str) -> None:
    host, port = log.url.removeprefix("http://").rstrip("/").split(":")

    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(f"POST / HTTP/1.0\r\nContent-Length: {length}\r\n\r\n".encode())
        answer = client.recv(12)

    assert answer in (b"HTTP/1.0 400", b"HTTP/1.0 413")
    assert log.errors == ""


def test_a_client_that_disconnects_causes_no_traceback(log: Log) -> None:
    host, port = log.url.removeprefix("http://").rstrip("/").split(":")
    reset_on_close = b"\x01\x00\x00\x00\x00\x00\x00\x00"

    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
            client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 100\r\n\r\n{")

    assert log.post(message(FIRING)) == 200
    assert log.errors == ""


def test_a_text_that_the_output_cannot_encode_is_escaped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    log = Log(tmp_path / "alerts")

    code = log.post(message(FIRING | {"annotations": {"summary": "50 \u00b5s"}}))
    log.close()

    assert code == 200
    assert "50 \\xb5s" in log.lines[1]


def test_a_port_in_use_is_reported_in_one_line(log: Log) -> None:
    port = log.url.rstrip("/").rpartition(":")[2]

    second = subprocess.run(
        [sys.executable, "-m", "zerowatch.dashboards.stack.alert_log", "--port", port],
        capture_output=True,
        text=True,
    )

    assert second.returncode == 1
    assert second.stderr.startswith(f"alert_log: cannot listen on 127.0.0.1:{port}: ")
    assert len(second.stderr.splitlines()) == 1


def test_the_runbook_is_a_page_with_an_anchor_for_each_alert(log: Log) -> None:
    page = log.get("runbook")

    anchors = set(re.findall(r'<b id="(\w+)">## Zerowatch', page))
    assert anchors == {
        line.removeprefix("## ").lower()
        for line in RUNBOOK.read_text().splitlines()
        if line.startswith("## ")
    }
    assert 'href="#zerowatchlinkslow"' in page


def test_markup_in_the_runbook_is_shown_as_text() -> None:
    page = runbook_page("a <b> & `c > 1`\n")

    assert "a &lt;b&gt; &amp; `c &gt; 1`" in page
