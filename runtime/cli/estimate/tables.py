"""What `estimate` prints: two tables of all planned stages, and sentences on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from textwrap import wrap
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...common.units import format_bytes
from ...estimator.activations import Activations
from ...estimator.plan import Plan, PlannedCollective
from ...estimator.shapes import ModelShape, Topology
from .micro_batch import BatchPlan

_PLAIN_WIDTH = 98
_MEMORY = ("parameters", "gathered", "gradients", "optimizer", "comm_buffers")


@dataclass(frozen=True, slots=True)
class Heading:
    """What the plans are of; `own_stage` is the configuration's."""

    config_file: str
    model: ModelShape
    topology: Topology
    own_stage: int
    batch: BatchPlan = field(default_factory=BatchPlan)


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
    for line in _on_memory(plans, heading.batch, invented=heading.model.invented):
        console.print(Text(line), soft_wrap=True)
    for plan in plans:
        for line in _sentences(plan, plans, heading):
            style = "" if line.startswith(" ") else "bold"
            console.print(Text(line, style=style), soft_wrap=True)


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
    batch = heading.batch
    columns = ["stage", *(name.replace("_", " ") for name in _MEMORY)]
    columns += ["activations"] * (batch.samples is not None) + ["at peak", "host"]
    on_disk = any(plan.memory.nvme_bytes for plan in plans)
    title = _memory_title(batch)
    dense = on_disk and frame is None  # so that all columns fit in a line
    table = _table(title, frame, columns + ["NVMe"] * on_disk, num_texts=1, dense=dense)
    for plan in plans:
        cells = [_cell(plan.memory.device_bytes[name]) for name in _MEMORY]
        if batch.samples is not None:
            cells.append(_cell(batch.activation_bytes) if batch.activations else "?")
        peak = batch.peak(plan)
        cells += [_cell(peak.device_bytes), _cell(peak.host_bytes)]
        table.add_row(_mark(plan, heading), *cells, *[_cell(plan.memory.nvme_bytes)] * on_disk)
    return table


def _memory_title(batch: BatchPlan) -> str:
    title = "Memory of one rank in training, "
    if batch.samples is None or batch.activations is None:
        return title + "without activations"
    return title + f"micro-batches of {batch.samples} x {batch.activations.tokens:,} tokens"


def _cell(size: int) -> str:
    return format_bytes(size) if size else "-"


def _table(
    title: str,
    frame: box.Box | None,
    columns: Sequence[str],
    num_texts: int,
    *,
    dense: bool = False,
) -> Table:
    table = Table(
        title=title,
        box=frame,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=dense,
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_texts else "right", no_wrap=True)
    return table


def _mark(plan: Plan, heading: Heading) -> str:
    return f"{plan.stage} <-" if plan.stage == heading.own_stage else str(plan.stage)


def _on_memory(plans: Sequence[Plan], batch: BatchPlan, *, invented: bool) -> Iterable[str]:
    """Say what the table leaves out, and what would fit."""
    in_step = [str(plan.stage) for plan in plans if batch.peak(plan).moment == "step"]
    but = f", at stage {', '.join(in_step)} in the optimizer's step, which copies gradients"
    yield from _indent(
        "Not all columns are there at once: the peak is as backward begins or ends"
        f"{but if in_step else ''}."
    )
    if batch.samples is None:
        yield from _indent(
            "Activations are left out; --sequence, the tokens of a sample, adds them."
        )
    elif batch.activations is None:
        yield from _indent(f"Activations are unknown: {batch.unknown}.")
    else:
        if invented:
            yield from _indent("Activations are those of attention that keeps no scores.")
        yield from _on_recomputation(batch.activations, batch.samples)
    if batch.limit_bytes is not None and batch.activations is not None:
        fitting = ", ".join(
            f"stage {plan.stage}: {batch.largest(plan) or 'none'}" for plan in plans
        )
        yield from _indent(
            f"Largest micro-batch in {format_bytes(batch.limit_bytes)}, in samples: {fitting}. "
            "What CUDA itself takes and fragmentation are not counted."
        )


def _on_recomputation(activations: Activations, samples: int) -> Iterable[str]:
    recomputed = activations.recomputed_sample_bytes
    if recomputed is not None and recomputed < activations.sample_bytes:
        yield from _indent(
            f"With activation checkpointing of each layer, activations would take "
            f"{format_bytes(samples * recomputed)}."
        )


def _sentences(plan: Plan, plans: Sequence[Plan], heading: Heading) -> Iterable[str]:
    """Say all there is to say of the configuration's own stage, and the pattern of the others."""
    own = plan.stage == heading.own_stage
    full = own or len(plans) == 1
    yield ""
    yield f"Stage {plan.stage}, as configured" if own else f"Stage {plan.stage}"
    for remark in plan.remarks if full else _briefly(plan):
        yield from _indent(remark)
    if full:
        resting = format_bytes(plan.memory.resting_bytes)
        yield from _indent(f"Between steps the device holds {resting}.")
    if full and plan.exact:
        yield from _indent("Calls and payload bytes are exact.")
    if full and plan.assumptions:
        yield from _indent("Taken for granted: " + "; ".join(plan.assumptions) + ".")


def _briefly(plan: Plan) -> Iterable[str]:
    return (remark for remark in plan.remarks if remark.startswith("Gradients:"))


def _indent(text: str) -> list[str]:
    return wrap(text, width=_PLAIN_WIDTH - 2, initial_indent="  - ", subsequent_indent="    ")
