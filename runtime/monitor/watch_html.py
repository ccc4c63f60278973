"""Shows a watch in a notebook, as a small piece of HTML without scripts; and as a line of text.

Colors come from the notebook's own theme, apart from the bars. Each value is that of a metric of
this rank, or a sum of series of one metric. A value that is not known is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from ...metrics.catalog import communication, memory, training
from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES
from ...metrics.recorder import Snapshot
from ...metrics.thresholds import COMM_COVERAGE_LOW, OOM_RISK_HIGH
from ..common.format_numbers import format_bytes

_COLORS = {
    "data": "#e0a100",
    "forward": "#3b82f6",
    "backward": "#6366f1",
    "optimizer": "#10b981",
    "eval": "#a855f7",
    "generate": "#ec4899",
    "checkpoint": "#f97316",
    "other": "#9ca3af",
}
_STYLE = "font:13px/1.5 system-ui,sans-serif;max-width:560px"
_LINK_STYLE = "color:inherit;text-decoration:underline"
_TABLE_STYLE = "border-collapse:collapse;margin:.3em 0;font:inherit;color:inherit"
# A share of the bar below this is listed, and not drawn.
_SMALLEST_SHARE = 0.005


def watch_html(
    snapshot: Snapshot,
    *,
    run_id: str | None,
    is_open: bool,
    page_url: str | None,
    folder: Path | None,
    now: float | None = None,
) -> str:
    """Return the state of a run on this rank, as HTML.

    Args:
        snapshot: The metrics of this rank.
        run_id: The run id; None until it is known.
        is_open: Whether the watch is open.
        page_url: The address of the live page; None if none is served.
        folder: The run folder; None if nothing is logged.
        now: Unix time.
    """
    now = time.time() if now is None else now
    rows = "".join(
        f'<tr><td style="text-align:left;padding:0 1em 0 0;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left;padding:0">{escape(value)}</td></tr>'
        for name, value in _rows(snapshot, now)
    )
    state = _state(snapshot, is_open)
    link = (
        f'<a style="{_LINK_STYLE}" href="{escape(page_url)}">live page</a> &middot; '
        if page_url and is_open
        else ""
    )
    where = f"run log <code>{escape(str(folder))}</code>" if folder else "no run log"
    return (
        f'<div style="{_STYLE}"><b>zerowatch</b> &middot; {escape(state)} &middot; '
        f"<code>{escape(run_id or 'no run id yet')}</code>"
        f'<table style="{_TABLE_STYLE}">{rows}</table>'
        f"{_phase_bar(snapshot)}<div>{link}{where}</div></div>"
    )


def watch_text(
    snapshot: Snapshot,
    *,
    run_id: str | None,
    is_open: bool,
    page_url: str | None,
    folder: Path | None,
) -> str:
    """Return the state of a run on this rank as one line. The arguments are those of `watch_html`.

    Examples:
        >>> watch_text(snapshot, run_id="night-7", is_open=True, page_url=None, folder=None)
        'zerowatch.Watch night-7: training, 128 steps, loss 0.1232'
    """
    steps, loss = snapshot.value(training.STEPS), snapshot.value(training.LOSS)
    parts = [
        _state(snapshot, is_open),
        f"{steps:,.0f} step{'' if steps == 1 else 's'}" if steps else None,
        None if loss is None else f"loss {loss:.5g}",
        f"live page {page_url}" if page_url and is_open else None,
        f"run log {folder}" if folder else None,
    ]
    return f"zerowatch.Watch {run_id or 'without run id'}: {', '.join(filter(None, parts))}"


def _state(snapshot: Snapshot, is_open: bool) -> str:
    reasons = [reason for (reason,) in snapshot.values.get(training.RUN_END_INFO, {})]
    if reasons:
        return f"ended ({reasons[0]})"
    if not is_open:
        return "closed"
    return "training" if snapshot.value(training.STEPS) else "before the first step"


def _rows(snapshot: Snapshot, now: float) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the table."""
    steps = snapshot.value(training.STEPS)
    last = snapshot.value(training.LAST_STEP_TIMESTAMP)
    if steps:
        ago = "" if last is None else f", the last {_ago(now - last)} ago"
        yield "steps", f"{steps:,.0f}{ago}"
    loss = snapshot.value(training.LOSS)
    if loss is not None:
        yield "loss", f"{loss:.5g}"
    median = snapshot.value(training.STEP_DURATION_QUANTILE, "0.5")
    if median is not None:
        yield "step time", f"{_seconds(median)} (median of the last minute)"
    seconds = _training_seconds(snapshot)
    for name, spec in (("samples", training.SAMPLES), ("tokens", training.TOKENS)):
        amount = snapshot.value(spec)
        if amount and seconds:
            yield f"{name} per second", f"{amount / seconds:,.4g} on this rank, mean of the run"
    yield from _communication(snapshot, seconds)
    for device in sorted({device for device, _ in snapshot.values.get(memory.MEMORY_PEAK, {})}):
        yield f"memory of {device}", _memory(snapshot, device)


def _communication(snapshot: Snapshot, seconds: float) -> Iterator[tuple[str, str]]:
    coverage = snapshot.value(communication.COMM_COVERAGE_RATIO)
    if coverage is None or not seconds:
        return
    if coverage < COMM_COVERAGE_LOW:
        yield "exposed communication", f"not known: {coverage:.0%} of the collectives are timed"
        return
    exposed = snapshot.total(communication.COMM_EXPOSED_SECONDS) / seconds
    yield "exposed communication", f"{exposed:.1%} of training time"


def _memory(snapshot: Snapshot, device: str) -> str:
    peak = snapshot.value(memory.MEMORY_PEAK, device, "allocated")
    limit = snapshot.value(memory.MEMORY_LIMIT, device)
    risk = snapshot.value(memory.OOM_RISK, device)
    text = "not known" if peak is None else f"peak {format_bytes(peak)}"
    if limit:
        text += f" of {format_bytes(limit)}"
    if risk is not None:
        text += f", out-of-memory risk {risk:.0%}"
        if risk > OOM_RISK_HIGH:
            text += " (high)"
    return text


def _phase_bar(snapshot: Snapshot) -> str:
    spent = {phase: snapshot.value(training.PHASE_SECONDS, phase) or 0.0 for phase in PHASES}
    total = sum(spent.values())
    if not total:
        return ""
    bars = "".join(
        f'<div style="width:{share:.1%};background:{_COLORS[phase]}"></div>'
        for phase, seconds in spent.items()
        if (share := seconds / total) >= _SMALLEST_SHARE
    )
    legend = " &nbsp; ".join(
        f'<span style="white-space:nowrap"><span style="color:{_COLORS[phase]}">&#9632;</span> '
        f"{phase} {seconds / total:.1%}</span>"
        for phase, seconds in spent.items()
        if seconds
    )
    return (
        f'<div style="display:flex;height:8px;border-radius:4px;overflow:hidden">{bars}</div>'
        f'<div style="font-size:12px">{legend}</div>'
    )


def _training_seconds(snapshot: Snapshot) -> float:
    return sum(
        seconds
        for (phase,), seconds in snapshot.values.get(training.PHASE_SECONDS, {}).items()
        if phase not in NON_TRAINING_PHASES
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
