"""The report on a rank that ended without a word: the verdict, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.report_files import utc_text
from ...common.units import format_bytes
from .exit_cause import ExitCause, ExitFinding
from .formatting import percent, shapes_words
from .last_records import LastRecord, latest
from .liveness_file import ProcessMarker

_OUT_OF_MEMORY = (
    "Let the host hold less: fewer or leaner data loader workers, less offloading to cpu, a "
    "smaller micro-batch; or give the job more memory.",
    "The kernel's log has the list of what every process held then (dmesg, or journalctl -k).",
)
_ADVICE = {
    ExitCause.OOM_KILLER: _OUT_OF_MEMORY,
    ExitCause.PROBABLY: (*_OUT_OF_MEMORY, "Look there whether it names this process's id."),
    ExitCause.UNKNOWN: ("Look into the logs of the machine and of the scheduler at that time.",),
    ExitCause.OTHERWISE: (
        "Look at the launcher's and the scheduler's logs for a signal (time limit, preemption, "
        "another rank's end), and for a core dump.",
    ),
}


def headline(life: ProcessMarker, finding: ExitFinding, records: Sequence[LastRecord]) -> str:
    """Say in one line what became of the rank, and how its memory stood."""
    step = f"after step {records[-1].step}" if records else "before its first record"
    return f"rank {life.rank} {finding.verdict.value}, {step}{_memory(records)}"


def report_text(life: ProcessMarker, finding: ExitFinding, records: Sequence[LastRecord]) -> str:
    """Write the whole report; line 1 is the headline."""
    started = utc_text(life.started_at_unix_seconds)
    lines = [headline(life, finding, records), ""]
    lines += [f"rank {life.rank} on {life.host}, process {life.pid}, started {started}"]
    if records:
        lines += [f"last record: {utc_text(records[-1].ended_at_unix_seconds)}"]
    lines += [f"the kernel's OOM killer: {finding.why}", "", *_table(records), ""]
    lines += ["What to do next:"]
    lines += [f"  {n}. {words}" for n, words in enumerate(_ADVICE[finding.verdict], 1)]
    return "\n".join(lines) + "\n"


def _memory(records: Sequence[LastRecord]) -> str:
    resident, limit = latest(records, "resident_bytes"), latest(records, "limit_bytes")
    if resident is None:
        return ""
    risk = latest(records, "risk_ratio")
    of_limit = f", limit {format_bytes(limit)}" if limit else ""
    peak = latest(records, "peak_bytes")
    at_peak = f", peak {format_bytes(peak)}" if peak else ""
    said = f"; its last reading was {format_bytes(resident)} RSS{at_peak}{of_limit}"
    return said if risk is None else f"{said}, risk {percent(risk, 1)}"


def _table(records: Sequence[LastRecord]) -> Iterator[str]:
    if not records:
        yield "Last records: none."
        return
    yield "Last records (host memory; not every step reads it):"
    row = "{:>9} {:>10} {:>10} {:>10} {:>9} {:>7}  {}".format
    yield row("step", "RSS", "peak", "limit", "of limit", "risk", "micro-batches")
    for each in records:
        sizes = (each.resident_bytes, each.peak_bytes, each.limit_bytes)
        yield row(
            each.step,
            *("-" if size is None else format_bytes(size) for size in sizes),
            "-" if each.limit_ratio is None else percent(each.limit_ratio, 1),
            "-" if each.risk_ratio is None else percent(each.risk_ratio, 1),
            shapes_words(each.shapes),
        )
