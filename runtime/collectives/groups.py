"""Records collectives, process groups, and the sets of ranks that collectives run on."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed import distributed_c10d as c10d

from ...metrics.catalog.labels import GROUPS, OPS
from ..common import accelerator
from ..common.group_backend import backend_name, host_backend
from ..common.hot_path import BEFORE_ALL as BEFORE_ALL
from ..common.hot_path import NEVER as NEVER
from ..common.hot_path import CollectiveCall as CollectiveCall
from ..common.hot_path import GroupFields, RankSetFields
from .collective_table import WIRE_BY_PAYLOAD, wire_factor

if TYPE_CHECKING:
    from ..common.accelerator import Event

RoleOf = Callable[[ProcessGroup], str]
# Number of recent calls that are kept for each rank set, to compare ranks and for hang reports.
# DeepSpeed issues up to some hundred calls per step.
RECENT_CALLS = 8192


class RankSet(RankSetFields):
    """Holds a set of global ranks, and the calls of all process groups of exactly these ranks.

    All members issue the calls of all these groups in the same order. DeepSpeed clones the world
    group, so a missing call is found only if the calls of both groups are compared together.

    Attributes:
        members: The ranks, in the groups' order.
        key: Identifies the rank set. All members have the same key.
        recent: The last calls, in the order in which they were issued.
        issued: Number of the last call that was numbered, from 1 on; 0 before the first.
        roles: The roles of its process groups.
    """

    __slots__ = ("key", "members", "roles")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.key = f"{len(members)}-{zlib.crc32(repr(members).encode()):08x}"
        self.issued = 0
        self.recent: deque[CollectiveCall] = deque(maxlen=RECENT_CALLS)
        self.roles: list[str] = []

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def role(self) -> str:
        """The most specific role of its groups."""
        return min(self.roles, key=GROUPS.index, default="other")

    def forget_until(self, number: int) -> None:
        """Forget the calls up to this number, and number the calls after it from 1 on."""
        later = [call for call in self.recent.copy() if call.sequence > number]
        for call in later:
            call.sequence -= number
        self.recent.clear()
        self.recent.extend(later)
        self.issued -= number


class Group(GroupFields):
    """Records one process group.

    Attributes:
        backend: The name of its backend, such as "nccl".
        on_device: Whether its collectives run on the accelerator's streams, timed by events.
        device_index: The device that the group is bound to; None if it is not bound.
        counts_calls: Whether the backend has a sequence number. MPI and custom backends have none.
        sequence_number: Returns the sequence number that counts this record's calls.
        recorded: Number of recorded calls, in units of the group's own sequence number. Counting
            starts at the sequence number `seen_from`.
        under_way: The calls under way that count by the difference of sequence numbers.
        point_to_point: A second record for messages between two members. Messages do not queue with
            the group's collectives, and may have another role.
        host_record: A second record for the calls on tensors in host memory of a group on a device.
            Another backend runs these calls, and the host's clock times them.
        replayed: Number of calls in replays of captured graphs since the last drain. Such calls are
            neither counted by the group nor recorded.
        busy_until_ns: The time when its last settled call with an exact end ended.
        maybe_busy_until_ns: The upper bound of the end of the calls since then. NEVER if nothing
            has waited for the last one.
    """

    __slots__ = (
        "_wire_factors",
        "backend",
        "counts_calls",
        "device_index",
        "host_record",
        "point_to_point",
        "replayed",
        "role",
        "seen_from",
        "sequence_number",
        "size",
        "under_way",
    )

    def __init__(
        self, group: ProcessGroup, role: str, rank_set: RankSet, *, for_host: bool = False
    ) -> None:
        self.reference = weakref.ref(group)
        self.role = role
        self.size: int = group.size()
        self.backend = host_backend(group).name() if for_host else backend_name(group)
        is_of_device = self.backend == accelerator.current.collective_backend
        self.on_device = is_of_device and not for_host
        bound = getattr(group, "bound_device_id", None)
        self.device_index: int | None = None if bound is None else bound.index
        self.sequence_number = _host_sequence_number if for_host else sequence_number
        counter: Any = host_backend(group) if for_host else group
        try:
            self.seen_from: int = counter._get_sequence_number_for_group()
            self.counts_calls = True
        except RuntimeError:
            self.seen_from = 0
            self.counts_calls = False
        self.recorded = self.replayed = 0
        self.under_way: dict[CollectiveCall, UncountedCall] = {}
        self.rank_set = rank_set
        self.point_to_point: Group | None = None
        self.host_record: Group | None = None
        self.busy_until_ns = self.maybe_busy_until_ns = BEFORE_ALL
        self._wire_factors = [wire_factor(op, self.backend, self.size) for op in OPS]

    @classmethod
    def of_other_process(
        cls, role: str, size: int, backend: str, rank_set: RankSet, *, on_device: bool
    ) -> Group:
        """Return the record of a group that only another process has, which records its calls."""
        group = cls.__new__(cls)
        group.reference = lambda: None
        group.role, group.size, group.backend = role, size, backend
        group.on_device, group.device_index = on_device, None
        group.point_to_point = group.host_record = None
        group.counts_calls = False
        group.seen_from = group.recorded = group.replayed = 0
        group.rank_set = rank_set
        group.busy_until_ns = group.maybe_busy_until_ns = BEFORE_ALL
        group._wire_factors = [wire_factor(op, backend, size) for op in OPS]
        return group

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        """Return the bytes sent per payload byte. The operation is given by its index in OPS."""
        if op in WIRE_BY_PAYLOAD:
            return wire_factor(OPS[op], self.backend, self.size, payload_bytes)
        return self._wire_factors[op]

    def num_issued(self) -> int | None:
        """Return how many calls the group counted since it was first seen.

        Returns:
            The number; None if the group is deleted, or its backend does not count.
        """
        group = self.reference()
        if group is None or not self.counts_calls:
            return None
        return self.sequence_number(group) - self.seen_from

    def begin_count(self, calls: Sequence[CollectiveCall], process_group: ProcessGroup) -> None:
        """Begin to count calls that the process group is about to issue together."""
        number = self.sequence_number(process_group)
        self.under_way[calls[0]] = UncountedCall(number, len(calls))

    def end_count(self, calls: Sequence[CollectiveCall]) -> None:
        """Count the calls of `begin_count`, if it was called, as the process group counted them."""
        uncounted, process_group = self.under_way.get(calls[0]), self.reference()
        if uncounted is not None and process_group is not None:
            number = self.sequence_number(process_group) - uncounted.begins_at
            self.recorded += number  # before `under_way` changes: another thread may drain
        self.under_way.pop(calls[0], None)

    def num_under_way(self) -> int:
        """Return how many calls of `under_way` the group may have counted since the last drain."""
        return sum(each.num_calls for each in list(self.under_way.values()))

    def drain_under_way(self, missing: int, number: int) -> int:
        """Return how many calls of `under_way` are among those that this drain has not recorded.

        They count now. When they return, only what the group has counted from now on counts.

        Args:
            missing: Calls counted but not recorded.
            number: The group's sequence number up to which this drain counts.
        """
        found = 0
        for each in list(self.under_way.values()):
            taken = max(0, min(each.num_calls, missing - found))
            each.num_calls -= taken
            each.begins_at = number
            found += taken
        return found

    def records(self) -> list[Group]:
        """Return this record, and the further records of the same process group."""
        found = [self]
        for further in (self.host_record, self.point_to_point):
            found += [] if further is None else further.records()
        return found

    def set_role(self, role: str) -> None:
        """Set the role, also of the calls on tensors in host memory."""
        self.role = role
        if self.host_record is not None:
            self.host_record.role = role


class UncountedCall:
    """A call under way whose group may count it as more or less than one.

    Attributes:
        begins_at: The group's sequence number where the call began, or at the last drain.
        num_calls: Number of its calls that no drain has counted.
    """

    __slots__ = ("begins_at", "num_calls")

    def __init__(self, begins_at: int, num_calls: int) -> None:
        self.begins_at, self.num_calls = begins_at, num_calls


class StreamWait:
    """Marks where the compute stream begins to wait for one or more calls.

    Attributes:
        event: The event recorded at that point on the compute stream.
        num_calls: Number of calls in this wait whose times have not been read yet.
    """

    __slots__ = ("event", "num_calls")

    def __init__(self, event: Event, num_calls: int) -> None:
        self.event = event
        self.num_calls = num_calls


GroupCounts = tuple[Group, int, int]  # a group, its calls that it counted, and those recorded


class Groups:
    """Records the process groups seen so far, by weak references.

    Attributes:
        by_id: The records by the id of the process group. A later group may have the same id.
    """

    def __init__(self) -> None:
        self._role_of: RoleOf = _unknown_role
        self._p2p_role_of: RoleOf = _unknown_role
        self.by_id: dict[int, Group] = {}
        self._rank_sets: dict[tuple[int, ...], RankSet] = {}
        self._world: weakref.ref[ProcessGroup] | None = None
        # The number of the last call before the script had this default process group.
        self._issued_before: dict[RankSet, int] = {}

    def rank_sets(self) -> list[RankSet]:
        """Return the rank sets seen so far."""
        return list(self._rank_sets.values())

    def find(self, group: object, *, point_to_point: bool = False) -> Group | None:
        """Return the record of a process group, or None for any other object.

        The record is made at the first call. There is none if the script had destroyed the group
        before.

        Args:
            group: The argument `group` of a call.
            point_to_point: Whether to return the record of messages between two members.
        """
        known = self.by_id.get(id(group))
        if known is None or known.reference() is not group:
            if not isinstance(group, ProcessGroup):
                return None
            self._find_world()
            rank_set = self._rank_set_of(group)
            if rank_set is None:
                return None
            known = self.by_id[id(group)] = Group(group, self._role_of(group), rank_set)
            self._label_rank_sets()
        return self._point_to_point(known) if point_to_point else known

    def host_record(self, known: Group) -> Group:
        """Return the record of a group's calls on tensors in host memory.

        It is the record itself if the group has no backend for them.
        """
        group = known.reference()
        if known.host_record is None and group is not None:
            try:
                known.host_record = Group(group, known.role, known.rank_set, for_host=True)
            except RuntimeError:
                return known
        return known.host_record or known

    def set_roles(self, role_of: RoleOf, p2p_role_of: RoleOf) -> None:
        """Set how roles are found. The roles of the groups seen so far are found again.

        Args:
            role_of: Returns the role of a group's collectives.
            p2p_role_of: Returns the role of messages between two members.
        """
        self._role_of, self._p2p_role_of = role_of, p2p_role_of
        for known in list(self.by_id.values()):
            group = known.reference()
            if group is not None:
                known.set_role(role_of(group))
                if known.point_to_point is not None:
                    known.point_to_point.set_role(p2p_role_of(group))
        self._label_rank_sets()

    def forget_destroyed(self) -> None:
        """Start over if the script has destroyed the default process group and made another one.

        It has destroyed all earlier groups then. Perhaps because one rank has failed: the ranks
        have not issued the same calls on them, so the first call of the new groups has number 1.
        This does not depend on when a rank calls this. No calls may be compared meanwhile.
        """
        self._find_world()
        issued_before, self._issued_before = self._issued_before, {}
        if not issued_before:
            return
        for key, known in list(self.by_id.items()):
            if known.reference() not in c10d._world.pg_map:
                self.by_id.pop(key, None)
        living = {known.rank_set for known in self.known()}
        for rank_set, number in issued_before.items():
            rank_set.forget_until(number)
            if not rank_set.issued and rank_set not in living:
                self._rank_sets.pop(rank_set.members, None)
        self._label_rank_sets()

    def drain_coverage(self) -> float | None:
        """Return the lowest coverage of any group since the last drain; None without calls.

        The coverage of a group is 1 - max(0, counted - recorded) / counted. `counted` is the number
        of calls that the group itself has counted, and of the calls in replays of captured graphs.
        """
        return lowest_coverage(self.drain_counts())

    def known(self) -> list[Group]:
        """Return the groups seen so far."""
        return list(self.by_id.values())

    def drain_counts(self) -> list[GroupCounts]:
        """Return each group with calls since the last drain: the calls counted, and recorded.

        Groups whose backend does not count are left out.
        """
        counts = []
        for key, known in list(self.by_id.items()):
            counted = known.num_issued()
            if counted is None:
                if known.reference() is None:
                    del self.by_id[key]
                continue
            records = known.records()
            issued = counted + sum(each.replayed for each in records)
            if issued > 0:
                recorded = sum(each.recorded for each in records)  # gloo counts messages too
                for each in records:
                    if each.under_way and each.sequence_number is known.sequence_number:
                        number = known.seen_from + counted
                        recorded += each.drain_under_way(issued - recorded, number)
                for each in records:
                    each.recorded = each.replayed = 0
                    if each.host_record is not None:
                        each.host_record.seen_from += each.host_record.num_issued() or 0
                counts.append((known, issued, recorded))
                known.seen_from += counted
        return counts

    def _find_world(self) -> None:
        """Note the last calls before the present default process group, if it is another one.

        Nothing changes if the script exchanges the default group and keeps the earlier one.
        """
        world, before = torch.distributed.group.WORLD, self._world
        if world is None or (before is not None and before() in c10d._world.pg_map):
            return
        self._world = weakref.ref(world)
        self._issued_before = {each: each.issued for each in self.rank_sets()}

    def _point_to_point(self, known: Group) -> Group:
        group = known.reference()
        if known.point_to_point is None and group is not None:
            known.point_to_point = Group(group, self._p2p_role_of(group), known.rank_set)
        return known.point_to_point or known

    def _rank_set_of(self, group: ProcessGroup) -> RankSet | None:
        """Return the rank set of a group; None if torch has forgotten the group."""
        try:
            members = tuple(get_process_group_ranks(group))
        except KeyError:
            return None
        return self._rank_sets.setdefault(members, RankSet(members))

    def _label_rank_sets(self) -> None:
        for rank_set in self.rank_sets():
            groups = (group for group in list(self.by_id.values()) if group.rank_set is rank_set)
            rank_set.roles = [group.role for group in groups] or rank_set.roles


def lowest_coverage(counts: Iterable[GroupCounts]) -> float | None:
    """Return the lowest coverage of any group; None without calls."""
    return min(
        (1 - max(0, counted - recorded) / counted for _, counted, recorded in counts),
        default=None,
    )


def sequence_number(group: ProcessGroup) -> int:
    """Return how many operations a group has issued, including operations not from Python.

    It is always 0 for a group whose backend does not count, such as MPI.
    """
    try:
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:
        return 0
    return number


def _host_sequence_number(group: ProcessGroup) -> int:
    """Return how many operations on tensors in host memory a group has issued."""
    number: int = host_backend(group)._get_sequence_number_for_group()
    return number


def _unknown_role(group: ProcessGroup) -> str:
    return "world" if group is torch.distributed.group.WORLD else "other"
