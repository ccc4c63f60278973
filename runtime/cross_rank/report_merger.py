"""One group's calls as its members report them, put together by one of them. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from .call_report import NO_SECONDS, NO_SIGNATURES, CallReport, Seconds, SequenceHash, Signatures
from .divergence import Divergence, diverged_ranks
from .numbered_range import NumberedRange

T = TypeVar("T")

# How much of the agreed sequence is remembered, to tell who left it: some steps of a big model.
REMEMBERED_CALLS = 4096
# Names are kept of so many signatures; a job with ever new sizes has ever new ones.
MOST_NAMES = 4096


class _MemberState:
    """What one member has reported and the meeting has not used yet.

    Attributes:
        timed: Durations.
        issued: Signatures.
        claim: What it says to have issued before the first of those; None once compared.
    """

    __slots__ = ("claim", "issued", "timed")

    def __init__(self, section: CallReport) -> None:
        self.timed = NumberedRange(section.first_timed, section.durations)
        self.issued = NumberedRange(section.first_issued, section.signatures)
        self.claim = section.history

    def add(self, section: CallReport) -> None:
        self.timed.add(section.first_timed, section.durations)
        first = self.issued.first
        if not self.issued.add(section.first_issued, section.signatures):
            self.claim = section.history
        elif self.issued.first != first:  # the oldest were too many
            self.claim = None

    def forget_issued(self, before: int) -> None:
        """Let go of signatures; the claim is then about those before `before`."""
        if self.claim is not None:
            self.claim = self.claim.extended(self.issued.between(self.issued.first, before))
        self.issued.forget(before)


class ReportMerger:
    """Puts the reports of a group's members together, each as far as all have reported.

    From the first divergence on nothing is compared: a call more or less on one member shifts all
    numbers that follow, and so what belongs together is not known any more.

    Args:
        members: Who reports here, each with the ranks it reports for: itself, or a block of ranks
            whose reports were put together already.

    Attributes:
        divergence: The first call in which members differ; None while there is none.
        names: What signatures stand for.
    """

    def __init__(self, members: Mapping[int, Sequence[int]]) -> None:
        self.divergence: Divergence | None = None
        self.names: dict[int, str] = {}
        self._ranks = members
        self._waited_for = set(members)
        self._members: dict[int, _MemberState] = {}
        self._reached = 0  # how far `_history` goes
        self._history: SequenceHash | None = None
        self._agreed: deque[int] = deque(maxlen=REMEMBERED_CALLS)

    @property
    def num_ranks(self) -> int:
        """How many ranks take part now."""
        return sum(len(self._ranks[member]) for member in self._members)

    def add(self, member: int, section: CallReport, names: Mapping[int, str]) -> None:
        """Take what a member reports."""
        self._waited_for.add(member)
        if member in self._members:
            self._members[member].add(section)
        else:
            self._members[member] = _MemberState(section)
        if self.divergence is None:
            self.names.update(names)
            if len(self.names) > MOST_NAMES:
                self._forget_names()

    def leave_out(self, member: int) -> None:
        """Go on without a member, until it reports again."""
        self._waited_for.discard(member)
        self._members.pop(member, None)

    def take(self) -> CallReport | None:
        """Return the stretch that all have reported since the last time; None if there is none."""
        if not self._members or not self._waited_for <= self._members.keys():
            return None
        first_issued, history, signatures = self._take_signatures()  # may show who went astray
        first, durations = self._take_durations()
        if not len(durations) and not len(signatures):
            return None
        return CallReport(
            first_timed=first,
            durations=durations,
            first_issued=first_issued,
            signatures=signatures,
            history=history,
        )

    def _take_durations(self) -> tuple[int, Seconds]:
        """Return the least duration of each call: that of the member that waited least.

        NaN where nobody could time it, and from the divergence on.
        """
        stretches = [member.timed for member in self._members.values()]
        first, end = _common(stretches)
        if first >= end:
            return first, NO_SECONDS
        least: Seconds = stretches[0].between(first, end).copy()
        for stretch in stretches[1:]:
            np.fmin(least, stretch.between(first, end), out=least)
        for stretch in stretches:
            stretch.forget(end)
        if self.divergence is not None:
            least[max(0, self.divergence.sequence - first) :] = np.nan
        return first, least

    def _take_signatures(self) -> tuple[int, SequenceHash | None, Signatures]:
        """Return the calls on which all agree, and the hash of those before."""
        members = self._members
        first, end = _common([member.issued for member in members.values()])
        if self.divergence is not None:
            for member in members.values():  # nobody will look at them
                member.issued.forget(member.issued.end)
            return 0, None, NO_SIGNATURES
        if first >= end:
            return first, self._history, NO_SIGNATURES
        for member in members.values():
            member.forget_issued(first)
        before = self._agree_on_history(first)
        rows = {rank: member.issued.between(first, end) for rank, member in members.items()}
        agreed = self._compare(first, rows)
        self._reached = first + len(agreed)
        self._history = None if before is None else before.extended(agreed)
        self._agreed.extend(agreed.tolist())
        for member in members.values():
            member.issued.forget(end)
        return first, before, agreed

    def _agree_on_history(self, first: int) -> SequenceHash | None:
        """Return the hash of the calls before number `first`; who claims another has diverged."""
        claims = {rank: m.claim for rank, m in self._members.items() if m.claim is not None}
        for member in self._members.values():
            member.claim = None
        right = self._history if self._reached == first else None
        if right is None:
            if not claims:
                return None
            right = Counter(claims.values()).most_common(1)[0][0]
        claims = {rank: claim for rank, claim in claims.items() if claim.since == right.since}
        differing = tuple(rank for rank, claim in claims.items() if claim != right)
        if differing:
            # One against one, nobody can tell who is right.
            majority = right is self._history or 2 * len(differing) < len(claims)
            astray = differing if majority else tuple(claims)
            issued = {m: "other calls before it" for m in astray}
            for member in self._members.values():  # of these some may be shifted already
                member.timed.forget(first)
            self.divergence = Divergence(
                sequence=first,
                issued=self._by_rank(dict.fromkeys(self._members, "the same before it") | issued),
                named=tuple(self._by_rank(issued)),
            )
        return right

    def _compare(self, first: int, rows: Mapping[int, Signatures]) -> Signatures:
        """Return what all rows begin with; where they end to agree, note who diverged."""
        reference = next(iter(rows.values()))
        told = reference.tobytes()
        if self.divergence is not None or all(row.tobytes() == told for row in rows.values()):
            return reference
        differs = np.any([row != reference for row in rows.values()], axis=0)
        at = int(differs.argmax())
        history = [*self._agreed, *reference[:at].tolist()]
        values = self._by_rank({member: int(row[at]) for member, row in rows.items()})
        self.divergence = Divergence(
            sequence=first + at,
            issued={rank: self.names.get(value, "another call") for rank, value in values.items()},
            named=diverged_ranks(values, history),
        )
        return reference[:at]

    def _by_rank(self, by_member: Mapping[int, T]) -> dict[int, T]:
        return {rank: what for m, what in by_member.items() for rank in self._ranks[m]}

    def _forget_names(self) -> None:
        """Keep the names of what is yet to be compared only."""
        pending = {one for m in self._members.values() for one in m.issued.values.tolist()}
        self.names = {one: name for one, name in self.names.items() if one in pending}


def _common(stretches: Iterable[NumberedRange]) -> tuple[int, int]:
    """Return where all stretches have begun, and where the first of them ends."""
    known = list(stretches)
    return max(s.first for s in known), min(s.end for s in known)
