"""Defines and encodes the messages that ranks exchange over the c10d store.

A call on one rank corresponds to the call with the same rank set key and number on another rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from ..divergence import Divergence, parse_divergence
from ..rank_figures import NUM_FIGURES, Figures
from ..stragglers import StepTimeReference, StepTimes, Straggler

# Seconds; NaN if a call was not timed, INEXACT if it has only an upper bound on some rank, UNKNOWN
# if some rank is left out. The shortest duration over the ranks of such a call is unknown, so these
# must be the least of all values.
Durations = npt.NDArray[np.float32]
INEXACT = -1.0
UNKNOWN = float("-inf")
Signatures = npt.NDArray[np.uint32]
NO_DURATIONS: Durations = np.empty(0, np.float32)
NO_SIGNATURES: Signatures = np.empty(0, np.uint32)

# Maximum number of values of each kind that a rank keeps for a rank set. Other ranks may never use
# the rank set, and the values would then stay forever.
MAX_PENDING_VALUES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHash:
    """A hash of consecutive signatures, starting at call number `since`.

    Ranks with equal hashes have issued the same calls. A rank that has lost calls has no hash.
    Hashes with different values of `since` cannot be compared.
    """

    since: int
    crc: int

    def extended(self, signatures: Signatures) -> SequenceHash:
        """Return the hash that also covers `signatures`."""
        return SequenceHash(since=self.since, crc=zlib.crc32(signatures.tobytes(), self.crc))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """The new calls of one rank set on one rank, or on several ranks after merging.

    The two arrays cover different calls, because a call's duration is known only some time after
    the call was issued.

    Attributes:
        first_timed: Number of the call that `durations` starts with.
        durations: The duration of each call in seconds. NaN if the call was not timed, INEXACT if
            only an upper bound is known, UNKNOWN if a rank of a block is left out.
        first_issued: Number of the call that `signatures` starts with.
        signatures: The signature of each call, as `signature` computes it.
        prefix_hash: The hash of the signatures before `first_issued`. None if unknown.
    """

    first_timed: int
    durations: Durations
    first_issued: int
    signatures: Signatures
    prefix_hash: SequenceHash | None


EMPTY_CALL_REPORT = CallReport(
    first_timed=0,
    durations=NO_DURATIONS,
    first_issued=0,
    signatures=NO_SIGNATURES,
    prefix_hash=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank at one exchange, or of the first rank of a block for its block.

    Attributes:
        calls: The calls of each rank set, by its key.
        names: The readable form of each signature.
        step_times: The step times of each rank.
        divergences: The divergences found so far, by the key of the rank set.
        figures: The figures of each rank.
        is_last: Whether monitoring has ended there in good order.
    """

    calls: Mapping[str, CallReport]
    names: Mapping[int, str] = field(default_factory=dict)
    step_times: Mapping[int, StepTimes] = field(default_factory=dict)
    divergences: Mapping[str, Divergence] = field(default_factory=dict)
    figures: Mapping[int, Figures] = field(default_factory=dict)
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """The result of comparing the reports of a rank set's members.

    Attributes:
        first_call: Number of the call that `min_durations` starts with.
        min_durations: The shortest duration of each call over the ranks, in seconds. INEXACT if one
            of the ranks has only an upper bound, UNKNOWN if one of them is left out.
        reference: The step times with which each rank is compared. None if no rank sent any.
        stragglers: The ranks that are slow now.
        divergence: The first divergence. Only one result contains it; in other results it is None.
    """

    first_call: int
    min_durations: Durations
    reference: StepTimeReference | None = None
    stragglers: tuple[Straggler, ...] = ()
    divergence: Divergence | None = None


