"""Tunes a TrainingRun: rank 0 decides, and all ranks set their knobs between two windows."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator

from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common import accelerator
from ..common.ds_config import MICRO_BATCH, zero_stage
from ..common.host_group import HostGroup
from ..common.own_files import is_foreign_folder
from ..engine.rebuild.preconditions import zero_block
from ..trainer.data.training_data import TrainingData
from ..trainer.engine_holder import EngineHolder
from ..trainer.window.step_result import StepResult
from ..trainer.window.window_agreement import TunerStatus, no_tuner_status
from ..trainer.window_runner import WindowRunner
from .controller_runner import ControllerRunner, StopFile
from .job_facts import job_facts
from .knobs.run_knobs import RunKnobs
from .policy.controller import Controller
from .policy.controller_interface import TunerOptions
from .policy.diagnose import Thresholds
from .policy.history_file import HistoryEntry, HistoryFile, job_fingerprint
from .policy.metrics_delta import CPU
from .policy.policy_types import Numerics, StepTime, SwitchRequest
from .policy.search_history import SearchHistory
from .transaction import switch_all_ranks

logger = logging.getLogger(__name__)

# Keys of a ds config that set the size of a batch or of its parts.
_BATCH_KEYS = ("train_batch_size", MICRO_BATCH, "gradient_accumulation_steps")
STALE_SECONDS = 30.0  # an OOM risk that is not updated for this long is unknown


class TunerSession(Protocol):
    """Tunes one run; every rank makes the same calls at the same steps."""

    @property
    def is_on_trial(self) -> bool:
        """Whether the last window was run with a configuration that may be rolled back."""

    def on_window_start(self) -> None:
        """Prepare for the next window."""

    def on_window_end(self, result: StepResult) -> None:
        """Handle a committed window."""

    def pause_trial(self) -> None:
        """Roll back the configuration on trial, e.g. before a checkpoint."""

    def exclude_step_time(self) -> None:
        """Record that something other than training falls into the next step's time."""

    def on_user_change(self) -> None:
        """Treat the present configuration as known to be good, because the user set it."""

    def close(self) -> None:
        """Release the knobs. Safe to call twice."""


