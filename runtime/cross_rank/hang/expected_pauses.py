"""Why a rank may lawfully stand still, and how far that is believed.

A pause is believed for ten limits after the pausing rank last moved. And who waits in a collective
does not pause, whatever it does that for: a rank that evaluates alone waits for ever.
"""

from __future__ import annotations

import threading

from ....metrics.catalog.labels import PHASES
from ...common.phase_timer import BACKWARD, CHECKPOINT, EVAL, OPTIMIZER, OTHER, PhaseTimer
from .evidence import GroupLine, Peer, Sources
from .stacks import END, PROMPT, excuse

PAUSES = {EVAL, CHECKPOINT}
BELIEVED_LIMITS = 10
# The share of the limit after which the others are no longer asked to wait for a rank that waits.
# They hear of that before they have waited for a whole limit themselves.
WAITING_LIMITS = 0.5
# A peer that was silent longer does not count as pausing, whatever it did when last heard of.
HEARD_SECONDS = 15.0
STILL_SECONDS = 2.0


class ExpectedPauses:
    """The pauses of one rank, made on the thread that trains; any thread may ask.

    All questions are asked with the seconds since the last progress, and with the limit.
    """

    def __init__(self, clock: PhaseTimer, sources: Sources) -> None:
        self._clock = clock
        self._sources = sources
        self._training_thread = threading.get_ident()
        self._eval_mode_tells = True

    def is_lawful(self, still_seconds: float, limit_seconds: float) -> bool:
        """Whether what this rank does now may take long; asked each second."""
        if self._phase() is None or still_seconds > BELIEVED_LIMITS * limit_seconds:
            return False
        return still_seconds < STILL_SECONDS or not self._waits_for_a_peer()

    def is_excused(self, still_seconds: float, limit_seconds: float) -> bool:
        """Whether this rank or a peer is busy with something that shows no progress.

        Asked once the limit is passed, as it looks at all stacks.
        """
        own = excuse(self._training_thread)
        # A person may sit at a prompt for hours, but a debugged run is on a prompt's stack too.
        believed = own == PROMPT and not self._waiting()
        if own is not None and (believed or still_seconds < BELIEVED_LIMITS * limit_seconds):
            return True
        return any(_pauses(peer) for peer in (self._sources.peers() or {}).values())

    def to_tell(self, still_seconds: float, limit_seconds: float) -> str | None:
        """Say to the others why this rank pauses; None while it trains, or is not to be waited for.

        Costs a look at the stacks where it stands still.
        """
        reason = self._phase()
        if reason is None and still_seconds > STILL_SECONDS:
            reason = excuse(self._training_thread)
        if reason is None or still_seconds > BELIEVED_LIMITS * limit_seconds:
            return None
        waits = still_seconds > WAITING_LIMITS * limit_seconds and self._waiting()
        return None if waits else reason

    def _phase(self) -> str | None:
        """Name the phase if it is a pause; a module in evaluation mode makes one of `other`.

        Where a script trains in that mode, as it forgot to leave it, it tells nothing.
        """
        trains = self._sources.training() is not False
        phase = self._clock.current  # read last: it is of the mode read, or that is past
        if phase in (BACKWARD, OPTIMIZER):
            self._eval_mode_tells = trains
        if phase in PAUSES:
            return PHASES[phase]
        evaluates = phase == OTHER and not trains and self._eval_mode_tells
        return PHASES[EVAL] if evaluates else None

    def _waiting(self) -> list[GroupLine]:
        """Return the groups whose last collective is under way here."""
        groups = self._sources.groups() or ()
        return [group for group in groups if group.waits and len(group.members) > 1]

    def _waits_for_a_peer(self) -> bool:
        """Whether a collective is under way here at which a rank, as far as known, is missing."""
        waiting = self._waiting()
        peers = (self._sources.peers() if waiting else None) or {}
        return any(
            rank in peers and peers[rank].arrived.get(group.key, 0) < group.issued
            for group in waiting
            for rank in group.members
        )


def _pauses(peer: Peer) -> bool:
    """Whether to wait for a peer. At its end nobody will hear of it any more."""
    return peer.pause not in (None, END) and (peer.heartbeat_age_seconds or 0.0) < HEARD_SECONDS
