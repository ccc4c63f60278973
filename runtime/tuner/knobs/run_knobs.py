"""The hands of a `TrainingRun`: every knob of it, turned together between two windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ....errors import ZerowatchError
from ...common.all_or_none import CollectiveAttempt
from ...common.host_group import HostCollectives
from ...common.training_config import training_config
from ...common.undo import UndoStack
from ...engine.live_settings.choose_modules import ModuleSelector
from ...trainer.data.data_source import TrainingData
from ...trainer.engine_holder import EngineHolder
from ...trainer.oom_recovery.sizing import MemoryMeasurements
from ...trainer.window_runner import WindowRunner
from ..policy.types import Configuration, Undo, Value
from .attachment_knob import checkpointing_knob, optimizer_offload_knob
from .attachments import restore_attachments
from .compression_knobs import (
    AsyncReductionKnob,
    CodecConfig,
    CompressionKnob,
    codec_config,
    detach_codec,
    set_codec,
)
from .deepspeed_knobs import configured, deepspeed_knobs, with_knob
from .gc_knob import GcKnob
from .global_batch_knob import GlobalBatchKnob
from .knob import ReadableKnob, WritableKnob
from .layout_knob import LAYOUT, ZeroLayoutKnob, ZeroLayouts
from .load_balance_knob import LoadBalanceKnob
from .memory_check import exceeds_fit, exceeds_free, exceeds_host
from .micro_batch_knob import MicroBatchKnob
from .plan_cache import PlanCache
from .readable_knobs import all_applied, read_options, read_values, unknown_or_missing

logger = logging.getLogger(__name__)

Turn = Callable[[], Undo]


class RunKnobs:
    """Turns the knobs of one run; every rank has its own, and calls it alike.

    Args:
        changes: Holds the run's engine.
        windows: Of the run.
        host_group: Of the run.
        measured: Returns what this rank knows of its memory.
        largest_share: Returns the samples of the largest share of any rank in the last window, the
            same on all ranks; 0 before the first.
        host_risk: Returns the risk that this host's memory runs out.
        checkpointed: What activation checkpointing is laid on; None for the model's own switch or
            its repeated block.
        sharing: Of the run; None leaves its data alone.
    """

    def __init__(
        self,
        changes: EngineHolder,
        windows: WindowRunner,
        host_group: HostCollectives,
        *,
        measured: Callable[[], MemoryMeasurements],
        largest_share: Callable[[], int],
        host_risk: Callable[[], float] = lambda: 0.0,
        checkpointed: ModuleSelector = None,
        sharing: TrainingData | None = None,
    ) -> None:
        self._changes, self._windows, self._host_group = changes, windows, host_group
        self._measured, self._largest_share = measured, largest_share
        self._host_risk = host_risk
        self._layouts = ZeroLayouts(
            lambda: changes.engine, lambda: changes.config, training_config, host_group.world_size
        )
        self._garbage = GcKnob()
        self._live = deepspeed_knobs(lambda: changes.engine)
        data: list[WritableKnob] = (
            [] if sharing is None else [LoadBalanceKnob(sharing), GlobalBatchKnob(sharing)]
        )
        self._others: list[WritableKnob] = [
            checkpointing_knob(changes, checkpointed),
            optimizer_offload_knob(changes),
            MicroBatchKnob(windows, largest_share),
            self._garbage,
            *data,
        ]
        self._codec: list[ReadableKnob] = [
            CompressionKnob(changes, host_group.world_size),
            AsyncReductionKnob(changes, host_group.world_size),
        ]
        layout = [ZeroLayoutKnob(name, self._layouts) for name in LAYOUT]
        self._dials: list[ReadableKnob] = [*self._live, *self._others, *self._codec, *layout]
        self._known = PlanCache(lambda: windows.replay.planner)
        self._told: set[str] = set()
        self._given = changes.config
        self._left: frozenset[str] = frozenset()
        changes.on_engine_replaced.append(self._follow)

    def values(self) -> Configuration:
        """Return how this rank works now: every knob that this job has."""
        return read_values(self._dials)

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return what each knob could be set to here; one that is fixed is absent."""
        return read_options(self._dials, self._told)

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Say why this rank should not work with that, such as its memory; None if it may."""
        reason = unknown_or_missing(self._dials, target) or exceeds_host(
            self.values(), target, self._host_risk()
        )
        if reason is not None:
            return reason
        layout = None
        if self._layouts.changed(target) is not None:
            reason = self._layouts.unsupported_reason(target)
            layout = self._layouts.memory_bytes(target)
        return reason or self._out_of_memory(target, layout or 0)

    def apply(self, target: Configuration) -> Undo:
        """Turn what differs, and return what puts back exactly what was there.

        Knobs that the engine does not have, or not any more after a rebuild, are left alone. Where
        the engine has to be another, all ranks succeed or none does.

        Raises:
            ZerowatchError: Nothing was changed.
        """
        before = self.values()
        config = self._layouts.changed(target)
        undos = UndoStack()
        self._left = frozenset()
        if config is None:
            undos.do(self._turns(target))
        else:
            self._left = self._untouched(target, before)
            rest = {name: target[name] for name in target.keys() - self._left}
            self._rebuild(config, rest, undos)
        undos.add(self._known.move(before, self.values()))
        return undos

    def verify(self, target: Configuration) -> bool:
        """Whether this rank really works with that."""
        meant = {name: target[name] for name in target.keys() - self._left}
        return all_applied(self._dials, meant)

    def window_ended(self) -> None:
        """Do what is to be done between two windows; cheap."""
        self._garbage.window_ended()

    def close(self) -> None:
        """Leave Python's garbage to itself again. Safe to call twice."""
        self._garbage.close()

    def _untouched(self, target: Configuration, now: Configuration) -> frozenset[str]:
        """Return the live knobs that only come along, of which the ds config says what they are.

        Stage 0 works as if its bucket held 500 million elements. Under another stage it would.
        """
        return frozenset(
            hand.name
            for hand in self._live
            if not hand.is_ours and hand.name in target and target[hand.name] == now.get(hand.name)
        )

    def _rebuild(self, config: Mapping[str, Any], target: Configuration, undos: UndoStack) -> None:
        """Have another engine, and turn the rest on it; on all ranks or on none."""
        changes = self._changes
        with CollectiveAttempt(self._host_group) as ready:
            changes.reload_optimizer_states()  # where memory may run out on one rank alone
        if ready.error is not None:
            raise ZerowatchError(f"the engine was not rebuilt: {ready.error}")
        undos.add(restore_attachments(changes))
        before = changes.config
        changes.rebuild_as(config)
        undos.add(partial(changes.rebuild_as, before))
        with CollectiveAttempt(self._host_group) as rest:
            undos.do(self._turns(target))
        if rest.error is not None:
            undos()
            raise ZerowatchError(f"the engine was rebuilt back: {rest.error}")

    def _turns(self, target: Configuration) -> Iterator[Turn]:
        """Yield what is to be done on this engine, in order; each when the one before is done."""
        codec = self._changes.compressor
        if any(self._differing(self._live, target)):
            if codec is not None:
                yield partial(detach_codec, self._changes)
            for hand, value in self._differing(self._live, target):  # one may bring another back
                yield partial(hand.turn, value)
            yield self._write
        form = self._form(target, codec_config(codec))
        if form != codec_config(self._changes.compressor):
            yield partial(set_codec, self._changes, form, codec)
        for other, value in self._differing(self._others, target):
            yield partial(other.turn, value)

    def _differing(
        self, hands: Sequence[WritableKnob], target: Configuration
    ) -> Iterator[tuple[WritableKnob, Value]]:
        for hand in hands:
            is_meant = hand.name in target and hand.unsupported_reason() is None
            if is_meant and target[hand.name] != hand.get():
                yield hand, target[hand.name]

    def _form(self, target: Configuration, before: CodecConfig) -> CodecConfig:
        """Return how gradients shall travel: as before, if the target does not say."""
        wanted = [
            target.get(dial.name, was) if dial.unsupported_reason() is None else plain
            for dial, was, plain in zip(self._codec, before, CodecConfig(None, False), strict=True)
        ]
        return CodecConfig(*wanted)

    def _write(self) -> Undo:
        """Let the ds config say what live knobs were turned to, so that a rebuild keeps it.

        Of the engine's own its collectives are planned.
        """
        changes = self._changes
        before = changes.config
        for hand in self._live:
            if hand.unsupported_reason() is None:
                value = hand.get() if hand.is_ours else configured(hand.name, self._given)
                changes.config = with_knob(changes.config, hand.name, value)
        changes.engine.config = changes.config

        def undo() -> None:
            changes.config = changes.engine.config = before

        return undo

    def _follow(self) -> None:
        self._layouts.forget()
        for hand in self._live:
            hand.follow(self._changes.config)

    def _out_of_memory(self, target: Configuration, extra_bytes: int) -> str | None:
        planner, measured = self._windows.replay.planner, self._measured()
        longest = planner.guard_schedule.longest
        extra_bytes += sum(self._needs(target))
        reason = exceeds_free(measured, extra_bytes=extra_bytes, length=longest)
        share = self._largest_share()
        now = self._windows.micro_batch_samples
        asked = target.get(MicroBatchKnob.name, now)
        samples = asked if isinstance(asked, int) else now
        if reason is not None or min(samples, share) <= min(now, share):
            return reason
        return exceeds_fit(
            measured,
            samples=min(samples, share),
            extra_bytes=extra_bytes,
            length=longest,
            bound=planner.limits.bound(longest),
        )

    def _needs(self, target: Configuration) -> Iterator[int]:
        """Yield what each change needs more on the present engine, as far as that is known."""
        for dial in self._dials:
            if dial.name in target and dial.unsupported_reason() is None:
                yield dial.memory_bytes(target[dial.name]) or 0
