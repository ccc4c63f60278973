"""Merges the reports of a rank set's members, up to the last call that all members reported."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..divergence import Divergence, diverged_ranks
from .rank_messages import (
    MAX_PENDING_VALUES,
    NO_DURATIONS,
    NO_SIGNATURES,
    CallReport,
    Durations,
    SequenceHash,
    Signatures,
)

T = TypeVar("T")
Values = npt.NDArray[Any]

# Maximum number of signatures of the common sequence that are kept to attribute a divergence. This
# is enough for some steps of a big model.
MAX_HISTORY = 4096
# Maximum number of names that are kept. A job whose sizes always change has new signatures always.
MAX_NAMES = 4096


class ReportMerger:
    """Merges the reports of a rank set's members, and finds the first call in which they differ.

    After the first divergence, nothing is compared. An additional or missing call on one member
    shifts the numbers of all later calls, so it is unknown which calls belong together.

    Args:
        members: The ranks that send reports to this rank. The value contains the ranks that a
            report covers: the member itself, or a block whose reports are already merged.

    Attributes:
        divergence: The first call in which members differ. None if there is no divergence yet.
        names: The readable form of each signature.
    """

    def __init__(self, members: Mapping[int, Sequence[int]]) -> None:
        self.divergence: Divergence | None = None
        self.names: dict[int, str] = {}
        self._ranks = members
        self._expected = set(members)
        self._members: dict[int, _MemberState] = {}
        self._history: deque[int] = deque(maxlen=MAX_HISTORY)
        self._history_hash: SequenceHash | None = None
        self._history_end = 0  # number of the first call that is not in `_history_hash`

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part now."""
        return sum(len(self._ranks[member]) for member in self._members)

    def add(self, member: int, report: CallReport, names: Mapping[int, str]) -> None:
        """Add the report of a member."""
        self._expected.add(member)
        if member in self._members:
            self._members[member].add(report)
        else:
            self._members[member] = _MemberState(report)
        if self.divergence is None:
            self.names.update(names)
            if len(self.names) > MAX_NAMES:
                self._discard_used_names()

    def exclude(self, member: int) -> None:
        """Leave a member out until it reports again."""
        self._expected.discard(member)
        self._members.pop(member, None)

    def drain(self) -> CallReport | None:
        """Return the calls that all members have newly reported, or None if there are none."""
        if not self._members or not self._expected <= self._members.keys():
            return None
        first_issued, prefix_hash, signatures = self._drain_signatures()  # may find a divergence
        first_timed, durations = self._drain_durations()
        if not len(durations) and not len(signatures):
            return None
        return CallReport(
            first_timed=first_timed,
            durations=durations,
            first_issued=first_issued,
            signatures=signatures,
            prefix_hash=prefix_hash,
        )

    def _drain_durations(self) -> tuple[int, Durations]:
        """Return the shortest duration of each call, from the member that waited least.

        The duration is NaN if no member could time the call, and for all calls from the divergence
        on.
        """
        ranges = [member.timed for member in self._members.values()]
        first, end = _intersection(ranges)
        if first >= end:
            return first, NO_DURATIONS
        least: Durations = ranges[0].between(first, end).copy()
        for member_range in ranges[1:]:
            np.fmin(least, member_range.between(first, end), out=least)
        for member_range in ranges:
            member_range.discard(end)
        if self.divergence is not None:
            least[max(0, self.divergence.sequence - first) :] = np.nan
        return first, least

    def _drain_signatures(self) -> tuple[int, SequenceHash | None, Signatures]:
        """Return the first number, the prefix hash and the signatures of the common calls."""
        members = self._members
        first, end = _intersection([member.issued for member in members.values()])
        if self.divergence is not None:
            for member in members.values():  # no longer compared
                member.issued.discard(member.issued.end)
            return 0, None, NO_SIGNATURES
        if first >= end:
            return self._history_end, self._history_hash, NO_SIGNATURES
        for member in members.values():
            member.discard_issued(first)
        prefix_hash = self._compare_hashes(first)
        rows = {name: member.issued.between(first, end) for name, member in members.items()}
        common = self._compare_signatures(first, rows)
        self._history_end = first + len(common)
        self._history_hash = None if prefix_hash is None else prefix_hash.extended(common)
        self._history.extend(common.tolist())
        for member in members.values():
            member.issued.discard(end)
        return first, prefix_hash, common

    def _compare_hashes(self, first: int) -> SequenceHash | None:
        """Return the hash of the calls before number `first`.

        Members whose own hash differs have diverged.
        """
        hashes = {
            name: member.prefix_hash
            for name, member in self._members.items()
            if member.prefix_hash is not None
        }
        for member in self._members.values():
            member.prefix_hash = None
        right = self._history_hash if self._history_end == first else None
        if right is None:
            if not hashes:
                return None
            right = Counter(hashes.values()).most_common(1)[0][0]
        hashes = {name: each for name, each in hashes.items() if each.since == right.since}
        differing = tuple(name for name, each in hashes.items() if each != right)
        if differing:
            # If only two members differ, nobody can decide which of them is right.
            is_majority = right is self._history_hash or 2 * len(differing) < len(hashes)
            diverged = differing if is_majority else tuple(hashes)
            issued = {name: "other calls before it" for name in diverged}
            for member in self._members.values():  # the numbers of some may be shifted already
                member.timed.discard(first)
            self.divergence = Divergence(
                sequence=first,
                issued=self._by_rank(dict.fromkeys(self._members, "the same before it") | issued),
                diverged=tuple(self._by_rank(issued)),
            )
        return right

    def _compare_signatures(self, first: int, rows: Mapping[int, Signatures]) -> Signatures:
        """Return the common prefix of all rows. If the rows differ, record the divergence."""
        reference = next(iter(rows.values()))
        expected = reference.tobytes()
        if self.divergence is not None or all(row.tobytes() == expected for row in rows.values()):
            return reference
        differs = np.any([row != reference for row in rows.values()], axis=0)
        at = int(differs.argmax())
        history = [*self._history, *reference[:at].tolist()]
        values = self._by_rank({member: int(row[at]) for member, row in rows.items()})
        self.divergence = Divergence(
            sequence=first + at,
            issued={rank: self.names.get(value, "another call") for rank, value in values.items()},
            diverged=diverged_ranks(values, history),
        )
        return reference[:at]

    def _by_rank(self, by_member: Mapping[int, T]) -> dict[int, T]:
        return {rank: value for name, value in by_member.items() for rank in self._ranks[name]}

    def _discard_used_names(self) -> None:
        """Keep only the names of signatures that have not been compared yet."""
        pending = {
            signature
            for member in self._members.values()
            for signature in member.issued.values.tolist()
        }
        self.names = {one: name for one, name in self.names.items() if one in pending}


