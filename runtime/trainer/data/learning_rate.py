"""A learning rate that goes with the size of the batch, for the time of each update only.

Linear for SGD: Goyal et al. 2017, "Accurate, Large Minibatch SGD". By the square root for Adam and
its kin: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; what
that does to betas and epsilon is left out. Schedules and saves know the rate as it is without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.patching import AttributePatch

Undo = Callable[[], None]

_LINEAR = ("sgd",)
_SQUARE_ROOT = ("adam", "lamb", "rmsprop", "adagrad")


def exponent_of(optimizer: Any) -> float | None:
    """Return the power of the batch that an optimizer's rate goes with; None: nobody knows one.

    Args:
        optimizer: The one that makes the update, below what DeepSpeed wraps it in.
    """
    name = type(optimizer).__name__.lower()
    if any(one in name for one in _LINEAR):
        return 1.0
    return 0.5 if any(one in name for one in _SQUARE_ROOT) else None


def follow_batch(engine: Any, ratio: Callable[[], float]) -> Undo:
    """Scale each update of an engine, until the returned function is called.

    Args:
        engine: DeepSpeed's.
        ratio: Returns the size of the batch over what it began with.
    """
    optimizer = engine.basic_optimizer
    exponent, is_on = exponent_of(optimizer) or 0.0, True

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(*args: Any, **kwargs: Any) -> Any:
            factor = ratio() ** exponent if is_on else 1.0
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

    wrap = AttributePatch(optimizer, "step", make)

    def undo() -> None:
        nonlocal is_on
        is_on = False  # where somebody wrapped over it since
        wrap.restore()

    return undo
