"""Serves the live page: the page itself, its stream of events, and older steps from the run log.

The page is one file without figures. It reads `live/events`, a stream of server-sent events, each
with the state of the run and the new points of its charts. All pages are for reading.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from ...metrics.catalog.communication import COMM_CAUSE_SECONDS
from ...metrics.catalog.training import RUN_ACTIVE, RUN_END_INFO
from ...metrics.exporters.http_connection import Request, Response
from ...metrics.recorder import Recorder
from ...metrics.settings import ServeSettings
from ...metrics.step_record import StepRecord
from ..common.gil_pauses import let_training_run
from .older_steps import sample_steps
from .run_state import Ranks, run_state
from .step_history import CAUSES, StepHistory, columns

# Time for which a state is sent again instead of computed. The metrics change once a second.
STATE_SECONDS = 0.5
# Figures of "the last minute" cover at least this many steps.
RECENT_SECONDS = 60.0
RECENT_STEPS = 10
# Steps that are read from the run log, and the time for which they are kept.
OLDER_STEPS = 600
OLDER_SECONDS = 60.0
# Digits of the number of a point; Python refuses to read numbers of thousands of digits.
MAX_DIGITS = 18

_ROOT = __package__.rpartition(".")[0]
# The parts of the page, by their place in page.html.
_PARTS = {
    "uPlot.min.css": ("reports", "assets/uPlot.min.css"),
    "page.css": ("live_page", "assets/page.css"),
    "uPlot.iife.min.js": ("reports", "assets/uPlot.iife.min.js"),
    "page.js": ("live_page", "assets/page.js"),
}


class LivePage:
    """The pages of one run. Steps are added on the watch thread, and pages read on the HTTP thread.

    Args:
        recorder: The metrics of rank 0.
        thresholds: Thresholds of alerts that the settings replace.
        run_id: Returns the id of the run, or None until it is known.
        folder: Returns the run folder, or None if there is none.
        targets: Returns the addresses of all ranks in Prometheus' http_sd format.
        read: Wraps the function that reads the run log on a thread of its own, so that it never
            raises.
        unix_now: A clock that returns Unix seconds.

    Attributes:
        figures: Returns the figures of each rank. Set once the ranks are compared.
        slow: Returns by rank the phases in which it is slow, with its score. Likewise.
    """

    def __init__(
        self,
        *,
        recorder: Recorder,
        thresholds: Mapping[str, float],
        run_id: Callable[[], str | None],
        folder: Callable[[], Path | None],
        targets: Callable[[], Sequence[Mapping[str, Any]]],
        read: Callable[[Callable[[], None]], Callable[[], object]],
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        self.figures: Callable[[], Mapping[int, Mapping[str, float]]] = dict
        self.slow: Callable[[], Mapping[int, Mapping[str, float]]] = dict
        self._recorder, self._thresholds = recorder, thresholds
        self._run_id, self._folder, self._targets = run_id, folder, targets
        self._unix_now = unix_now
        self._history = StepHistory(self._cause_seconds)
        self._state: tuple[float, object, bytes] = (0.0, None, b"")
        self._read = read(self._read_older)
        self._reader: threading.Thread | None = None
        self._older: tuple[float, bytes] | None = None

    @property
    def pages(self) -> Mapping[str, Callable[[Request], Response]]:
        """The pages by path, for the server of the metrics."""
        return {
            "/": lambda _: page(),
            "/live/events": self._events,
            "/live/state": self._poll,
            "/live/older": lambda _: self._older_steps(),
            "/live/runbook": _runbook,
        }

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Add steps to the history."""
        for record in records:
            self._history.add(record)
            let_training_run()

    def _events(self, request: Request) -> Response:
        if request.origin and request.origin.partition("://")[2] != request.host:
            return Response(
                content_type="text/plain",
                body=b"Another site may not use the streams of this run.\n",
                status=HTTPStatus.FORBIDDEN,
            )
        next_point: int | None = None

        def next_event() -> bytes:
            nonlocal next_point
            body, next_point = self._update(next_point)
            return b"data: " + body + b"\n\n"

        return Response(
            content_type="text/event-stream",
            body=b"retry: 3000\n\n" + next_event(),
            headers={"X-Accel-Buffering": "no"},  # nginx would collect the events
            next_event=next_event,
        )

    def _poll(self, request: Request) -> Response:
        """Answer with one event. For clients for which there is no free stream."""
        since = parse_qs(request.query).get("since", [""])[0]
        is_number = since.isdecimal() and len(since) <= MAX_DIGITS
        body, _ = self._update(int(since) if is_number else None)
        return _json(body)

    def _update(self, next_point: int | None) -> tuple[bytes, int]:
        """Return the state with the points from a number on, and the number of the next point."""
        number = self._history.num_closed
        new = None if next_point is None else self._history.since(next_point)
        points = {
            "reset": new is None,
            "next": number,
            **columns(self._history.points() if new is None else new),
        }
        body = b'{"state":' + self._state_json() + b',"points":' + orjson.dumps(points) + b"}"
        return body, number

    def _state_json(self) -> bytes:
        snapshot, now = self._recorder.snapshot(), self._unix_now()
        end = snapshot.values.get(RUN_ACTIVE), snapshot.values.get(RUN_END_INFO)
        made_at, last_end, body = self._state
        if end == last_end and 0 <= now - made_at < STATE_SECONDS:
            return body
        state = run_state(
            snapshot,
            recent=self._history.last_seconds(RECENT_SECONDS, RECENT_STEPS),
            ranks=self._ranks(),
            thresholds=self._thresholds,
            run_id=self._run_id(),
            now=now,
            nonfinite_at=self._history.nonfinite_at,
        )
        body = orjson.dumps(state)
        self._state = now, end, body
        return body

    def _ranks(self) -> Ranks:
        by_rank = {int(target["labels"]["rank"]): target for target in self._targets()}
        return Ranks(
            figures=self.figures(),
            slow=self.slow(),
            addresses={rank: target["targets"][0] for rank, target in by_rank.items()},
            nodes={rank: target["labels"]["node"] for rank, target in by_rank.items()},
        )

    def _cause_seconds(self) -> list[float]:
        with self._recorder.commit():
            return [self._recorder.value(COMM_CAUSE_SECONDS, cause) or 0.0 for cause in CAUSES]

    def _older_steps(self) -> Response:
        """Answer with steps from the run log, once a thread has read them.

        The disk of the run log may be slow, and a scrape must not wait for it.
        """
        reader = self._reader
        if reader is not None and reader.is_alive():
            return _json(b'{"status":"reading"}')
        if self._older is not None and 0 <= self._unix_now() - self._older[0] < OLDER_SECONDS:
            return _json(self._older[1])
        self._older = self._unix_now(), b'{"status":"failed"}'  # unless the thread succeeds
        self._reader = threading.Thread(target=self._read, name="zerowatch-older", daemon=True)
        self._reader.start()
        return _json(b'{"status":"reading"}')

    def _read_older(self) -> None:
        folder, points = self._folder(), self._history.points()
        before = points[0].started_at if points else self._unix_now()
        older = [] if folder is None else sample_steps(folder, 0, before, OLDER_STEPS)
        body = orjson.dumps({"status": "ready", **columns(older)})
        self._older = self._unix_now(), body


