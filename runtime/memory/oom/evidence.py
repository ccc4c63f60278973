"""What is known at the moment memory runs out, as plain data, and whence it comes.

It comes from other rooms by callables; this room knows neither torch nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..forecast.series import PeakPoint, Shape
from .parse_error import OomError
from .would_fit import Layout, LayoutBytes, Remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """How this rank trains.

    Attributes:
        layout: ZeRO stage and what is offloaded.
        world_size: Ranks that share what ZeRO divides.
        dtype: Of the model, as "bf16".
        samples: Of a micro-batch, as configured.
        accumulation: Micro-batches of a step.
        checkpointing: Whether activations are recomputed; None where that is not known.
    """

    layout: Layout
    world_size: int
    dtype: str
    samples: int | None = None
    accumulation: int | None = None
    checkpointing: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrediction:
    """What was thought of a step before it: its peak, and the risk of the next 50 steps."""

    step: int
    predicted_bytes: float | None
    risk_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What may not be passed, comparable with peaks, and whose word that is.

    `name` says which limit it is, such as "RLIMIT_AS" or "the memory cgroup /train".
    """

    num_bytes: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a report says.

    Attributes:
        rank: This rank.
        host: This machine.
        at_unix_seconds: When the error passed.
        step: The last step that ended; 0 before the first.
        phase: What the training thread was doing, of the catalog's phases.
        micro_batch: Which micro-batch of its step was under way, from 1 on.
        out_of_memory: What the error says.
        device: Whose memory ran out, such as "cuda:0" or "cpu".
        readings: Bytes by memory state, and `alloc_retries`, as the error passed. Freed by then is
            only what no frame of the error's stack holds.
        categories: Bytes by category at the peak of the step last looked at.
        shape: The micro-batch under way.
        batch_risk_ratio: How likely it was thought not to fit, as it began.
        peaks: The last readings at the end of a step, the latest last.
        foresights: What was thought of those steps, by step.
        alarm_step: The step after which the present alarm was raised: risk over one half.
        limit: What was passed.
        remedies: What would have fitted; None where that cannot be told.
        growth_bytes_per_step: Growth that no batch explains; None where there is none.
        facts: How this rank trains.
    """

    rank: int
    host: str
    at_unix_seconds: float
    step: int
    phase: str
    out_of_memory: OomError
    device: str
    micro_batch: int | None = None
    readings: Mapping[str, float] | None = None
    categories: Mapping[str, float] | None = None
    shape: Shape | None = None
    batch_risk_ratio: float | None = None
    peaks: Sequence[PeakPoint] = ()
    foresights: Mapping[int, PeakPrediction] | None = None
    alarm_step: int | None = None
    limit: Limit | None = None
    remedies: Sequence[Remedy] | None = None
    growth_bytes_per_step: float | None = None
    facts: RunFacts | None = None


def _unknown(*_: object) -> None:
    """Stand in for a source that there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomContext:
    """Where the facts come from. Asked on the training thread; none may block or log.

    None means that a fact cannot be had, and is left out. Those that take a text take the name of
    a device, such as "cuda:0" or "cpu".

    Attributes:
        folder: The run folder, once there is one.
        step: The last step that ended.
        phase: What the training thread is doing, of the catalog's phases.
        readings: All devices, read now: bytes by memory state, and `alloc_retries`.
        micro_batch: Which micro-batch of its step is under way, from 1 on.
        shape: The micro-batch under way, or the last one.
        batch_risk: How likely that one was thought not to fit into a device.
        categories: Bytes by category at the last peak that was looked at.
        peaks: The last readings, the latest last.
        foresights: What was thought of the last steps.
        alarm_step: The first step of the present alarm.
        limit: What may not be passed, if that is not the readings' limit, and whose it is.
        growth: Bytes per step of a leak.
        facts: How this rank trains.
        predicted: The peak that a micro-batch of this shape is expected to have on a device.
        planned: Model states by layout; the present layout and those that could be had instead.
        snapshot: Writes torch's memory snapshot of a device to a path, and says if it did.
    """

    folder: Callable[[], Path | None]
    step: Callable[[], int | None]
    phase: Callable[[], str | None]
    readings: Callable[[], Mapping[str, Mapping[str, float]] | None]
    micro_batch: Callable[[], int | None] = _unknown
    shape: Callable[[], Shape | None] = _unknown
    batch_risk: Callable[[str], float | None] = _unknown
    categories: Callable[[str], Mapping[str, float] | None] = _unknown
    peaks: Callable[[str], Sequence[PeakPoint] | None] = _unknown
    foresights: Callable[[str], Sequence[PeakPrediction] | None] = _unknown
    alarm_step: Callable[[str], int | None] = _unknown
    limit: Callable[[str], Limit | None] = _unknown
    growth: Callable[[str], float | None] = _unknown
    facts: Callable[[], RunFacts | None] = _unknown
    predicted: Callable[[str, Shape], float | None] = _unknown
    planned: Callable[[], Mapping[Layout, LayoutBytes] | None] = _unknown
    snapshot: Callable[[str, Path], bool | None] = _unknown