class NumberedRange:
    """Holds the latest contiguous run of numbered values, which arrive in pieces.

    Attributes:
        first: Number of the first value.
        values: The values.
    """

    def __init__(self, first: int, values: Values) -> None:
        self.first = first
        self.values = values

    @property
    def end(self) -> int:
        """The number of the next value."""
        return self.first + len(self.values)

    def add(self, first: int, values: Values) -> bool:
        """Append a piece that starts at number `first`. Return False if there is a gap before it.

        Values before a gap are discarded. If there are more than MAX_PENDING_VALUES values, the
        oldest values are discarded.
        """
        if first > self.end:
            self.first, self.values = first, values
            return False
        new = values[self.end - first :]
        if len(new):
            self.values = np.concatenate((self.values, new)) if len(self.values) else new
            self.discard(self.end - MAX_PENDING_VALUES)
        return True

    def between(self, first: int, end: int) -> Values:
        """Return the values from number `first` up to `end`. All values must be present."""
        return self.values[first - self.first : end - self.first]

    def discard(self, before: int) -> None:
        """Discard the values with numbers below `before`."""
        if before > self.first:
            self.first, self.values = before, self.values[before - self.first :]


class _MemberState:
    """Holds the reported values of one member that the merger has not used yet.

    Attributes:
        timed: Durations.
        issued: Signatures.
        prefix_hash: Hash of the signatures before `issued`. None after it was compared.
    """

    __slots__ = ("issued", "prefix_hash", "timed")

    def __init__(self, report: CallReport) -> None:
        self.timed = NumberedRange(report.first_timed, report.durations)
        self.issued = NumberedRange(report.first_issued, report.signatures)
        self.prefix_hash = report.prefix_hash

    def add(self, report: CallReport) -> None:
        self.timed.add(report.first_timed, report.durations)
        first = self.issued.first
        if not self.issued.add(report.first_issued, report.signatures):
            self.prefix_hash = report.prefix_hash
        elif self.issued.first != first:  # the oldest values were discarded
            self.prefix_hash = None

    def discard_issued(self, before: int) -> None:
        """Discard signatures, and extend the hash by the discarded signatures."""
        if self.prefix_hash is not None:
            discarded = self.issued.between(self.issued.first, before)
            self.prefix_hash = self.prefix_hash.extended(discarded)
        self.issued.discard(before)


def _intersection(ranges: Iterable[NumberedRange]) -> tuple[int, int]:
    """Return the first number that all ranges contain, and the end of the shortest range."""
    ranges = list(ranges)
    return max(each.first for each in ranges), min(each.end for each in ranges)
