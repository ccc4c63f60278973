"""The report of a hang: its summary, the evidence, then every thread's Python stack."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...common.report_files import create_first_free, create_private, utc_text
from ..messages import Heartbeat
from .hang_evidence import CallSummary, HangEvidence
from .missing_ranks import missing, ranks_text, size_text, summary, waiting

MAX_REPORTS = 5
MAX_PEERS = 64
MAX_CALLS = 32


def report_text(evidence: HangEvidence) -> str:
    """Return the report without the stacks; line 1 is the summary."""
    lines = [summary(evidence), "", *_moment(evidence), ""]
    lines += [*_absences(evidence), *_peers(evidence), "", *_calls(evidence), "", *_threads()]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, evidence: HangEvidence) -> Path | None:
    """Write the report into the run folder, readable by its owner alone.

    Returns:
        The report's path; None if the run has MAX_REPORTS reports of this rank already.

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


def write_flight_recorder_dump(report: Path, dump: bytes) -> None:
    """Write torch's own record of collectives next to the report, readable by its owner alone."""
    kind = "json" if dump.startswith(b"{") else "pickle"
    with (
        contextlib.suppress(OSError),  # the report itself is written and has more detail
        os.fdopen(create_private(report.with_suffix(f".flight.{kind}")), "wb") as file,
    ):
        file.write(dump)


def _moment(evidence: HangEvidence) -> Iterator[str]:
    yield f"rank {evidence.rank} on {evidence.host}, {utc_text(evidence.at_unix_seconds)}"
    yield f"last step that ended: {evidence.step}; phase: {evidence.phase}"
    yield (
        f"no progress for {evidence.silent_seconds:.1f} s; "
        f"limit {evidence.limit_seconds:.1f} s, expected pauses left out"
    )
    yield f"training thread: {evidence.location}"


def _absences(evidence: HangEvidence) -> Iterator[str]:
    """List, for each collective that a rank waits in, which ranks are missing there."""
    own = f"rank {evidence.rank}"
    lines = [f"{one.call}: {own} waits for {ranks_text(one.ranks)}" for one in missing(evidence)]
    lines += [
        f"{one.call}: {ranks_text(one.ranks)} wait{'s' * (len(one.ranks) == 1)} for {own}"
        for one in waiting(evidence)
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
    by_silence = sorted(evidence.peers.values(), key=_silence)
    yield from (f"  {_peer(peer, roles)}" for peer in by_silence[:MAX_PEERS])
    if len(by_silence) > MAX_PEERS:
        yield f"  and {len(by_silence) - MAX_PEERS} more, silent for less long"
    own = {rank_set.key: rank_set.issued for rank_set in evidence.rank_sets.values()}
    yield f"  this rank: {_issued(own, roles)}"


def _silence(peer: Heartbeat) -> tuple[float, int]:
    return (-(peer.age_seconds or 0.0), peer.rank)


def _peer(peer: Heartbeat, roles: Mapping[str, str]) -> str:
    age = "one heartbeat only" if peer.age_seconds is None else f"{peer.age_seconds:.1f} s"
    pause = f", in {peer.pause}" if peer.pause else ""
    return f"rank {peer.rank} on {peer.host}: {age}{pause}; {_issued(peer.issued, roles)}"


def _issued(numbers: Mapping[str, int], roles: Mapping[str, str]) -> str:
    """List the numbers of the rank sets that this rank shares."""
    known = [f"{roles[key]} ({key}) {n}" for key, n in sorted(numbers.items()) if key in roles]
    return ", ".join(known) or "no collective in a group of this rank"


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
        yield "  none"


def _call(call: CallSummary) -> str:
    seconds = "" if call.seconds is None else f" {call.seconds:.6f} s"
    return (
        f"{call.role} ({call.key}) {call.sequence or 'p2p'} {call.op} "
        f"{size_text(call.payload_bytes)} {call.dtype} {call.phase}: "
        f"{'in flight' if call.in_flight else 'done'}{seconds}"
    )


def _threads() -> Iterator[str]:
    """List the names of the threads: the stacks have their numbers only."""
    yield "Python stacks, innermost call first. The current thread is the one that writes this."
    for thread in threading.enumerate():
        yield f"  0x{thread.ident or 0:016x} {thread.name}"
    yield ""
