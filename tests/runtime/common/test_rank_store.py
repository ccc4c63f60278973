"""Tests of the run id and targets in a store that earlier attempts of the job have used."""

from __future__ import annotations

import itertools
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.scraper import eventually
from fakes.stores_without_clone import remove_clone
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.common import rank_store
from zerowatch.runtime.common.process_info import ProcessInfo, node_name
from zerowatch.runtime.common.rank_store import (
    CLIENTS_PER_RANK,
    OLDER_TRUSTED_SECONDS,
    RankStore,
    StoreClientFactory,
    StoreNamespace,
    TargetDiscovery,
    make_room_for_clients,
    new_client,
    reconnectable,
)

WATCH_INDEX = 1


@pytest.fixture(scope="module")
def server() -> TCPStore:
    """One for all tests: where one is torn down while another is reached, torch may fail."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest, server: TCPStore) -> Store:
    if request.param == "hash":
        return HashStore()
    return PrefixStore(request.node.name, server.clone())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
def keep_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_has_room", True)


def process(rank: int, attempt: int = 0) -> ProcessInfo:
    return ProcessInfo(
        rank=rank, local_rank=rank, world_size=2, host=f"host-{rank}", attempt=attempt
    )


class Attempt:
    """The processes of one start of the job, of which rank 0 has a token of its own."""

    numbers = itertools.count()

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, *attempts: int) -> None:
        self.store, self.monkeypatch, self.attempts = store, monkeypatch, attempts
        self.process = f"{next(self.numbers)}"

    def rank_store(self, rank: int, clock: FakeClock) -> RankStore:
        self.monkeypatch.setattr(rank_store, "_THIS_PROCESS", self.process)
        return RankStore(process(rank, self.attempts[rank]), WATCH_INDEX, self.store, clock)

    def clients(self, rank: int, clock: FakeClock) -> StoreClientFactory:
        self.monkeypatch.setattr(rank_store, "_THIS_PROCESS", self.process)
        return StoreClientFactory(rank, self.attempts[rank], WATCH_INDEX, lambda: self.store, clock)


def test_the_ranks_share_the_run_id_and_rank_zero_finds_the_targets(store, monkeypatch, clock):
    attempt = Attempt(store, monkeypatch, 0, 0)
    stores = [attempt.rank_store(rank, clock) for rank in (0, 1)]
    unknown = stores[1].get("run_id")
    stores[0].put("run_id", "night-7")
    discovery = [
        TargetDiscovery(ranks_store, process(rank), clock)
        for rank, ranks_store in enumerate(stores)
    ]
    for rank, each in enumerate(discovery):
        each.announce(f"host-{rank}:9464")

    assert unknown is None
    assert stores[1].get("run_id") == "night-7"
    assert discovery[0].poll()
    targets = discovery[0].targets("night-7")
    assert [target["targets"] for target in targets] == [["host-0:9464"], ["host-1:9464"]]
    assert [target["labels"]["node"] for target in targets] == [process(0).host, process(1).host]


def test_texts_written_before_rank_zero_started_are_read_by_it(store, monkeypatch, clock):
    attempt = Attempt(store, monkeypatch, 0, 0)
    early = attempt.rank_store(1, clock)
    TargetDiscovery(early, process(1), clock).announce("host-1:9464")
    discovery = TargetDiscovery(attempt.rank_store(0, clock), process(0), clock)
    before = discovery.poll()
    early.poll()
    clock.seconds += 2

    assert not before
    assert discovery.poll()


def test_a_store_that_failed_is_not_used_again(monkeypatch, clock):
    failing = FailingStore()
    ranks_store = Attempt(failing, monkeypatch, 0, 0).rank_store(0, clock)
    ranks_store.put("run_id", "name")
    before = ranks_store.get("run_id")
    failing.has_failed = True
    ranks_store.put("run_id", "other")
    failing.has_failed = False

    assert before == "name"
    assert ranks_store.get("run_id") is None


class FailingStore(Store):
    """What a PrefixStore asks, and only of this class, whose methods torch calls back."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False
        self.texts: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if self.has_failed:
            raise RuntimeError("failed")
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        return self.texts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)


class StoreOfGroup(FailingStore):
    """The store of a process group, with clients until its host is gone."""

    def clone(self) -> Store:
        if self.has_failed:
            raise RuntimeError("Connection refused")
        return self

    def check(self, keys: list[str]) -> bool:
        if self.has_failed:
            raise RuntimeError("Broken pipe")
        return super().check(keys)


