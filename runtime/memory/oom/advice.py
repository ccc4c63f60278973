"""What to do after an out-of-memory error, from its evidence, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.units import format_bytes
from .evidence import Evidence
from .formatting import percent, use_bytes
from .would_fit import Remedy


def advice(evidence: Evidence) -> list[str]:
    """List what to do, the most likely help first; never empty."""
    return [
        *_of_leak(evidence),
        *_of_others(evidence),
        *_of_worker(evidence),
        *_of_remedies(evidence),
        *_of_early_end(evidence),
        *_of_limit(evidence),
        *_of_warning(evidence),
    ] or ["Use a smaller micro-batch with more accumulation, or more sharding or offload."]


def _of_leak(evidence: Evidence) -> Iterator[str]:
    growth = evidence.growth_bytes_per_step
    if growth:
        yield (
            f"Find the leak of {format_bytes(growth)} a step first: all else only delays the end. "
            "Losses, outputs or batches kept in a list hold whole graphs; keep loss.item(). "
            "memory.leak_sites=true tells where the memory is allocated."
        )


def _of_others(evidence: Evidence) -> Iterator[str]:
    told = evidence.out_of_memory.told_bytes
    total, free = told.get("total"), told.get("free")
    own = told.get("in_use", told.get("allocated", 0.0) + told.get("reserved_unallocated", 0.0))
    if total and free is not None and total - free - own > 0.1 * total:
        others = format_bytes(total - free - own)
        yield f"Other processes hold {others} of this device: see nvidia-smi, and end or move them."


def _of_worker(evidence: Evidence) -> Iterator[str]:
    if evidence.out_of_memory.worker:
        yield "A data loader's worker ran out: use fewer workers, a smaller prefetch_factor."


def _of_remedies(evidence: Evidence) -> Iterator[str]:
    remedy = _most_likely(evidence.remedies or ())
    if remedy is not None:
        yield f"Try {remedy.words}."


def _most_likely(remedies: Sequence[Remedy]) -> Remedy | None:
    """Return the cheapest that fits for sure; without any, the one that leaves most room."""
    sure = [each for each in remedies if each.fits == "yes"]
    likely = [each for each in remedies if each.fits != "no" and each.kind in ("forecast", "guess")]
    least = sorted(likely, key=lambda each: each.need_bytes)
    bounds = [each for each in remedies if each.fits == "perhaps"]
    return next(iter([*sure, *least, *bounds]), None)


def _of_early_end(evidence: Evidence) -> Iterator[str]:
    unusable = use_bytes(evidence, "reserved_unallocated", "unusable")
    asked = evidence.out_of_memory.requested_bytes
    if evidence.device != "cpu" and unusable and asked and unusable >= asked:
        yield (
            f"{format_bytes(unusable)} were held and not of use: that is fragmentation, which "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True mostly ends."
        )
    if evidence.step == 0:
        yield (
            "It ended in the first step: compare with `zerowatch estimate`, which plans the memory "
            "of each ZeRO stage."
        )


def _of_limit(evidence: Evidence) -> Iterator[str]:
    if evidence.device == "cpu" and evidence.limit:
        yield f"Or raise the limit, if the machine has more: it is set by {evidence.limit.name}."


def _of_warning(evidence: Evidence) -> Iterator[str]:
    risk = evidence.batch_risk_ratio
    if evidence.alarm_step is None and risk is not None and risk > 0.5:
        yield (
            f"The batch was seen coming ({percent(risk, 1)}): sort out or split batches of this "
            "size, such as by a limit on tokens instead of samples."
        )
