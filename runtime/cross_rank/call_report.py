"""A stretch of a group's collectives, as one rank or several saw it, and how it travels.

Calls are matched over the ranks by the group and their number in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from .divergence import Divergence, read_divergence

Seconds = npt.NDArray[np.float32]
Signatures = npt.NDArray[np.uint32]
NO_SECONDS: Seconds = np.empty(0, np.float32)
NO_SIGNATURES: Signatures = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHash:
    """A hash of all signatures from number `since` on, up to some call.

    Ranks that agree on it have issued the same calls. A rank has none once it has lost calls, and
    ranks that were watched from different calls on cannot be compared by it.
    """

    since: int
    crc: int

    def extended(self, signatures: Signatures) -> SequenceHash:
        """Return the hash up to and with these."""
        return SequenceHash(since=self.since, crc=zlib.crc32(signatures.tobytes(), self.crc))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Durations of the calls from number `first_timed`, signatures of those from `first_issued`.

    A call is issued some time before it has a duration, so the second stretch is ahead of the
    first. Durations are in seconds, NaN where a call was not timed.
    """

    first_timed: int
    durations: Seconds
    first_issued: int
    signatures: Signatures
    history: SequenceHash | None


NOTHING_NEW = CallReport(
    first_timed=0,
    durations=NO_SECONDS,
    first_issued=0,
    signatures=NO_SIGNATURES,
    history=None,
)


# Not frozen: one rank reads a thousand at an exchange, and frozen ones take twice as long to make.
@dataclass(slots=True, kw_only=True)
class StepTimes:
    """How fast a rank went lately: medians over `steps` steps, in seconds.

    `busy` is the time in each of COMPARED_PHASES without what collectives blocked; `deviation` the
    median absolute deviation of each over the steps.
    """

    steps: int
    step_seconds: float
    busy: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank tells the others at one exchange, or one rank of a block for the block.

    `sections` and `divergences` are by the group's key, `paces` by rank; `names` says what the
    signatures stand for.
    """

    sections: Mapping[str, CallReport]
    names: Mapping[int, str] = field(default_factory=dict)
    paces: Mapping[int, StepTimes] = field(default_factory=dict)
    divergences: Mapping[str, Divergence] = field(default_factory=dict)


def signature(op: str, dtype: str, payload_bytes: int) -> int:
    """Return 32 bits that tell calls apart which do not belong together."""
    return zlib.crc32(f"{op} {dtype} {payload_bytes}".encode())


def encode(report: RankReport) -> bytes:
    """Write a report: a line of JSON, then the arrays."""
    head: dict[str, Any] = {
        "sections": [
            [key, s.first_timed, len(s.durations), s.first_issued, len(s.signatures), s.history]
            for key, s in report.sections.items()
        ],
        "names": list(report.names.items()),
        "paces": [
            [rank, p.steps, p.step_seconds, p.busy, p.deviation] for rank, p in report.paces.items()
        ],
        "divergences": list(report.divergences.items()),
    }
    arrays = b"".join(
        s.durations.tobytes() + s.signatures.tobytes() for s in report.sections.values()
    )
    # JSON has strings for keys: `Divergence.issued` is by rank.
    line = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS)
    return zlib.compress(line + b"\n" + arrays, 1)


def decode(text: bytes) -> RankReport:
    """Read a report.

    Raises:
        ValueError: This is none.
    """
    try:
        head_text, _, arrays = zlib.decompress(text).partition(b"\n")
        head: dict[str, Any] = orjson.loads(head_text)
        sections, at = {}, 0
        for key, first_timed, timed, first_issued, issued, history in head["sections"]:
            sections[key] = CallReport(
                first_timed=int(first_timed),
                durations=np.frombuffer(arrays, np.float32, timed, at),
                first_issued=int(first_issued),
                signatures=np.frombuffer(arrays, np.uint32, issued, at + 4 * timed),
                history=None if history is None else SequenceHash(**history),
            )
            at += 4 * (timed + issued)
        paces = {
            rank: StepTimes(steps=n, step_seconds=s, busy=tuple(busy), deviation=tuple(deviation))
            for rank, n, s, busy, deviation in head["paces"]
        }
        divergences = {key: read_divergence(told) for key, told in head["divergences"]}
        names = dict(head["names"])
        return RankReport(sections=sections, names=names, paces=paces, divergences=divergences)
    except (zlib.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no report of a rank: {error}") from None
