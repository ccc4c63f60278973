"""Tests of the connection between the training process and its monitoring process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fakes.clock import FakeClock
from fakes.scraper import eventually

from zerowatch.runtime.separate_process import connection
from zerowatch.runtime.separate_process.connection import Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Connection.pair()
    yield ours, theirs
    for end in (ours, theirs):
        end.close()
        end.close_here()


def all_received(ours: Connection, theirs: Connection) -> list[object]:
    """Send what waits, close our end, and return what the other end has received meanwhile."""
    received: list[object] = []
    reading = threading.Thread(target=lambda: received.extend(theirs.receive()))
    reading.start()
    assert ours.flush(60)
    ours.close()
    reading.join(60)
    return received


def test_messages_arrive_whole_and_in_order(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    sent = [("small", 1), ("large", b"x" * 3_000_000), ("none", None)]
    received: list[object] = []
    reading = threading.Thread(target=lambda: received.extend(theirs.receive()))
    reading.start()

    assert all(ours.send(message) for message in sent)
    assert ours.flush(60)
    ours.close()
    reading.join(60)

    assert received == sent
    assert theirs.is_closed


def test_the_silence_of_the_other_process_ends_when_something_arrives(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    clock = FakeClock()
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    theirs._received_at = clock()
    clock.seconds += 7
    before = theirs.silent_seconds
    ours.send("message")
    sent_only = theirs.silent_seconds
    next(theirs.receive())
    received = theirs.silent_seconds
    clock.seconds += 3

    assert (before, sent_only, received, theirs.silent_seconds) == (7, 7, 0, 3)


def test_a_process_that_does_not_read_delays_nobody_and_gets_everything_later(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    blocks = [bytes([number]) * 500_000 for number in range(20)]

    assert all(ours.send(block) for block in blocks)  # far more than a socket holds
    assert not ours.flush(0.0)

    assert all_received(ours, theirs) == blocks


def test_a_process_that_has_stopped_is_given_up_before_messages_fill_the_memory(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 1_000_000)
    ours, theirs = ends

    sent = [ours.send(b"x" * 300_000) for _ in range(10)]

    assert sent[0]
    assert not sent[-1]
    assert ours.is_closed  # a later message would say only what is new since a lost one
    assert len(list(theirs.receive())) < 10


def test_what_is_read_ahead_survives_the_other_process(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    sent = [bytes([number]) * 500_000 for number in range(20)]
    theirs.read_ahead()

    assert all(ours.send(block) for block in sent)  # far more than a socket holds
    assert ours.flush(60)
    ours.close_here()

    assert list(theirs.receive()) == sent
    assert list(theirs.receive()) == []


def test_a_process_reads_ahead_up_to_a_limit(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    blocks = [bytes([number]) * 500_000 for number in range(20)]
    assert all(ours.send(block) for block in blocks)
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 1_000_000)
    theirs.read_ahead()

    assert eventually(lambda: not ours.flush(0.1) and theirs._num_read > 1_000_000, 60)
    assert theirs._num_read <= 1_500_000

    assert all_received(ours, theirs) == blocks


def test_without_messages_ahead_nothing_is_yielded_after_each_period(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    theirs.read_ahead()
    received = theirs.receive(silent_seconds=0.001)

    assert next(received) is None
    ours.send("x")
    assert eventually(lambda: next(received) == "x", 60)


def test_the_end_of_the_other_process_ends_receiving_and_refuses_messages(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    theirs.close()

    assert list(ours.receive()) == []
    assert not ours.send("x")
    assert ours.is_closed


def test_a_message_that_was_cut_off_is_not_received(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    ours.send("whole")
    ours._socket.send(b"\xff\0\0\0half")
    ours.close()

    assert list(theirs.receive()) == ["whole"]


def test_without_messages_nothing_is_yielded_after_each_period(
    ends: tuple[Connection, Connection],
) -> None:
    ours, theirs = ends
    received = theirs.receive(silent_seconds=0.001)

    assert next(received) is None
    ours.send("x")
    assert eventually(lambda: next(received) == "x", 60)


def test_reading_ahead_begins_before_torch_is_imported() -> None:
    assert modules_after_import("separate_process.__main__").isdisjoint({"torch"})


def test_the_process_takes_no_memory_for_modules_that_it_does_not_need() -> None:
    imported = modules_after_import("separate_process.serving")

    assert "torch" in imported  # whose store it uses
    assert imported.isdisjoint({"deepspeed", "sympy", "torch._dynamo", "torch.distributed.tensor"})


def modules_after_import(name: str) -> set[str]:
    code = f"import sys, zerowatch.runtime.{name}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())
