"""Runs forward, backward and update of a window, with weighted losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import torch

from ....errors import BatchError, NonFiniteLossError, shortened
from ...common.host_group import HostGroup
from ...common.patching import AttributePatch
from .batch_tree import on_device, slice_batch

# A mean loss of one element, or (mean loss, weight).
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """This rank's part of one accumulation window; the term is defined in docs/concepts.md.

    Attributes:
        batch: This rank's local batch, as the caller passed it.
        num_samples: Samples in the local batch.
        total_samples: Samples of all ranks.
        world_size: Number of ranks.
        exponent: Each gradient is divided by total_samples * 2^exponent when it is accumulated; see
            `weight_exponent`.
        longest: Largest second dimension of any rank's batch: the padded length of token ids.
    """

    batch: Any
    num_samples: int
    total_samples: int
    world_size: int
    exponent: int
    longest: int

    @property
    def divisor(self) -> float:
        """Divisor of the gradient of a micro-batch with weight 1 when it is accumulated."""
        return self.total_samples * 2.0**self.exponent


class LossSums(NamedTuple):
    """Sums over the micro-batches of one rank, or of all ranks.

    Attributes:
        weight: Sum of weights.
        weighted_loss: Sum of weight times mean loss.
    """

    weight: float
    weighted_loss: float

    @property
    def mean_loss(self) -> float:
        """Weighted mean of the losses."""
        return self.weighted_loss / self.weight

    def over_ranks(self, host_group: HostGroup) -> LossSums:
        """Return the sums of all ranks; every rank must call this.

        Raises:
            BatchError: The weights of the batch add up to 0 or less; raised on all ranks.
        """
        weight, weighted_loss = host_group.all_gather(self).sum(axis=0).tolist()
        if isfinite(weight) and weight <= 0:  # check_finite rejects nan and inf
            raise BatchError(
                f"the weights of this batch add up to {weight}, so it has nothing to train on; "
                "drop batches without targets"
            )
        return LossSums(weight=weight, weighted_loss=weighted_loss)

    def check_finite(
        self,
        step: int,
        *,
        overflow_is_skipped: bool = False,
        ends_run: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reject an update that would corrupt the weights.

        Args:
            step: The number of the update.
            overflow_is_skipped: Whether the engine itself skips the update if the loss is not
                finite, as it does with fp16's dynamic loss scale.
            ends_run: Returns whether the error ends the run, because its gradients cannot be
                discarded. Called only before the error is raised.

        Raises:
            NonFiniteLossError: The loss or a weight is nan or inf.
        """
        is_usable = overflow_is_skipped or isfinite(self.weighted_loss)
        if not is_usable or not isfinite(self.weight):
            raise NonFiniteLossError(
                f"the loss of step {step} is {self.mean_loss}; no update was made and the weights "
                "are unchanged. Check this batch (a mean over no targets is nan) and the learning "
                f"rate{'' if ends_run() else ', or call train_batch with the next batch'}"
            )


