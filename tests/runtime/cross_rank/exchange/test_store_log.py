"""Tests of logs in real c10d stores: in order, bounded, and without blocking."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from fakes.clock import FakeClock
from fakes.store_clients import FakeClients, connected
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from zerowatch.runtime.cross_rank.exchange.store_log import (
    LONGEST_GAP,
    MAX_ENTRIES,
    StoreConnection,
    StoreLogReader,
    StoreLogWriter,
)

PATIENCE = 20.0


@pytest.fixture(params=["hash", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "hash":
        yield HashStore()
    else:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
        yield PrefixStore("zerowatch/0/1", server.clone())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(server: Store, clock: FakeClock) -> StoreConnection:
    return connected(server, clock)


def entries(reader: StoreLogReader) -> list[bytes]:
    return list(reader.poll(PATIENCE))


def test_entries_come_in_order_and_once(store: StoreConnection, clock: FakeClock) -> None:
    writer, reader = StoreLogWriter(store, "row"), StoreLogReader(store, "row")
    for entry in (b"one", b"", b"\x00\xff\n"):
        writer.append(entry)

    first, second = entries(reader), entries(reader)

    assert first == [b"one", b"", b"\x00\xff\n"]
    assert second == []


def test_logs_do_not_mix(store: StoreConnection, clock: FakeClock) -> None:
    StoreLogWriter(store, "row/1").append(b"mine")

    assert entries(StoreLogReader(store, "row/10")) == []


def test_an_absent_entry_does_not_block(store: StoreConnection, clock: FakeClock) -> None:
    reader = StoreLogReader(store, "row")
    clock.seconds += 2 * PATIENCE

    assert entries(reader) == []  # to block would end in the store's timeout, which raises


def test_the_number_of_keys_stays_bounded(
    server: Store, store: StoreConnection, clock: FakeClock
) -> None:
    writer = StoreLogWriter(store, "row")
    counts = []
    for number in range(5 * MAX_ENTRIES):
        writer.append(str(number).encode())
        counts.append(server.num_keys())

    assert max(counts) == counts[MAX_ENTRIES] == counts[-1]


def test_a_reader_that_paused_for_too_long_goes_on_at_the_latest_entry(
    store: StoreConnection, clock: FakeClock
) -> None:
    writer, reader = StoreLogWriter(store, "row"), StoreLogReader(store, "row")
    for number in range(2 * MAX_ENTRIES):
        writer.append(str(number).encode())
    lost = entries(reader)
    clock.seconds += PATIENCE + 1

    assert lost == []
    assert entries(reader) == [str(2 * MAX_ENTRIES - 1).encode()]


def test_the_latest_entry_is_checked_only_once_per_patience() -> None:
    clock, store = FakeClock(), CountingStore()
    reader = StoreLogReader(connected(store, clock), "row")
    for _ in range(10):
        clock.seconds += PATIENCE / 4
        entries(reader)

    assert [key for key in store.checked if "latest" in key] == ["row/latest"] * 2


class CountingStore(HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.checked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.checked += keys
        return super().check(keys)


def test_a_reader_that_is_not_too_far_behind_misses_nothing(
    store: StoreConnection, clock: FakeClock
) -> None:
    writer, reader = StoreLogWriter(store, "row"), StoreLogReader(store, "row")
    for number in range(MAX_ENTRIES):
        writer.append(str(number).encode())
    clock.seconds += 2 * PATIENCE

    assert len(entries(reader)) == MAX_ENTRIES
    assert entries(reader) == []


def test_silence_does_not_count_while_the_store_could_not_be_reached(
    store: StoreConnection, clock: FakeClock
) -> None:
    reader = StoreLogReader(store, "row")
    clock.seconds += 5
    store.mark_failed()
    clock.seconds += 2 * PATIENCE
    store.open()
    clock.seconds += 1

    assert reader.silent_seconds() == 1


def test_a_log_goes_on_where_the_store_failed_in_between() -> None:
    failing = FailingStore()
    writer, reader = (
        StoreLogWriter(connected(failing), "row"),
        StoreLogReader(connected(failing), "row"),
    )
    writer.append(b"one")
    found = entries(reader)
    for entry, refused in ((b"two", "row/1"), (b"three", "row/latest")):
        failing.refused = refused
        with pytest.raises(RuntimeError, match="gone"):
            writer.append(entry)
    found += entries(reader)
    failing.refused = ""
    writer.append(b"four")

    assert found + entries(reader) == [b"one", b"three", b"four"]


class FailingStore(HashStore):
    refused = ""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if key == self.refused:
            raise RuntimeError("gone")
        super().set(key, value)  # type: ignore[arg-type]


def test_silence_is_the_time_since_the_last_entry(store: StoreConnection, clock: FakeClock) -> None:
    writer, reader = StoreLogWriter(store, "row"), StoreLogReader(store, "row")
    clock.seconds += 3
    before = reader.silent_seconds()
    writer.append(b"entry")
    clock.seconds += 2
    entries(reader)
    clock.seconds += 1

    assert before == 3
    assert reader.silent_seconds() == 1
    assert writer.silent_seconds() == 3


def test_of_a_long_time_in_which_the_reader_was_absent_most_is_no_silence(
    store: StoreConnection, clock: FakeClock
) -> None:
    reader = StoreLogReader(store, "row")
    clock.seconds += 4
    entries(reader)
    clock.seconds += 60  # the whole job was suspended
    entries(reader)
    clock.seconds += 3
    entries(reader)

    assert reader.silent_seconds() == 4 + PATIENCE * LONGEST_GAP / 2 + 3


def test_a_reader_that_is_often_absent_sees_a_silence_in_the_end(
    store: StoreConnection, clock: FakeClock
) -> None:
    reader = StoreLogReader(store, "row")
    for _ in range(10):
        clock.seconds += PATIENCE * 0.6
        entries(reader)

    assert reader.silent_seconds() > PATIENCE


def test_a_reader_that_polls_as_rarely_as_it_may_sees_a_silence(
    store: StoreConnection, clock: FakeClock
) -> None:
    reader = StoreLogReader(store, "row")
    for _ in range(3):
        clock.seconds += PATIENCE * LONGEST_GAP
        entries(reader)

    assert reader.silent_seconds() == 3 * PATIENCE * LONGEST_GAP


def seconds_until_open(connection: StoreConnection, clock: FakeClock) -> int:
    """Fail, and return the seconds until the connection opens again."""
    connection.mark_failed()
    for seconds in range(1000):
        connection.open()
        if connection.is_open:
            return seconds
        clock.seconds += 1
    return -1


def test_the_delay_after_a_failure_doubles_from_30_s_to_5_min(clock: FakeClock) -> None:
    connection = connected(HashStore(), clock)

    delays = [seconds_until_open(connection, clock) for _ in range(6)]

    assert delays == [30, 60, 120, 240, 300, 300]


@pytest.mark.parametrize(("seconds", "delay"), [(300, 120), (301, 30)])
def test_the_delay_starts_over_after_five_minutes_without_a_failure(
    clock: FakeClock, seconds: int, delay: int
) -> None:
    connection = connected(HashStore(), clock)
    for _ in range(2):
        seconds_until_open(connection, clock)

    clock.seconds += seconds

    assert seconds_until_open(connection, clock) == delay


def test_a_connection_that_was_closed_opens_again_at_once(clock: FakeClock) -> None:
    connection = connected(HashStore(), clock)
    clock.seconds += 7

    connection.close()
    was_open = connection.is_open
    connection.open()

    assert (was_open, connection.is_open, connection.opened_at) == (False, True, 1007.0)


def test_while_the_store_is_not_known_the_time_of_opening_stays(clock: FakeClock) -> None:
    connection = StoreConnection(FakeClients(lambda: None), clock)
    clock.seconds += 7

    connection.open()

    assert (connection.is_open, connection.opened_at) == (False, 1000.0)
    with pytest.raises(RuntimeError, match="there is no connection to the c10d store"):
        connection.get("key")
