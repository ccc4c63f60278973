"""Measures phases, micro-batches and steps of a torch training loop without a DeepSpeed engine.

A forward pass is a call of the watched model, or of the `training_step` of a LightningModule. A
backward pass is a call of `torch.autograd.backward`, which `loss.backward()` calls, and a step is a
call of the watched optimizer's `step`. A micro-batch ends with its backward pass. Time that belongs
to none of these is in the phase `other`: a call of `model.module(...)`, `torch.autograd.grad`,
gradient clipping.

A model may train in evaluation mode, such as a frozen one with a new head. Its forward pass counts
once a backward pass has changed gradients of the watched optimizer. A model that trains in training
mode is not counted in evaluation mode, where a script may attack or explain it by gradients. A
micro-batch in evaluation mode has no more forward passes than the one before, because the first
passes may be a validation with gradients.

The class of the model is patched, not the model, so that a copy or a pickle of the model has no
hooks. The optimizer has hooks of its own for steps, which its copies and pickles do not have.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ..common.device_scalar import ScalarOrPending, scalar
from ..common.fail_open import FailOpen
from ..common.hot_path import constructor
from ..common.optimizer_steps import StepCallbackHandle, call_after_steps
from ..common.patching import PatchSet
from ..common.phase_timer import BACKWARD, EVAL, FORWARD, OPTIMIZER, OTHER, PhaseTimer
from ..common.torch_engine import TorchEngine, trains
from .batch_shape import BatchShape, batch_shape
from .engine_hooks import is_divided_by_lightning, is_lightning_module
from .generated_tokens import GenerationCounts
from .memory_hooks import MemoryHooks
from .raw_step import StepCounts
from .step_collector import StepCollector

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)

# After so many steps of other optimizers without one of the watched optimizer, it is checked
# whether they train the watched model.
OTHER_STEPS = 10
_new_counts = constructor(StepCounts)
GradScaler = torch.amp.grad_scaler.GradScaler
_Loss = tuple[ScalarOrPending, float | None]  # a loss, and the number it was divided by


class TorchHooks:
    """Hooks on one model and its optimizer, until `restore`.

    Attributes:
        cost_ns: Nanoseconds that the hooks have taken on the training thread.
        generated_ns: Always 0, because calls of `generate` are not measured.
    """

    generated_ns = 0

    def __init__(
        self,
        engine: TorchEngine,
        phase_timer: PhaseTimer,
        fail_open: FailOpen,
        memory: MemoryHooks,
        collector: StepCollector,
        mark_calls: Callable[[int], object],
    ) -> None:
        """Install the hooks.

        Args:
            engine: The model and its optimizer.
            phase_timer: The phases of training.
            fail_open: Wraps the functions that run inside training.
            memory: Reads memory.
            collector: Gets the steps.
            mark_calls: Called with each phase that ends, to attribute collectives that no wrapper
                sees.
        """
        self.cost_ns = 0
        self._engine = weakref.ref(engine)
        self._model = weakref.ref(engine.model)
        self._module = weakref.ref(engine.module)
        self._phase_timer = phase_timer
        self._collect = collector.on_step_end
        self._mark_calls = fail_open.wrap("coverage", mark_calls)
        self._fail_open = fail_open
        self._open = True
        self._counts = StepCounts()
        self._divisors: list[float | None] = []
        self._shapes: list[BatchShape] = []
        self._unscaled: tuple[weakref.ref[torch.Tensor], _Loss] | None = None
        self._provisional: BatchShape | None = None  # of a pass that may be an evaluation
        self._before_backward: tuple[_Loss, list[tuple[int, int]]] | None = None
        self._trains_in_evaluation_mode = False
        self._num_passes = 1  # in evaluation mode, before the last backward pass
        self._may_train_in_evaluation_mode = True  # no training in training mode was seen
        self._passes: list[int] = []  # the phases that these hooks have entered
        # The passes that may contain a backward pass.
        self._around_backward: tuple[int, ...] = (OPTIMIZER,)
        if is_lightning_module(engine.module) and not is_divided_by_lightning(engine.module):
            # With manual optimization, `training_step` trains by itself. Under DDP, Lightning calls
            # the model to run it.
            self._around_backward = (OPTIMIZER, FORWARD)
        self._steps_with_closure = False
        self._is_stepping = False  # False at the end of the step in which these hooks were made
        self._other_steps = 0  # of other optimizers since the last step of the watched one
        self._is_other_logged = False
        self._on_batch_start = fail_open.wrap("batch risk", memory.on_batch_start)
        self._on_gradients = fail_open.wrap("memory categories", memory.on_backward_end)
        self._on_update_start = fail_open.wrap("memory categories", memory.on_update_start)
        self._on_exception = fail_open.wrap("oom report", memory.on_exception)
        self._read_loss = fail_open.wrap("loss", self._loss_of, is_kept=True)
        self._patches = PatchSet()
        self._handles: list[RemovableHandle | StepCallbackHandle] = []
        with ExitStack() as on_failure:
            on_failure.callback(self.restore)
            self._hook(engine)
            on_failure.pop_all()

    def restore(self) -> None:
        """Remove the hooks. Safe to call twice."""
        self._open = False
        self._patches.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_generated(self) -> GenerationCounts | None:
        """Return None: calls of `generate` are not measured."""
        return None

    def discard_window(self) -> None:
        """Discard the micro-batches since the last step."""
        self._begin_step()

    def expect_divided_losses(self) -> None:
        """The sum of the losses of this step is the loss of the step."""
        self._counts.losses_are_divided = True

    @property
    def training(self) -> bool:
        """Whether the model is in training mode.

        The mode of a wrapper does not count: after an evaluation, Lightning restores that of the
        modules within DDP only.
        """
        module = self._module()
        return module is not None and module.training

    @property
    def loads_training_data(self) -> bool:
        """Whether a batch that is loaded now is one to train on: by the mode of the model.

        If it trains in evaluation mode, only data of an evaluation without gradients is none.
        """
        trains = self._trains_in_evaluation_mode and torch.is_grad_enabled()
        return trains or self.training

    def _hook(self, engine: TorchEngine) -> None:
        optimizer, wrap = engine.optimizer, self._fail_open.wrap
        assert optimizer is not None  # the caller of `watch` holds it
        before, after = wrap("step", self._on_step_start), wrap("step", self._on_step_end)
        self._handles += (
            optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs)),
            optimizer.register_step_post_hook(lambda _, args, kwargs: after()),
            call_after_steps(wrap("step", self._on_other_step)),
        )
        self._patches.add(type(engine.model), "__call__", self._call_wrapper)
        if is_lightning_module(engine.model):
            # Lightning calls it instead of the module, unless a strategy has wrapped the module.
            self._patches.add_existing(type(engine.model), ["training_step"], self._call_wrapper)
        self._patches.add(torch.autograd, "backward", self._backward_wrapper)
        for kind in grad_scaler_kinds():
            for name, make in (("scale", self._scale_wrapper), ("step", self._scaler_step_wrapper)):
                if name in vars(kind):
                    self._patches.add(kind, name, make)

    def _is_on_training_thread(self) -> bool:
        return self._phase_timer.is_on_training_thread()

    def _call_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the model's class. The calls of other instances pass through."""
        start = self._fail_open.wrap("forward", self._on_forward_start)
        is_compiling, model_of = torch.compiler.is_compiling, self._model

        def called(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._open or module is not model_of():
                return original(module, *args, **kwargs)
            if self._is_nested():
                return original(module, *args, **kwargs)
            num_shapes, returned = len(self._shapes), False
            try:
                result = self._measured(
                    lambda: start(args, kwargs), original, module, *args, **kwargs
                )
                returned = True
            finally:
                if not returned:  # its samples have no gradient
                    del self._shapes[num_shapes:]
                    self._provisional = None
            return result

        return called

    def _backward_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        start = self._fail_open.wrap("backward", self._on_backward_start)
        end = self._fail_open.wrap("backward", self._on_backward_end)
        is_compiling = torch.compiler.is_compiling

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._open or self._is_nested(self._around_backward):
                return original(*args, **kwargs)
            tensors = args[0] if args else kwargs.get("tensors")
            num_losses, returned = len(self._counts.losses), False
            try:
                result = self._measured(lambda: start(tensors), original, *args, **kwargs)
                returned = True
            finally:
                if not returned:  # no micro-batch has ended
                    del self._counts.losses[num_losses:], self._divisors[num_losses:]
                    self._shapes, self._provisional, self._before_backward = [], None, None
            end()
            return result

        return backward

    def _measured(
        self,
        on_start: Callable[[], object],
        original: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a pass between `on_start`, which enters its phase, and the end of the phase."""
        entered_ns = perf_counter_ns()
        depth = len(self._passes)
        on_start()
        self.cost_ns += perf_counter_ns() - entered_ns
        try:
            return original(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            self._on_exception(error)
            raise
        finally:
            ended_ns = perf_counter_ns()
            self._leave_to(depth)
            self.cost_ns += perf_counter_ns() - ended_ns

    def _is_nested(self, around: tuple[int, ...] = (OPTIMIZER,)) -> bool:
        """Whether a pass runs already, or another thread calls: a recomputation, a second model.

        Args:
            around: The passes that may contain the new one.
        """
        if not self._is_on_training_thread():
            return True
        return bool(self._passes) and self._passes[-1] not in around

    def _enter(self, phase: int) -> None:
        self._mark_calls(self._phase_timer.current)
        self._phase_timer.enter(phase)
        self._passes.append(phase)

    def _leave_to(self, depth: int) -> None:
        """Leave the phases that were entered above `depth`. None, if entering has failed."""
        while len(self._passes) > depth:
            self._mark_calls(self._passes.pop())
            self._phase_timer.leave()

    def _on_forward_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._end_failed_step()
        if not torch.is_grad_enabled():
            self._enter(EVAL)
            return
        if self.training:
            self._provisional = None
            if self._trains_in_evaluation_mode:  # the forward passes before were evaluations
                self._shapes, self._trains_in_evaluation_mode = [], False
        elif not self._trains_in_evaluation_mode:
            if self._may_train_in_evaluation_mode:
                self._provisional = batch_shape(args, kwargs)
            self._enter(EVAL)
            return
        shape = batch_shape(args, kwargs)
        self._shapes.append(shape)
        self._enter(FORWARD)
        self._on_batch_start(shape, self._counts.micro_batches + 1)

    def _on_backward_start(self, tensors: Any) -> None:
        self._end_failed_step()
        self._enter(BACKWARD)
        if not self._shapes and self._provisional is None:
            return
        loss, divisor = self._read_loss(tensors) or (None, None)
        if self._shapes:
            self._counts.losses.append(loss)
            self._divisors.append(divisor)
        else:
            self._before_backward = (loss, divisor), self._gradients()

    def _on_backward_end(self) -> None:
        """Count a micro-batch, unless the model was not called, as by the loss of another model."""
        before, self._before_backward = self._before_backward, None
        provisional, self._provisional = self._provisional, None
        if before is not None and provisional is not None:
            (loss, divisor), gradients = before
            if gradients != self._gradients():
                self._trains_in_evaluation_mode = True
                self._shapes = [provisional]
                self._counts.losses.append(loss)
                self._divisors.append(divisor)
        if self._shapes:
            self._may_train_in_evaluation_mode = self._trains_in_evaluation_mode
            self._on_gradients()
            *losses, last = self._counts.losses
            self._counts.losses = losses
            shapes, self._shapes = self._shapes, []
            if self._trains_in_evaluation_mode:
                most, self._num_passes = self._num_passes, len(shapes)
                shapes = shapes[-most:]
            self._counts.add(shapes, last)

    def _gradients(self) -> list[tuple[int, int]]:
        """Return what changes when a backward pass adds to gradients of the optimizer."""
        engine = self._engine()
        optimizer = None if engine is None else engine.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        gradients = [one.grad for group in groups for one in group["params"]]
        return [(id(grad), grad._version) for grad in gradients if grad is not None]

    def _on_step_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._is_on_training_thread():
            self._is_stepping = True
            self._leave_to(0)
            # The first argument is the optimizer.
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._steps_with_closure = closure is not None
            self._on_update_start()
            self._enter(OPTIMIZER)

    def _end_failed_step(self) -> None:
        """End a step that raised. A pass within a step belongs to the step's closure."""
        if self._passes == [OPTIMIZER] and not self._steps_with_closure:
            self._leave_to(0)

    def _on_step_end(self, *, skipped: bool = False) -> None:
        if not self._is_on_training_thread():
            if not self._passes:  # training has moved to this thread, whose next step is measured
                self._phase_timer.training_thread = get_ident()
                self._begin_step()
            return
        if not (self._is_stepping or skipped):
            return
        self._is_stepping = False
        self._other_steps = 0
        self._leave_to(0)
        self._mark_calls(OTHER)
        engine = self._engine()
        if engine is None:
            return
        engine.global_steps += 1
        counts, divisors = self._counts, self._divisors
        counts.skipped = skipped
        if not counts.micro_batches:
            self._trains_in_evaluation_mode = False
            self._may_train_in_evaluation_mode = True
        if counts.micro_batches > 1 and not counts.losses_are_divided:
            counts.losses_are_divided = are_all(divisors, counts.micro_batches)
            if not counts.losses_are_divided and any(one is not None for one in divisors):
                counts.losses = []  # divided by another number: what the losses were is not known
        self._begin_step()
        self._collect(engine, counts)

    def _on_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log once if another optimizer trains the model and the watched one does not."""
        engine = self._engine()
        if self._is_other_logged or engine is None or optimizer is engine.optimizer:
            return
        self._other_steps += 1
        if self._other_steps % OTHER_STEPS == 0 and trains(optimizer, engine.model):
            self._is_other_logged = True
            logger.warning(
                "another optimizer trains the watched model, and the watched optimizer does not: "
                "these steps are not counted. If the optimizer was made again, call "
                "zerowatch.watch(model, optimizer) again."
            )

    def _begin_step(self) -> None:
        self._counts, self._divisors = _new_counts(), []
        self._shapes, self._unscaled, self._provisional = [], None, None

    def _loss_of(self, tensors: Any) -> _Loss | None:
        """Return the loss of a backward pass and the number by which it was divided last.

        A loss that a GradScaler has multiplied is the one before. None if it is not one number.
        """
        loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        if self._unscaled is not None and self._unscaled[0]() is loss:
            return self._unscaled[1]
        return scalar(loss.detach()), divisor_of(loss)

    def _scale_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._fail_open.wrap("loss", self._note_unscaled)

        def scale(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(scaler, outputs, *args, **kwargs)
            if self._open and isinstance(outputs, torch.Tensor) and self._is_on_training_thread():
                note(outputs, scaled)
            return scaled

        return scale

    def _note_unscaled(self, outputs: torch.Tensor, scaled: Any) -> None:
        if outputs.numel() == 1 and isinstance(scaled, torch.Tensor) and scaled is not outputs:
            self._unscaled = weakref.ref(scaled), (scalar(outputs.detach()), divisor_of(outputs))

    def _scaler_step_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        end = self._fail_open.wrap("step", lambda: self._on_step_end(skipped=True))

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            engine = self._engine()
            before = None if engine is None else engine.global_steps
            result = original(scaler, optimizer, *args, **kwargs)
            if (
                self._open
                and engine is not None
                and optimizer is engine.optimizer
                and engine.global_steps == before
            ):
                end()  # the optimizer was not called
            return result

        return step


def grad_scaler_kinds() -> list[type]:
    """Return the class of GradScalers and its subclasses, such as FSDP's ShardedGradScaler."""
    kinds: list[Any] = [GradScaler]
    for kind in kinds:  # it grows
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    return kinds


def divisor_of(loss: torch.Tensor) -> float | None:
    """Return the number by which the last operation divided a loss; None if it did not divide.

    `loss / 4` and `loss * 0.25` are divided by a number. `total / tokens`, with a tensor on a
    device, is not.
    """
    node: Any = loss.grad_fn
    name = "" if node is None else node.name()
    if not name.startswith(("DivBackward", "MulBackward")):
        return None
    other = getattr(node, "_saved_other", None)
    if isinstance(other, torch.Tensor):
        if other.ndim or other.device.type != "cpu" or other.requires_grad:
            return None
        other = float(other)
    if not isinstance(other, int | float) or not other:
        return None
    return float(other) if name.startswith("Div") else 1 / other


def are_all(divisors: list[float | None], number: int) -> bool:
    """Return whether there are divisors, and each is this number."""
    return bool(divisors) and all(
        each is not None and math.isclose(each, number, rel_tol=1e-6) for each in divisors
    )
