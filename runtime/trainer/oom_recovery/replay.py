"""Replays a window after an out-of-memory error, with smaller micro-batches or memory savings.

Any other error of the script's code ends the window on all ranks.

"Window" and "replay" are defined in docs/concepts.md. All ranks make the same calls. An attempt is
a callable: it splits the window into a given number of micro-batches, and runs forward and backward
without the update.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch.distributed as dist

from ....errors import PeerOutOfMemoryError
from ...common import accelerator
from ...common.ds_config import EngineSource
from ...common.host_group import HostCollectives
from ...common.peer_failures import FailureCapture, raise_failures
from ...memory.oom.oom_error import is_caused_by_oom
from ..run_end import FailureNotice, RunEnd, is_communication_error
from ..window.rng import RngState
from ..window.window_agreement import LocalBatches
from .abort_window import abort_unsupported_reason, abort_window
from .collective_guard import CollectiveGuard, Vote
from .escalation import EscalationPolicy
from .micro_batch_planner import MemoryMeasurements, MicroBatchPlanner, size_after_oom
from .recorded_passes import partitions_of

logger = logging.getLogger(__name__)

_TRAIN_BATCH = "train_batch"
_UPDATE = "engine.step()"

T = TypeVar("T")


class MemorySource(Protocol):
    """Measures the memory of this rank."""

    def measured(self) -> MemoryMeasurements:
        """Return the peaks so far, and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(Generic[T]):
    """Result of a window that succeeded.

    Attributes:
        outcome: Return value of the successful attempt.
        micro_batches: Number of micro-batches that the window was split into.
        replays: Failed attempts before the successful attempt.
        lost_seconds: Time of the failed attempts, and of cleaning up after them.
    """

    outcome: T
    micro_batches: int
    replays: int
    lost_seconds: float


class _AttemptReport(NamedTuple):
    """Report of a rank to the other ranks after a failed attempt."""

    ran_out: bool
    largest: int  # samples of the rank's largest micro-batch
    next_size: int  # samples to try next; 0 if not even one sample fits