@pytest.mark.parametrize("is_destroyed_first", [False, True])
def test_the_store_of_a_later_process_group_is_used_once_the_earlier_one_has_failed(
    monkeypatch, clock, is_destroyed_first: bool
) -> None:
    first, second = StoreOfGroup(), StoreOfGroup()
    set_job_store(first, monkeypatch)
    ranks = [RankStore(process(rank), WATCH_INDEX, now=clock) for rank in (0, 1)]
    ranks[0].put("run_id", "night-7")
    ranks[1].put("address/1", "node-1:9464")
    clients = StoreClientFactory(0, 0, WATCH_INDEX, now=clock)
    client = clients.connect()
    first.has_failed = True
    if is_destroyed_first:
        set_job_store(None, monkeypatch)
    for each in ranks:
        each.put("key", "text")
    with pytest.raises(RuntimeError, match="refused"):
        clients.connect()

    set_job_store(second, monkeypatch)
    found = [ranks[1].get("run_id")]  # rank 0 has not written it yet
    for each in ranks:
        each.poll()
        clock.seconds += 60
    found += [ranks[1].get("run_id"), ranks[0].get("address/1")]
    client = clients.connect()
    ranks[0].close()
    ranks[0].poll()

    assert found == [None, "night-7", "node-1:9464"]
    assert client is not None and not client.check(["beat"])
    assert ranks[0].get("address/1") is None


def test_a_store_that_failed_is_left_alone_while_the_job_has_no_other(monkeypatch, clock) -> None:
    job = StoreOfGroup()
    set_job_store(job, monkeypatch)
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    job.has_failed = True
    ranks_store.put("run_id", "night-7")
    job.has_failed = False
    clock.seconds += 60
    ranks_store.poll()

    assert ranks_store.get("run_id") is None


def test_the_store_of_a_destroyed_process_group_is_not_kept_alive(
    server: TCPStore, monkeypatch, clock
) -> None:
    held: list[Store] = [server.clone()]
    is_alive = weakref.ref(held[0])
    monkeypatch.setattr(rank_store.dist, "is_initialized", lambda: bool(held))
    monkeypatch.setattr(rank_store, "_get_default_store", lambda: held[0])
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    clients = StoreClientFactory(0, 0, WATCH_INDEX, now=clock)
    client = clients.connect()

    held.clear()

    assert ranks_store is not None and client is not None
    assert is_alive() is None  # a store that this process hosts would keep its port


def test_without_a_store_nothing_is_written_or_found():
    ranks_store = RankStore(process(0), WATCH_INDEX)
    ranks_store.put("run_id", "name")

    assert ranks_store.get("run_id") is None


def set_job_store(store: Store | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.distributed have a store, which the script uses too."""
    monkeypatch.setattr(rank_store.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rank_store, "_get_default_store", lambda: store)


@contextmanager
def waiting(store: Store, other: Store) -> Iterator[threading.Thread]:
    """A thread of the script that waits in the store until `other` writes its key, at the end."""
    waiter = threading.Thread(target=store.wait, args=(["arrived"], timedelta(seconds=20)))
    waiter.start()
    assert eventually(lambda: is_held(store))
    yield waiter
    other.set("arrived", b"")  # type: ignore[arg-type]
    waiter.join()


def is_held(store: Store) -> bool:
    """Whether a call of the store waits for another thread's."""
    probe = threading.Thread(target=store.check, args=(["key"],), daemon=True)
    probe.start()
    probe.join(0.1)
    return probe.is_alive()


@pytest.mark.parametrize("prefixes", [[], ["default_pg"], ["0", "default_pg"]])
def test_a_thread_that_waits_in_the_jobs_store_delays_no_poll(
    server: TCPStore, monkeypatch, clock, prefixes: list[str]
) -> None:
    of_test = f"waits/{len(prefixes)}"
    job: Store = PrefixStore(of_test, server.clone())
    other: Store = PrefixStore(of_test, server.clone())
    for prefix in prefixes:
        job, other = PrefixStore(prefix, job), PrefixStore(prefix, other)
    RankStore(process(0), WATCH_INDEX, other, clock).put("run_id", "night-7")
    set_job_store(job, monkeypatch)
    ranks_store = RankStore(process(1), WATCH_INDEX, now=clock)

    with waiting(job, other) as waiter:
        ranks_store.poll()
        run_id = ranks_store.get("run_id")
        was_waiting = waiter.is_alive()

    assert (run_id, was_waiting) == ("night-7", True)


@pytest.mark.parametrize("kind", ["tcp", "hash", "file", "prefix"])
def test_the_jobs_store_keeps_its_timeout_and_has_the_texts(
    server: TCPStore, tmp_path: Path, monkeypatch, clock, kind: str
) -> None:
    job: Store = {
        "tcp": server.clone,
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "prefix": lambda: PrefixStore("job", HashStore()),
    }[kind]()
    job.set_timeout(timedelta(seconds=77))
    set_job_store(job, monkeypatch)

    RankStore(process(0), WATCH_INDEX, now=clock).put("run_id", kind)

    assert RankStore(process(1), WATCH_INDEX, job, clock).get("run_id") == kind
    assert job.timeout == timedelta(seconds=77)


def test_a_store_that_is_written_in_python_is_used_itself(monkeypatch, clock) -> None:
    job = FailingStore()
    set_job_store(job, monkeypatch)

    RankStore(process(0), WATCH_INDEX, now=clock).put("run_id", "night-7")

    assert RankStore(process(1), WATCH_INDEX, job, clock).get("run_id") == "night-7"


def test_a_job_without_a_store_has_no_texts(monkeypatch, clock) -> None:
    set_job_store(None, monkeypatch)  # as with MPI
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)

    ranks_store.put("run_id", "night-7")

    assert ranks_store.get("run_id") is None


