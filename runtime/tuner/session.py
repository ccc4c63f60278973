"""The auto-tuner of a TrainingRun: rank 0 decides, all ranks act at the same safe point."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common.host_group import HostGroup
from ..trainer.data.data_source import TrainingData
from ..trainer.engine_holder import EngineHolder
from ..trainer.open_window import RankNotice, no_notice
from ..trainer.window.step_result import StepResult
from ..trainer.window_runner import WindowRunner
from .history_store import open_history
from .job_facts import job_facts
from .knobs.run_knobs import RunKnobs
from .null_session import NullTunerSession
from .policy.controller import Controller
from .policy.metrics_delta import CPU
from .policy.numerics import numerics_named
from .policy.options import TunerOptions
from .policy.search_history import SearchHistory
from .policy.transaction import exchange_order
from .policy.types import Order, StepTime
from .rank0 import RankZeroTuner
from .reported_oom_risk import ReportedOomRisk
from .thresholds import thresholds_of

logger = logging.getLogger(__name__)


class TunerSession(NullTunerSession):
    """Lets a run be tuned; all ranks call its methods alike, rank 0 alone decides.

    Args:
        changes: Holds the engine.
        windows: Of the run.
        host_group: Of the run.
        sharing: Of the run.
        settings: All of them.
    """

    def __init__(
        self,
        changes: EngineHolder,
        windows: WindowRunner,
        host_group: HostGroup,
        sharing: TrainingData,
        settings: Settings,
    ) -> None:
        self._host_group, self._settings = host_group, settings
        self._changes, self._windows = changes, windows
        self._watch = changes.engine.watch
        self._hands = RunKnobs(
            changes,
            windows,
            host_group,
            measured=windows.peak_history.measured,
            largest_share=self._largest_share,
            host_risk=lambda: self._host_risk,
            checkpointed=windows.checkpointed,
            sharing=sharing,
        )
        self._facts = job_facts(changes.engine)
        self.numerics = numerics_named(settings.tuner.numerics)
        self._lead: RankZeroTuner | None = None
        self._make_lead = self._watch.fail_open.wrap("tuner", self._new_lead)
        self._risk = ReportedOomRisk()
        self._host_risk = 0.0
        self._last_end: float | None = None
        self._is_within = False  # a window, or one that did not come to its end
        windows.notice_source = self._notice
        self._watch.subscribe(self._take_record)

    @property
    def is_on_trial(self) -> bool:
        """Whether the last window was run with something that may be taken back."""
        opened = self._windows.opened
        return opened is not None and any(each.is_on_trial for each in opened.notices[:1])

    def before_window(self) -> None:
        """Take back what may have failed the last window, if that did not come to its end."""
        if self._is_within:
            self._window_failed()
            if self.is_on_trial:  # it may be why, and the next window would fail too
                self._exchange_order(settle=True)
            self.interrupted()
        self._is_within = True

    def window_ended(self, result: StepResult) -> None:
        """Take a committed window, and do what rank 0 wants done after it, if anything."""
        self._hands.window_ended()
        self._is_within = False
        opened, now = self._windows.opened, perf_counter()
        if opened is None or not opened.notices:  # it was closed
            return
        if self._host_group.rank == 0:
            seconds = result.seconds if self._last_end is None else now - self._last_end
            step = StepTime(
                number=result.step,
                seconds=seconds,
                samples=result.samples,
                usable=self._last_end is not None and not result.replays and not result.skipped,
                oom_risk=max(notice.oom_risk for notice in opened.notices),
                replays=result.replays,
                loss=result.loss if math.isfinite(result.loss) else None,
            )
            if self._lead is None:  # only now is it known what the job could work with
                self._lead = self._make_lead()
            if self._lead is not None:
                self._lead.window_ended(step)
        self._last_end = now
        if opened.notices[0].exchanges_order:
            self._exchange_order(settle=False)

    def settle(self) -> None:
        """Have nothing on trial, and nothing of what follows counted as a step's time."""
        if self._is_within:
            self._window_failed()
        self._exchange_order(settle=True)
        self.interrupted()

    def interrupted(self) -> None:
        """Take it that something other than training falls into the next step."""
        self._last_end = None

    def changed(self) -> None:
        """Take it that the user changed what the run works with; that is good from then on."""
        if self._lead is not None:
            self._lead.changed()
        self._risk.changed(now=self._changes.engine.global_steps)
        self.interrupted()

    def close(self) -> None:
        """Give back what the hands hold. Safe to call twice."""
        if self._lead is not None and not self._is_within:  # else it may be what ends the run
            self._lead.close()
        self._windows.notice_source = no_notice
        self._hands.close()

    def _notice(self) -> RankNotice:
        """Return what this rank sends to all ranks at the start of a window."""
        lead = self._lead
        return RankNotice(
            exchanges_order=lead is not None and lead.meets_next,
            oom_risk=self._risk.risk(now=self._changes.engine.global_steps, seconds=perf_counter()),
            is_on_trial=lead is not None and lead.is_on_trial,
        )

    def _exchange_order(self, *, settle: bool) -> None:
        order: Order | None = None
        if self._lead is not None:
            order = self._lead.order(settle=settle)
        met = exchange_order(self._host_group, self._hands, order)
        if met is not None:
            self._risk.changed(now=self._changes.engine.global_steps)
            if self._lead is not None:
                self._lead.carried_out(*met)
        self._last_end = perf_counter()

    def _window_failed(self) -> None:
        """Take it that the last window ended by an error, on all ranks, and not in its opening."""
        self._is_within = False
        if self._lead is not None and self._windows.opened is not None:
            self._lead.window_failed()

    def _new_lead(self) -> RankZeroTuner:
        tuner = self._settings.tuner
        memory = open_history(self._changes.engine, self._settings, self._facts.world_size)
        controller = Controller(
            self._hands,
            self._watch.snapshot,
            lambda: self._facts,
            TunerOptions(
                acts=tuner.mode == "auto",
                numerics=self.numerics,
                allows_rebuild=tuner.rebuild,
                min_gain=tuner.min_gain,
                exploration_ratio=tuner.exploration_ratio,
                observe_seconds=tuner.observe_seconds,
                soak_steps=tuner.soak_steps,
                total_steps=tuner.total_steps,
                thresholds=thresholds_of(self._settings),
            ),
            self._watch.advisor.transfer_reporter(tuner.mode),
            SearchHistory(memory.load(), memory.died_of(), memory),
        )
        logger.info(
            "the tuner is on: mode %s, numerics %s; it first looks after %g seconds of training",
            tuner.mode,
            tuner.numerics,
            tuner.observe_seconds,
        )
        return RankZeroTuner(controller, self._watch.fail_open, self._stop_file)

    def _stop_file(self) -> Path | None:
        folder = self._watch.run_folder
        default = None if folder is None else folder / "tuner.stop"
        return self._settings.tuner.stop_file or default

    def _largest_share(self) -> int:
        opened = self._windows.opened
        return 0 if opened is None else max(opened.share.samples)

    def _take_record(self, record: StepRecord) -> None:
        """Learn this rank's risk, on the watch thread."""
        risk = max(record.oom_risk_ratio.values(), default=0.0)
        self._host_risk = record.oom_risk_ratio.get(CPU, 0.0)
        self._risk.take(step=record.step, risk=risk, seconds=perf_counter())


def new_tuning(
    changes: EngineHolder,
    windows: WindowRunner,
    host_group: HostGroup,
    sharing: TrainingData,
) -> NullTunerSession:
    """Return the tuning of a run, as its settings have it: on all ranks alike or on none."""
    watch = changes.engine.watch
    own: TunerSession | None = None
    if watch.is_open and watch.settings.tuner.mode != "off":
        make = watch.fail_open.wrap("tuner", TunerSession)
        own = make(changes, windows, host_group, sharing, watch.settings)
    told = host_group.all_gather([-1 if own is None else own.numerics])
    if own is None:
        return NullTunerSession()
    if (told != own.numerics).any():
        logger.warning("not tuned: ranks differ in whether they are watched, or in tuner.numerics")
        own.close()
        return NullTunerSession()
    return own


def tuner_settings(
    settings: Mapping[str, Any] | None, mode: str | None, numerics: str | None
) -> dict[str, Any]:
    """Return a caller's settings with what it asked of the tuner by name."""
    given = dict(settings or {})
    named = {"mode": mode, "numerics": numerics}
    asked = {name: value for name, value in named.items() if value is not None}
    return {**given, "tuner": {**given.get("tuner", {}), **asked}} if asked else given