class OomReplay:
    """Runs a window. If memory runs out, runs the window again in smaller micro-batches.

    Args:
        engine_source: Source of the engine, which a rebuild replaces.
        host_group: Group of all ranks, in which they agree on the next attempt.
        guard: Guard of the collectives, open on all ranks.
        planner: Planner of the micro-batches of each window.
        escalation: Decides the change after an attempt that ran out of memory.
        memory: Measures this rank's memory. Without it, each new size is half the failing size.
        run_end: Ends the run if the ranks cannot leave a window together.

    Attributes:
        planner: Planner of the micro-batches of each window.
        on_window_abort: Functions to call on all ranks before a window is run again. They undo
            changes that the window's forward passes made to the script's own state.
        on_error: Functions to call with each out-of-memory error of this rank that ended an
            attempt.
    """

    def __init__(
        self,
        *,
        engine_source: EngineSource,
        host_group: HostCollectives,
        guard: CollectiveGuard,
        planner: MicroBatchPlanner,
        escalation: EscalationPolicy | None = None,
        memory: MemorySource | None = None,
        run_end: RunEnd,
    ) -> None:
        self.planner = planner
        self.on_window_abort: list[Callable[[], None]] = []
        self.on_error: list[Callable[[BaseException], None]] = []
        self._engine_source, self._host_group, self._guard = engine_source, host_group, guard
        self._escalation, self._memory = escalation or EscalationPolicy(), memory
        self._run_end, self._num_attempts = run_end, 0
        run_end.waits_in_vain = self._waits_in_vain

    def run_window(
        self,
        local_batches: LocalBatches,
        attempt: Callable[[int], T],
        *,
        guard_requested: bool = False,
        votes_requested: bool = False,
    ) -> ReplayResult[T]:
        """Run a window's attempts until one succeeds on all ranks.

        Args:
            local_batches: Sizes of the local batches of all ranks.
            attempt: Called with a number of micro-batches. Runs the window, split into this number
                of micro-batches, without the update.
            guard_requested: Whether any rank requests the guard, because its memory use has changed
                or its memory is low.
            votes_requested: Whether any rank requests votes before each collective of this window.

        Raises:
            PeerOutOfMemoryError: Not even one sample fits in another rank's memory.
            PeerFailedError: An attempt, or a function of `on_window_abort`, failed on another rank.
            RuntimeError: Not even one sample fits in this rank's memory; this rank's own error.
            Exception: An attempt, or a function of `on_window_abort`, failed on this rank.
        """
        is_guarded = self.planner.begin_window(local_batches, guard_requested=guard_requested)
        self._guard.armed = is_guarded or votes_requested
        rng = RngState.capture()
        own_error: BaseException | None = None
        replays, lost_seconds = 0, 0.0
        while True:
            began = perf_counter()
            count = self.planner.micro_batches(local_batches)
            capture, outcomes = self._attempt(attempt, count)
            if capture.origin is None:
                self.planner.on_success(local_batches, count)
                return ReplayResult(
                    outcome=outcomes[0],
                    micro_batches=count,
                    replays=replays,
                    lost_seconds=lost_seconds,
                )
            ran_out = capture.origin is OomOrigin.OWN
            own_error = capture.error if ran_out else own_error
            self._abort(capture)
            self._plan_next_attempt(local_batches, count, ran_out=ran_out, own_error=own_error)
            rng.restore()
            self._undo_forward_passes()
            replays += 1
            lost_seconds += perf_counter() - began

    def run_evaluation(self, attempt: Callable[[], T]) -> T:
        """Run an attempt that is not repeated; if a rank fails, raise on all ranks.

        Raises:
            PeerOutOfMemoryError: Another rank ran out of memory.
            PeerFailedError: The attempt failed on another rank.
            Exception: The attempt failed on this rank; this rank's own error.
        """
        # An evaluation may change which parameters of ZeRO 3 are gathered.
        self._guard.recorder.num_outside += 1
        capture, outcomes = self._attempt(lambda count: attempt(), 0, "evaluate")
        if capture.origin is None:
            return outcomes[0]
        capture.clear_frames()
        reason = None
        if capture.origin is OomOrigin.OWN and capture.error is not None:
            reason = self._notify_peers(Vote.OUT_OF_MEMORY, capture.error, "evaluate")
        _give_up(capture.error, reason or "out of memory in an evaluation, which is not repeated")

    def update(self, step: Callable[[], T]) -> T:
        """Make the update of a successful window. If the update fails, end the run on all ranks.

        Raises:
            RuntimeError: Memory ran out, and possibly only some weights were updated. This is the
                rank's own error, or PeerOutOfMemoryError.
            PeerFailedError: The update failed on another rank for another reason.
            Exception: The update failed on this rank for another reason.
        """
        if not self._guard.armed:
            try:
                result = step()
                self._guard.recorder.num_outside = 0
                return result
            except Exception as error:
                self._run_end.end(error, _UPDATE)
                raise
        try:
            return self._guarded_update(step)
        except Exception as error:
            if self._guard.aborted_by:  # all ranks leave the update
                self._run_end.end_in_update(error, _UPDATE)
            raise

    def _guarded_update(self, step: Callable[[], T]) -> T:
        """Make the update with a vote before each collective; see `update`."""
        outcomes: list[T] = []
        with FailureCapture() as failure, OomCapture() as capture, self._guard.window():
            outcomes.append(step())
        self._raise_failure(failure.take(), capture, _UPDATE)
        self._guard.recorder.num_outside = 0
        if capture.origin is None:
            return outcomes[0]
        if capture.origin is OomOrigin.OWN and capture.error is not None:
            self._notify_peers(Vote.OUT_OF_MEMORY, capture.error, _UPDATE)
        capture.clear_frames()
        _give_up(
            capture.error,
            f"out of memory within {_UPDATE}, which cannot be repeated once weights were "
            "updated. Restart the run from its last checkpoint",
        )

    def _attempt(
        self, attempt: Callable[[int], T], count: int, place: str = _TRAIN_BATCH
    ) -> tuple[OomCapture, list[T]]:
        """Run one attempt; return its outcome in a list, which is empty if memory ran out.

        Raises:
            PeerFailedError: The attempt failed for another reason, on another rank.
            Exception: The attempt failed for another reason, on this rank.
        """
        self._num_attempts += 1
        outcomes: list[T] = []
        window = self._guard.window(self._engine_source.engine, is_recorded=place == _TRAIN_BATCH)
        with FailureCapture() as failure, OomCapture() as capture, window:
            outcomes.append(attempt(count))
        self._raise_failure(failure.take(), capture, place)
        if capture.origin is not None:
            outcomes.clear()
        return capture, outcomes

    def _raise_failure(self, error: Exception | None, capture: OomCapture, place: str) -> None:
        """Raise an error on all ranks if any rank failed for a reason other than memory.

        Args:
            error: This rank's error; None if this rank did not fail or ran out of memory.
            capture: Capture of this rank's out-of-memory errors.
            place: Name of the call that failed, such as "train_batch".
        """
        guard = self._guard
        if error is not None and guard.aborted_by is Vote.OUT_OF_MEMORY:
            # The script caught the error that ends the window, and raised this error instead.
            capture.origin, capture.error = OomOrigin.PEER, error
            return
        own = None if guard.aborted_by else error
        try:
            if own is not None:
                self._vote_for_failure(own, place)
            if guard.aborted_by is Vote.FAILED:
                raise_failures(self._host_group, own, place)
        finally:
            own = error = None  # see FailureCapture.take

    def _vote_for_failure(self, own: Exception, place: str) -> None:
        """Vote that all ranks leave the window; raise this rank's error if it cannot vote."""
        try:
            if is_communication_error(own) or self._run_end.peer_failure() is not None:
                raise own  # a vote would fail too
            if accelerator.has_failed():
                # The other ranks wait in NCCL for this rank's device, and would do so after a vote.
                self._run_end.end(own, place)
                raise own
            try:
                reason = self._notify_peers(Vote.FAILED, own, place)
            except Exception as vote_error:
                self._run_end.end(own, place)
                raise own from vote_error  # the script gets its own error
            if reason is not None:
                raise own
        finally:
            del own

    def _undo_forward_passes(self) -> None:
        """Call the functions of `on_window_abort`; raise on all ranks if any of them raises."""
        with FailureCapture() as failure:
            for undo in self.on_window_abort:
                undo()
        raise_failures(self._host_group, failure.take(), "a function of on_window_abort")

    def _abort(self, capture: OomCapture) -> None:
        """Notify the other ranks, and free the memory of the attempt.

        Raises:
            RuntimeError: The window cannot be aborted. This is the rank's own error, or
                PeerOutOfMemoryError.
        """
        engine = self._engine_source.engine
        capture.clear_frames()
        reason = abort_unsupported_reason(engine)
        if capture.origin is OomOrigin.OWN and capture.error is not None:
            for notify in self.on_error:
                notify(capture.error)
            if reason is None and not self._guard.can_report:
                self._issue_rest(engine, capture.error)
            reason = self._notify_peers(Vote.OUT_OF_MEMORY, capture.error, _TRAIN_BATCH) or reason
        if reason is not None:
            _give_up(capture.error, f"this window cannot be run again: {reason}")
        gc.collect()  # frees tensors in reference cycles
        abort_window(engine)
        self._guard.recorder.clear()
        accelerator.current.empty_cache()  # the next attempt needs blocks of other sizes

    def _issue_rest(self, engine: Any, error: BaseException) -> None:
        """Issue the other collectives of this rank's unfinished pass, and report the error.

        The other ranks then reach their next vote. Nothing is issued if the collectives are not
        known.

        Args:
            engine: DeepSpeed's engine.
            error: This rank's out-of-memory error.

        Raises:
            Exception: This rank's error, because a collective or the vote failed; the run has
                ended.
        """
        reason = self._guard.unfinished_reason()
        if not reason and _is_raised_in_wait(error):
            reason = "the error was raised while this rank waited for a collective"
        if not reason and not self._run_end.publish(
            self._num_attempts, error, _TRAIN_BATCH, issued=None
        ):
            reason = "the job's store does not respond"
        if reason:
            logger.warning("the other collectives of this pass are not issued: %s", reason)
            return
        gc.collect()
        try:
            abort_window(engine)  # frees memory for the scratch tensors
            accelerator.current.empty_cache()
            if self._guard.issue_rest(partitions_of(engine)):
                self._guard.report(Vote.OUT_OF_MEMORY)
        except Exception as collective_error:
            self._run_end.end(error, _TRAIN_BATCH)
            raise error from collective_error
        except BaseException as interrupt:
            self._run_end.end(interrupt, _TRAIN_BATCH)
            raise

    def _notify_peers(self, vote: Vote, error: BaseException, place: str) -> str | None:
        """Make all ranks leave the window. If a rank may be in a collective, end the run.

        Returns:
            Why the run has ended; None if the run continues.

        Raises:
            PeerFailedError: This rank ran out of memory, and another rank failed for another
                reason.
        """
        if any(isinstance(link, dist.DistBackendError) for link in _chain(error)):
            self._run_end.end(error, place)
            return (
                "NCCL has run out of memory, and its communicator may be incomplete. Its buffers "
                "do not come from torch's allocator: leave more memory free, for example by "
                "torch.cuda.set_per_process_memory_fraction or a smaller micro-batch"
            )
        # A rank that cannot report waits for this.
        self._run_end.announce(self._num_attempts, self._guard.issued_collectives())
        if self._guard.can_report or self._all_failed(error, place):
            self._guard.report(vote)
            if vote is Vote.OUT_OF_MEMORY and self._guard.aborted_by is Vote.FAILED:
                raise_failures(self._host_group, None, place)
            return None
        self._run_end.end(error, place)
        return "the other ranks may wait in a collective that this rank did not issue"

    def _all_failed(self, error: BaseException, place: str) -> bool:
        """Wait until all ranks have failed at the same point; return whether they have."""
        issued = self._guard.issued_in_training()
        self._run_end.publish(self._num_attempts, error, place, issued)
        return self._run_end.all_failed(self._num_attempts)

    def _waits_in_vain(self, notice: FailureNotice) -> bool:
        """Return whether the failed rank of a notice waits in vain for this rank."""
        if notice.attempt != self._num_attempts or not self._guard.waits_in_vain(notice.issued):
            return False
        return notice.attempt == self._num_attempts

    def _plan_next_attempt(
        self,
        local_batches: LocalBatches,
        count: int,
        *,
        ran_out: bool,
        own_error: BaseException | None,
    ) -> None:
        """Agree with the other ranks on the change before the next attempt, and make the change.

        Raises:
            RuntimeError: No memory saving is left. This is the rank's own out-of-memory error, or
                PeerOutOfMemoryError.
        """
        group = self._host_group
        largest = local_batches.largest(count)[group.rank]
        next_size = size_after_oom(local_batches, largest, self._measured()) if ran_out else None
        own = _AttemptReport(ran_out=ran_out, largest=largest, next_size=next_size or 0)
        reports = [_AttemptReport._make(row) for row in group.all_gather(own).tolist()]
        failed = {rank: report for rank, report in enumerate(reports) if report.ran_out}
        failing = int(min(report.largest for report in failed.values()))
        size = int(min(report.next_size for report in failed.values()))
        ranks = ", ".join(map(str, failed))
        what = f"out of memory on rank {ranks} with micro-batches of {failing}"
        next_attempt = self._escalation.escalate(
            self.planner, local_batches, failing_size=failing, next_size=size, all_max=group.all_max
        )
        if next_attempt is None:
            applied = "; ".join(saving.value for saving in self._escalation.applied) or "nothing"
            _give_up(own_error, f"{what}, with no memory saving left (applied: {applied})")
        self._guard.armed = True
        if group.rank == 0:
            logger.warning("%s: the window is run again with %s", what, next_attempt)

    def _measured(self) -> MemoryMeasurements:
        if self._memory is None:
            return MemoryMeasurements(peaks=(), limit_bytes=None)
        return self._memory.measured()


