"""Which ranks have not arrived at which collective: one sentence from the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..messages import Heartbeat
from .hang_evidence import CallSummary, HangEvidence, RankSetSummary

MAX_NAMED = 8
# Ranks send heartbeats each second, by default; they are read every four to six seconds.
SILENT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that have not arrived at a collective, or that wait there for this rank."""

    ranks: tuple[int, ...]
    call: str


def summary(evidence: HangEvidence) -> str:
    """Return in one line where this rank is, and which ranks are missing."""
    parts = [_about_calls_in_flight(evidence) or _about_this_rank(evidence)]
    if evidence.divergence is not None:
        parts.insert(0, evidence.divergence)
    if evidence.is_announced:
        parts.append("announced by another rank, this rank's own limit is not reached")
    return "; ".join(parts)


def missing(evidence: HangEvidence) -> list[MissingRanks]:
    """Return, for each rank set with a collective in flight, the members that have not issued it.

    If several collectives are in flight, it looks at the first: the other members wait for it.
    """
    if evidence.peers is None:
        return []
    found: dict[str, MissingRanks] = {}
    for call in calls_in_flight(evidence):
        rank_set = evidence.rank_sets.get(call.key)
        if rank_set is None or call.key in found:
            continue
        ranks = _behind(rank_set, call, evidence.peers)
        if ranks:
            found[call.key] = MissingRanks(ranks=ranks, call=call_name(call))
    return list(found.values())


def waiting(evidence: HangEvidence) -> list[MissingRanks]:
    """Return, for each rank set, the ranks in a collective that this rank has not issued."""
    found = []
    for rank_set in evidence.rank_sets.values():
        ahead = tuple(
            rank
            for rank, peer in sorted((evidence.peers or {}).items())
            if rank in rank_set.members and peer.issued.get(rank_set.key, 0) > rank_set.issued
        )
        if ahead:
            call = f"collective number {rank_set.issued + 1} of group {rank_set.role}"
            found.append(MissingRanks(ranks=ahead, call=call))
    return found


def calls_in_flight(evidence: HangEvidence) -> list[CallSummary]:
    """Return the calls in flight on this rank, in the order of issue."""
    return [call for call in evidence.calls if call.in_flight]


def call_name(call: CallSummary) -> str:
    """Name a call in the way it can be found in another rank's report."""
    number = f" number {call.sequence}" if call.sequence else ""
    size = f"{size_text(call.payload_bytes)}, " if call.payload_bytes else ""
    return f"{call.op}{number} of group {call.role} ({size}{call.phase})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks, such as "ranks 1, 2"; of many only the first."""
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def size_text(num_bytes: int) -> str:
    """Format a number of bytes exactly if it is round, such as "64 MiB" or "100 bytes"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _about_calls_in_flight(evidence: HangEvidence) -> str | None:
    """Describe the collective that this rank is in; None if it is in none."""
    calls = calls_in_flight(evidence)
    if not calls:
        return None
    peers, call = evidence.peers, call_name(calls[0])
    if not peers:
        return (
            f"rank {evidence.rank} waits in {call}; nothing is known of the other ranks: they are "
            "not compared, or the c10d store does not respond"
        )
    absent = sorted(missing(evidence), key=lambda each: not _silent(each.ranks, peers))
    if absent:
        ranks = absent[0].ranks
        behind = f"{ranks_text(ranks)} {_has(ranks)} not arrived at {absent[0].call}"
        return f"{behind}; {_liveness(ranks, peers)}"
    if calls[0].sequence:
        where = f"all known members have arrived at {call}, which does not end"
    else:
        where = f"rank {evidence.rank} waits in {call}, whose other end is not known"
    silent = _silent(peers, peers)
    if silent:
        return f"{where}; {_liveness(silent, peers, named=True)}"
    return f"{where}; all known ranks are alive"


def _about_this_rank(evidence: HangEvidence) -> str:
    """Describe a rank that is in no collective: others may wait for it."""
    where = f"is in {evidence.phase} and in no collective, at {evidence.location}"
    late = waiting(evidence)
    if late:
        return (
            f"rank {evidence.rank} (this one) has not arrived at {late[0].call}, where "
            f"{ranks_text(late[0].ranks)} {_wait(late[0].ranks)}; it {where}"
        )
    return f"rank {evidence.rank} (this one) makes no progress: it {where}"


def _behind(
    rank_set: RankSetSummary, call: CallSummary, peers: Mapping[int, Heartbeat]
) -> tuple[int, ...]:
    """Return the members that have not issued this call, the longest silent first.

    None for a point-to-point call: its number is 0.
    """
    known = [rank for rank in rank_set.members if rank in peers]
    late = [rank for rank in known if peers[rank].issued.get(rank_set.key, 0) < call.sequence]
    return tuple(_by_silence(late, peers))


def _silent(ranks: Iterable[int], peers: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    """Return those of the ranks without a recent heartbeat, the longest silent first."""
    return tuple(
        rank
        for rank in _by_silence(ranks, peers)
        if (peers[rank].age_seconds or 0.0) > SILENT_SECONDS
    )


def _by_silence(ranks: Iterable[int], peers: Mapping[int, Heartbeat]) -> list[int]:
    return sorted(ranks, key=lambda rank: (-(peers[rank].age_seconds or 0.0), rank))


def _liveness(ranks: Sequence[int], peers: Mapping[int, Heartbeat], *, named: bool = False) -> str:
    """Describe whether the first of the ranks, the longest silent one, is alive."""
    who = f"rank {ranks[0]}" if named or len(ranks) > 1 else "it"
    age = peers[ranks[0]].age_seconds
    if age is None:
        return f"{who} has sent one heartbeat only"
    if age <= SILENT_SECONDS:
        return f"{who} is alive"
    return f"{who} has sent no heartbeat for at least {age:.0f} s"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
