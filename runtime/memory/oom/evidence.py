"""Collects the evidence of an out-of-memory error from the context of the run, as plain data.

`collect_evidence` queries an `OomContext` and returns an `OomEvidence`. This module does not import
torch and does not read an engine. Only the implementations of `OomContext` do so. `host_limit_name`
reads files of /proc and of cgroups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ...common.cgroups import cgroup_folders
from ...common.format_numbers import format_bytes
from ...common.phase_timer import GENERATE_PHASE
from ..forecast.peak_readings import PeakPoint, PeakPrediction, Shape
from .oom_error import UNKNOWN_DEVICE, OomError
from .predicted_savings import Layout, LayoutBytes, OomCase, PredictedSaving, predicted_savings

Readings = Mapping[str, Mapping[str, float]]

ROOT = Path("/")
# A limit that differs from a reading by less than this counts as the limit of the reading. Readings
# are taken at slightly different times, and limits of different kinds differ by more than this.
_TOLERANCE_BYTES = 2**20
_CGROUP_FILES = ("memory.max", "memory.limit_in_bytes")  # version 2 and 1
_UNNAMED = "an unknown limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The part of this rank's training configuration that determines its memory use.

    Attributes:
        layout: ZeRO stage and offload targets.
        world_size: Number of ranks among which ZeRO divides the model states.
        dtype: The data type of the model, such as "bf16".
        samples: Configured number of samples per micro-batch.
        accumulation: Number of micro-batches per step.
        activation_checkpointing: Whether activations are recomputed; None if unknown.
    """

    layout: Layout
    world_size: int
    dtype: str
    samples: int | None = None
    accumulation: int | None = None
    activation_checkpointing: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The upper bound of the memory in use, which can be compared with peaks.

    `name` says where the limit is set, such as "RLIMIT_AS" or "the memory cgroup /train".
    """

    num_bytes: float
    name: str


class OomContext:
    """Provides the state of the run when memory runs out. It is queried on the training thread.

    Its methods neither block nor log. They return None if a fact is unknown. All methods of this
    base class return None. A `device` is a name such as "cuda:0" or "cpu".
    """

    def folder(self) -> Path | None:
        """Return the run folder, or None before it exists."""
        return None

    def step(self) -> int | None:
        """Return the last completed step."""
        return None

    def phase(self) -> str | None:
        """Return the current phase of the training thread, one of the catalog's phases."""
        return None

    def readings(self) -> Readings | None:
        """Read all devices. Return bytes by memory state, and `alloc_retries`, of each device."""
        return None

    def micro_batch(self) -> int | None:
        """Return the number of the current micro-batch within its step, counted from 1."""
        return None

    def shape(self) -> Shape | None:
        """Return the shape of the current micro-batch, or else of the last micro-batch."""
        return None

    def batch_risk(self, device: str) -> float | None:
        """Return the risk of the current micro-batch, computed when the micro-batch began."""
        return None

    def categories(self, device: str) -> Mapping[str, float] | None:
        """Return the bytes of each category at the peak of the last detailed sample."""
        return None

    def peaks(self, device: str) -> Sequence[PeakPoint] | None:
        """Return the readings at the ends of the last steps, oldest first."""
        return None

    def predictions(self, device: str) -> Sequence[PeakPrediction] | None:
        """Return the predictions made for the last steps."""
        return None

    def alarm_step(self, device: str) -> int | None:
        """Return the first step of the current alarm."""
        return None

    def limit(self, device: str) -> Limit | None:
        """Return the configured limit, or None if another limit is in effect."""
        return None

    def growth_bytes_per_step(self, device: str) -> float | None:
        """Return how fast a leak makes the memory of a device grow, or None without a leak."""
        return None

    def setup(self) -> TrainingSetup | None:
        """Return the training configuration of this rank."""
        return None

    def predict_peak(self, device: str, shape: Shape) -> float | None:
        """Return the predicted peak bytes of a micro-batch of this shape."""
        return None

    def estimated_layouts(self) -> Mapping[Layout, LayoutBytes] | None:
        """Return the size of the model states under the current and every possible layout."""
        return None

    def available_rank_bytes(self) -> float | None:
        """Return this rank's share of the memory that its node has left."""
        return None

    def has_expandable_segments(self) -> bool | None:
        """Return whether the device's allocator uses expandable segments."""
        return None

    def dump_snapshot(self, device: str, path: Path) -> bool | None:
        """Write torch's memory snapshot of a device. Return whether it was written."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEvidence:
    """All known facts about one out-of-memory error. They are the content of its report.

    Attributes:
        rank: This rank.
        host: This machine.
        at_unix_seconds: The time at which the error passed.
        step: The last completed step. 0 if no step has completed.
        phase: Phase of the training thread, which is one of the phases in the catalog.
        error: The parsed error.
        device: The device that ran out of memory, such as "cuda:0" or "cpu". If the error names no
            device, the device that this rank trains on. The facts below describe this device.
        micro_batch: Number of the current micro-batch within its step, counted from 1.
        readings: Bytes by memory state, and `alloc_retries`, when the error reached the engine.
            Memory that a frame of the error's stack holds has not been freed at this time.
        categories: Bytes by category at the peak of the last detailed sample.
        shape: Shape of the current micro-batch.
        batch_risk_ratio: The risk of the current micro-batch, computed when it began.
        peaks: The readings at the ends of the last steps, oldest first.
        predictions: The predictions made for the steps of `peaks`, by step.
        alarm_step: The step after which the risk rose above one half, which raised the current
            alarm.
        limit: The limit that was exceeded.
        predicted_savings: Memory savings, and what the step would have needed with each. None if
            they are unknown.
        growth_bytes_per_step: Growth of memory that batch sizes do not explain. None without a
            leak.
        setup: Training configuration of this rank.
        has_expandable_segments: Whether the device's allocator uses expandable segments already.
    """

    rank: int
    host: str
    at_unix_seconds: float
    step: int
    phase: str
    error: OomError
    device: str
    micro_batch: int | None = None
    readings: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, float] | None = None
    shape: Shape | None = None
    batch_risk_ratio: float | None = None
    peaks: Sequence[PeakPoint] = ()
    predictions: Mapping[int, PeakPrediction] = field(default_factory=dict)
    alarm_step: int | None = None
    limit: Limit | None = None
    predicted_savings: Sequence[PredictedSaving] | None = None
    growth_bytes_per_step: float | None = None
    setup: TrainingSetup | None = None
    has_expandable_segments: bool = False

    @property
    def is_device_unknown(self) -> bool:
        """Whether the error names neither a device nor a kind of device."""
        return self.error.device == UNKNOWN_DEVICE

    @property
    def fragmented_bytes(self) -> float | None:
        """The reserved bytes in blocks too small for the request, from the error or a reading.

        Those of private pools are not included.
        """
        reported = self.error.reported_bytes.get("reserved_unallocated")
        if reported is not None or "unusable" not in self.readings:
            return reported
        return min(self.readings["unusable"], self.readings.get("inactive_split", math.inf))

    @property
    def private_pool_bytes(self) -> float:
        """The free bytes in private pools, such as those of captured graphs."""
        if "reserved_unallocated" in self.error.reported_bytes:
            return self.error.reported_bytes.get("private_pools", 0.0)
        return (self.readings.get("unusable") or 0.0) - (self.fragmented_bytes or 0.0)

    @property
    def in_use_bytes(self) -> float | None:
        """The bytes in use when the request failed, which can be compared with the limit.

        The text of the error reports these bytes, if it reports any. A reading is taken later, when
        much memory is free again. A peak above all earlier peaks, however, must have occurred in
        this step. On CUDA the limit applies to reserved memory.
        """
        reported = self.error.reported_bytes
        if "allocated" in reported:
            return reported["allocated"] + reported.get("reserved_unallocated", 0.0)
        state = "allocated" if self.device == "cpu" else "reserved"
        now, peak = self.readings.get(state), self.readings.get(f"peak_{state}", 0.0)
        if now is None or self.device != "cpu" or not self.peaks:
            return now
        highest = max(point.peak_bytes for point in self.peaks)
        return max(now, peak) if peak > highest else now

    @property
    def free_bytes(self) -> float | None:
        """The bytes left below the limit, or the free bytes of the device if they are fewer."""
        reported, in_use = self.error.reported_bytes.get("free"), self.in_use_bytes
        free = [] if reported is None else [reported]
        if in_use is not None and self.limit and math.isfinite(self.limit.num_bytes):
            free.append(max(0.0, self.limit.num_bytes - in_use))
        return min(free) if free else None

    @property
    def largest_tokens(self) -> int | None:
        """The tokens of the largest micro-batch of the last steps, or None if unknown.

        None in generation, where they do not matter.
        """
        if self.phase == GENERATE_PHASE:
            return None
        shapes = (shape for point in self.peaks for shape in point.shapes)
        return max((shape.samples * shape.length for shape in shapes), default=None)


def collect_evidence(rank: int, host: str, error: OomError, context: OomContext) -> OomEvidence:
    """Return all known facts about an error. Runs on the thread that raised the error."""
    readings = context.readings() or {}
    device = complete_device(error, readings)
    if device == UNKNOWN_DEVICE:
        device = training_device(readings)
    phase = context.phase() or "other"
    trains = phase != GENERATE_PHASE  # generation has no micro-batch
    evidence = OomEvidence(
        rank=rank,
        host=host,
        at_unix_seconds=time.time(),
        step=context.step() or 0,
        phase=phase,
        micro_batch=context.micro_batch() if trains else None,
        error=error,
        device=device,
        readings=readings.get(device, {}),
        categories=context.categories(device),
        shape=context.shape() if trains else None,
        batch_risk_ratio=context.batch_risk(device) if trains else None,
        peaks=context.peaks(device) or (),
        predictions={each.step: each for each in context.predictions(device) or ()},
        alarm_step=context.alarm_step(device),
        limit=_limit_of(device, error, readings.get(device, {}), context),
        growth_bytes_per_step=context.growth_bytes_per_step(device),
        setup=context.setup(),
        has_expandable_segments=context.has_expandable_segments() or False,
    )
    return replace(evidence, predicted_savings=_predicted_savings(evidence, readings, context))


def training_device(readings: Readings) -> str:
    """Return the device on which this rank trains: the device besides the host, else the host."""
    return next((device for device in readings if device != "cpu"), "cpu")


def complete_device(error: OomError, readings: Readings) -> str:
    """Return the device of an error. A missing index is filled in from this rank's device."""
    if error.device in readings or error.device == "cpu":
        return error.device
    own = (device for device in readings if device.startswith(error.device.partition(":")[0]))
    return next(own, error.device) if ":" not in error.device else error.device


