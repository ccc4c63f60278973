"""Serves one rank's metrics over HTTP, and on rank 0 the addresses of all ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs

from ...errors import SettingsError
from ..catalog.overhead import (
    EXPORTER_FAILURES,
    WATCH_LAST_UPDATE_TIMESTAMP,
    WATCH_SECONDS,
)
from ..catalog.training import RUN_ACTIVE
from ..recorder import Recorder
from ..settings import ServeSettings
from .client_auth import ClientAuth
from .detail import served
from .host_check import HostCheck, machine_names
from .http_connection import Request, RequestHandler, Response
from .listener import Listener, advertised_address, listen
from .prometheus import RenderedFamilies, content_type_for, exposition, is_openmetrics
from .scrape_tracker import ScrapeTracker

logger = logging.getLogger(__name__)

# The page for readiness probes. It needs no authorization, and shows no figures of the run.
HEALTH_PATH = "/healthz"
# Pages for programs. Programs may use any name of this machine, such as one of a name server, so
# the header Host is checked for browsers only.
_FOR_PROGRAMS = ("/metrics", "/targets", HEALTH_PATH)
# Minimum time between two renderings of the same format. The metrics change once a second.
RENDER_SECONDS = 0.5
# Longest wait for the serving thread to end. It usually ends at once.
STOP_SECONDS = 5.0
# Age of the last update of the metrics from which /healthz answers 503. The usual age is a second.
STALE_SECONDS = 30.0
# Longest wait for the last scrape after Ctrl-C, or after a fault of a GPU. torchrun kills the ranks
# 30 s after Ctrl-C.
INTERRUPTED_SECONDS = 25.0
# Time after which a process that waits for the last scrape logs this. Shorter waits are usual.
QUIET_SECONDS = 3.0


# The servers of ended runs of this process, which wait for their final scrape. A later run takes
# over their ports, and answers for them: Prometheus looks for each run at the same port.
_lingering: list[MetricsServer] = []


class ServingThread(Protocol):
    """A thread that runs its function again if the function raises."""

    def start(self) -> None:
        """Start the thread; raise RuntimeError if the system allows no more threads."""

    def join(self, timeout_seconds: float) -> bool:
        """Wait until the thread has ended. The caller has already asked the thread to end."""


class MetricsServer:
    """The HTTP server of one rank. It never raises into training. A failure is logged once.

    Args:
        recorder: The metrics to serve.
        rank: The global rank. Every series has it as a label.
        local_rank: The rank on this node. The server adds it to the port.
        settings: Address, port and TLS of the server.
        targets: Returns the addresses of all ranks in Prometheus' http_sd format. None on ranks
            other than 0.
        make_thread: Returns the serving thread, given its name and function. The thread has not
            started.
        now: A monotonic clock, in seconds.
        unix_now: A clock that returns Unix seconds.
        is_watch_dead: Returns whether the thread that updates the metrics has ended.
        serves_run: Returns whether this rank belongs to the run with the given id. A scrape of
            another run (`/metrics?run=<id>`) is refused, because a later run may serve at the
            address of an earlier run.
        pages: More pages, by path. A page `/` replaces the list of pages. It must not show figures
            of the run: it is also the body of a response to a browser without authorization.
        refusal: Returns why scrapes are not answered now, or None. They get status 503.
        let_training_run: Called between two pieces of work, so that training can run Python.
    """

    def __init__(
        self,
        *,
        recorder: Recorder,
        rank: int,
        local_rank: int,
        settings: ServeSettings,
        targets: Callable[[], list[dict[str, Any]]] | None,
        make_thread: Callable[[str, Callable[[], object]], ServingThread],
        now: Callable[[], float] = time.monotonic,
        unix_now: Callable[[], float] = time.time,
        is_watch_dead: Callable[[], bool] = lambda: False,
        serves_run: Callable[[str], bool] = lambda _: True,
        pages: Mapping[str, Callable[[Request], Response]] | None = None,
        refusal: Callable[[], str | None] = lambda: None,
        let_training_run: Callable[[], object] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._rank = rank
        self._local_rank = local_rank
        self._settings = settings
        self._serves_run = serves_run
        self._routes: dict[str, Callable[[Request], Response]] = {
            "/": self._index,
            "/metrics": self._metrics,
            HEALTH_PATH: lambda _: self._health(),
        }
        if targets is not None:
            self._routes["/targets"] = lambda _: _json(self._all_targets())
        self._front_page = None if pages is None else pages.get("/")
        self._routes |= pages or {}
        self._hosts: HostCheck | None = None
        self._targets = targets
        self._scrapes = ScrapeTracker(now)
        self._now, self._unix_now = now, unix_now
        self._is_watch_dead, self._refusal = is_watch_dead, refusal
        self._created_at = unix_now()
        self._auth: ClientAuth | None = None
        # The last texts by format. Another thread may replace the dictionary.
        self._rendered: dict[bool, _Rendering] = {}
        self._families = RenderedFamilies()
        self._let_training_run = let_training_run
        self._make_thread = make_thread
        self._listener: Listener | None = None
        self._thread: ServingThread | None = None
        self._process_id = os.getpid()
        self._closing = threading.RLock()  # a signal handler may close, too
        self._logged_failures: set[type] = set()

    def start(self) -> str | None:
        """Start serving on a thread of its own.

        Returns:
            "host:port" at which other machines reach the server, or None if serving is off.
        """
        if not self._settings.enabled:
            return None
        site = RequestHandler(
            answer=self._answer, failed=self._on_failure, spent=self._on_cpu_spent
        )
        advertised = self._settings.advertise_host
        self._hosts = HostCheck(
            (*machine_names(), *([advertised] if advertised else ())), self._settings.allowed_hosts
        )
        try:
            self._auth = ClientAuth(self._settings)
            listener = listen(self._settings, self._local_rank, site, self._vacate)
        except SettingsError as error:
            logger.error("rank %d serves no metrics, training continues: %s", self._rank, error)
            return None
        try:
            self._thread = self._make_thread("http", listener.serve)
            self._thread.start()
        except RuntimeError as error:  # the limit of threads or of memory
            listener.server_close()
            logger.error("rank %d serves no metrics, training continues: %s", self._rank, error)
            return None
        self._recorder.start_counters((EXPORTER_FAILURES,), exporter=("prometheus",))
        self._listener, self._process_id = listener, os.getpid()
        self._warn_if_public(listener)
        return advertised_address(listener, self._settings.advertise_host)

    @property
    def is_listening(self) -> bool:
        """Whether clients are served now: not while `serve.strict_port` waits for its port."""
        listener = self._listener
        return listener is not None and listener.is_listening

    def wait_for_final_scrape(self, *, interrupted: bool = False, announces: bool = True) -> None:
        """Wait until the regular scrapers have read that run_active is 0.

        The caller has set run_active to 0. If the server closed before Prometheus had read this
        value, Prometheus would report the rank as down.

        Args:
            interrupted: Whether Ctrl-C has ended the run. The wait is then shorter, because a user
                waits for the process.
            announces: Whether rank 0 logs a long wait: the end of the process waits for it, too.
        """
        is_served = self._listener is not None or self in _lingering
        if is_served and self._recorder.snapshot().value(RUN_ACTIVE) == 0:
            self._rendered = {}  # the next scrape renders run_active 0
            # Rank 0 serves the addresses of all ranks. If rank 0 ended first, Prometheus would stop
            # scraping the other ranks.
            on_all_ranks = self._targets is not None and len(self._targets()) > 1
            wait = partial(self._scrapes.wait_until_end_was_read, on_all_ranks=on_all_ranks)
            seconds = self._settings.linger_seconds
            quiet_seconds = QUIET_SECONDS if announces else math.inf
            if interrupted:
                seconds, quiet_seconds = min(seconds, INTERRUPTED_SECONDS), 0.0
            left = wait(seconds, returns_after=quiet_seconds)
            if left > 0:
                self._announce_wait(left)
                wait(left)

    def wait_for_next_scrape(self) -> None:
        """Wait until the regular scrapers have read the metrics of now, for 25 s at most.

        A later call waits for the same scrapes as the first.
        """
        if self._listener is not None:
            self._rendered = {}
            seconds = min(self._settings.linger_seconds, INTERRUPTED_SECONDS)
            self._scrapes.wait_until_read(seconds)

    def close_after_final_scrape(self, before_close: Callable[[], object] = lambda: None) -> None:
        """Start a thread that waits for the final scrape and then closes the server.

        If a later run of this process needs the port meanwhile, its server answers in place of this
        one. If no thread can be started, the server closes at once.

        Args:
            before_close: Called after the final scrape, before the server closes.
        """

        def linger() -> None:
            self.wait_for_final_scrape(announces=False)  # the script goes on
            before_close()
            self.close()

        if self._listener is not None:
            _lingering.append(self)
        thread = threading.Thread(target=linger, name="zerowatch-linger", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads or of memory
            logger.warning("rank %d does not wait for a final scrape: %s", self._rank, error)
            before_close()
            self.close()

    def close(self) -> None:
        """Stop serving at once, and end the waits for scrapes.

        Safe to call twice, and in a forked child.
        """
        self._stop_listening()
        if os.getpid() == self._process_id:  # else a thread of the parent may have had the lock
            self._scrapes.close()
        with contextlib.suppress(ValueError):
            _lingering.remove(self)

    def _stop_listening(self) -> None:
        # A forked child has the socket but no serving thread. Joining the thread would never end.
        if os.getpid() != self._process_id:
            if self._listener is not None:
                self._listener.server_close()
                self._listener = None
            return
        with self._closing:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            listener.stop()
            if self._thread is not None:
                self._thread.join(STOP_SECONDS)
            listener.server_close()

    def _vacate(self, port: int) -> list[int]:
        """Free a port that an earlier run of this process still has, for its final scrape.

        Returns:
            The other ports of that run, which are free now, too. It may be advertised at one.
        """
        for earlier in _earlier_runs():
            with earlier._closing:
                listener = earlier._listener
                is_same_host = earlier._settings.host == self._settings.host
                if listener is not None and is_same_host and port in listener.ports:
                    others = [each for each in listener.ports if each != port]
                    earlier._stop_listening()
                    return others
        return []

    def _announce_wait(self, seconds: float) -> None:
        if self._rank == 0:
            # A second Ctrl-C of torchrun ends the ranks by SIGTERM, before they can tidy up.
            has_agent = "TORCHELASTIC_RUN_ID" in os.environ
            logger.warning(
                "waiting at most %d s until Prometheus has read that the run is over%s",
                math.ceil(seconds),
                "" if has_agent else "; Ctrl-C ends that at once",
            )

    def _warn_if_public(self, listener: Listener) -> None:
        host = str(listener.server_address[0])
        is_open = not listener.is_secured and not ipaddress.ip_address(host).is_loopback
        if is_open and self._rank == 0:  # all ranks have the same settings
            authorized = self._auth is not None and self._auth.is_required
            logger.warning(
                "metrics are served on %s without TLS, %s; set serve.tls_certificate and "
                "serve.tls_key, or bind serve.host to an address that only Prometheus reaches",
                host,
                "so secrets of clients are readable on the network"
                if authorized
                else "to everybody who can reach it",
            )

    def _answer(self, request: Request) -> Response:
        if not self._is_from_here(request):
            return _foreign(request)
        auth = None if request.path == HEALTH_PATH else self._auth
        if auth is not None and not auth.admits(request.authorization):
            return self._unauthorized(auth.challenge, request)
        servers = [self]
        for run in parse_qs(request.query).get("run", ()):
            servers = [each for each in (self, *self._vacated()) if each._serves_run(run)]
            if not servers:
                return _not_this_run(run)
        route = servers[0]._routes.get(request.path)
        return route(request) if route else servers[0]._not_found()

    def _vacated(self) -> list[MetricsServer]:
        """Return the servers of earlier runs for which this one answers."""
        return [each for each in _earlier_runs() if each._listener is None and each is not self]

    def _all_targets(self) -> list[dict[str, Any]]:
        servers = (self, *self._vacated())
        return [one for each in servers if each._targets is not None for one in each._targets()]

    def _is_from_here(self, request: Request) -> bool:
        """Whether a request is not from a page of a foreign site (`host_check.py`)."""
        if request.path in _FOR_PROGRAMS and not request.is_browser:
            return True
        return self._hosts is None or self._hosts.admits(request.host)

    def _unauthorized(self, challenge: str, request: Request) -> Response:
        if request.path == "/" and self._front_page is not None:
            page = self._front_page(request)
        else:
            page = _text(
                "Authorization is required: serve.auth_token_file or serve.basic_auth_file is "
                "set.\n"
            )
        headers = {**page.headers, "WWW-Authenticate": challenge}
        return replace(page, status=HTTPStatus.UNAUTHORIZED, headers=headers)

    def _health(self) -> Response:
        """Return status 503 with the reason if the metrics are no longer updated."""
        snapshot = self._recorder.snapshot()
        if snapshot.value(RUN_ACTIVE) == 0:
            return _text("ok, the run has ended\n")
        updated_at = snapshot.value(WATCH_LAST_UPDATE_TIMESTAMP) or self._created_at
        age_seconds = self._unix_now() - updated_at
        if self._is_watch_dead():
            fault = "the watch thread has ended"
        elif age_seconds > STALE_SECONDS:
            fault = f"the last update of the metrics was {age_seconds:.0f} s ago"
        else:
            return _text("ok\n")
        return _text(
            f"{fault}: the metrics of rank {self._rank} no longer change. Training goes on; the "
            "log of the rank has the reason.\n",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )

    def _metrics(self, request: Request) -> Response:
        refusal = self._refusal()
        if refusal is not None:
            return _text(f"{refusal}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        rendering = self._render(request.accept)
        return Response(
            content_type=content_type_for(request.accept),
            body=rendering.body,
            sent=lambda client: self._scrapes.note(
                client,
                run_active=rendering.run_active,
                timeout_seconds=request.scrape_timeout_seconds,
            ),
        )

    def _render(self, accept: str) -> _Rendering:
        """Return the metrics as text. Return the last text in the same format if it is recent.

        Clients may send requests as often as they like.
        """
        rendered, openmetrics = self._rendered, is_openmetrics(content_type_for(accept))
        last = rendered.get(openmetrics)
        if last is not None and self._now() - last.at_seconds < RENDER_SECONDS:
            return last
        snapshot = self._recorder.snapshot()
        self._let_training_run()
        _, body = exposition(
            served(snapshot, self._settings.detail),
            self._rank,
            accept,
            with_process=self._settings.detail == "full",
            rendered=self._families,
            between_families=self._let_training_run,
        )
        rendering = rendered[openmetrics] = _Rendering(
            body=body,
            run_active=snapshot.value(RUN_ACTIVE),
            at_seconds=self._now(),
        )
        return rendering

    def _index(self, _: Request) -> Response:
        links = "".join(f'<p><a href="{path}">{path}</a></p>' for path in self._routes)
        page = f"<!doctype html><title>zerowatch</title><p>zerowatch, rank {self._rank}</p>{links}"
        return Response(content_type="text/html; charset=utf-8", body=page.encode())

    def _not_found(self) -> Response:
        line = f"No such page. Rank {self._rank} serves {' '.join(self._routes)}"
        line += ".\n" if "/targets" in self._routes else "; /targets is on rank 0.\n"
        return _text(line, HTTPStatus.NOT_FOUND)

    def _on_failure(self, error: BaseException | None) -> None:
        self._recorder.add(EXPORTER_FAILURES, 1, "prometheus")
        if type(error) in self._logged_failures:
            return
        self._logged_failures.add(type(error))
        logger.error(
            "rank %d could not answer a scrape: %s; further failures are only counted, in %s",
            self._rank,
            error or "too many clients at once",
            EXPORTER_FAILURES.name,
            exc_info=error,
        )

    def _on_cpu_spent(self, seconds: float) -> None:
        self._recorder.add(WATCH_SECONDS, seconds, "http_thread")


def _earlier_runs() -> list[MetricsServer]:
    """Return the servers that wait for their final scrape. Those of a parent are not ours."""
    return [each for each in _lingering if each._process_id == os.getpid()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendering:
    """All metrics as text, the value of run_active in the text, and the time of rendering."""

    body: bytes
    run_active: float | None
    at_seconds: float


def _not_this_run(run: str) -> Response:
    return _text(f"Run {run} is not served here; another one is.\n", HTTPStatus.NOT_FOUND)


def _foreign(request: Request) -> Response:
    return _text(
        f"The host {request.host!r} is no name of this machine. If it is the right one, such as "
        "that of a proxy, add it to the setting serve.allowed_hosts of the run.\n",
        HTTPStatus.FORBIDDEN,
    )


def _text(text: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(content_type="text/plain", body=text.encode(), status=status)


def _json(value: object) -> Response:
    return Response(content_type="application/json", body=json.dumps(value).encode() + b"\n")
