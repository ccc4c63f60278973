"""The owned training loop: which micro-batches make a step, exactly once, whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import torch

from ..errors import BatchError, NonFiniteLossError
from .initialize import initialize
from .model_scan import warn_of_batch_statistics
from .recovery.abort import abort_window
from .training_config import MICRO_BATCH, training_config
from .window.agreement import Agreement
from .window.gradients import step_divided, weight_exponent
from .window.micro_batches import (
    Loss,
    Sums,
    Window,
    evaluate_micro_batches,
    train_micro_batches,
)
from .window.plan import num_micro_batches, sizes
from .window.samples import longest, num_samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What became of one global batch.

    Attributes:
        step: The number of this step, from 1.
        loss: The weighted mean over all ranks.
        samples: Samples of all ranks.
        weight: Sum of weights over all ranks; the samples where the loss gave none.
        micro_batches: Samples of each micro-batch on this rank.
        replays: How often the window was begun anew after memory ran out.
        skipped: Whether no update was made, because fp16 gradients overflowed.
        seconds: Wall time of the call.
    """

    step: int
    loss: float
    samples: int
    weight: float
    micro_batches: tuple[int, ...]
    replays: int
    skipped: bool
    seconds: float


class TrainingRun:
    """Trains a model by whole batches; owns the engine, its windows and the account of samples.

    Args:
        model: A torch module. All ranks must make the same one.
        config: A ds config, as a dict or the path of a JSON file. Its
            `train_micro_batch_size_per_gpu` is the first plan: how a batch is cut at most.
        loss: Called as `loss(model, micro_batch)` with DeepSpeed's engine and a part of the batch
            on the engine's device. Returns the mean loss of the part, best in float32, or (mean
            loss, weight): with the number of target tokens as the weight, token means are exact
            across micro-batches and ranks. Where the weight may be 0 the mean must still be finite.
        optimizer: A torch optimizer on the model's parameters, or a callable that takes parameters
            and returns one; else the ds config's.
        lr_scheduler: As for deepspeed.initialize; else the ds config's.
        settings: Settings nested as in zerowatch.toml.

    Attributes:
        engine: DeepSpeed's engine.
        config: The ds config in use.
        micro_batch_samples: Samples that a micro-batch holds at most.
        steps, samples: Committed so far; samples over all ranks.

    Raises:
        DsConfigError: The ds config cannot be used.
        SettingsError: A setting is wrong.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        config: object,
        loss: Loss,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = training_config(config)
        self.loss = loss
        self.engine = initialize(
            model=model,
            model_parameters=[one for one in model.parameters() if one.requires_grad],
            config=self.config,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            settings=settings,
        )[0]
        self.agreement = Agreement()
        self.micro_batch_samples: int = self.config[MICRO_BATCH]
        self.steps = self.samples = 0
        self._exponent = 0
        warn_of_batch_statistics(model)

    @property
    def module(self) -> torch.nn.Module:
        """The model, as it was given."""
        module: torch.nn.Module = self.engine.module
        return module

    @property
    def watch(self) -> Any:
        """The watch on the engine."""
        return self.engine.watch

    def train_batch(self, batch: Any) -> WindowResult:
        """Make one update from a global batch, of which this rank gives its share.

        The update is that of the whole batch in one piece, however it is cut and shared out.

        Args:
            batch: Mappings and sequences of tensors or arrays with one row per sample. It must stay
                as it is until this returns.

        Raises:
            BatchError: A rank's share cannot be trained on; raised on all ranks.
            NonFiniteLossError: The loss is nan or inf; raised on all ranks, before any update.
        """
        began = perf_counter()
        window, count = self._open(batch)
        cut = sizes(window.num_samples, count)
        try:
            sums = self._attempt(window, cut)
            self._check(sums)
        except BaseException:
            abort_window(self.engine)
            raise
        skipped_before = self.engine.skipped_steps
        step_divided(self.engine, sums.weight / window.divisor)
        self._commit(window, sums)
        return WindowResult(
            step=self.steps,
            loss=sums.weighted_loss / sums.weight,
            samples=window.total_samples,
            weight=sums.weight,
            micro_batches=tuple(size for size in cut if size),
            replays=0,
            skipped=self.engine.skipped_steps != skipped_before,
            seconds=perf_counter() - began,
        )

    def evaluate(self, batch: Any) -> float:
        """Return the weighted mean loss over all ranks, without gradients, in evaluation mode.

        Raises:
            BatchError: A rank's share cannot be used; raised on all ranks.
        """
        window, count = self._open(batch)
        cut = sizes(window.num_samples, count)
        sums = self._over_ranks(evaluate_micro_batches(self.engine, self.loss, batch, cut))
        return sums.weighted_loss / sums.weight

    def set_micro_batch(self, num_samples: int) -> None:
        """Cut the next batches into micro-batches of at most that many samples.

        Ranks may differ; the one that needs the most micro-batches decides how many there are.

        Raises:
            BatchError: That is no size.
        """
        if num_samples < 1:
            raise BatchError(f"a micro-batch holds 1 sample or more, got {num_samples}")
        self.micro_batch_samples = num_samples

    def close(self) -> None:
        """Take the watch off and give back what the run holds. Safe to call twice."""
        self.watch.close()
        self.agreement.close()

    def _open(self, batch: Any) -> tuple[Window, int]:
        """Agree on what all ranks are about to do with their shares."""
        problem, samples, length = None, 0, 0
        try:
            samples, length = num_samples(batch), longest(batch)
        except BatchError as error:
            problem = error
        count = num_micro_batches(samples, self.micro_batch_samples)
        told = self.agreement.gather([problem is not None, samples, count, length])
        if problem is not None:
            raise problem
        if told[:, 0].any():
            (ranks,) = told[:, 0].nonzero()
            raise BatchError(
                f"the share of rank {', '.join(map(str, ranks))} cannot be trained on; see there"
            )
        window = Window(
            batch=batch,
            num_samples=samples,
            total_samples=int(told[:, 1].sum()),
            world_size=self.agreement.world_size,
            exponent=self._exponent,
            longest=int(told[:, 3].max()),
        )
        return window, int(told[:, 2].max())

    def _attempt(self, window: Window, cut: tuple[int, ...]) -> Sums:
        return self._over_ranks(train_micro_batches(self.engine, self.loss, window, cut))

    def _over_ranks(self, sums: Sums) -> Sums:
        told = self.agreement.gather([sums.weight, sums.weighted_loss]).sum(axis=0)
        return Sums(weight=float(told[0]), weighted_loss=float(told[1]))

    def _check(self, sums: Sums) -> None:
        """Refuse an update that would spoil the weights."""
        scales_losses = getattr(self.engine.optimizer, "dynamic_loss_scale", False)
        if sums.weight <= 0:
            raise BatchError(
                f"the weights of this batch add up to {sums.weight}, so there is nothing to learn "
                "from; drop batches without targets"
            )
        if not isfinite(sums.weighted_loss) and not scales_losses:
            raise NonFiniteLossError(
                f"the loss of step {self.steps + 1} is {sums.weighted_loss / sums.weight}; no "
                "update was made and the weights are as before. Look at this batch (a mean over no "
                "targets is nan) and at the learning rate, or call train_batch with the next one"
            )

    def _commit(self, window: Window, sums: Sums) -> None:
        self.steps += 1
        self.samples += window.total_samples
        self.engine.global_samples = self.samples
        if sums.weight != window.total_samples:
            self._exponent = weight_exponent(sums.weight, window.total_samples)
