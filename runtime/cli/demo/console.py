"""Rank 0's console in the demo: addresses, a line every few steps, and a summary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from ....metrics.catalog.communication import COMM_CAUSE_SECONDS
from ....metrics.catalog.spec import MetricSpec
from ....metrics.catalog.tuner import TUNER_DECISIONS, TUNER_STATE, TUNER_SYMPTOM
from ....metrics.series import Snapshot
from ....metrics.step_record import StepRecord
from .launch import display_path
from .report import TunerOutcome, header, step_line, summary_tables
from .summary import advise, summarise

if TYPE_CHECKING:
    from ...monitor.watch import WatchHandle

NUM_LINES = 25
MAX_HELD_STEPS = 10  # until all ranks have published their addresses, which takes half a second
REDRAW_SECONDS = 0.25  # on a terminal, between updates of the line of the current step
PLAIN_WIDTH = 100  # of the tables without a terminal


class DemoConsole:
    """Prints the steps of a watch.

    On a terminal the line of the current step is redrawn; elsewhere only the lines that stay are
    printed. `on_step` runs on the watch thread, `show_summary` after the watch is closed.
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
        """Print the summary of the whole run, which ended at a ZeRO stage."""
        self._release()
        if not self._records:
            self._out.print("No step was recorded; the log above has the reason.")
            return
        summary = summarise(self._records, num_ranks=self._num_ranks)
        folder = self._watch.run_folder
        snapshot = self._watch.snapshot()
        states = _by_label(snapshot, TUNER_STATE)
        tables = summary_tables(
            summary,
            num_ranks=self._num_ranks,
            causes=_by_label(snapshot, COMM_CAUSE_SECONDS),
            run_log=display_path(folder / "rank-0.jsonl") if folder else None,
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
        since_last = summarise(self._records[self._num_printed :], num_ranks=self._num_ranks)
        line = step_line(since_last, step=step, num_steps=self._num_steps)
        self._out.print(line, end=end, soft_wrap=not self._is_terminal, no_wrap=True)
        self._drawn_at = time.monotonic()


class _Output(Console):
    """A console that stops printing once its reader is gone, so that training goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _by_label(snapshot: Snapshot, metric: MetricSpec) -> Mapping[str, float]:
    """Return the values of a metric with one label."""
    return {label: value for (label,), value in snapshot.values.get(metric, {}).items()}
