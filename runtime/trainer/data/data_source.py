"""The data of a TrainingRun: its loader, how large batches are, and who gets how much of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from torch.utils.data import IterableDataset

from ....metrics.step_record import StepRecord
from ...common.host_group import HostGroup
from ..engine_holder import EngineHolder
from ..oom_recovery.escalation import EngineChange
from .balancer import Balancer, EndedWindow
from .busy_time import BusyTime
from .learning_rate import BatchLearningRate, scaling_exponent
from .resumable_loader import ResumableLoader, resumable_loader
from .schedule import ShareSchedule
from .shares import Shares
from .stream_loader import StreamLoader

logger = logging.getLogger(__name__)


class TrainingData:
    """Makes the run's loader, balances its shares, and keeps the place of both.

    Args:
        host_group: Of the run.
        changes: Holds the engine; its watch tells for how long collectives blocked training.
        balance: Whether shares follow the speeds to begin with; else they are even.

    Attributes:
        balances: Whether shares are to follow the speeds.
        batch_samples: What a batch is to hold over all ranks; 0 before there is a loader.

    Both may be set between two windows, on all ranks alike. From which batch on they hold is agreed
    on as the next window ends: here one rank may still fail at something else, and have it all
    taken back, while the others wait for it.
    """

    def __init__(self, host_group: HostGroup, changes: EngineHolder, *, balance: bool) -> None:
        self._host_group, self._changes = host_group, changes
        self.batch_samples = 0
        self.balances = balance and host_group.world_size > 1
        self._is_balancing = self.balances
        self._balancer: Balancer | None = None
        self._loader: ResumableLoader | StreamLoader | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._last_end = perf_counter()
        watch = changes.engine.watch
        if host_group.world_size > 1:
            watch.subscribe(self._take_record)
        if self.balances and not watch.is_open:
            logger.warning(
                "balance=True without watching: from ZeRO stage 2 on nobody tells how long "
                "ranks wait for each other, and shares stay even"
            )

    def always_even(self) -> str | None:
        """Say why shares cannot follow the speeds; None where they can."""
        if self._host_group.world_size == 1:
            return "one rank by itself shares nothing out"
        return None if self._balancer is not None else self._no_order()

    def unsupported_resize_reason(self) -> str | None:
        """Say why batches cannot be of another size; None where they can."""
        optimizer = self._changes.engine.basic_optimizer
        if scaling_exponent(optimizer) is None:
            return f"nobody knows how {type(optimizer).__name__}'s learning rate goes with it"
        return self._no_order()

    def batch_sizes(self) -> Sequence[int]:
        """Return what batches may hold; nothing where they are not ours."""
        return self._loader.batch_sizes if isinstance(self._loader, ResumableLoader) else ()

    def loader(
        self, dataset: Any, *, batch_samples: int, **options: Any
    ) -> ResumableLoader | StreamLoader:
        """Return the loader of the run's data, at its saved place if one was loaded before.

        A later one takes its place. Options are those of `resumable_loader`.
        """
        rank, world_size = self._host_group.rank, self._host_group.world_size
        has_shares = world_size > 1 and not isinstance(dataset, IterableDataset)
        # A stream has none either way; where they were asked for, the loader says so.
        balancer = self._new_balancer(batch_samples) if has_shares or self.balances else None
        self._loader = resumable_loader(
            dataset,
            batch_samples=batch_samples,
            rank=rank,
            world_size=world_size,
            shares_at=balancer.schedule.shares_at if balancer else None,
            **options,
        )
        self._balancer, self._is_balancing = balancer, self.balances
        self.batch_samples = batch_samples
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
        return self._loader

    def window_ended(
        self, *, step: int, num_samples: int, seconds: float | None, collectives_inside: bool
    ) -> None:
        """Take a committed window: this rank's samples, and its forward and backward passes.

        Args:
            step: The engine's number of it.
            num_samples: This rank's.
            seconds: Wall time of the passes, without votes; None where it says little.
            collectives_inside: Whether there is communication in them, as from stage 2 on.
        """
        now, before = perf_counter(), self._last_end
        self._last_end = now
        if isinstance(self._loader, ResumableLoader):
            self._resize(self._loader)
        if self._balancer is None or self._loader is None:
            return
        self._balancer.busy_time.collectives_inside = collectives_inside
        window = EndedWindow(
            index=self._loader.position - 1,
            step=step,
            num_samples=num_samples,
            passes_seconds=seconds,
            seconds=now - before,
        )
        shares = self._new_shares(self._balancer, window)
        if shares is not None and self._host_group.rank == 0:
            logger.info("from one of the next batches on the ranks get %s samples", list(shares))

    def state_dict(self) -> dict[str, Any]:
        """Return the data's place and the shares; empty where the run has no loader."""
        if self._loader is None:
            return {}
        shares = self._balancer.state_dict() if self._balancer else None
        return {"data": self._loader.state_dict(), "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the loader to a saved place, now or as it is made.

        Raises:
            CheckpointError: It is a place in other data.
        """
        if self._loader is None:
            self._loaded = state
            return
        self._loaded = None
        if state:
            self._loader.load_state_dict(state["data"])
            if isinstance(self._loader, ResumableLoader):
                self._scale_rate(self._loader)
                self.batch_samples = self._loader.batch_samples
            # Without, all ranks go on evenly from the batch that they are put to.
            if self._balancer is not None and self.balances and state["shares"] is not None:
                self._balancer.load_state_dict(state["shares"])

    def close(self) -> None:
        """End the loader's workers. Safe to call twice."""
        if self._loader is not None:
            self._loader.close()

    def _no_order(self) -> str | None:
        if self._loader is None:
            return "batches do not come from TrainingRun.loader"
        return "each rank reads a stream" if isinstance(self._loader, StreamLoader) else None

    def _resize(self, loader: ResumableLoader) -> None:
        """Let batches be of the size that is asked for, from the first one that no rank has made.

        Shares stay in proportion.
        """
        if loader.batch_samples == self.batch_samples:
            return
        from_index = int(self._host_group.all_gather([loader.next_index]).max())
        loader.resize(from_index, self.batch_samples)
        self._scale_rate(loader)
        if self._balancer is not None:
            self._balancer.forget_times()
        if self._host_group.rank == 0:
            logger.info("from batch %d on batches hold %d samples", from_index, self.batch_samples)

    def _scale_rate(self, loader: ResumableLoader) -> None:
        """Have the learning rate go with the batch, on engines to come as well."""
        if loader.is_resized and self._changes.attached(EngineChange.LEARNING_RATE) is None:
            self._changes.attach(EngineChange.LEARNING_RATE, BatchLearningRate(self))

    @property
    def batch_ratio(self) -> float:
        """Present batch size over the initial one."""
        return self._loader.batch_ratio if isinstance(self._loader, ResumableLoader) else 1.0

    def _new_shares(self, balancer: Balancer, window: EndedWindow) -> Shares | None:
        """Take a window; return what shares are to be from a later one on, where that changes."""
        if self._is_balancing and self.balances:
            return balancer.window_ended(window)
        balancer.measure(window)
        if self._is_balancing == self.balances:
            return None
        self._is_balancing = self.balances
        return balancer.begin() if self.balances else balancer.end()

    def _new_balancer(self, batch_samples: int) -> Balancer:
        schedule = ShareSchedule(batch_samples, self._host_group.world_size)
        return Balancer(schedule, self._host_group.all_gather, BusyTime())

    def _take_record(self, record: StepRecord) -> None:
        """Learn, on the watch thread, for how long a step's passes were blocked."""
        if self._balancer is not None:
            exposed = record.comm_exposed_phase_seconds
            seconds = exposed.get("forward", 0.0) + exposed.get("backward", 0.0)
            self._balancer.busy_time.blocked(record.step, seconds)
