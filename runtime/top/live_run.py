"""Scrapes the ranks of a run that is active, and computes what the terminal shows of it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
)
from ...metrics.catalog.labels import CAUSE, NON_TRAINING_PHASES, PHASES
from ...metrics.catalog.memory import MEMORY_CATEGORIES
from ...metrics.exporters.prometheus import read_exposition
from ...metrics.recorder import Snapshot
from ...metrics.thresholds import STRAGGLER_SCORE_HIGH
from ..live_page.current_problems import Limit, limit_of, problems_of_rank
from ..live_page.run_state import Ranks, ratio_or_none, run_state
from ..live_page.step_history import Point
from .http_client import Get, NoAnswerError
from .recent_seconds import RecentSeconds, Spent, combined
from .run_view import (
    AlertView,
    MemoryView,
    RankState,
    RankView,
    RunView,
    Share,
    TunerView,
)

# Ranks that are scraped at a time, and threads for that. Of more ranks, the others are scraped in
# turn; rank 0 each time.
MAX_SCRAPES = 64
THREADS = 16
# A rank that has ended and no longer answers may be started again under the same run id.
ENDED_SCRAPE_SECONDS = 15.0
# Share of exposed time above which the part without a cause is shown.
MIN_REST = 0.005
ANSWERED = ("running", "ended")  # states of ranks whose values are shown
OWN_SIGNALS = "the ranks' own signals"
_METRICS = (
    *training.METRICS,
    *communication.METRICS,
    *memory.METRICS,
    *devices.METRICS,
    *across_ranks.METRICS,
    *tuner.METRICS,
    *overhead.METRICS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A rank to scrape. `url` is that of its /metrics."""

    rank: int
    node: str
    url: str


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The scrapes of one rank.

    Attributes:
        tried_at: Monotonic seconds of the last scrape.
        answered_at: Monotonic seconds of the last one with an answer.
        error: Why the last one had none.
        clock_ahead_seconds: How far its clock is ahead of that of this machine.
    """

    target: Target
    recent: RecentSeconds = field(default_factory=RecentSeconds)
    snapshot: Snapshot | None = None
    tried_at: float = float("-inf")
    answered_at: float | None = None
    error: str = ""
    clock_ahead_seconds: float = 0.0

    @property
    def state(self) -> RankState:
        if self.snapshot is not None and _has_ended(self.snapshot):
            return "ended"
        if self.error:
            return "no answer"
        return "not read yet" if self.snapshot is None else "running"

    def is_due(self, now: float) -> bool:
        """Whether to scrape it now."""
        is_closed = self.state == "ended" and bool(self.error)
        return not is_closed or now - self.tried_at >= ENDED_SCRAPE_SECONDS


class LiveRun:
    """The ranks of one run, scraped again with each `read`.

    Args:
        run_id: The run.
        source: Where the targets are from, to show it.
        get: Returns a page; raises NoAnswerError.
        now: A monotonic clock, in seconds.
        unix_now: A clock that returns Unix seconds.
    """

    def __init__(
        self,
        run_id: str,
        source: str,
        get: Get,
        *,
        now: Callable[[], float] = time.monotonic,
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        self._run_id, self._source, self._get = run_id, source, get
        self._now, self._unix_now = now, unix_now
        self._ranks: dict[int, _Rank] = {}

    @property
    def answers(self) -> bool:
        """Whether any rank has answered its last scrape."""
        return any(rank.snapshot and not rank.error for rank in self._ranks.values())

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self._ranks) and all(r.state == "ended" for r in self._ranks.values())

    def read(self, targets: Iterable[Target], notes: Sequence[str] = ()) -> RunView:
        """Scrape the ranks and return the run at this moment.

        Args:
            targets: All ranks. Others have left the job and are not shown anymore, unless this is
                empty.
            notes: What else could not be read, to show it.
        """
        listed = {target.rank: target for target in targets}
        if listed:
            self._ranks = {rank: each for rank, each in self._ranks.items() if rank in listed}
        for rank, target in listed.items():
            self._ranks.setdefault(rank, _Rank(target=target)).target = target
        self._scrape()
        return self._view(notes)

    def _scrape(self) -> None:
        now = self._now()
        by_age = sorted(
            (rank for rank in self._ranks.values() if rank.is_due(now)),
            key=lambda rank: (rank.target.rank != 0, rank.tried_at),
        )
        waiting = deque(by_age[:MAX_SCRAPES])

        def work() -> None:
            while waiting:
                try:
                    rank = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                self._scrape_rank(rank)

        # Daemon threads: the program can end while a host does not answer.
        threads = [
            threading.Thread(target=work, name="zerowatch-top-scrape", daemon=True)
            for _ in range(min(THREADS, len(waiting)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _scrape_rank(self, rank: _Rank) -> None:
        rank.tried_at = self._now()
        try:
            page = self._get(rank.target.url)
            snapshot = read_exposition(page.body.decode(), _METRICS)
            if training.RUN_ACTIVE not in snapshot.values:
                raise NoAnswerError("its answer has no metrics of a run")
            if not _has_finite_counters(snapshot):
                raise NoAnswerError("its counters are no numbers")
        except NoAnswerError as error:
            rank.error = str(error)
            return
        except ValueError:
            rank.error = "its answer is not in the format of Prometheus"
            return
        rank.error, rank.snapshot, rank.answered_at = "", snapshot, self._now()
        if page.sent_at is not None:
            rank.clock_ahead_seconds = page.sent_at - self._unix_now()
        rank.recent.add(snapshot, now=rank.answered_at)

    def _view(self, notes: Sequence[str]) -> RunView:
        now = self._unix_now()
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        rows = [self._rank_view(rank) for rank in ranks]
        shown = [rank for rank in ranks if rank.state in ANSWERED]
        spent = [(rank, rank.recent.spent()) for rank in shown]
        # Sums need ranks of the same period: a rank that was restarted has only its start.
        first = spent[0][1] if spent else None
        total = combined(each for _, each in spent if first and each.is_whole == first.is_whole)
        lead = self._ranks.get(0)
        snapshot = lead.snapshot if lead is not None and lead.snapshot is not None else _NOTHING
        thresholds = {
            name: value
            for (name,), value in snapshot.values.get(training.ALERT_THRESHOLD, {}).items()
        }
        limit = thresholds.get(STRAGGLER_SCORE_HIGH.name, float(STRAGGLER_SCORE_HIGH))
        now_of_lead = now + (lead.clock_ahead_seconds if lead is not None else 0.0)
        state: Mapping[str, Any] = run_state(
            snapshot,
            recent=_last_minute(lead, now_of_lead),
            ranks=Ranks(
                figures={},
                slow={rank.target.rank: slow for rank in shown if (slow := _slow(rank, limit))},
                addresses={},
                nodes={},
            ),
            thresholds=thresholds,
            run_id=self._run_id,
            now=now_of_lead,
            nonfinite_at=self._nonfinite_at(lead, now_of_lead),
        )
        return RunView(
            run_id=self._run_id,
            status=state["status"] if lead and lead.state in ANSWERED else "no answer",
            source=self._source,
            is_live=True,
            at=now - min((r.age_seconds for r in rows if r.age_seconds is not None), default=0.0),
            period=_period(total),
            facts=list(_facts(snapshot, state, rows, total)),
            phases=_phases(total),
            exposed=_exposed(total),
            causes=_causes(total),
            memory=_memory(shown),
            ranks=rows,
            alerts=[
                *(AlertView(name=p["alert"], **_without(p, "alert")) for p in state["problems"]),
                *_of_other_ranks(ranks, limit_of(thresholds)),
            ],
            alerts_source=OWN_SIGNALS,
            tuner=_tuner(state["tuner"]),
            straggler_threshold=limit,
            notes=[*notes, *_missing(snapshot, rows)],
        )

    def _nonfinite_at(self, lead: _Rank | None, now: float) -> float | None:
        """Return the Unix time of the last loss of rank 0 that is not finite, if it was seen."""
        seen_at = lead.recent.nonfinite_at if lead is not None else None
        return None if seen_at is None else now - (self._now() - seen_at)

    def _rank_view(self, rank: _Rank) -> RankView:
        target, snapshot = rank.target, rank.snapshot
        age = None if rank.answered_at is None else self._now() - rank.answered_at
        row = RankView(
            rank=target.rank, node=target.node, state=rank.state, note=rank.error, age_seconds=age
        )
        if snapshot is None or rank.state not in ANSWERED:
            return row
        spent = rank.recent.spent()
        scores = {
            phase: score
            for (phase,), score in snapshot.values.get(communication.STRAGGLER_SCORE, {}).items()
        }
        slowest = max(scores, key=lambda phase: scores[phase], default=None)
        memories = _memory([rank])
        utilization = snapshot.values.get(devices.DEVICE_UTILIZATION, {})
        return RankView(
            rank=target.rank,
            node=target.node,
            state=rank.state,
            age_seconds=age,
            steps=int(snapshot.total(training.STEPS)),
            step_seconds=snapshot.value(training.STEP_DURATION_QUANTILE, "0.5"),
            exposed_ratio=ratio_or_none(spent.exposed, spent.training_seconds),
            wait_ratio=ratio_or_none(spent.wait, spent.training_seconds),
            data_ratio=ratio_or_none(spent.phases.get("data"), spent.training_seconds),
            memory_ratio=_highest(ratio_or_none(m.peak_bytes, m.limit_bytes) for m in memories),
            risk_ratio=_highest(m.risk_ratio for m in memories),
            utilization_ratio=_highest(
                value for (name,), value in utilization.items() if name != "cpu"
            ),
            mfu_ratio=snapshot.value(training.MFU),
            straggler_score=scores[slowest] if slowest else None,
            straggler_phase=slowest,
        )


_NOTHING = Snapshot(values={}, distributions={})


def _has_finite_counters(snapshot: Snapshot) -> bool:
    return all(
        math.isfinite(value)
        for spec, series in snapshot.values.items()
        if spec.kind == "counter"
        for value in series.values()
    )


def _has_ended(snapshot: Snapshot) -> bool:
    return training.RUN_END_INFO in snapshot.values or snapshot.value(training.RUN_ACTIVE) == 0


def _last_minute(rank: _Rank | None, now: float) -> Point | None:
    """Return the last minute of a rank; None without one: an old problem is none of now."""
    if rank is None or rank.snapshot is None:
        return None
    spent = rank.recent.spent()
    return None if spent.is_whole else spent.point(now)


def _slow(rank: _Rank, limit: float) -> dict[str, float]:
    snapshot = rank.snapshot or _NOTHING
    scores = snapshot.values.get(communication.STRAGGLER_SCORE, {})
    return {phase: score for (phase,), score in scores.items() if score > limit}


def _period(total: Spent | None) -> str:
    if total is None:
        return "no values yet"
    return "since the start" if total.is_whole else f"last {total.period_seconds:.0f} s"


def _facts(
    snapshot: Snapshot, state: Mapping[str, Any], rows: Sequence[RankView], total: Spent | None
) -> Iterator[tuple[str, str]]:
    def fact(name: str, value: float | None, form: str, unit: str = "") -> Iterator[Any]:
        if value is not None:
            yield name, f"{value:{form}}{unit}"

    known = state["training"]
    yield from fact("steps", known["steps"], ",.0f")
    quantiles = known["step_seconds"]
    for name, quantile in (("step p50", "0.5"), ("p99", "0.99")):
        if quantile in quantiles:
            yield name, format_seconds(quantiles[quantile])
    is_complete = total is not None and total.ranks == snapshot.value(training.WORLD_SIZE)
    if is_complete and total is not None:  # else a sum over ranks would be too low
        seconds = sum(total.phases.values()) / total.ranks
        shared = tuple(of for (of,) in snapshot.values.get(training.SHARED_WORK, {}))
        for name, amount in (("tokens/s", total.tokens), ("samples/s", total.samples)):
            if amount and not name.startswith(shared):
                yield from fact(name, ratio_or_none(amount, seconds), ",.4g")
                break
    yield from fact("loss", known["loss"], ".4g")
    mfu = [row.mfu_ratio for row in rows if row.mfu_ratio is not None]
    yield from fact("MFU", sum(mfu) / len(mfu) if mfu else None, ".1%")
    yield from fact("grad norm", known["gradient_norm"], ".3g")
    yield from fact("lr", known["learning_rate"], ".3g")
    yield from fact("skipped", known["skipped"] or None, ".0f")
    info = state["run"]
    if stage := info.get("zero_stage"):
        yield "ZeRO", stage
    if backend := info.get("backend"):
        yield "backend", backend
    yield from fact("attempt", info["attempt"] or None, ".0f")


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits and its unit, such as "123 ms" or "1.53 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _share(name: str, seconds: float, total: Spent) -> Share:
    is_training = name not in NON_TRAINING_PHASES
    whole = total.training_seconds if is_training else sum(total.phases.values())
    return Share(
        name=name,
        ratio=seconds / whole if whole else 0.0,
        seconds_per_step=ratio_or_none(seconds, total.steps),
    )


def _phases(total: Spent | None) -> list[Share]:
    if total is None:
        return []
    in_order = [phase for phase in PHASES if phase not in NON_TRAINING_PHASES]
    return [
        _share(phase, total.phases[phase], total)
        for phase in (*in_order, *NON_TRAINING_PHASES)
        if total.phases.get(phase)
    ]


def _exposed(total: Spent | None) -> Share | None:
    if total is None or total.exposed is None or not total.training_seconds:
        return None
    return _share("exposed", total.exposed, total)


def _causes(total: Spent | None) -> list[Share]:
    if total is None or not total.exposed or not total.causes:
        return []
    causes = [_share(cause, total.causes.get(cause, 0.0), total) for cause in CAUSE.values]
    rest = max(0.0, total.exposed - sum(total.causes.values()))
    causes.sort(key=lambda cause: -cause.ratio)
    return with_rest(causes, _share("unknown", rest, total))


def with_rest(causes: list[Share], rest: Share) -> list[Share]:
    """Return the causes, with the rest of exposed time if it is more than a rounding error."""
    is_shown = rest.ratio > MIN_REST * sum(cause.ratio for cause in (*causes, rest))
    return [*causes, rest] if is_shown else causes


def _memory(ranks: Sequence[_Rank]) -> list[MemoryView]:
    """Return, for each kind of device, the rank that is nearest to the limit."""
    nearest: dict[str, tuple[tuple[float, float], MemoryView]] = {}
    for rank in ranks:
        snapshot = rank.snapshot or _NOTHING
        for device in {
            labels[0]
            for spec in (memory.MEMORY_PEAK, memory.MEMORY_LIMIT)
            for labels in snapshot.values.get(spec, {})
        }:
            view = _memory_view(snapshot, device, rank.target.rank)
            used = ratio_or_none(view.peak_bytes, view.limit_bytes) or 0.0
            key = (round(view.risk_ratio or 0.0, 2), used)
            kind = device.partition(":")[0]
            if kind not in nearest or key > nearest[kind][0]:
                nearest[kind] = key, view
    return [nearest[kind][1] for kind in sorted(nearest, key=lambda kind: (kind == "cpu", kind))]


def _memory_view(snapshot: Snapshot, device: str, rank: int) -> MemoryView:
    categories = {
        category: value
        for category in MEMORY_CATEGORIES
        if (value := snapshot.value(memory.MEMORY_CATEGORY_BYTES, device, category))
    }
    if baseline := snapshot.value(memory.MEMORY_BASELINE, device):
        categories["baseline"] = baseline
    return MemoryView(
        device=f"{device} rank {rank}",
        peak_bytes=snapshot.value(memory.MEMORY_PEAK, device, "allocated"),
        limit_bytes=snapshot.value(memory.MEMORY_LIMIT, device),
        predicted_bytes=snapshot.value(memory.MEMORY_PREDICTED_PEAK, device),
        risk_ratio=snapshot.value(memory.OOM_RISK, device),
        categories=dict(sorted(categories.items(), key=lambda item: -item[1])),
    )


def _of_other_ranks(ranks: Sequence[_Rank], limit: Limit) -> Iterator[AlertView]:
    """Yield what rank 0's metrics do not show of the other ranks."""
    for rank in ranks:
        number, snapshot = rank.target.rank, rank.snapshot
        if rank.state == "no answer":
            yield AlertView(
                severity="critical",
                name="no answer",
                text=f"rank {number} on {rank.target.node} does not answer: {rank.error}",
            )
        elif number and rank.state == "running" and snapshot is not None:
            for problem in problems_of_rank(snapshot, number, limit):
                yield AlertView(severity=problem.severity, name=problem.alert, text=problem.text)


def _missing(snapshot: Snapshot, rows: Sequence[RankView]) -> Iterator[str]:
    world_size = snapshot.value(training.WORLD_SIZE)
    if world_size is not None and len(rows) < world_size:
        yield f"{world_size - len(rows):.0f} of {world_size:.0f} ranks are not among the targets"


def _tuner(tuner: Mapping[str, Any]) -> TunerView:
    gains = tuner["gains"]
    knobs = {
        name: f"{value:,.6g}" + (f" ({gains[name]:+.0%})" if name in gains else "")
        for name, value in tuner["knobs"].items()
    }
    counts = [f"{n:.0f} {verdict.replace('_', ' ')}" for verdict, n in tuner["decisions"].items()]
    return TunerView(
        state=tuner["state"],
        symptoms=dict(sorted(tuner["symptoms"].items(), key=lambda item: -item[1])),
        knobs=knobs,
        decisions=[f"decisions: {', '.join(counts)}"] if counts else [],
    )


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