EMPTY_RESULT = CompareResult(first_call=0, min_durations=NO_DURATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of a rank.

    Attributes:
        rank: The global rank.
        host: The host of the rank.
        age_seconds: Minimum seconds since the rank's last heartbeat. None if only one was read.
        issued: Number of the last collective that the rank issued, by the rank set's key.
        pause: Why the rank is expected to make no progress. None while the rank trains.
        step: The last step that ended on the rank; 0 before the first.
        unseen: Number of collectives since then that no wrapper has seen, by the rank set's key.
        interval_seconds: Minimum seconds between two heartbeats of the rank while it trains. 0 if
            it sends one at each poll.
    """

    rank: int
    host: str
    age_seconds: float | None
    issued: Mapping[str, int]
    pause: str | None = None
    step: int = 0
    unseen: Mapping[str, int] = field(default_factory=dict)
    interval_seconds: float = 0.0

    @property
    def overdue_seconds(self) -> float:
        """Seconds since the next heartbeat was due. 0 if it is not due, or only one was read."""
        return max(0.0, (self.age_seconds or 0.0) - self.interval_seconds)


def signature(op: str, dtype: str, payload_bytes: int) -> int:
    """Return a 32-bit hash that differs if two calls cannot belong to the same collective."""
    return zlib.crc32(f"{op} {dtype} {payload_bytes}".encode())


def encode_report(report: RankReport) -> bytes:
    """Encode a report: a line of JSON, then the arrays, compressed."""
    head: dict[str, Any] = {
        "sections": [
            [key, c.first_timed, len(c.durations), c.first_issued, len(c.signatures), c.prefix_hash]
            for key, c in report.calls.items()
        ],
        "names": list(report.names.items()),
        "paces": [
            [rank, times.num_steps, times.step_seconds, times.busy_seconds, times.deviation_seconds]
            for rank, times in report.step_times.items()
        ],
        "divergences": list(report.divergences.items()),
        "is_last": report.is_last,
    }
    arrays = b"".join(c.durations.tobytes() + c.signatures.tobytes() for c in report.calls.values())
    if report.figures:
        head["figures"] = [NUM_FIGURES, list(report.figures)]
        arrays += b"".join(each.tobytes() for each in report.figures.values())
    return _compress(head, arrays)


def decode_report(message: bytes) -> RankReport:
    """Decode a report.

    Raises:
        ValueError: The message is not a report.
    """
    try:
        head, arrays = _decompress(message)
        calls, at = {}, 0
        for key, first_timed, timed, first_issued, issued, prefix_hash in head["sections"]:
            calls[key] = CallReport(
                first_timed=int(first_timed),
                durations=np.frombuffer(arrays, np.float32, timed, at),
                first_issued=int(first_issued),
                signatures=np.frombuffer(arrays, np.uint32, issued, at + 4 * timed),
                prefix_hash=None if prefix_hash is None else SequenceHash(**prefix_hash),
            )
            at += 4 * (timed + issued)
        return RankReport(
            calls=calls,
            names=dict(head["names"]),
            step_times={
                rank: StepTimes(
                    num_steps=num_steps,
                    step_seconds=step_seconds,
                    busy_seconds=tuple(busy_seconds),
                    deviation_seconds=tuple(deviation_seconds),
                )
                for rank, num_steps, step_seconds, busy_seconds, deviation_seconds in head["paces"]
            },
            divergences={key: parse_divergence(fields) for key, fields in head["divergences"]},
            figures=_decode_figures(head.get("figures"), arrays, at),
            is_last=head["is_last"],
        )
    except (zlib.error, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"not a report of a rank: {error}") from None


def _decode_figures(head: Any, arrays: bytes, at: int) -> dict[int, Figures]:
    """Return the figures by rank; none if the version of zerowatch that sent them has others."""
    if head is None or head[0] != NUM_FIGURES:
        return {}
    ranks = [int(rank) for rank in head[1]]
    rows = np.frombuffer(arrays, np.float32, len(ranks) * NUM_FIGURES, at)
    return dict(zip(ranks, rows.reshape(-1, NUM_FIGURES), strict=True))


def encode_result(result: CompareResult) -> bytes:
    """Encode a result: a line of JSON, then the durations, compressed."""
    head = {
        "first": result.first_call,
        "reference": result.reference,
        "stragglers": result.stragglers,
        "divergence": result.divergence,
    }
    return _compress(head, result.min_durations.tobytes())


def decode_result(message: bytes) -> CompareResult:
    """Decode a result.

    Raises:
        ValueError: The message is not a result.
    """
    try:
        head, durations = _decompress(message)
        return CompareResult(
            first_call=int(head["first"]),
            min_durations=np.frombuffer(durations, np.float32),
            reference=_parse_reference(head["reference"]),
            stragglers=tuple(Straggler(**fields) for fields in head["stragglers"]),
            divergence=head["divergence"] and parse_divergence(head["divergence"]),
        )
    except (zlib.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a result of a comparison: {error}") from None


def _compress(head: Mapping[str, Any], arrays: bytes) -> bytes:
    # JSON keys are strings, but the keys of `Divergence.issued` are ranks.
    line = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS)
    return zlib.compress(line + b"\n" + arrays, 1)


def _decompress(message: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, arrays = zlib.decompress(message).partition(b"\n")
    return orjson.loads(line), arrays


def _parse_reference(fields: Mapping[str, Any] | None) -> StepTimeReference | None:
    if fields is None:
        return None
    return StepTimeReference(
        step_seconds=fields["step_seconds"], busy_seconds=tuple(fields["busy_seconds"])
    )
