"""Writes the report of a hang: the missing ranks, their collectives, and the threads' stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ...common.format_numbers import format_ranks
from ...common.report_files import RESUMED, create_first_free, create_private, utc_text
from ..exchange.rank_messages import Heartbeat
from .hang_evidence import CallSummary, HangEvidence
from .missing_ranks import (
    MissingRanks,
    call_name,
    calls_in_flight,
    missing_ranks,
    size_text,
    sort_by_silence,
    waiting_ranks,
)

# Maximum number of reports of each rank in a run.
MAX_REPORTS = 5
# Maximum number of other ranks in a report. The rank that is silent longest comes first.
MAX_PEERS = 64
# Maximum number of collectives listed for each rank set.
MAX_CALLS = 32
# Seconds for which a heartbeat is overdue, after which its rank counts as silent. By default, ranks
# send heartbeats each second. Heartbeats are read every four to six seconds.
SILENT_SECONDS = 3.0


def report_text(evidence: HangEvidence) -> str:
    """Return the text of the report without the stacks. The first line is the summary."""
    lines = [summary(evidence), "", *_moment(evidence), ""]
    lines += [*_absences(evidence), *_peers(evidence), "", *_calls(evidence), "", *_threads()]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, evidence: HangEvidence) -> Path | None:
    """Write the report into the run folder, readable by its owner alone.

    Returns:
        The report's path, or None if the run already has MAX_REPORTS reports of this rank.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"hang-rank-{evidence.rank}-{number}.txt" for number in range(1, MAX_REPORTS + 1))
    created = create_first_free(folder / name for name in names)
    if created is None:
        return None
    path, descriptor = created
    with os.fdopen(descriptor, "w") as file:
        file.write(report_text(evidence))
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def note_resumed(report: Path, at_unix_seconds: float) -> None:
    """Add to a report that training makes progress again."""
    with contextlib.suppress(OSError), report.open("a") as file:  # the log has it too
        file.write(f"\n{RESUMED}, {utc_text(at_unix_seconds)}\n")


def write_flight_recorder_dump(report: Path, dump: bytes) -> None:
    """Write torch's own record of collectives next to the report, readable by its owner alone."""
    kind = "json" if dump.startswith(b"{") else "pickle"
    with (
        contextlib.suppress(OSError),  # the report is already written and has more detail
        os.fdopen(create_private(report.with_suffix(f".flight.{kind}")), "wb") as file,
    ):
        file.write(dump)


def summary(evidence: HangEvidence) -> str:
    """Return one line that says where this rank is and which ranks are missing."""
    about_calls = _about_calls_in_flight(evidence) or _about_unseen_calls(evidence)
    parts = [about_calls or _about_this_rank(evidence)]
    if evidence.divergence is not None:
        parts.insert(0, evidence.divergence)
    if evidence.is_announced:
        parts.append("another rank announced the hang before this rank reached its own limit")
    return "; ".join(parts)


def _moment(evidence: HangEvidence) -> Iterator[str]:
    yield f"rank {evidence.rank} on {evidence.host}, {utc_text(evidence.at_unix_seconds)}"
    yield f"last step that ended: {evidence.step}; phase: {evidence.phase}"
    yield (
        f"no progress for {evidence.silent_seconds:.1f} s; "
        f"limit {evidence.limit_seconds:.1f} s, expected pauses left out"
    )
    yield f"training thread: {evidence.location}"


def _absences(evidence: HangEvidence) -> Iterator[str]:
    """List the ranks that are missing at each collective in which a rank waits."""
    own = f"rank {evidence.rank}"
    lines = [
        f"{one.call}: {own} waits for {format_ranks(one.ranks)}" for one in missing_ranks(evidence)
    ]
    lines += [
        f"{one.call}: {format_ranks(one.ranks)} wait{'s' * (len(one.ranks) == 1)} for {own}"
        for one in waiting_ranks(evidence)
    ]
    if lines:
        yield from ("Missing ranks:", *(f"  {line}" for line in lines), "")


def _peers(evidence: HangEvidence) -> Iterator[str]:
    if evidence.peers is None:
        yield (
            "Other ranks: nothing is known; they are not compared, or the c10d store does not "
            "respond."
        )
        return
    roles = {key: rank_set.role for key, rank_set in evidence.rank_sets.items()}
    yield "Other ranks (seconds without a heartbeat; number of the last collective):"
    longest_silent = sorted(evidence.peers.values(), key=_silence)
    yield from (f"  {_peer(peer, roles)}" for peer in longest_silent[:MAX_PEERS])
    if len(longest_silent) > MAX_PEERS:
        yield f"  and {len(longest_silent) - MAX_PEERS} more, silent for less long"
    own = {rank_set.key: rank_set.issued for rank_set in evidence.rank_sets.values()}
    yield f"  this rank: {_issued(own, roles)}"


def _silence(peer: Heartbeat) -> tuple[float, int]:
    return (-peer.overdue_seconds, peer.rank)


def _peer(peer: Heartbeat, roles: Mapping[str, str]) -> str:
    age = "one heartbeat only" if peer.age_seconds is None else f"{peer.age_seconds:.1f} s"
    pause = f", in {peer.pause}" if peer.pause else ""
    return f"rank {peer.rank} on {peer.host}: {age}{pause}; {_issued(peer.issued, roles)}"


