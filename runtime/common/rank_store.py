"""Exchanges the run id and the scrape targets between ranks through torch's c10d store.

torchrun keeps its store when it restarts the processes, but ranks must not read the keys of earlier
processes. The restart count cannot be the namespace, because each node has its own count. Instead,
rank 0 writes a token of its process to a fixed key, and the token is the namespace. The other ranks
check regularly for a new token.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ...metrics.backoff import Backoff
from .process_info import ProcessInfo, node_name

logger = logging.getLogger(__name__)

STORE_TIMEOUT_SECONDS = 10.0
# A little more than the longest time that a thread waits to connect again after the store failed.
# Also the longest time for which the start of a watch waits for a connection.
CONNECT_TIMEOUT_SECONDS = 2.0
# A token with fewer restarts than this rank is ignored for this time. If rank 0 is on the same
# node, such a token is from an earlier process. If rank 0 is on another node, the token may be
# valid, so it is used after this time.
OLDER_TRUSTED_SECONDS = 10.0
# Time between two polls of the store: it grows from the first value to the second.
FIRST_POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 30.0
# Most connections that zerowatch keeps from each rank to the store: a RankStore, a comparison
# thread, and two of a TrainingRun.
CLIENTS_PER_RANK = 4
_THIS_PROCESS = secrets.token_hex(4)  # forked processes share it
_has_room = False  # in this process, for the clients of the ranks


class RankStore:
    """Texts that the ranks write for each other in the c10d store. No method waits for a rank.

    Nor does one wait for a store whose host is frozen: its calls never end, whatever its timeout.
    They run on a thread, for which a method waits up to CONNECT_TIMEOUT_SECONDS. Until such a call
    has ended, nothing is written or found.

    A rank does not see texts of an earlier process or an earlier watch, with one exception: if rank
    0 restarts last, and this rank's node does not count the restart, the rank may see such texts
    for a moment.

    Reading a missing key would block, so the store first checks whether the key exists. A store
    that fails, for example because its host is gone, is not used again. Nothing is written or found
    until the script makes another process group, nor before it makes the first one. All that was
    put is written then.

    Args:
        process: This process.
        watch_index: Watches that this process had before; the same on all ranks.
        store: A client of the job's store for one thread; by default a new one of
            torch.distributed's store.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        process: ProcessInfo,
        watch_index: int,
        store: Store | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._watch_index = process, watch_index
        self._namespace = StoreNamespace(process.rank, process.attempt, now)
        self._written: dict[str, str] = {}
        self._sent: set[tuple[str, str, str]] = set()  # token, key and text
        self._call: threading.Thread | None = None
        self._token: str | None = None
        self._backoff = Backoff(FIRST_POLL_SECONDS, MAX_POLL_SECONDS, now)
        self._store: Store | None = None
        self._may_open = True  # until it was opened or closed
        self._job_store: weakref.ref[Store] | None = None  # the one that was opened
        self._open(store)

    @property
    def token(self) -> str | None:
        """The token of rank 0's process, which its restart changes. None until it is known."""
        return self._namespace.own_token() if self._process.rank == 0 else self._token

    def put(self, key: str, text: str) -> None:
        """Write a text for the other ranks."""
        self._written[key] = text
        self._run(self._resolve_namespace)

    def get(self, key: str) -> str | None:
        """Return a text, or None if no rank has written it yet."""
        return self.texts([key]).get(key)

    def texts(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the texts of those keys that a rank has written already."""
        found: dict[str, str] = {}

        def read(store: Store) -> None:
            self._resolve_namespace(store)
            for key in keys if self._token is not None else ():
                name = f"{self._token}/{key}"
                if store.check([name]):
                    found[key] = store.get(name).decode()

        self._run(read)
        return dict(found)  # of many keys, those that were read in time

    def poll(self) -> None:
        """Check, at increasing intervals, whether rank 0 has a new token.

        If there is a new token, this rank's texts are written again in the new namespace. As soon
        as the job has a process group, they are written for the first time.
        """
        if self._can_open or self._backoff.is_due:
            self._run(self._resolve_namespace)
            self._backoff.start_delay()

    def close(self) -> None:
        """Release the client. From now on nothing is written or found. Safe to call twice."""
        self._store, self._may_open, self._job_store = None, False, None

    @property
    def _can_open(self) -> bool:
        """Whether no store of the job was opened yet, or the one that failed was replaced."""
        return self._may_open or (self._store is None and _is_replaced(self._job_store))

    def _open(self, store: Store | None = None) -> None:
        """Use a store, by default a new client of the job's store if there is one by now."""
        if store is None and (of_job := job_store()) is not None:
            make_room_for_clients(self._process)
            store = own_client(of_job)
            self._job_store = weakref.ref(of_job)
        if store is not None:
            self._may_open = False
            self._backoff.reset()
            self._sent.clear()
            self._store = common_store(store, self._watch_index)
            self._run(self._namespace.announce)

    def _resolve_namespace(self, store: Store) -> None:
        token = self._namespace.find(store)
        if token is None:
            return
        for key, text in list(self._written.items()):
            if (token, key, text) not in self._sent:
                store.set(f"{token}/{key}", text)
                self._sent.add((token, key, text))
        self._token = token

    def _run(self, body: Callable[[Store], None]) -> None:
        """Call a function with the store on a thread, unless an earlier call has not ended."""
        if self._can_open:
            self._open()
        store = self._store
        if store is None or (self._call is not None and self._call.is_alive()):
            return
        errors: list[RuntimeError] = []

        def call() -> None:
            try:
                body(store)
            except RuntimeError as error:
                errors.append(error)

        self._call = threading.Thread(target=call, name="zerowatch-store", daemon=True)
        with suppress(RuntimeError):  # no thread could be started
            self._call.start()
            self._call.join(CONNECT_TIMEOUT_SECONDS)
        for error in errors:
            logger.info(
                "the c10d store failed (%s); this rank no longer exchanges run id and targets, "
                "until the script makes another process group",
                error,
            )
            self._store = None


class TargetDiscovery:
    """Collects on rank 0 the addresses at which the ranks serve their metrics.

    The address of rank 0 itself is known without a store, as in a script without a process group.
    """

    def __init__(
        self, store: RankStore, process: ProcessInfo, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._process = store, process
        self._backoff = Backoff(FIRST_POLL_SECONDS, MAX_POLL_SECONDS, now)
        self._own: str | None = None
        self._known: dict[int, dict[str, str]] = {}
        self._missing = set(range(process.world_size))

    def announce(self, address: str) -> None:
        """Write this rank's address for rank 0."""
        entry = json.dumps({"address": address, "host": node_name(self._process.host)})
        self._own = entry
        self._store.put(f"address/{self._process.rank}", entry)

    def poll(self) -> bool:
        """Check, at increasing intervals, for missing ranks. Return whether one was found."""
        if not self._missing or not self._backoff.is_due:
            return False
        self._backoff.start_delay()
        own = self._process.rank
        key_of = {rank: f"address/{rank}" for rank in sorted(self._missing) if rank != own}
        texts = self._store.texts(list(key_of.values())) if key_of else {}
        entries = {rank: texts[key] for rank, key in key_of.items() if key in texts}
        if own in self._missing and self._own is not None:
            entries[own] = self._own
        self._known.update({rank: json.loads(entry) for rank, entry in entries.items()})
        self._missing -= entries.keys()
        return bool(entries)

    def targets(self, run_id: str) -> list[dict[str, object]]:
        """Return the known ranks in Prometheus' http_sd and file_sd form."""
        return [_target(run_id, rank, entry) for rank, entry in sorted(self._known.items())]


def _target(run_id: str, rank: int, entry: dict[str, str]) -> dict[str, object]:
    labels = {"run": run_id, "node": entry["host"], "rank": str(rank)}
    # The label makes Prometheus scrape /metrics?run=<id>. If another run later gets the same
    # address, that run refuses the request.
    return {"targets": [entry["address"]], "labels": {**labels, "__param_run": run_id}}


class StoreClientFactory:
    """Makes store clients for one thread, so that a slow response delays no other thread.

    Args:
        rank: This rank.
        attempt: Restarts of this node's processes so far.
        watch_index: Watches that this process had before; the same on all ranks.
        default: Returns the job's store, or None if it has none; by default `job_store`. It returns
            the same object until the job has another store.
        now: A monotonic clock, in seconds.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(
        self,
        rank: int,
        attempt: int,
        watch_index: int,
        default: Callable[[], Store | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch_index = watch_index
        self._default = default or job_store
        self._namespace = StoreNamespace(rank, attempt, now)
        self._client: Store | None = None
        self._job_store: weakref.ref[Store] | None = None  # the one whose clients these are
        self._token: str | None = None
        self._is_waiting = False  # with a client, for the token

    def connect(self) -> Store | None:
        """Return a new client in rank 0's namespace.

        None if the namespace is not known yet, or if the job has no store, or not yet.
        """
        is_replaced = _is_replaced(self._job_store, self._default)
        client = self._client if self._is_waiting and not is_replaced else None
        self._is_waiting = False
        if client is None:
            client = self._client = self._new_client()
            if client is None:
                return None
            self._namespace.announce(common_store(client, self._watch_index))
        store = common_store(client, self._watch_index)
        self._token = self._namespace.find(store)
        self._is_waiting = self._token is None
        return None if self._token is None else PrefixStore(self._token, store)

    def moved(self) -> bool:
        """Whether rank 0 has a new token since `connect`."""
        if self._client is None or self._token is None:
            return False
        token = self._namespace.find(common_store(self._client, self._watch_index))
        return token not in (None, self._token)

    def close(self) -> None:
        """Drop the last client. The connection closes when its stores are gone, too."""
        self._client, self._is_waiting = None, False

    def _new_client(self) -> Store | None:
        """Clone the last client, or the job's store, if any, if there is no client of it yet."""
        client: Store | None = None
        if self._client is not None and not _is_replaced(self._job_store, self._default):
            client = new_client(self._client, connect_seconds=CONNECT_TIMEOUT_SECONDS)
        elif (store := self._default()) is not None:
            client = new_client(reconnectable(store))
            self._job_store = weakref.ref(store)
        return client


class StoreNamespace:
    """Agrees on the prefix of the ranks' keys: a token that rank 0 writes to the store.

    Raises:
        RuntimeError: The store does not respond; raised by every method.
    """

    def __init__(self, rank: int, attempt: int, now: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._attempt = attempt
        self._now = now
        self._since = now()

    def announce(self, store: Store) -> None:
        """Write the token, as rank 0."""
        if self._rank == 0:
            store.set("token", self.own_token())

    def find(self, store: Store) -> str | None:
        """Return the token, or None if it is not known yet."""
        if self._rank == 0:
            return self.own_token()
        if not store.check(["token"]):
            return None
        token = store.get("token").decode()
        is_older = int(token.partition("-")[0]) < self._attempt
        is_early = self._now() - self._since < OLDER_TRUSTED_SECONDS
        return None if is_older and is_early else token

    def own_token(self) -> str:
        """Return the token of this process, which it writes as rank 0."""
        return f"{self._attempt}-{_THIS_PROCESS}-{os.getpid()}"


def job_store() -> Store | None:
    """Return torch.distributed's store. None without a process group, and with MPI."""
    try:
        return _get_default_store() if dist.is_initialized() else None
    except (ValueError, KeyError):  # the script destroys the group at this moment
        return None


def _is_replaced(
    known: weakref.ref[Store] | None, find: Callable[[], Store | None] = job_store
) -> bool:
    """Whether the job has another store than the known one, if any: that of a new process group.

    The reference is weak, because a store that this process hosts keeps its port while it lives.
    """
    return known is not None and find() not in (None, known())


def make_room_for_clients(process: ProcessInfo) -> None:
    """Let the process that holds the job's store open a file more for each client of zerowatch.

    The connections of all ranks count as open files of that process. With some hundred ranks they
    would use up the usual limit of 1024, and training could open no file. This does nothing in
    other processes, nor if torchrun's agent holds the store.

    The limit grows only by the number of clients: child processes inherit it, and some programs
    close all descriptors up to it one by one. Numbers from 1024 on, which `select` does not
    support, occur only where there would be no descriptor otherwise.
    """
    global _has_room
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_in_rank_0 = isinstance(without_prefixes(job_store()), c10d.TCPStore) and not is_of_agent
    if _has_room or process.rank != 0 or not is_in_rank_0:
        return
    _has_room = True
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft in (hard, resource.RLIM_INFINITY):
            return
        needed = soft + CLIENTS_PER_RANK * process.world_size
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def own_client(store: Store) -> Store:
    """Return a client of the job's store for one thread, or the store itself if it needs none.

    Calls of a TCPStore wait for calls of other threads, such as a script's `wait`. Calls of other
    stores do not, and the clone of a HashStore is the script's own object.

    If the host has no free file descriptor, connecting takes as long as the job's timeout. The
    store itself is then used, because training must not wait for that.
    """
    # With MPI, there is none. Before torch 2.8, a client may have to wait for the store itself, and
    # if that failed on one rank, this rank and the others would not have the same keys.
    if not isinstance(without_prefixes(store), c10d.TCPStore) or not hasattr(store, "clone"):
        return store  # torch keeps it
    clients: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            clients.append(new_client(store))

    thread = threading.Thread(target=connect, name="zerowatch-store", daemon=True)
    with suppress(RuntimeError):  # no thread could be started
        thread.start()
        thread.join(CONNECT_TIMEOUT_SECONDS)
    return clients[0] if clients else store


def reconnectable(store: Any) -> Any:
    """Return a store of which `new_client` makes clients with the same keys.

    It is the store itself, except for a TCPStore before torch 2.8, whose stores have no `clone`. It
    is then a part of this store that no one else uses. All ranks that share the store, with the
    same prefixes, must call this and use its result alone. They agree on the name of the part in
    the store, because Python cannot read the store's prefixes.

    Raises:
        RuntimeError: The store does not respond.
    """
    innermost = without_prefixes(store)
    if hasattr(store, "clone") or not isinstance(innermost, c10d.TCPStore):
        return store
    name = store.compare_set("zerowatch/part", "", secrets.token_hex(8)).decode()
    return _PartOfStore(f"zerowatch/{name}", innermost)


def new_client(
    store: Any,
    timeout_seconds: float | None = STORE_TIMEOUT_SECONDS,
    connect_seconds: float | None = None,
) -> Any:
    """Connect to the host of a store again. A store without `clone` is returned itself.

    Args:
        store: A store, as `reconnectable` returns it, or a client of it.
        timeout_seconds: The timeout of the client; None for that of the store.
        connect_seconds: A new timeout of the store, which limits the time to connect; None to keep
            it.

    Raises:
        RuntimeError: The store's host does not respond.
    """
    if not hasattr(store, "clone"):
        return store
    if connect_seconds is not None:
        store.set_timeout(timedelta(seconds=connect_seconds))
    client = store.clone()
    if timeout_seconds is not None:
        client.set_timeout(timedelta(seconds=timeout_seconds))
    return client


class _PartOfStore(PrefixStore):
    """The keys of a TCPStore with a prefix, and `clone`, which torch's stores have from 2.8 on."""

    def __init__(self, prefix: str, store: c10d.TCPStore) -> None:
        super().__init__(prefix, store)
        self._prefix, self._tcp_store = prefix, store

    def clone(self) -> _PartOfStore:
        """Connect to the host of the store again."""
        known: Any = self._tcp_store
        client = c10d.TCPStore(
            known.host, known.port, is_master=False, timeout=known.timeout, wait_for_workers=False
        )
        return _PartOfStore(self._prefix, client)


def without_prefixes(store: Any) -> Any:
    """Return the store that holds the keys of a store with prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def common_store(store: Store, watch_index: int) -> Store:
    """Return the part of the job's store that holds the token of one watch."""
    return PrefixStore(f"zerowatch/{watch_index}", store)
