"""What `explain` prints: two tables of all planned stages, and sentences on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from textwrap import wrap
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .plan.plan import Plan, PlannedCollective
from .plan.shapes import ModelShape, Topology

_PLAIN_WIDTH = 98
_MEMORY = ("parameters", "gathered", "gradients", "optimizer", "comm_buffers")


@dataclass(frozen=True, slots=True)
class Heading:
    """What the plans are of; `own_stage` is the configuration's."""

    config_file: str
    model: ModelShape
    topology: Topology
    own_stage: int


def print_plans(plans: Sequence[Plan], heading: Heading, file: TextIO) -> None:
    """Print the plans: in colour on a terminal, as plain aligned text elsewhere."""
    if file.isatty():
        _print(Console(file=file, highlight=False), box.SIMPLE_HEAD, plans, heading)
        return
    plain = StringIO()
    _print(Console(file=plain, width=_PLAIN_WIDTH, highlight=False), None, plans, heading)
    file.writelines(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


def _print(
    console: Console, frame: box.Box | None, plans: Sequence[Plan], heading: Heading
) -> None:
    console.print(Text(_title(heading), style="bold"), soft_wrap=True)
    console.print()
    console.print(_wire_table(plans, heading, frame))
    console.print()
    console.print(_memory_table(plans, heading, frame))
    for plan in plans:
        for line in _sentences(plan, plans, heading):
            style = "" if line.startswith(" ") else "bold"
            console.print(Text(line, style=style), soft_wrap=True)


def format_bytes(num_bytes: float) -> str:
    """Write a size with its binary unit, in three digits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if num_bytes < 1000 else f"{num_bytes / 1024:.1f} TiB"


def _title(heading: Heading) -> str:
    topology = heading.topology
    model = heading.model
    ranks = f"{topology.world_size} ranks ({topology.backend})"
    if topology.tensor_parallel * topology.pipeline_parallel > 1:
        ranks += (
            f" = {topology.data_parallel} data x {topology.tensor_parallel} tensor x "
            f"{topology.pipeline_parallel} pipeline"
        )
    kind = "a typical transformer of " if model.invented else ""
    frozen = model.num_parameters - model.num_trained
    fixed = f", {_count(frozen)} frozen" if frozen else ""
    return f"{heading.config_file}: {kind}{_count(model.num_parameters)} parameters{fixed}, {ranks}"


def _count(number: int) -> str:
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _wire_table(plans: Sequence[Plan], heading: Heading, frame: box.Box | None) -> Table:
    title = "One optimizer step of one rank, on the wire"
    columns = ("stage", "collective", "dtype", "calls", "payload", "sent", "least", "sent/least")
    table = _table(title, frame, columns, num_texts=3)
    for plan in plans:
        mark = _mark(plan, heading)
        for collective in plan.collectives:
            table.add_row(mark, *_collective_cells(collective, heading.topology))
            mark = ""
        ratio = "-" if plan.volume_ratio is None else f"{plan.volume_ratio:.2f}"
        table.add_row(
            mark,
            "total" if plan.exact else "total (approximate)",
            "",
            f"{sum(c.calls for c in plan.collectives):,}",
            format_bytes(sum(c.payload_bytes for c in plan.collectives)),
            format_bytes(plan.wire_bytes),
            format_bytes(plan.least_wire_bytes),
            ratio,
            style="bold",
        )
        if frame is None and plan is not plans[-1]:
            table.add_row()
        table.add_section()
    return table


def _collective_cells(collective: PlannedCollective, topology: Topology) -> Iterable[str]:
    group = collective.group_size
    suffix = "" if group == topology.data_parallel else f" in groups of {group}"
    yield f"{collective.op}, {collective.purpose}{suffix}"
    yield collective.dtype
    yield f"{collective.calls:,}"
    yield format_bytes(collective.payload_bytes)
    yield format_bytes(collective.wire_bytes)


def _memory_table(plans: Sequence[Plan], heading: Heading, frame: box.Box | None) -> Table:
    title = "Memory of one rank in training, without activations"
    columns = ("stage", *(name.replace("_", " ") for name in _MEMORY), "on device", "host", "NVMe")
    table = _table(title, frame, columns, num_texts=1)
    for plan in plans:
        memory = plan.memory
        cells = [memory.device_bytes[name] for name in _MEMORY]
        cells += [memory.total_device_bytes, memory.host_bytes, memory.nvme_bytes]
        table.add_row(
            _mark(plan, heading), *(format_bytes(size) if size else "-" for size in cells)
        )
    return table


def _table(title: str, frame: box.Box | None, columns: Sequence[str], num_texts: int) -> Table:
    table = Table(title=title, box=frame, title_justify="left", title_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_texts else "right", no_wrap=True)
    return table


def _mark(plan: Plan, heading: Heading) -> str:
    return f"{plan.stage} <-" if plan.stage == heading.own_stage else str(plan.stage)


def _sentences(plan: Plan, plans: Sequence[Plan], heading: Heading) -> Iterable[str]:
    """Say all there is to say of the configuration's own stage, and the pattern of the others."""
    own = plan.stage == heading.own_stage
    full = own or len(plans) == 1
    yield ""
    yield f"Stage {plan.stage}, as configured" if own else f"Stage {plan.stage}"
    for remark in plan.remarks if full else _briefly(plan):
        yield from _indent(remark)
    if full and plan.exact:
        yield from _indent("Calls and payload bytes are exact.")
    if full and plan.assumptions:
        yield from _indent("Taken for granted: " + "; ".join(plan.assumptions) + ".")


def _briefly(plan: Plan) -> Iterable[str]:
    return (remark for remark in plan.remarks if remark.startswith("Gradients:"))


def _indent(text: str) -> list[str]:
    return wrap(text, width=_PLAIN_WIDTH - 2, initial_indent="  - ", subsequent_indent="    ")
