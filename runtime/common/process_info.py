"""Who this rank is, and how the ranks of a run find a common name and each other."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from ...metrics.settings import RUN_ID_PATTERN
from .rank_store import StoreNamespace, common_store

logger = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One process of a run."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    attempt: int


def this_process() -> ProcessInfo:
    """Read the process group, and what the launcher left in the environment."""
    started = dist.is_initialized()
    return ProcessInfo(
        rank=dist.get_rank() if started else int(os.environ.get("RANK", 0)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", 1)),
        host=socket.gethostname(),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def new_run_id() -> str:
    """Make a name that sorts by time and is not made twice."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


class RankStore:
    """Short texts that the ranks leave each other in the c10d store. Never waits for a rank.

    What an earlier life of the job or an earlier watch left is not seen, but for a moment where
    rank 0 is the last to begin anew and this rank's node does not count that restart.

    Asking for a key that is not there would block, so a key is checked first. A store that fails,
    as when its host is gone, is left alone from then on.
    """

    def __init__(
        self,
        identity: ProcessInfo,
        watch_index: int,
        store: Store | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = StoreNamespace(identity.rank, identity.attempt, now)
        self._now = now
        self._left: dict[str, str] = {}
        self._token: str | None = None
        self._due, self._pause_seconds = 0.0, 0.5
        self._store: Store | None = None
        if store is None and dist.is_initialized():  # that store outlives the making
            store = _get_default_store()
        if store is not None:
            self._store = common_store(store, watch_index)
            with self._store_may_fail():
                self._place.announce(self._store)

    def put(self, key: str, text: str) -> None:
        """Leave a text for the others."""
        self._left[key] = text
        self._token = None
        self._resolve_namespace()

    def get(self, key: str) -> str | None:
        """Return a text, or None while nobody has left it."""
        self._resolve_namespace()
        with self._store_may_fail():
            if self._store is not None and self._token is not None:
                key = f"{self._token}/{key}"
                return self._store.get(key).decode() if self._store.check([key]) else None
        return None

    def poll(self) -> None:
        """Look, less and less often, whether the ranks meet elsewhere by now.

        What this rank has left is then left there too.
        """
        if self._now() >= self._due:
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
            self._due = self._now() + self._pause_seconds
            self._resolve_namespace()

    def _resolve_namespace(self) -> None:
        with self._store_may_fail():
            if self._store is None:
                return
            token = self._place.find(self._store)
            if token is not None and token != self._token:
                for key, text in self._left.items():
                    self._store.set(f"{token}/{key}", text)
                self._token = token

    @contextmanager
    def _store_may_fail(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            logger.info(
                "the c10d store does not answer (%s); ranks no longer see each other", error
            )
            self._store = None


def share_run_id(board: RankStore, identity: ProcessInfo, chosen: str | None) -> str | None:
    """Return the run's name: the chosen one, or the one rank 0 makes; None until it is known."""
    if identity.rank != 0:
        return chosen or board.get("run_id")
    run_id = chosen or _launcher_run_id() or new_run_id()
    board.put("run_id", run_id)
    return run_id


def _launcher_run_id() -> str | None:
    """Return torchrun's name for the launch, which its restarts keep, where it may restart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return name if may_restart and name != "none" and re.match(RUN_ID_PATTERN, name) else None


class TargetDiscovery:
    """Where the ranks serve their metrics, gathered by rank 0."""

    def __init__(
        self, board: RankStore, identity: ProcessInfo, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._now = now
        self._identity = identity
        self._known: dict[int, dict[str, str]] = {}
        self._missing = set(range(identity.world_size))
        self._due, self._pause_seconds = 0.0, 0.5

    def announce(self, address: str) -> None:
        """Tell rank 0 where this rank serves."""
        notice = json.dumps({"address": address, "host": self._identity.host})
        self._board.put(f"address/{self._identity.rank}", notice)

    def gather(self) -> bool:
        """Look for ranks not seen yet, less and less often; return whether any turned up."""
        if not self._missing or self._now() < self._due:
            return False
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
        self._due = self._now() + self._pause_seconds
        found = {
            rank: json.loads(notice)
            for rank in sorted(self._missing)
            if (notice := self._board.get(f"address/{rank}")) is not None
        }
        self._known.update(found)
        self._missing -= found.keys()
        return bool(found)

    def targets(self, run_id: str) -> list[dict[str, object]]:
        """Describe the ranks known so far in Prometheus' http_sd and file_sd form."""
        return [_target(run_id, rank, notice) for rank, notice in sorted(self._known.items())]


def _target(run_id: str, rank: int, notice: dict[str, str]) -> dict[str, object]:
    labels = {"run": run_id, "node": notice["host"], "rank": str(rank)}
    return {"targets": [notice["address"]], "labels": labels}
