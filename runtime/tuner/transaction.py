"""Applies a switch request on all ranks or on none. After any failure, every rank rolls back.

A rank may fail in each phase. Each phase therefore ends with a vote of all ranks, and no rank
continues if any rank has failed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter
from typing import NamedTuple

from ...errors import ZerowatchError
from ..common.collective_attempt import is_peer_failure
from ..common.host_group import HostCollectives
from ..common.undo import FAILURES, Undo
from .policy.policy_types import Configuration, KnobSetter, SwitchRequest, SwitchResult

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

REASON_BYTES = 300  # maximum length of the reason that a rank sends to the other ranks


class Fault(IntEnum):
    """Which rank made a phase fail on this rank. The largest value over all ranks is used."""

    NONE = 0
    OTHER_RANK = 1
    THIS_RANK = 2


def switch_all_ranks(
    host_group: HostCollectives,
    knobs: KnobSetter,
    request: SwitchRequest | None,
    clock: Clock = perf_counter,
) -> tuple[SwitchRequest, SwitchResult] | None:
    """Apply rank 0's request on all ranks. All ranks call this between the same two windows.

    Args:
        host_group: Connects all ranks.
        knobs: Knobs of this rank.
        request: Rank 0's request, or None. The argument is ignored on other ranks.
        clock: Returns the seconds of a monotonic clock.

    Returns:
        The request and its result; None if there was no request.

    Raises:
        RuntimeError: Another rank is lost. This rank's change is undone, unless the undo needs the
            lost rank.
        Exception: A rebuild has removed the engine and failed: the run has ended.
    """
    text = host_group.broadcast_text(_to_json(request) if host_group.rank == 0 else "")
    received = _from_json(text)
    if received is None:
        return None
    return received, apply_switch(received, knobs, host_group, clock)


def apply_switch(
    request: SwitchRequest,
    knobs: KnobSetter,
    host_group: HostCollectives,
    clock: Clock = perf_counter,
) -> SwitchResult:
    """Apply a switch request on all ranks, or on none. See `switch_all_ranks`."""
    began = clock()
    transaction = _RankTransaction(request, knobs)
    try:
        failure = _run(transaction, host_group)
        if failure is None:
            return SwitchResult(done=True, seconds=clock() - began)
        transaction.undo()
        undone = not host_group.all_max(int(not transaction.is_as_before))
        changes = "" if undone else "; ".join(_gather(transaction.remaining_changes, host_group))
    except (RuntimeError, ZerowatchError):
        transaction.undo()
        raise
    if not undone:
        logger.error(
            "rollback incomplete after: %s; left: %s", failure.reason, changes or "unknown"
        )
    return SwitchResult(
        done=False,
        reason=failure.reason,
        seconds=clock() - began,
        refused=failure.refused,
        undone=undone,
        remaining_changes=changes,
    )


class _RankTransaction:
    """Applies or undoes one rank's part of a transaction.

    Failures are recorded, not raised, unless they leave no engine.

    Attributes:
        problem: The failure on this rank, as text. None if nothing failed.
        fault: Which rank caused the problem.
    """

    def __init__(self, request: SwitchRequest, knobs: KnobSetter) -> None:
        self.problem: str | None = None
        self.fault = Fault.NONE
        self._request, self._knobs = request, knobs
        self._before: Configuration | None = None
        self._undo: Undo | None = None
        self._undo_failed = False

    def check(self) -> None:
        """Check whether this rank supports the request."""

        def check() -> None:
            self._before = dict(self._knobs.values())
            if self._request.checked:
                self.problem = self._knobs.unsupported_reason(self._request.target)

        self._attempt("check", check)

    def apply(self) -> None:
        """Set the knobs."""

        def apply() -> None:
            self._undo = self._knobs.apply(self._request.target)

        self._attempt("apply", apply)

    def verify(self) -> None:
        """Read the knobs back."""

        def verify() -> None:
            if not self._knobs.verify(self._request.target):
                self.problem = "the values read back are not those set"

        self._attempt("verify", verify)

    def undo(self) -> None:
        """Restore the values from before the switch. Later calls do nothing."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        try:
            undo()
        except FAILURES as error:
            if not self._knobs.has_engine:
                raise  # the run has ended
            self._undo_failed = True
            logger.error("undoing the switch of knobs failed on this rank: %s", _message(error))

    @property
    def is_as_before(self) -> bool:
        """Whether this rank has the values that it had before the request."""
        try:
            same = self._before is None or dict(self._knobs.values()) == self._before
        except FAILURES as error:
            logger.error("the values of the knobs cannot be read back: %s", _message(error))
            return False
        return same and not self._undo_failed

    @property
    def remaining_changes(self) -> str:
        """The knobs whose values differ from those before the switch, as text."""
        try:
            now, before = dict(self._knobs.values()), self._before or {}
        except FAILURES:
            return "knobs cannot be read"
        changed = (name for name in sorted(now) if name not in before or before[name] != now[name])
        return ", ".join(f"{name}={json.dumps(now[name])}" for name in changed)

    def _attempt(self, phase: str, run: Callable[[], None]) -> None:
        try:
            run()
        except FAILURES as error:
            if not self._knobs.has_engine:
                raise  # the run has ended
            self.problem = _message(error)
            self.fault = Fault.OTHER_RANK if is_peer_failure(error) else Fault.THIS_RANK
        if self.problem is not None:
            self.fault = self.fault or Fault.THIS_RANK
            logger.warning("%s: %s failed: %s", self._request.reason, phase, self.problem)


class _Failure(NamedTuple):
    """Why a switch failed, and whether a rank refused the switch before anything was changed."""

    reason: str
    refused: bool


def _run(transaction: _RankTransaction, host_group: HostCollectives) -> _Failure | None:
    """Run the phases until a phase fails on some rank; return None if no phase failed."""
    for phase in (transaction.check, transaction.apply, transaction.verify):
        phase()
        fault = host_group.all_max(transaction.fault)
        if fault != Fault.NONE:
            is_cause = transaction.fault == fault
            reasons = _gather((is_cause and transaction.problem) or "", host_group)
            reason = next(iter(reasons), "a rank gave no reason")
            return _Failure(reason, refused=phase == transaction.check)
    return None


def _gather(own: str, host_group: HostCollectives) -> list[str]:
    """Return the non-empty texts of all ranks, each prefixed with the rank's number."""
    own = own.encode()[:REASON_BYTES].decode(errors="ignore")
    texts = host_group.all_gather_text(own, REASON_BYTES)
    return [f"rank {rank}: {each.strip()}" for rank, each in enumerate(texts) if each.strip()]


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ZerowatchError) else f"{type(error).__name__}: {text}"


def _to_json(request: SwitchRequest | None) -> str:
    if request is None:
        return json.dumps(None)
    return json.dumps(
        {"target": dict(request.target), "reason": request.reason, "checked": request.checked}
    )


def _from_json(text: str) -> SwitchRequest | None:
    plain = json.loads(text)
    return None if plain is None else SwitchRequest(**plain)
