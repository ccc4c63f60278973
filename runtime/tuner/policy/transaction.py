"""One order carried out by all ranks or by none; who could not is undone together with the rest.

Every step that a rank may fail at ends in a vote, so that no rank goes on where another did not.
It knows the knobs by `KnobSetter` alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from ....errors import ZerowatchError
from ...common.undo import FAILURES
from .types import Configuration, KnobSetter, Order, Outcome, Undo

if TYPE_CHECKING:  # it imports torch
    from ...common.host_group import HostCollectives

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

REASON_BYTES = 300  # of the reason that a rank sends to the others
_OF_ANOTHER = "another rank"  # in the words of those that failed along with it


def exchange_order(
    host_group: HostCollectives, hands: KnobSetter, order: Order | None, clock: Clock = perf_counter
) -> tuple[Order, Outcome] | None:
    """Carry out rank 0's order on all ranks, each of which calls this between the same two windows.

    Args:
        host_group: Of all ranks.
        hands: This rank's.
        order: What rank 0 wants, if anything; other ranks' is not looked at.
        clock: Seconds.

    Returns:
        The order and how it ended; None where there was none.

    Raises:
        RuntimeError: Another rank is gone. This rank works as before, unless that took the others.
    """
    told = host_group.broadcast_text(_as_text(order) if host_group.rank == 0 else "")
    meant = _order_of(told)
    return None if meant is None else (meant, apply_order(meant, hands, host_group, clock))


def apply_order(
    order: Order, hands: KnobSetter, host_group: HostCollectives, clock: Clock = perf_counter
) -> Outcome:
    """Do as ordered on all ranks, or leave all as they were; see `exchange_order`."""
    began = clock()
    part = _RankTransaction(order, hands)
    try:
        reason = _ended_by(part, host_group)
        if reason is None:
            return Outcome(done=True, seconds=clock() - began)
        part.undo()
        undone = not host_group.all_max(int(not part.is_as_before))
    except (RuntimeError, ZerowatchError):
        part.undo()
        raise
    if not undone:
        logger.error("not all could be undone after: %s", reason)
    return Outcome(done=False, reason=reason, seconds=clock() - began, undone=undone)


class _RankTransaction:
    """One rank's part of it. Nothing is raised here; what went wrong is in `problem`."""

    def __init__(self, order: Order, hands: KnobSetter) -> None:
        self.problem: str | None = None
        self._order, self._hands = order, hands
        self._before: Configuration | None = None
        self._undo: Undo | None = None
        self._is_stuck = False

    def look(self) -> None:
        """Ask whether it should be done here at all."""

        def ask() -> None:
            self._before = dict(self._hands.values())
            if self._order.checked:
                self.problem = self._hands.unsupported_reason(self._order.target)

        self._attempt("look", ask)

    def apply(self) -> None:
        """Do it."""

        def turn() -> None:
            self._undo = self._hands.apply(self._order.target)

        self._attempt("apply", turn)

    def verify(self) -> None:
        """Read back whether it is so."""

        def read() -> None:
            if not self._hands.verify(self._order.target):
                self.problem = "what was set does not read back"

        self._attempt("verify", read)

    def undo(self) -> None:
        """Put back what was there, the first time."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        try:
            undo()
        except FAILURES as error:
            self._is_stuck = True
            logger.error("undoing failed: %s", _message(error))

    @property
    def is_as_before(self) -> bool:
        """Whether this rank works as it did before the order."""
        try:
            same = self._before is None or dict(self._hands.values()) == self._before
        except FAILURES as error:
            logger.error("what is set cannot be read: %s", _message(error))
            return False
        return same and not self._is_stuck

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except FAILURES as error:
            self.problem = _message(error)
        if self.problem is not None:
            logger.warning("%s: %s: %s", self._order.why, what, self.problem)


def _ended_by(part: _RankTransaction, host_group: HostCollectives) -> str | None:
    """Go as far as all ranks come; return why no further, in the words of a rank that failed."""
    for step in (part.look, part.apply, part.verify):
        step()
        if host_group.all_max(int(part.problem is not None)):
            return _gather_reason(part.problem or "", host_group)
    return None


def _gather_reason(own: str, host_group: HostCollectives) -> str:
    """Return what the first rank that failed says, of all ranks that did not fail with another."""
    own = own.encode()[:REASON_BYTES].decode(errors="ignore")
    reasons = host_group.all_gather_text(own, REASON_BYTES)
    said = [f"rank {rank}: {each.strip()}" for rank, each in enumerate(reasons) if each.strip()]
    own_faults = [each for each in said if _OF_ANOTHER not in each]
    return next(iter([*own_faults, *said]), "a rank did not say why")


def _message(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, ZerowatchError) else f"{type(error).__name__}: {words}"


def _as_text(order: Order | None) -> str:
    if order is None:
        return json.dumps(None)
    return json.dumps({"target": dict(order.target), "why": order.why, "checked": order.checked})


def _order_of(text: str) -> Order | None:
    plain = json.loads(text)
    return None if plain is None else Order(**plain)
