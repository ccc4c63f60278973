"""Learning rate that is scaled with the size of the batch, during each update only.

For SGD the rule is linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". For Adam and its
variants it is the square root: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
Gradient Algorithms"; its changes of betas and epsilon are left out. Schedulers and checkpoints see
the unscaled rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...common.patching import AttributePatch
from ...common.undo import Undo

_LINEAR = ("sgd",)
_SQUARE_ROOT = ("adam", "lamb", "rmsprop", "adagrad")


class BatchSource(Protocol):
    """Source of batches whose size may change."""

    @property
    def batch_ratio(self) -> float:
        """Present batch size over the initial one."""


class BatchLearningRate:
    """Engine attachment that scales the learning rate of each update with the batch size."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def attach(self, engine: Any) -> Undo:
        """Scale each update of an engine, until the returned function is called."""
        optimizer = engine.basic_optimizer
        exponent, is_on = scaling_exponent(optimizer) or 0.0, True

        def make(step: Callable[..., Any]) -> Callable[..., Any]:
            def scaled(*args: Any, **kwargs: Any) -> Any:
                factor = self._source.batch_ratio**exponent if is_on else 1.0
                if factor == 1.0:
                    return step(*args, **kwargs)
                groups = list(optimizer.param_groups)
                rates = [group["lr"] for group in groups]
                try:
                    for group in groups:
                        group["lr"] = group["lr"] * factor
                    return step(*args, **kwargs)
                finally:
                    for group, rate in zip(groups, rates, strict=True):
                        group["lr"] = rate

            return scaled

        patch = AttributePatch(optimizer, "step", make)

        def undo() -> None:
            nonlocal is_on
            is_on = False  # in case another wrapper was put on top since
            patch.restore()

        return undo


def scaling_exponent(optimizer: Any) -> float | None:
    """Return the power of the batch size that the learning rate scales with; None if unknown.

    Args:
        optimizer: The base optimizer, below DeepSpeed's wrapper.
    """
    name = type(optimizer).__name__.lower()
    if any(one in name for one in _LINEAR):
        return 1.0
    return 0.5 if any(one in name for one in _SQUARE_ROOT) else None
