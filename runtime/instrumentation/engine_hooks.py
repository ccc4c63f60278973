"""Wraps the methods of a DeepSpeed engine, to measure phases, micro-batches and steps.

A micro-batch ends with its backward pass. A step ends when `engine.global_steps` changes, because
Accelerate calls `step()` only at boundaries of gradient accumulation. A script may also call
`loss.backward()` itself. A pipeline engine runs a whole step in one `train_batch`. A checkpoint on
another thread than the training thread, which makes the steps, is no phase.

A model may train in evaluation mode, such as a frozen one with a new head. Its forward pass counts
once a backward pass of the engine follows. A micro-batch in this mode has no more forward passes
than the one before, because the first passes may be a validation with gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ..common.device_scalar import ScalarOrPending, host_value, scalar
from ..common.fail_open import FailOpen
from ..common.hot_path import EngineHookFields, HookedCall, HookState, constructor
from ..common.patching import AttributePatch
from ..common.phase_timer import BACKWARD, CHECKPOINT, EVAL, FORWARD, OPTIMIZER, OTHER, PhaseTimer
from ..common.tracing import flags, is_traced
from .batch_shape import BatchShape, batch_shape
from .checkpoint_metrics import CheckpointMetrics
from .generated_tokens import GenerationCounts
from .generation_hooks import (
    GENERATE_METHOD,
    GenerateWrapper,
    GenerationHooks,
    generating_objects,
)
from .memory_hooks import MemoryHooks
from .pipeline_hooks import INSTRUCTION_MAP, PHASE_OF_INSTRUCTION, InstructionMap, loaded_shape
from .raw_step import StepCounts
from .step_collector import StepCollector

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
_new_counts = constructor(StepCounts)


class _EvaluationShapes(list[BatchShape]):
    """The shapes of forward passes in evaluation mode, with gradients: they may be evaluations.

    The hooks in C leave a list of another class to the methods in Python.
    """


class EngineHooks(EngineHookFields):
    """Wraps the methods of an engine until `restore`. Keeps only a weak reference to the engine."""

    _generation: GenerationHooks
    _phase_timer: PhaseTimer

    def __init__(
        self,
        engine: Any,
        phase_timer: PhaseTimer,
        fail_open: FailOpen,
        memory: MemoryHooks,
        collector: StepCollector,
        checkpoints: CheckpointMetrics,
        generated_before: GenerationCounts | None = None,
    ) -> None:
        self._state = HookState()
        self._state.is_open = True
        self._engine = weakref.ref(engine)
        self._tensor_type, self._is_grad_enabled = torch.Tensor, torch.is_grad_enabled
        self._read_shape, self._read_value, self._new_counts = batch_shape, host_value, _new_counts
        self._phase_timer, self._memory = phase_timer, memory
        self._counts = StepCounts()
        self._shapes: list[BatchShape] = []
        self._loss: ScalarOrPending = None
        self._trains_in_evaluation_mode = False
        self._num_passes = 1  # in evaluation mode, before the last backward pass
        # The step of the last forward pass in evaluation mode, and its micro-batches before.
        self._last_in_evaluation_mode: tuple[StepCounts, int] | None = None
        self._output: Callable[[], Any] = _no_output
        self._inside_backward = False
        self._plain_backward = False
        self._steps_before = self._skipped_before = 0
        self._collect = collector.on_step_end
        self._checkpoints = checkpoints
        self._fail_open = fail_open
        self._on_batch_start = fail_open.wrap("batch risk", memory.on_batch_start)
        self._on_gradients = fail_open.wrap("memory categories", memory.on_backward_end)
        self._on_update_start = fail_open.wrap("memory categories", memory.on_update_start)
        self._on_exception = fail_open.wrap("oom report", memory.on_exception)
        # A loss that cannot be read must not end the phases. Losses do not depend on each other.
        self._read_loss = fail_open.wrap("loss", extract_loss, is_kept=True)
        self._generation = GenerationHooks(engine, phase_timer, memory, fail_open, generated_before)
        self._is_pipeline = hasattr(type(engine), "train_batch")
        self._losses_are_divided = is_divided_by_lightning(engine.module)
        names = PIPELINE_METHODS if self._is_pipeline else ENGINE_METHODS
        self._patches: list[AttributePatch | InstructionMap] = [
            AttributePatch(engine, name, partial(self._wrapper, name))
            for name in names
            if hasattr(engine, name)
        ]
        self._patches += [
            AttributePatch(each, GENERATE_METHOD, self._generate_wrapper)
            for each in generating_objects(engine)
        ]
        if hasattr(engine, INSTRUCTION_MAP):
            self._patches.append(InstructionMap(engine, self._instruction))

    def restore(self) -> None:
        """Restore the engine's methods."""
        self._state.is_open = False
        for patch in reversed(self._patches):
            patch.restore()
        self._patches.clear()

    def take_generated(self) -> GenerationCounts | None:
        """Return the calls of `generate` since the last step, for the hooks of the next engine."""
        return self._generation.take_counts()

    def discard_window(self) -> None:
        """Discard the micro-batches since the last step, which will be repeated or skipped."""
        self._counts = StepCounts(discarded_ns=self._phase_timer.passes_ns())
        self._shapes, self._loss = [], None

    def expect_divided_losses(self) -> None:
        """The sum of the losses of this step is the loss of the step."""
        self._counts.losses_are_divided = True

    @property
    def cost_ns(self) -> int:
        """Nanoseconds that the hooks have taken on the training thread."""
        return self._state.cost_ns

    @property
    def generated_ns(self) -> int:
        """Nanoseconds of the host in calls of `generate`."""
        return self._generation.generated_ns

    @property
    def training(self) -> bool:
        """Whether the engine's module is in training mode."""
        engine = self._engine()
        return engine is not None and engine.module.training

    @property
    def loads_training_data(self) -> bool:
        """Whether a batch that is loaded now is one to train on: by the mode of the module.

        If it trains in evaluation mode, only data of an evaluation without gradients is none.
        """
        trains = self._trains_in_evaluation_mode and torch.is_grad_enabled()
        return trains or self.training

    def _wrapper(self, name: str, original: Any) -> Any:
        """Return the wrapper of one method."""
        match name:
            case "forward":
                return self._wrap(name, original, self._begin_forward, self._end_forward)
            case "backward":
                return self._wrap(name, original, self._begin_backward, self._end_backward)
            case "step" | "train_batch":
                return self._wrap(name, original, self._begin_step, self._end_step)
            case "_backward_prologue":
                return self._wrap_prologue(original)
            case "_backward_epilogue":
                return self._wrap_epilogue(original)
            case "save_checkpoint":
                return self._wrap(name, original, self._on_save_start, self._on_save_end)
        phase = EVAL if name == "eval_batch" else CHECKPOINT
        return self._wrap(
            name,
            original,
            lambda args, kwargs: self._phase_timer.enter_pause(phase),
            lambda result, returned: self._phase_timer.leave_pause(),
        )

    def _generate_wrapper(self, original: Any) -> GenerateWrapper:
        generation = self._generation
        call = self._wrap(
            GENERATE_METHOD, original, generation.on_start, generation.on_end, is_paired=True
        )
        return GenerateWrapper(call, original)

    def _instruction(self, name: str, original: Any) -> Any:
        """Return the wrapper of one instruction of a pipeline."""
        phase, is_forward = PHASE_OF_INSTRUCTION[name], name == "ForwardPass"

        def on_start(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            training = torch.is_grad_enabled()  # `train_batch` requires it
            self._phase_timer.enter(phase if training else EVAL)
            if is_forward and training:
                shape = loaded_shape(args[0], kwargs)
                if shape is not None:
                    self._shapes.append(shape)
                    self._on_batch_start(shape, len(self._shapes))
            elif name == "OptimizerStep" and self._phase_timer.on_change is not None:
                self._on_update_start()

        def on_end(result: Any, returned: bool) -> None:
            self._phase_timer.leave()

        return self._wrap(name, original, on_start, on_end)

    def _wrap(
        self,
        name: str,
        original: Any,
        on_start: Callable[..., object],
        on_end: Callable[[Any, bool], None],
        *,
        is_paired: bool = False,
    ) -> Any:
        """Wrap a method.

        Args:
            name: The name of the method. A failing hook is counted under the same name.
            original: The method itself.
            on_start: Called with the arguments, `(args, kwargs)`.
            on_end: Called with the result and whether the method returned.
            is_paired: Whether `on_end` is called only, and always, after an `on_start` that has
                returned true. A hook that was dropped then leaves no half of a pair.
        """
        call = HookedCall(
            self._state,
            original,
            self._fail_open.wrap(name, on_start),
            self._fail_open.wrap(name, on_end, is_kept=is_paired),
            self._on_exception,
            is_paired,
        )

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or flags._is_compiling_flag:
                return original(*args, **kwargs)
            return call(args, kwargs)

        return hooked

    def _wrap_prologue(self, original: Any) -> Any:
        on_gradient = self._fail_open.wrap("_backward_prologue", self._on_first_gradient)

        # DeepSpeed 0.17 passes arguments, and calls it inside `engine.backward` only.
        def hooked(*args: Any) -> Any:
            is_compiled = is_traced() or flags._is_compiling_flag
            if not (is_compiled or self._inside_backward) and self._state.is_open:
                on_gradient()
            return original(*args)

        return hooked

    def _wrap_epilogue(self, original: Any) -> Any:
        on_end = self._fail_open.wrap("_backward_epilogue", self._on_plain_backward_end)

        def hooked() -> Any:
            if is_traced() or flags._is_compiling_flag:
                return original()
            is_detailed = self._phase_timer.on_change is not None  # else the call would do nothing
            if is_detailed and self._state.is_open:
                self._on_gradients()
            try:
                return original()
            finally:
                if self._plain_backward and self._state.is_open:
                    on_end()

        return hooked

    def _on_save_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._phase_timer.enter_pause(CHECKPOINT)
        self._checkpoints.begin()

    def _on_save_end(self, result: Any, returned: bool) -> None:
        self._checkpoints.end(saved=returned and result is not False)
        self._phase_timer.leave_pause()

    def _on_forward_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._plain_backward:
            self._close_plain_backward()
        engine = self._engine()
        if engine is None or not torch.is_grad_enabled():
            self._phase_timer.enter(EVAL)
            return
        shape = batch_shape(args, kwargs)
        in_evaluation_mode = isinstance(self._shapes, _EvaluationShapes)
        if engine.module.training:
            if in_evaluation_mode:  # those forward passes were evaluations
                self._shapes, self._trains_in_evaluation_mode = [], False
        elif self._shapes and not in_evaluation_mode:  # a micro-batch in training mode
            self._phase_timer.enter(EVAL)
            return
        elif not self._trains_without_training_mode():
            self._shapes = _EvaluationShapes([shape])
            self._phase_timer.enter(EVAL)
            return
        elif not in_evaluation_mode:
            self._shapes = _EvaluationShapes()
        self._shapes.append(shape)
        self._phase_timer.enter(FORWARD)
        self._on_batch_start(shape, self._counts.micro_batches + 1)

    def _trains_without_training_mode(self) -> bool:
        """Return whether forward passes in evaluation mode are of training.

        A step without a backward pass ends it. The hooks in C end steps, so this looks back.
        """
        counts, last = self._counts, self._last_in_evaluation_mode
        self._last_in_evaluation_mode = counts, counts.micro_batches
        if last is not None and last[0] is not counts and last[0].micro_batches == last[1]:
            self._trains_in_evaluation_mode = False
        return self._trains_in_evaluation_mode

    def _on_forward_end(self, output: Any, returned: bool) -> None:
        is_counted = self._phase_timer.current == FORWARD
        is_counted |= isinstance(self._shapes, _EvaluationShapes) and torch.is_grad_enabled()
        if not returned and is_counted and self._shapes:
            self._shapes.pop()  # its samples have no gradient
        self._phase_timer.leave()
        # A weak reference, because the output may hold the whole autograd graph. The output is read
        # only if the script calls `loss.backward()` itself.
        is_tensor = isinstance(output, torch.Tensor)
        self._output = weakref.ref(output) if is_tensor else _weak_output(output)

    def _on_backward_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._inside_backward = True
        self._phase_timer.enter(BACKWARD)
        loss = args[0] if args else kwargs.get("loss")
        known = host_value(loss)
        self._loss = self._read_loss(loss) if known is None else known
        is_undivided = args[2] if len(args) > 2 else kwargs.get("scale_wrt_gas", True)
        if self._losses_are_divided or not is_undivided:
            self._counts.losses_are_divided = True  # the caller has divided them

    def _on_backward_end(self, result: Any, returned: bool) -> None:
        self._inside_backward = False
        self._phase_timer.leave()
        if returned:  # one backward pass may follow several forward passes
            self._count_micro_batch()
        self._shapes, self._loss = [], None

    def _count_micro_batch(self) -> None:
        shapes = self._shapes
        if isinstance(shapes, _EvaluationShapes) and shapes:
            self._trains_in_evaluation_mode = True
            most, self._num_passes = self._num_passes, len(shapes)
            shapes = shapes[-most:]
        self._counts.add(shapes, self._loss)

    def _on_first_gradient(self) -> None:
        """Begin a backward pass that the script started. Runs on any of autograd's threads."""
        if not self._plain_backward:
            self._plain_backward = True
            self._phase_timer.enter(BACKWARD)
            self._loss = self._read_loss(self._output())

    def _on_plain_backward_end(self) -> None:
        self._close_plain_backward()
        self._count_micro_batch()
        self._shapes, self._loss = [], None

    def _close_plain_backward(self) -> None:
        """End a backward pass that the script started, which may have raised."""
        self._plain_backward = False
        self._phase_timer.leave()

    def _count_pipeline(self, engine: Any, loss: Any) -> None:
        """Count the micro-batches of one `train_batch`. Its loss is the mean over all pipelines.

        Only the first stage sees the input. Other stages use the configured number of samples.
        """
        counts = self._counts
        counts.add(self._shapes, self._read_loss(loss))
        counts.micro_batches = engine.micro_batches
        if counts.samples is None:
            counts.samples = engine.micro_batches * engine.train_micro_batch_size_per_gpu()

    def _on_step_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._phase_timer.training_thread = get_ident()
        if self._plain_backward:
            self._close_plain_backward()
        engine = self._engine()
        if engine is not None:
            self._steps_before, self._skipped_before = engine.global_steps, engine.skipped_steps
            is_detailed = self._phase_timer.on_change is not None
            if is_detailed and not self._is_pipeline and _updates_now(engine):
                self._on_update_start()
        self._phase_timer.enter(OTHER if self._is_pipeline else OPTIMIZER)

    def _on_step_end(self, result: Any, returned: bool) -> None:
        self._phase_timer.leave()
        engine = self._engine()
        if engine is None or engine.global_steps == self._steps_before:
            return
        if self._is_pipeline:
            self._count_pipeline(engine, result)
        counts, self._counts = self._counts, _new_counts()
        counts.skipped = engine.skipped_steps != self._skipped_before
        if self._generation.counts is not None:
            counts.generation = self._generation.take_counts()
        self._shapes = []  # shapes of forward passes without a backward pass
        self._collect(engine, counts)


def _updates_now(engine: Any) -> bool:
    """Return whether this `step()` updates the weights.

    If the script accumulates by itself, each call is a step. Older releases of DeepSpeed always
    count micro-batches themselves.
    """
    managed = getattr(engine, "managed_gradient_accumulation", None)
    by_script = managed is not None and not managed()
    return by_script or bool(engine.is_gradient_accumulation_boundary())


def is_divided_by_lightning(module: Any) -> bool:
    """Whether Lightning's loop divides the losses of a module by the number of micro-batches.

    The loop does so under every strategy, and DeepSpeed divides them once more.
    """
    return is_lightning_module(module) and bool(getattr(module, "automatic_optimization", False))


def is_lightning_module(module: Any) -> bool:
    """Return whether this is a LightningModule, of either name of the library."""
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def extract_loss(output: Any) -> ScalarOrPending:
    """Return the loss in an output, or None if it is not a tensor with one element."""
    known = host_value(output)
    if known is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        return scalar(output)
    return known


def _no_output() -> None:
    """Return None. Replaces the weak reference if the output is not a tensor."""


def _weak_output(output: Any) -> Callable[[], Any]:
    """Return a weak reference to the loss in the result of forward."""
    if isinstance(output, dict):  # a ModelOutput is also a dict
        output = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return weakref.ref(output) if isinstance(output, torch.Tensor) else _no_output
