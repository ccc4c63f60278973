"""Reports each out-of-memory error that passes through the engine, and advises what to do.

`OomReporter` runs on the thread that raised the error, once per error, and does not change the
error. A report has a headline, the evidence and advice, on one page. Memory is short while a report
is written. The report is therefore built line by line, without large allocations.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ...common.format_numbers import format_bytes
from ...common.phase_timer import GENERATE_PHASE
from ...common.report_files import create_first_free, utc_text
from ..forecast.peak_readings import Shape
from .evidence import OomContext, OomEvidence, TrainingSetup, collect_evidence, complete_device
from .oom_error import OomError
from .oom_finder import OomFinder
from .predicted_savings import PredictedSaving, nothing_fits

logger = logging.getLogger(__name__)

# Maximum number of reports that a rank writes in one run.
MAX_REPORTS = 5
# Maximum rows in the table of peaks, and maximum micro-batch shapes in one cell of this table.
MAX_PEAKS = 20
MAX_SHAPES = 3
# Memory that is set aside and freed before a report is written. A report needs 0.3 MiB, and Python
# allocates in steps of 1 MiB. A reserve of this size is a separate mapping, so the kernel gets its
# memory back as soon as the reserve is freed.
RESERVE_BYTES = 4 * 2**20
VIEWER = "https://pytorch.org/memory_viz"
_FITS = {"yes": "fits", "barely": "fits barely", "perhaps": "may fit", "no": "does not fit"}
_NEED_PREFIXES = {"forecast": "", "guess": "about ", "bound": ">= "}
_STATES = (
    ("allocated", "in use as the error passed"),
    ("peak_allocated", "peak since the last reading"),
    ("reserved", "reserved for this process"),
    ("peak_reserved", "peak reserved since the last reading"),
)
_KINDS = {
    "device allocator": "torch's allocator of the device",
    "device library": "a library on the device, which bypasses torch's allocator",
    "host allocator": "torch's allocator of host memory",
    "python": "Python, numpy or C++ in this process",
    "operating system": "the operating system",
    "unknown": "something that the error does not name",
}


class OomReporter:
    """Recognizes and reports the out-of-memory errors of one rank, on the training thread.

    A lack of memory or disk space raises no exception here. `FailOpen` handles other failures.
    """

    def __init__(self, rank: int, context: OomContext, finder: OomFinder | None = None) -> None:
        self._rank = rank
        self._finder = finder or OomFinder()
        self._context = context
        self._host = socket.gethostname()
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self._num_reports = 0
        # Addresses of the last error, of the head of its traceback and of the innermost link.
        self._last = (0, 0, 0)

    def on_error(self, error: BaseException, *, is_end: bool = False) -> OomError | None:
        """Report an out-of-memory error, unless it was reported further down the stack.

        Args:
            error: The error that currently passes through the engine.
            is_end: Whether the error ends the run. In this case its traceback may be shortened.

        Returns:
            The parsed error, which the caller counts. None if the error is not an out-of-memory
            error, or if it was reported already.
        """
        oom_error = self._finder.find(error)
        if oom_error is None or self._is_known(oom_error[0], error, is_end=is_end):
            return None
        oom = oom_error[1]
        self._num_reports += 1
        if self._num_reports > MAX_REPORTS:  # the script catches the errors
            return replace(oom, device=complete_device(oom, self._context.readings() or {}))
        self._reserve = None
        try:
            oom = self._report(oom, self._context)
        except MemoryError:
            oom = self._report_minimal(oom)
        self._restore_reserve()
        return oom

    def _is_known(self, error: BaseException, passing: BaseException, *, is_end: bool) -> bool:
        """Return whether `on_error` has already seen this error further down the stack.

        The reporter remembers addresses instead of the error, because a reference to the error
        would keep tensors alive. While an error passes up the stack, new links are added at the
        head of its traceback. A later error may get the same address as an earlier one, but the
        traceback of the later error does not contain the links of the earlier traceback.
        """
        head = error.__traceback__
        known, known_head, known_end = self._last
        links = list(_links(head))
        self._last = (id(error), id(head), id(links[-1]) if links else 0)
        if known != id(error):
            return False
        if known_end == 0 and links:  # code in C has raised it, so it had no traceback before
            return True
        if is_end:
            return known_end == self._last[2]
        inner = links[1:] if passing is error else links
        return any(id(link) == known_head for link in inner)

    def _report_minimal(self, error: OomError) -> OomError:
        """Report only the facts that need no memory: the estimator's tables may not fit."""
        try:
            return self._report(error, _MinimalContext(self._context))
        except MemoryError:
            logger.error("out of memory: %s (too little is left for a report)", error.message)
            return error

    def _report(self, error: OomError, context: OomContext) -> OomError:
        """Write and log a report. Return the error, with the index of its device filled in."""
        evidence = collect_evidence(self._rank, self._host, error, context)
        path, reason = None, "no run folder is written"
        folder = self._context.folder()
        if folder is not None:
            path, reason = self._write(folder, evidence)
        where = f"report: {path}" if path is not None else f"no report: {reason}"
        logger.error("%s (%s)", headline(evidence), where)
        return error if evidence.is_device_unknown else replace(error, device=evidence.device)

    def _write(self, folder: Path, evidence: OomEvidence) -> tuple[Path | None, str]:
        try:
            path = write_report(folder, evidence, self._context)
        except OSError as error:
            return None, f"it cannot be written: {error}"
        return path, f"this rank has written {MAX_REPORTS} already"

    def _restore_reserve(self) -> None:
        try:
            self._reserve = bytearray(RESERVE_BYTES)
        except MemoryError:  # the next report is written without a reserve
            self._reserve = None


