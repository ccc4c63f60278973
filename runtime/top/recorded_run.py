"""Computes what the terminal shows of a run folder: the figures of the report of the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..reports.run_summary import RankRow, RunSummary, TimeShare, summary_of
from .live_run import format_seconds, with_rest
from .run_view import AlertView, MemoryView, RankView, RunView, Share, TunerView

# A run that is active is read again after this time, and after ten times the time of reading it.
READ_SECONDS = 15.0
_MAX_PROBLEMS = 5


class RecordedRun:
    """A run folder, read again while something is written to it.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._view: RunView | None = None
        self._written_at = 0.0
        self._next_read = 0.0

    def read(self) -> RunView:
        """Return what is recorded.

        Raises:
            RunFolderError: There is no such folder, or nothing in it is of a run.
        """
        began, written_at = time.monotonic(), self._last_write()
        is_due = written_at != self._written_at and began >= self._next_read
        if self._view is None or is_due:
            self._view = recorded_view(summary_of(self._folder), at=written_at)
            self._written_at = written_at
            spent = time.monotonic() - began
            self._next_read = began + max(READ_SECONDS, 10 * spent)
        return self._view

    def _last_write(self) -> float:
        return last_write(self._folder)


def last_write(folder: Path) -> float:
    """Return the Unix time at which rank 0 last wrote to a run folder; 0 if it never did.

    A report changes the time of the folder itself, so that counts only without logs.
    """
    logs = [folder / name for name in ("rank-0.jsonl", "metrics-0.jsonl", "attempts.jsonl")]
    return max(_write_times(logs), default=max(_write_times([folder]), default=0.0))


def _write_times(paths: Iterable[Path]) -> Iterator[float]:
    for path in paths:
        try:
            yield path.stat().st_mtime
        except OSError:
            continue


def recorded_view(summary: RunSummary, at: float) -> RunView:
    """Return what the terminal shows of the summary of a run.

    Args:
        summary: The summary.
        at: Unix time at which rank 0 last wrote to the folder.
    """
    exposed, step_seconds = summary.figures["comm_exposed_ratio"], summary.figures["step_seconds"]
    return RunView(
        run_id=summary.run_id,
        status=summary.status.replace("_", " "),
        source=summary.folder,
        is_live=False,
        at=summary.facts.ended or at,
        period="whole run",
        facts=list(_facts(summary)),
        phases=_shares(summary.phases),
        exposed=None
        if exposed is None
        else Share(
            name="exposed",
            ratio=exposed,
            seconds_per_step=None if step_seconds is None else exposed * step_seconds,
        ),
        causes=_causes(summary.causes),
        memory=[
            MemoryView(
                device=f"{row.device} rank {row.rank}",
                peak_bytes=row.peak_bytes,
                limit_bytes=row.limit_bytes,
                predicted_bytes=None
                if row.limit_bytes is None or row.headroom_bytes is None
                else row.limit_bytes - row.headroom_bytes,
                risk_ratio=row.risk_ratio,
                categories=dict(sorted(row.categories.items(), key=lambda item: -item[1])),
            )
            for row in summary.memory
        ],
        ranks=[_rank(row) for row in summary.ranks],
        alerts=[
            AlertView(severity=each.severity, name=each.name, text=f"{each.sentence} {each.advice}")
            for each in summary.findings
        ],
        alerts_source="findings about the whole run",
        tuner=TunerView(
            state=summary.tuner.state or summary.tuner.mode,
            symptoms=summary.tuner.symptoms or {},
            decisions=[
                f"{each.change}: {each.verdict.replace('_', ' ')}"
                + ("" if each.gain is None else f", {each.gain:+.1%}")
                for each in reversed(summary.tuner.decisions)
            ],
        ),
        straggler_threshold=summary.straggler_threshold,
        verdict=summary.verdict,
        notes=_notes(summary.problems),
    )


def _shares(shares: Iterable[TimeShare]) -> list[Share]:
    return [
        Share(name=share.name, ratio=share.ratio, seconds_per_step=share.seconds_per_step)
        for share in shares
        if share.seconds
    ]


def _causes(shares: Iterable[TimeShare]) -> list[Share]:
    *causes, rest = _shares(shares) or [Share(name="unknown", ratio=0.0, seconds_per_step=None)]
    return with_rest(causes, rest) if rest.name == "unknown" else [*causes, rest]


def _facts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    forms = (
        ("steps", "steps", "{:,.0f}"),
        ("tokens/s", "tokens_per_second", "{:,.4g}"),
        ("samples/s", "samples_per_second", "{:,.4g}"),
        ("loss", "loss", "{:.4g}"),
        ("MFU", "mfu_ratio", "{:.1%}"),
        ("skipped", "skipped_ratio", "{:.1%}"),
    )
    known = {
        name: form.format(value)
        for name, figure, form in forms
        if (value := summary.figures[figure])
    }
    if "tokens/s" in known:
        known.pop("samples/s", None)
    for name, text in known.items():
        yield name, text
        if name == "steps":
            for quantile, label in (("p50", "step p50"), ("p99", "p99")):
                if seconds := summary.figures[f"step_seconds_{quantile}"]:
                    yield label, format_seconds(seconds)
    if seconds := summary.figures["seconds"]:
        yield "took", format_seconds(seconds)
    if stage := summary.facts.info.get("zero_stage"):
        yield "ZeRO", stage
    if summary.facts.attempts > 1:
        yield "attempts", str(summary.facts.attempts)


def _rank(row: RankRow) -> RankView:
    return RankView(
        rank=row.rank,
        node=row.host,
        state="recorded",
        steps=row.steps,
        step_seconds=row.step_seconds,
        exposed_ratio=row.exposed_ratio,
        wait_ratio=row.wait_ratio,
        data_ratio=row.data_ratio,
        memory_ratio=row.memory_peak_ratio,
        risk_ratio=row.oom_risk_ratio,
        utilization_ratio=row.utilization_ratio,
        mfu_ratio=row.mfu_ratio,
        straggler_score=row.straggler_score,
        straggler_phase=row.straggler_phase,
    )


def _notes(problems: Sequence[str]) -> list[str]:
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], *([f"{more} more problems"] if more > 0 else [])]