def test_nothing_connects_before_the_job_has_a_process_group(monkeypatch, clock) -> None:
    ranks_stores = [RankStore(process(rank), WATCH_INDEX, now=clock) for rank in (0, 1)]
    factories = [StoreClientFactory(rank, 0, WATCH_INDEX, now=clock) for rank in (0, 1)]
    ranks_stores[0].put("run_id", "night-7")
    before = [factory.connect() for factory in factories], ranks_stores[1].get("run_id")

    set_job_store(HashStore(), monkeypatch)
    ranks_stores[0].put("address/0", "node-0:9464")
    first, second = (factory.connect() for factory in factories)
    assert first is not None and second is not None
    first.set("key", "text")

    assert before == ([None, None], None)
    assert second.get("key") == b"text"
    assert ranks_stores[1].texts(["run_id", "address/0"]) == {
        "run_id": "night-7",
        "address/0": "node-0:9464",
    }


def test_a_store_that_was_closed_before_the_job_had_a_process_group_stays_closed(
    monkeypatch, clock
) -> None:
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    ranks_store.close()
    set_job_store(HashStore(), monkeypatch)

    ranks_store.put("run_id", "night-7")

    assert ranks_store.get("run_id") is None


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_process_group_that_the_script_destroys_meanwhile_has_no_store(
    monkeypatch, clock, error: type[Exception]
) -> None:
    def destroyed() -> Store:
        raise error("no default process group")

    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    set_job_store(HashStore(), monkeypatch)
    monkeypatch.setattr(rank_store, "_get_default_store", destroyed)

    ranks_store.put("run_id", "night-7")

    assert ranks_store.get("run_id") is None
    assert StoreClientFactory(0, 0, WATCH_INDEX, now=clock).connect() is None


def test_a_poll_writes_as_soon_as_the_job_has_a_process_group(monkeypatch, clock) -> None:
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    ranks_store.put("run_id", "night-7")
    ranks_store.poll()

    set_job_store(HashStore(), monkeypatch)
    ranks_store.poll()  # at the same time: the delay between two polls is not over

    assert RankStore(process(1), WATCH_INDEX, now=clock).get("run_id") == "night-7"


def test_a_job_without_a_store_has_no_clients(monkeypatch, clock) -> None:
    set_job_store(None, monkeypatch)  # as with MPI

    assert StoreClientFactory(0, 0, WATCH_INDEX, now=clock).connect() is None


