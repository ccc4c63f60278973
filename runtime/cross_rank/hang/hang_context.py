"""Reads the state of this rank and of its peers for hang detection.

Only the driver may block. It is asked on a thread of its own, for a limited time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import torch.distributed as dist
from torch._C import _distributed_c10d

from ....metrics.catalog.labels import OPS, OWN_GROUP, PHASES
from ...collectives.groups import CollectiveCall, Group, Groups, RankSet
from ...collectives.unseen_calls import num_unseen
from ...common import accelerator
from ...common.fail_open import FailOpen
from ...common.group_backend import backend_name
from ..comparison_thread import ComparisonThread
from ..exchange.rank_messages import Heartbeat
from .driver_calls import DriverCalls
from .hang_evidence import CallSummary, RankSetSummary

# Number of last calls of each rank set that are read for a report.
CALLS_PER_RANK_SET = 64


class HangContext:
    """Reads the collectives, the peers and the run folder for hang detection.

    Each method except `folder` fails open separately. After its first exception the method returns
    None, while the other methods still work.

    Args:
        rank: This rank.
        groups: The process groups seen so far.
        thread: Reads the peers' heartbeats, and announces a hang to them.
        fail_open: Guards the methods.
        folder: Returns the run folder, or None until the run has one.
        is_training: Returns whether the monitored module is in training mode.
        device_index: torch's index of the accelerator that this rank trains on. None on CPU.
        now_ns: A clock in nanoseconds.
    """

    def __init__(
        self,
        *,
        rank: int,
        groups: Groups,
        thread: ComparisonThread,
        fail_open: FailOpen,
        folder: Callable[[], Path | None],
        is_training: Callable[[], bool] = lambda: True,
        device_index: int | None = None,
        now_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.rank = rank
        self._folder = folder
        self._groups = groups
        self._thread = thread
        self._now_ns = now_ns
        self._device_index, self._is_device_lost = device_index, False
        self._this_thread = threading.local()
        self._seen: list[tuple[int, bool, bool]] = []
        self._changed_ns = 0
        self._driver_calls = DriverCalls(fail_open, self.prepare_thread)
        self._is_training_hook = fail_open.wrap("hang training mode", is_training)
        self._prepare_thread_hook = fail_open.wrap("hang device", self._prepare_thread)
        self._last_activity_ns_hook = fail_open.wrap("hang activity", self._find_last_activity_ns)
        self._peers_hook = fail_open.wrap("hang peers", self._find_peers)
        self._rank_sets_hook = fail_open.wrap("hang groups", self._summarize_rank_sets)
        self._last_calls_hook = fail_open.wrap("hang calls", self._summarize_last_calls)
        self._ask_driver_hook = fail_open.wrap("hang driver", self._ask_driver)
        self._divergence_hook = fail_open.wrap("hang divergence", lambda: thread.divergence)
        self._flight_recorder_dump_hook = fail_open.wrap("flight recorder", flight_recorder_dump)
        self._others_hang_hook = fail_open.wrap("hang notice", lambda: thread.others_hang)
        self._announce_hang_hook = fail_open.wrap("hang notice", thread.announce_hang)

    def start(self) -> None:
        """Start the thread that asks the driver, if this rank trains on a device.

        Raises:
            RuntimeError: The system allows no more threads.
        """
        if self._device_index is not None:
            self._driver_calls.start()

    def close(self) -> None:
        """End the thread that asks the driver. Safe to call twice."""
        self._driver_calls.close()

    def folder(self) -> Path | None:
        """Return the run folder, or None until the run has one."""
        return self._folder()

    def is_training(self) -> bool | None:
        """Return whether the monitored module is in training mode."""
        return self._is_training_hook()

    def last_activity_ns(self) -> int | None:
        """Return when a collective was last observed to start or end.

        This method compares the current state with the state at its last call, so recording a
        collective has no extra cost. The precision of the time is the interval between the calls.
        """
        return self._last_activity_ns_hook()

    def peers(self) -> Mapping[int, Heartbeat] | None:
        """Return the last heartbeats of the other ranks, or None if there are none."""
        return self._peers_hook()

    def rank_sets(self) -> list[RankSetSummary] | None:
        """Return this rank's rank sets. None if the driver blocks."""
        return self._driver_calls.call(self._rank_sets_hook)

    def last_calls(self) -> list[CallSummary] | None:
        """Return the last calls and all calls in flight of each rank set, in order of issue.

        None if the driver blocks.
        """
        return self._driver_calls.call(self._last_calls_hook)

    def is_driver_blocked(self) -> bool:
        """Return whether the driver has not answered in time, and has not answered since."""
        return self._driver_calls.is_blocked

    def divergence(self) -> str | None:
        """Return which ranks diverged from the common sequence of collectives, as a message."""
        return self._divergence_hook()

    def flight_recorder_dump(self) -> bytes | None:
        """Return torch's own record of collectives as JSON; None if there is none.

        The dump queries the events of the calls. If the driver blocks there is none: the dump would
        hold the interpreter lock for as long. A rank without calls in flight has not asked the
        driver before.
        """
        self._driver_calls.call(self._ask_driver_hook)
        if self.is_driver_blocked() or not self.prepare_thread():
            return None
        return self._flight_recorder_dump_hook()

    def prepare_thread(self) -> bool | None:
        """Let the calling thread of monitoring query events. Return success.

        `rank_sets` and `last_calls` do so themselves. On a new thread, the driver may block. Each
        thread is prepared once, as torch.cuda.set_device may call the driver each time, and holds
        the interpreter lock.
        """
        return self._prepare_thread_hook()

    def others_hang(self) -> bool | None:
        """Return whether another rank announces a hang."""
        return self._others_hang_hook()

    def announce_hang(self, hangs: bool) -> None:
        """Announce to the other ranks that training hangs, or that it continues."""
        self._announce_hang_hook(hangs)

    def _prepare_thread(self) -> bool:
        index, this_thread = self._device_index, self._this_thread
        is_prepared = getattr(this_thread, "is_prepared", False)
        if index is not None and not self._is_device_lost and not is_prepared:
            self._is_device_lost = not accelerator.current.prepare_thread(index)
            this_thread.is_prepared = True
        return not self._is_device_lost

    def _may_query(self) -> bool:
        """Whether this thread may query events. A thread of monitoring is prepared for it first.

        A thread of the script, such as one that closes the watch, keeps its device and its mode.
        """
        is_ours = threading.current_thread().name.startswith("zerowatch-")
        return not is_ours or bool(self.prepare_thread())

    def _ask_driver(self) -> None:
        """Query an event of any call, running or ended. Blocks if the driver does.

        Without any recorded call, as in DDP, there is no such event.
        """
        recent = (reversed(list(each.recent)) for each in self._groups.rank_sets())
        events = (call.end_event for calls in recent for call in calls)
        event = next((each for each in events if each is not None), None)
        if self._device_index is None or not self._may_query():
            return
        if event is None:
            accelerator.current.ask_driver()
        else:
            with suppress(RuntimeError):  # a kernel has failed, so the driver does answer
                accelerator.current.query_event(event)

    def _find_last_activity_ns(self) -> int:
        seen = [_progress(rank_set) for rank_set in self._groups.rank_sets()]
        if seen != self._seen:
            self._seen = seen
            self._changed_ns = self._now_ns()
        return self._changed_ns

    def _find_peers(self) -> Mapping[int, Heartbeat] | None:
        peers = self._thread.peers
        return {rank: beat for rank, beat in peers.items() if rank != self.rank} or None

    def _summarize_rank_sets(self) -> list[RankSetSummary]:
        unseen, may_query = num_unseen(self._groups), self._may_query()
        return [
            _summarize_rank_set(rank_set, unseen.get(rank_set.key, 0), may_query=may_query)
            for rank_set in self._groups.rank_sets()
        ]

    def _summarize_last_calls(self) -> list[CallSummary]:
        now_ns, may_query = self._now_ns(), self._may_query()
        summaries: list[CallSummary] = []
        for rank_set in self._groups.rank_sets():
            returned: set[Group] = set()  # groups in which a later call has returned
            calls = []
            for index, call in enumerate(reversed(list(rank_set.recent))):
                in_flight = _is_in_flight(call, may_query=may_query) and (
                    call.start_ns != 0 or call.group not in returned
                )
                if call.start_ns:
                    returned.add(call.group)
                if in_flight or index < CALLS_PER_RANK_SET:
                    calls.append(_summarize_call(call, now_ns, in_flight=in_flight))
            summaries += reversed(calls)
        return summaries


