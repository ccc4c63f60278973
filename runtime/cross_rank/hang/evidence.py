"""What is known at the moment of a hang, as plain data: peers, groups, calls, and whence.

It comes from other rooms by callables; this room knows neither torch nor the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank as it was last heard of.

    Attributes:
        rank: Its rank in the whole job.
        host: Its machine.
        heartbeat_age_seconds: For how long it was seen to give no sign of life, at least; None if
            it was heard of only once.
        arrived: By group key, the number of the last collective it issued.
        pause: Why it may lawfully stand still, as it says itself; None while it trains.
    """

    rank: int
    host: str
    heartbeat_age_seconds: float | None
    arrived: Mapping[str, int]
    pause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """A process group of this rank.

    `issued` is the number of the last collective issued here, `waits` whether that is under way.
    """

    key: str
    role: str
    members: tuple[int, ...]
    issued: int
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLine:
    """One collective of this rank; `sequence` 0 is a point-to-point call.

    `seconds` is how long it took, or has been under way; None where that is not known.
    """

    group: str
    role: str
    sequence: int
    op: str
    payload_bytes: int
    dtype: str
    phase: str
    state: Literal["done", "under way"]
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a report says, apart from the stacks.

    Attributes:
        rank: This rank.
        host: This machine.
        at_unix_seconds: When the hang was found.
        step: The last step that ended here; 0 before the first.
        phase: What the training thread is doing, of the catalog's phases.
        silent_seconds: Since when this rank makes no progress; pauses do not count.
        limit_seconds: How long would have been allowed.
        told: Whether others hang and this rank's own limit is not reached.
        place: Where the training thread stands in Python, as "function (file.py:12)".
        peers: All other ranks, or None where nothing is known of them.
        groups: This rank's process groups, by key.
        calls: This rank's last collectives, by group, the latest of a group last.
        divergence: Who left the common sequence of collectives before, in words.
    """

    rank: int
    host: str
    at_unix_seconds: float
    step: int
    phase: str
    silent_seconds: float
    limit_seconds: float
    told: bool
    place: str
    peers: Mapping[int, Peer] | None
    groups: Mapping[str, GroupLine]
    calls: Sequence[CallLine]
    divergence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the facts come from. None of these may block; None means that a fact cannot be had.

    Attributes:
        folder: The run folder, once there is one.
        last_activity_ns: When anything of training was last seen to move (`perf_counter_ns`).
        training: Whether the watched module is in training mode.
        peers: All other ranks, as last heard of.
        groups: This rank's process groups.
        last_calls: This rank's last collectives, by group, the latest of a group last.
        divergence: Who left the common sequence of collectives, in words.
        flight_dump: What torch's Flight Recorder holds, as JSON or pickle.
        others_hang: Whether any other rank says that it hangs.
        tell_others: Takes whether this rank hangs, and lets the others know.
    """

    folder: Callable[[], Path | None]
    last_activity_ns: Callable[[], int | None]
    training: Callable[[], bool | None]
    peers: Callable[[], Mapping[int, Peer] | None]
    groups: Callable[[], Sequence[GroupLine] | None]
    last_calls: Callable[[], Sequence[CallLine] | None]
    flight_dump: Callable[[], bytes | None]
    others_hang: Callable[[], bool | None]
    tell_others: Callable[[bool], object]
    divergence: Callable[[], str | None] = lambda: None
