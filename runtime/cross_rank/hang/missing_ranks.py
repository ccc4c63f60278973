"""Who has not arrived where: one sentence out of the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .evidence import CallLine, Evidence, GroupLine, Peer

MAX_NAMED = 8
# Ranks give signs of life each second, by default; they are read every four to six seconds.
SILENT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Ranks that have not arrived at a collective which others wait in."""

    ranks: tuple[int, ...]
    call: str


def summary(evidence: Evidence) -> str:
    """Say in one line where this rank stands, and whom it waits for, or who for it."""
    said = [_of_open_calls(evidence) or _of_this_rank(evidence)]
    if evidence.divergence is not None:
        said.insert(0, evidence.divergence)
    if evidence.told:
        said.append("this rank was told so by another one, its own limit is not reached")
    return "; ".join(said)


def missing(evidence: Evidence) -> list[Missing]:
    """Find, for each group with a collective under way here, the members that have not issued it.

    Of several such collectives of a group it is the first: the others wait for that one.
    """
    if evidence.peers is None:
        return []
    found: dict[str, Missing] = {}
    for call in open_calls(evidence):
        group = evidence.groups.get(call.group)
        if group is None or call.group in found:
            continue
        ranks = _behind(group, call, evidence.peers)
        if ranks:
            found[call.group] = Missing(ranks=ranks, call=name_of(call))
    return list(found.values())


def waiting(evidence: Evidence) -> list[Missing]:
    """Find the ranks that wait in a collective which this rank has not issued."""
    found = []
    for group in evidence.groups.values():
        ahead = {
            rank: peer.arrived.get(group.key, 0)
            for rank, peer in sorted((evidence.peers or {}).items())
            if rank in group.members and peer.arrived.get(group.key, 0) > group.issued
        }
        if ahead:
            call = f"collective number {group.issued + 1} of group {group.role}"
            found.append(Missing(ranks=tuple(ahead), call=call))
    return found


def open_calls(evidence: Evidence) -> list[CallLine]:
    """Return the calls under way on this rank, in the order in which they were issued."""
    return [call for call in evidence.calls if call.state == "under way"]


def name_of(call: CallLine) -> str:
    """Name a call as a reader would look for it in another rank's report."""
    number = f" number {call.sequence}" if call.sequence else ""
    size = f"{size_of(call.payload_bytes)}, " if call.payload_bytes else ""
    return f"{call.op}{number} of group {call.role} ({size}{call.phase})"


def named_ranks(ranks: Sequence[int]) -> str:
    """Write ranks for people, such as "ranks 1, 2"; of very many only the first."""
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def size_of(num_bytes: int) -> str:
    """Write a number of bytes for people, such as "64 MiB"."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _of_open_calls(evidence: Evidence) -> str | None:
    """Speak of the collectives that this rank is in; None if it is in none."""
    calls = open_calls(evidence)
    if not calls:
        return None
    peers, call = evidence.peers, name_of(calls[0])
    if not peers:
        return (
            f"rank {evidence.rank} waits in {call}; nothing is known of the other ranks, as they "
            "are not compared or the store does not answer"
        )
    absent = sorted(missing(evidence), key=lambda each: not _silent(each.ranks, peers))
    if absent:
        ranks = absent[0].ranks
        behind = f"{named_ranks(ranks)} {_has(ranks)} not arrived at {absent[0].call}"
        return f"{behind}; {_signs_of_life(ranks, peers)}"
    if calls[0].sequence:
        stands = f"all known members have arrived at {call}, which does not end"
    else:
        stands = f"rank {evidence.rank} waits in {call}, whose other end is not known"
    silent = _silent(peers, peers)
    if silent:
        return f"{stands}; {_signs_of_life(silent, peers, named=True)}"
    return f"{stands}; all known ranks are alive"


def _of_this_rank(evidence: Evidence) -> str:
    """Speak of a rank that is in no collective: others may wait for it."""
    stands = f"is in {evidence.phase} and in no collective, at {evidence.place}"
    late = waiting(evidence)
    if late:
        return (
            f"rank {evidence.rank} (this one) has not arrived at {late[0].call}, where "
            f"{named_ranks(late[0].ranks)} {_wait(late[0].ranks)}; it {stands}"
        )
    return f"rank {evidence.rank} (this one) does not move: it {stands}"


def _behind(group: GroupLine, call: CallLine, peers: Mapping[int, Peer]) -> tuple[int, ...]:
    """Return the members that have not issued this call, the longest silent first.

    Nobody is behind a point-to-point call: its number is 0.
    """
    known = [rank for rank in group.members if rank in peers]
    late = [rank for rank in known if peers[rank].arrived.get(group.key, 0) < call.sequence]
    return tuple(_by_silence(late, peers))


def _age(peer: Peer) -> float:
    """Return how long a peer was silent, as far as known."""
    return peer.heartbeat_age_seconds or 0.0


def _silent(ranks: Iterable[int], peers: Mapping[int, Peer]) -> tuple[int, ...]:
    """Return those of the ranks that gave no sign of life for long, the longest silent first."""
    return tuple(rank for rank in _by_silence(ranks, peers) if _age(peers[rank]) > SILENT_SECONDS)


def _by_silence(ranks: Iterable[int], peers: Mapping[int, Peer]) -> list[int]:
    return sorted(ranks, key=lambda rank: (-_age(peers[rank]), rank))


def _signs_of_life(ranks: Sequence[int], peers: Mapping[int, Peer], *, named: bool = False) -> str:
    """Say whether the first of the ranks, which was silent longest, is alive."""
    who = f"rank {ranks[0]}" if named or len(ranks) > 1 else "it"
    age = peers[ranks[0]].heartbeat_age_seconds
    if age is None:
        return f"{who} was heard of only once"
    if age <= SILENT_SECONDS:
        return f"{who} is alive"
    return f"{who} has given no sign of life for at least {age:.0f} s"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
