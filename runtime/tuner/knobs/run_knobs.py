"""Sets the knobs of a TrainingRun together between two windows; every change can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ....errors import ZerowatchError
from ...common.collective_attempt import CollectiveAttempt
from ...common.host_group import HostCollectives
from ...common.undo import Undo, UndoStack
from ...engine.rebuild.preconditions import zero_block
from ...trainer.data.training_data import TrainingData
from ...trainer.engine_holder import EngineHolder
from ...trainer.oom_recovery.micro_batch_planner import GuardSchedule, MicroBatchLimits
from ...trainer.oom_recovery.replay import OomReplay
from ...trainer.window_runner import WindowRunner
from ..policy.knob_registry import (
    ASYNCHRONOUS_REDUCTION,
    MICRO_BATCH_SAMPLES,
    OVERLAP_COMM,
    REDUCE_SCATTER,
    SPECS,
)
from ..policy.policy_types import Configuration, Value
from .data_knobs import data_knobs, largest_local_batch
from .engine_knobs import (
    NO_COMPRESSOR,
    AsyncReductionKnob,
    CompressionKnob,
    CompressorConfig,
    ConfigOfKnobs,
    DeepSpeedKnob,
    GcKnob,
    attachment_knobs,
    compressor_config,
    deepspeed_knobs,
    detach_compressor,
    restore_attachments,
    set_compressor,
)
from .knob import KnobSet, ReadableKnob, WritableKnob
from .layout_knobs import ZeroLayouts, layout_knobs
from .memory_check import exceeds_fit, exceeds_free, exceeds_host, peaks_of

Knob = TypeVar("Knob", bound=WritableKnob)
ApplyChange = Callable[[], Undo]  # makes a change, and returns its undo
Plan = tuple[MicroBatchLimits, GuardSchedule, int]


class RunKnobs:
    """Reads and sets all knobs of one run on this rank. Every rank makes the same calls.

    Args:
        engine_holder: Rebuilds the engine, and attaches settings to it.
        window_runner: Splits windows into micro-batches, and measures memory.
        host_group: Exchanges between the ranks whether a change has failed.
        data: Training data, whose batch size and load balance are knobs; None for no such knobs.

    Attributes:
        host_oom_risk: Probability that this host runs out of memory soon, from 0 to 1. The owner of
            this object keeps it up to date.
    """

    def __init__(
        self,
        engine_holder: EngineHolder,
        window_runner: WindowRunner,
        host_group: HostCollectives,
        data: TrainingData | None = None,
    ) -> None:
        self.host_oom_risk = 0.0
        self._engine_holder, self._window_runner = engine_holder, window_runner
        self._host_group = host_group
        world_size = host_group.world_size
        self._layouts = ZeroLayouts(engine_holder, world_size, is_training_run=True)
        self._gc = GcKnob()
        self._live = deepspeed_knobs(engine_holder)
        micro_batch, *others = data_knobs(window_runner, data)
        self._others: list[WritableKnob] = [
            *attachment_knobs(engine_holder, window_runner.activation_checkpointing),
            micro_batch,
            self._gc,
            *others,
        ]
        self._compression: list[ReadableKnob] = [
            CompressionKnob(engine_holder, world_size),
            AsyncReductionKnob(engine_holder, world_size),
        ]
        self._knobs = KnobSet(
            [*self._live, *self._others, *self._compression, *layout_knobs(self._layouts)]
        )
        self._plan_cache = PlanCache(window_runner.replay)
        self._config = ConfigOfKnobs(engine_holder)
        self._not_verified: frozenset[str] = frozenset()
        engine_holder.on_engine_replaced.append(self._on_engine_replaced)

    @property
    def has_engine(self) -> bool:
        """Whether the run can train: a rebuild may remove the engine and then fail."""
        return self._engine_holder.has_engine

    def values(self) -> Configuration:
        """Return the current value of every knob that this job has."""
        return self._knobs.values()

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return the possible values of each knob; fixed knobs are absent."""
        return self._knobs.options()

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Return why this rank should not use a configuration, e.g. its memory; else None."""
        reason = self._knobs.unsupported_reason(target) or exceeds_host(
            self.values(), target, self.host_oom_risk
        )
        if reason is not None:
            return reason
        layout_bytes = None
        config = self._layouts.changed_config(target)
        if config is not None:
            reason = self._layouts.unsupported_reason(target)
            layout_bytes = self._layouts.memory_bytes(target)
        reason = reason or self._not_asynchronous(target, config or self._engine_holder.config)
        return reason or self._exceeds_memory(target, layout_bytes or 0)

    def apply(self, target: Configuration) -> Undo:
        """Set the knobs that differ, and return an undo that restores exactly the values before.

        Knobs that the engine does not have, or no longer has after a rebuild, are ignored. A
        rebuild succeeds on all ranks or on none.

        Raises:
            ZerowatchError: Nothing was changed.
        """
        before = self.values()
        config = self._layouts.changed_config(target)
        undo = UndoStack()
        self._not_verified = frozenset()
        if config is None:
            undo.do(self._changes(target))
        else:
            self._layouts.note_overlap()
            self._not_verified = self._unchanged_live(target, before)
            rest = {name: target[name] for name in target.keys() - self._not_verified}
            self._rebuild(config, rest, undo)
        undo.add(self._plan_cache.switch(before, self.values()))
        return undo

    def verify(self, target: Configuration) -> bool:
        """Whether this rank uses that configuration, read back from the engine."""
        checked = {name: target[name] for name in target.keys() - self._not_verified}
        return self._knobs.all_applied(checked)

    def on_window_end(self) -> None:
        """Collect garbage between two windows if the knob python_gc is set to do so."""
        self._gc.on_window_end()

    def close(self) -> None:
        """Restore Python's garbage collection. Safe to call twice."""
        self._gc.close()

    def _not_asynchronous(self, target: Configuration, config: Mapping[str, Any]) -> str | None:
        """Return why a target's asynchronous reduction cannot be attached; None if it is off.

        Args:
            target: Target configuration. Without `overlap_comm`, an engine takes it from `config`.
            config: The ds config with the target's layout.
        """
        spec = ASYNCHRONOUS_REDUCTION
        overlaps = bool(zero_block(config).get(OVERLAP_COMM.name))
        result = {OVERLAP_COMM.name: overlaps, **self.values(), **target}
        if not target.get(spec.name) or not spec.is_excluded(result):
            return None
        return f"{spec.name} needs {REDUCE_SCATTER.name}, and {OVERLAP_COMM.name} off"

    def _unchanged_live(self, target: Configuration, now: Configuration) -> frozenset[str]:
        """Return live settings that no knob has set, which a rebuild takes from the ds config.

        At stage 0, the bucket size reads as 500 million elements. If this value were set after a
        rebuild, other stages would use it.
        """
        return frozenset(
            knob.name
            for knob in self._live
            if not knob.is_set and knob.name in target and target[knob.name] == now.get(knob.name)
        )

    def _rebuild(self, config: Mapping[str, Any], target: Configuration, undo: UndoStack) -> None:
        """Rebuild the engine and set the other knobs on it, on all ranks or on none."""
        engine_holder = self._engine_holder
        with CollectiveAttempt(self._host_group) as ready:
            engine_holder.reload_optimizer_states()  # memory may run out on one rank alone
        if ready.error is not None:
            raise ZerowatchError(f"the engine was not rebuilt: {ready.error}") from ready.error
        undo.add(restore_attachments(engine_holder))
        before = engine_holder.config
        try:
            engine_holder.rebuild_as(config)
        except ZerowatchError:
            undo()  # another engine of the old ds config may have lost an attachment
            raise
        undo.add(partial(engine_holder.rebuild_as, before))
        with CollectiveAttempt(self._host_group) as rest:
            undo.do(self._changes(target))
        if rest.error is not None:
            undo()
            raise ZerowatchError(f"rebuild rolled back: {rest.error}") from rest.error

    def _changes(self, target: Configuration) -> Iterator[ApplyChange]:
        """Yield the changes of this engine in order, each once the previous one is done."""
        compressor = self._engine_holder.compressor
        if any(self._differing(self._live, target)):
            if compressor is not None:
                yield partial(detach_compressor, self._engine_holder)
            changed: list[DeepSpeedKnob] = []
            for live, value in self._differing(self._live, target):  # one may enable another
                changed.append(live)
                yield partial(live.set, value)
            yield partial(self._config.write, changed)
        config = self._compressor_config(target, compressor_config(compressor))
        if config != compressor_config(self._engine_holder.compressor):
            yield partial(set_compressor, self._engine_holder, config, compressor)
        for knob, value in self._differing(self._others, target):
            yield partial(knob.set, value)

    def _differing(
        self, knobs: Sequence[Knob], target: Configuration
    ) -> Iterator[tuple[Knob, Value]]:
        for knob in knobs:
            is_available = knob.name in target and knob.unsupported_reason() is None
            if is_available and target[knob.name] != knob.get():
                yield knob, target[knob.name]

    def _compressor_config(
        self, target: Configuration, before: CompressorConfig
    ) -> CompressorConfig:
        """Return the compressor's configuration of a target, with missing values from `before`."""
        wanted = [
            target.get(knob.name, now) if knob.unsupported_reason() is None else without
            for knob, now, without in zip(self._compression, before, NO_COMPRESSOR, strict=True)
        ]
        return CompressorConfig(*wanted)

    def _on_engine_replaced(self) -> None:
        self._layouts.on_engine_replaced()
        self._config.on_engine_replaced()
        for knob in self._live:
            knob.on_engine_replaced()

    def _exceeds_memory(self, target: Configuration, layout_bytes: int) -> str | None:
        planner = self._window_runner.replay.planner
        measured = self._window_runner.peak_history.measured()
        longest = planner.guard_schedule.longest
        extra_bytes = layout_bytes + self._knobs.memory_bytes(target)
        now = self._window_runner.micro_batch_samples
        in_use = peaks_of(measured, planner.configuration, samples=now)
        reason = exceeds_free(in_use, extra_bytes=extra_bytes, length=longest)
        local_batch = largest_local_batch(self._window_runner)
        wanted = target.get(MICRO_BATCH_SAMPLES.name, now)
        samples = wanted if isinstance(wanted, int) else now
        if reason is not None or min(samples, local_batch) <= min(now, local_batch):
            return reason
        return exceeds_fit(
            peaks_of(measured, planner.configuration),
            samples=min(samples, local_batch),
            extra_bytes=extra_bytes,
            length=longest,
            bound=planner.limits.bound(longest),
        )