class _MinimalContext(OomContext):
    """Provides only those facts of another context that need no memory to compute."""

    def __init__(self, context: OomContext) -> None:
        self._context = context

    def folder(self) -> Path | None:
        return self._context.folder()

    def step(self) -> int | None:
        return self._context.step()

    def phase(self) -> str | None:
        return self._context.phase()


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def headline(evidence: OomEvidence) -> str:
    """Return one line with the device, phase, step, requested bytes, free bytes and limit."""
    requested, free = evidence.error.requested_bytes, evidence.free_bytes
    micro_batch = f", micro-batch {evidence.micro_batch}" if evidence.micro_batch else ""
    where = f"{evidence.phase} of step {evidence.step + 1}{micro_batch}"
    worker = f" (in {evidence.error.worker})" if evidence.error.worker else ""
    parts = [
        "request size unknown" if requested is None else f"{format_bytes(requested)} requested"
    ]
    if free is not None and not evidence.is_device_unknown:
        # If more bytes are free than were requested, they were freed after the request failed.
        late = " after the error" if requested is not None and free >= requested else ""
        limit = evidence.limit
        of_limit = f" of {format_bytes(limit.num_bytes)} ({limit.name})" if limit else ""
        parts.append(f"{format_bytes(free)} free{late}{of_limit}")
    device = "an unknown device" if evidence.is_device_unknown else evidence.device
    return f"out of memory on {device} in {where}{worker}: {', '.join(parts)}"


def report_text(evidence: OomEvidence) -> str:
    """Return the whole report. Its first line is the headline."""
    lines = [headline(evidence), "", *_moment(evidence), "", *_request(evidence), ""]
    lines += [*_memory(evidence), "", *_categories(evidence), "", *_predicted(evidence), ""]
    lines += [*_peaks(evidence), "", *_predicted_savings(evidence), "", "What to do next:"]
    lines += [f"  {n}. {line}" for n, line in enumerate(advice(evidence), 1)]
    return "\n".join(lines) + "\n"


