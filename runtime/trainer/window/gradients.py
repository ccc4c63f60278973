"""The last factor of a window's gradients, known only once all of its weights are."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch


def step_divided(engine: Any, divisor: float) -> None:
    """Call `engine.step()` as if every gradient of the window were `divisor` times smaller.

    ZeRO's optimizers divide by their loss scale as they update, on whichever device and tier the
    gradients then lie, and clip by the norm so divided; so a factor laid on that scale holds for
    gradients and norm. The others keep the gradients where they can be divided at once.
    So do those of stage 0 in 16 bits: their `step` does not look at such a scale, but at another.
    """
    with ExitStack() as undo:
        if divisor != 1.0:
            _divide(engine, divisor, undo)
        engine.step()


def _divide(engine: Any, divisor: float, undo: ExitStack) -> None:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
        for flat in optimizer.fp32_groups_gradients_flat:
            flat.div_(divisor)
    elif hasattr(optimizer, "external_loss_scale") and not hasattr(optimizer, "loss_scale_config"):
        scale = float(optimizer.loss_scale) * divisor
        for name, value in (("custom_loss_scaler", True), ("external_loss_scale", scale)):
            undo.callback(setattr, optimizer, name, getattr(optimizer, name))
            setattr(optimizer, name, value)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


def weight_exponent(weight: float, num_samples: float) -> int:
    """Return the k for which 2^k is closest to the weight of a sample.

    Gradients are accumulated over num_samples * 2^k and divided by the true weight at the end: a
    power of two keeps their size near that of a mean, and changes no bit of their mantissas.
    """
    return round(float(torch.log2(torch.tensor(weight / num_samples, dtype=torch.float64))))
