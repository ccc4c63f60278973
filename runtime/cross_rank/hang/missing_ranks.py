"""Finds the ranks that have not issued a collective in which other ranks wait.

A collective that no wrapper sees, such as one of DDP, has no record. The ranks are then compared by
how many of them their groups have counted since the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..exchange.rank_messages import Heartbeat
from .hang_evidence import CallSummary, HangEvidence, RankSetSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that have not arrived at a collective, or that wait in a collective for this rank.

    Attributes:
        ranks: The ranks.
        call: The collective, in words.
    """

    ranks: tuple[int, ...]
    call: str


def missing_ranks(evidence: HangEvidence) -> list[MissingRanks]:
    """Return, for each rank set, the members that have not issued the collective in flight.

    If several collectives are in flight, only the first counts, because the other members wait for
    the first. If no recorded collective is, collectives that no wrapper sees are compared.
    """
    if evidence.peers is None:
        return []
    missing: dict[str, MissingRanks] = {}
    in_flight = calls_in_flight(evidence)
    for call in in_flight:
        rank_set = evidence.rank_sets.get(call.key)
        if rank_set is None or call.key in missing:
            continue
        ranks = _members_behind(rank_set, call, evidence.peers)
        if ranks:
            missing[call.key] = MissingRanks(ranks=ranks, call=call_name(call))
    return list(missing.values()) if in_flight else _missing_in_unseen(evidence)


def awaited_rank(evidence: HangEvidence) -> int | None:
    """Return the missing rank that has been silent for longest; None if none is known."""
    ranks = {rank for each in missing_ranks(evidence) for rank in each.ranks}
    return next(iter(sort_by_silence(ranks, evidence.peers or {})), None)


def waiting_ranks(evidence: HangEvidence) -> list[MissingRanks]:
    """Return, for each rank set, the ranks in a collective that this rank has not issued."""
    waiting = []
    for rank_set in evidence.rank_sets.values():
        call = f"collective number {rank_set.issued + 1} of group {rank_set.role}"
        ahead = tuple(
            rank
            for rank, peer in sorted((evidence.peers or {}).items())
            if rank in rank_set.members and peer.issued.get(rank_set.key, 0) > rank_set.issued
        )
        if not ahead:
            call = _unseen_call(rank_set)
            ahead = tuple(
                rank
                for rank, progress in sorted(_unseen_progress(rank_set, evidence).items())
                if progress > (evidence.step, rank_set.unseen) and progress[1]
            )
        if ahead:
            waiting.append(MissingRanks(ranks=ahead, call=call))
    return waiting


def calls_in_flight(evidence: HangEvidence) -> list[CallSummary]:
    """Return the calls in flight on this rank, in the order of issue."""
    return [call for call in evidence.calls if call.in_flight]


def call_name(call: CallSummary) -> str:
    """Return the name of a call. The reports of other ranks use the same name."""
    number = f" number {call.sequence}" if call.sequence else ""
    size = f"{size_text(call.payload_bytes)}, " if call.payload_bytes else ""
    own = "zerowatch's own, " if call.is_own else ""
    return f"{call.op}{number} of group {call.role} ({own}{size}{call.phase})"


def size_text(num_bytes: int) -> str:
    """Format a number of bytes, exactly if it is round, such as "64 MiB" or "100 bytes"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def sort_by_silence(ranks: Iterable[int], peers: Mapping[int, Heartbeat]) -> list[int]:
    """Sort ranks by how long their heartbeats are overdue. The rank silent longest comes first."""
    return sorted(ranks, key=lambda rank: (-peers[rank].overdue_seconds, rank))


def _missing_in_unseen(evidence: HangEvidence) -> list[MissingRanks]:
    missing = []
    for rank_set in evidence.rank_sets.values():
        own = (evidence.step, rank_set.unseen)
        progress_by_rank = _unseen_progress(rank_set, evidence) if rank_set.unseen else {}
        late = [rank for rank, progress in progress_by_rank.items() if progress < own]
        if late:
            ranks = tuple(sort_by_silence(late, evidence.peers or {}))
            missing.append(MissingRanks(ranks=ranks, call=_unseen_call(rank_set)))
    return missing


def _unseen_progress(
    rank_set: RankSetSummary, evidence: HangEvidence
) -> dict[int, tuple[int, int]]:
    """Return the last step of each other member, and its unseen calls of the set since then."""
    return {
        rank: (peer.step, peer.unseen[rank_set.key])
        for rank, peer in (evidence.peers or {}).items()
        if rank in rank_set.members and rank_set.key in peer.unseen
    }


def _unseen_call(rank_set: RankSetSummary) -> str:
    return f"an unrecorded collective of group {rank_set.role} (such as one of DDP)"


def _members_behind(
    rank_set: RankSetSummary, call: CallSummary, peers: Mapping[int, Heartbeat]
) -> tuple[int, ...]:
    """Return the members that have not issued this call. The one silent longest comes first.

    A point-to-point call has the sequence number 0, so the result is empty for it.
    """
    known = [rank for rank in rank_set.members if rank in peers]
    late = [rank for rank in known if peers[rank].issued.get(rank_set.key, 0) < call.sequence]
    return tuple(sort_by_silence(late, peers))
