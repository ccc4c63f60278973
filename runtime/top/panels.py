"""Draws the panels of the terminal as text of a given width. Knows nothing about the terminal.

Each figure can be read without colors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.text import Text

from ...metrics.thresholds import (
    EXPOSED_COMM_RATIO_HIGH,
    MEMORY_HEADROOM_LOW,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
)
from ..common.format_numbers import UNKNOWN, format_bytes, format_ratio
from ..common.plain_text import printable
from .live_run import format_seconds
from .run_view import AlertView, MemoryView, RankView, RunView, Share

TITLE, DIM, BAD, WARN, GOOD, ACCENT = "bold", "dim", "bold red", "yellow", "green", "cyan"
_SEVERITY = {"critical": (BAD, "!!"), "warning": (WARN, "! "), "info": (ACCENT, "i ")}
_STATUS = {
    "training": GOOD,
    "completed": GOOD,
    "running": GOOD,
    "starting": ACCENT,
    "interrupted": WARN,
    "stalled": WARN,
    "unknown": WARN,
}
_CAUSES = {
    "imbalance": "another rank was late",
    "latency": "fixed cost of each call",
    "redundancy": "more bytes than needed",
    "bandwidth": "the link was busy",
    "unknown": "not attributed",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def header(view: RunView, width: int, now: float, *, is_paused: bool = False) -> Text:
    """Return two lines: the run with its state, and its most important figures."""
    age = max(0.0, now - view.at)
    if is_paused:
        kind = f"paused at {datetime.fromtimestamp(view.at, UTC):%H:%M:%S} UTC"
    elif view.is_live and all(rank.state == "ended" for rank in view.ranks):
        kind = "last values"
    elif view.is_live:
        kind = "live" if age < 10 else f"live, {format_age(age)} ago"
    elif view.status == "running":
        kind = f"log, last step {format_age(age)} ago"
    else:
        kind = f"ended {datetime.fromtimestamp(view.at, UTC):%Y-%m-%d %H:%M} UTC"
    silent = sum(rank.state == "no answer" for rank in view.ranks)
    not_read = sum(rank.state == "not read yet" for rank in view.ranks)
    num_ranks = len(view.ranks)
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    line = Text(no_wrap=True)
    line.append(f" {printable(view.run_id)} ", style="reverse")
    line.append(f" {printable(view.status)} ", style=_STATUS.get(view.status, BAD))
    line.append(f" {ranks}")
    if silent:
        line.append(f", {silent} silent", style=BAD)
    if not_read:
        line.append(f", {not_read} not read yet", style=DIM)
    line.append(" | ", style=DIM)
    line.append(kind, style=WARN if is_paused else DIM)
    line.append(f" | {printable(view.source)}", style=DIM)
    line.truncate(width, overflow="ellipsis")
    facts = Text(no_wrap=True)
    for name, value in view.facts:
        part = Text.assemble((f" {printable(name)} ", DIM), (printable(value), TITLE))
        if facts.cell_len + part.cell_len > width:
            break
        facts.append_text(part)
    return Text("\n").join([line, facts])


def time_panel(view: RunView, width: int, height: int) -> Text:
    """Return the phases with their share of training time."""
    lines = [_title("Where the time goes", view.period, width)]
    lines += [_bar_line(share, width, ACCENT) for share in view.phases[: height - 1]]
    return _joined(lines, "no step yet", height)


def comm_panel(view: RunView, width: int, height: int) -> Text:
    """Return exposed communication and its causes."""
    title = _title("Exposed communication", view.period, width)
    if view.exposed is None:
        return _joined([title], "not known yet" if view.is_live else "not recorded", height)
    style = WARN if view.exposed.ratio > float(EXPOSED_COMM_RATIO_HIGH) else GOOD
    lines = [title, _bar_line(view.exposed, width, style)]
    if not view.causes and view.exposed.ratio >= 0.0005:
        lines.append(Text("causes are not known yet" if view.is_live else "causes: not recorded"))
    for cause in view.causes:
        line = _bar_line(cause, width, ACCENT, indent=1)
        if width >= 60:
            line = _bar_line(cause, width - 24, ACCENT, indent=1)
            line.append(f" {_CAUSES.get(cause.name, '')}", style=DIM)
        lines.append(line)
    return _joined(lines, "", height)


def memory_panel(view: RunView, width: int, height: int) -> Text:
    """Return the memory of each kind of device with its limit, forecast, risk and categories."""
    lines = [_title("Memory", "the rank nearest to its limit", width)]
    per_device = max(1, (height - 1) // max(1, len(view.memory)))
    for row in view.memory:
        lines += _memory_lines(row, width, per_device)
    return _joined(lines, "no readings", height)


def tuner_panel(view: RunView, width: int, height: int) -> Text:
    """Return the tuner's state, symptoms, decisions and knobs."""
    tuner = view.tuner
    lines = [_title("Tuner", tuner.state or "none", width)]
    if tuner.symptoms:
        lines += _wrapped("symptoms", _pairs(tuner.symptoms, "{:.0%}"), width)
    elif tuner.state:
        lines.append(Text("no symptoms", style=DIM))
    for decision in tuner.decisions:
        line = Text(printable(decision), no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(lines) < height - 1:
        knobs = [f"{name} {value}" for name, value in tuner.knobs.items()]
        lines += _wrapped("knobs", knobs, width)
    empty = "no tuner" if view.is_live else "nothing recorded"
    return _joined(lines[:height], "" if tuner.state else empty, height)


def straggler_strip(view: RunView, width: int, height: int) -> Text:
    """Return one character for each rank: the higher, the slower it is than the median rank.

    If there is not enough room, a character is the worst of several ranks. The slow ranks are named
    after the characters; without room there, in the title.
    """
    limit, num_lines = view.straggler_threshold, max(1, height - 1)
    per_cell = math.ceil(len(view.ranks) / (num_lines * width)) or 1
    strip = Text()
    for at in range(0, len(view.ranks), per_cell):
        worst = max(view.ranks[at : at + per_cell], key=SORTS["slow in"])
        strip.append(*_straggler_cell(worst, limit))
    lines = [strip[at : at + width] for at in range(0, len(strip), width)] or [Text()]
    words, style = _stragglers(view)
    legend = f"full height from {2 * limit:.0%}, - unknown, x no answer"
    each = "score per rank" if per_cell == 1 else f"{per_cell} ranks per character"
    title = _title("Stragglers", "", width)
    if len(lines[-1]) + 2 + len(words) <= width:
        lines[-1].append(f"  {words}", style=style)
    elif len(lines) < num_lines:
        lines.append(Text(words, style=style, no_wrap=True))
    else:
        title.append(f"  {words}", style=style)
    title.append(f"  {each}: {legend}", style=DIM)
    for line in (title, lines[-1]):
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join([title, *lines])


def _stragglers(view: RunView) -> tuple[str, str]:
    """Return the names of the slow ranks, the slowest first, and the style of the text."""
    scores = {rank: rank.straggler_score for rank in view.ranks if rank.straggler_score is not None}
    slow = [rank for rank in scores if scores[rank] > view.straggler_threshold]
    named = [
        f"rank {rank.rank}: +{scores[rank]:.0%} in {printable(rank.straggler_phase)}"
        for rank in sorted(slow, key=lambda rank: -scores[rank])
    ]
    return ("; ".join(named), WARN) if named else ("none" if scores else "not compared", DIM)


def alerts_panel(view: RunView, width: int, height: int) -> Text:
    """Return alerts or findings, then what is missing."""
    kind = "Findings" if not view.is_live else "Alerts"
    lines = [_title(kind, f"{len(view.alerts)} | {view.alerts_source}", width)]
    if view.verdict:
        lines += _folded(Text(printable(view.verdict), style=TITLE), width)
    for alert in view.alerts:
        lines += _alert_lines(alert, width)
    if not view.alerts and not view.verdict:
        lines.append(Text("none", style=GOOD))
    for note in view.notes:
        lines += _folded(Text(f"note: {printable(note)}", style=DIM), width)
    return _joined(lines, "", height)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the table of ranks. Columns of a higher level are left out of narrow tables."""

    title: str
    width: int
    level: int
    text: Callable[[RankView], str]
    is_bad: Callable[[RankView, RunView], bool] = lambda rank, view: False


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


_COLUMNS = (
    _Column(title="rank", width=5, level=0, text=lambda rank: str(rank.rank)),
    _Column(title="node", width=16, level=2, text=lambda rank: printable(rank.node) or UNKNOWN),
    _Column(
        title="steps",
        width=8,
        level=0,
        text=lambda rank: UNKNOWN if rank.steps is None else f"{rank.steps:,}",
    ),
    _Column(title="step", width=9, level=0, text=lambda rank: _seconds(rank.step_seconds)),
    _Column(
        title="exposed",
        width=8,
        level=0,
        text=lambda rank: format_ratio(rank.exposed_ratio),
        is_bad=lambda rank, view: (rank.exposed_ratio or 0) > float(EXPOSED_COMM_RATIO_HIGH),
    ),
    _Column(title="wait", width=6, level=0, text=lambda rank: format_ratio(rank.wait_ratio)),
    _Column(title="data", width=6, level=0, text=lambda rank: format_ratio(rank.data_ratio)),
    _Column(
        title="mem",
        width=6,
        level=0,
        text=lambda rank: format_ratio(rank.memory_ratio),
        is_bad=lambda rank, view: (rank.memory_ratio or 0) > 1 - float(MEMORY_HEADROOM_LOW),
    ),
    _Column(
        title="risk",
        width=6,
        level=0,
        text=lambda rank: format_ratio(rank.risk_ratio),
        is_bad=lambda rank, view: (rank.risk_ratio or 0) > float(OOM_RISK_HIGH),
    ),
    _Column(title="util", width=6, level=1, text=lambda rank: format_ratio(rank.utilization_ratio)),
    _Column(title="MFU", width=6, level=1, text=lambda rank: format_ratio(rank.mfu_ratio)),
    _Column(
        title="slow in",
        width=16,
        level=0,
        text=lambda rank: (
            UNKNOWN
            if rank.straggler_score is None or not rank.straggler_phase
            else f"{printable(rank.straggler_phase)} {rank.straggler_score:+.0%}"
        ),
        is_bad=lambda rank, view: (rank.straggler_score or 0) > view.straggler_threshold,
    ),
)
# Values by which the table can be sorted, the largest first; ranks that do not answer come first.
SORTS: Mapping[str, Callable[[RankView], float]] = {
    "rank": lambda rank: -rank.rank,
    "slow in": lambda rank: _sort_value(rank, rank.straggler_score),
    "exposed": lambda rank: _sort_value(rank, rank.exposed_ratio),
    "wait": lambda rank: _sort_value(rank, rank.wait_ratio),
    "mem": lambda rank: _sort_value(rank, rank.memory_ratio),
    "step": lambda rank: _sort_value(rank, rank.step_seconds),
}


def _sort_value(rank: RankView, value: float | None) -> float:
    if rank.state == "no answer":
        return float("inf")
    return float("-inf") if value is None else value


def ranks_head(view: RunView, width: int, sort: str) -> Text:
    """Return the title and the column names of the table of ranks."""
    text = _title("Ranks", f"sorted by {sort}", width)
    text.append("\n")
    for column in _columns(width):
        mark = "bold underline" if column.title == sort else DIM
        text.append(f"{column.title:>{column.width - 1}}", style=mark)
        text.append(" ")
    return text


def ranks_rows(view: RunView, width: int, sort: str) -> Text:
    """Return a line for each rank."""
    columns = _columns(width)
    lines = []
    for rank in sorted(view.ranks, key=lambda rank: (-SORTS[sort](rank), rank.rank)):
        line = Text(no_wrap=True)
        if rank.state == "no answer":
            age = "" if rank.age_seconds is None else f" for {format_age(rank.age_seconds)}"
            line.append(f"{rank.rank:>4} ")
            line.append(f"no answer{age}: {printable(rank.note)}", style=BAD)
            if rank.node:
                line.append(f" ({printable(rank.node)})", style=DIM)
            line.truncate(width, overflow="ellipsis")
        elif rank.state == "not read yet":
            line.append(f"{rank.rank:>4} not read yet", style=DIM)
        else:
            for column in columns:
                cell = column.text(rank)
                room = column.width - 1
                cell = cell if len(cell) <= room else f"{cell[: room - 1]}…"
                line.append(f"{cell:>{room}}", style=WARN if column.is_bad(rank, view) else "")
                line.append(" ")
            if rank.state == "ended" and view.status not in ("completed", "interrupted"):
                line.append("ended", style=DIM)
        lines.append(line)
    return Text("\n").join(lines) if lines else Text("no ranks", style=DIM)


def format_age(seconds: float) -> str:
    """Write an age as whole seconds, minutes, hours or days."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _columns(width: int) -> list[_Column]:
    for level in (2, 1, 0):
        columns = [column for column in _COLUMNS if column.level <= level]
        if sum(column.width for column in columns) <= width:
            return columns
    shown, room = [], width
    for column in _COLUMNS:
        if column.level == 0 and column.width <= room:
            shown.append(column)
            room -= column.width
    return shown


def _straggler_cell(rank: RankView, limit: float) -> tuple[str, str]:
    if rank.state == "no answer":
        return "x", BAD
    if rank.straggler_score is None:
        return "-", DIM
    share = min(1.0, max(0.0, rank.straggler_score / (2 * limit)))
    height = _HEIGHTS[min(len(_HEIGHTS) - 1, int(share * len(_HEIGHTS)))]
    return height, WARN if rank.straggler_score > limit else GOOD


def _memory_lines(row: MemoryView, width: int, height: int) -> list[Text]:
    peak, limit = row.peak_bytes, row.limit_bytes
    ratio = peak / limit if peak is not None and limit else None
    risk = row.risk_ratio
    risk_style = GOOD
    if risk is not None and risk > float(OOM_RISK_HIGH):
        risk_style = BAD if risk > float(OOM_RISK_CRITICAL) else WARN
    first = Text(no_wrap=True)
    first.append(f"{printable(row.device)} ", style=TITLE)
    first.append("risk ")
    first.append(format_ratio(risk), style=risk_style if risk is not None else DIM)
    first.append(f" {format_ratio(ratio)} of {format_bytes(limit)}")
    room = width - first.cell_len - 1
    if ratio is not None and room >= 8:
        first.append(" ")
        first.append_text(_bar(ratio, room, risk_style))
    first.truncate(width, overflow="ellipsis")
    more = [f"peak {format_bytes(peak)}"]
    if row.predicted_bytes is not None:
        more.append(f"next peak {format_bytes(row.predicted_bytes)}")
    more += [f"{name} {format_bytes(size)}" for name, size in row.categories.items()]
    return [first, *_wrapped("", more, width, indent=1)][:height]


def _alert_lines(alert: AlertView, width: int) -> list[Text]:
    style, mark = _SEVERITY[alert.severity]
    text = Text(mark, style=style)
    name = alert.name.removeprefix("Zerowatch")
    text.append(f" {printable(name)}{' (pending)' if alert.is_pending else ''}: ", style=style)
    text.append(printable(alert.text), style="not bold")
    return _folded(text, width)


def _title(name: str, more: str, width: int) -> Text:
    text = Text(no_wrap=True)
    text.append(name, style="bold underline")
    if more:
        text.append(f"  {printable(more)}", style=DIM)
    text.truncate(width, overflow="ellipsis")
    return text


def _bar_line(share: Share, width: int, style: str, indent: int = 0) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{' ' * indent}{printable(share.name)[:10]:<10}"[:11].ljust(11 + indent))
    line.append(f"{share.ratio:>5.1%} " if share.ratio < 0.9995 else f"{share.ratio:>5.0%} ")
    per_step = ""
    if share.seconds_per_step is not None:
        per_step = f" {format_seconds(share.seconds_per_step)}"
    room = width - line.cell_len - 9
    line.append_text(_bar(share.ratio, max(0, room), style))
    line.append(f"{per_step:>9}", style=DIM)
    line.truncate(width)
    return line


def _bar(ratio: float, room: int, style: str) -> Text:
    eighths = round(min(1.0, max(0.0, ratio)) * room * 8)
    bar = "█" * (eighths // 8)
    if eighths % 8:
        bar += _EIGHTHS[eighths % 8]
    return Text(f"{bar:<{room}}"[:room], style=style)


def _pairs(values: Mapping[str, float], form: str) -> list[str]:
    return [f"{name.replace('_', ' ')} {form.format(value)}" for name, value in values.items()]


def _wrapped(name: str, parts: Sequence[str], width: int, indent: int = 0) -> list[Text]:
    """Return lines with the parts, which are divided by commas and not broken if possible."""
    if not parts:
        return []
    text = Text(f"{name} " if name else "", style=DIM)
    text.append(", ".join(printable(part).replace(" ", "\u00a0") for part in parts), style="")
    lines = _folded(text, width - indent)
    for line in lines:
        line.plain = line.plain.replace("\u00a0", " ")
    return [Text(" " * indent).append_text(line) for line in lines]


def _folded(text: Text, width: int) -> list[Text]:
    """Return a text as lines of at most a width; lines after the first are indented."""
    if text.cell_len <= width or width < 8:
        text.truncate(width)
        return [text]
    words = text.split(" ")
    lines: list[Text] = []
    line = Text()
    for word in words:
        if line.cell_len and line.cell_len + 1 + word.cell_len > width:
            lines.append(line)
            line = Text("   ")
            line.append_text(word)
        elif line.cell_len:
            line = line.append(" ").append_text(word)
        else:
            line = Text().append_text(word)
    lines.append(line)
    for each in lines:
        each.truncate(width, overflow="ellipsis")
    return lines


def _joined(lines: Iterable[Text], empty: str, height: int) -> Text:
    """Return the lines that fit; the last one says how many do not."""
    found = list(lines)
    if len(found) == 1 and empty:
        found.append(Text(empty, style=DIM))
    if len(found) > height > 1:
        hidden = len(found) - height + 1
        found = [*found[: height - 1], Text(f"… {hidden} more lines", style=DIM)]
    return Text("\n").join(found[: max(1, height)])
