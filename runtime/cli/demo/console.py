"""Prints the demo's output on rank 0: addresses, a line every few steps, and summary tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....metrics.catalog.communication import COMM_CAUSE_SECONDS
from ....metrics.catalog.spec import MetricSpec
from ....metrics.catalog.tuner import TUNER_DECISIONS, TUNER_STATE, TUNER_SYMPTOM
from ....metrics.recorder import Snapshot
from ....metrics.step_record import StepRecord
from ....metrics.thresholds import DEVICE_UTILIZATION_LOW, EXPOSED_COMM_RATIO_HIGH
from ...common.format_numbers import UNKNOWN, format_bytes, format_ratio
from ...common.report_files import display_path
from ...reports.write_report import REPORT_FILE, report_command
from ...tuner.policy.diagnose import MEMORY_IDLE, MEMORY_PRESSURE
from .summary import Summary, advise, summarize

if TYPE_CHECKING:
    from ...monitor.watch import WatchHandle

NUM_LINES = 25
MAX_HELD_STEPS = 10  # until all ranks have published their addresses, which takes half a second
REDRAW_SECONDS = 0.25  # on a terminal, between updates of the line of the current step
PLAIN_WIDTH = 100  # of the tables without a terminal
_PHASES = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}
# Columns of a line; they fit in 80 characters.
_WIDTHS = {
    "loss": 5,
    "samples/s": 9,
    "s/step": 6,
    "data": 4,
    "fwd": 4,
    "bwd": 4,
    "opt": 4,
    "other": 5,
    "exposed": 7,
    "memory": 8,
    "busy": 4,
}
_ACCEPTED = "accepted"  # the tuner's outcome of a change that stays
_TRIAL_STATES = ("preflight", "applied", "trial")  # of the tuner
_CAUSES = {
    "imbalance": "another rank was late, or no transfer",
    "latency": "fixed cost of each call",
    "redundancy": "more was sent than needed",
    "bandwidth": "the link was busy",
}


class DemoConsole:
    """Prints a line of figures every few steps, and a summary at the end.

    On a terminal the line of the current step is redrawn between them. `on_step` runs on the watch
    thread, `show_summary` after the watch is closed.
    """

    def __init__(
        self, *, watch: WatchHandle, steps: int, num_ranks: int, file: TextIO | None = None
    ) -> None:
        self._watch = watch
        self._num_steps = steps
        self._num_ranks = num_ranks
        file = file or sys.stdout
        self._is_terminal = file.isatty()
        self._out = _Output(file=file, width=None if self._is_terminal else PLAIN_WIDTH)
        self._held: list[StepRecord] = []
        self._records: list[StepRecord] = []
        self._printed_addresses: set[str] = set()
        self._num_printed = 0
        self._drawn_at = 0.0

    def on_step(self, record: StepRecord) -> None:
        """Add a step, and print a line if one is due."""
        self._held.append(record)
        if self._records or len(self._held) == MAX_HELD_STEPS or not self._awaits_addresses():
            self._release()

    def show_summary(self, *, stage: int) -> None:
        """Print the summary of the whole run.

        Args:
            stage: ZeRO stage at the end of the run.
        """
        self._release()
        if not self._records:
            self._out.print("No step was recorded; the log above has the reason.")
            return
        summary = summarize(self._records, num_ranks=self._num_ranks)
        folder = self._watch.run_folder
        snapshot = self._watch.snapshot()
        states = _by_label(snapshot, TUNER_STATE)
        tables = summary_tables(
            summary,
            num_ranks=self._num_ranks,
            causes=_by_label(snapshot, COMM_CAUSE_SECONDS),
            run_log=display_path(folder / "rank-0.jsonl") if folder else None,
            report=_report_of(folder),
            tuner=TunerOutcome(
                decisions=_by_label(snapshot, TUNER_DECISIONS),
                symptoms=_by_label(snapshot, TUNER_SYMPTOM),
                state=next((name for name, is_current in states.items() if is_current), ""),
            ),
            advice=advise(summary, stage=stage),
        )
        self._out.print()
        self._out.print(tables, soft_wrap=not self._is_terminal)

    def _release(self) -> None:
        """Print the held steps, after the addresses and the path of the run log."""
        for record in self._held:
            self._print_addresses()
            if not self._records:
                folder = self._watch.run_folder
                self._out.print(
                    f"  run log in {display_path(folder)}\n" if folder else "", highlight=False
                )
                self._out.print(header(self._num_steps), soft_wrap=True)
            self._records.append(record)
            self._show(record.step)
        self._held.clear()

    def _show(self, step: int) -> None:
        if self._is_permanent(step):
            self._draw(step, end="\n")
            self._num_printed = len(self._records)
        elif self._is_terminal and time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
            self._draw(step, end="\r")

    def _awaits_addresses(self) -> bool:
        serves = self._watch.run_folder is not None and self._watch.address is not None
        return serves and len(self._addresses()) < self._num_ranks

    def _print_addresses(self) -> None:
        """Print each rank's address once; that of a late rank comes between the lines."""
        if len(self._printed_addresses) == self._num_ranks:
            return
        page = self._watch.live_page_url
        if page is not None and not self._printed_addresses:
            self._out.print(f"  live page {page}", highlight=False)
        for address in self._addresses():
            if address not in self._printed_addresses:
                self._printed_addresses.add(address)
                self._out.print(f"  curl {address}/metrics", highlight=False)

    def _addresses(self) -> list[str]:
        """Return the ranks' addresses from the targets file, or rank 0's own without one."""
        own = self._watch.address
        try:
            if self._watch.run_folder is not None:
                targets = json.loads((self._watch.run_folder / "targets.json").read_text())
                return [address for target in targets for address in target["targets"]]
        except OSError:  # not written yet, or the disk is full
            pass
        return [] if own is None else [own]

    def _is_permanent(self, step: int) -> bool:
        every = max(1, self._num_steps // NUM_LINES)
        return step == 1 or step % every == 0 or step == self._num_steps

    def _draw(self, step: int, *, end: str) -> None:
        since_last = summarize(self._records[self._num_printed :], num_ranks=self._num_ranks)
        line = step_line(since_last, step=step, num_steps=self._num_steps)
        self._out.print(line, end=end, soft_wrap=not self._is_terminal, no_wrap=True)
        self._drawn_at = time.monotonic()


def _report_of(folder: Path | None) -> str | None:
    """Return the path of the report that the end of the run has written, and its command."""
    if folder is None or not (folder / REPORT_FILE).is_file():
        return None
    return f"{display_path(folder / REPORT_FILE)}\nmade by: {report_command(folder)}"


class _Output(Console):
    """Stops printing when its pipe is closed, so that training continues."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _by_label(snapshot: Snapshot, metric: MetricSpec) -> Mapping[str, float]:
    """Return the values of a metric with one label."""
    return {label: value for (label,), value in snapshot.values.get(metric, {}).items()}


def header(num_steps: int) -> Text:
    """Return the names of a line's columns.

    Args:
        num_steps: Steps of the whole run, which determine the first column's width.
    """
    names = ["step".rjust(_step_width(num_steps)), *(n.rjust(w) for n, w in _WIDTHS.items())]
    return Text(" ".join(names), style="bold")


def step_line(steps: Summary, *, step: int, num_steps: int) -> Text:
    """Return one line of figures; those beyond their usual limit are highlighted.

    Args:
        steps: The steps since the last line.
        step: The number of the last of them.
        num_steps: Steps of the whole run.
    """
    cells = _cells(steps)
    line = Text(f"{step}/{num_steps}".rjust(_step_width(num_steps)))
    for name, width in _WIDTHS.items():
        line.append(" ")
        line.append(cells[name].rjust(width), style=_style(name, steps))
    return line


def _cells(steps: Summary) -> dict[str, str]:
    phases = dict(steps.phase_seconds)
    named = {
        column: format_ratio(steps.ratio(phases.pop(phase, 0.0)))
        for phase, column in _PHASES.items()
    }
    seconds = steps.training_seconds / steps.num_steps
    loss, rate = steps.last_loss, steps.samples_per_second
    return {
        "loss": UNKNOWN if loss is None else f"{loss:.3f}",
        "samples/s": UNKNOWN if rate is None else f"{rate:.1f}",
        "s/step": f"{seconds:.3f}",
        **named,
        "other": format_ratio(steps.ratio(sum(phases.values()))),
        "exposed": format_ratio(steps.exposed_ratio),
        "memory": format_bytes(steps.peak_bytes),
        "busy": format_ratio(steps.utilization_ratio),
    }


def _style(column: str, steps: Summary) -> str:
    exposed, busy = steps.exposed_ratio, steps.utilization_ratio
    if column == "loss":
        return "bold green"
    if column == "exposed" and exposed is not None and exposed > EXPOSED_COMM_RATIO_HIGH:
        return "yellow"
    if column == "busy" and busy is not None and busy < DEVICE_UTILIZATION_LOW:
        return "yellow"
    return ""


def _step_width(num_steps: int) -> int:
    return max(len("step"), 2 * len(str(num_steps)) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerOutcome:
    """Activity of the tuner in a run.

    Attributes:
        decisions: Number of changes by outcome.
        symptoms: Ratio of each symptom in the last diagnosis; empty without one.
        state: The tuner's last state.
    """

    decisions: Mapping[str, float]
    symptoms: Mapping[str, float]
    state: str


def summary_tables(
    summary: Summary,
    *,
    num_ranks: int,
    causes: Mapping[str, float],
    run_log: str | None,
    report: str | None,
    tuner: TunerOutcome,
    advice: Sequence[str],
) -> RenderableType:
    """Return a run's summary: time, communication, other figures, and advice.

    Args:
        summary: The whole run of one rank.
        num_ranks: Ranks of the job.
        causes: Seconds in which training waited for communication, by cause.
        run_log: Path of the step records; None if none were written.
        report: Path of the report and the command that makes it; None if it was not written.
        tuner: Activity of the tuner.
        advice: Lines on what to try next.
    """
    return Group(
        _time_table(summary, num_ranks, causes),
        _communication_table(summary),
        _other_figures(summary, run_log, report, _tuner_result(tuner)),
        Text("\nWhat to try next", style="bold"),
        *(Text(f"  {line}") for line in advice),
    )


def _time_table(summary: Summary, num_ranks: int, causes: Mapping[str, float]) -> Table:
    title = f"Time of {summary.num_steps} steps by phase (rank 0 of {num_ranks})"
    table = _table(title, "phase", "seconds", "share")
    for phase, seconds in sorted(summary.phase_seconds.items(), key=lambda item: -item[1]):
        table.add_row(phase, f"{seconds:.1f}", format_ratio(summary.ratio(seconds)))
    table.add_section()
    seconds = summary.training_seconds
    table.add_row("all", f"{seconds:.1f}", "100%", style="bold")
    table.add_row(
        "of which communication" + (" (at most)" if summary.comm_seconds_is_upper_bound else ""),
        _format_seconds(summary.comm_seconds),
        format_ratio(summary.comm_ratio),
    )
    exposed = _format_seconds(summary.exposed_seconds)
    table.add_row("of which not overlapped", exposed, format_ratio(summary.exposed_ratio))
    for cause, meaning in _CAUSES.items():
        seconds = causes.get(cause, 0.0)
        row = (f"  {cause}: {meaning}", f"{seconds:.1f}", format_ratio(summary.ratio(seconds)))
        table.add_row(*row, style="dim")
    return table


def _format_seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:.1f}"


def _communication_table(summary: Summary) -> Table:
    table = _table("Collectives", "operation", "calls", "payload", "sent", "seconds")
    for op, totals in summary.collectives.items():
        table.add_row(
            op,
            str(totals.calls),
            format_bytes(totals.payload_bytes),
            format_bytes(totals.wire_bytes),
            _format_seconds(totals.seconds),
        )
    return table


def _other_figures(summary: Summary, run_log: str | None, report: str | None, tuner: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    first, last = summary.first_loss, summary.last_loss
    if first is not None and last is not None:
        table.add_row("loss", f"{first:.3f} -> {last:.3f} nats per byte (mean of the last steps)")
    if summary.samples_per_second is not None:
        table.add_row("speed", f"{summary.samples_per_second:.1f} samples/s on all ranks")
    table.add_row("peak memory", f"{format_bytes(summary.peak_bytes)} on {summary.device}")
    table.add_row("device", f"{format_ratio(summary.utilization_ratio)} busy, all ranks")
    table.add_row("tuner", tuner)
    table.add_row("run log", run_log or "none written (setting run_log.enabled)")
    if report is not None:
        table.add_row("report", report)
    return table


def _tuner_result(tuner: TunerOutcome) -> str:
    tried = round(sum(tuner.decisions.values()))
    if tried:
        accepted = round(tuner.decisions.get(_ACCEPTED, 0))
        return f"{accepted} of {tried} changes accepted; see decisions.jsonl"
    return f"no change: {_why_no_change(tuner)}"


def _why_no_change(tuner: TunerOutcome) -> str:
    symptoms = tuner.symptoms
    if tuner.state in _TRIAL_STATES:
        return "the run ended during a trial"
    if not symptoms:
        return "the run was too short for a diagnosis"
    worst = max(set(symptoms) - {MEMORY_IDLE}, key=lambda name: symptoms[name])
    if not symptoms[worst]:
        return "no bottleneck was found"
    bottleneck = f"{worst} at {format_ratio(symptoms[worst])}"
    if symptoms.get(MEMORY_PRESSURE):
        return f"{bottleneck}; nothing is tried while memory is short"
    return f"{bottleneck}; the run was too short to test a change"


def _table(title: str, first_column: str, *number_columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column(first_column)
    for column in number_columns:
        table.add_column(column, justify="right")
    return table
