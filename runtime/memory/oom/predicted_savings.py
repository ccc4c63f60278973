"""Predicts which memory savings would have let a step fit that ran out of memory.

All functions are pure. `evidence.py` passes an `OomCase` to `predicted_savings`, and
`error_report.py` prints the returned `PredictedSaving` list as advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..forecast.peak_readings import Shape

Fits = Literal["yes", "barely", "perhaps", "no"]
Kind = Literal["forecast", "guess", "bound", "unknown"]

# Worst-case error of peak forecasts, relative to the peak. A memory saving that leaves a smaller
# margin below the limit may not fit.
MARGIN_RATIO = 0.05
# Proposed lengths are rounded down to a multiple of this number, so that kernels stay efficient.
LENGTH_MULTIPLE = 8
# Memory savings below this share of the needed bytes are not listed.
MIN_GAIN_RATIO = 0.005
# Forecasts are fitted to batches that did not run out of memory. For a batch that is larger than
# the largest of them by more than this factor, a forecast is only a guess.
TRUSTED_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of model states: the ZeRO stage, and the targets "none", "cpu" or "nvme"."""

    stage: int
    optimizer: str = "none"
    parameters: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBytes:
    """The planned bytes of one rank's model states under a layout."""

    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSaving:
    """One memory saving, and the memory that the failed step would have needed with it.

    Attributes:
        description: The change.
        need_bytes: The predicted peak with this change.
        fits: Whether the predicted peak is within the limit: "barely" if the margin is smaller than
            the error of forecasts, "perhaps" if `need_bytes` is not a forecast.
        kind: Whether `need_bytes` is a forecast, a guess from much smaller batches, a lower bound,
            or unknown.
    """

    description: str
    need_bytes: float
    fits: Fits
    kind: Kind = "forecast"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase:
    """A step that ran out of memory. It is the input of `predicted_savings`.

    Attributes:
        device: The name of the device, such as "cuda:0" or "cpu".
        in_use_bytes: Bytes in use when the request failed, which can be compared with the limit.
        requested_bytes: Size of the request, or 0 if unknown.
        limit_bytes: Upper bound of the memory in use.
        fragmented_bytes: Bytes reserved in blocks too small for the request (fragmentation).
        between_steps_bytes: Bytes in use between the last steps, or None if unknown.
        shape: The shape of the current micro-batch, or None if unknown.
        largest_tokens: Tokens of the largest recent micro-batch that fitted, or None if unknown.
        predict_peak: Returns the predicted peak of a micro-batch shape, or None if unknown.
        categories: Bytes by category at the last peak.
        layout: ZeRO stage and offload targets.
        planned: Bytes of the model states under the current layout and each alternative layout.
        world_size: Number of ranks among which ZeRO divides the model states.
        accumulation: Number of micro-batches per step.
        activation_checkpointing: Whether activations are recomputed already. None if unknown.
        trains_here: Whether the model computes on this device. False for a host that only holds
            offloaded data.
        host_free_bytes: Host memory that this rank can still use, or infinity if unknown.
    """

    device: str
    in_use_bytes: float
    requested_bytes: float
    limit_bytes: float
    fragmented_bytes: float = 0.0
    between_steps_bytes: float | None = None
    shape: Shape | None = None
    largest_tokens: int | None = None
    predict_peak: Callable[[Shape], float | None] = lambda shape: None
    categories: Mapping[str, float] | None = None
    layout: Layout | None = None
    planned: Mapping[Layout, LayoutBytes] | None = None
    world_size: int = 1
    accumulation: int | None = None
    activation_checkpointing: bool | None = None
    trains_here: bool = True
    host_free_bytes: float = math.inf

    @property
    def need_bytes(self) -> float:
        """A lower bound of the bytes that the step needed.

        Requests that would have come later may have needed more. The bound is always above the
        limit, even if less memory was in use by the time of the reading.
        """
        need = max(self.limit_bytes, self.in_use_bytes + self.requested_bytes)
        expected = None if self.shape is None else self.predict_peak(self.shape)
        return need if expected is None else max(need, expected)

    def need_bytes_with(self, shape: Shape) -> float | None:
        """Return the bytes needed with another micro-batch, or None if they are unknown."""
        if self.shape is None:
            return None
        other_peak, own_peak = self.predict_peak(shape), self.predict_peak(self.shape)
        if other_peak is not None and own_peak is not None:
            need = self.need_bytes - max(0.0, own_peak - other_peak)
            return need if self.between_steps_bytes is None else max(need, self.between_steps_bytes)
        if not self.activations_bytes:
            return None
        ratio = _num_tokens(shape) / max(1, _num_tokens(self.shape))
        return self.need_bytes - self.activations_bytes * (1 - min(1.0, ratio))

    def estimate_kind(self, shape: Shape) -> Kind:
        """Return how reliable the estimate of `need_bytes_with` is."""
        largest = self.largest_tokens
        return "guess" if largest and _num_tokens(shape) > TRUSTED_RATIO * largest else "forecast"

    @property
    def activations_bytes(self) -> float:
        """The known bytes of activations in the step."""
        if self.between_steps_bytes is not None:
            return max(0.0, self.need_bytes - self.between_steps_bytes)
        return (self.categories or {}).get("activations", 0.0)

    def states_bytes(self, layout: Layout | None) -> float | None:
        """Return the planned bytes of model states on this device, or None without a plan."""
        planned = self.planned.get(layout) if self.planned and layout else None
        if planned is None:
            return None
        on_host = planned.host_bytes if self.device == "cpu" else 0.0
        return on_host + (planned.device_bytes if self.trains_here else 0.0)


