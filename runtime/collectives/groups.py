"""The process groups that collectives ran on: role, size, backend, and how many they counted."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from ...metrics.catalog.labels import GROUPS, OPS
from .wire_bytes import wire_factor

if TYPE_CHECKING:
    from .call import CollectiveCall

RoleOf = Callable[[ProcessGroup], str]
# The last calls of a group that are kept, for the exchange and for reports of hangs. DeepSpeed
# issues up to some hundreds a step.
RECENT_CALLS = 8192
_REDUCE = OPS.index("reduce")  # the one whose factor depends on the payload


class RankSet:
    """The ranks of one or more process groups: what they issue, they issue in the same order.

    DeepSpeed makes a clone of the world group, so that the calls on either must be seen together to
    tell which rank has left one out. `recent` holds the last calls in the order in which they were
    issued, of which `issued` are numbered. `key` names the rank set alike on all its members.
    """

    __slots__ = ("issued", "key", "members", "recent", "roles")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.key = f"{len(members)}-{zlib.crc32(repr(members).encode()):08x}"
        self.issued = 0
        self.recent: deque[CollectiveCall] = deque(maxlen=RECENT_CALLS)
        self.roles: list[str] = []

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.members)

    @property
    def role(self) -> str:
        """The role of its groups; of several, that which says most."""
        return min(self.roles, key=GROUPS.index, default="other")


class Group:
    """One process group as the tap saw it.

    `recorded` counts calls recorded, in units of the group's own sequence number, since `seen_from`
    was that number. `point_to_point` is a second record, of the messages between two members: these
    do not queue with the group's collectives, and may serve another role.
    """

    __slots__ = (
        "_factors",
        "backend",
        "busy_until_ns",
        "point_to_point",
        "rank_set",
        "recorded",
        "reference",
        "role",
        "seen_from",
        "size",
    )

    def __init__(self, group: ProcessGroup, role: str, rank_set: RankSet) -> None:
        self.reference = weakref.ref(group)
        self.role = role
        self.size: int = group.size()
        self.backend = _backend_name(group)
        self.seen_from = sequence_number(group)
        self.recorded = 0
        self.rank_set = rank_set
        self.point_to_point: Group | None = None
        self.busy_until_ns = -(2**63)
        self._factors = [wire_factor(op, self.backend, self.size) for op in OPS]

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        """Bytes sent per payload byte for an operation, given by its place in OPS."""
        if op == _REDUCE:
            return wire_factor("reduce", self.backend, self.size, payload_bytes)
        return self._factors[op]

    def counted(self) -> int | None:
        """How many the group itself counted since it was first seen; None once it is gone."""
        group = self.reference()
        return None if group is None else sequence_number(group) - self.seen_from


class Groups:
    """Knows every process group by identity, without keeping any alive."""

    def __init__(self) -> None:
        self._role_of: RoleOf = _unknown_role
        self._p2p_role_of: RoleOf = _unknown_role
        self._known: dict[int, Group] = {}
        self._rank_sets: dict[tuple[int, ...], RankSet] = {}

    def rank_sets(self) -> list[RankSet]:
        """Return the rank sets of ranks seen so far."""
        return list(self._rank_sets.values())

    def find(self, group: object, *, point_to_point: bool = False) -> Group | None:
        """Return what is known of a group, looking it up the first time; None if it is none.

        Args:
            group: What a call was given for a group.
            point_to_point: Whether to return the record of messages between two members.
        """
        known = self._known.get(id(group))
        if known is None or known.reference() is not group:
            if not isinstance(group, ProcessGroup):
                return None
            rank_set = self._rank_set_of(group)
            known = self._known[id(group)] = Group(group, self._role_of(group), rank_set)
            self._label_rank_sets()
        return self._pairs(known) if point_to_point else known

    def set_roles(self, role_of: RoleOf, p2p_role_of: RoleOf) -> None:
        """Say what each group is for, also of the groups known already."""
        self._role_of, self._p2p_role_of = role_of, p2p_role_of
        for known in list(self._known.values()):
            group = known.reference()
            if group is not None:
                known.role = role_of(group)
                if known.point_to_point is not None:
                    known.point_to_point.role = p2p_role_of(group)
        self._label_rank_sets()

    def _pairs(self, known: Group) -> Group:
        group = known.reference()
        if known.point_to_point is None and group is not None:
            known.point_to_point = Group(group, self._p2p_role_of(group), known.rank_set)
        return known.point_to_point or known

    def _rank_set_of(self, group: ProcessGroup) -> RankSet:
        members = tuple(get_process_group_ranks(group))
        return self._rank_sets.setdefault(members, RankSet(members))

    def _label_rank_sets(self) -> None:
        for rank_set in self.rank_sets():
            groups = (group for group in list(self._known.values()) if group.rank_set is rank_set)
            rank_set.roles = [group.role for group in groups] or rank_set.roles

    def drain_coverage(self) -> float | None:
        """Return the least share of calls recorded since the last time; None if there were none.

        Coverage of a group = 1 - max(0, counted - recorded) / counted.
        """
        shares = []
        for key, known in list(self._known.items()):
            counted = known.counted()
            if counted is None:
                del self._known[key]
            elif counted > 0:
                recorded, known.recorded = known.recorded, 0
                messages = known.point_to_point
                if messages is not None:  # gloo counts these too
                    recorded, messages.recorded = recorded + messages.recorded, 0
                shares.append(1 - max(0, counted - recorded) / counted)
                known.seen_from += counted
        return min(shares, default=None)


def sequence_number(group: ProcessGroup) -> int:
    """How many operations a group has issued; it counts those that bypass Python too."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return number


def _unknown_role(group: ProcessGroup) -> str:
    return "world" if group is torch.distributed.group.WORLD else "other"


def _backend_name(group: ProcessGroup) -> str:
    """Name the backend that serves the accelerator's tensors, or the CPU's where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:  # a group for CPU tensors in a job on GPUs
        name = group._get_backend(torch.device("cpu")).name()
    return name
