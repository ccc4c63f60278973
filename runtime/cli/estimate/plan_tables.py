"""Prints an estimate: a table of collectives, a table of memory, and remarks."""

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

from ...common.format_numbers import UNKNOWN, format_bytes, format_count
from ...estimator.model_memory import Activations
from ...estimator.model_shape import ModelShape, Topology
from ...estimator.plan import Plan, PlannedCollective
from .inputs import BatchPlan

_PLAIN_WIDTH = 98
_MEMORY = ("parameters", "gathered", "gradients", "optimizer", "comm_buffers")


@dataclass(frozen=True, slots=True)
class Heading:
    """Inputs of the estimate, which are the same for the plans of all ZeRO stages."""

    config_file: str
    model: ModelShape
    topology: Topology
    configured_stage: int
    batch: BatchPlan = field(default_factory=BatchPlan)


def print_plans(plans: Sequence[Plan], heading: Heading, file: TextIO) -> None:
    """Print the plans: with colours on a terminal, as plain aligned text elsewhere."""
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
    for line in _memory_remarks(plans, heading.batch, is_synthetic=heading.model.is_synthetic):
        console.print(Text(line), soft_wrap=True)
    for plan in plans:
        for line in _stage_remarks(plan, plans, heading):
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
    kind = "a typical transformer of " if model.is_synthetic else ""
    num_frozen = model.num_parameters - model.num_trained
    frozen = f" ({format_count(num_frozen)} frozen)" if num_frozen else ""
    parameters = f"{kind}{format_count(model.num_parameters)} parameters{frozen}"
    return f"{heading.config_file}: {parameters}, {ranks}"


def _wire_table(plans: Sequence[Plan], heading: Heading, frame: box.Box | None) -> Table:
    title = "Communication per rank and optimizer step"
    columns = ("stage", "collective", "dtype", "calls", "payload", "sent", "minimum", "ratio")
    table = _table(title, frame, columns, num_texts=3)
    for plan in plans:
        mark = _mark(plan, heading)
        for collective in plan.collectives:
            table.add_row(mark, *_collective_cells(collective, heading.topology))
            mark = ""
        ratio = UNKNOWN if plan.volume_ratio is None else f"{plan.volume_ratio:.2f}"
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
    columns += ["activations"] * (batch.samples is not None) + ["peak", "host"]
    on_disk = any(plan.memory.nvme_bytes for plan in plans)
    title = _memory_title(batch)
    dense = on_disk and frame is None  # otherwise the columns do not fit in a line
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
    title = "Memory per rank in training, "
    if batch.samples is None or batch.activations is None:
        return title + "without activations"
    return title + f"micro-batches of {batch.samples} x {batch.activations.tokens:,} tokens"


def _cell(size: int) -> str:
    return format_bytes(size) if size else UNKNOWN


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
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < num_texts else "right", no_wrap=True)
    return table


def _mark(plan: Plan, heading: Heading) -> str:
    return f"{plan.stage} <-" if plan.stage == heading.configured_stage else str(plan.stage)


def _memory_remarks(
    plans: Sequence[Plan], batch: BatchPlan, *, is_synthetic: bool
) -> Iterable[str]:
    """Yield what the table omits, and which micro-batch fits."""
    in_step = [str(plan.stage) for plan in plans if batch.peak(plan).moment == "step"]
    exception = (
        f"; at stage {', '.join(in_step)} it is in the optimizer's step, which copies gradients"
        if in_step
        else ""
    )
    yield from _bullet(
        "The columns are not all present at once. The peak is at the start or the end of backward"
        f"{exception}."
    )
    if batch.samples is None:
        yield from _bullet(
            "Activations are not included; add --sequence (tokens per sample) to include them."
        )
    elif batch.activations is None:
        yield from _bullet(f"Activations are unknown: {batch.unknown}.")
    else:
        if is_synthetic:
            yield from _bullet("Activations assume flash attention, which stores no scores.")
        yield from _recomputation_remark(batch.activations, batch.samples)
    if batch.limit_bytes is not None and batch.activations is not None:
        fitting = ", ".join(
            f"stage {plan.stage}: {batch.largest(plan) or 'none'}" for plan in plans
        )
        yield from _bullet(
            f"Largest micro-batch (samples) that fits in {format_bytes(batch.limit_bytes)}: "
            f"{fitting}. The CUDA context and fragmentation are not included."
        )


def _recomputation_remark(activations: Activations, samples: int) -> Iterable[str]:
    recomputed = activations.recomputed_sample_bytes
    if recomputed is not None and recomputed < activations.sample_bytes:
        yield from _bullet(
            "With activation checkpointing of each layer, activations need "
            f"{format_bytes(samples * recomputed)}."
        )


def _stage_remarks(plan: Plan, plans: Sequence[Plan], heading: Heading) -> Iterable[str]:
    """Yield all remarks on the configured stage, and the gradient pattern of the others."""
    is_configured = plan.stage == heading.configured_stage
    in_full = is_configured or len(plans) == 1
    yield ""
    yield f"Stage {plan.stage} (configured)" if is_configured else f"Stage {plan.stage}"
    for remark in plan.remarks:
        if in_full or remark.startswith("Gradients:"):
            yield from _bullet(remark)
    if not in_full:
        return
    resting = format_bytes(plan.memory.resting_bytes)
    yield from _bullet(f"Between steps, {resting} stay on the device.")
    if plan.exact:
        yield from _bullet("Calls and payload bytes are exact.")
    if plan.assumptions:
        yield from _bullet("Assumed: " + "; ".join(plan.assumptions) + ".")


def _bullet(text: str) -> list[str]:
    return wrap(text, width=_PLAIN_WIDTH - 2, initial_indent="  - ", subsequent_indent="    ")
