"""Forward and backward of a window's micro-batches, without the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .samples import on_device, slice_batch
from .sums import Sums

# A mean loss of one element, or (mean loss, weight).
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What this rank trains on in one window.

    Attributes:
        batch: This rank's share, as the caller gave it.
        num_samples: Samples in it.
        total_samples: Samples of all ranks.
        world_size: Ranks.
        exponent: The gradients are accumulated over total_samples * 2^exponent.
        longest: Largest second dimension over the ranks; padded length of token ids.
    """

    batch: Any
    num_samples: int
    total_samples: int
    world_size: int
    exponent: int
    longest: int

    @property
    def divisor(self) -> float:
        """What a gradient with weight 1 is divided by."""
        return self.total_samples * 2.0**self.exponent


def train_micro_batches(engine: Any, loss: Loss, window: Window, sizes: Sequence[int]) -> Sums:
    """Run forward and backward of every micro-batch, so that the gradients stand for the sum.

    A micro-batch of size 0 runs on one sample with weight 0: the ranks must call the same
    collectives. Reads the losses once, after the last backward.

    Args:
        engine: A DeepSpeed engine with `managed_gradient_accumulation` off.
        loss: The caller's.
        window: What to train on.
        sizes: Samples of each micro-batch; they add up to the window's.
    """
    taken = _Taken()
    start = 0
    for size in sizes:
        micro_batch = _micro_batch(engine, window.batch, start, size)
        mean, weight = loss_and_weight(loss(engine, micro_batch), size)
        weight = weight if size else 0.0
        share = weight * (window.world_size / window.divisor)
        if isinstance(share, torch.Tensor):  # else the product would take the weight's dtype
            share = share.to(mean.dtype)
        engine.backward(mean * share, scale_wrt_gas=False)
        taken.add(mean.detach(), weight)
        start += size
    return taken.read()


def evaluate_micro_batches(engine: Any, loss: Loss, batch: Any, sizes: Sequence[int]) -> Sums:
    """Run forward only, in evaluation mode; leaves each module in the mode that it was in."""
    taken = _Taken()
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    start = 0
    try:
        with torch.no_grad():
            for size in sizes:
                given = loss(engine, _micro_batch(engine, batch, start, size))
                mean, weight = loss_and_weight(given, size, needs_gradient=False)
                taken.add(mean, weight if size else 0.0)
                start += size
    finally:
        for module, was_training in modes:
            module.training = was_training
    return taken.read()


def loss_and_weight(
    given: Any, num_samples: int, *, needs_gradient: bool = True
) -> tuple[torch.Tensor, Any]:
    """Take apart what the caller's loss returned; without a weight it is the samples.

    Raises:
        TypeError: It is neither a mean loss nor (mean loss, weight).
    """
    mean, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, num_samples)
    is_loss = isinstance(mean, torch.Tensor) and mean.numel() == 1
    if not is_loss or (needs_gradient and not mean.requires_grad):
        raise TypeError(
            "loss(model, micro_batch) must return the mean loss, a tensor of one element with a "
            f"gradient, or (mean loss, weight); got {_told(given)}"
        )
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().to(torch.float64 if mean.device.type == "cpu" else torch.float32)
        weight = weight.reshape(())
    return mean.reshape(()), weight


class _Taken:
    """Weights and losses as tensors on their device, read at the end, in one go."""

    def __init__(self) -> None:
        self._pairs: list[torch.Tensor] = []

    def add(self, mean: torch.Tensor, weight: Any) -> None:
        as_tensor = torch.as_tensor(weight, dtype=torch.float64, device=mean.device)
        self._pairs.append(torch.stack((as_tensor, as_tensor * mean.detach().double())))

    def read(self) -> Sums:
        weight, weighted_loss = torch.stack(self._pairs).sum(dim=0).tolist()
        return Sums(weight=weight, weighted_loss=weighted_loss)


def _micro_batch(engine: Any, batch: Any, start: int, size: int) -> Any:
    first = start if size else 0
    return on_device(slice_batch(batch, first, first + max(size, 1)), engine.device)


def _told(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        gradient = "a" if given.requires_grad else "no"
        return f"a tensor of shape {tuple(given.shape)} with {gradient} gradient"
    return type(given).__name__