def write_report(
    folder: Path, evidence: OomEvidence, context: OomContext | None = None
) -> Path | None:
    """Write `oom/rank-<r>-<n>.txt` and, if possible, torch's memory snapshot next to it.

    Both files have mode 0600. A rank writes at most MAX_REPORTS reports in one run.

    Args:
        folder: The run folder.
        evidence: The content of the report.
        context: Writes the snapshot. If None, no snapshot is written.

    Returns:
        The path of the report, or None if the rank has already written MAX_REPORTS reports.

    Raises:
        OSError: The folder cannot be written.
        MemoryError: Too little memory is left.
    """
    folder = folder / "oom"
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"rank-{evidence.rank}-{number}.txt" for number in range(1, MAX_REPORTS + 1))
    created = create_first_free(folder / name for name in names)
    if created is None:
        return None
    path, descriptor = created
    snapshot = path.with_suffix(".pickle")
    with os.fdopen(descriptor, "w") as file:
        file.write(report_text(evidence))
        file.flush()  # the process may be killed while it writes the snapshot
        if context is not None and context.dump_snapshot(evidence.device, snapshot):
            file.write(f"\nAll memory blocks with stacks: drop {snapshot.name} on {VIEWER}\n")
    return path


def advice(evidence: OomEvidence) -> list[str]:
    """Return at least one sentence of advice. The most promising advice comes first."""
    return [
        *_generation_advice(evidence),
        *_leak_advice(evidence),
        *_other_process_advice(evidence),
        *_worker_advice(evidence),
        *_saving_advice(evidence),
        *_fragmentation_advice(evidence),
        *_graph_advice(evidence),
        *_first_step_advice(evidence),
        *_limit_advice(evidence),
        *_batch_advice(evidence),
    ] or ["Use a smaller micro-batch with more accumulation, or more sharding or offload."]


def _moment(evidence: OomEvidence) -> Iterator[str]:
    yield f"rank {evidence.rank} on {evidence.host}, {utc_text(evidence.at_unix_seconds)}"
    yield f"last completed step: {evidence.step}; phase: {evidence.phase}"
    setup = evidence.setup
    if evidence.phase != GENERATE_PHASE:
        batch = format_shape(evidence.shape) if evidence.shape else "unknown shape"
        total = f" of {setup.accumulation}" if setup and setup.accumulation else ""
        number = f" {evidence.micro_batch}{total}" if evidence.micro_batch else ""
        yield f"current micro-batch{number}: {batch}"
    if setup:
        yield f"run: {_setup(setup)}"


def _setup(setup: TrainingSetup) -> str:
    layout = setup.layout
    parts = [f"ZeRO stage {layout.stage}", f"{setup.world_size} rank(s)", setup.dtype]
    parts.append(f"optimizer offload {layout.optimizer}, parameter offload {layout.parameters}")
    if setup.samples and setup.accumulation:
        parts.append(f"{setup.accumulation} micro-batch(es) of {setup.samples} samples a step")
    if setup.activation_checkpointing is not None:
        parts.append(
            f"activation checkpointing {'on' if setup.activation_checkpointing else 'off'}"
        )
    return "; ".join(parts)


def _request(evidence: OomEvidence) -> Iterator[str]:
    error = evidence.error
    size = "unknown size" if error.requested_bytes is None else f"{error.requested_bytes:.0f} bytes"
    yield f"The failing request: {size}, refused by {_KINDS[error.kind]}:"
    yield f"  {error.message}"


def _memory(evidence: OomEvidence) -> Iterator[str]:
    readings, limit = evidence.readings, evidence.limit
    note = ", on which this rank trains" if evidence.is_device_unknown else ""
    yield f"Memory of {evidence.device}{note}:"
    for state, label in _STATES:
        if state in readings and not (evidence.device == "cpu" and "reserved" in state):
            yield f"  {label}: {_size(readings[state])}"
    if evidence.device == "cpu" and "reserved" in readings:
        yield f"  virtual size: {_size(readings['reserved'])}"
    if limit:
        yield f"  limit: {_size(limit.num_bytes)}, set by {limit.name}"
    else:
        yield "  limit: unknown"
    fragmented = evidence.fragmented_bytes
    if evidence.device != "cpu" and fragmented is not None:
        size = _size(fragmented)
        yield f"  reserved in blocks too small for this request (fragmentation): {size}"
    if evidence.private_pool_bytes:
        size = _size(evidence.private_pool_bytes)
        yield f"  free, but only in private pools, such as those of captured graphs: {size}"
    if "alloc_retries" in readings:
        yield f"  allocator retries after freeing its cache: {readings['alloc_retries']:.0f}"
    if evidence.growth_bytes_per_step:
        growth = format_bytes(evidence.growth_bytes_per_step)
        yield f"  growth not explained by batch sizes (a leak): {growth} per step"


