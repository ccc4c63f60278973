"""The report of an out-of-memory error: the headline, then what it rests on, on one page.

Memory is short while it is written: it is put together line by line, without large pieces.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ...common.report_files import create_first_free, utc_text
from ...common.units import format_bytes
from .advice import advice
from .evidence import Evidence, RunFacts
from .formatting import free_bytes, percent, shape_words, shapes_words, step_under_way, use_bytes
from .would_fit import Remedy, nothing_fits

MAX_REPORTS = 5
MAX_PEAKS = 20
VIEWER = "https://pytorch.org/memory_viz"
_FITS = {"yes": "fits", "barely": "fits barely", "perhaps": "may fit", "no": "does not fit"}
_KINDS_OF_NEED = {"forecast": "", "guess": "about ", "bound": ">= "}
_STATES = (
    ("allocated", "in use as the error passed"),
    ("peak_allocated", "most in use since the last reading"),
    ("reserved", "held for this process"),
    ("peak_reserved", "most held since the last reading"),
)
_KINDS = {
    "device allocator": "torch's allocator of the device",
    "device library": "a library on the device, which allocates past torch",
    "host allocator": "torch's allocator of host memory",
    "python": "Python, numpy or C++ in this process",
    "operating system": "the operating system",
}


def headline(evidence: Evidence) -> str:
    """Say in one line what ran out, where, how much was asked for and how much was free."""
    error = evidence.out_of_memory
    asked = error.requested_bytes
    said = [f"out of memory on {evidence.device} in {evidence.phase} of {step_under_way(evidence)}"]
    if error.worker:
        said[0] += f" (in {error.worker})"
    said.append("how much was asked for is not known" if asked is None else _asked(asked))
    free = free_bytes(evidence)
    if free is not None:
        # A request fails for want of room; where there is room, it came free as the error passed.
        late = " once the error had passed" if asked is not None and free >= asked else ""
        said.append(f"{format_bytes(free)} free{late}{_of_limit(evidence)}")
    return f"{said[0]}: {', '.join(said[1:])}"


def report_text(evidence: Evidence) -> str:
    """Write the whole report; line 1 is the headline."""
    lines = [headline(evidence), "", *_moment(evidence), "", *_request(evidence), ""]
    lines += [*_memory(evidence), "", *_categories(evidence), "", *_foreseen(evidence), ""]
    lines += [*_peaks(evidence), "", *_remedies(evidence), "", "What to do next:"]
    lines += [f"  {n}. {words}" for n, words in enumerate(advice(evidence), 1)]
    return "\n".join(lines) + "\n"


def write_report(
    folder: Path, evidence: Evidence, snapshot: Callable[[Path], bool | None] | None = None
) -> Path | None:
    """Write `oom/rank-<r>-<n>.txt`, and beside it torch's own snapshot where one can be had.

    Both can be read by their owner alone. A run keeps at most MAX_REPORTS of a rank.

    Args:
        folder: The run folder.
        evidence: What is known.
        snapshot: Writes a snapshot to a path and says if it did; must not raise.

    Returns:
        The report's path; None where the run has its reports already.

    Raises:
        OSError: The folder cannot be written.
        MemoryError: Not even this much memory is left.
    """
    folder = folder / "oom"
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"rank-{evidence.rank}-{number}.txt" for number in range(1, MAX_REPORTS + 1))
    created = create_first_free(folder / name for name in names)
    if created is None:
        return None
    path, descriptor = created
    with os.fdopen(descriptor, "w") as file:
        file.write(report_text(evidence))
        file.flush()  # the snapshot may take long, and the process be killed meanwhile
        _add_snapshot(file.write, path.with_suffix(".pickle"), snapshot)
    return path


def _add_snapshot(
    write: Callable[[str], object], path: Path, snapshot: Callable[[Path], bool | None] | None
) -> None:
    if snapshot is not None and snapshot(path):
        write(f"\nEvery block of memory and who allocated it: drop {path.name} on {VIEWER}\n")


def _asked(num_bytes: float) -> str:
    return f"{format_bytes(num_bytes)} asked for"


def _of_limit(evidence: Evidence) -> str:
    limit = evidence.limit
    return f" of {format_bytes(limit.num_bytes)} ({limit.name})" if limit else ""


def _moment(evidence: Evidence) -> Iterator[str]:
    yield f"rank {evidence.rank} on {evidence.host}, {utc_text(evidence.at_unix_seconds)}"
    yield f"last step that ended: {evidence.step}; phase: {evidence.phase}"
    batch = shape_words(evidence.shape) if evidence.shape else "its shape is not known"
    facts = evidence.facts
    total = f" of {facts.accumulation}" if facts and facts.accumulation else ""
    number = f" {evidence.micro_batch}{total}" if evidence.micro_batch else ""
    yield f"micro-batch under way{number}: {batch}"
    if facts:
        yield f"run: {_run(facts)}"


def _run(facts: RunFacts) -> str:
    layout = facts.layout
    said = [f"ZeRO stage {layout.stage}", f"{facts.world_size} rank(s)", facts.dtype]
    said.append(f"optimizer offload {layout.optimizer}, parameter offload {layout.parameters}")
    if facts.samples and facts.accumulation:
        said.append(f"{facts.accumulation} micro-batch(es) of {facts.samples} samples a step")
    if facts.checkpointing is not None:
        said.append(f"activation checkpointing {'on' if facts.checkpointing else 'off'}")
    return "; ".join(said)


def _request(evidence: Evidence) -> Iterator[str]:
    error = evidence.out_of_memory
    asked = "not known" if error.requested_bytes is None else f"{error.requested_bytes:.0f} bytes"
    yield f"The failing request: {asked}, refused by {_KINDS[error.kind]}:"
    yield f"  {error.message}"


def _memory(evidence: Evidence) -> Iterator[str]:
    readings, limit = evidence.readings or {}, evidence.limit
    yield f"Memory of {evidence.device}:"
    for state, words in _STATES:
        if state in readings and not (evidence.device == "cpu" and "reserved" in state):
            yield f"  {words}: {_size(readings[state])}"
    if evidence.device == "cpu" and "reserved" in readings:
        yield f"  virtual size: {_size(readings['reserved'])}"
    if limit:
        yield f"  limit: {_size(limit.num_bytes)}, set by {limit.name}"
    else:
        yield "  limit: not known"
    unusable = use_bytes(evidence, "reserved_unallocated", "unusable")
    if evidence.device != "cpu" and unusable is not None:
        yield f"  held, but in pieces not of use to this request (fragmentation): {_size(unusable)}"
    if "alloc_retries" in readings:
        retries = readings["alloc_retries"]
        yield f"  times that all cached memory was freed to try again: {retries:.0f}"
    if evidence.growth_bytes_per_step:
        growth = format_bytes(evidence.growth_bytes_per_step)
        yield f"  growth that no batch explains (a leak): {growth} a step"


def _size(num_bytes: float) -> str:
    if not math.isfinite(num_bytes):
        return "none"
    return f"{format_bytes(num_bytes)} ({num_bytes:.0f} bytes)"


def _categories(evidence: Evidence) -> Iterator[str]:
    if not evidence.categories:
        yield "By category: not known; no step was looked at closely yet."
        return
    total = sum(evidence.categories.values())
    yield f"By category, at the last peak that was looked at ({format_bytes(total)}):"
    by_size = sorted(evidence.categories.items(), key=lambda item: -item[1])
    for what, size in by_size:
        yield f"  {what:<12} {percent(size, total):>6}  {_size(size)}"


def _foreseen(evidence: Evidence) -> Iterator[str]:
    alarm, risk = evidence.alarm_step, evidence.batch_risk_ratio
    if alarm is not None:
        ago = max(0, evidence.step - alarm)
        yield f"Foreseen: yes, the risk passed 50 % after step {alarm}, {ago} steps before this end"
    elif risk is not None and risk > 0.5:
        yield "Foreseen: yes, by this micro-batch's own risk as it began"
    else:
        yield "Foreseen: no, the risk was not over 50 % before"
    if risk is not None:
        yield f"  risk of this micro-batch as it began: {percent(risk, 1)}"


def _peaks(evidence: Evidence) -> Iterator[str]:
    if not evidence.peaks:
        yield "Last peaks: none was read yet."
        return
    yield (
        "Last peaks, each since the reading before, and what was thought before each "
        "(risk: of the 50 steps to come):"
    )
    row = "{:>9} {:>10} {:>9} {:>10} {:>7}  {}".format
    yield row("step", "peak", "of limit", "predicted", "risk", "micro-batches")
    for point in evidence.peaks[-MAX_PEAKS:]:
        thought = (evidence.foresights or {}).get(point.step)
        predicted = thought.predicted_bytes if thought else None
        risk = thought.risk_ratio if thought else None
        yield row(
            point.step,
            format_bytes(point.peak_bytes),
            percent(point.peak_bytes, point.limit_bytes),
            "-" if predicted is None else format_bytes(predicted),
            "-" if risk is None else percent(risk, 1),
            shapes_words(point.shapes),
        )


def _remedies(evidence: Evidence) -> Iterator[str]:
    if evidence.remedies is None:
        yield "What would have fitted: cannot be told, as the limit or the use is not known."
        return
    yield "What would have fitted, each alone, cheapest first:"
    for remedy in evidence.remedies:
        yield f"  {_FITS[remedy.fits]:<12} {_need(remedy):>14}  {remedy.words}"
    if evidence.growth_bytes_per_step:
        yield "  and each for some steps only, as the leak goes on"
    if not evidence.remedies:
        yield "  nothing could be worked out, for want of the batch, the categories and the plan"
    elif nothing_fits(evidence.remedies):
        yield "  nothing here fits; take several together, or more ranks"


def _need(remedy: Remedy) -> str:
    if remedy.kind == "unknown":
        return "not known"
    return f"{_KINDS_OF_NEED[remedy.kind]}{format_bytes(max(0.0, remedy.need_bytes))}"