class PlanCache:
    """Keeps the micro-batch plan of each configuration; it is the same on all ranks.

    A plan has the limits of micro-batches, the schedule of the guard, and the configuration's
    number, to which memory peaks belong.

    A trial alternates between configurations. If each switch invalidated the limits, collectives
    would be guarded in every block, and the guard's cost would be measured.

    Args:
        replay: Source of the planner of micro-batches.
    """

    MAX_CONFIGURATIONS = 64

    def __init__(self, replay: OomReplay) -> None:
        self._replay = replay
        self._plans: dict[tuple[object, ...], Plan] = {}

    def switch(self, before: Configuration, now: Configuration) -> Undo:
        """Replace the plan of one configuration by that of another."""
        planner = self._replay.planner
        plan = planner.limits, planner.guard_schedule, planner.configuration
        left, entered = _plan_key(before), _plan_key(now)
        if left != entered:
            self._plans.pop(left, None)  # the last one left is dropped last
            self._plans[left] = plan
            if entered in self._plans:
                planner.limits, planner.guard_schedule, planner.configuration = self._plans[entered]
            else:
                planner.invalidate()
            for key in list(self._plans)[: -self.MAX_CONFIGURATIONS]:
                del self._plans[key]

        def undo() -> None:
            planner.limits, planner.guard_schedule, planner.configuration = plan

        return undo


def _plan_key(configuration: Configuration) -> tuple[object, ...]:
    return tuple(
        sorted(item for item in configuration.items() if not SPECS[item[0]].memory_neutral)
    )
