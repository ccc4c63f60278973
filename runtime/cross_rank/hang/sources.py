"""What the hang watch looks at, taken from the rooms that know it. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter_ns

from ....metrics.catalog.labels import OPS, PHASES
from ....metrics.recorder import Recorder
from ....metrics.settings import HangSettings
from ...collectives.call import CollectiveCall
from ...collectives.groups import Group, RankSet
from ...common.fail_open import FailOpen
from ...common.phase_timer import PhaseTimer
from ..cross_rank_thread import CrossRankThread
from .evidence import CallLine, GroupLine, Peer, Sources
from .flight_recorder import flight_dump
from .hang_watch import HangWatch

RankSets = Callable[[], list[RankSet]]

CALLS_PER_CIRCLE = 64


def watch_for_hangs(
    *,
    rank: int,
    settings: HangSettings,
    clock: PhaseTimer,
    rank_sets: RankSets,
    exchange: CrossRankThread,
    folder: Callable[[], Path | None],
    recorder: Recorder,
    fail_open: FailOpen,
    training: Callable[[], bool] = lambda: True,
) -> HangWatch:
    """Make the watch on the calling thread, which is the one that trains.

    `training` tells whether the watched module is in training mode.
    """
    return HangWatch(
        rank=rank,
        settings=settings,
        clock=clock,
        sources=hang_sources(
            rank=rank,
            rank_sets=rank_sets,
            exchange=exchange,
            folder=folder,
            fail_open=fail_open,
            training=training,
        ),
        recorder=recorder,
        fail_open=fail_open,
    )


def hang_sources(
    *,
    rank: int,
    rank_sets: RankSets,
    exchange: CrossRankThread,
    folder: Callable[[], Path | None],
    fail_open: FailOpen,
    training: Callable[[], bool] = lambda: True,
) -> Sources:
    """Put together what a hang watch needs; a source that fails is dropped, and the others stay."""
    wrap = fail_open.wrap
    return Sources(
        folder=folder,
        last_activity_ns=wrap("hang activity", Activity(rank_sets)),
        training=wrap("hang training mode", training),
        peers=wrap("hang peers", lambda: _peers(exchange, rank)),
        groups=wrap("hang groups", lambda: [_group_line(each) for each in rank_sets()]),
        last_calls=wrap("hang calls", lambda: list(_last_calls(rank_sets()))),
        divergence=wrap("hang divergence", lambda: exchange.divergence),
        flight_dump=wrap("flight recorder", flight_dump),
        others_hang=wrap("hang notice", lambda: exchange.others_hang),
        tell_others=wrap("hang notice", exchange.tell_of_hang),
    )


class Activity:
    """When a collective was last seen to begin or end, as precisely as it is asked.

    It compares instead of being told, so that the hot path of a call has nothing to do for it.
    """

    def __init__(self, rank_sets: RankSets, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._rank_sets = rank_sets
        self._now_ns = now_ns
        self._seen: list[tuple[int, bool, bool]] = []
        self._changed_ns = 0

    def __call__(self) -> int:
        """Return the time of the last look that found something new."""
        seen = [_progress(rank_set) for rank_set in self._rank_sets()]
        if seen != self._seen:
            self._seen = seen
            self._changed_ns = self._now_ns()
        return self._changed_ns


def _progress(rank_set: RankSet) -> tuple[int, bool, bool]:
    """Tell the last call from others, and whether it has returned and ended."""
    if not rank_set.recent:
        return (0, True, True)
    last = rank_set.recent[-1]
    return (id(last), last.start_ns != 0, last.end_ns != 0)


def _peers(exchange: CrossRankThread, rank: int) -> Mapping[int, Peer] | None:
    return {
        beat.rank: Peer(
            rank=beat.rank,
            host=beat.host,
            heartbeat_age_seconds=beat.age_seconds,
            arrived=beat.arrived,
            pause=beat.pause,
        )
        for beat in exchange.peers.values()
        if beat.rank != rank
    } or None


def _group_line(rank_set: RankSet) -> GroupLine:
    numbered = (call for call in reversed(list(rank_set.recent)) if call.sequence)
    last = next(numbered, None)
    return GroupLine(
        key=rank_set.key,
        role=rank_set.role,
        members=rank_set.members,
        issued=rank_set.issued,
        waits=last is not None and (not last.start_ns or _is_under_way(last)),
    )


def _last_calls(rank_sets: list[RankSet]) -> Iterator[CallLine]:
    """Yield the last calls among each rank set, and all that are under way."""
    now_ns = perf_counter_ns()
    for rank_set in rank_sets:
        returned: set[Group] = set()  # groups of which a later call has returned
        lines = []
        for place, call in enumerate(reversed(list(rank_set.recent))):
            under_way = _is_under_way(call) if call.start_ns else call.group not in returned
            if call.start_ns:
                returned.add(call.group)
            if under_way or place < CALLS_PER_CIRCLE:
                lines.append(_call_line(call, now_ns, under_way=under_way))
        yield from reversed(lines)


def _is_under_way(call: CollectiveCall) -> bool:
    """Whether a call that has returned goes on; False where its end cannot be had."""
    read = call.settled and call.timed  # then its events may serve other calls by now
    if call.end_event is not None and not read:
        return not call.end_event.query()
    return call.timed and not call.settled and (call.start_event is not None or not call.end_ns)


def _call_line(call: CollectiveCall, now_ns: int, *, under_way: bool) -> CallLine:
    seconds = None
    if call.settled:
        seconds = call.duration_ns / 1e9 if call.timed else None
    elif call.start_ns and (under_way or call.start_event is None):
        seconds = ((now_ns if under_way else call.end_ns) - call.start_ns) / 1e9
    return CallLine(
        group=call.group.rank_set.key,
        role=call.group.rank_set.role,
        sequence=call.sequence,
        op=OPS[call.op],
        payload_bytes=call.payload_bytes,
        dtype=str(call.dtype).removeprefix("torch."),
        phase=PHASES[call.phase],
        state="under way" if under_way else "done",
        seconds=seconds,
    )
