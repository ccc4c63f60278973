"""Asks the sources for all that a report says. A source that knows nothing is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from .evidence import Evidence, Limit, OomContext
from .formatting import in_use_bytes, largest_tokens, use_bytes
from .limit_name import host_limit_name
from .parse_error import OomError
from .would_fit import OomCase, Remedy, remedies

Readings = Mapping[str, Mapping[str, float]]


def collect_evidence(rank: int, host: str, said: OomError, sources: OomContext) -> Evidence:
    """Put together what is known of this error, on the thread that raised it."""
    readings = sources.readings() or {}
    device = device_of(said, readings)
    evidence = Evidence(
        rank=rank,
        host=host,
        at_unix_seconds=time.time(),
        step=sources.step() or 0,
        phase=sources.phase() or "other",
        micro_batch=sources.micro_batch(),
        out_of_memory=said,
        device=device,
        readings=readings.get(device),
        categories=sources.categories(device),
        shape=sources.shape(),
        batch_risk_ratio=sources.batch_risk(device),
        peaks=sources.peaks(device) or (),
        foresights={each.step: each for each in sources.foresights(device) or ()},
        alarm_step=sources.alarm_step(device),
        limit=_limit_of(device, said, readings.get(device, {}), sources),
        growth_bytes_per_step=sources.growth(device),
        facts=sources.facts(),
    )
    return replace(evidence, remedies=_remedies(evidence, readings, sources))


def device_of(said: OomError, readings: Readings) -> str:
    """Complete the name of a device whose number the error does not tell: this rank has one."""
    if said.device in readings or said.device == "cpu":
        return said.device
    ours = (device for device in readings if device.startswith(said.device.partition(":")[0]))
    return next(ours, said.device) if ":" not in said.device else said.device


def _limit_of(
    device: str, said: OomError, states: Mapping[str, float], sources: OomContext
) -> Limit | None:
    allowed = said.told_bytes.get("allowed")
    if allowed is not None:
        return Limit(num_bytes=allowed, name="set_per_process_memory_fraction")
    named = sources.limit(device)
    if named is not None:
        return named
    limit = states.get("limit", math.inf)
    if not math.isfinite(limit):
        return None
    name = host_limit_name(states) if device == "cpu" else "the device, less what others use"
    return Limit(num_bytes=limit, name=name)


def _remedies(evidence: Evidence, readings: Readings, sources: OomContext) -> list[Remedy] | None:
    """Work out what would have fitted; None where use or limit are not known."""
    in_use, limit, facts = in_use_bytes(evidence), evidence.limit, evidence.facts
    if in_use is None or limit is None or not math.isfinite(limit.num_bytes):
        return None
    device, host = evidence.device, readings.get("cpu", {})
    return remedies(
        OomCase(
            device=device,
            in_use_bytes=in_use,
            requested_bytes=evidence.out_of_memory.requested_bytes or 0.0,
            limit_bytes=limit.num_bytes,
            unusable_bytes=use_bytes(evidence, "reserved_unallocated", "unusable") or 0.0,
            floor_bytes=evidence.peaks[-1].floor_bytes if evidence.peaks else None,
            shape=evidence.shape,
            largest_tokens=largest_tokens(evidence.peaks),
            predicted=partial(sources.predicted, device),
            categories=evidence.categories,
            layout=facts.layout if facts else None,
            planned=sources.planned(),
            world_size=facts.world_size if facts else 1,
            accumulation=facts.accumulation if facts else None,
            checkpointing=facts.checkpointing if facts else None,
            trains_here=device != "cpu" or len(readings) == 1,
            host_room_bytes=host.get("limit", math.inf) - host.get("allocated", 0.0),
        )
    )
