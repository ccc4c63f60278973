"""Who left the common sequence of collectives, and with which call. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_CONTEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first call in which the members of a group differ.

    `issued` says by member what it issued, `named` which members left the sequence: all of them
    where that cannot be told.
    """

    sequence: int
    issued: Mapping[int, str]
    named: tuple[int, ...]

    def sentence(self, role: str) -> str:
        """Say it in words."""
        names = _ranks(self.named)
        theirs = sorted({self.issued[rank] for rank in self.named})
        others = sorted({issued for rank, issued in self.issued.items() if rank not in self.named})
        if not others:
            return (
                f"the ranks issue different collectives from call {self.sequence} of group {role} "
                "on: " + "; ".join(f"rank {rank} {what}" for rank, what in self.issued.items())
            )
        return (
            f"{names} left the common sequence of collectives at call {self.sequence} of group "
            f"{role}: issued {' or '.join(theirs)}, where the others issued {' or '.join(others)}"
        )


def read_divergence(told: Mapping[str, Any]) -> Divergence:
    """Read a divergence that travelled as JSON."""
    issued = {int(rank): what for rank, what in told["issued"].items()}
    return Divergence(sequence=told["sequence"], issued=issued, named=tuple(told["named"]))


def diverged_ranks(values: Mapping[int, int], history: Sequence[int]) -> tuple[int, ...]:
    """Name the members that left the sequence at one call.

    The majority is right. Where there is none, as with two members, the one is right whose call has
    followed upon the same calls before: a step issues what the step before it issued. Where that
    does not tell either, all are named.

    Args:
        values: The signature of the call, by member.
        history: Signatures of the calls before it, on which all agreed.
    """
    counts = Counter(values.values()).most_common()
    if counts[0][1] * 2 > len(values):
        right = counts[0][0]
    else:
        known = {value: context_match_length(history, value) for value in set(values.values())}
        best = max(known.values())
        familiar = [value for value, length in known.items() if length == best]
        if len(familiar) > 1:
            return tuple(values)
        right = familiar[0]
    return tuple(member for member, value in values.items() if value != right)


def context_match_length(history: Sequence[Hashable], value: Hashable) -> int:
    """Return the length of the longest run of calls, ending with this one, that was seen before.

    0 if the call itself never was; LONGEST_CONTEXT calls before it are looked at.
    """
    best = 0
    for at, seen in enumerate(history):
        if seen != value:
            continue
        same = 1
        while same <= LONGEST_CONTEXT and same <= at and history[at - same] == history[-same]:
            same += 1
        best = max(best, same)
    return best


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