class OomOrigin(Enum):
    """The rank whose memory ran out: this rank, or another rank."""

    OWN = "own"
    PEER = "peer"


class OomCapture:
    """Suppresses and keeps an out-of-memory error of a `with` block; other errors propagate.

    Attributes:
        error: The error that ended the block; None if the block ended without an error.
        origin: The rank whose memory ran out; None if no rank ran out of memory.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.origin: OomOrigin | None = None

    def __enter__(self) -> OomCapture:
        """Begin the block."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Suppress an out-of-memory error."""
        if error is not None:
            self.origin, self.error = oom_origin(error)
        return self.origin is not None

    def clear_frames(self) -> None:
        """Free the local variables in the error's frames; its traceback stays readable."""
        for link in _chain(self.error):
            traceback.clear_frames(link.__traceback__)


def oom_origin(error: BaseException) -> tuple[OomOrigin | None, BaseException | None]:
    """Return whose memory ran out, and the error that shows it; (None, None) for other errors.

    An out-of-memory error may be a cause or context of `error`. For example, a collective that is
    called while this rank's own error propagates raises PeerOutOfMemoryError on top of that error.
    The script's code may also raise another error on top of a PeerOutOfMemoryError.
    """
    if not isinstance(error, Exception):  # an interrupt propagates
        return None, None
    if is_caused_by_oom(error):
        return OomOrigin.OWN, error
    chain = _chain(error)
    if not any(isinstance(link, PeerOutOfMemoryError) for link in chain):
        return None, None
    own = [link for link in chain if is_caused_by_oom(link)]
    return (OomOrigin.OWN, own[-1]) if own else (OomOrigin.PEER, error)


def _is_raised_in_wait(error: BaseException) -> bool:
    """Return whether a collective in flight may have raised the error when it was waited for."""
    traces = (link.__traceback__ for link in _chain(error))
    return any(
        frame.f_code.co_name == "wait" for trace in traces for frame, _ in traceback.walk_tb(trace)
    )


def _give_up(error: BaseException | None, reason: str) -> NoReturn:
    """Log the reason, and raise this rank's own error, or PeerOutOfMemoryError."""
    logger.error("%s", reason)
    if error is None:
        raise PeerOutOfMemoryError(f"{reason}. See the error of that rank")
    raise error


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes and contexts, newest first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
