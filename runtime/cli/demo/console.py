"""What rank 0 of the demo shows: where to look, a line every few steps, and a summary."""

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
from ....metrics.snapshot import Snapshot
from ....metrics.step_record import StepRecord
from .line import header, step_line
from .paths import shown
from .summary import advise, summarise
from .table import summary_table

if TYPE_CHECKING:
    from ...monitor.watch import Watch

KEPT_LINES = 25
MAX_HELD_STEPS = 10  # until all ranks have told where they serve, which takes them half a second
REDRAW_SECONDS = 0.25  # on a terminal, between two looks of the line that is not kept
PLAIN_WIDTH = 100  # of the table where there is no terminal to ask


class DemoConsole:
    """Follows a watch. On a terminal the line of the moment is redrawn; elsewhere lines are plain.

    `on_step` runs on the watch thread, and `show_summary` after the watch was closed.
    """

    def __init__(
        self, *, watch: Watch, steps: int, num_ranks: int, file: TextIO | None = None
    ) -> None:
        self._watch = watch
        self._num_steps = steps
        self._num_ranks = num_ranks
        file = file or sys.stdout
        self._is_terminal = file.isatty()
        self._out = _Output(file=file, width=None if self._is_terminal else PLAIN_WIDTH)
        self._held: list[StepRecord] = []
        self._records: list[StepRecord] = []
        self._told: set[str] = set()
        self._shown = 0
        self._drawn_at = 0.0

    def on_step(self, record: StepRecord) -> None:
        """Take in a step, and show a line if one is due."""
        self._held.append(record)
        if self._records or len(self._held) == MAX_HELD_STEPS or not self._more_will_serve():
            self._release()

    def show_summary(self, *, stage: int) -> None:
        """Show what the whole run adds up to, which ended at a ZeRO stage."""
        self._release()
        if not self._records:
            self._out.print("No step was recorded; the log above says why.")
            return
        summary = summarise(self._records, num_ranks=self._num_ranks)
        folder = self._watch.run_folder
        seen = self._watch.snapshot()
        states = _by_label(seen, TUNER_STATE)
        table = summary_table(
            summary,
            num_ranks=self._num_ranks,
            causes=_by_label(seen, COMM_CAUSE_SECONDS),
            run_log=shown(folder / "rank-0.jsonl") if folder else None,
            verdicts=_by_label(seen, TUNER_DECISIONS),
            symptoms=_by_label(seen, TUNER_SYMPTOM),
            tuner_state=next((name for name, is_in in states.items() if is_in), ""),
            advice=advise(summary, stage=stage),
        )
        self._out.print()
        self._out.print(table, soft_wrap=not self._is_terminal)

    def _release(self) -> None:
        """Show the steps held back, the first of them below where to look while it runs."""
        for record in self._held:
            self._tell_addresses()
            if not self._records:
                folder = self._watch.run_folder
                self._out.print(
                    f"  run log in {shown(folder)}\n" if folder else "", highlight=False
                )
                self._out.print(header(self._num_steps), soft_wrap=True)
            self._records.append(record)
            self._show(record.step)
        self._held.clear()

    def _show(self, step: int) -> None:
        if self._is_kept(step):
            self._draw(step, end="\n")
            self._shown = len(self._records)
        elif self._is_terminal and time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
            self._draw(step, end="\r")

    def _more_will_serve(self) -> bool:
        told = self._watch.run_folder is not None and self._watch.address is not None
        return told and len(self._addresses()) < self._num_ranks

    def _tell_addresses(self) -> None:
        """Name each rank's address once; of a late rank, between the lines."""
        if len(self._told) == self._num_ranks:
            return
        for address in self._addresses():
            if address not in self._told:
                self._told.add(address)
                self._out.print(f"  curl {address}/metrics", highlight=False)

    def _addresses(self) -> list[str]:
        """Return where the ranks serve: from rank 0's file for Prometheus, else its own only."""
        own = self._watch.address
        try:
            if self._watch.run_folder is not None:
                targets = json.loads((self._watch.run_folder / "targets.json").read_text())
                return [address for target in targets for address in target["targets"]]
        except OSError:  # not written, perhaps for want of space
            pass
        return [] if own is None else [own]

    def _is_kept(self, step: int) -> bool:
        every = max(1, self._num_steps // KEPT_LINES)
        return step == 1 or step % every == 0 or step == self._num_steps

    def _draw(self, step: int, *, end: str) -> None:
        stretch = summarise(self._records[self._shown :], num_ranks=self._num_ranks)
        line = step_line(stretch, step=step, num_steps=self._num_steps)
        self._out.print(line, end=end, soft_wrap=not self._is_terminal, no_wrap=True)
        self._drawn_at = time.monotonic()


class _Output(Console):
    """A console that falls silent when nobody reads it any more, and lets training go on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _by_label(seen: Snapshot, metric: MetricSpec) -> Mapping[str, float]:
    """Return the values of a metric of one label."""
    return {label: value for (label,), value in seen.values.get(metric, {}).items()}
