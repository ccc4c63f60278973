"""The report of a hang: the verdict, then what it rests on, then every thread's Python stack."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...common.report_files import create_first_free, create_private, utc_text
from .evidence import CallLine, Evidence, Peer
from .missing_ranks import missing, named_ranks, size_of, summary, waiting

MAX_REPORTS = 5
MAX_PEERS = 64
MAX_CALLS = 32


def report_text(evidence: Evidence) -> str:
    """Write all of a report but the stacks; line 1 is the verdict."""
    lines = [summary(evidence), "", *_moment(evidence), ""]
    lines += [*_absences(evidence), *_peers(evidence), "", *_calls(evidence), "", *_threads()]
    return "\n".join(lines) + "\n"


def write_report(
    folder: Path, evidence: Evidence, flight_dump: Callable[[], bytes | None]
) -> Path | None:
    """Write the report and, beside it, torch's own record of collectives.

    Both can be read by their owner alone. A run keeps at most MAX_REPORTS of a rank.

    Returns:
        The report's path; None where the run has its reports already.

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
    _write_flight(path, flight_dump())
    return path


def _write_flight(report: Path, dump: bytes | None) -> None:
    if dump is None:
        return
    kind = "json" if dump.startswith(b"{") else "pickle"
    with (
        contextlib.suppress(OSError),  # the report itself is written and says more
        os.fdopen(create_private(report.with_suffix(f".flight.{kind}")), "wb") as file,
    ):
        file.write(dump)


def _moment(evidence: Evidence) -> Iterator[str]:
    yield f"rank {evidence.rank} on {evidence.host}, {utc_text(evidence.at_unix_seconds)}"
    yield f"last step that ended: {evidence.step}; phase: {evidence.phase}"
    yield (
        f"no progress for {evidence.silent_seconds:.1f} s; "
        f"limit {evidence.limit_seconds:.1f} s, pauses left out"
    )
    yield f"training thread: {evidence.place}"


def _absences(evidence: Evidence) -> Iterator[str]:
    """Say of every collective that somebody waits in who is missing there."""
    own = f"rank {evidence.rank}"
    found = [f"{one.call}: {own} waits for {named_ranks(one.ranks)}" for one in missing(evidence)]
    found += [
        f"{one.call}: {own} is waited for by {named_ranks(one.ranks)}" for one in waiting(evidence)
    ]
    if found:
        yield from ("Who has not arrived where:", *(f"  {line}" for line in found), "")


def _peers(evidence: Evidence) -> Iterator[str]:
    if evidence.peers is None:
        yield "Other ranks: nothing is known; they are not compared, or the store does not answer."
        return
    roles = {key: group.role for key, group in evidence.groups.items()}
    yield "Other ranks (seconds seen without a sign of life; number of the last collective):"
    by_silence = sorted(evidence.peers.values(), key=_silence)
    yield from (f"  {_peer(peer, roles)}" for peer in by_silence[:MAX_PEERS])
    if len(by_silence) > MAX_PEERS:
        yield f"  and {len(by_silence) - MAX_PEERS} more, silent for less long"
    yield f"  this rank: {_arrived({g.key: g.issued for g in evidence.groups.values()}, roles)}"


def _silence(peer: Peer) -> tuple[float, int]:
    return (-(peer.heartbeat_age_seconds or 0.0), peer.rank)


def _peer(peer: Peer, roles: Mapping[str, str]) -> str:
    age = peer.heartbeat_age_seconds
    heard = "heard once" if age is None else f"{age:.1f} s"
    pause = f", in {peer.pause}" if peer.pause else ""
    return f"rank {peer.rank} on {peer.host}: {heard}{pause}; {_arrived(peer.arrived, roles)}"


def _arrived(numbers: Mapping[str, int], roles: Mapping[str, str]) -> str:
    """List the numbers of the groups that this rank knows."""
    known = [f"{roles[key]} ({key}) {n}" for key, n in sorted(numbers.items()) if key in roles]
    return ", ".join(known) or "no collective in a group of this rank"


def _calls(evidence: Evidence) -> Iterator[str]:
    yield "Last collectives of this rank, by group, the latest last, with all that are under way:"
    by_group: dict[str, list[CallLine]] = {}
    for call in evidence.calls:
        by_group.setdefault(call.group, []).append(call)
    for calls in by_group.values():
        # What is under way stands here even if many calls were issued after it.
        earlier = [call for call in calls[:-MAX_CALLS] if call.state == "under way"]
        yield from (f"  {_call(call)}" for call in [*earlier[:MAX_CALLS], *calls[-MAX_CALLS:]])
    if not by_group:
        yield "  none"


def _call(call: CallLine) -> str:
    seconds = "" if call.seconds is None else f" {call.seconds:.6f} s"
    return (
        f"{call.role} ({call.group}) {call.sequence or 'p2p'} {call.op} "
        f"{size_of(call.payload_bytes)} {call.dtype} {call.phase}: {call.state}{seconds}"
    )


def _threads() -> Iterator[str]:
    """Say which thread is which: the stacks tell their numbers only."""
    yield "Python stacks, innermost call first. The current thread is the one that writes this."
    for thread in threading.enumerate():
        yield f"  0x{thread.ident or 0:016x} {thread.name}"
    yield ""