def predicted_savings(case: OomCase) -> list[PredictedSaving]:
    """Return the memory savings that apply to a case, starting with the least costly for training.

    The savings are advice for the next start by the user. A TrainingRun applies a shorter list,
    `trainer.oom_recovery.escalation.ESCALATION_ORDER`, to the live engine by itself. The docstring
    of that module describes the differences.
    """
    savings = [
        *_without_fragmentation(case),
        *_smaller_buckets(case),
        *_other_stages(case, upto=2),  # stages 1 and 2 send no more bytes than stage 0
        *_smaller_micro_batches(case),
        *_activation_checkpointing(case),
        *_other_stages(case, beyond=2),
        *_offloads(case),
        *_shorter_length(case),
    ]
    least = MIN_GAIN_RATIO * case.need_bytes
    return [
        saving
        for saving in savings
        if saving.kind == "unknown" or case.need_bytes - saving.need_bytes >= least
    ]


def nothing_fits(savings: Sequence[PredictedSaving]) -> bool:
    """Return whether none of the memory savings can fit on its own."""
    return all(saving.fits == "no" for saving in savings)


def _num_tokens(shape: Shape) -> int:
    return shape.samples * shape.length


def _saving(
    case: OomCase, text: str, need_bytes: float, kind: Kind = "forecast"
) -> PredictedSaving:
    fits: Fits = "yes"
    if kind == "unknown":
        fits = "perhaps"
    elif need_bytes > case.limit_bytes:
        fits = "no"
    elif kind != "forecast":
        fits = "perhaps"
    elif need_bytes > case.limit_bytes * (1 - MARGIN_RATIO):
        fits = "barely"
    return PredictedSaving(description=text, need_bytes=need_bytes, fits=fits, kind=kind)


def _without_fragmentation(case: OomCase) -> Iterator[PredictedSaving]:
    """Yield the allocator setting that avoids fragmentation, if memory is fragmented."""
    if not case.device.startswith("cuda") or not case.fragmented_bytes:
        return
    need = case.need_bytes - case.fragmented_bytes
    text = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which avoids fragmentation"
    yield _saving(case, text, need)


def _smaller_buckets(case: OomCase) -> Iterator[PredictedSaving]:
    buffers = (case.categories or {}).get("comm_buffers", 0.0)
    if 0.75 * buffers >= MARGIN_RATIO * case.need_bytes:  # a smaller saving is within the error
        text = "a quarter of reduce_bucket_size (more and smaller collectives)"
        yield _saving(case, text, case.need_bytes - 0.75 * buffers)


