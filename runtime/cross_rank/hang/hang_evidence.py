"""Defines the data of a hang report: the state of a rank, of its peers and of its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..exchange.rank_messages import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetSummary:
    """The known state of one rank set of this rank.

    Attributes:
        key: The rank set's key.
        role: Role of its groups.
        members: The ranks of the set.
        issued: Number of the last collective that this rank issued.
        is_waiting: Whether the last collective is in flight.
        unseen: Number of collectives since the last step that no wrapper has seen.
    """

    key: str
    role: str
    members: tuple[int, ...]
    issued: int
    is_waiting: bool = False
    unseen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSummary:
    """The known state of one collective of this rank.

    Attributes:
        key: The rank set's key.
        role: Role of its groups.
        sequence: The call's number; 0 for a point-to-point call.
        op: The operation.
        payload_bytes: The size of the payload.
        dtype: The data type of the payload.
        phase: The phase in which the call was issued.
        in_flight: Whether the call has not ended.
        seconds: The duration, or the time in flight so far. None if unknown.
        is_own: Whether the call is one of zerowatch's own collectives (votes of a TrainingRun).
    """

    key: str
    role: str
    sequence: int
    op: str
    payload_bytes: int
    dtype: str
    phase: str
    in_flight: bool
    seconds: float | None
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HangEvidence:
    """The content of a hang report, except the stacks.

    Attributes:
        rank: This rank.
        host: This machine.
        at_unix_seconds: When the hang was detected.
        step: The last step that ended on this rank. 0 before the first step.
        phase: The current phase, one of the catalog's phases.
        silent_seconds: Seconds without progress on this rank, without expected pauses.
        limit_seconds: The limit for `silent_seconds`.
        is_announced: Whether another rank announced the hang before this rank's limit was reached.
        location: The Python line of the training thread, such as "function (file.py:12)".
        peers: The last heartbeats of other ranks. None if nothing is known about them.
        rank_sets: This rank's rank sets, by key.
        calls: This rank's last collectives, by rank set, in the order of issue.
        divergence: A message that names the ranks whose collectives diverged, or None.
        is_driver_blocked: Whether the device's driver does not answer, so that `rank_sets` or
            `calls` are missing.
    """

    rank: int
    host: str
    at_unix_seconds: float
    step: int
    phase: str
    silent_seconds: float
    limit_seconds: float
    is_announced: bool
    location: str
    peers: Mapping[int, Heartbeat] | None
    rank_sets: Mapping[str, RankSetSummary]
    calls: Sequence[CallSummary]
    divergence: str | None = None
    is_driver_blocked: bool = False
