"""The arithmetic of each window, by the method that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

from ...metrics.catalog import training
from ...metrics.recorder import Recorder
from ...metrics.settings import FlopsSettings
from ..common.fail_open import FailOpen
from ..devices.choose import peak_flops_per_second
from .batch_shape import batch_shape
from .flops import FlopsTerms, flops_terms
from .step_counts import StepCounts

# Backward computes the gradients of inputs and of weights: twice the arithmetic of forward
# (PaLM, arXiv 2204.02311, appendix B).
FORWARD_AND_BACKWARD = 3.0


def flops_counter(
    module: torch.nn.Module, method: Literal["analytic", "profiler", "off"], fail_open: FailOpen
) -> FlopsCounter:
    """Return what tells a window's floating point operations."""
    if method == "profiler":
        return ProfiledFlops(module, fail_open)
    return AnalyticFlops(flops_terms(module) if method == "analytic" else None)


def publish_peak(
    settings: FlopsSettings, recorder: Recorder, *, device_index: int | None
) -> float | None:
    """Find and publish the peak of this rank's device in FLOP/s; None where it is not known."""
    peak = settings.peak_per_second
    if peak is None and settings.method != "off":
        peak = peak_flops_per_second(device_index=device_index)
    if peak is not None:
        device = "cpu" if device_index is None else f"cuda:{device_index}"
        recorder.set(training.PEAK_FLOPS, peak, device)
    return peak


class FlopsCounter(Protocol):
    """Tells the arithmetic of a window; keeps no model alive after `close`."""

    def __call__(self, window: StepCounts) -> float | None:
        """Return floating point operations, or None where they are not known."""

    def close(self) -> None:
        """Take off what was put on the model."""


class AnalyticFlops:
    """Counts by formula from the tokens."""

    def __init__(self, terms: FlopsTerms | None) -> None:
        self._terms = terms

    def __call__(self, window: StepCounts) -> float | None:
        """Return floating point operations, or None where the batch shows no tokens."""
        if self._terms is None or window.tokens is None:
            return None
        return self._terms.per_token(window.sequence_length) * window.tokens

    def close(self) -> None:
        """Do nothing: nothing was put on the model."""


class ProfiledFlops:
    """Counts one training forward with DeepSpeed's FLOPs profiler, and scales by samples.

    The profiler patches torch's functions while it counts, and puts them back after that forward.
    Its own hooks run behind ours, so what it left on the modules goes with the next forward.
    """

    def __init__(self, module: torch.nn.Module, fail_open: FailOpen) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self._profiler: Any = FlopsProfiler(module)
        self._per_sample: float | None = None
        self._samples = 0
        begin, end = fail_open.wrap("flops", self._begin), fail_open.wrap("flops", self._end)
        self._handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: begin(module, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda module, args, output: end(), always_call=True),
        ]

    def __call__(self, window: StepCounts) -> float | None:
        """Return floating point operations, or None before the first forward was counted."""
        if self._per_sample is None or window.samples is None:
            return None
        return self._per_sample * window.samples

    def close(self) -> None:
        """End the profile and let go of the model. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        profiler, self._profiler = self._profiler, None
        if self._samples and profiler is not None:
            profiler.end_profile()

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._per_sample is not None:
            self.close()
        elif module.training and torch.is_grad_enabled() and not self._samples:
            self._samples = batch_shape(args, kwargs).samples or 0
            if self._samples:
                self._profiler.start_profile()

    def _end(self) -> None:
        if self._samples and self._per_sample is None:
            self._profiler.stop_profile()
            counted = float(self._profiler.get_total_flops())
            self._per_sample = FORWARD_AND_BACKWARD * counted / self._samples
