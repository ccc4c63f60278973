"""What steps send, beside what the configuration predicts and the least that its stage needs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ..metrics.catalog import communication
from ..metrics.recorder import Recorder
from ..metrics.step_record import CollectiveTotals, StepRecord
from .plan.plan import Plan

logger = logging.getLogger(__name__)

# A plan holds from step 4 on: ZeRO-3 learns the order of the modules in the first steps.
FIRST_STEPS = 4
STEPS_TO_TELL = 3
LEAST_SHARE = 0.01  # of the predicted bytes; under it, as with a metric's own all_reduce, be quiet

Totals = Mapping[str, CollectiveTotals]


class VolumeWatch:
    """Takes the steps of one run, on the watch thread.

    Args:
        plan: Makes the plan of a step with so many micro-batches; None where there is none. It is
            called once for each number, on a thread of its own: a big model's takes a while.
        recorder: Where the values are written.
        speaks: Whether this rank tells of a step that is not as planned.
    """

    def __init__(
        self, plan: Callable[[int], Plan | None], recorder: Recorder, *, speaks: bool
    ) -> None:
        self._make_plan = plan
        self._recorder = recorder
        self._speaks = speaks
        self._plans: dict[int, Plan | None] = {}
        self._early_steps = FIRST_STEPS
        self._differing = 0
        self._told = False
        self._ratio: float | None = None

    def begin_anew(self) -> None:
        """Plan anew, for an engine that was rebuilt in another way. Any thread."""
        self._plans, self._early_steps = {}, FIRST_STEPS
        self._differing, self._told = 0, False

    def ratio(self) -> float | None:
        """Return the wire bytes of the last step over the least possible; None while unknown."""
        return self._ratio

    def add(self, record: StepRecord) -> None:
        """Take a step."""
        if self._early_steps:
            self._early_steps -= 1
            return
        if record.phase_seconds.keys() & {"eval", "checkpoint"}:
            return  # these have collectives of their own
        if record.micro_batches not in self._plans:
            self._plans[record.micro_batches] = None
            planning = (self._plans, record.micro_batches)
            threading.Thread(
                target=self._make, args=planning, name="zerowatch-plan", daemon=True
            ).start()
        plan = self._plans[record.micro_batches]
        if plan is not None:
            measured = sum(totals.wire_bytes for totals in record.collectives.values())
            self._publish(plan, measured)
            self._compare(plan, record, measured)

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
        self._told = True
        matters = abs(measured - plan.wire_bytes) > LEAST_SHARE * plan.wire_bytes
        logger.log(
            logging.WARNING if matters else logging.INFO,
            "step %d issues other collectives than its configuration predicts%s: %s. The script's "
            "own are among them; `zerowatch explain` shows the prediction.",
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
