"""The arithmetic of each window, by the method that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from .batch_shape import batch_shape
from .engine_hooks import Window
from .flops import flops_per_token
from .hooks import Hooks

FlopsOf = Callable[[Window], float | None]

# Backward computes the gradients of inputs and of weights: twice the arithmetic of forward
# (PaLM, arXiv 2204.02311, appendix B).
FORWARD_AND_BACKWARD = 3.0


def flops_counter(
    module: torch.nn.Module, method: Literal["analytic", "profiler", "off"], hooks: Hooks
) -> FlopsOf:
    """Return what tells a window's floating point operations; None where they are not known."""
    if method == "profiler":
        return ProfiledFlops(module, hooks)
    return AnalyticFlops(module) if method == "analytic" else _unknown


def _unknown(window: Window) -> float | None:
    return None


class AnalyticFlops:
    """Counts by formula from the tokens; asks the model once per sequence length."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._per_token: dict[int | None, float | None] = {}

    def __call__(self, window: Window) -> float | None:
        """Return floating point operations, or None where the batch shows no tokens."""
        if window.tokens is None:
            return None
        length = window.sequence_length
        if length not in self._per_token:
            self._per_token[length] = flops_per_token(self._module, length)
        per_token = self._per_token[length]
        return None if per_token is None else per_token * window.tokens


class ProfiledFlops:
    """Counts one training forward with DeepSpeed's FLOPs profiler, and scales by samples.

    The profiler patches torch's functions while it counts, and puts them back after that forward.
    """

    def __init__(self, module: torch.nn.Module, hooks: Hooks) -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        self._profiler = FlopsProfiler(module)
        self._per_sample: float | None = None
        self._samples: int | None = None
        begin, end = hooks.guard("flops", self._begin), hooks.guard("flops", self._end)
        self._handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: begin(module, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda module, args, output: end()),
        ]

    def __call__(self, window: Window) -> float | None:
        """Return floating point operations, or None before the first forward was counted."""
        if self._per_sample is None or window.samples is None:
            return None
        return self._per_sample * window.samples

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and self._samples is None:
            self._samples = batch_shape(args, kwargs).samples
            self._profiler.start_profile()

    def _end(self) -> None:
        if self._samples is None:
            return
        counted = float(self._profiler.get_total_flops())
        self._profiler.end_profile()
        for handle in self._handles:
            handle.remove()
        self._per_sample = FORWARD_AND_BACKWARD * counted / self._samples