def _limit_of(
    device: str, error: OomError, states: Mapping[str, float], context: OomContext
) -> Limit | None:
    allowed = error.reported_bytes.get("allowed")
    if allowed is not None:
        return Limit(num_bytes=allowed, name="set_per_process_memory_fraction")
    configured = context.limit(device)
    if configured is not None:
        return configured
    limit = states.get("limit", math.inf)
    if not math.isfinite(limit):
        return None
    name = host_limit_name(states) if device == "cpu" else "the device, minus other processes"
    return Limit(num_bytes=limit, name=name)


def _predicted_savings(
    evidence: OomEvidence, readings: Readings, context: OomContext
) -> list[PredictedSaving] | None:
    """Compute the savings, or return None if the bytes in use or the limit are unknown."""
    in_use, limit, setup = evidence.in_use_bytes, evidence.limit, evidence.setup
    if in_use is None or limit is None or not math.isfinite(limit.num_bytes):
        return None
    device = evidence.device
    # The only advice against fragmentation is to use expandable segments.
    fragmented = 0.0 if evidence.has_expandable_segments else evidence.fragmented_bytes or 0.0
    return predicted_savings(
        OomCase(
            device=device,
            in_use_bytes=in_use,
            requested_bytes=evidence.error.requested_bytes or 0.0,
            limit_bytes=limit.num_bytes,
            fragmented_bytes=fragmented,
            between_steps_bytes=evidence.peaks[-1].between_steps_bytes if evidence.peaks else None,
            shape=evidence.shape,
            largest_tokens=evidence.largest_tokens,
            predict_peak=partial(context.predict_peak, device),
            categories=evidence.categories,
            layout=setup.layout if setup else None,
            planned=context.estimated_layouts(),
            world_size=setup.world_size if setup else 1,
            accumulation=setup.accumulation if setup else None,
            activation_checkpointing=setup.activation_checkpointing if setup else None,
            trains_here=device != "cpu" or len(readings) == 1,
            host_free_bytes=_host_free_bytes(readings.get("cpu", {}), context),
        )
    )


