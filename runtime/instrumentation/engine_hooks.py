"""Hooks on one DeepSpeed engine: which phase it is in, what a window holds, when a step has ended.

Micro-batches are counted by backward, steps by the change of `engine.global_steps`, because
Accelerate calls `step()` only at boundaries and plain `loss.backward()` is legal. A pipeline
engine does a whole window in one `train_batch`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from ..common.device_scalar import Number
from ..common.fail_open import FailOpen
from ..common.patching import AttributePatch
from ..common.phase_timer import BACKWARD, CHECKPOINT, EVAL, FORWARD, OPTIMIZER, OTHER, PhaseTimer
from .batch_shape import BatchShape, batch_shape
from .memory_hooks import MemoryHooks
from .output_loss import _no_output, _weak_output, extract_loss
from .pipeline_hooks import INSTRUCTION_MAP, PHASE_OF_INSTRUCTION, InstructionMap, loaded_shape
from .step_counts import StepCounts

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


class EngineHooks:
    """Wraps the methods of one engine instance until `restore`; holds the engine weakly.

    Attributes:
        cost_ns: Nanoseconds the hooks took on the training thread.
    """

    def __init__(
        self,
        engine: Any,
        clock: PhaseTimer,
        fail_open: FailOpen,
        memory: MemoryHooks,
        on_step_ended: Callable[[StepCounts], None],
    ) -> None:
        self.cost_ns = 0
        self._engine = weakref.ref(engine)
        self._clock = clock
        self._open = True
        self._window = StepCounts()
        self._shapes: list[BatchShape] = []
        self._loss: Number = None
        self._output: Callable[[], Any] = _no_output
        self._inside_backward = False
        self._bare_backward = False
        self._steps_before = self._skipped_before = 0
        self._on_step_ended = on_step_ended
        self._fail_open = fail_open
        self._batch_begins = fail_open.wrap("batch risk", memory.batch_begins)
        self._backward_ends = fail_open.wrap("memory categories", memory.backward_ends)
        self._update_begins = fail_open.wrap("memory categories", memory.step_begins)
        self._raised = fail_open.wrap("oom report", memory.raised)
        self._is_pipeline = hasattr(type(engine), "train_batch")
        names = PIPELINE_METHODS if self._is_pipeline else ENGINE_METHODS
        self._wraps: list[AttributePatch | InstructionMap] = [
            AttributePatch(engine, name, partial(self._wrapper, name))
            for name in names
            if hasattr(engine, name)
        ]
        if hasattr(engine, INSTRUCTION_MAP):
            self._wraps.append(InstructionMap(engine, self._instruction))

    def restore(self) -> None:
        """Take every hook off the engine again."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    def discard_window(self) -> None:
        """Forget the micro-batches so far: they will run again, and count then."""
        self._window = StepCounts()
        self._shapes, self._loss = [], None

    @property
    def training(self) -> bool:
        """Whether the engine's module is in training mode."""
        engine = self._engine()
        return engine is not None and engine.module.training

    def _wrapper(self, name: str, original: Any) -> Any:
        """Make the wrapper of one method."""
        match name:
            case "forward":
                return self._around(name, original, self._forward_begins, self._forward_ended)
            case "backward":
                return self._around(name, original, self._backward_begins, self._backward_ended)
            case "step" | "train_batch":
                return self._around(name, original, self._step_begins, self._step_ended)
            case "_backward_prologue":
                return self._around_prologue(original)
            case "_backward_epilogue":
                return self._around_epilogue(original)
        phase = EVAL if name == "eval_batch" else CHECKPOINT
        return self._around(
            name,
            original,
            lambda args, kwargs: self._clock.enter(phase),
            lambda result, returned: self._clock.leave(),
        )

    def _instruction(self, name: str, original: Any) -> Any:
        """Make the wrapper of one instruction of a pipeline."""
        phase, is_forward = PHASE_OF_INSTRUCTION[name], name == "ForwardPass"

        def begins(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            training = torch.is_grad_enabled()  # `train_batch` insists on it
            self._clock.enter(phase if training else EVAL)
            if is_forward and training:
                shape = loaded_shape(args[0], kwargs)
                if shape is not None:
                    self._shapes.append(shape)
                    self._batch_begins(shape, len(self._shapes))
            elif name == "OptimizerStep":
                self._update_begins()

        return self._around(name, original, begins, lambda result, returned: self._clock.leave())

    def _around(
        self,
        name: str,
        original: Any,
        begins: Callable[..., None],
        ended: Callable[[Any, bool], None],
    ) -> Any:
        """Wrap a method: `begins` gets its arguments, `ended` its result and if it returned."""
        begins, ended = self._fail_open.wrap(name, begins), self._fail_open.wrap(name, ended)
        is_compiling = torch.compiler.is_compiling

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            begins(args, kwargs)
            began_ns = perf_counter_ns()
            result, returned = None, False
            try:
                result = original(*args, **kwargs)
                returned = True
            except (RuntimeError, MemoryError) as error:
                self._raised(error)
                raise
            finally:
                ended_ns = perf_counter_ns()
                ended(result, returned)
                self.cost_ns += perf_counter_ns() - ended_ns + began_ns - entered_ns
            return result

        return hooked

    def _around_prologue(self, original: Any) -> Any:
        arrived = self._fail_open.wrap("_backward_prologue", self._gradient_arrived)

        def hooked() -> Any:
            if self._open and not self._inside_backward and not torch.compiler.is_compiling():
                arrived()
            return original()

        return hooked

    def _around_epilogue(self, original: Any) -> Any:
        done = self._fail_open.wrap("_backward_epilogue", self._gradients_done)

        def hooked() -> Any:
            if self._open and not torch.compiler.is_compiling():
                self._backward_ends()
            try:
                return original()
            finally:
                if self._open and self._bare_backward:
                    done()

        return hooked

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._close_bare_backward()
        if self.training and torch.is_grad_enabled():
            shape = batch_shape(args, kwargs)
            self._shapes.append(shape)
            self._clock.enter(FORWARD)
            self._batch_begins(shape, self._window.micro_batches + 1)
        else:
            self._clock.enter(EVAL)

    def _forward_ended(self, output: Any, returned: bool) -> None:
        self._clock.leave()
        # Weakly, and looked at only if a plain backward comes: it may hold the whole graph.
        self._output = _weak_output(output)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._loss = extract_loss(args[0] if args else kwargs.get("loss"))
        if not (args[2] if len(args) > 2 else kwargs.get("scale_wrt_gas", True)):
            self._window.losses_are_shares = True  # the caller has divided them already
        self._inside_backward = True
        self._clock.enter(BACKWARD)

    def _backward_ended(self, result: Any, returned: bool) -> None:
        self._inside_backward = False
        self._clock.leave()
        if returned:
            self._count_micro_batch()

    def _gradient_arrived(self) -> None:
        """Notice a plain `loss.backward()`, on whatever thread autograd runs it."""
        if not self._bare_backward:
            self._bare_backward = True
            self._loss = extract_loss(self._output())
            self._clock.enter(BACKWARD)

    def _gradients_done(self) -> None:
        self._close_bare_backward()
        self._count_micro_batch()

    def _close_bare_backward(self) -> None:
        """End a plain backward; one that raised never came to its own end."""
        if self._bare_backward:
            self._bare_backward = False
            self._clock.leave()

    def _count_micro_batch(self) -> None:
        """Count what one backward went through, which may be several forwards."""
        self._window.add(self._shapes, self._loss)
        self._shapes, self._loss = [], None

    def _count_pipeline(self, engine: Any, loss: Any) -> None:
        """Count the window of one `train_batch`, whose loss is the mean over all pipelines.

        Only the first stage sees what goes in. The others know how many samples it should be.
        """
        window = self._window
        window.add(self._shapes, extract_loss(loss))
        window.micro_batches = engine.micro_batches
        if window.samples is None:
            window.samples = engine.micro_batches * engine.train_micro_batch_size_per_gpu()

    def _step_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._close_bare_backward()
        engine = self._engine()
        if engine is not None:
            self._steps_before, self._skipped_before = engine.global_steps, engine.skipped_steps
            managed = engine.managed_gradient_accumulation()  # else each step ends a window
            ends = not managed or engine.is_gradient_accumulation_boundary()
            if ends and not self._is_pipeline:
                self._update_begins()
        self._clock.enter(OTHER if self._is_pipeline else OPTIMIZER)

    def _step_ended(self, result: Any, returned: bool) -> None:
        self._clock.leave()
        engine = self._engine()
        if engine is None or engine.global_steps == self._steps_before:
            return
        if self._is_pipeline:
            self._count_pipeline(engine, result)
        window, self._window = self._window, StepCounts()
        window.skipped = engine.skipped_steps != self._skipped_before
        self._shapes = []  # of forwards that no backward came for
        self._on_step_ended(window)