def page_url(address: str | None, settings: ServeSettings) -> str | None:
    """Return the URL of the live page, given rank 0's "host:port"; None if it is not served."""
    if address is None or not settings.live_page:
        return None
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{address}/"


def _json(body: bytes) -> Response:
    return Response(content_type="application/json", body=body)


def _runbook(request: Request) -> Response:
    """Answer with the section of the runbook on an alert, as it is written."""
    alert = parse_qs(request.query).get("alert", [""])[0]
    section = _sections().get(alert)
    status = HTTPStatus.NOT_FOUND if section is None else HTTPStatus.OK
    body = section or "The runbook has no section on this alert.\n"
    return Response(content_type="text/plain; charset=utf-8", body=body.encode(), status=status)


@cache
def _sections() -> Mapping[str, str]:
    """Return the sections of the runbook by alert."""
    file = resources.files(_ROOT.rpartition(".")[0]).joinpath("dashboards/runbook.md")
    sections = file.read_text("utf-8").split("\n## ")[1:]
    return {section.partition("\n")[0]: f"## {section}" for section in sections}


@cache
def page() -> Response:
    """Return the page. It has no figures of a run."""
    html = _asset("live_page", "assets/page.html")
    hashes: dict[str, list[str]] = {"css": [], "js": []}
    for name, place in _PARTS.items():
        content = _asset(*place)
        html = html.replace(f"@{name}@", content)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[name.rpartition(".")[2]].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["js"]),
        "style-src": " ".join(hashes["css"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'self'",
    }
    return Response(
        content_type="text/html; charset=utf-8",
        body=html.encode(),
        headers={
            "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
            "Referrer-Policy": "no-referrer",
        },
    )


def _asset(package: str, path: str) -> str:
    return resources.files(f"{_ROOT}.{package}").joinpath(path).read_text("utf-8")
