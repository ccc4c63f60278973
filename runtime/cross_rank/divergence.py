"""Finds the ranks whose sequence of collectives differs from that of the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.format_numbers import format_ranks

# Maximum number of calls before a divergence that are compared with the history.
MAX_CONTEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first collective at which the members of a rank set issued different calls.

    Attributes:
        sequence: The call's number.
        issued: The call that each rank issued.
        diverged: The ranks that left the common sequence. All ranks if this cannot be decided.
    """

    sequence: int
    issued: Mapping[int, str]
    diverged: tuple[int, ...]

    def message(self, role: str) -> str:
        """Format the divergence for the log. `role` is the role of the rank set."""
        at = f"call {self.sequence} of group {role}"
        own = sorted({self.issued[rank] for rank in self.diverged})
        others = sorted(
            {issued for rank, issued in self.issued.items() if rank not in self.diverged}
        )
        if not others:
            calls = "; ".join(f"rank {rank} {issued}" for rank, issued in self.issued.items())
            return f"the ranks issue different collectives from {at} on: {calls}"
        return (
            f"{format_ranks(self.diverged)} diverged from the common sequence of collectives at "
            f"{at}: issued {' or '.join(own)}, where the others issued {' or '.join(others)}"
        )


def parse_divergence(fields: Mapping[str, Any]) -> Divergence:
    """Return a divergence from its JSON fields."""
    return Divergence(
        sequence=fields["sequence"],
        issued={int(rank): issued for rank, issued in fields["issued"].items()},
        diverged=tuple(fields["diverged"]),
    )


def diverged_ranks(values: Mapping[int, int], history: Sequence[int]) -> tuple[int, ...]:
    """Return the members that left the common sequence at one call.

    The majority is right. If there is no majority, as with two members, the history decides,
    because each step issues the same calls as the previous step. The right call is then the call
    that earlier followed the longest run of the same calls. If there is a tie, all members are
    returned.

    Args:
        values: The signature of the call, by member.
        history: Signatures of the earlier calls, on which all members agreed.
    """
    counts = Counter(values.values()).most_common()
    if counts[0][1] * 2 > len(values):
        right = counts[0][0]
    else:
        lengths = {value: context_match_length(history, value) for value in set(values.values())}
        longest = max(lengths.values())
        candidates = [value for value, length in lengths.items() if length == longest]
        if len(candidates) > 1:
            return tuple(values)
        right = candidates[0]
    return tuple(member for member, value in values.items() if value != right)


def context_match_length(history: Sequence[Hashable], value: Hashable) -> int:
    """Return the length of the longest run of calls, ending with `value`, that occurred before.

    Return 0 if `value` never occurred. At most MAX_CONTEXT calls before `value` are compared.
    """
    best = 0
    for at, seen in enumerate(history):
        if seen != value:
            continue
        same = 1
        while same <= MAX_CONTEXT and same <= at and history[at - same] == history[-same]:
            same += 1
        best = max(best, same)
    return best
