"""One line of figures on the steps since the line before, in columns that fit 80 characters."""

from __future__ import annotations

from rich.text import Text

from ....metrics.thresholds import COMM_RATIO_HIGH, DEVICE_UTILIZATION_LOW
from ...common.units import format_bytes
from .summary import Summary

UNKNOWN = "-"
_PHASES = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}
_WIDTHS = {
    "loss": 6,
    "samples/s": 9,
    "s/step": 6,
    "data": 4,
    "fwd": 4,
    "bwd": 4,
    "opt": 4,
    "other": 5,
    "comm": 4,
    "memory": 8,
    "busy": 4,
}


def header(num_steps: int) -> Text:
    """Return the columns' names.

    Args:
        num_steps: Steps of the whole run, which decide the first column's width.
    """
    names = ["step".rjust(_step_width(num_steps)), *(n.rjust(w) for n, w in _WIDTHS.items())]
    return Text(" ".join(names), style="bold")


def step_line(stretch: Summary, *, step: int, num_steps: int) -> Text:
    """Return the figures of some steps; what is past a usual limit is highlighted.

    Args:
        stretch: The steps since the last line.
        step: The last of them.
        num_steps: Steps of the whole run.
    """
    cells = _cells(stretch)
    line = Text(f"{step}/{num_steps}".rjust(_step_width(num_steps)))
    for name, width in _WIDTHS.items():
        line.append(" ")
        line.append(cells[name].rjust(width), style=_style(name, stretch))
    return line


def format_size(num_bytes: float | None) -> str:
    """Write a size with its binary unit."""
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def format_ratio(ratio: float | None) -> str:
    """Write a ratio as a percentage."""
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def _cells(stretch: Summary) -> dict[str, str]:
    phases = dict(stretch.phase_seconds)
    named = {
        column: format_ratio(stretch.ratio(phases.pop(phase, 0.0)))
        for phase, column in _PHASES.items()
    }
    seconds = stretch.training_seconds / stretch.num_steps
    loss, rate = stretch.last_loss, stretch.samples_per_second
    return {
        "loss": UNKNOWN if loss is None else f"{loss:.3f}",
        "samples/s": UNKNOWN if rate is None else f"{rate:.1f}",
        "s/step": f"{seconds:.3f}",
        **named,
        "other": format_ratio(stretch.ratio(sum(phases.values()))),
        "comm": format_ratio(stretch.comm_ratio),
        "memory": format_size(stretch.peak_bytes),
        "busy": format_ratio(stretch.utilization_ratio),
    }


def _style(column: str, stretch: Summary) -> str:
    comm, busy = stretch.comm_ratio, stretch.utilization_ratio
    if column == "loss":
        return "bold green"
    if column == "comm" and comm is not None and comm > COMM_RATIO_HIGH:
        return "yellow"
    if column == "busy" and busy is not None and busy < DEVICE_UTILIZATION_LOW:
        return "yellow"
    return ""


def _step_width(num_steps: int) -> int:
    return max(len("step"), 2 * len(str(num_steps)) + 1)