def _smaller_micro_batches(case: OomCase) -> Iterator[PredictedSaving]:
    shape = case.shape
    for part, name in ((2, "half"), (4, "a quarter")):
        if shape is None or shape.samples < part:
            return
        samples = math.ceil(shape.samples / part)
        smaller = Shape(samples, shape.length)
        need, kind = case.need_bytes_with(smaller), case.estimate_kind(smaller)
        if need is None or case.need_bytes - need < MIN_GAIN_RATIO * case.need_bytes:
            need, kind = case.need_bytes, "unknown"
        steps = case.accumulation
        count = f"{part * steps} micro-batches" if steps else f"{part} times the micro-batches"
        text = f"{name} the micro-batch, {samples} of {shape.samples} samples, and {count} a step"
        batch = "stays" if samples * part == shape.samples else "grows"
        yield _saving(case, f"{text} (the global batch {batch})", need, kind)


def _activation_checkpointing(case: OomCase) -> Iterator[PredictedSaving]:
    """Yield a lower bound only, as the need depends on which modules recompute."""
    if case.activation_checkpointing or not case.activations_bytes:
        return
    text = "activation checkpointing (about a third more compute), at best"
    yield _saving(case, text, case.need_bytes - case.activations_bytes, "bound")


def _other_stages(case: OomCase, *, upto: int = 3, beyond: int = 0) -> Iterator[PredictedSaving]:
    layout = case.layout
    if layout is None or case.world_size < 2:
        return
    for stage in range(max(layout.stage, beyond) + 1, upto + 1):
        cost = "" if stage < 3 else " (1.5 times the communication)"
        other_layout = Layout(stage, layout.optimizer, layout.parameters)
        yield from _changed_layout(case, other_layout, f"ZeRO stage {stage}{cost}")


def _offloads(case: OomCase) -> Iterator[PredictedSaving]:
    layout = case.layout
    if layout is None:
        return
    target = "nvme" if case.device == "cpu" else "cpu"
    if layout.optimizer != target:
        stage = 3 if target == "nvme" else max(1, layout.stage)
        change = "" if stage == layout.stage else f"ZeRO stage {stage} with "
        text = f"{change}offload_optimizer to {target} ({_COST[target]})"
        yield from _changed_layout(case, Layout(stage, target, layout.parameters), text)
    if layout.parameters != target:
        text = f"ZeRO stage 3 with offload_optimizer and offload_param to {target} (slow)"
        yield from _changed_layout(case, Layout(3, target, target), text)


_COST = {"cpu": "the optimizer runs on the host", "nvme": "every step reads and writes NVMe"}


def _changed_layout(case: OomCase, layout: Layout, text: str) -> Iterator[PredictedSaving]:
    """Yield the change to a layout. The difference of two plans cancels their common errors."""
    present, changed = case.states_bytes(case.layout), case.states_bytes(layout)
    if present is None or changed is None or not case.planned or not case.layout:
        return
    more_host_bytes = case.planned[layout].host_bytes - case.planned[case.layout].host_bytes
    need = case.need_bytes - (present - changed)
    if case.device != "cpu" and more_host_bytes > case.host_free_bytes:
        yield PredictedSaving(
            description=f"{text}: too large for the host", need_bytes=need, fits="no"
        )
    else:
        yield _saving(case, text, need)


def _shorter_length(case: OomCase) -> Iterator[PredictedSaving]:
    """Yield the greatest length that fits. Bisection finds it, as peaks grow with length."""
    shape, goal = case.shape, case.limit_bytes * (1 - MARGIN_RATIO)
    if shape is None or shape.length <= LENGTH_MULTIPLE:
        return
    fits, too_long = 0, math.ceil(shape.length / LENGTH_MULTIPLE)
    while too_long - fits > 1:
        midpoint = (fits + too_long) // 2
        need = case.need_bytes_with(Shape(shape.samples, midpoint * LENGTH_MULTIPLE))
        if need is not None and need <= goal:
            fits = midpoint
        else:
            too_long = midpoint
    shorter = Shape(shape.samples, fits * LENGTH_MULTIPLE)
    need = case.need_bytes_with(shorter)
    if fits and need is not None:
        text = f"a maximum length of {shorter.length} instead of {shape.length}"
        kind = case.estimate_kind(shorter)
        yield _saving(case, f"{text} (longer samples are cut)", need, kind)