def split_sizes(num_samples: int, count: int) -> tuple[int, ...]:
    """Return the sizes of `count` micro-batches, as even as possible, the larger sizes first.

    If there are fewer samples than micro-batches, the last sizes are 0.
    """
    size, larger = divmod(num_samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def train_micro_batches(engine: Any, loss: Loss, window: Window, sizes: Sequence[int]) -> LossSums:
    """Run forward and backward of every micro-batch, so that the gradients add up over the window.

    A micro-batch of size 0 runs on one sample with weight 0, because all ranks must call the same
    collectives. The losses are read once, after the last backward.

    Args:
        engine: A DeepSpeed engine with `managed_gradient_accumulation` off.
        loss: The caller's loss function.
        window: The window to train on.
        sizes: Samples of each micro-batch. The sum is the number of samples of the local batch.
    """
    losses = _LossAccumulator()
    start = 0
    for size in sizes:
        micro_batch = _micro_batch(engine, window.batch, start, size)
        mean, weight = loss_and_weight(loss(engine, micro_batch), size)
        weight = weight if size else 0.0
        scale = weight * (window.world_size / window.divisor)
        if isinstance(scale, torch.Tensor):  # keeps the product in the dtype of the loss
            scale = scale.to(mean.dtype)
        engine.backward(mean * scale, scale_wrt_gas=False)
        losses.add(mean.detach(), weight)
        start += size
    return losses.read()


def evaluate_micro_batches(engine: Any, loss: Loss, batch: Any, sizes: Sequence[int]) -> LossSums:
    """Run only the forward of every micro-batch, in evaluation mode; restore each module's mode."""
    losses = _LossAccumulator()
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    start = 0
    try:
        with torch.no_grad():
            for size in sizes:
                returned = loss(engine, _micro_batch(engine, batch, start, size))
                mean, weight = loss_and_weight(returned, size, needs_gradient=False)
                losses.add(mean, weight if size else 0.0)
                start += size
    finally:
        for module, was_training in modes:
            module.training = was_training
    return losses.read()


def loss_and_weight(
    returned: Any, num_samples: int, *, needs_gradient: bool = True
) -> tuple[torch.Tensor, Any]:
    """Return the mean loss and the weight that the caller's loss function returned.

    If it returned no weight, the weight is `num_samples`.

    Raises:
        TypeError: The loss function returned neither a mean loss nor (mean loss, weight), or the
            weight is not a number.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    mean, weight = returned if is_pair else (returned, num_samples)
    is_loss = isinstance(mean, torch.Tensor) and mean.numel() == 1
    if not is_loss or (needs_gradient and not mean.requires_grad):
        raise TypeError(
            "loss(model, micro_batch) must return the mean loss, a tensor of one element with a "
            f"gradient, or (mean loss, weight); got {_describe(returned)}"
        )
    if not _is_number(weight):
        raise TypeError(
            "the weight that loss(model, micro_batch) returns with the mean loss must be a number "
            "or a real tensor of one element, got "
            + (_describe(weight) if isinstance(weight, torch.Tensor) else shortened(weight))
        )
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().to(torch.float64 if mean.device.type == "cpu" else torch.float32)
        weight = weight.reshape(())
    return mean.reshape(()), weight


def divide_and_step(engine: Any, divisor: float) -> None:
    """Call `engine.step()` as if every gradient of the window were `divisor` times smaller.

    The divisor is known only after all weights of the window are known. ZeRO's optimizers divide
    the gradients by their loss scale during the update, on the device or on the host, and clip by
    the divided norm. So this function multiplies the loss scale by the divisor. For all other
    optimizers it divides the gradients directly. This includes the 16-bit optimizers of stage 0,
    whose `step` uses another loss scale.

    An update that the GradScaler of stage 0 skips is counted in `engine.skipped_steps`. After an
    update that ZeRO skips, the scale of its GradScaler becomes smaller.
    """
    with ExitStack() as undo:
        if divisor != 1.0:
            _divide(engine, divisor, undo)
        scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
        if scaler is not None:
            undo.callback(AttributePatch(scaler, "step", partial(_counted, engine)).restore)
        engine.step()
    _back_off_after_overflow(engine.optimizer)


def weight_exponent(weight: float, num_samples: float) -> int:
    """Return the k for which 2^k is closest to the mean weight of a sample.

    During accumulation, gradients are divided by num_samples * 2^k. The correction to the true
    weight is made at the end. With this k the accumulated gradients are about as large as the
    gradients of a mean loss. A power of two changes no bit of their mantissas.
    """
    mean = torch.tensor(weight / num_samples, dtype=torch.float64, device="cpu")
    return round(float(torch.log2(mean)))


class _LossAccumulator:
    """Adds up weights and losses on their device, and reads the sums at the end in one transfer.

    Only `read` waits for the device.
    """

    def __init__(self) -> None:
        self._pairs: list[torch.Tensor] = []

    def add(self, mean: torch.Tensor, weight: Any) -> None:
        if isinstance(weight, torch.Tensor) and weight.device == mean.device:
            as_tensor = weight.double()
        else:  # an argument of the kernel: a copy from the host would wait for the device
            as_tensor = torch.full((), float(weight), dtype=torch.float64, device=mean.device)
        self._pairs.append(torch.stack((as_tensor, as_tensor * mean.detach().double())))

    def read(self) -> LossSums:
        weight, weighted_loss = torch.stack(self._pairs).sum(dim=0).tolist()
        return LossSums(weight=weight, weighted_loss=weighted_loss)


def _micro_batch(engine: Any, batch: Any, start: int, size: int) -> Any:
    first = start if size else 0
    return on_device(slice_batch(batch, first, first + max(size, 1)), engine.device)


def _is_number(weight: Any) -> bool:
    if isinstance(weight, torch.Tensor):
        return weight.numel() == 1 and not weight.is_complex()
    return isinstance(weight, Real)  # numpy's numbers too


def _describe(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        gradient = "a" if returned.requires_grad else "no"
        return f"a tensor of shape {tuple(returned.shape)} with {gradient} gradient"
    return type(returned).__name__


def _counted(engine: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a GradScaler's `step` that counts skipped updates in `engine.skipped_steps`.

    DeepSpeed counts such an update as made.
    """

    def counted(optimizer: Any) -> Any:
        updates: list[bool] = []

        def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # A fused optimizer is always called, and skips the update on the device. Other
            # optimizers are called after the GradScaler has read the flag.
            found_inf = getattr(optimizer, "found_inf", None)
            updates.append(found_inf is None or not found_inf.item())

        hook = optimizer.register_step_pre_hook(on_step)
        try:
            result = step(optimizer)
        finally:
            hook.remove()
        engine.skipped_steps += not any(updates)
        return result

    return counted


def _back_off_after_overflow(optimizer: Any) -> None:
    """Make the scale of a ZeRO optimizer's GradScaler smaller if the last update was skipped.

    This works around a fault of DeepSpeed (0.19.8): after an overflow, `step` returns before it
    updates this GradScaler. With the same scale, the next gradients overflow again. The norm of
    all ranks decides whether an update is skipped, so their scales stay equal.
    """
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None and scaler.is_enabled() and optimizer.overflow:
        state = scaler.state_dict()
        smaller = state["scale"] * state["backoff_factor"]
        scaler.load_state_dict({**state, "scale": smaller, "_growth_tracker": 0})


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