UNLIMITED = resource.RLIM_INFINITY
ROOM = 2 * CLIENTS_PER_RANK  # for two ranks


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of open files, the last of which holds."""
    limits = [(1024, 4096)]

    def set_limit(which: int, limit: tuple[int, int]) -> None:
        if limit[1] == 0:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(limit)

    monkeypatch.setattr(rank_store, "_has_room", False)
    monkeypatch.setattr(rank_store.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(rank_store.resource, "setrlimit", set_limit)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 1024 + ROOM),
        (1024, UNLIMITED, 1024 + ROOM),
        (4095, 4096, 4096),
        (4096, 4096, None),
        (UNLIMITED, UNLIMITED, None),
        (1024, 0, None),  # it cannot be set
    ],
)
def test_rank_zero_makes_room_for_the_clients_in_the_process_of_the_store(
    server: TCPStore, monkeypatch, limits, soft: int, hard: int, raised: int | None
) -> None:
    limits[:] = [(soft, hard)]
    set_job_store(PrefixStore("job", server), monkeypatch)

    for _ in range(2):  # two watches, one after the other
        make_room_for_clients(process(0))

    assert limits[1:] == ([] if raised is None else [(raised, hard)])


def test_the_limit_is_raised_once_a_watch_finds_the_store_and_nowhere_else(
    server: TCPStore, monkeypatch, limits, clock
) -> None:
    RankStore(process(0), WATCH_INDEX, now=clock)  # no process group
    for rank, store, holds_agent in (
        (1, server, "False"),
        (0, server, "True"),
        (0, HashStore(), "False"),
        (0, None, "False"),
    ):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", holds_agent)
        set_job_store(store, monkeypatch)
        RankStore(process(rank), WATCH_INDEX, now=clock)
    before = limits[1:]

    set_job_store(server, monkeypatch)
    RankStore(process(0), WATCH_INDEX, now=clock)

    assert before == []
    assert limits[1:] == [(1024 + ROOM, 4096)]


class FullHost(TCPStore):
    """A client of a host that accepts no further one."""

    def __init__(self, server: TCPStore, answer: Callable[[], object]) -> None:
        super().__init__("127.0.0.1", server.port, None, False, timedelta(seconds=10), False)
        self._answer = answer

    def clone(self) -> Store:
        self._answer()
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("answers", [True, False])
def test_a_store_that_accepts_no_further_client_is_used_itself(
    server: TCPStore, monkeypatch, clock, answers: bool
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(rank_store, "CONNECT_TIMEOUT_SECONDS", 0.05)
    job = FullHost(server, lambda: answers or ended.wait())
    set_job_store(job, monkeypatch)

    RankStore(process(0), WATCH_INDEX, now=clock).put("run_id", f"night-{answers}")

    assert RankStore(process(1), WATCH_INDEX, job, clock).get("run_id") == f"night-{answers}"
    ended.set()


def test_clients_of_a_store_without_clone_share_its_keys_and_connect_again(
    server: TCPStore, monkeypatch, clock
) -> None:
    jobs: list[Store] = [PrefixStore("without clone", server.clone()) for _ in range(2)]
    other_attempt: Store = PrefixStore("attempt 1", PrefixStore("without clone", server.clone()))
    remove_clone(monkeypatch)
    factories = [
        StoreClientFactory(rank, 0, WATCH_INDEX, lambda job=job: job, clock)
        for rank, job in enumerate(jobs)
    ]
    stranger = StoreClientFactory(1, 0, WATCH_INDEX, lambda: other_attempt, clock)

    first, second = (factory.connect() for factory in factories)
    first.set("beat", "1")
    found = second.get("beat")
    again = factories[1].connect()  # as after a failure of the store

    assert (found, again.get("beat")) == (b"1", b"1")
    assert stranger.connect() is None  # other prefixes: it knows no token
    assert [job.timeout for job in jobs] == [timedelta(seconds=10)] * 2


def test_a_client_of_a_store_without_clone_waits_for_no_other_thread(
    server: TCPStore, monkeypatch, clock
) -> None:
    jobs: list[Store] = [PrefixStore("held", server.clone()) for _ in range(2)]
    remove_clone(monkeypatch)
    part = reconnectable(jobs[0])

    with waiting(*jobs) as waiter:
        client = new_client(part)
        client.set("key", "text")
        again = new_client(client, connect_seconds=5.0)
        found = (again.get("key"), waiter.is_alive())

    assert found == (b"text", True)


@pytest.mark.parametrize("kind", ["hash", "file", "prefix", "python"])
def test_a_store_without_clone_that_is_no_tcp_store_is_used_itself(
    tmp_path: Path, monkeypatch, clock, kind: str
) -> None:
    job: Store = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "prefix": lambda: PrefixStore("job", HashStore()),
        "python": FailingStore,
    }[kind]()
    before = getattr(job, "timeout", None)
    remove_clone(monkeypatch)
    factories = [StoreClientFactory(rank, 0, WATCH_INDEX, lambda: job, clock) for rank in (0, 1)]

    first, second = (factory.connect() for factory in factories)
    first.set("key", b"text")
    again = factories[1].connect()

    assert (second.get("key"), again.get("key")) == (b"text", b"text")
    assert getattr(job, "timeout", None) == before


def test_a_closed_store_holds_no_connection(server: TCPStore, monkeypatch, clock) -> None:
    set_job_store(server, monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    ranks_store = RankStore(process(0), WATCH_INDEX, now=clock)
    ranks_store.put("run_id", "night-7")
    during = len(os.listdir("/proc/self/fd"))

    ranks_store.close()
    ranks_store.close()

    # The server's own end of the connection goes a little later.
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert during > before
    assert ranks_store.get("run_id") is None


class Frozen(FailingStore):
    """A store whose host may stop to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.num_waiting = 0

    def check(self, keys: list[str]) -> bool:
        self.num_waiting += 1
        self.answers.wait()
        self.num_waiting -= 1
        return super().check(keys)


