"""Finds the run that the terminal shows: at an address of targets, or in a run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

import orjson

from ...errors import CommandLineError
from ...metrics.atomic_file import regular_file_status
from .http_client import Get, NoAnswerError
from .live_run import LiveRun, Target
from .prometheus_alerts import prometheus_alerts
from .recorded_run import RecordedRun, last_write
from .run_view import RunView

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
# Runs whose id is not set begin with the time of their start.
_BEGINS_WITH_TIME = re.compile(r"\d{8}T\d{6}-")
_RUN_FILES = ("settings.json", "attempts.jsonl", "rank-0.jsonl")
_OTHERS = ", or the address of rank 0 such as http://node-0:9464/targets"


class RunSource(Protocol):
    """A run that can be read again and again."""

    def read(self) -> RunView:
        """Return the run at this moment.

        Raises:
            NoAnswerError: Nothing is known about it, because nothing answers.
            RunFolderError: The folder holds no run.
        """


class ServedRun:
    """A run whose targets are served: by its rank 0, or by `zerowatch targets`.

    Args:
        url: The address of the targets.
        get: Returns a page; raises NoAnswerError.
        run_id: The run, if the targets are those of several; by default the one that is listed
            with the greatest id, which is the newest if ids begin with a time. Without it, a later
            run is shown once the run is not listed anymore: one that was not listed yet when the
            run was first listed or, if both ids begin with a time, one with a greater id.
    """

    def __init__(self, url: str, get: Get, run_id: str | None = None) -> None:
        self._url, self._get, self._run_id = url, get, run_id
        self._is_given = run_id is not None
        self._scheme = urlsplit(url).scheme
        self._targets: list[Target] = []
        self._num_listings = 0
        self._first_listed: dict[str, int] = {}  # the number of the listing, by run
        self._run: LiveRun | None = None

    def read(self) -> RunView:
        """Return the run at this moment.

        Raises:
            CommandLineError: The run is not listed.
            NoAnswerError: Nothing is known about it, because nothing answers.
        """
        notes = []
        try:
            by_run = targets_by_run(_json(self._get(self._url).body), self._scheme)
            run_id = self._chosen(by_run)
            if run_id is not None:
                if run_id != self._run_id:
                    self._run = None
                self._run_id, self._targets = run_id, by_run[run_id]
            if len(by_run) > 1:
                others = ", ".join(sorted(set(by_run) - {self._run_id or ""}))
                notes.append(f"other runs, for --run: {others}")
        except NoAnswerError as error:
            notes.append(f"{self._url}: {error}")
        if self._run_id is None or not self._targets:
            raise NoAnswerError(notes[0] if notes else f"{self._url} lists no ranks")
        if self._run is None:
            self._run = LiveRun(self._run_id, self._url, self._get)
        if self._run.has_ended:
            notes = []  # nothing is served anymore
        return self._run.read(self._targets, notes)

    def _chosen(self, by_run: dict[str, list[Target]]) -> str | None:
        """Return the run to show; None if it is not listed anymore and no other one replaces it."""
        self._num_listings += 1
        for run in by_run:
            self._first_listed.setdefault(run, self._num_listings)
        if self._run_id in by_run:
            return self._run_id
        if not self._is_given:
            later = (run for run in by_run if self._run_id is None or self._is_later(run))
            return max(later, default=None, key=lambda run: (self._first_listed[run], run))
        if not self._targets and by_run:
            raise CommandLineError(
                f"no run {self._run_id} at {self._url}; it lists {', '.join(sorted(by_run))}"
            )
        return None

    def _is_later(self, run: str) -> bool:
        """Return whether a run has started after the one that is shown."""
        shown = self._run_id or ""
        if _BEGINS_WITH_TIME.match(run) and _BEGINS_WITH_TIME.match(shown):
            return run > shown
        return self._first_listed[run] > self._first_listed[shown]


class RunFolder:
    """A run folder. While ranks of the run answer, they are scraped; else the logs are read.

    Args:
        folder: The run folder.
        get: Returns a page; raises NoAnswerError.
    """

    def __init__(self, folder: Path, get: Get) -> None:
        self._folder, self._get = folder, get
        self._live: LiveRun | None = None
        self._recorded = RecordedRun(folder)

    def read(self) -> RunView:
        """Return the run at this moment.

        Raises:
            RunFolderError: The folder holds no run.
        """
        targets = self._targets()
        if not targets:
            return self._recorded.read()
        if self._live is None:
            self._live = LiveRun(targets[0][0], str(self._folder), self._get)
        view = self._live.read([target for _, target in targets])
        if self._live.answers:
            return view
        recorded = self._recorded.read()
        reason = next((rank.note for rank in view.ranks if rank.note), "")
        note = f"no rank answers from this machine ({reason}): these are the logs"
        return replace(recorded, notes=[note, *recorded.notes])

    def _targets(self) -> list[tuple[str, Target]]:
        """Return the listed ranks with the id of their run; none of a run that has ended."""
        path = self._folder / "targets.json"
        try:
            regular_file_status(path)
            by_run = targets_by_run(_json(path.read_bytes()), self._scheme())
        except (OSError, NoAnswerError):
            return []
        return [(run, target) for run, targets in by_run.items() for target in targets]

    def _scheme(self) -> str:
        path = self._folder / "settings.json"
        try:
            regular_file_status(path)
            serve = orjson.loads(path.read_bytes())["serve"]
            return "https" if serve["tls_certificate"] else "http"
        except (OSError, ValueError, KeyError, TypeError):
            return "http"


class WithAlerts:
    """A run with its alerts from Prometheus; with the ranks' own signals if it does not answer.

    Args:
        run: The run.
        prometheus: The address of Prometheus.
        get: Returns a page; raises NoAnswerError.
    """

    def __init__(self, run: RunSource, prometheus: str, get: Get) -> None:
        self._run, self._prometheus, self._get = run, prometheus, get

    def read(self) -> RunView:
        """Return the run at this moment; see `RunSource`."""
        view = self._run.read()
        if not view.is_live:
            return view  # Prometheus has the alerts of now
        try:
            alerts = prometheus_alerts(self._get, self._prometheus, view.run_id)
        except NoAnswerError as error:
            note = f"Prometheus at {self._prometheus}: {error}"
            return replace(view, notes=[note, *view.notes])
        return replace(view, alerts=alerts, alerts_source="Prometheus")


def open_source(
    argument: str | None, *, runs: Path, get: Get, run_id: str | None = None
) -> RunSource:
    """Return the run that a command line names.

    Args:
        argument: An address, a folder, or None for the newest run.
        runs: The folder of run folders.
        get: Returns a page; raises NoAnswerError.
        run_id: The run, if an address lists several.

    Raises:
        CommandLineError: There is no such run.
    """
    if argument is None:
        return RunFolder(newest_run(runs, others=_OTHERS), get)
    if os.path.isdir(argument):
        folder = Path(argument)
        return RunFolder(folder if _is_run(folder) else newest_run(folder, others=_OTHERS), get)
    url = targets_url(argument)
    if url is None:
        raise CommandLineError(
            f"{argument} is no folder and no address; give a run folder such as runs/<run_id>, or "
            "the address of rank 0 such as http://node-0:9464/targets"
        )
    return ServedRun(url, get, run_id)


def targets_url(argument: str) -> str | None:
    """Return the address of targets that a user has given, completed; None if it is none.

    Examples:
        >>> targets_url("node-0:9464")
        'http://node-0:9464/targets'
    """
    text = f"http://{argument}" if _HOST_AND_PORT.fullmatch(argument) else argument
    try:
        parts = urlsplit(text)
    except ValueError:  # half an IPv6 address
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/targets"


def newest_run(runs: Path, *, others: str = "") -> Path:
    """Return the run folder to which rank 0 wrote last.

    Args:
        runs: The folder of run folders.
        others: What the user may give instead of a run folder, for the error.

    Raises:
        CommandLineError: There is none.
    """
    try:
        found = [folder for folder in runs.iterdir() if _is_run(folder)]
    except OSError:
        found = []
    if not found:
        raise CommandLineError(f"no run below {runs}; give a run folder{others}")
    return max(found, key=last_write)


def _is_run(folder: Path) -> bool:
    # Unlike `Path.is_file`, this is False where a folder of another user may not be searched.
    return any(os.path.isfile(folder / name) for name in _RUN_FILES)


def targets_by_run(content: object, scheme: str) -> dict[str, list[Target]]:
    """Return the ranks in Prometheus' http_sd format by run.

    Raises:
        NoAnswerError: The content is not of this format.
    """
    found: dict[str, list[Target]] = {}
    try:
        for group in _groups(content):
            labels = group["labels"]
            run, rank = str(labels["run"]), int(labels["rank"])
            for address in group["targets"]:
                if not _HOST_AND_PORT.fullmatch(address):
                    raise ValueError(address)
                # A later run may serve at the same address. A rank of another run answers 404.
                query = urlencode({"run": run})
                url = f"{scheme}://{address}/metrics?{query}"
                target = Target(rank=rank, node=str(labels.get("node", "")), url=url)
                found.setdefault(run, []).append(target)
    except (ValueError, KeyError, TypeError):
        raise NoAnswerError("it lists no targets of zerowatch") from None
    return found


def _groups(content: object) -> Iterable[dict[str, Any]]:
    if not isinstance(content, Sequence):
        raise ValueError
    return content


def _json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except ValueError:
        raise NoAnswerError("it lists no targets of zerowatch") from None
