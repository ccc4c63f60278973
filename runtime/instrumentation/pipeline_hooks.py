"""Wraps the instructions of a DeepSpeed pipeline engine, to measure the phase of each.

A pipeline engine runs a schedule of instructions in `train_batch` and `eval_batch`. It finds the
function of an instruction in a map of its class. The hooks give the engine a map of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..common.phase_timer import BACKWARD, DATA, FORWARD, OPTIMIZER
from .batch_shape import BatchShape, batch_shape

INSTRUCTION_MAP = "_INSTRUCTION_MAP"

# The key is the name of the class, because not every version of DeepSpeed has all classes. Waiting
# for a neighbor belongs to the pass that needs or produced the message. Other instructions stay in
# the phase of `train_batch`, such as CommitP2P, which sends for both passes at once.
PHASE_OF_INSTRUCTION: Mapping[str, int] = {
    "LoadMicroBatch": DATA,
    "RecvActivation": FORWARD,
    "ForwardPass": FORWARD,
    "SendActivation": FORWARD,
    "RecvGrad": BACKWARD,
    "BackwardPass": BACKWARD,
    "SendGrad": BACKWARD,
    "ReduceTiedGrads": OPTIMIZER,
    "ReduceGrads": OPTIMIZER,
    "OptimizerStep": OPTIMIZER,
}

Function = Callable[..., Any]


class InstructionMap:
    """Gives an engine its own map of instructions until `restore`. Refers to the engine weakly."""

    def __init__(self, engine: Any, make: Callable[[str, Function], Function]) -> None:
        """Replace the engine's map.

        Args:
            engine: A DeepSpeed pipeline engine.
            make: Returns the function to execute, given an instruction's name and original
                function. Both functions take the engine as their first argument.
        """
        self._engine = weakref.ref(engine)
        self._previous = vars(engine).get(INSTRUCTION_MAP)
        self._own = {
            kind: _wrapped(kind.__name__, function, make)
            for kind, function in getattr(engine, INSTRUCTION_MAP).items()
        }
        setattr(engine, INSTRUCTION_MAP, self._own)

    def restore(self) -> None:
        """Restore the previous map, unless another library has replaced the map of these hooks."""
        engine = self._engine()
        if engine is None or vars(engine).get(INSTRUCTION_MAP) is not self._own:
            return
        if self._previous is None:
            delattr(engine, INSTRUCTION_MAP)
        else:
            setattr(engine, INSTRUCTION_MAP, self._previous)


def _wrapped(name: str, function: Function, make: Callable[[str, Function], Function]) -> Function:
    if name not in PHASE_OF_INSTRUCTION:
        return function
    return functools.wraps(function)(make(name, function))


def loaded_shape(engine: Any, instruction: Mapping[str, Any]) -> BatchShape | None:
    """Return the size of a forward pass's micro-batch. None on stages other than the first.

    Args:
        engine: The pipeline engine.
        instruction: The arguments of the engine's ForwardPass. DualPipeV runs each micro-batch
            through every rank twice. The second pass has a `phase`.
    """
    if instruction.get("phase") or not engine.is_first_stage():
        return None
    return batch_shape((engine.pipe_buffers["inputs"][instruction["buffer_id"]],), {})
