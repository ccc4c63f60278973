"""Runs a window until it comes to its end: with less memory each time that it does not.

All ranks call it alike. It knows no batches: an attempt is a callable that runs forward and
backward of a window cut into a number of micro-batches, without the update.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ...common.host_collectives import HostCollectives
from .abort import abort_window, can_abort
from .collective_guard import CollectiveGuard, PeerOutOfMemory
from .escalation import EscalationPolicy
from .fit import MemoryMeasurements
from .micro_batch_planner import BatchShares, MicroBatchPlanner, suggest_size
from .oom_capture import OomCapture
from .oom_consensus import all_ranks_oom

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(Generic[T]):
    """A window that came to its end.

    Attributes:
        outcome: What the attempt returned that did.
        micro_batches: Into how many it was cut.
        replays: Attempts that were given up before.
        lost_seconds: What those took, and cleaning up after them.
    """

    outcome: T
    micro_batches: int
    replays: int
    lost_seconds: float


class OomReplay:
    """Decides with all ranks how a window is cut, runs it, and runs it again.

    Args:
        engine: Returns the engine; another one after a rebuild.
        host_group: Between all ranks.
        guard: Open, and on all ranks.
        plans: How windows are cut.
        capture_rng: Reads the random generators, and returns what puts them back.
        escalation: What to change when not even one sample fits.
        measured: Tells what this rank knows of its memory; without it, sizes are halved.

    Attributes:
        plans: As given.
        on_window_abort: Called on all ranks before a window is run again, to undo what its
            forwards did to state of the script's own.
        on_error: Called with each error of this rank that ended an attempt.
    """

    def __init__(
        self,
        *,
        engine: Callable[[], Any],
        host_group: HostCollectives,
        guard: CollectiveGuard,
        plans: MicroBatchPlanner,
        capture_rng: Callable[[], Callable[[], None]],
        escalation: EscalationPolicy | None = None,
        measured: Callable[[], MemoryMeasurements] | None = None,
    ) -> None:
        self.plans = plans
        self.on_window_abort: list[Callable[[], None]] = []
        self.on_error: list[Callable[[BaseException], None]] = []
        self._engine, self._host_group, self._guard = engine, host_group, guard
        self._capture_rng, self._measured = capture_rng, measured
        self._escalation = escalation or EscalationPolicy()
        self._num_attempts = 0

    def run(
        self, share: BatchShares, attempt: Callable[[int], T], *, asks_for_guard: bool = False
    ) -> ReplayResult[T]:
        """Run a window's attempts until one comes to its end on all ranks.

        Args:
            share: What all ranks know of it.
            attempt: Runs the window, cut into that many micro-batches, without the update.
            asks_for_guard: Whether any rank's memory is changed or low.

        Raises:
            PeerOutOfMemory: Another rank's memory does not hold even one sample.
            RuntimeError: Nor does this rank's; the error of its own.
        """
        self._guard.armed = self.plans.begin(share, asked=asks_for_guard)
        restore_rng = self._capture_rng()
        own_error: BaseException | None = None
        replays, lost_seconds = 0, 0.0
        while True:
            began = perf_counter()
            count = self.plans.micro_batches(share)
            trouble, outcomes = self._run_once(attempt, count)
            if trouble.whose is None:
                self.plans.on_success(share, count)
                return ReplayResult(
                    outcome=outcomes[0],
                    micro_batches=count,
                    replays=replays,
                    lost_seconds=lost_seconds,
                )
            own_error = trouble.error if trouble.whose == "own" else own_error
            self._leave(trouble)
            self._plan_anew(share, count, is_own=trouble.whose == "own", own_error=own_error)
            restore_rng()
            for undo in self.on_window_abort:
                undo()
            replays += 1
            lost_seconds += perf_counter() - began

    def update(self, step: Callable[[], T]) -> T:
        """Make the update of a window that came to its end, with the other ranks told if it fails.

        Raises:
            RuntimeError: Memory ran out; some weights may be updated and others not. This rank's
                own error, or PeerOutOfMemory.
        """
        if not self._guard.armed:
            return step()
        made: list[T] = []
        with OomCapture() as trouble, self._guard.window():
            made.append(step())
        if trouble.whose is None:
            return made[0]
        if trouble.whose == "own":
            self._guard.report()
        trouble.clear_frames()
        _give_up(
            trouble.error,
            "out of memory within engine.step(), which cannot be done again once weights were "
            "updated. Start the run again from its last save",
        )

    def _run_once(self, attempt: Callable[[int], T], count: int) -> tuple[OomCapture, list[T]]:
        """Run one attempt; returns its outcome in a list, empty where it was given up."""
        self._num_attempts += 1
        outcomes: list[T] = []
        with OomCapture() as trouble, self._guard.window():
            outcomes.append(attempt(count))
        if trouble.whose is not None:
            outcomes.clear()
        return trouble, outcomes

    def _leave(self, trouble: OomCapture) -> None:
        """Let the other ranks know, and give back what the attempt held.

        Raises:
            RuntimeError: This rank's own error, or PeerOutOfMemory: it cannot be left.
        """
        engine = self._engine()
        trouble.clear_frames()
        why_not = can_abort(engine)
        if trouble.whose == "own" and trouble.error is not None:
            for tell in self.on_error:
                tell(trouble.error)
            why_not = self._meet(engine) or why_not
        if why_not is not None:
            _give_up(trouble.error, f"this window cannot be run again: {why_not}")
        gc.collect()  # what only cycles hold
        abort_window(engine)
        _empty_cache()

    def _meet(self, engine: Any) -> str | None:
        """Make sure that no rank waits for this one, which ran out; says so where one may."""
        has_collectives = engine.zero_optimization_partition_gradients()
        if self._guard.armed or not has_collectives:
            self._guard.report()
            return None
        store = dist.distributed_c10d._get_default_store()
        host_group = self._host_group
        if host_group.world_size == 1 or all_ranks_oom(
            store, self._num_attempts, rank=host_group.rank, world_size=host_group.world_size
        ):
            return None
        return (
            "it was not guarded, and the other ranks wait in a collective. Start the run again "
            "from its last save; it is guarded then"
        )

    def _plan_anew(
        self, share: BatchShares, count: int, *, is_own: bool, own_error: BaseException | None
    ) -> None:
        """Agree on what is different the next time.

        Raises:
            RuntimeError: There is nothing left to give up: this rank's own error, or
                PeerOutOfMemory.
        """
        ran = share.largest(count)[self._host_group.rank]
        size = suggest_size(share, ran, self._known()) if is_own else None
        told = self._host_group.all_gather([is_own, ran, size or 0])
        failed = told[told[:, 0] > 0]
        failing, size = int(failed[:, 1].min()), int(failed[:, 2].min())
        ranks = ", ".join(str(rank) for rank in told[:, 0].nonzero()[0])
        what = f"out of memory on rank {ranks}, in micro-batches of {failing}"
        if size:
            self.plans.ran_out(share, failing, size)
            now = f"micro-batches of {self.plans.sizing.bound(share.length)}"
        else:
            change = self._escalation.apply_next(self._host_group.all_max)
            if change is None:
                applied = "; ".join(each.value for each in self._escalation.applied) or "nothing"
                _give_up(own_error, f"{what}, with nothing left to give up (given up: {applied})")
            self.plans.forget()
            now = change.value
        self._guard.armed = True
        if self._host_group.rank == 0:
            logger.warning("%s: the window is run again, with %s", what, now)

    def _known(self) -> MemoryMeasurements:
        return (
            self._measured() if self._measured else MemoryMeasurements(peaks=(), limit_bytes=None)
        )


def _empty_cache() -> None:
    """Have the allocator give back what it keeps, for pieces of other sizes will be asked for."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _give_up(error: BaseException | None, why: str) -> NoReturn:
    """Raise this rank's own error, or that of a peer, and say why."""
    logger.error("%s", why)
    if error is None:
        raise PeerOutOfMemory(f"{why}. See the error of that rank")
    raise error
