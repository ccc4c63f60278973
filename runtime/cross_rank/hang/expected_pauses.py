"""Decides whether a rank without progress is expected to have none, such as in a checkpoint.

A pause is accepted for ten hang limits after the last progress. A rank that waits in a collective
never counts as pausing: otherwise the hang of a rank that evaluates alone, in a collective that no
other rank enters, would never be detected.
"""

from __future__ import annotations

import threading

from ....metrics.catalog.labels import PHASES
from ...common.phase_timer import BACKWARD, CHECKPOINT, EVAL, OPTIMIZER, OTHER, PhaseTimer
from ..exchange.rank_messages import Heartbeat
from .hang_context import HangContext
from .hang_evidence import RankSetSummary
from .thread_stacks import END, PROMPT, silent_activity

# Phases without steps.
PAUSES = {EVAL, CHECKPOINT}
# How long a pause is accepted, in hang limits.
ACCEPTED_LIMITS = 10
# A rank that waits in a collective for this fraction of the limit no longer announces a pause. The
# others read that before they have waited for a whole limit themselves.
WAITING_LIMITS = 0.5
# A peer with an older heartbeat does not count as pausing, even if it announced a pause.
MAX_HEARTBEAT_SECONDS = 15.0
# Time without progress from which on stacks and collectives are read to decide about a pause.
MIN_IDLE_SECONDS = 2.0


class ExpectedPauses:
    """Decides whether this rank is in an expected pause. Made on the training thread, used on any.

    The argument `idle_seconds` is the time since the last progress, `limit_seconds` the hang limit.
    """

    def __init__(self, phase_timer: PhaseTimer, context: HangContext) -> None:
        self._phase_timer = phase_timer
        self._context = context
        self._training_thread = threading.get_ident()
        self._eval_mode_is_pause = True

    def is_expected(self, idle_seconds: float, limit_seconds: float) -> bool:
        """Whether what this rank does now may take long; called each second."""
        if self._pause_phase() is None or idle_seconds > ACCEPTED_LIMITS * limit_seconds:
            return False
        return idle_seconds < MIN_IDLE_SECONDS or not self._waits_for_a_peer()

    def is_busy(self, idle_seconds: float, limit_seconds: float) -> bool:
        """Whether this rank or a peer does something that shows no progress.

        Called once the limit is passed, as it reads all stacks.
        """
        own = silent_activity(self._training_thread)
        # A prompt may stay open for hours, but a debugger's prompt is on a hung run's stack, too.
        is_prompt = own == PROMPT and not self._waiting_rank_sets()
        if own is not None and (is_prompt or idle_seconds < ACCEPTED_LIMITS * limit_seconds):
            return True
        return any(_is_pausing(peer) for peer in (self._context.peers() or {}).values())

    def announced(self, idle_seconds: float, limit_seconds: float) -> str | None:
        """Return the pause to announce to the peers, or None if they are not to wait.

        Reads all stacks if there is no progress.
        """
        pause = self._pause_phase()
        if pause is None and idle_seconds > MIN_IDLE_SECONDS:
            pause = silent_activity(self._training_thread)
        if pause is None or idle_seconds > ACCEPTED_LIMITS * limit_seconds:
            return None
        waits = idle_seconds > WAITING_LIMITS * limit_seconds and self._waiting_rank_sets()
        return None if waits else pause

    def _pause_phase(self) -> str | None:
        """Return the phase if it is a pause; in evaluation mode `other` counts as one.

        In a script that trains in evaluation mode, as it forgot to leave it, the mode is ignored.
        """
        is_training = self._context.is_training() is not False
        phase = self._phase_timer.current  # read last: of the mode that was read, or later
        if phase in (BACKWARD, OPTIMIZER):
            self._eval_mode_is_pause = is_training
        if phase in PAUSES:
            return PHASES[phase]
        is_eval = phase == OTHER and not is_training and self._eval_mode_is_pause
        return PHASES[EVAL] if is_eval else None

    def _waiting_rank_sets(self) -> list[RankSetSummary]:
        """Return the rank sets whose last collective is in flight here."""
        rank_sets = self._context.rank_sets() or ()
        return [each for each in rank_sets if each.is_waiting and len(each.members) > 1]

    def _waits_for_a_peer(self) -> bool:
        """Whether a collective is in flight here that a known peer has not issued."""
        waiting = self._waiting_rank_sets()
        peers = (self._context.peers() if waiting else None) or {}
        return any(
            rank in peers and peers[rank].issued.get(rank_set.key, 0) < rank_set.issued
            for rank_set in waiting
            for rank in rank_set.members
        )


def _is_pausing(peer: Heartbeat) -> bool:
    """Whether to wait for a peer. From the end of its script no heartbeat will follow."""
    return peer.pause not in (None, END) and (peer.age_seconds or 0.0) < MAX_HEARTBEAT_SECONDS