def test_a_store_whose_host_is_frozen_holds_up_no_rank(monkeypatch, clock) -> None:
    job = Frozen()
    monkeypatch.setattr(rank_store, "CONNECT_TIMEOUT_SECONDS", 0.05)
    RankStore(process(0), WATCH_INDEX, job, clock).put("run_id", "night-7")
    ranks_store = RankStore(process(1), WATCH_INDEX, job, clock)
    job.answers.clear()

    assert [ranks_store.get("run_id") for _ in range(3)] == [None] * 3
    ranks_store.poll()
    ranks_store.put("address/1", "node-1:9464")

    assert job.num_waiting == 1  # no further call began
    job.answers.set()
    assert eventually(lambda: ranks_store.get("run_id") == "night-7")
    # What was put meanwhile is written then.
    assert RankStore(process(0), WATCH_INDEX, job, clock).get("address/1") == "node-1:9464"


@pytest.mark.parametrize("attempts", [(1, 1), (0, 1), (1, 0), (0, 0)], ids=str)
def test_an_earlier_attempt_is_not_read_whichever_node_counted_the_restart(
    store, monkeypatch, clock, attempts
):
    earlier = Attempt(store, monkeypatch, 0, 0)
    earlier.rank_store(0, clock).put("run_id", "earlier")
    attempt = Attempt(store, monkeypatch, *attempts)
    rank_0, rank_1 = attempt.rank_store(0, clock), attempt.rank_store(1, clock)
    before = rank_1.get("run_id")
    rank_0.put("run_id", "this")
    clock.seconds += OLDER_TRUSTED_SECONDS  # what one node pays where only the other has counted

    assert (before, rank_1.get("run_id")) == (None, "this")


def test_after_a_restart_an_earlier_run_id_is_not_used_before_rank_zero_writes_its_own(
    store, monkeypatch, clock
):
    Attempt(store, monkeypatch, 0, 0).rank_store(0, clock).put("run_id", "earlier")
    attempt = Attempt(store, monkeypatch, 1, 1)
    rank_1 = attempt.rank_store(1, clock)
    before = rank_1.get("run_id")
    attempt.rank_store(0, clock).put("run_id", "this")

    assert (before, rank_1.get("run_id")) == (None, "this")


def test_texts_written_with_an_earlier_token_are_written_again_with_the_new_one(
    store, monkeypatch, clock
):
    earlier = Attempt(store, monkeypatch, 0, 0)
    earlier.rank_store(0, clock)
    attempt = Attempt(store, monkeypatch, 1, 0)  # only rank 0's node has counted the restart
    rank_1 = attempt.rank_store(1, clock)
    TargetDiscovery(rank_1, process(1), clock).announce("host-1:9464")
    discovery = TargetDiscovery(attempt.rank_store(0, clock), process(0, 1), clock)
    before = discovery.poll()
    rank_1.poll()
    clock.seconds += 2

    assert not before
    assert discovery.poll()


