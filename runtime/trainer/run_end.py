"""Ends a run on all ranks after one rank failed while others may wait for it in a collective.

A rank that fails in an unguarded pass or within the update cannot join a vote, because the other
ranks do not hold one. If not all ranks failed, the failed rank writes its error to the c10d store.
It then leaves the group of all ranks, so that a rank that waits in this group gets an error.

A thread of each rank polls the store. When it finds the error of another rank, it aborts NCCL's
collectives. A collective of gloo cannot be aborted. It ends when the failed rank's process ends, or
when this process ends.

A failed rank may also wait for the other ranks: until they fail too, or in the collectives that it
issues with scratch tensors. It then writes a notice first. If the thread of another rank finds that
this rank waits in vain, because the other rank issues other collectives, the thread ends the run.

Each error within the update ends the run, also on a single rank. The update cannot be discarded or
repeated: some weights may have changed, and the engine may still hold the gradients. So does a
rebuild that leaves no engine: the weights were in a copy, which is gone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ...errors import PeerFailedError, ZerowatchError
from ..common.collective_attempt import is_peer_failure
from ..common.host_group import HostCollectives
from ..common.peer_failures import describe_error, raise_failures
from ..common.rank_store import new_client, reconnectable
from ..memory.oom.oom_error import is_caused_by_oom

logger = logging.getLogger(__name__)

CONSENSUS_SECONDS = 10.0
_CONSENSUS_POLL_SECONDS = 0.02
POLL_SECONDS = 1.0
# If a call has not returned this long after another rank's error, this process exits.
EXIT_SECONDS = 60.0
# The same for the failed rank, if another rank has ended the run for it.
FAILED_EXIT_SECONDS = 10.0
# The same once the failed rank's script has ended. If its process has not ended after this, gloo
# waits there for a collective in flight, which this rank will not enter.
LEFT_SECONDS = 5.0
_STORE_TIMEOUT_SECONDS = 10.0
# torch waits up to twice as long for a store that is gone. `close` waits longer than that.
_RECONNECT_SECONDS = 2.0
_RESTART = "Restart it from its last checkpoint"
_PARTLY_UPDATED = "so the weights may be updated in part"
_REBUILD, _WEIGHTS_LOST = "the rebuild of the engine", "so the weights of the model are lost"
_MAKE_AGAIN = "Make the model and its TrainingRun again, and load the last checkpoint"


class FailureNotice(NamedTuple):
    """Notice of a failed rank that waits for the other ranks.

    Attributes:
        attempt: Number of the attempt, the same on all ranks.
        rank: The failed rank.
        error_type: Type of its error.
        error_text: Text of its error.
        place: Name of the function in which the error was raised.
        issued: Collectives that it has issued in the attempt, by group, if it issues no more; None
            if it issues the rest of its pass.
    """

    attempt: int
    rank: int
    error_type: str
    error_text: str
    place: str
    issued: Mapping[str, int] | None


class RunEnd:
    """Ends the run on all ranks after a failure on one rank.

    All ranks must create a RunEnd and close it.

    Args:
        host_group: Group of all ranks.
        store: A c10d store; None for the store of the job.
        exit_process: Function that ends this process at once with an exit code.
        exit_seconds: How long a call may still take after another rank's error, before this process
            exits.

    Attributes:
        waits_in_vain: Returns whether the failed rank of a notice waits in vain for this rank. It
            is called on the thread of this class.
    """

    def __init__(
        self,
        host_group: HostCollectives,
        store: Any = None,
        *,
        exit_process: Callable[[int], object] = os._exit,
        exit_seconds: float = EXIT_SECONDS,
    ) -> None:
        self._host_group = host_group
        self._store: Any = None
        self._exit_process, self._exit_seconds = exit_process, exit_seconds
        self._own_error: ZerowatchError | None = None
        self._peer_error: PeerFailedError | None = None
        self._is_ended_by_peer = False  # for this rank's error
        self.waits_in_vain: Callable[[FailureNotice], bool] | None = None
        self._num_calls = 0  # depth of nested calls in progress
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_alone = host_group.world_size == 1
        if self._is_alone:
            return
        # torchrun keeps its store when it restarts the processes, so each run needs its own prefix.
        self._prefix = f"zerowatch/run_end/{host_group.broadcast_text(secrets.token_hex(8))}"
        self._store = reconnectable(_get_default_store() if store is None else store)

    def start(self) -> None:
        """Start the thread that polls for an error of another rank."""
        if self._is_alone:
            return
        self._thread = threading.Thread(target=self._poll, name="zerowatch-run-end", daemon=True)
        atexit.register(self.close)  # the thread must not use the store at exit
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning(
                "a failure on another rank may not end this one's waits: no thread could be "
                "started (%s); training goes on",
                error,
            )

    def close(self) -> None:
        """Stop the thread and drop the store. Safe to call twice, and without a `start`."""
        atexit.unregister(self.close)
        self._stopped.set()
        thread = self._thread
        if thread is not None and thread.ident is not None and thread.is_alive():
            thread.join(_STORE_TIMEOUT_SECONDS)
        if self._store is not None and self._own_error is not None:
            with suppress(RuntimeError):  # the store's host is gone
                self._store.set(self._left_key, "")
        self._store = self.waits_in_vain = None  # closes the thread's connection

    def announce(self, attempt: int, issued: Mapping[str, int]) -> None:
        """Report to the other ranks that this rank failed in the attempt with this number.

        Args:
            attempt: Number of the attempt.
            issued: Number of collectives that this rank has issued in the attempt, by the name of
                the process group.
        """
        if self._store is not None:
            with suppress(RuntimeError):  # the store's host is gone
                self._store.set(
                    self._failure_key(attempt, self._host_group.rank), json.dumps(issued)
                )

    def publish(
        self, attempt: int, error: BaseException, place: str, issued: Mapping[str, int] | None
    ) -> bool:
        """Publish that this rank failed and waits for the other ranks; see `FailureNotice`.

        A later notice replaces that of another failed rank, but the waits of both ranks still end:
        if the later one has `issued`, its rank ends the run after CONSENSUS_SECONDS; if not, both
        ranks issue the same record.

        Returns:
            Whether the store has the notice.
        """
        if self._store is None:
            return False
        notice = FailureNotice(
            attempt, self._host_group.rank, *describe_error(error), place=place, issued=issued
        )
        with suppress(RuntimeError):  # the store's host is gone
            self._store.set(self._notice_key, json.dumps(notice))
            return True
        return False

    def all_failed(self, attempt: int, wait_seconds: float | None = None) -> bool:
        """Wait briefly, and return whether all ranks have failed at the same point of this attempt.

        A rank that did not fail may wait in a collective that this rank will not enter. But if the
        local batches and micro-batches are equal, usually all ranks fail at the same point. Then no
        rank is in a collective.

        It is not enough that all ranks have failed: a collective of NCCL returns to the host before
        the other ranks have entered it. Therefore the ranks of each process group must also have
        issued the same number of collectives.

        Args:
            attempt: Number of the attempt, the same on all ranks.
            wait_seconds: How long to wait for the slowest rank; None for CONSENSUS_SECONDS.
        """
        seconds = CONSENSUS_SECONDS if wait_seconds is None else wait_seconds
        keys = [self._failure_key(attempt, rank) for rank in range(self._host_group.world_size)]
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not self._store.check(keys):
                has_ended = self.peer_failure() is not None or self._is_ended_by_peer
                if has_ended or time.monotonic() > deadline:
                    return False
                time.sleep(_CONSENSUS_POLL_SECONDS)
            return _are_equal([json.loads(self._store.get(key)) for key in keys])
        return False

    def end(self, error: BaseException, place: str) -> None:
        """End the run on all ranks after an error of this rank.

        The caller then raises the error. This method does nothing if the run has only one rank, or
        if an error of another rank caused this error.

        Args:
            error: This rank's error.
            place: Name of the function in which the error was raised.
        """
        if self._is_alone or self._own_error is not None or is_communication_error(error):
            return
        is_first = self.peer_failure() is None
        rank, (error_type, text) = self._host_group.rank, describe_error(error)
        self._own_error = ZerowatchError(  # before the notice, which the thread reads
            f"this run has ended: {place} failed on this rank with {error_type} "
            f"while other ranks may wait for it in a collective. {_RESTART}"
        )
        if is_first:
            with suppress(RuntimeError):
                notice = json.dumps([rank, error_type, text, place])
                self._store.compare_set(self._key, "", notice)  # keeps an earlier notice
            logger.error(
                "%s failed on this rank with %s while other ranks may wait for it in a "
                "collective: the run has ended on all ranks. Restart it from its last checkpoint",
                place,
                error_type,
            )
        self._host_group.close()  # raises an error on ranks that wait in this group

    @contextmanager
    def updating(self, place: str) -> Iterator[None]:
        """End the run if this context, which updates the weights, ends with any error.

        A script may catch the error, and a notebook continues after an interrupt. The next call
        would train on weights that were updated in part, or on the gradients of this batch again.

        Args:
            place: Name of the function that updates.
        """
        try:
            yield
        except BaseException as error:
            self._end_for(error, place, _PARTLY_UPDATED)
            raise

    def end_without_engine(self, error: BaseException) -> None:
        """End the run after a rebuild that has removed the engine and could not replace it.

        Other ranks may wait for this rank. If not, see `end_in_rebuild`.
        """
        self._end_for(error, _REBUILD, _WEIGHTS_LOST)

    def _end_for(self, error: BaseException, place: str, consequence: str) -> None:
        """End the run after an error that any rank may have, if nothing has ended it yet."""
        if self._own_error is not None:
            return
        if isinstance(error, Exception) and self.peer_failure() is not None:
            return  # `call` raises it in place of the error, such as that of a closed connection
        self.end(error, place)
        if self._own_error is None:  # a single rank, or an error of a collective
            advice = _MAKE_AGAIN if self._is_alone else _RESTART
            self._own_error = _failed(error, place, consequence, advice)
            logger.error("%s", self._own_error)

    def end_in_update(self, error: Exception, place: str) -> None:
        """End the run after an update that all ranks leave together.

        Each rank calls this method, and none is informed by another. If another rank has ended the
        run, this does nothing.

        Args:
            error: The error of this rank; a PeerFailedError's `can_continue` is set to False.
            place: Name of the function that updates.
        """
        own_error = _failed(error, place, _PARTLY_UPDATED, self._advice(error))
        self._end_together(error, own_error)

    def end_in_rebuild(self, error: Exception) -> NoReturn:
        """End the run after a rebuild that all ranks leave together, without an engine.

        Each rank calls this method. If another rank has ended the run, this only raises.

        Args:
            error: The error of this rank, or the PeerAttemptError of another rank's failure.

        Raises:
            Exception: This rank's own error.
            PeerFailedError: Only other ranks have an error of their own.
        """
        own_error = None if is_peer_failure(error) else error
        try:
            raise_failures(self._host_group, own_error, _REBUILD)
            raise error  # no rank has an error of its own
        except Exception as raised:
            own_error = _failed(raised, _REBUILD, _WEIGHTS_LOST, self._advice(raised))
            self._end_together(raised, own_error)
            raise

    def end_with_gradients(self, error: BaseException, reason: str) -> None:
        """End the run after a window whose gradients stay in the engine.

        The next update would contain them. The ranks leave such a window together, so each of them
        calls this method, and none is informed by another. Only an interrupt may be on one rank.
        If another rank has ended the run, this does nothing.

        Args:
            error: The error that ended the window; a PeerFailedError's `can_continue` is set to
                False.
            reason: Why the gradients cannot be discarded.
        """
        if not isinstance(error, Exception):
            self.end(error, "train_batch")
        own_error = ZerowatchError(
            f"this run has ended: train_batch failed with {describe_error(error)[0]}, and the "
            f"gradients of its batch cannot be discarded: {reason}. {self._advice(error)}"
        )
        self._end_together(error, own_error)

    def _advice(self, error: BaseException) -> str:
        """Return what to do after an error by which this rank leaves with the others.

        The processes can go on, unless one has ended: its peers then fail in a collective, or could
        not exchange their own errors.
        """
        errors = (error, error.__cause__)
        is_lost = any(each is not None and is_communication_error(each) for each in errors)
        return _RESTART if is_lost and not self._is_alone else _MAKE_AGAIN

    def _end_together(self, error: BaseException, own_error: ZerowatchError) -> None:
        """Let later calls raise `own_error`, on a rank that leaves with the others by `error`."""
        if isinstance(error, Exception) and self.peer_failure() is not None:
            return  # `call` raises it in place of the error, such as that of a closed connection
        self._own_error = own_error
        if isinstance(error, PeerFailedError):
            error.can_continue = False
        if self._host_group.rank == 0:
            logger.error("%s", self._own_error)

    @property
    def has_ended(self) -> bool:
        """Whether this rank or another one has ended the run, as far as this rank knows."""
        return self._own_error is not None or self._peer_error is not None

    def peer_failure(self) -> PeerFailedError | None:
        """Return the error of the other rank that ended the run; None if no other rank did."""
        with suppress(RuntimeError):
            self._read()
        return self._peer_error

    @contextmanager
    def call(self) -> Iterator[None]:
        """If another rank's failure has ended the run, raise that failure.

        The failure replaces any error that it caused on this rank, such as an error of a
        collective.

        Raises:
            PeerFailedError: Another rank has ended the run.
            ZerowatchError: This rank has ended the run in an earlier call.
        """
        if self._own_error is not None:
            raise self._own_error
        self._num_calls += 1
        try:
            self._raise_peer_error(None)
            yield
            self._raise_peer_error(None)  # an aborted NCCL collective raises nothing
        except Exception as error:
            if self._own_error is None and self.peer_failure() is not None:
                self._raise_peer_error(error)
            raise
        finally:
            self._num_calls -= 1

    def _read(self) -> None:
        """Read another rank's error from the store, if the store has one.

        Raises:
            RuntimeError: The store does not respond.
        """
        store = self._store
        if store is None or self._peer_error is not None or self._own_error is not None:
            return
        if store.check([self._key]):
            rank, error_type, text, place = json.loads(store.get(self._key))
            if rank == self._host_group.rank:
                self._is_ended_by_peer = self._own_error is None
            else:
                self._peer_error = PeerFailedError(
                    rank, error_type, text, place, (rank,), can_continue=False
                )

    @property
    def _key(self) -> str:
        return f"{self._prefix}/end"

    @property
    def _left_key(self) -> str:
        return f"{self._prefix}/left"

    @property
    def _notice_key(self) -> str:
        return f"{self._prefix}/notice"

    def _failure_key(self, attempt: int, rank: int) -> str:
        return f"{self._prefix}/{attempt}/{rank}"

    def _raise_peer_error(self, cause: Exception | None) -> None:
        if self._peer_error is not None and self._own_error is None:
            self._host_group.close()  # other ranks may wait for this rank
            if cause is self._peer_error:
                raise cause
            raise self._peer_error from cause

    def _poll(self) -> None:
        with suppress(RuntimeError):
            # A connection of its own, so that its requests do not delay other threads.
            self._store = new_client(self._store, _STORE_TIMEOUT_SECONDS)
            while not self._stopped.wait(POLL_SECONDS) and self._own_error is None:
                try:
                    self._end_for_failed_rank()
                    self._read()
                except RuntimeError:
                    self._connect_again()
                    continue
                if self._peer_error is None and not self._is_ended_by_peer:
                    continue
                exit_seconds = self._exit_seconds
                if self._peer_error is not None:
                    logger.error("%s", self._peer_error)
                else:
                    exit_seconds = min(exit_seconds, FAILED_EXIT_SECONDS)
                    logger.error("another rank has ended the run after the error of this rank")
                _abort_nccl()
                with suppress(RuntimeError, ValueError, KeyError):  # the job's groups are gone
                    self._host_group.close()  # raises an error on ranks that wait in this group
                self._await_call(exit_seconds)
                return

    def _connect_again(self) -> None:
        """Replace the connection to the store, which may be broken.

        Raises:
            RuntimeError: The store is gone, or this object was closed.
        """
        store = self._store
        if store is None or self._stopped.is_set():
            raise RuntimeError("the connection to the store is closed")
        self._store = new_client(store, _STORE_TIMEOUT_SECONDS, _RECONNECT_SECONDS)

    def _end_for_failed_rank(self) -> None:
        """End the run if a failed rank waits in vain for this rank.

        Raises:
            RuntimeError: The store does not respond.
        """
        store, waits_in_vain = self._store, self.waits_in_vain
        if store is None or waits_in_vain is None or not store.check([self._notice_key]):
            return
        notice = FailureNotice(*json.loads(store.get(self._notice_key)))
        if notice.rank == self._host_group.rank or not waits_in_vain(notice):
            return
        logger.error(
            "rank %d has failed and waits for collectives other than those of this rank: the run "
            "has ended on all ranks. Restart it from its last checkpoint",
            notice.rank,
        )
        store.compare_set(self._key, "", json.dumps(notice[1:5]))  # keeps an earlier notice

    def _await_call(self, exit_seconds: float) -> None:
        """Wait until the call in progress has ended; exit the process if that takes too long."""
        began, seconds = time.monotonic(), exit_seconds
        while self._num_calls and not self._stopped.wait(min(1.0, exit_seconds / 10)):
            waited = time.monotonic() - began
            if seconds == exit_seconds and self._has_failed_rank_left():
                seconds = min(exit_seconds, waited + LEFT_SECONDS)
            if waited > seconds:
                logger.error(
                    "rank %d exits with code 1: it has waited %.0f s in a collective that another "
                    "rank will not enter, and that cannot be interrupted",
                    self._host_group.rank,
                    waited,
                )
                sys.stdout.flush()
                sys.stderr.flush()
                self._exit_process(1)
                return

    def _has_failed_rank_left(self) -> bool:
        with suppress(RuntimeError):  # the store's host is gone
            return self._store is not None and bool(self._store.check([self._left_key]))
        return False


def is_communication_error(error: BaseException) -> bool:
    """Return whether a collective raised this error because another rank has left.

    A collective also raises an error if this rank has no memory for it.
    """
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return False
    return not is_caused_by_oom(error)


def _failed(error: BaseException, place: str, consequence: str, advice: str) -> ZerowatchError:
    """Return the error of the calls after a failure that ended the run."""
    return ZerowatchError(
        f"this run has ended: {place} failed with {describe_error(error)[0]}, {consequence}. "
        f"{advice}"
    )


def _are_equal(issued_by_rank: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the ranks of each group have issued the same number of collectives.

    A rank reports only the groups that it belongs to.
    """
    numbers: dict[str, int] = {}
    return all(
        numbers.setdefault(group, number) == number
        for issued in issued_by_rank
        for group, number in issued.items()
    )


def _abort_nccl() -> None:
    """Abort NCCL's collectives in all process groups; gloo's collectives cannot be aborted."""
    try:
        if "nccl" in str(dist.get_backend_config()):
            dist.distributed_c10d._abort_process_group()
    except (RuntimeError, ValueError, AttributeError) as error:
        logger.warning("the collectives of this rank could not be aborted: %s", error)