def _host_free_bytes(host: Mapping[str, float], context: OomContext) -> float:
    """Return the host memory that this rank can still use. The ranks of a node share it."""
    below_limit = host.get("limit", math.inf) - host.get("allocated", 0.0)
    available = context.available_rank_bytes()
    return below_limit if available is None else min(below_limit, available)


def host_limit_name(states: Mapping[str, float], root: Path = ROOT) -> str:
    """Return the name of the host limit that determined the limit in a reading.

    Args:
        states: The bytes of the states allocated, reserved and limit.
        root: Root of the file system. Tests set another root.
    """
    limit = states.get("limit", math.inf)
    distances = [(abs(size - limit), name) for name, size in _candidates(states, root)]
    distance, name = min(distances, default=(math.inf, _UNNAMED))
    return name if distance <= _TOLERANCE_BYTES else _UNNAMED


def _candidates(states: Mapping[str, float], root: Path) -> Iterator[tuple[str, float]]:
    """Yield each limit and the memory in use at which it is reached, as `HostLimit` does."""
    in_use, virtual = states.get("allocated", 0.0), states.get("reserved", 0.0)
    limits = _limits(root / "proc/self/limits")
    data = _kilobytes(root / "proc/self/status", "VmData:")
    for name, kind, used in (
        ("Max address space", "RLIMIT_AS (ulimit -v) of {} of addresses", virtual),
        ("Max data size", "RLIMIT_DATA (ulimit -d) of {}", data),
    ):
        allowed = limits.get(name)
        if allowed is not None:
            yield kind.format(format_bytes(allowed)), in_use + allowed - used
    yield "this machine's memory", _kilobytes(root / "proc/meminfo", "MemTotal:")
    for folder in cgroup_folders("memory", root):
        for name in _CGROUP_FILES:
            yield f"the memory cgroup {folder}", _number(folder / name)


def _limits(path: Path) -> Mapping[str, float]:
    """Read soft limits by name. The columns of proc_pid_limits(5) are 26 and 21 wide."""
    lines = _text(path).splitlines()
    soft = {line[:26].strip(): line[26:47].strip() for line in lines}
    return {name: float(size) for name, size in soft.items() if size.isdigit()}


def _kilobytes(path: Path, field: str) -> float:
    found = (line.split() for line in _text(path).splitlines() if line.startswith(field))
    return next((float(words[1]) * 1024 for words in found), math.inf)


def _number(path: Path) -> float:
    text = _text(path).strip()
    return float(text) if text.isdigit() else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
