"""Measures what the training loops of other libraries do besides training: evaluate and save.

Such a loop may evaluate the bare model, and write files of its own. Hooks on the engine see
neither of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from ..common.phase_timer import CHECKPOINT, EVAL, PhaseTimer

# Module, class and method of each call, and its phase. A version without the method is skipped.
CALLS = (
    ("transformers.trainer", "Trainer", "evaluate", EVAL),
    ("transformers.trainer", "Trainer", "predict", EVAL),
    ("transformers.trainer", "Trainer", "_save_checkpoint", CHECKPOINT),
    ("transformers.trainer", "Trainer", "save_model", CHECKPOINT),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained", CHECKPOINT),
    ("accelerate.accelerator", "Accelerator", "save_model", CHECKPOINT),
    ("accelerate.accelerator", "Accelerator", "save_state", CHECKPOINT),
    ("accelerate.accelerator", "Accelerator", "load_state", CHECKPOINT),
    ("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop", "run", EVAL),
    ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint", CHECKPOINT),
    ("pytorch_lightning.loops.evaluation_loop", "_EvaluationLoop", "run", EVAL),
    ("pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint", CHECKPOINT),
)


class LossScale(Protocol):
    """The hooks on an engine, as far as a training loop says how it scales its losses."""

    def expect_divided_losses(self) -> None:
        """The sum of the losses of this step is the loss of the step."""


class FrameworkHooks:
    """Wraps the methods in CALLS, of the libraries that are imported, until `restore`.

    Only calls on the training thread count.

    Attributes:
        engine_hooks: The hooks on the engine that trains. A rebuild replaces them.
    """

    def __init__(
        self, phase_timer: PhaseTimer, fail_open: FailOpen, engine_hooks: LossScale
    ) -> None:
        self._phase_timer = phase_timer
        self._fail_open = fail_open
        self.engine_hooks = engine_hooks
        self._open = True
        self._patches = PatchSet()
        for module, kind, name, phase in CALLS:
            self._add(module, kind, name, self._phase_wrapper(phase))
        self._add("transformers.trainer", "Trainer", "training_step", self._trainer_step_wrapper)

    def restore(self) -> None:
        """Restore the methods. Safe to call twice."""
        self._open = False
        self._patches.restore()

    def _add(
        self, module: str, kind: str, name: str, make: Callable[[Callable[..., Any]], Any]
    ) -> None:
        owner = getattr(sys.modules.get(module), kind, None)
        if owner is not None:
            self._patches.add_existing(owner, [name], make)

    def _phase_wrapper(self, phase: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        enter = self._fail_open.wrap("framework", self._phase_timer.enter_pause)
        leave = self._fail_open.wrap("framework", self._phase_timer.leave_pause)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*args: Any, **kwargs: Any) -> Any:
                if not self._open:
                    return original(*args, **kwargs)
                enter(phase)
                try:
                    return original(*args, **kwargs)
                finally:
                    leave()

            return hooked

        return make

    def _trainer_step_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a micro-batch of Hugging Face's Trainer.

        The Trainer divides the losses by the number of micro-batches, or by the tokens of the whole
        step, so that their sum is what it logs.
        """
        expect = self._fail_open.wrap(
            "framework", lambda: self.engine_hooks.expect_divided_losses()
        )

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._open and self._phase_timer.is_on_training_thread():
                expect()
            return original(*args, **kwargs)

        return hooked
