"""What steps send, beside what the configuration predicts and the least that its stage needs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from ...metrics.catalog import communication
from ...metrics.recorder import Recorder
from ...metrics.step_record import CollectiveTotals, StepRecord
from .plan import Plan

logger = logging.getLogger(__name__)

# A plan holds from step 4 on: ZeRO-3 learns the order of the modules in the first steps.
FIRST_STEPS = 4
STEPS_TO_TELL = 3
# After a change without a rebuild: more than a trial stays with one setting, so that nothing is
# planned for it.
STEPS_AFTER_CHANGE = 12
LEAST_SHARE = 0.01  # of the predicted bytes; under it, as with a metric's own all_reduce, be quiet

Totals = Mapping[str, CollectiveTotals]

# Methods of DeepSpeed's in whose place ours stand while a codec sends gradients, or stage 0 reduces
# them in buckets of another size. Neither is planned.
_REPLACED = (
    "allreduce_gradients",
    "allreduce_bucket",
    "allreduce_and_copy_with_multiple_ranks",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVariant:
    """How an engine goes through its steps, as it stands.

    Attributes:
        step: The number of the last one.
        config: Its ds config, another object whenever something was turned.
        replaced: What stands in the place of its own methods.
    """

    step: int
    config: Any
    replaced: tuple[ReferenceType[Any], ...]

    def is_still(self, other: EngineVariant) -> bool:
        """Whether nothing was turned between the two."""
        return self.config is other.config and self.replaced == other.replaced


def engine_variant(engine: Any) -> EngineVariant:
    """Return how this engine goes through its steps now. Any thread."""
    owners = [getattr(each, "__dict__", {}) for each in (engine, engine.optimizer)]
    found = [owner.get(name) for owner in owners for name in _REPLACED]
    return EngineVariant(
        step=engine.global_steps,
        config=engine.config,
        replaced=tuple(ref(each) for each in found if each is not None),
    )


class WireVolumeCheck:
    """Takes the steps of one run, on the watch thread.

    Args:
        plan: Makes the plan of a step with so many micro-batches; None where there is none. It is
            called once for each number, on a thread of its own: a big model's takes a while.
        way: Returns how the engine goes through its steps now; None where it is gone.
        recorder: Where the values are written.
        speaks: Whether this rank tells of a step that is not as planned.
    """

    def __init__(
        self,
        plan: Callable[[int], Plan | None],
        way: Callable[[], EngineVariant | None],
        recorder: Recorder,
        *,
        speaks: bool,
    ) -> None:
        self._make_plan = plan
        self._find_way = way
        self._way: EngineVariant | None = None
        self._settled_step = 0
        self._recorder = recorder
        self._speaks = speaks
        self._plans: dict[int, Plan | None] = {}
        self._early_steps = FIRST_STEPS
        self._differing = 0
        self._told = False
        self._ratio: float | None = None

    def begin_anew(self) -> None:
        """Plan anew, for an engine that was rebuilt in another way. Any thread."""
        self._plans, self._early_steps, self._way = {}, FIRST_STEPS, None
        self._differing, self._told = 0, False

    def ratio(self) -> float | None:
        """Return the wire bytes of the last step over the least possible; None while unknown."""
        return self._ratio

    def add(self, record: StepRecord) -> None:
        """Take a step."""
        self._follow()
        if self._early_steps:
            self._early_steps -= 1
            return
        if record.step <= self._settled_step:
            return
        if record.phase_seconds.keys() & {"eval", "checkpoint"}:
            return  # these have collectives of their own
        plans = self._plans  # another engine's may take their place meanwhile
        if record.micro_batches not in plans:
            plans[record.micro_batches] = None
            planning = (plans, record.micro_batches)
            threading.Thread(
                target=self._make, args=planning, name="zerowatch-plan", daemon=True
            ).start()
        plan = plans[record.micro_batches]
        if plan is not None:
            measured = sum(totals.wire_bytes for totals in record.collectives.values())
            self._publish(plan, measured)
            self._compare(plan, record, measured)

    def _follow(self) -> None:
        """Plan anew if something was turned. Steps arrive late, some from before it."""
        before, self._way = self._way, self._find_way()
        if before is None or self._way is None or self._way.is_still(before):
            return
        self._plans, self._differing = {}, 0
        self._settled_step = self._way.step + STEPS_AFTER_CHANGE

    def _make(self, plans: dict[int, Plan | None], micro_batches: int) -> None:
        plans[micro_batches] = self._make_plan(micro_batches)

    def _publish(self, plan: Plan, measured: float) -> None:
        put = self._recorder
        with put.commit():
            put.set(communication.COMM_STEP_WIRE_BYTES, measured, "measured")
            put.set(communication.COMM_STEP_WIRE_BYTES, plan.wire_bytes, "predicted")
            put.set(communication.COMM_STEP_WIRE_BYTES, plan.least_wire_bytes, "least")
            if plan.least_wire_bytes:
                self._ratio = measured / plan.least_wire_bytes
                put.set(communication.COMM_VOLUME_RATIO, self._ratio)

    def _compare(self, plan: Plan, record: StepRecord, measured: float) -> None:
        """Tell once of steps that issue something else than was planned."""
        differences = _differences(record.collectives, plan.totals())
        self._differing = self._differing + 1 if differences else 0
        if self._told or not self._speaks or self._differing < STEPS_TO_TELL:
            return
        if self._way is not None and self._way.replaced:
            return
        self._told = True
        matters = abs(measured - plan.wire_bytes) > LEAST_SHARE * plan.wire_bytes
        logger.log(
            logging.WARNING if matters else logging.INFO,
            "step %d issues other collectives than its configuration predicts%s: %s. The script's "
            "own are among them; `zerowatch estimate` shows the prediction.",
            record.step,
            "" if plan.exact else ", which is not exact here",
            "; ".join(differences),
        )


def _differences(measured: Totals, planned: Totals) -> list[str]:
    """Say in what operations the calls or payload bytes differ."""
    return [
        f"{op} {_words(measured.get(op))}, predicted {_words(planned.get(op))}"
        for op in sorted(measured.keys() | planned.keys())
        if _calls_and_bytes(measured.get(op)) != _calls_and_bytes(planned.get(op))
    ]


def _calls_and_bytes(totals: CollectiveTotals | None) -> tuple[int, int]:
    return (0, 0) if totals is None else (totals.calls, totals.payload_bytes)


def _words(totals: CollectiveTotals | None) -> str:
    calls, payload = _calls_and_bytes(totals)
    return f"{calls} calls of {payload} bytes" if calls else "none"
