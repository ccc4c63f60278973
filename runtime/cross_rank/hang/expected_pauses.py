"""Decides whether a rank is in an expected pause, such as a checkpoint, if it makes no progress.

A pause is accepted for ten hang limits after the last progress. A rank that waits in a collective
never counts as pausing. Otherwise one kind of hang would never be detected: a rank evaluates alone,
and waits in a collective that no other rank enters.
"""

from __future__ import annotations

from ....metrics.catalog.labels import PHASES
from ...common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    EVAL,
    GENERATE,
    OPTIMIZER,
    OTHER,
    PhaseTimer,
)
from ..exchange.rank_messages import Heartbeat
from .hang_context import HangContext
from .hang_evidence import RankSetSummary
from .thread_stacks import END, PROMPT, silent_activity

# Phases without steps.
PAUSES = {EVAL, GENERATE, CHECKPOINT}
ELSEWHERE = "an evaluation or a checkpoint on another thread"
# Longest accepted pause, in hang limits.
ACCEPTED_LIMITS = 10
# If a rank has waited in a collective for this fraction of the limit, it stops announcing a pause.
# Other ranks notice this before they have waited for a whole limit themselves.
WAITING_LIMITS = 0.5
# A peer with an older heartbeat does not count as pausing, even if it announced a pause.
MAX_HEARTBEAT_SECONDS = 15.0
# Time without progress after which stacks and collectives are read to decide about a pause.
MIN_IDLE_SECONDS = 2.0


class ExpectedPauses:
    """Decides whether this rank is in an expected pause.

    It can be used on any thread. The argument `idle_seconds`
    is the time since the last progress, and `limit_seconds` is the hang limit.
    """

    def __init__(self, phase_timer: PhaseTimer, context: HangContext) -> None:
        self._phase_timer = phase_timer
        self._context = context
        self._eval_mode_is_pause = True

    def is_expected(self, idle_seconds: float, limit_seconds: float) -> bool:
        """Whether the current activity of this rank may take long. Called each second."""
        if self._pause_phase() is None or idle_seconds > ACCEPTED_LIMITS * limit_seconds:
            return False
        return idle_seconds < MIN_IDLE_SECONDS or not self._waits_for_a_peer()

    def is_busy(self, idle_seconds: float, limit_seconds: float) -> bool:
        """Whether this rank or a peer is busy with an activity that shows no progress.

        It reads all stacks, so it is called only after the limit has passed.
        """
        own = self._silent_activity()
        # A prompt may stay open for hours. But a debugger's prompt may be on a hung run's stack.
        is_prompt = own == PROMPT and not self._waiting_rank_sets()
        if own is not None and (is_prompt or idle_seconds < ACCEPTED_LIMITS * limit_seconds):
            return True
        return any(_is_pausing(peer) for peer in (self._context.peers() or {}).values())

    def announced(self, idle_seconds: float, limit_seconds: float) -> str | None:
        """Return the pause to announce to the peers, or None if the peers should not wait.

        Reads all stacks if there is no progress.
        """
        pause = self._pause_phase()
        if pause is None and idle_seconds > MIN_IDLE_SECONDS:
            pause = self._silent_activity()
        if pause is None or idle_seconds > ACCEPTED_LIMITS * limit_seconds:
            return None
        waits = idle_seconds > WAITING_LIMITS * limit_seconds and self._waiting_rank_sets()
        return None if waits else pause

    def _silent_activity(self) -> str | None:
        """Return the activity that explains a lack of progress; a cell without training is one."""
        timer = self._phase_timer
        return PROMPT if timer.is_stopped else silent_activity(timer.training_thread)

    def _pause_phase(self) -> str | None:
        """Return the phase if it is a pause. In evaluation mode, `other` counts as a pause.

        So does `other` while another thread evaluates or saves: training may wait for it. If a
        script trains in evaluation mode, because it forgot to leave it, the mode is ignored.
        """
        is_training = self._context.is_training() is not False
        phase = self._phase_timer.current  # read last: not older than the mode
        if phase in (BACKWARD, OPTIMIZER):
            self._eval_mode_is_pause = is_training
        if phase in PAUSES:
            return PHASES[phase]
        if phase != OTHER:
            return None
        if not is_training and self._eval_mode_is_pause:
            return PHASES[EVAL]
        return ELSEWHERE if self._phase_timer.pausing_threads else None

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
    """Whether to wait for a peer. After the end of its script, a peer sends no heartbeats."""
    return peer.pause not in (None, END) and (peer.age_seconds or 0.0) < MAX_HEARTBEAT_SECONDS
