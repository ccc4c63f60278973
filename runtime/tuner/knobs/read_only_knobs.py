"""Reads the knobs of an engine whose training loop is the script's own, for advice."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import ZerowatchError
from ...common.ds_config import ds_config_of
from ...common.undo import Undo
from ..policy.policy_types import Configuration, Value
from .data_knobs import EngineMicroBatchKnob
from .engine_knobs import EngineCheckpointingKnob, GcKnob, deepspeed_knobs
from .knob import KnobSet
from .layout_knobs import ZeroLayouts, layout_knobs

READ_ONLY = "the training loop is the script's own; only a TrainingRun sets knobs"


class ReadOnlyKnobs:
    """Reads the knobs of a live engine and their possible values.

    Args:
        engine: DeepSpeed's engine; referenced weakly.
        world_size: Ranks that share the training state.
    """

    def __init__(self, engine: Any, world_size: int) -> None:
        source = _WeakEngine(engine)
        layouts = ZeroLayouts(source, world_size, is_training_run=False)
        self._knobs = KnobSet(
            [
                EngineMicroBatchKnob(source),
                *deepspeed_knobs(source),
                EngineCheckpointingKnob(source),
                GcKnob(),
                *layout_knobs(layouts),
            ]
        )

    def values(self) -> Configuration:
        """Return the value of every knob that an engine by itself has."""
        return self._knobs.values()

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return the possible values of each knob; fixed knobs are absent."""
        return self._knobs.options()

    def unsupported_reason(self, _: Configuration) -> str:
        """Return that nothing can be set."""
        return READ_ONLY

    def apply(self, _: Configuration) -> Undo:
        """Refuse.

        Raises:
            ZerowatchError: Always.
        """
        raise ZerowatchError(READ_ONLY)

    def verify(self, target: Configuration) -> bool:
        """Whether this rank uses that configuration."""
        return self._knobs.all_applied(target)


class _WeakEngine:
    """Refers to an engine without keeping it alive."""

    def __init__(self, engine: Any) -> None:
        self._reference = weakref.ref(engine)

    @property
    def engine(self) -> Any:
        engine = self._reference()
        if engine is None:
            raise ZerowatchError("the engine is gone")
        return engine

    @property
    def config(self) -> Mapping[str, Any]:
        """The ds config as it was given."""
        return ds_config_of(self.engine)
