"""The process groups that collectives ran on: role, size, backend, and how many they counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from ...metrics.catalog.labels import OPS
from .wire import wire_factor

RoleOf = Callable[[ProcessGroup], str]


class Group:
    """One process group as the tap saw it.

    `recorded` counts calls recorded, in units of the group's own sequence number, since `seen_from`
    was that number.
    """

    __slots__ = ("_factors", "backend", "recorded", "reference", "role", "seen_from", "size")

    def __init__(self, group: ProcessGroup, role: str) -> None:
        self.reference = weakref.ref(group)
        self.role = role
        self.size: int = group.size()
        self.backend = _backend_name(group)
        self.seen_from = sequence_number(group)
        self.recorded = 0
        self._factors = [wire_factor(op, self.backend, self.size) for op in OPS]

    def wire_factor(self, op: int) -> float:
        """Bytes sent per payload byte for an operation, given by its place in OPS."""
        return self._factors[op]

    def counted(self) -> int | None:
        """How many the group itself counted since it was first seen; None once it is gone."""
        group = self.reference()
        return None if group is None else sequence_number(group) - self.seen_from


class Groups:
    """Knows every process group by identity, without keeping any alive."""

    def __init__(self) -> None:
        self._role_of: RoleOf = _unknown_role
        self._known: dict[int, Group] = {}

    def find(self, group: object) -> Group | None:
        """Return what is known of a group, looking it up the first time; None if it is none."""
        known = self._known.get(id(group))
        if known is not None and known.reference() is group:
            return known
        if not isinstance(group, ProcessGroup):
            return None
        known = self._known[id(group)] = Group(group, self._role_of(group))
        return known

    def name_roles(self, role_of: RoleOf) -> None:
        """Say what each group is for, also of the groups known already."""
        self._role_of = role_of
        for known in list(self._known.values()):
            group = known.reference()
            if group is not None:
                known.role = role_of(group)

    def take_coverage(self) -> float | None:
        """Return the least share of calls recorded since the last time; None if there were none.

        Coverage of a group = 1 - max(0, counted - recorded) / counted.
        """
        shares = []
        for key, known in list(self._known.items()):
            counted = known.counted()
            if counted is None:
                del self._known[key]
            elif counted > 0:
                shares.append(1 - max(0, counted - known.recorded) / counted)
                known.seen_from += counted
                known.recorded = 0
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
