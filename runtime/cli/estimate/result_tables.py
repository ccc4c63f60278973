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
from ...estimator.step_estimate import EstimatedCollective, StepEstimate
from .inputs import RankBatch

_PLAIN_WIDTH = 98
_UNLIMITED_WIDTH = 10_000
_MEMORY = ("parameters", "gathered", "gradients", "optimizer", "comm_buffers")


@dataclass(frozen=True, slots=True)
class Heading:
    """Inputs of the estimate, which are the same for the estimates of all ZeRO stages."""

    config_file: str
    model: ModelShape
    topology: Topology
    configured_stage: int
    batch: RankBatch = field(default_factory=RankBatch)


def print_estimates(estimates: Sequence[StepEstimate], heading: Heading, file: TextIO) -> None:
    """Print the estimates: with colors on a terminal, as plain aligned text elsewhere."""
    if file.isatty():
        _print(Console(file=file, highlight=False), box.SIMPLE_HEAD, estimates, heading)
        return
    plain = StringIO()
    # Columns are not folded: a table with large figures is wider than the text.
    _print(Console(file=plain, width=_UNLIMITED_WIDTH, highlight=False), None, estimates, heading)
    file.writelines(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


def _print(
    console: Console, frame: box.Box | None, estimates: Sequence[StepEstimate], heading: Heading
) -> None:
    console.print(Text(_title(heading), style="bold"), soft_wrap=True)
    console.print()
    console.print(_wire_table(estimates, heading, frame))
    console.print()
    console.print(_memory_table(estimates, heading, frame))
    for line in _memory_remarks(estimates, heading.batch, is_synthetic=heading.model.is_synthetic):
        console.print(Text(line), soft_wrap=True)
    for estimate in estimates:
        for line in _stage_remarks(estimate, estimates, heading):
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


def _wire_table(
    estimates: Sequence[StepEstimate], heading: Heading, frame: box.Box | None
) -> Table:
    title = "Communication per rank and optimizer step"
    columns = ("stage", "collective", "dtype", "calls", "payload", "sent", "reference", "ratio")
    table = _table(title, frame, columns, num_texts=3)
    for estimate in estimates:
        mark = _mark(estimate, heading)
        for collective in estimate.collectives:
            table.add_row(mark, *_collective_cells(collective, heading.topology))
            mark = ""
        ratio = UNKNOWN if estimate.volume_ratio is None else f"{estimate.volume_ratio:.2f}"
        table.add_row(
            mark,
            "total" if estimate.exact else "total (approximate)",
            "",
            f"{sum(c.calls for c in estimate.collectives):,}",
            format_bytes(sum(c.payload_bytes for c in estimate.collectives)),
            format_bytes(estimate.wire_bytes),
            format_bytes(estimate.reference_wire_bytes),
            ratio,
            style="bold",
        )
        if frame is None and estimate is not estimates[-1]:
            table.add_row()
        table.add_section()
    return table


def _collective_cells(collective: EstimatedCollective, topology: Topology) -> Iterable[str]:
    group = collective.group_size
    suffix = "" if group == topology.data_parallel else f" in groups of {group}"
    yield f"{collective.op}, {collective.purpose}{suffix}"
    yield collective.dtype
    yield f"{collective.calls:,}"
    yield format_bytes(collective.payload_bytes)
    yield format_bytes(collective.wire_bytes)


def _memory_table(
    estimates: Sequence[StepEstimate], heading: Heading, frame: box.Box | None
) -> Table:
    batch = heading.batch
    columns = ["stage", *(name.replace("_", " ") for name in _MEMORY)]
    columns += ["activations"] * (batch.samples is not None) + ["peak", "host"]
    on_disk = any(estimate.memory.nvme_bytes for estimate in estimates)
    title = _memory_title(batch)
    dense = on_disk and frame is None  # otherwise the columns do not fit in a line
    table = _table(title, frame, columns + ["NVMe"] * on_disk, num_texts=1, dense=dense)
    for estimate in estimates:
        cells = [_cell(estimate.memory.device_bytes[name]) for name in _MEMORY]
        if batch.samples is not None:
            cells.append(_cell(batch.activation_bytes) if batch.activations else "?")
        peak = batch.peak(estimate)
        cells += [_cell(peak.device_bytes), _cell(peak.host_bytes)]
        table.add_row(
            _mark(estimate, heading), *cells, *[_cell(estimate.memory.nvme_bytes)] * on_disk
        )
    return table


def _memory_title(batch: RankBatch) -> str:
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


def _mark(estimate: StepEstimate, heading: Heading) -> str:
    return (
        f"{estimate.stage} <-"
        if estimate.stage == heading.configured_stage
        else str(estimate.stage)
    )


def _memory_remarks(
    estimates: Sequence[StepEstimate], batch: RankBatch, *, is_synthetic: bool
) -> Iterable[str]:
    """Yield what the table omits, and which micro-batch fits."""
    in_step = [
        str(estimate.stage) for estimate in estimates if batch.peak(estimate).moment == "step"
    ]
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
        yield from _activation_remarks(estimates, batch, batch.activations, batch.samples)


def _activation_remarks(
    estimates: Sequence[StepEstimate], batch: RankBatch, activations: Activations, samples: int
) -> Iterable[str]:
    """Yield what recomputation saves, and the micro-batch that fits with it and without it."""
    recomputed = activations.recomputed
    saves = recomputed is not None and recomputed.sample_bytes < activations.sample_bytes
    if recomputed is not None and saves:
        yield from _bullet(
            "With activation checkpointing of each layer, activations need "
            f"{format_bytes(recomputed.bytes_of(samples))}."
        )
    if batch.limit_bytes is None:
        return
    yield from _bullet(
        f"Largest micro-batch (samples) that fits in {format_bytes(batch.limit_bytes)}: "
        f"{_fitting(estimates, batch)}. The CUDA context and fragmentation are not included."
    )
    if saves:
        fitting = _fitting(estimates, batch, recomputed=True)
        yield from _bullet(f"With activation checkpointing of each layer: {fitting}.")


def _fitting(
    estimates: Sequence[StepEstimate], batch: RankBatch, *, recomputed: bool = False
) -> str:
    """Return the samples of the largest micro-batch of each stage."""
    sizes = {each.stage: batch.largest(each, recomputed=recomputed) for each in estimates}
    return ", ".join(f"stage {stage}: {samples or 'none'}" for stage, samples in sizes.items())


def _stage_remarks(
    estimate: StepEstimate, estimates: Sequence[StepEstimate], heading: Heading
) -> Iterable[str]:
    """Yield all remarks on the configured stage, and the gradient pattern of the others."""
    is_configured = estimate.stage == heading.configured_stage
    in_full = is_configured or len(estimates) == 1
    yield ""
    yield f"Stage {estimate.stage} (configured)" if is_configured else f"Stage {estimate.stage}"
    for remark in estimate.remarks:
        if in_full or remark.startswith("Gradients:"):
            yield from _bullet(remark)
    if not in_full:
        return
    resting = format_bytes(estimate.memory.resting_bytes)
    yield from _bullet(f"Between steps, {resting} stay on the device.")
    if estimate.exact:
        yield from _bullet("Calls and payload bytes are exact.")
    if estimate.assumptions:
        yield from _bullet("Assumed: " + "; ".join(estimate.assumptions) + ".")


def _bullet(text: str) -> list[str]:
    return wrap(text, width=_PLAIN_WIDTH - 2, initial_indent="  - ", subsequent_indent="    ")
