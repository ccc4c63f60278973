"""Tests of `node_watch.py`: heartbeats in a real store, with an injected clock."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from zerowatch.runtime.cli import node_watch
from zerowatch.runtime.cli.node_watch import (
    NODE_LOST_SECONDS,
    STORE_LOST_SECONDS,
    NodeHeartbeats,
    NodeWatch,
    rendezvous_failure,
)

LIMIT_SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def nodes(store: Any, clock: Clock, num: int) -> list[NodeHeartbeats]:
    return [NodeHeartbeats(store, node, num, f"host{node}", clock) for node in range(num)]


def pass_time(clock: Clock, seconds: float, *alive: NodeHeartbeats) -> None:
    """Let nodes beat each second."""
    for _ in range(int(seconds)):
        clock.seconds += 1.0
        for node in alive:
            node.beat()


def test_a_node_without_heartbeats_is_lost_and_named(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)

    pass_time(clock, NODE_LOST_SECONDS + 2, first)

    (lost,) = first.lost_nodes()
    assert lost.name == "host1"
    assert lost.seconds == pytest.approx(NODE_LOST_SECONDS + 2)


def test_nodes_that_send_heartbeats_are_not_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first, second)

    assert first.lost_nodes() == second.lost_nodes() == []


def test_a_node_that_never_sent_a_heartbeat_is_unheard_and_not_lost(clock: Clock) -> None:
    """It may run without `zerowatch run`: torch's rendezvous is asked about it."""
    first, second = nodes(HashStore(), clock, 2)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first)

    assert first.lost_nodes() == []
    assert first.unheard_seconds() == 10 * NODE_LOST_SECONDS
    second.beat()
    first.beat()
    assert first.unheard_seconds() == 0.0


def test_a_node_whose_ranks_have_succeeded_is_not_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)
    second.end()
    pass_time(clock, 1, second, first)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first)

    assert first.lost_nodes() == []


def test_a_node_that_could_not_read_does_not_count_others_as_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, first, second)

    clock.seconds += 10 * NODE_LOST_SECONDS  # this node was stopped

    assert first.lost_nodes() == []
    second.beat()
    first.beat()
    assert first.lost_nodes() == []


@pytest.mark.parametrize("num", [3, 40])
def test_each_lost_node_is_noticed_by_a_node_that_is_left(clock: Clock, num: int) -> None:
    everybody = nodes(HashStore(), clock, num)
    pass_time(clock, 3, *everybody)
    left = everybody[: num // 2]

    pass_time(clock, NODE_LOST_SECONDS + 2, *left)

    assert any(node.lost_nodes() for node in left)


class FailingStore:
    """A store whose process was killed after the first heartbeat."""

    def __init__(self) -> None:
        self.is_killed = False

    def set(self, key: str, value: str) -> None:
        if self.is_killed:
            raise RuntimeError("connection reset")


def test_the_silence_of_a_store_is_measured_from_its_last_answer(clock: Clock) -> None:
    store = FailingStore()
    node = NodeHeartbeats(store, 0, 1, "host0", clock)
    node.beat()
    store.is_killed = True

    clock.seconds += 12.0

    with pytest.raises(RuntimeError):
        node.beat()
    assert node.store_silence_seconds() == 12.0


class BlockingStore:
    """A store on a lost host: no call returns."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.release.wait(LIMIT_SECONDS)
        raise RuntimeError("the store is gone")


def test_a_store_that_blocks_its_callers_is_noticed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    store, noticed = BlockingStore(), threading.Event()
    watch = NodeWatch(NodeHeartbeats(store, 0, 2, "host0", clock), noticed.set)

    clock.seconds += STORE_LOST_SECONDS + 1.0

    assert noticed.wait(LIMIT_SECONDS)
    watch.close()
    store.release.set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RendezvousConnectionError("reset"), "cannot be reached"),
        (RendezvousTimeoutError(), "--nnodes LEAST:MOST"),
        (RendezvousClosedError("closed"), "closed"),
    ],
)
def test_messages_name_the_address_of_the_store(error: Any, expected: str) -> None:
    text = rendezvous_failure(error, "host0:29400")

    assert "host0:29400" in text
    assert expected in text


def agent(num_nodes: int, backend: str, max_restarts: int) -> SimpleNamespace:
    handler = SimpleNamespace(get_backend=lambda: backend)
    spec = SimpleNamespace(rdzv_handler=handler, max_restarts=max_restarts)
    return SimpleNamespace(spec=spec, group_world_size=num_nodes)


@pytest.mark.parametrize(
    ("group", "is_watched"),
    [
        (agent(2, "c10d", 1), True),
        (agent(1, "c10d", 1), False),
        (agent(2, "static", 1), False),
        (agent(2, "c10d", 0), False),
    ],
)
def test_only_restartable_jobs_on_several_nodes_are_watched(
    group: SimpleNamespace, is_watched: bool
) -> None:
    assert node_watch._is_watched(None, group) is is_watched
