"""Counts the collectives that no wrapper sees, from sequence numbers and torch's Flight Recorder.

DistributedDataParallel and functional collectives call a process group in C++. The group counts
these calls, so their number and phase are known. The Flight Recorder has the operation and the
sizes of each group's last calls, 2000 in all by default (TORCH_FR_BUFFER_SIZE). Neither shows when
a call ended: such calls have no duration, their step has no exposed time, and the coverage does not
count them as recorded.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ...metrics.catalog.labels import OPS
from .groups import CollectiveCall, Group, Groups, lowest_coverage, sequence_number

# Share of a core that reading the Flight Recorder may take. A full buffer takes about 25 ms of CPU
# time. On a busy machine a read takes a multiple of that, and steps wait for the next read.
READ_TIME_RATIO = 0.005
MIN_PAUSE_SECONDS = 0.9  # less than the pause of the watch thread, which reads
# The Flight Recorder's names of operations contain these words. The first that matches counts.
_OP_OF_WORD: Mapping[str, str] = {
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
_DTYPES: Mapping[str, torch.dtype] = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_ALL_REDUCE, _REDUCE_SCATTER = OPS.index("all_reduce"), OPS.index("reduce_scatter")

Entry = tuple[int, int, torch.dtype | None]  # index in OPS, payload bytes, dtype
_Entries = Mapping[tuple[str, int], Entry]  # by the group's name and sequence number


@dataclass(slots=True)
class UnseenCalls:
    """The calls of a step that process groups counted, and that were not recorded.

    Attributes:
        missing: Number of these calls, by group.
        names: The names of these groups. The script may destroy the groups before they are read.
        ranges: The group, phase, and first and last sequence number of each stretch of calls.
        counted_at: When they were counted, by the reader's clock.
    """

    missing: Mapping[Group, int]
    names: Mapping[Group, str]
    ranges: list[tuple[Group, int, int, int]]
    counted_at: float


class UnseenCallCounter:
    """Reads the sequence numbers of all groups where a phase ends, on the training thread.

    Args:
        groups: The process groups.
        now: The clock of the `FlightRecorder`.
    """

    def __init__(self, groups: Groups, now: Callable[[], float] = time.monotonic) -> None:
        self._groups, self._now = groups, now
        self._reached: dict[Group, int] = {}
        self._ranges: list[tuple[Group, int, int, int]] = []
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._find_groups()
        self._groups.drain_counts()
        self._ranges.clear()
        self._reached.clear()
        self.mark(0)
        self._ranges.clear()

    def mark(self, phase: int) -> None:
        """Attribute the calls since the last mark to a phase, given by its index in PHASES."""
        for known in self._groups.known():
            group = known.reference()
            if group is None or not known.counts_calls:
                continue
            number = sequence_number(group)
            before = self._reached.get(known, known.seen_from)
            if number > before:
                self._ranges.append((known, phase, before + 1, number))
            self._reached[known] = number

    def take(self) -> tuple[UnseenCalls | None, float | None]:
        """Return the unseen calls since the last take, if any, and the coverage."""
        self._find_groups()
        ranges, self._ranges = self._ranges, []
        counts = self._groups.drain_counts()
        coverage = lowest_coverage(counts)
        missing = {known: counted - recorded for known, counted, recorded in counts}
        missing = {known: number for known, number in missing.items() if number > 0}
        if not missing:
            return None, coverage
        kept = [each for each in ranges if each[0] in missing]
        groups = {known: known.reference() for known in missing}
        names = {known: group.group_name for known, group in groups.items() if group is not None}
        return UnseenCalls(missing, names, kept, self._now()), coverage

    def _find_groups(self) -> None:
        """Find groups that no wrapped call has used, such as the group of DDP."""
        for group in list(c10d._world.pg_map):
            self._groups.find(group)


def num_unseen(groups: Groups) -> dict[str, int]:
    """Return how many calls no wrapper has seen since the last step, by the key of the rank set.

    Any thread may call it. Only rank sets of groups in this process are contained, and no group
    whose calls run on a device: the host of a rank that waits there may be a step ahead.
    """
    found: dict[str, int] = {}
    for known in groups.known():
        counted = None if known.on_device else known.num_issued()
        if counted is not None:
            recorded = sum(
                each.recorded - each.replayed + each.num_under_way() for each in known.records()
            )
            key = known.rank_set.key
            found[key] = found.get(key, 0) + max(0, counted - recorded)
    return found


class FlightRecorder:
    """Finds the calls that no wrapper has seen. Used on the watch thread.

    Args:
        dump: Returns the Flight Recorder's content; None if this version of torch has none.
        now: A monotonic clock, in seconds.
        cpu_now: The CPU time of the calling thread, in seconds.
    """

    def __init__(
        self,
        dump: Callable[[], Mapping[str, Any]] | None = None,
        now: Callable[[], float] = time.monotonic,
        cpu_now: Callable[[], float] = time.thread_time,
    ) -> None:
        self._dump = dump or _dump_of_torch()
        self._now, self._cpu_now = now, cpu_now
        self._read_at, self._due = float("-inf"), 0.0
        self._entries: _Entries = {}
        self._recorded: dict[Group, Counter[tuple[int, int]]] = {}

    def add_recorded(self, calls: Iterable[CollectiveCall]) -> None:
        """Note the recorded calls since the last step, which are in the Flight Recorder too."""
        for call in calls:
            counter = self._recorded.setdefault(call.group, Counter())
            runs_all_reduce = call.op == _REDUCE_SCATTER and call.group.backend == "gloo"
            counter[_ALL_REDUCE if runs_all_reduce else call.op, call.payload_bytes] += 1

    def read_for(self, unseen: UnseenCalls, at_once: bool) -> bool:
        """Read the Flight Recorder if it is time. Return whether the calls can be looked up.

        Args:
            unseen: The calls of a step.
            at_once: Whether to read now, because the watch ends.
        """
        if self._dump is None or unseen.counted_at <= self._read_at:
            return True
        began = self._now()
        if began < self._due and not at_once:
            return False
        self._read_at, cpu_began = began, self._cpu_now()
        self._entries = dict(_entries(self._dump()))
        cost_seconds = self._cpu_now() - cpu_began
        self._due = began + max(MIN_PAUSE_SECONDS, cost_seconds / READ_TIME_RATIO)
        return True

    def end_step(self, unseen: UnseenCalls | None) -> list[CollectiveCall]:
        """Return the calls of a step that could be identified.

        The calls of a group count only if all of them were identified.

        Args:
            unseen: The unseen calls of the step; None if there are none.
        """
        recorded, self._recorded = self._recorded, {}
        found: list[CollectiveCall] = []
        if unseen is None:
            return found
        for known, number in unseen.missing.items():
            calls = self._find_in(known, unseen, recorded.get(known, Counter()))
            found += calls if len(calls) == number else []
        return found

    def _find_in(
        self, known: Group, unseen: UnseenCalls, recorded: Counter[tuple[int, int]]
    ) -> list[CollectiveCall]:
        name = unseen.names.get(known)
        calls = []
        for owner, phase, first, last in unseen.ranges:
            for number in range(first, last + 1) if owner is known else ():
                entry = self._entries.get((name or "", number))
                if entry is None:
                    continue
                op, size, dtype = entry
                if recorded[op, size] > 0:
                    recorded[op, size] -= 1
                    continue
                calls.append(_untimed_call(op, known, size, dtype, phase))
        return calls


def _untimed_call(
    op: int, group: Group, size: int, dtype: torch.dtype | None, phase: int
) -> CollectiveCall:
    call = CollectiveCall(op, group, size, dtype, phase)
    call.timed, call.is_lost = False, True
    call.issued_ns = call.wait_phase = 0
    call.settle()
    return call


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Entry]]:
    for each in content.get("entries", ()):
        entry = None if each.get("is_p2p") else _entry(each)
        if entry is not None:
            yield (each["process_group"][0], each["collective_seq_id"]), entry


def _entry(each: Mapping[str, Any]) -> Entry | None:
    """Return the operation and its payload; None for one that is not known."""
    name = str(each["profiling_name"]).partition(":")[2]
    op = next((label for word, label in _OP_OF_WORD.items() if word in name), None)
    if op is None:
        return None
    if op == "barrier":
        return OPS.index(op), 0, None
    side = "output" if op == "all_gather" else "input"
    dtypes = [_DTYPES.get(str(one)) for one in each[f"{side}_dtypes"]]
    sizes = [_product(size) for size in each[f"{side}_sizes"]]
    if not dtypes or None in dtypes or len(dtypes) not in (1, len(sizes)):
        return None
    known = [one for one in dtypes if one is not None]
    known *= len(sizes) if len(known) == 1 else 1
    payload = sum(size * one.itemsize for size, one in zip(sizes, known, strict=True))
    return OPS.index(op), payload, known[0]


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _dump_of_torch() -> Callable[[], Mapping[str, Any]] | None:
    """Return a function that reads the Flight Recorder of this process, without stack traces.

    NCCL groups have a recorder of their own. All other backends share a common recorder.
    """
    names = ("_dump_fr_trace", "_dump_nccl_trace")  # torch before 2.8 has only the latter
    found = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    dumps = [dump for dump in found if dump is not None]
    if not dumps:
        return None
    return lambda: _merged([pickle.loads(dump(True, False, False)) for dump in dumps])


def _merged(contents: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge the content of several recorders. Each has the calls of its own backends.

    If two have calls of the same group, those of the later recorder count: the group may run NCCL
    and gloo, which number their calls apart, and the sequence number of the group is that of NCCL.
    """
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for content in contents:
        of_this: dict[str, list[Mapping[str, Any]]] = {}
        for each in content.get("entries", ()):
            of_this.setdefault(each["process_group"][0], []).append(each)
        by_group |= of_this
    return {"entries": [each for entries in by_group.values() for each in entries]}