def _size(num_bytes: float) -> str:
    if not math.isfinite(num_bytes):
        return "none"
    return f"{format_bytes(num_bytes)} ({num_bytes:.0f} bytes)"


def _categories(evidence: OomEvidence) -> Iterator[str]:
    if not evidence.categories:
        yield "By category: unknown; no step was sampled in detail yet."
        return
    total = sum(evidence.categories.values())
    yield f"By category, at the peak of the last detailed sample ({format_bytes(total)}):"
    by_size = sorted(evidence.categories.items(), key=lambda item: -item[1])
    for name, size in by_size:
        yield f"  {name:<12} {format_percent(size, total):>6}  {_size(size)}"


def _predicted(evidence: OomEvidence) -> Iterator[str]:
    alarm, risk = evidence.alarm_step, evidence.batch_risk_ratio
    if alarm is not None:
        ago = max(0, evidence.step - alarm)
        yield f"Predicted: yes, the risk exceeded 50 % after step {alarm}, {ago} steps before"
    elif risk is not None and risk > 0.5:
        yield "Predicted: yes, by the risk of this micro-batch as it began"
    else:
        yield "Predicted: no, the risk did not exceed 50 %"
    if risk is not None:
        yield f"  risk of this micro-batch as it began: {format_percent(risk, 1)}"


def _peaks(evidence: OomEvidence) -> Iterator[str]:
    if not evidence.peaks:
        yield "Last peaks: none was read yet."
        return
    yield (
        "Last peaks, each since the previous reading, with the prediction made before it "
        "(risk: of the next 50 steps):"
    )
    row = "{:>9} {:>10} {:>9} {:>10} {:>7}  {}".format
    yield row("step", "peak", "of limit", "predicted", "risk", "micro-batches")
    for point in evidence.peaks[-MAX_PEAKS:]:
        prediction = evidence.predictions.get(point.step)
        predicted = prediction.predicted_bytes if prediction else None
        risk = prediction.risk_ratio if prediction else None
        yield row(
            point.step,
            format_bytes(point.peak_bytes),
            format_percent(point.peak_bytes, point.limit_bytes),
            "-" if predicted is None else format_bytes(predicted),
            "-" if risk is None else format_percent(risk, 1),
            format_shapes(point.shapes),
        )


def _predicted_savings(evidence: OomEvidence) -> Iterator[str]:
    if evidence.predicted_savings is None:
        yield "What would have fitted: unknown, as the limit or the memory in use is unknown."
        return
    yield "What would have fitted, each on its own, cheapest first:"
    for saving in evidence.predicted_savings:
        yield f"  {_FITS[saving.fits]:<12} {_need(saving):>14}  {saving.description}"
    if evidence.growth_bytes_per_step:
        yield "  each only for some steps, as the leak continues"
    if not evidence.predicted_savings:
        yield "  no estimate: batch shape, memory categories and plan are unknown"
    elif nothing_fits(evidence.predicted_savings):
        yield "  nothing here fits; combine several, or use more ranks"


def _need(saving: PredictedSaving) -> str:
    if saving.kind == "unknown":
        return "unknown"
    return f"{_NEED_PREFIXES[saving.kind]}{format_bytes(max(0.0, saving.need_bytes))}"


def _generation_advice(evidence: OomEvidence) -> Iterator[str]:
    if evidence.phase == GENERATE_PHASE:
        yield (
            "Memory ran out in generation: generate for fewer prompts at once, or fewer new "
            "tokens. The key-value cache grows with both."
        )


