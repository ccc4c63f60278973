"""The data of a TrainingRun: its loader, and shares that follow the ranks' speeds if asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from ..metrics.step_record import StepRecord
from .balance.balancer import Balancer, EndedWindow
from .balance.busy_time import BusyTime
from .balance.schedule import ShareSchedule
from .loader import ResumableLoader, resumable_loader
from .stream_loader import StreamLoader
from .window.agreement import Agreement

logger = logging.getLogger(__name__)


class Sharing:
    """Makes the run's loader, balances its shares, and keeps the place of both.

    Args:
        agreement: Of the run.
        watch: The watch, which tells for how long collectives blocked training.
        balance: Whether shares follow the speeds; else they are even.
    """

    def __init__(self, agreement: Agreement, watch: Any, *, balance: bool) -> None:
        self._agreement = agreement
        self._watch = watch
        self._balances = balance and agreement.world_size > 1
        self._balancer: Balancer | None = None
        self._loader: ResumableLoader | StreamLoader | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._last_end = perf_counter()
        if self._balances:
            watch.subscribe(self._take_record)
            if not watch.is_open:
                logger.warning(
                    "balance=True without watching: from ZeRO stage 2 on nobody tells how long "
                    "ranks wait for each other, and shares stay even"
                )

    def loader(
        self, dataset: Any, *, batch_samples: int, **options: Any
    ) -> ResumableLoader | StreamLoader:
        """Return the loader of the run's data, at its saved place if one was loaded before.

        A later one takes its place. Options are those of `resumable_loader`.
        """
        rank, world_size = self._agreement.rank, self._agreement.world_size
        balancer = self._new_balancer(batch_samples) if self._balances else None
        self._loader = resumable_loader(
            dataset,
            batch_samples=batch_samples,
            rank=rank,
            world_size=world_size,
            shares_at=balancer.schedule.shares_at if balancer else None,
            **options,
        )
        self._balancer = balancer
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
        if self._balancer is None or self._loader is None:
            return
        now, before = perf_counter(), self._last_end
        self._last_end = now
        self._balancer.busy_time.collectives_inside = collectives_inside
        window = EndedWindow(
            index=self._loader.position - 1,
            step=step,
            num_samples=num_samples,
            passes_seconds=seconds,
            seconds=now - before,
        )
        shares = self._balancer.window_ended(window)
        if shares is not None and self._agreement.rank == 0:
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
            if self._balancer is not None and state["shares"] is not None:
                self._balancer.load_state_dict(state["shares"])

    def close(self) -> None:
        """End the loader's workers. Safe to call twice."""
        if self._loader is not None:
            self._loader.close()

    def _new_balancer(self, batch_samples: int) -> Balancer:
        schedule = ShareSchedule(batch_samples, self._agreement.world_size)
        return Balancer(schedule, self._agreement.gather, BusyTime())

    def _take_record(self, record: StepRecord) -> None:
        """Learn, on the watch thread, for how long a step's passes were blocked."""
        if self._balancer is not None:
            exposed = record.comm_exposed_phase_seconds
            seconds = exposed.get("forward", 0.0) + exposed.get("backward", 0.0)
            self._balancer.busy_time.blocked(record.step, seconds)