def _issued(numbers: Mapping[str, int], roles: Mapping[str, str]) -> str:
    """List the number of the last collective in each rank set that this rank shares."""
    shared = [f"{roles[key]} ({key}) {n}" for key, n in sorted(numbers.items()) if key in roles]
    return ", ".join(shared) or "no collective in a group of this rank"


def _calls(evidence: HangEvidence) -> Iterator[str]:
    yield "Last collectives of this rank, by group, the latest last, with all that are in flight:"
    by_key: dict[str, list[CallSummary]] = {}
    for call in evidence.calls:
        by_key.setdefault(call.key, []).append(call)
    for calls in by_key.values():
        # Calls in flight are listed even if many calls were issued after them.
        earlier = [call for call in calls[:-MAX_CALLS] if call.in_flight]
        yield from (f"  {_call(call)}" for call in [*earlier[:MAX_CALLS], *calls[-MAX_CALLS:]])
    if not by_key:
        yield "  unknown: the driver does not answer" if evidence.is_driver_blocked else "  none"


def _call(call: CallSummary) -> str:
    seconds = "" if call.seconds is None else f" {call.seconds:.6f} s"
    own = " (zerowatch's own)" if call.is_own else ""
    return (
        f"{call.role} ({call.key}) {call.sequence or 'p2p'} {call.op} "
        f"{size_text(call.payload_bytes)} {call.dtype} {call.phase}: "
        f"{'in flight' if call.in_flight else 'done'}{seconds}{own}"
    )


def _threads() -> Iterator[str]:
    """List the names of the threads. The stacks contain only the numbers of the threads."""
    yield "Python stacks, innermost call first. The current thread is the one that writes this."
    for thread in threading.enumerate():
        yield f"  0x{thread.ident or 0:016x} {thread.name}"
    yield ""


def _about_calls_in_flight(evidence: HangEvidence) -> str | None:
    """Describe the collective in which this rank waits. None if it waits in no collective."""
    calls = calls_in_flight(evidence)
    if not calls:
        return None
    peers, call = evidence.peers, call_name(calls[0])
    if not peers:
        return (
            f"rank {evidence.rank} waits in {call}; nothing is known of the other ranks: they are "
            "not compared, or the c10d store does not respond"
        )
    absent = sorted(missing_ranks(evidence), key=lambda each: not _silent(each.ranks, peers))
    if absent:
        return _about_missing(absent[0], peers)
    if calls[0].sequence:
        members = evidence.rank_sets[calls[0].key].members
        num_known = sum(rank in peers or rank == evidence.rank for rank in members)
        who = "all known members"
        if num_known < len(members):
            who = f"all {num_known} known ones of {len(members)} members"
        where = f"{who} have arrived at {call}, which does not end"
    else:
        where = f"rank {evidence.rank} waits in {call}, whose other end is not known"
    silent = _silent(peers, peers)
    if silent:
        return f"{where}; {_liveness(silent, peers, named=True)}"
    return f"{where}; all known ranks are alive"


def _about_unseen_calls(evidence: HangEvidence) -> str | None:
    """Describe a collective without a record in which this rank waits for others, or None."""
    absent = [] if calls_in_flight(evidence) else missing_ranks(evidence)
    if not absent:
        return None
    text = _about_missing(absent[0], evidence.peers or {})
    return f"{text}; rank {evidence.rank} is in {evidence.phase}, at {evidence.location}"


def _about_missing(absent: MissingRanks, peers: Mapping[int, Heartbeat]) -> str:
    ranks = absent.ranks
    behind = f"{format_ranks(ranks)} {_has(ranks)} not arrived at {absent.call}"
    return f"{behind}; {_liveness(ranks, peers)}"


def _about_this_rank(evidence: HangEvidence) -> str:
    """Describe a rank that waits in no known collective. Other ranks may wait for this rank."""
    collective = " and in no recorded collective"
    if evidence.is_driver_blocked:
        collective = ", and the driver does not answer which collectives run"
    where = f"is in {evidence.phase}{collective}, at {evidence.location}"
    waiting = waiting_ranks(evidence)
    if waiting:
        return (
            f"rank {evidence.rank} has not arrived at {waiting[0].call}, where "
            f"{format_ranks(waiting[0].ranks)} {_wait(waiting[0].ranks)}; it {where}"
        )
    return f"rank {evidence.rank} makes no progress: it {where}"


def _silent(ranks: Iterable[int], peers: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    """Return the ranks without a recent heartbeat. The rank silent longest comes first."""
    longest_silent = sort_by_silence(ranks, peers)
    return tuple(rank for rank in longest_silent if peers[rank].overdue_seconds > SILENT_SECONDS)


def _liveness(ranks: Sequence[int], peers: Mapping[int, Heartbeat], *, named: bool = False) -> str:
    """Describe whether the first of the ranks, which is silent longest, is alive."""
    who = f"rank {ranks[0]}" if named or len(ranks) > 1 else "it"
    peer = peers[ranks[0]]
    if peer.age_seconds is None:
        return f"{who} has sent one heartbeat only"
    if peer.overdue_seconds <= SILENT_SECONDS:
        return f"{who} is alive"
    return f"{who} has sent no heartbeat for at least {peer.age_seconds:.0f} s"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