def _leak_advice(evidence: OomEvidence) -> Iterator[str]:
    growth = evidence.growth_bytes_per_step
    if growth:
        yield (
            f"Find the leak of {format_bytes(growth)} per step first: all else only delays the "
            "error. Losses, outputs or batches kept in a list hold whole graphs; keep loss.item(). "
            "memory.trace_leaks=true traces where the memory is allocated."
        )


def _other_process_advice(evidence: OomEvidence) -> Iterator[str]:
    reported = evidence.error.reported_bytes
    total, free = reported.get("total"), reported.get("free")
    allocated = reported.get("allocated", 0.0) + reported.get("reserved_unallocated", 0.0)
    own = reported.get("in_use", allocated)
    if total and free is not None and total - free - own > 0.1 * total:
        others = format_bytes(total - free - own)
        yield f"Other processes hold {others} of this device: see nvidia-smi, and end or move them."


def _worker_advice(evidence: OomEvidence) -> Iterator[str]:
    if evidence.error.worker:
        yield "A data loader worker ran out of memory: use fewer workers or less prefetch_factor."


def _saving_advice(evidence: OomEvidence) -> Iterator[str]:
    saving = _best_saving(evidence.predicted_savings or ())
    if saving is not None:
        yield f"Try {saving.description}."


def _best_saving(savings: Sequence[PredictedSaving]) -> PredictedSaving | None:
    """Return the cheapest saving that certainly fits, else the saving with the smallest need."""
    certain = [each for each in savings if each.fits == "yes"]
    likely = [each for each in savings if each.fits != "no" and each.kind in ("forecast", "guess")]
    least = sorted(likely, key=lambda each: each.need_bytes)
    bounds = [each for each in savings if each.fits == "perhaps"]
    return next(iter([*certain, *least, *bounds]), None)


def _fragmentation_advice(evidence: OomEvidence) -> Iterator[str]:
    fragmented, requested = evidence.fragmented_bytes, evidence.error.requested_bytes
    if evidence.has_expandable_segments:
        return
    if evidence.device != "cpu" and fragmented and requested and fragmented >= requested:
        yield (
            f"{format_bytes(fragmented)} were reserved and unusable (fragmentation); "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of it."
        )


def _graph_advice(evidence: OomEvidence) -> Iterator[str]:
    held, requested = evidence.private_pool_bytes, evidence.error.requested_bytes
    if requested and held >= requested:
        yield (
            f"{format_bytes(held)} are free in private pools, such as those of captured graphs, "
            "where no other request can use them: capture fewer shapes, or a smaller part of the "
            "step."
        )


def _first_step_advice(evidence: OomEvidence) -> Iterator[str]:
    if evidence.step == 0:
        yield (
            "It failed in the first step: compare with `zerowatch estimate`, which estimates the "
            "memory of each ZeRO stage."
        )


def _limit_advice(evidence: OomEvidence) -> Iterator[str]:
    if evidence.error.device == "cpu" and evidence.limit:
        yield f"Or raise the limit, if the machine has more: it is set by {evidence.limit.name}."


def _batch_advice(evidence: OomEvidence) -> Iterator[str]:
    risk = evidence.batch_risk_ratio
    if evidence.alarm_step is None and risk is not None and risk > 0.5:
        yield (
            f"The batch had a predicted risk of {format_percent(risk, 1)}: drop or split batches "
            "of this size, for example by a limit on tokens instead of samples."
        )


def format_percent(part: float, whole: float) -> str:
    """Format `part / whole` in percent. Return "-" if `whole` is unknown or infinite."""
    if not whole or not math.isfinite(whole):
        return "-"
    return f"{100 * part / whole:.0f} %"


def format_shape(shape: Shape) -> str:
    """Format the size of a micro-batch as `samples x length`."""
    return f"{shape.samples} x {shape.length}"


def format_shapes(shapes: Sequence[Shape]) -> str:
    """Format the sizes of the MAX_SHAPES largest micro-batches."""
    largest = sorted(shapes, key=lambda each: -each.samples * each.length)[:MAX_SHAPES]
    more = f" and {len(shapes) - MAX_SHAPES} more" if len(shapes) > MAX_SHAPES else ""
    return ", ".join(map(format_shape, largest)) + more or "-"
