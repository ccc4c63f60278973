"""The table at the end of the demo: a summary as rich renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...tuner.policy.diagnose import MEMORY_IDLE, MEMORY_PRESSURE
from .line import UNKNOWN, format_ratio, format_size
from .summary import Summary

KEPT = "accepted"  # the verdict on a change that stays
TRYING = ("preflight", "applied", "trial")  # states of the tuner
# What a cause of waiting for communication means, in words.
CAUSES = {
    "imbalance": "another rank was late",
    "latency": "each call has a price",
    "redundancy": "more was sent than needed",
    "bandwidth": "the link was busy",
}


def summary_table(
    summary: Summary,
    *,
    num_ranks: int,
    causes: Mapping[str, float],
    run_log: str | None,
    verdicts: Mapping[str, float],
    symptoms: Mapping[str, float],
    tuner_state: str,
    advice: Sequence[str],
) -> RenderableType:
    """Lay out a run's summary: time, communication, the other figures, and what to try next.

    Args:
        summary: The run of one rank.
        num_ranks: Ranks of the job.
        causes: Seconds in which training waited for communication, by cause.
        run_log: Where the record of each step is; None if none was written.
        verdicts: How many changes the tuner came to each verdict on.
        symptoms: How much each holds the run back, as of its last look; empty if it had none.
        tuner_state: That it was in last.
        advice: What to try next.
    """
    return Group(
        _time(summary, num_ranks, causes),
        _communication(summary),
        _figures(summary, run_log, _tuner(verdicts, symptoms, tuner_state)),
        Text("\nWhat to try next", style="bold"),
        *(Text(f"  {line}") for line in advice),
    )


def _time(summary: Summary, num_ranks: int, causes: Mapping[str, float]) -> Table:
    title = f"Where the time of {summary.num_steps} steps went (rank 0 of {num_ranks})"
    table = _table(title, "phase", "seconds", "share")
    for phase, seconds in sorted(summary.phase_seconds.items(), key=lambda item: -item[1]):
        table.add_row(phase, f"{seconds:.1f}", format_ratio(summary.ratio(seconds)))
    table.add_section()
    seconds = summary.training_seconds
    table.add_row("all", f"{seconds:.1f}", "100%", style="bold")
    table.add_row(
        "in which communication ran",
        _seconds(summary.comm_seconds),
        format_ratio(summary.comm_ratio),
    )
    exposed = _seconds(summary.exposed_seconds)
    table.add_row("and training waited for it", exposed, format_ratio(summary.exposed_ratio))
    for cause, meaning in CAUSES.items():
        seconds = causes.get(cause, 0.0)
        row = (f"  {cause}: {meaning}", f"{seconds:.1f}", format_ratio(summary.ratio(seconds)))
        table.add_row(*row, style="dim")
    return table


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:.1f}"


def _communication(summary: Summary) -> Table:
    table = _table("Collectives", "operation", "calls", "payload", "sent", "seconds")
    for op, totals in summary.collectives.items():
        table.add_row(
            op,
            str(totals.calls),
            format_size(totals.payload_bytes),
            format_size(totals.wire_bytes),
            UNKNOWN if totals.seconds is None else f"{totals.seconds:.1f}",
        )
    return table


def _figures(summary: Summary, run_log: str | None, tuner: str) -> Table:
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="bold")
    figures.add_column(overflow="fold")
    first, last = summary.first_loss, summary.last_loss
    if first is not None and last is not None:
        figures.add_row(
            "loss", f"{first:.3f} -> {last:.3f} nats per byte, a mean of the last steps"
        )
    if summary.samples_per_second is not None:
        figures.add_row("speed", f"{summary.samples_per_second:.1f} samples/s on all ranks")
    figures.add_row("peak memory", f"{format_size(summary.peak_bytes)} on {summary.device}")
    figures.add_row("device", f"{format_ratio(summary.utilization_ratio)} busy, all ranks")
    figures.add_row("tuner", tuner)
    figures.add_row("run log", run_log or "none written (setting run_log.enabled)")
    return figures


def _tuner(verdicts: Mapping[str, float], symptoms: Mapping[str, float], state: str) -> str:
    tried = round(sum(verdicts.values()))
    if tried:
        kept = round(verdicts.get(KEPT, 0))
        return f"changes kept: {kept} of {tried}, each told in decisions.jsonl"
    return f"changed nothing: {_why_nothing(symptoms, state)}"


def _why_nothing(symptoms: Mapping[str, float], state: str) -> str:
    if state in TRYING:
        return "a trial was under way when the run ended"
    if not symptoms:
        return "the run was too short for a look"
    worst = max(set(symptoms) - {MEMORY_IDLE}, key=lambda name: symptoms[name])
    if not symptoms[worst]:
        return "nothing holds this run back"
    found = f"{worst} at {format_ratio(symptoms[worst])}"
    if symptoms.get(MEMORY_PRESSURE):
        return f"{found}, and nothing is tried while memory is short"
    return f"{found}, but no change was worth a trial in so few steps"


def _table(title: str, first_column: str, *number_columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column(first_column)
    for column in number_columns:
        table.add_column(column, justify="right")
    return table