def test_clients_move_to_the_new_token_of_rank_zero(store, monkeypatch, clock):
    earlier = Attempt(store, monkeypatch, 0, 0)
    earlier.clients(0, clock).connect()
    attempt = Attempt(store, monkeypatch, 1, 0)
    clients = attempt.clients(1, clock)
    stale = clients.connect()
    before = clients.moved()
    rank_0 = attempt.clients(0, clock)
    kept = rank_0.connect()
    assert stale is not None and kept is not None
    kept.set("key", "text")

    assert not before
    assert clients.moved()
    moved_to = clients.connect()
    assert moved_to is not None and moved_to.get("key") == b"text"
    assert not stale.check(["key"])
    assert not clients.moved() and not rank_0.moved()


def test_a_forked_rank_has_a_token_of_its_own() -> None:
    namespace = StoreNamespace(0, 3)
    here = [namespace.own_token() for _ in range(2)]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, namespace.own_token().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    forked = os.read(read, 100).decode()
    os.close(read)
    os.close(write)

    assert here[0] == here[1] != forked
    assert {each.partition("-")[0] for each in (*here, forked)} == {"3"}


def test_a_client_waits_with_one_connection_until_rank_zero_has_started(store, monkeypatch, clock):
    attempt = Attempt(store, monkeypatch, 0, 0)
    clients = attempt.clients(1, clock)
    waiting = [clients.connect(), clients.connect()]
    client = clients._client
    attempt.clients(0, clock).connect()

    assert waiting == [None, None]
    assert clients.connect() is not None
    assert clients._client is client


def test_rank_zero_lists_itself_without_a_process_group():
    alone = ProcessInfo(rank=0, local_rank=0, world_size=1, host="host-0", attempt=0)
    targets = TargetDiscovery(RankStore(alone, WATCH_INDEX), alone)

    targets.announce("127.0.0.1:9464")
    found = targets.poll()

    assert found
    assert [each["targets"] for each in targets.targets("run")] == [["127.0.0.1:9464"]]


def test_watches_of_one_process_do_not_share_texts(store):
    first = RankStore(process(0), 1, store)
    first.put("run_id", "first")

    assert RankStore(process(0), 2, store).get("run_id") is None


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({}, "train-0"),
        ({"NODE_NAME": "gpu-7"}, "train-0"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "train-0"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "gpu-7"}, "gpu-7"),
    ],
)
def test_the_node_of_a_pod_is_its_machine_if_the_manifest_names_it(monkeypatch, variables, node):
    for name in ("KUBERNETES_SERVICE_HOST", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)

    assert node_name("train-0") == node


def test_a_target_has_its_address_and_the_labels_of_its_rank(store, monkeypatch, clock) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    attempt = Attempt(store, monkeypatch, 0, 0)
    stores = [attempt.rank_store(rank, clock) for rank in (0, 1)]
    TargetDiscovery(stores[1], process(1), clock).announce("10.0.0.7:9465")
    discovery = TargetDiscovery(stores[0], process(0), clock)

    found = discovery.poll()

    assert found
    assert discovery.targets("night-7") == [
        {
            "targets": ["10.0.0.7:9465"],
            "labels": {
                "run": "night-7",
                "node": "host-1",
                "rank": "1",
                "__param_run": "night-7",
            },
        }
    ]


def test_targets_are_looked_for_after_1_2_4_8_16_and_then_30_seconds_until_all_are_found(
    monkeypatch, clock
) -> None:
    asked: list[float] = []
    ranks_store = RankStore(process(0), WATCH_INDEX, HashStore(), clock)
    monkeypatch.setattr(ranks_store, "texts", lambda keys: asked.append(clock.seconds - 1000) or {})
    discovery = TargetDiscovery(ranks_store, process(0), clock)
    discovery.announce("host-0:9464")

    found = []
    for _ in range(100):
        found.append(discovery.poll())
        clock.seconds += 1

    assert asked == [0, 1, 3, 7, 15, 31, 61, 91]
    assert found == [True] + [False] * 99


@pytest.mark.parametrize(("seconds", "is_read"), [(9.5, False), (10.0, True)])
def test_an_older_token_is_used_after_ten_seconds(
    store, monkeypatch, clock, seconds: float, is_read: bool
) -> None:
    Attempt(store, monkeypatch, 0, 0).rank_store(0, clock).put("run_id", "this")
    rank_1 = Attempt(store, monkeypatch, 0, 1).rank_store(1, clock)

    clock.seconds += seconds

    assert (rank_1.get("run_id") == "this") is is_read
