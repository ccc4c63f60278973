"""The tuner's decisions on disk: `runs/<run_id>/decisions.jsonl`, one JSON object per line.

The schema is `decision_line`. Raise SCHEMA_VERSION for a change that an older reader would misread.
"""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from pathlib import Path

import orjson

from .decision import Decision
from .experiment import Conclusion

logger = logging.getLogger(__name__)

DECISIONS_FILE = "decisions.jsonl"
SCHEMA_VERSION = 1


class DecisionLog:
    """Appends decisions to `decisions.jsonl` in the run folder. Disk errors never raise.

    Attributes:
        lost: Decisions that could not be written.
    """

    def __init__(self) -> None:
        self.lost = 0

    def write(self, folder: Path | None, decision: Decision, conclusion: Conclusion) -> None:
        """Append a decision and its inputs as one line.

        Args:
            folder: The run folder; None before the run has a name, and where none is written.
            decision: The decision.
            conclusion: Conclusion of the experiment, with its inputs.
        """
        if folder is None:
            self.lost += 1
            return
        line = decision_line(decision, conclusion)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _append(folder / DECISIONS_FILE, line)
        except OSError as error:
            if not self.lost:
                logger.warning(
                    "cannot write %s: %s; tuning continues, decisions are in this log only",
                    folder / DECISIONS_FILE,
                    error,
                )
            self.lost += 1


def decision_line(decision: Decision, conclusion: Conclusion) -> bytes:
    """Serialize a decision and its inputs as one JSON line, newline included."""
    values: dict[str, object] = {one.name: getattr(decision, one.name) for one in fields(decision)}
    values["numerics"] = decision.numerics.setting
    line = {
        "schema": SCHEMA_VERSION,
        "knob": decision.knob,
        **values,
        "situation": conclusion.inputs,
        "plan": conclusion.plan,
        "times": conclusion.times,
    }
    return orjson.dumps(line, default=_sorted_set) + b"\n"


def _sorted_set(values: object) -> list[object]:
    """Serialize sets, which orjson does not support; their mixed values are sorted by repr."""
    if isinstance(values, frozenset | set):
        return sorted(values, key=repr)
    raise TypeError(f"{values!r} cannot be written")


def _append(path: Path, line: bytes) -> None:
    """Append by one write call, on a new line if a killed process or full disk cut the last one."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        whole = b"\n" + line if is_torn else line
        if os.write(descriptor, whole) < len(whole):
            os.ftruncate(descriptor, size)
            raise OSError("only a part of the line fitted")
    finally:
        os.close(descriptor)