def flight_recorder_dump() -> bytes | None:
    """Return torch's own record of collectives as JSON; None if there is none.

    NCCL groups have a recorder of their own. All other backends share a common recorder.
    """
    names = ["_dump_fr_trace_json"]
    if dist.is_initialized() and backend_name() == "nccl":
        names.insert(0, "_dump_nccl_trace_json")
    for name in names:
        dump: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
        record = dump() if dump is not None else b""
        if b'"entries"' in record:
            return record
    return None


def _progress(rank_set: RankSet) -> tuple[int, bool, bool]:
    """Return the number of the last call, and whether the call has returned and ended."""
    if not rank_set.recent:
        return (0, True, True)
    last = rank_set.recent[-1]
    return (id(last), last.start_ns != 0, last.end_ns != 0)


def _summarize_rank_set(
    rank_set: RankSet, num_unseen_calls: int, *, may_query: bool
) -> RankSetSummary:
    numbered = (call for call in reversed(list(rank_set.recent)) if call.sequence)
    last = next(numbered, None)
    return RankSetSummary(
        key=rank_set.key,
        role=rank_set.role,
        members=rank_set.members,
        issued=rank_set.issued,
        is_waiting=last is not None and _is_in_flight(last, may_query=may_query),
        unseen=num_unseen_calls,
    )


def _is_in_flight(call: CollectiveCall, *, may_query: bool) -> bool:
    """Whether a call has not returned, or still runs. False if its end cannot be observed.

    A call that was left out, as in a graph that is captured, is settled and never has a start.
    """
    if not call.start_ns:
        return not call.settled
    is_read = call.settled and call.timed  # if so, other calls may use its events now
    if call.end_event is not None and not is_read:
        return may_query and not accelerator.current.query_event(call.end_event)
    if call.is_bound and call.stream_wait is None:
        return False  # on a device, and training has not waited for it yet
    return call.timed and not call.settled and (call.start_event is not None or not call.end_ns)


def _summarize_call(call: CollectiveCall, now_ns: int, *, in_flight: bool) -> CallSummary:
    seconds = None
    if call.settled:
        seconds = call.duration_ns / 1e9 if call.timed else None
    elif call.start_ns and (in_flight or call.start_event is None):
        seconds = ((now_ns if in_flight else call.end_ns) - call.start_ns) / 1e9
    return CallSummary(
        key=call.group.rank_set.key,
        role=call.group.rank_set.role,
        sequence=call.sequence,
        op=OPS[call.op],
        payload_bytes=call.payload_bytes,
        dtype=str(call.dtype).removeprefix("torch."),
        phase=PHASES[call.phase],
        in_flight=in_flight,
        seconds=seconds,
        is_own=call.group.role == OWN_GROUP,
    )
