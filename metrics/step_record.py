"""Defines the record of a step, which is a line of the run log and the argument of listeners.

This file defines the schema of `runs/<run_id>/rank-<r>.jsonl`. If an older reader would
misunderstand a change, increase SCHEMA_VERSION.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from .catalog.labels import NON_TRAINING_PHASES, PHASES

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotals:
    """The calls of one collective operation in a step.

    Attributes:
        calls: The number of calls.
        payload_bytes: The payload of all calls, in bytes.
        wire_bytes: The bytes that this rank sent for these calls.
        seconds: The time from issue to completion, summed over the calls. None if no call was
            timed.
    """

    calls: int
    payload_bytes: int
    wire_bytes: float
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTotals:
    """The calls of `generate` in a step, such as those of DeepSpeed's hybrid engine.

    Attributes:
        calls: The number of calls that returned.
        sequences: The number of returned sequences; None if it is unknown.
        tokens: The new tokens of these sequences, without padding; None if they are unknown, such
            as if a stop string may have ended a sequence.
        seconds: The time of all calls, also of those that raised; the phase `generate`.
        collectives: The collectives that the calls issued.
        gathers: The all-gathers among them; with ZeRO 3 they gather parameters.
        gathered_bytes: The payload of the all-gathers, in bytes.
        peak_bytes: The peak of allocated memory by device; empty if it was not read in this step.
            Without a device whose peak cannot be reset.
    """

    calls: int
    sequences: int | None
    tokens: int | None
    seconds: float
    collectives: int
    gathers: int
    gathered_bytes: int
    peak_bytes: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of the calls; None if the tokens are unknown."""
        return self.tokens / self.seconds if self.tokens is not None and self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank. An unknown value is None, or absent from its mapping.

    Time: `seconds` is the wall time since the previous step, including all phases. The values of
    `phase_seconds` add up to `seconds`. On a GPU both are times of the compute stream, between
    events at each change of phase. If the events could not be recorded or read, both are times of
    the host, and `phases_are_host_times` is True. It is False on CPU.

    Memory and devices: `memory_bytes` and `device_readings` are keyed by device, then by state or
    reading. The catalog metric of a key states its unit. The peaks in `memory_bytes` cover the
    time since the previous record with peaks. If a TrainingRun has changed its memory use in that
    time, as by other micro-batches, `peak_bytes_since_change` has the peaks of allocated memory
    since the last change, by device; else it is empty. `micro_batch_shapes` are the distinct
    micro-batches since that change or record, each as samples and length. `oom_risk_ratio` is the
    last computed risk by device.

    Generation: `generation` has the calls of `generate` before the step, or None if there were
    none. Their time is the phase `generate`. The peaks in `memory_bytes` do not contain them.

    Communication: `comm_seconds` is the length of the union of the intervals of all collectives.
    `comm_exposed_seconds` is the part of `comm_seconds` in which training could do nothing else.
    `comm_exposed_phase_seconds` divides this part by phase. `collectives` does not contain
    zerowatch's own collectives (votes), but the seconds include them. The seconds are None if the
    end of a call could not be marked or read, as in a captured or replayed CUDA graph; calls in a
    coalescing block are left out. On a GPU the ends of asynchronous calls are exact in sampled
    steps (`sampling.exact_collectives_steps`). In the other steps `comm_seconds_is_upper_bound` is
    True: `comm_seconds` and the seconds in `collectives` extend to the point where training had
    waited for the call, which it may have reached late. `comm_exposed_seconds` is exact in all
    steps for calls that the compute stream waits for by `Work.wait`. If another stream waits, other
    work of that stream may be included, except in sampled steps. Waits by a call's future are not
    seen.

    Examples:
        >>> engine.watch.subscribe(lambda record: print(record.step, record.phase_seconds))
    """

    step: int
    ended_at_unix_seconds: float
    seconds: float
    phase_seconds: Mapping[str, float]
    micro_batches: int
    samples: int | None
    tokens: int | None
    loss: float | None
    nonfinite_loss: bool
    gradient_norm: float | None
    learning_rate: float | None
    loss_scale: float | None
    skipped: bool
    collectives: Mapping[str, CollectiveTotals]
    comm_seconds: float | None
    comm_exposed_seconds: float | None
    memory_bytes: Mapping[str, Mapping[str, float]]
    device_readings: Mapping[str, Mapping[str, float]]
    micro_batch_shapes: Sequence[tuple[int, int]] = ()
    oom_risk_ratio: Mapping[str, float] = field(default_factory=dict)
    comm_exposed_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    comm_seconds_is_upper_bound: bool = False
    generation: GenerationTotals | None = None
    phases_are_host_times: bool = False
    peak_bytes_since_change: Mapping[str, float] = field(default_factory=dict)

    @property
    def training_seconds(self) -> float:
        """Wall time of the step in seconds, without evaluation and checkpoints."""
        return self.seconds - sum(self.phase_seconds.get(p, 0.0) for p in NON_TRAINING_PHASES)

    @property
    def training_exposed_seconds(self) -> float | None:
        """Exposed communication within `training_seconds`; None if it is unknown."""
        return exposed_in_training(self.comm_exposed_seconds, self.comm_exposed_phase_seconds)


def exposed_in_training(
    exposed_seconds: float | None, by_phase: Mapping[str, float]
) -> float | None:
    """Return the exposed communication of a step without that of evaluation and checkpoints.

    Args:
        exposed_seconds: `StepRecord.comm_exposed_seconds`.
        by_phase: `StepRecord.comm_exposed_phase_seconds`.
    """
    if exposed_seconds is None:
        return None
    outside = sum(by_phase.get(phase, 0.0) for phase in NON_TRAINING_PHASES)
    return max(0.0, exposed_seconds - outside)


def seconds_by_phase(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Return the seconds of each phase that took time; `nanoseconds` are in the order of PHASES."""
    return {PHASES[place]: ns / 1e9 for place, ns in enumerate(nanoseconds) if ns}


class LineWriter:
    """Converts records to lines of JSON, including the newline.

    It uses orjson, because it runs for every step and the json module takes five times as long. NaN
    and infinity are written as null.

    Args:
        identity: The fields of every line: rank, host, attempt and world_size.
    """

    def __init__(self, identity: Mapping[str, str | int]) -> None:
        self._head = orjson.dumps({"schema": SCHEMA_VERSION, **identity})[:-1] + b","

    def line(self, record: StepRecord) -> bytes:
        """Return the line of a record."""
        return self._head + orjson.dumps(record)[1:] + b"\n"
