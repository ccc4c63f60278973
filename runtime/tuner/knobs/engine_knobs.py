"""The knobs of an engine whose loop is the script's own: to be read, and advised on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import ZerowatchError
from ...engine.live_settings.activation_checkpointing import ActivationCheckpointing
from ..policy.types import Configuration, Undo, Value
from .candidate_sizes import micro_batch_sizes
from .deepspeed_knobs import deepspeed_knobs
from .gc_knob import GcKnob
from .knob import ReadableKnob
from .layout_knob import LAYOUT, ZeroLayoutKnob, ZeroLayouts
from .readable_knobs import all_applied, read_options, read_values

NOT_OURS = "the training loop is the script's own; only a TrainingRun turns knobs"


class EngineKnobs:
    """Reads what a live engine is set to, and says what it could be set to.

    Args:
        engine: DeepSpeed's; held weakly.
        world_size: Ranks that share the training state out.
    """

    def __init__(self, engine: Any, world_size: int) -> None:
        reference = weakref.ref(engine)

        def found() -> Any:
            alive = reference()
            if alive is None:
                raise ZerowatchError("the engine is gone")
            return alive

        layouts = ZeroLayouts(found, lambda: _config_of(found()), dict, world_size)
        self._dials: list[ReadableKnob] = [
            _MicroBatchKnob(found),
            *deepspeed_knobs(found),
            _CheckpointingKnob(found),
            GcKnob(),
            *(ZeroLayoutKnob(name, layouts) for name in LAYOUT),
        ]
        self._told: set[str] = set()

    def values(self) -> Configuration:
        """Return how this rank works now: every knob that an engine by itself has."""
        return read_values(self._dials)

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return what each knob could be set to; one that is fixed is absent."""
        return read_options(self._dials, self._told)

    def unsupported_reason(self, _: Configuration) -> str:
        """Refuse."""
        return NOT_OURS

    def apply(self, _: Configuration) -> Undo:
        """Refuse.

        Raises:
            ZerowatchError: Always.
        """
        raise ZerowatchError(NOT_OURS)

    def verify(self, target: Configuration) -> bool:
        """Whether this rank works with that."""
        return all_applied(self._dials, target)


class _MicroBatchKnob:
    """What the script's loader hands out at once, in a window of DeepSpeed's own."""

    name = "micro_batch_samples"

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine

    def unsupported_reason(self) -> str | None:
        return None

    def get(self) -> int:
        return int(self._engine().train_micro_batch_size_per_gpu())

    def options(self) -> Sequence[Value]:
        """Return the sizes that cut a window evenly, which DeepSpeed asks for."""
        now = self.get()
        window = now * int(self._engine().gradient_accumulation_steps())
        return [size for size in micro_batch_sizes(window, now) if window % size == 0]

    def is_applied(self, value: Value) -> bool:
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        return None


class _CheckpointingKnob:
    """Whether a model that has a switch of its own checkpoints activations."""

    name = "activation_checkpointing"

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine

    def unsupported_reason(self) -> str | None:
        return ActivationCheckpointing().unsupported_reason(self._engine())

    def get(self) -> bool:
        return False  # where it is on it is not available

    def options(self) -> Sequence[Value]:
        return (False, True)

    def is_applied(self, value: Value) -> bool:
        return value is False

    def memory_bytes(self, _: Value) -> int | None:
        return None


def _config_of(engine: Any) -> Mapping[str, Any]:
    """Return the ds config as it was given."""
    given = engine.config
    if isinstance(given, Mapping):
        return given
    read: Mapping[str, Any] = engine._config._param_dict
    return read
