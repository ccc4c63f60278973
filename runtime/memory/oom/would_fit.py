"""What would have fitted where a step ran out of memory: pure, on plain numbers, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..forecast.series import Shape

Fits = Literal["yes", "barely", "perhaps", "no"]
Kind = Literal["forecast", "guess", "bound", "unknown"]

# Forecasts of peaks miss by about this share at worst; what leaves less than that may not fit.
MARGIN_RATIO = 0.05
# A length is cut to a multiple of this, as kernels like it.
LENGTH_MULTIPLE = 8
# Below this share of the need a remedy is not worth a line.
LEAST_GAIN_RATIO = 0.005
# Forecasts are fitted to batches that fitted; beyond so many times their size they are guesses.
TRUSTED_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where model states are: ZeRO's stage, and the homes "none", "cpu" or "nvme" of offloads."""

    stage: int
    optimizer: str = "none"
    parameters: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBytes:
    """Model states of one rank under a layout, in bytes, as planned."""

    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change, and what the fatal step would have needed with it.

    Attributes:
        words: What to change.
        need_bytes: The peak it would have had.
        fits: Whether that is within the limit: "barely" if it is nearer to the limit than forecasts
            are good, "perhaps" if `need_bytes` is no forecast.
        kind: Whether `need_bytes` is a forecast, a guess from much smaller batches, or no more than
            a bound from below.
    """

    words: str
    need_bytes: float
    fits: Fits
    kind: Kind = "forecast"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase:
    """A step that did not fit.

    Attributes:
        device: Such as "cuda:0" or "cpu".
        in_use_bytes: What was in use as the request failed, comparable with the limit.
        requested_bytes: What was asked for; 0 where that is not known.
        limit_bytes: What may not be passed.
        unusable_bytes: Held in pieces too small to be of use (fragmentation).
        floor_bytes: What was in use between the last steps; None where that is not known.
        shape: The micro-batch under way; None where it is not known.
        largest_tokens: Of the micro-batches that fitted lately; None where that is not known.
        predicted: The peak to expect with a micro-batch of a shape; None from it if not known.
        categories: Bytes by category at the last peak.
        layout: ZeRO's stage, and what is offloaded.
        planned: Model states by layout: the present one, and those that could be had instead.
        world_size: Ranks that share what ZeRO divides.
        accumulation: Micro-batches of a step.
        checkpointing: Whether activations are recomputed already; None where that is not known.
        trains_here: Whether the model computes on this device; not so where offloads fill the host.
        host_room_bytes: What the host can still take; infinite where that is not known.
    """

    device: str
    in_use_bytes: float
    requested_bytes: float
    limit_bytes: float
    unusable_bytes: float = 0.0
    floor_bytes: float | None = None
    shape: Shape | None = None
    largest_tokens: int | None = None
    predicted: Callable[[Shape], float | None] = lambda shape: None
    categories: Mapping[str, float] | None = None
    layout: Layout | None = None
    planned: Mapping[Layout, LayoutBytes] | None = None
    world_size: int = 1
    accumulation: int | None = None
    checkpointing: bool | None = None
    trains_here: bool = True
    host_room_bytes: float = math.inf

    @property
    def need_bytes(self) -> float:
        """What the step would have needed, at least: it may have asked for more later.

        That was more than the limit, even where less is in use by the time that is read.
        """
        asked = max(self.limit_bytes, self.in_use_bytes + self.requested_bytes)
        expected = None if self.shape is None else self.predicted(self.shape)
        return asked if expected is None else max(asked, expected)

    def need_of(self, shape: Shape) -> float | None:
        """Return what it would have needed with another micro-batch; None if nothing tells."""
        if self.shape is None:
            return None
        there, here = self.predicted(shape), self.predicted(self.shape)
        if there is not None and here is not None:
            need = self.need_bytes - max(0.0, here - there)
            return need if self.floor_bytes is None else max(need, self.floor_bytes)
        if not self.activations_bytes:
            return None
        ratio = _tokens(shape) / max(1, _tokens(self.shape))
        return self.need_bytes - self.activations_bytes * (1 - min(1.0, ratio))

    def kind_of(self, shape: Shape) -> Kind:
        """Say how good such a figure is."""
        known = self.largest_tokens
        return "guess" if known and _tokens(shape) > TRUSTED_RATIO * known else "forecast"

    @property
    def activations_bytes(self) -> float:
        """What the batch accounted for in that step, as far as is known."""
        if self.floor_bytes is not None:
            return max(0.0, self.need_bytes - self.floor_bytes)
        return (self.categories or {}).get("activations", 0.0)

    def states_bytes(self, layout: Layout | None) -> float | None:
        """Return what is planned to lie in this memory under a layout; None if nothing tells."""
        planned = self.planned.get(layout) if self.planned and layout else None
        if planned is None:
            return None
        on_host = planned.host_bytes if self.device == "cpu" else 0.0
        return on_host + (planned.device_bytes if self.trains_here else 0.0)


def remedies(shortage: OomCase) -> list[Remedy]:
    """List what would have helped, the cheapest for training first."""
    found = [
        *_without_fragmentation(shortage),
        *_smaller_buckets(shortage),
        *_other_stages(shortage, upto=2),  # those send no more than stage 0 does
        *_smaller_micro_batches(shortage),
        *_checkpointing(shortage),
        *_other_stages(shortage, beyond=2),
        *_offloads(shortage),
        *_shorter(shortage),
    ]
    least = LEAST_GAIN_RATIO * shortage.need_bytes
    return [
        each
        for each in found
        if each.kind == "unknown" or shortage.need_bytes - each.need_bytes >= least
    ]


def nothing_fits(found: Sequence[Remedy]) -> bool:
    """Whether no remedy by itself would have been enough, not even perhaps."""
    return all(each.fits == "no" for each in found)


def _tokens(shape: Shape) -> int:
    return shape.samples * shape.length


def _remedy(shortage: OomCase, words: str, need_bytes: float, kind: Kind = "forecast") -> Remedy:
    fits: Fits = "yes"
    if kind == "unknown":
        fits = "perhaps"
    elif need_bytes > shortage.limit_bytes:
        fits = "no"
    elif kind != "forecast":
        fits = "perhaps"
    elif need_bytes > shortage.limit_bytes * (1 - MARGIN_RATIO):
        fits = "barely"
    return Remedy(words=words, need_bytes=need_bytes, fits=fits, kind=kind)


def _without_fragmentation(shortage: OomCase) -> Iterator[Remedy]:
    """Say so where the pieces that are of no use would have served the request together."""
    if not shortage.device.startswith("cuda") or not shortage.unusable_bytes:
        return
    need = shortage.need_bytes - shortage.unusable_bytes
    words = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves no such pieces"
    yield _remedy(shortage, words, need)


def _smaller_buckets(shortage: OomCase) -> Iterator[Remedy]:
    buffers = (shortage.categories or {}).get("comm_buffers", 0.0)
    if 0.75 * buffers >= MARGIN_RATIO * shortage.need_bytes:  # less would be lost in the errors
        words = "a quarter of reduce_bucket_size (more and smaller collectives)"
        yield _remedy(shortage, words, shortage.need_bytes - 0.75 * buffers)


def _smaller_micro_batches(shortage: OomCase) -> Iterator[Remedy]:
    shape = shortage.shape
    for part, name in ((2, "half"), (4, "a quarter")):
        if shape is None or shape.samples < part:
            return
        samples = math.ceil(shape.samples / part)
        smaller = Shape(samples, shape.length)
        need, kind = shortage.need_of(smaller), shortage.kind_of(smaller)
        if need is None or shortage.need_bytes - need < LEAST_GAIN_RATIO * shortage.need_bytes:
            need, kind = shortage.need_bytes, "unknown"
        steps = shortage.accumulation
        count = f"{part * steps} micro-batches" if steps else f"{part} times the micro-batches"
        words = f"{name} the micro-batch, {samples} of {shape.samples} samples, and {count} a step"
        yield _remedy(shortage, f"{words} (the global batch stays)", need, kind)


def _checkpointing(shortage: OomCase) -> Iterator[Remedy]:
    """Give the bound only: how little remains depends on where the model is cut."""
    if shortage.checkpointing or not shortage.activations_bytes:
        return
    words = "activation checkpointing (about a third more computing), if it kept nothing"
    yield _remedy(shortage, words, shortage.need_bytes - shortage.activations_bytes, "bound")


def _other_stages(shortage: OomCase, *, upto: int = 3, beyond: int = 0) -> Iterator[Remedy]:
    layout = shortage.layout
    if layout is None or shortage.world_size < 2:
        return
    for stage in range(max(layout.stage, beyond) + 1, upto + 1):
        more = "" if stage < 3 else " (half as much again to send)"
        instead = Layout(stage, layout.optimizer, layout.parameters)
        yield from _moved(shortage, instead, f"ZeRO stage {stage}{more}")


def _offloads(shortage: OomCase) -> Iterator[Remedy]:
    layout = shortage.layout
    if layout is None:
        return
    home = "nvme" if shortage.device == "cpu" else "cpu"
    if layout.optimizer != home:
        words = f"offload_optimizer to {home} ({_PRICE[home]})"
        stage = 3 if home == "nvme" else max(1, layout.stage)
        yield from _moved(shortage, Layout(stage, home, layout.parameters), words)
    if layout.parameters != home:
        words = f"ZeRO stage 3 with offload_optimizer and offload_param to {home} (slow)"
        yield from _moved(shortage, Layout(3, home, home), words)


_PRICE = {"cpu": "its step runs on the host", "nvme": "each step reads and writes it"}


def _moved(shortage: OomCase, layout: Layout, words: str) -> Iterator[Remedy]:
    """Compare what is planned for two layouts: the plans' common faults cancel out."""
    now, then = shortage.states_bytes(shortage.layout), shortage.states_bytes(layout)
    if now is None or then is None or not shortage.planned or not shortage.layout:
        return
    more = shortage.planned[layout].host_bytes - shortage.planned[shortage.layout].host_bytes
    need = shortage.need_bytes - (now - then)
    if shortage.device != "cpu" and more > shortage.host_room_bytes:
        yield Remedy(words=f"{words}: the host has no room for that", need_bytes=need, fits="no")
    else:
        yield _remedy(shortage, words, need)


def _shorter(shortage: OomCase) -> Iterator[Remedy]:
    """Find the greatest length that fits; by halving, as a peak grows with the length."""
    shape, goal = shortage.shape, shortage.limit_bytes * (1 - MARGIN_RATIO)
    if shape is None or shape.length <= LENGTH_MULTIPLE:
        return
    fits, too_long = 0, math.ceil(shape.length / LENGTH_MULTIPLE)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        need = shortage.need_of(Shape(shape.samples, middle * LENGTH_MULTIPLE))
        if need is not None and need <= goal:
            fits = middle
        else:
            too_long = middle
    shorter = Shape(shape.samples, fits * LENGTH_MULTIPLE)
    need = shortage.need_of(shorter)
    if fits and need is not None:
        words = f"a maximum length of {shorter.length} instead of {shape.length}"
        kind = shortage.kind_of(shorter)
        yield _remedy(shortage, f"{words} (longer samples are cut)", need, kind)
