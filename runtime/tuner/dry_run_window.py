"""Runs a window's passes and drops them again: what its gradients would be, as one number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..common.host_group import HostGroup
from ..trainer.engine_holder import EngineHolder
from ..trainer.open_window import open_window
from ..trainer.window.micro_batches import Loss, Window, train_micro_batches
from ..trainer.window.plan import sizes
from ..trainer.window_runner import WindowRunner

_CHUNK_ELEMENTS = 2**18  # what the sum below takes beside the gradients: 16 bytes of each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DryRunWindow:
    """Runs passes without the update, on all ranks alike, between two windows.

    Args:
        loss: The caller's.
        changes: Holds the engine.
        agreement: Of the run.
        windows: Of the run; tell how a batch is cut.
    """

    def __init__(
        self, loss: Loss, changes: EngineHolder, agreement: HostGroup, windows: WindowRunner
    ) -> None:
        self._loss, self._changes = loss, changes
        self._agreement, self._windows = agreement, windows

    def checksum(self, batch: Any) -> int | None:
        """Return a checksum of this rank's averaged gradients; None if memory ran out on any rank.

        The training state is then as it was: weights, optimizer, buffers, random generators, the
        account of windows. Scripts undo by `on_window_abort` what their forwards did. What was
        communicated counts in the step under way, and the time as that of a checkpoint.

        Raises:
            BatchError: A rank's share cannot be trained on; raised on all ranks.
        """
        engine, windows = self._changes.engine, self._windows
        opened = open_window(
            self._agreement,
            batch,
            micro_batch_samples=windows.micro_batch_samples,
            exponent=windows.exponent,
        )
        window = opened.window
        cut = sizes(window.num_samples, windows.replay.plans.micro_batches(opened.share))
        self._changes.begin_window(2.0**-windows.exponent)
        with engine.watch.suspended(), _buffers_kept(engine.module):
            return windows.replay.rehearse(partial(self._passes, engine, window, cut))

    def _passes(self, engine: Any, window: Window, cut: Sequence[int]) -> int:
        train_micro_batches(engine, self._loss, window, cut)
        _average(engine)
        return checksum_of(_gradients(engine))


def _average(engine: Any) -> None:
    """Do what DeepSpeed's `step` does to gradients before it updates weights by them."""
    engine._running_engine_step = True  # this ends the window; leaving it resets that
    if engine.zero_optimization_partition_gradients():
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def _gradients(engine: Any) -> Iterator[torch.Tensor]:
    """Yield what the update would be made by, on this rank, in an order that stays."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer
        yield from optimizer.fp32_groups_gradients_flat
        return
    groups: Mapping[int, Any] = getattr(optimizer, "averaged_gradients", {})
    for group in sorted(groups):
        yield from groups[group] or ()
    for owner in _owners(engine):
        if owner.grad is not None:
            yield owner.grad


def _owners(engine: Any) -> Iterable[torch.Tensor]:
    """Return what bears gradients beside: masters where they are offloaded; without ZeRO all."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        masters: Iterable[torch.Tensor] | None = getattr(engine.optimizer, name, None)
        if masters is not None:
            return masters
    parameters: Iterable[torch.Tensor] = engine.module.parameters()
    return parameters


def checksum_of(tensors: Iterator[torch.Tensor]) -> int:
    """Return a number that tells whether every bit is the same, worked out where they lie.

    Sums of integers do not depend on the order in which a device adds. Each element counts by its
    place, so that two that change places are seen.
    """
    total, place = 0, 1
    for tensor in tensors:
        whole = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
        for part in whole.split(_CHUNK_ELEMENTS):
            odd = torch.arange(place, place + 2 * len(part), 2, device=part.device)
            total = (total + int((part * odd).sum())) % 2**64
            place += 2 * len(part)
    return total


@contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Put a model's buffers back as they were, such as running means."""
    kept = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in kept:
                buffer.copy_(value)
                owner._buffers[name] = buffer
