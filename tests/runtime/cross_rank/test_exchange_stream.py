"""Rows of texts in real c10d stores: in order, bounded, and never a wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from fakes.clock import FakeClock
from fakes.connections import connected
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.cross_rank.store_connection import StoreConnection
from zerowatch.runtime.cross_rank.store_log import KEPT_TEXTS, StoreLogReader, StoreLogWriter

PATIENCE = 20.0


@pytest.fixture(params=["hash", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "hash":
        yield HashStore()
    else:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
        yield PrefixStore("zerowatch/0/1", server.clone())


@pytest.fixture
def store(server: Store) -> StoreConnection:
    return connected(server)


def texts(inbox: StoreLogReader) -> list[bytes]:
    return list(inbox.take(PATIENCE))


def test_texts_come_in_order_and_once(store: StoreConnection) -> None:
    outbox, inbox = StoreLogWriter(store, "row"), StoreLogReader(store, "row")
    for text in (b"one", b"", b"\x00\xff\n"):
        outbox.post(text)

    first, second = texts(inbox), texts(inbox)

    assert first == [b"one", b"", b"\x00\xff\n"]
    assert second == []


def test_rows_do_not_mix(store: StoreConnection) -> None:
    StoreLogWriter(store, "row/1").post(b"mine")

    assert texts(StoreLogReader(store, "row/10")) == []


def test_nothing_waits_for_what_is_not_there(store: StoreConnection) -> None:
    clock = FakeClock()
    inbox = StoreLogReader(store, "row", clock)
    clock.seconds += 2 * PATIENCE
    began = time.monotonic()

    found = texts(inbox)

    assert found == []
    assert time.monotonic() - began < 0.5


def test_the_number_of_keys_stays_bounded(server: Store, store: StoreConnection) -> None:
    outbox = StoreLogWriter(store, "row")
    counts = []
    for number in range(5 * KEPT_TEXTS):
        outbox.post(str(number).encode())
        counts.append(server.num_keys())

    assert max(counts) == counts[KEPT_TEXTS] == counts[-1]


def test_a_reader_that_was_away_too_long_goes_on_at_the_latest_text(store: StoreConnection) -> None:
    clock = FakeClock()
    outbox, inbox = StoreLogWriter(store, "row"), StoreLogReader(store, "row", clock)
    for number in range(2 * KEPT_TEXTS):
        outbox.post(str(number).encode())
    lost = texts(inbox)
    clock.seconds += PATIENCE + 1

    assert lost == []
    assert texts(inbox) == [str(2 * KEPT_TEXTS - 1).encode()]


def test_for_the_latest_text_is_looked_only_now_and_then() -> None:
    clock, store = FakeClock(), CountingStore()
    inbox = StoreLogReader(connected(store, clock), "row", clock)
    for _ in range(10):
        clock.seconds += PATIENCE / 4
        texts(inbox)

    assert [key for key in store.checked if "latest" in key] == ["row/latest"] * 2


class CountingStore(HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.checked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.checked += keys
        return super().check(keys)


def test_a_reader_that_is_not_too_far_behind_misses_nothing(store: StoreConnection) -> None:
    clock = FakeClock()
    outbox, inbox = StoreLogWriter(store, "row"), StoreLogReader(store, "row", clock)
    for number in range(KEPT_TEXTS):
        outbox.post(str(number).encode())
    clock.seconds += 2 * PATIENCE

    assert len(texts(inbox)) == KEPT_TEXTS
    assert texts(inbox) == []


def test_silence_does_not_count_while_the_store_could_not_be_reached(server: Store) -> None:
    clock = FakeClock()
    store = connected(server, clock)
    inbox = StoreLogReader(store, "row", clock)
    clock.seconds += 5
    store.lose()
    clock.seconds += 2 * PATIENCE
    store.open()
    clock.seconds += 1

    assert inbox.silent_seconds() == 1


def test_a_row_goes_on_where_the_store_failed_in_between() -> None:
    failing = FailingStore()
    outbox, inbox = (
        StoreLogWriter(connected(failing), "row"),
        StoreLogReader(connected(failing), "row"),
    )
    outbox.post(b"one")
    heard = texts(inbox)
    for text, refused in ((b"two", "row/1"), (b"three", "row/latest")):
        failing.refused = refused
        with pytest.raises(RuntimeError, match="gone"):
            outbox.post(text)
    heard += texts(inbox)
    failing.refused = ""
    outbox.post(b"four")

    assert heard + texts(inbox) == [b"one", b"three", b"four"]


class FailingStore(HashStore):
    refused = ""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if key == self.refused:
            raise RuntimeError("gone")
        super().set(key, value)  # type: ignore[arg-type]


def test_silence_is_the_time_since_the_last_text(store: StoreConnection) -> None:
    clock = FakeClock()
    outbox, inbox = StoreLogWriter(store, "row", clock), StoreLogReader(store, "row", clock)
    clock.seconds += 3
    before = inbox.silent_seconds()
    outbox.post(b"text")
    clock.seconds += 2
    texts(inbox)
    clock.seconds += 1

    assert before == 3
    assert inbox.silent_seconds() == 1
    assert outbox.silent_seconds() == 3
