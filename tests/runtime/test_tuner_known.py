"""What is known in each of the surroundings that a job goes through."""

from __future__ import annotations

from zerowatch.runtime.tuner.known import Known
from zerowatch.runtime.tuner.reading import Reading

FAST, SLOW = (Reading(link_bandwidth=each, world_size=2) for each in (2.5e8, 2.5e7))
PLAIN, COMPRESSED = ({"gradient_compression": kind} for kind in (None, "int8"))


def test_where_nothing_was_found_what_was_used_there_is_come_back_to() -> None:
    known = Known()
    known.look_around(FAST, PLAIN)
    known.look_around(SLOW, PLAIN)
    known.found(COMPRESSED, instead_of=PLAIN)

    known.look_around(FAST, COMPRESSED)

    assert known.best == PLAIN
    assert known.denied == frozenset()


def test_what_was_found_somewhere_is_not_lost_by_leaving() -> None:
    known = Known()
    known.look_around(SLOW, PLAIN)
    known.found(COMPRESSED, instead_of=PLAIN)
    known.look_around(FAST, COMPRESSED)

    known.look_around(SLOW, PLAIN)

    assert known.best == COMPRESSED


def test_what_failed_there_is_not_come_back_to() -> None:
    known = Known()
    known.look_around(FAST, PLAIN)
    known.look_around(SLOW, PLAIN)
    known.look_around(FAST, COMPRESSED)

    known.deny(PLAIN)

    assert known.best is None