class NullTunerSession:
    """Does nothing, for a run that is not tuned or not monitored."""

    @property
    def is_on_trial(self) -> bool:
        """Always False: nothing is on trial."""
        return False

    def on_window_start(self) -> None:
        """Do nothing."""

    def on_window_end(self, result: StepResult) -> None:
        """Do nothing."""

    def pause_trial(self) -> None:
        """Do nothing."""

    def exclude_step_time(self) -> None:
        """Do nothing."""

    def on_user_change(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ActiveTunerSession:
    """Tunes a run on one rank.

    Args:
        engine_holder: Holder of the run's engine, which the knobs change.
        window_runner: Sends this rank's status to all ranks at the start of each window.
        host_group: Broadcasts rank 0's switch requests.
        data: Training data, whose batch size and load balance are knobs.
        settings: The run's settings, of which `tuner` configures the session.
        loss_decomposable: Whether the loss of a batch is the weighted mean of its parts' losses.

    Attributes:
        numerics: Strictness of numerics that the user allows.
    """

    def __init__(
        self,
        engine_holder: EngineHolder,
        window_runner: WindowRunner,
        host_group: HostGroup,
        data: TrainingData,
        settings: Settings,
        loss_decomposable: bool = True,
    ) -> None:
        self.numerics = Numerics.of_setting(settings.tuner.numerics)
        self._engine_holder, self._window_runner = engine_holder, window_runner
        self._host_group, self._settings, self._data = host_group, settings, data
        self._watch = engine_holder.engine.watch
        self._knobs = RunKnobs(engine_holder, window_runner, host_group, data)
        self._facts = job_facts(engine_holder.engine, loss_decomposable=loss_decomposable)
        self._runner: ControllerRunner | None = None  # stays None on all ranks but rank 0
        # The history is that of the job as its script starts it. A load may rebuild the engine
        # before the first window, and then the ds config and the optimizer's class are others.
        if host_group.rank == 0:
            holder, world_size = engine_holder, self._facts.world_size
            history = open_history(holder.engine, settings, world_size, holder.config)
            new_runner = partial(self._new_runner, history)
            self._create_runner = self._watch.fail_open.wrap("tuner", new_runner)
        self._oom_risk = ReportedOomRisk()
        self._last_end: float | None = None  # without the time of generation
        self._is_in_window = False  # still True at the start of a window if the last one failed
        window_runner.tuner_status_source = self._status
        self._watch.subscribe_internal(self._on_record)
        # A script may end without a call of `close`. The decision is written before the watch ends.
        self._watch.on_good_end.append(self._end_trial)

    @property
    def is_on_trial(self) -> bool:
        """Whether the last window was run with a configuration that may be rolled back."""
        opened = self._window_runner.opened
        return opened is not None and any(each.is_on_trial for each in opened.tuner_statuses[:1])

    def on_window_start(self) -> None:
        """Roll back the configuration on trial if the last window failed."""
        if self._is_in_window:
            self._on_window_failed()
            # The configuration may have caused the failure. The next window would then fail too.
            if self.is_on_trial:
                self._switch_all_ranks(pause_trial=True)
            self.exclude_step_time()
        self._is_in_window = True

    def on_window_end(self, result: StepResult) -> None:
        """Handle a committed window, and apply rank 0's request, if there is one."""
        self._knobs.on_window_end()
        self._is_in_window = False
        opened, now = self._window_runner.opened, self._training_clock()
        if opened is None or not opened.tuner_statuses:  # this session is closed
            return
        if self._host_group.rank == 0:
            seconds = result.seconds if self._last_end is None else now - self._last_end
            step = StepTime(
                number=result.step,
                seconds=seconds,
                samples=result.samples,
                usable=self._last_end is not None
                and not result.replays
                and not result.skipped
                and self._data.has_requested_batch,
                oom_risk=_highest_risk(opened.tuner_statuses),
                replays=result.replays,
                loss=result.loss if math.isfinite(result.loss) else None,
            )
            if self._runner is None:  # the options of all knobs are known only after a window
                self._runner = self._create_runner()
            if self._runner is not None:
                self._runner.on_window_end(step)
        self._last_end = now
        if opened.tuner_statuses[0].exchanges_switch_request:
            self._switch_all_ranks(pause_trial=False)

    def pause_trial(self) -> None:
        """Roll back the configuration on trial, and exclude the next step's time."""
        if self._is_in_window:
            self._on_window_failed()
        self._switch_all_ranks(pause_trial=True)
        self.exclude_step_time()

    def exclude_step_time(self) -> None:
        """Record that something other than training falls into the next step's time."""
        self._last_end = None

    def on_user_change(self) -> None:
        """Treat the present configuration as known to be good, because the user set it."""
        if self._runner is not None:
            self._runner.on_user_change()
        self._oom_risk.invalidate(now=self._engine_holder.engine.global_steps)
        self.exclude_step_time()

    def close(self) -> None:
        """Release the knobs. Safe to call twice."""
        self._end_trial()
        self._window_runner.tuner_status_source = no_tuner_status
        self._knobs.close()

    def _end_trial(self) -> None:
        """Record that the run ends normally, and write its last decision. Safe to call twice."""
        # If a window or a rebuild failed, the trial may have ended the run: it counts as crashed.
        has_failed = self._is_in_window or not self._engine_holder.has_engine
        if self._runner is not None and not has_failed:
            self._runner.close()

    def _status(self) -> TunerStatus:
        """Return the status that this rank sends to all ranks at the start of a window."""
        runner, step = self._runner, self._engine_holder.engine.global_steps
        risk = self._oom_risk.current(now=step, seconds=perf_counter())
        return TunerStatus(
            exchanges_switch_request=runner is not None and runner.needs_exchange,
            oom_risk=math.nan if risk is None else risk,
            is_on_trial=runner is not None and runner.is_on_trial,
        )

    def _switch_all_ranks(self, *, pause_trial: bool) -> None:
        request: SwitchRequest | None = None
        if self._runner is not None:
            request = self._runner.next_switch(pause_trial=pause_trial)
        applied = switch_all_ranks(self._host_group, self._knobs, request)
        if applied is not None:
            self._oom_risk.invalidate(now=self._engine_holder.engine.global_steps)
            if self._runner is not None:
                self._runner.on_switched(*applied)
        self._last_end = self._training_clock()

    def _training_clock(self) -> float:
        """Return the seconds of a clock that stands still during generation."""
        seconds: float = perf_counter() - self._watch.generated_ns / 1e9
        return seconds

    def _on_window_failed(self) -> None:
        """Handle a window that ended with an error. An unopened window is not reported."""
        self._is_in_window = False
        if self._runner is not None and self._window_runner.opened is not None:
            self._runner.on_window_failed()

    def _new_runner(self, history: HistoryFile) -> ControllerRunner:
        settings = self._settings.tuner
        entries = history.load()
        reporter = self._watch.advisor.transfer_reporter(settings.mode)
        if settings.mode == "auto":
            reporter.on_start(
                numerics=self.numerics,
                interval_seconds=settings.diagnosis_interval_seconds,
            )
            _log_excluded(entries)
        controller = Controller(
            self._knobs,
            self._watch,
            self._facts,
            TunerOptions(
                acts=settings.mode == "auto",
                numerics=self.numerics,
                allows_rebuild=settings.rebuild,
                min_gain=settings.min_gain,
                exploration_ratio=settings.exploration_ratio,
                diagnosis_interval_seconds=settings.diagnosis_interval_seconds,
                cooldown_steps=settings.cooldown_steps,
                exchange_seconds=self._settings.cross_rank.interval_seconds,
                total_steps=settings.total_steps,
                thresholds=Thresholds.of_settings(self._settings),
            ),
            reporter,
            SearchHistory(entries, history.load_crashed_trials(), history),
        )
        stop_file = StopFile(settings.stop_file, self._watch)
        return ControllerRunner(controller, self._watch.fail_open, stop_file)

    def _on_record(self, record: StepRecord) -> None:
        """Update this rank's OOM risk, on the watch thread."""
        risk = max(record.oom_risk_ratio.values(), default=None)
        # A risk of the host that has become unknown is assumed to be as before.
        host_risk = record.oom_risk_ratio.get(CPU, self._knobs.host_oom_risk)
        self._knobs.host_oom_risk = host_risk
        self._oom_risk.update(step=record.step, risk=risk, seconds=perf_counter())


class ReportedOomRisk:
    """Holds this rank's latest OOM risk. The watch thread updates the risk."""

    def __init__(self) -> None:
        self._step, self._updated_at = 0, 0.0
        self._risk: float | None = None
        self._invalid_until = -1

    def update(self, *, step: int, risk: float | None, seconds: float = 0.0) -> None:
        """Set the risk of a step. Steps up to the last invalidation are ignored.

        Args:
            step: Number of the step.
            risk: From 0 to 1; None if unknown.
            seconds: Present time of a monotonic clock.
        """
        if step > self._invalid_until:
            self._step, self._risk, self._updated_at = step, risk, seconds

    def invalidate(self, *, now: int) -> None:
        """Forget the risk, because memory is used differently after step `now`."""
        self._invalid_until, self._risk = now, None

    def current(self, *, now: int, seconds: float) -> float | None:
        """Return the risk after step `now`; None if it is unknown or no longer updated.

        Args:
            now: Number of the last step.
            seconds: Present time of a monotonic clock.
        """
        is_stale = now - self._step > 1 and seconds - self._updated_at > STALE_SECONDS
        return None if is_stale else self._risk


def _highest_risk(statuses: Sequence[TunerStatus]) -> float | None:
    """Return the highest known OOM risk of any rank; None if no rank's is known."""
    return max((each.oom_risk for each in statuses if each.oom_risk >= 0), default=None)


def open_history(
    engine: Any, settings: Settings, world_size: int, config: Mapping[str, Any]
) -> HistoryFile:
    """Return the history of the job that a DeepSpeed engine runs on `world_size` ranks.

    The job's fingerprint covers all facts that a later run must share if the verdicts are to hold.

    Args:
        engine: The first engine of the run.
        settings: The run's settings.
        world_size: Data-parallel ranks.
        config: The first engine's ds config.
    """
    named = engine.module.named_parameters()
    key = job_fingerprint(
        {
            "parameters": [
                (
                    name,
                    list(getattr(each, "ds_shape", each.shape)),
                    str(each.dtype),
                    each.requires_grad,
                )
                for name, each in named
            ],
            "layout": _layout(config),
            "batch": {name: config.get(name) for name in _BATCH_KEYS},
            "optimizer": type(engine.basic_optimizer).__name__,
            "world_size": world_size,
            "device": _device(engine.device),
            "memory_budget": settings.memory.device_limit_bytes,
            "versions": [version(name) for name in ("torch", "deepspeed", "zerowatch")],
            "numerics": settings.tuner.numerics,
            "rebuild": settings.tuner.rebuild,
        }
    )
    return HistoryFile(_history_folder(settings), key)


def _layout(config: Mapping[str, Any]) -> Mapping[str, object]:
    """Return what a ds config says of the layout of the training state."""
    zero = zero_block(config)
    offloads = {name: zero.get(name) for name in ("offload_optimizer", "offload_param")}
    devices = {
        name: each.get("device") if isinstance(each, Mapping) else each
        for name, each in offloads.items()
    }
    return {"stage": zero_stage(config), **devices}


def _device(device: Any) -> Sequence[object]:
    """Return the kind of a device, and the name and the bytes of an accelerator."""
    if device.type == "cpu":
        return [device.type]
    current = get_accelerator()
    index = current.current_device()
    name = accelerator.current.device_name(index) if accelerator.current.is_available() else ""
    return [device.type, name, current.total_memory(index)]


def _log_excluded(entries: Mapping[str, HistoryEntry]) -> None:
    """Log which values this run may not try because earlier runs of the job have rejected them."""
    excluded = sorted(
        {f"{knob}={value}" for each in entries.values() for knob, value in each.excluded}
    )
    if excluded:
        logger.info(
            "tuner: excluded in some conditions by earlier runs of this job: %s",
            ", ".join(excluded),
        )


def _history_folder(settings: Settings) -> Path | None:
    if settings.tuner.history_dir is not None:
        return settings.tuner.history_dir
    if not settings.run_log.enabled:
        return None
    folder = settings.run_log.folder / ".tuner"
    # Several users may have runs in the same folder.
    own = folder.with_name(f".tuner-{os.geteuid()}")
    for each in (folder, own):
        if not is_foreign_folder(each):
            return each
    logger.warning("%s is another user's: the tuner has no history; set tuner.history_dir", own)
    return None


def create_tuner_session(
    engine_holder: EngineHolder,
    window_runner: WindowRunner,
    host_group: HostGroup,
    data: TrainingData,
    *,
    loss_decomposable: bool = True,
) -> TunerSession:
    """Return the session that the settings ask for: active on all ranks or on none."""
    watch = engine_holder.engine.watch
    session: ActiveTunerSession | None = None
    if watch.is_open and watch.settings.tuner.mode != "off":
        session = watch.fail_open.call(
            "tuner",
            ActiveTunerSession,
            engine_holder,
            window_runner,
            host_group,
            data,
            watch.settings,
            loss_decomposable,
        )
    numerics = host_group.all_gather([-1 if session is None else session.numerics])
    if session is None:
        return NullTunerSession()
    if (numerics != session.numerics).any():
        logger.warning("tuner disabled: ranks differ in tuner.numerics, or some are not monitored")
        session.close()
        return NullTunerSession()
    return session


def tuner_settings(
    settings: Mapping[str, Any] | None, mode: str | None, numerics: str | None
) -> Mapping[str, Any]:
    """Return the caller's settings, with its arguments `tuner` and `numerics` added.

    Settings of a wrong type are returned unchanged, and `load_settings` refuses them later.
    """
    given = {} if settings is None else settings
    if not isinstance(given, Mapping) or not isinstance(given.get("tuner", {}), Mapping):
        return given
    arguments = {"mode": mode, "numerics": numerics}
    tuner = {name: value for name, value in arguments.items() if value is not None}
    return {**given, "tuner": {**given.get("tuner", {}), **tuner}} if tuner else given
