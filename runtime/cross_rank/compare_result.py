"""What comes of an exchange for one group, and how it travels to the members."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from .call_report import NO_SECONDS, Seconds
from .divergence import Divergence, read_divergence
from .stragglers import StepTimeReference, Straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """The least durations over the ranks of calls number `first` and on, in seconds.

    `reference` is what a rank's pace is compared with, None where no paces came. A divergence is
    told once.
    """

    first: int
    least: Seconds
    reference: StepTimeReference | None = None
    stragglers: tuple[Straggler, ...] = ()
    divergence: Divergence | None = None


NO_RESULT = CompareResult(first=0, least=NO_SECONDS)


def encode(verdict: CompareResult) -> bytes:
    """Write a verdict: a line of JSON, then the durations."""
    head = {
        "first": verdict.first,
        "reference": verdict.reference,
        "stragglers": verdict.stragglers,
        "divergence": verdict.divergence,
    }
    # JSON has strings for keys: `Divergence.issued` is by rank.
    line = orjson.dumps(head, option=orjson.OPT_NON_STR_KEYS)
    return zlib.compress(line + b"\n" + verdict.least.tobytes(), 1)


def decode(text: bytes) -> CompareResult:
    """Read a verdict.

    Raises:
        ValueError: This is none.
    """
    try:
        line, _, least = zlib.decompress(text).partition(b"\n")
        head: dict[str, Any] = orjson.loads(line)
        return CompareResult(
            first=int(head["first"]),
            least=np.frombuffer(least, np.float32),
            reference=_reference(head["reference"]),
            stragglers=tuple(Straggler(**one) for one in head["stragglers"]),
            divergence=head["divergence"] and read_divergence(head["divergence"]),
        )
    except (zlib.error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no verdict on a group: {error}") from None


def _reference(told: dict[str, Any] | None) -> StepTimeReference | None:
    if told is None:
        return None
    return StepTimeReference(step_seconds=told["step_seconds"], busy=tuple(told["busy"]))
