"""How the ranks of a run find each other in a store that earlier lives of the job have used."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from fakes.clock import FakeClock
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.common import rank_store
from zerowatch.runtime.common.process_info import (
    ProcessInfo,
    RankStore,
    TargetDiscovery,
    share_run_id,
)
from zerowatch.runtime.common.rank_store import OLDER_TRUSTED_SECONDS, StoreClientFactory

EPOCH = 1


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


def who(rank: int, attempt: int = 0) -> ProcessInfo:
    return ProcessInfo(
        rank=rank, local_rank=rank, world_size=2, host=f"host-{rank}", attempt=attempt
    )


class Life:
    """The processes of one life of the job, of which rank 0 has a token of its own."""

    numbers = itertools.count()

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, *attempts: int) -> None:
        self.store, self.monkeypatch, self.attempts = store, monkeypatch, attempts
        self.process = f"{next(self.numbers)}"

    def board(self, rank: int, clock: FakeClock) -> RankStore:
        self.monkeypatch.setattr(rank_store, "_THIS_PROCESS", self.process)
        return RankStore(who(rank, self.attempts[rank]), EPOCH, self.store, clock)

    def clients(self, rank: int, clock: FakeClock) -> StoreClientFactory:
        self.monkeypatch.setattr(rank_store, "_THIS_PROCESS", self.process)
        return StoreClientFactory(rank, self.attempts[rank], EPOCH, lambda: self.store, clock)


def test_the_ranks_learn_the_runs_name_and_rank_zero_where_they_serve(store, monkeypatch, clock):
    life = Life(store, monkeypatch, 0, 0)
    boards = [life.board(rank, clock) for rank in (0, 1)]
    unknown = share_run_id(boards[1], who(1), None)
    name = share_run_id(boards[0], who(0), None)
    addresses = [TargetDiscovery(board, who(rank), clock) for rank, board in enumerate(boards)]
    for rank, each in enumerate(addresses):
        each.announce(f"host-{rank}:9464")

    assert unknown is None
    assert share_run_id(boards[1], who(1), None) == name
    assert addresses[0].gather()
    assert [target["targets"] for target in addresses[0].targets(str(name))] == [
        ["host-0:9464"],
        ["host-1:9464"],
    ]


def test_what_was_left_before_rank_zero_came_reaches_it(store, monkeypatch, clock):
    life = Life(store, monkeypatch, 0, 0)
    early = life.board(1, clock)
    TargetDiscovery(early, who(1), clock).announce("host-1:9464")
    addresses = TargetDiscovery(life.board(0, clock), who(0), clock)
    before = addresses.gather()
    early.poll()
    clock.seconds += 2

    assert not before
    assert addresses.gather()


def test_a_store_that_is_gone_is_left_alone(monkeypatch, clock):
    leaving = LeavingStore()
    board = Life(leaving, monkeypatch, 0, 0).board(0, clock)
    board.put("run_id", "name")
    before = board.get("run_id")
    leaving.is_gone = True
    board.put("run_id", "other")
    leaving.is_gone = False

    assert before == "name"
    assert board.get("run_id") is None


class LeavingStore(Store):
    """What a PrefixStore asks, and only of this class, whose methods torch calls back."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.texts: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if self.is_gone:
            raise RuntimeError("gone")
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        return self.texts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)


def test_without_a_store_nothing_is_left_or_found():
    board = RankStore(who(0), EPOCH)
    board.put("run_id", "name")

    assert board.get("run_id") is None


@pytest.mark.parametrize("attempts", [(1, 1), (0, 1), (1, 0), (0, 0)], ids=str)
def test_an_earlier_life_is_not_met_whichever_node_counted_the_restart(
    store, monkeypatch, clock, attempts
):
    earlier = Life(store, monkeypatch, 0, 0)
    earlier.board(0, clock).put("run_id", "earlier")
    life = Life(store, monkeypatch, *attempts)
    rank_0, rank_1 = life.board(0, clock), life.board(1, clock)
    before = rank_1.get("run_id")
    rank_0.put("run_id", "this")
    clock.seconds += OLDER_TRUSTED_SECONDS  # what one node pays where only the other has counted

    assert (before, rank_1.get("run_id")) == (None, "this")


def test_after_a_restart_of_a_node_an_earlier_name_is_not_taken_before_rank_zero_speaks(
    store, monkeypatch, clock
):
    Life(store, monkeypatch, 0, 0).board(0, clock).put("run_id", "earlier")
    life = Life(store, monkeypatch, 1, 1)
    rank_1 = life.board(1, clock)
    before = rank_1.get("run_id")
    life.board(0, clock).put("run_id", "this")

    assert (before, rank_1.get("run_id")) == (None, "this")


def test_what_a_rank_left_where_an_earlier_life_met_is_left_again_where_this_one_meets(
    store, monkeypatch, clock
):
    earlier = Life(store, monkeypatch, 0, 0)
    earlier.board(0, clock)
    life = Life(store, monkeypatch, 1, 0)  # only rank 0's node has counted the restart
    rank_1 = life.board(1, clock)
    TargetDiscovery(rank_1, who(1), clock).announce("host-1:9464")
    addresses = TargetDiscovery(life.board(0, clock), who(0, 1), clock)
    before = addresses.gather()
    rank_1.poll()
    clock.seconds += 2

    assert not before
    assert addresses.gather()


def test_clients_move_to_where_rank_zero_has_begun_anew(store, monkeypatch, clock):
    earlier = Life(store, monkeypatch, 0, 0)
    earlier.clients(0, clock).connect()
    life = Life(store, monkeypatch, 1, 0)
    clients = life.clients(1, clock)
    stale = clients.connect()
    before = clients.moved()
    rank_0 = life.clients(0, clock)
    kept = rank_0.connect()
    assert stale is not None and kept is not None
    kept.set("key", "text")

    assert not before
    assert clients.moved()
    moved_to = clients.connect()
    assert moved_to is not None and moved_to.get("key") == b"text"
    assert not stale.check(["key"])
    assert not clients.moved() and not rank_0.moved()


def test_a_client_waits_with_one_connection_until_rank_zero_has_come(store, monkeypatch, clock):
    life = Life(store, monkeypatch, 0, 0)
    clients = life.clients(1, clock)
    waiting = [clients.connect(), clients.connect()]
    client = clients._client
    life.clients(0, clock).connect()

    assert waiting == [None, None]
    assert clients.connect() is not None
    assert clients._client is client


def test_watches_of_one_process_do_not_meet(store):
    first = RankStore(who(0), 1, store)
    first.put("run_id", "first")

    assert RankStore(who(0), 2, store).get("run_id") is None
