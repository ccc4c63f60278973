"""Hooks on one DeepSpeed engine: which phase it is in, what a window holds, when a step has ended.

Micro-batches are counted by backward, steps by the change of `engine.global_steps`, because
Accelerate calls `step()` only at boundaries and plain `loss.backward()` is legal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch

from .batch_shape import UNKNOWN, BatchShape, batch_shape
from .deferred import Deferred
from .hooks import Hooks
from .phase_clock import BACKWARD, CHECKPOINT, EVAL, FORWARD, OPTIMIZER, OTHER, PhaseClock
from .wrap import Wrap

ENGINE_METHODS = (
    "forward",
    "backward",
    "_backward_prologue",
    "_backward_epilogue",
    "step",
    "save_checkpoint",
    "load_checkpoint",
    "save_16bit_model",
)
PIPELINE_METHODS = ("train_batch", "eval_batch", "save_checkpoint", "load_checkpoint")


@dataclass(slots=True)
class Window:
    """The micro-batches since the last step, as this rank saw them."""

    micro_batches: int = 0
    samples: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    losses: list[Deferred] = field(default_factory=list)

    def add(self, shape: BatchShape, loss: Deferred | None) -> None:
        """Count one micro-batch."""
        self.micro_batches += 1
        if shape.samples is not None:
            self.samples = (self.samples or 0) + shape.samples
        if shape.tokens is not None:
            self.tokens = (self.tokens or 0) + shape.tokens
            self.sequence_length = shape.sequence_length
        if loss is not None:
            self.losses.append(loss)


class EngineHooks:
    """Wraps the methods of one engine instance until `restore`; holds the engine weakly.

    Attributes:
        cost_ns: Nanoseconds the hooks took on the training thread.
    """

    def __init__(
        self, engine: Any, clock: PhaseClock, hooks: Hooks, on_step_ended: Callable[[Window], None]
    ) -> None:
        self.cost_ns = 0
        self._engine = weakref.ref(engine)
        self._clock = clock
        self._open = True
        self._window = Window()
        self._shape = UNKNOWN
        self._output_loss: torch.Tensor | None = None
        self._inside_backward = False
        self._bare_backward = False
        self._steps_before = 0
        self._on_step_ended = on_step_ended
        self._hooks = hooks
        makers: Mapping[str, Callable[[Any], Any]] = {
            "forward": lambda f: self._around(f, self._forward_begins, self._forward_ended),
            "backward": lambda f: self._around(f, self._backward_begins, self._backward_ended),
            "_backward_prologue": lambda f: self._around(f, self._gradient_arrived, _nothing),
            "_backward_epilogue": lambda f: self._around(f, _no_arguments, self._gradients_done),
            "step": lambda f: self._around(f, self._step_begins, self._step_ended),
            "train_batch": lambda f: self._around(f, self._batch_begins, self._step_ended),
            "eval_batch": lambda f: self._in_phase(f, EVAL),
        }
        names = PIPELINE_METHODS if hasattr(type(engine), "train_batch") else ENGINE_METHODS
        self._wraps = [
            Wrap(engine, name, makers.get(name, lambda f: self._in_phase(f, CHECKPOINT)))
            for name in names
        ]

    def restore(self) -> None:
        """Take every hook off the engine again."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    @property
    def training(self) -> bool:
        """Whether the engine's module is in training mode."""
        engine = self._engine()
        return engine is not None and engine.module.training

    def _around(
        self, original: Any, begins: Callable[..., None], ended: Callable[[Any], None]
    ) -> Any:
        """Wrap a method: `begins` gets its arguments, `ended` its result, None if it raised."""
        name = original.__name__
        begins, ended = self._hooks.guard(name, begins), self._hooks.guard(name, ended)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            begins(args, kwargs)
            began_ns = perf_counter_ns()
            result = None
            try:
                result = original(*args, **kwargs)
            finally:
                ended_ns = perf_counter_ns()
                ended(result)
                self.cost_ns += perf_counter_ns() - ended_ns + began_ns - entered_ns
            return result

        return hooked

    def _in_phase(self, original: Any, phase: int) -> Any:
        return self._around(
            original,
            lambda args, kwargs: self._clock.enter(phase),
            lambda result: self._clock.leave(),
        )

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._close_bare_backward()
        if self.training and torch.is_grad_enabled():
            self._shape = batch_shape(args, kwargs)
            self._clock.enter(FORWARD)
        else:
            self._clock.enter(EVAL)

    def _forward_ended(self, output: Any) -> None:
        if self._clock.current == FORWARD:
            self._output_loss = _loss_in(output)
        self._clock.leave()

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        loss = args[0] if args else kwargs.get("loss")
        self._output_loss = _loss_in(loss)
        self._inside_backward = True
        self._clock.enter(BACKWARD)

    def _backward_ended(self, result: Any) -> None:
        self._inside_backward = False
        self._clock.leave()
        self._count_micro_batch()

    def _gradient_arrived(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notice a plain `loss.backward()`, on whatever thread autograd runs it."""
        if not self._inside_backward and not self._bare_backward:
            self._bare_backward = True
            self._clock.enter(BACKWARD)

    def _gradients_done(self, result: Any) -> None:
        if self._bare_backward:
            self._close_bare_backward()
            self._count_micro_batch()

    def _close_bare_backward(self) -> None:
        """End a plain backward; one that raised never came to its own end."""
        if self._bare_backward:
            self._bare_backward = False
            self._clock.leave()

    def _count_micro_batch(self) -> None:
        loss = None if self._output_loss is None else Deferred(self._output_loss)
        self._window.add(self._shape, loss)
        self._shape, self._output_loss = UNKNOWN, None

    def _step_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._close_bare_backward()
        self._remember_steps()
        self._clock.enter(OPTIMIZER)

    def _batch_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._remember_steps()
        self._clock.enter(OTHER)

    def _remember_steps(self) -> None:
        engine = self._engine()
        self._steps_before = engine.global_steps if engine is not None else 0

    def _step_ended(self, result: Any) -> None:
        self._clock.leave()
        engine = self._engine()
        if engine is None or engine.global_steps == self._steps_before:
            return
        window, self._window = self._window, Window()
        self._on_step_ended(window)


def _nothing(result: Any) -> None:
    """Do nothing after a call."""


def _no_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Do nothing before a call."""


def _loss_in(output: Any) -> torch.Tensor | None:
    """Find the loss in what forward returned, or backward was given; leave its graph behind."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    elif hasattr(output, "loss"):
        output = output.loss
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output.detach()
    return None
