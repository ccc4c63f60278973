"""Compares the bytes that a run's steps send with the engine's estimate and the lower bound."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import DsConfigError
from ...metrics.catalog import communication
from ...metrics.catalog.labels import NON_TRAINING_PHASES
from ...metrics.recorder import Recorder
from ...metrics.step_record import CollectiveTotals, StepRecord
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from .engine_estimate import estimate_of_engine, is_data_parallel
from .step_estimate import StepEstimate

logger = logging.getLogger(__name__)

# An estimate holds from step 4 on: ZeRO-3 learns the order of the modules in the first steps.
WARM_UP_STEPS = 4
STEPS_TO_REPORT = 3  # consecutive steps that differ from the estimate before it is logged
# After a change without a rebuild: longer than a trial keeps one setting, so that no estimate is
# made for trials.
STEPS_AFTER_CHANGE = 12
# Share of the estimated bytes. Smaller differences, such as a metric's own all_reduce, are INFO.
NEGLIGIBLE_RATIO = 0.01

Totals = Mapping[str, CollectiveTotals]

_NON_TRAINING = frozenset(NON_TRAINING_PHASES)

# DeepSpeed's methods that are patched while gradients are compressed, or while stage 0 reduces
# them in buckets of another size. Neither is modeled.
_PATCHED_METHODS = (
    "allreduce_gradients",
    "allreduce_bucket",
    "allreduce_and_copy_with_multiple_ranks",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
)


class WireVolumeCheck:
    """Compares the steps of one engine with its estimate, on the watch thread.

    Args:
        engine: The engine; only a weak reference is kept.
        recorder: Gets the volume metrics.
        fail_open: Guards estimating.
        logs_differences: Whether this rank logs a step that differs from the estimate.
        estimate: Returns the estimate of a step, given the engine and its micro-batches.
        variant_of: Returns the present variant of an engine.
    """

    def __init__(
        self,
        engine: Any,
        recorder: Recorder,
        fail_open: FailOpen,
        *,
        logs_differences: bool,
        estimate: Callable[[Any, int], StepEstimate | None] | None = None,
        variant_of: Callable[[Any], EngineVariant] | None = None,
    ) -> None:
        self._recorder = recorder
        self._estimate_engine = fail_open.wrap("estimate", estimate or estimate_data_parallel)
        self._variant_of = variant_of or engine_variant
        self._logs_differences = logs_differences
        self._ratio: float | None = None
        self._totals: tuple[StepEstimate | None, Totals] = None, {}
        self._settled_step = 0
        self.rebind_engine(engine)

    def rebind_engine(self, engine: Any) -> None:
        """Compare with the estimates of another engine from now on. Any thread."""
        self._engine = weakref.ref(engine)
        self._estimates: dict[int, StepEstimate | None] = {}
        self._warm_up_steps = WARM_UP_STEPS
        self._variant: EngineVariant | None = None
        self._num_differing = 0
        self._logged = False

    def ratio(self) -> float | None:
        """Return the last step's wire bytes over the lower bound; None while unknown."""
        return self._ratio

    def add(self, *records: StepRecord) -> None:
        """Compare steps with their estimates, publish the last one, and log lasting differences."""
        self._detect_change()
        compared: tuple[StepEstimate, float] | None = None
        for record in records:
            compared = self._compare(record) or compared
            let_training_run()
        if compared is not None:
            self._publish(*compared)

    def _compare(self, record: StepRecord) -> tuple[StepEstimate, float] | None:
        """Return the estimate and the wire bytes of a step; None if it is not compared."""
        if self._warm_up_steps:
            self._warm_up_steps -= 1
            return None
        if record.step <= self._settled_step:
            return None
        if _has_other_collectives(record):
            return None
        estimates = self._estimates  # another thread may replace it
        if record.micro_batches not in estimates:
            estimates[record.micro_batches] = None
            # A thread of its own, because estimating a large model takes a while.
            threading.Thread(
                target=self._make_estimate,
                args=(estimates, record.micro_batches),
                name="zerowatch-estimate",
                daemon=True,
            ).start()
        estimate = estimates[record.micro_batches]
        if estimate is None:
            return None
        measured = sum(totals.wire_bytes for totals in record.collectives.values())
        self._log_differences(estimate, record, measured)
        return estimate, measured

    def _detect_change(self) -> None:
        """Discard estimates if the engine changed. Late records may be from before it."""
        engine = self._engine()
        before, self._variant = self._variant, None if engine is None else self._variant_of(engine)
        if before is None or self._variant is None or self._variant.equals(before):
            return
        self._estimates, self._num_differing = {}, 0
        self._settled_step = self._variant.step + STEPS_AFTER_CHANGE

    def _make_estimate(self, estimates: dict[int, StepEstimate | None], micro_batches: int) -> None:
        estimates[micro_batches] = self._estimate_engine(self._engine(), micro_batches)

    def _publish(self, estimate: StepEstimate, measured: float) -> None:
        recorder = self._recorder
        with recorder.commit():
            recorder.set(communication.COMM_STEP_WIRE_BYTES, measured, "measured")
            recorder.set(communication.COMM_STEP_WIRE_BYTES, estimate.wire_bytes, "predicted")
            recorder.set(
                communication.COMM_STEP_WIRE_BYTES, estimate.reference_wire_bytes, "reference"
            )
            if estimate.reference_wire_bytes:
                self._ratio = measured / estimate.reference_wire_bytes
                recorder.set(communication.COMM_VOLUME_RATIO, self._ratio)

    def _log_differences(self, estimate: StepEstimate, record: StepRecord, measured: float) -> None:
        """Log once if several consecutive steps issue other collectives than estimated."""
        if self._totals[0] is not estimate:
            self._totals = estimate, estimate.totals()
        differences = _differences(record.collectives, self._totals[1])
        self._num_differing = self._num_differing + 1 if differences else 0
        if (
            self._logged
            or not self._logs_differences
            or self._num_differing < STEPS_TO_REPORT
            or (self._variant is not None and self._variant.patches)
        ):
            return
        self._logged = True
        is_negligible = (
            abs(measured - estimate.wire_bytes) <= NEGLIGIBLE_RATIO * estimate.wire_bytes
        )
        logger.log(
            logging.INFO if is_negligible else logging.WARNING,
            "step %d: collectives differ from the %s: %s. The script's own collectives are "
            "included; `zerowatch estimate` shows the estimate",
            record.step,
            "estimate" if estimate.exact else "estimate, which is not exact here",
            "; ".join(differences),
        )


def estimate_data_parallel(engine: Any, micro_batches: int) -> StepEstimate | None:
    """Estimate a step of an engine; None for an unsupported configuration or parallelism."""
    if engine is None or not is_data_parallel(engine):
        return None
    try:
        return estimate_of_engine(engine, micro_batches)
    except DsConfigError as error:  # valid for DeepSpeed, perhaps for a newer version
        logger.info("steps are not compared with an estimate: %s", error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVariant:
    """The settings of an engine that decide its collectives.

    Attributes:
        step: The number of its last step.
        config: The engine's ds config, a new object after each change of a setting.
        patches: The patches of its methods.
    """

    step: int
    config: Any
    patches: tuple[weakref.ReferenceType[Any], ...]

    def equals(self, other: EngineVariant) -> bool:
        """Return whether ds config and patches are the same; the step may differ."""
        return self.config is other.config and self.patches == other.patches


def engine_variant(engine: Any) -> EngineVariant:
    """Return the current variant of an engine. Any thread."""
    owners = [getattr(each, "__dict__", {}) for each in (engine, engine.optimizer)]
    patches = [owner.get(name) for owner in owners for name in _PATCHED_METHODS]
    return EngineVariant(
        step=engine.global_steps,
        config=engine.config,
        patches=tuple(weakref.ref(patch) for patch in patches if patch is not None),
    )


def _differences(measured: Totals, estimated: Totals) -> list[str]:
    """Describe each operation whose calls or payload bytes differ from the estimate."""
    return [
        f"{op} {_describe(measured.get(op))}, estimated {_describe(estimated.get(op))}"
        for op in sorted(measured.keys() | estimated.keys())
        if _calls_and_bytes(measured.get(op)) != _calls_and_bytes(estimated.get(op))
    ]


def _calls_and_bytes(totals: CollectiveTotals | None) -> tuple[int, int]:
    return (0, 0) if totals is None else (totals.calls, totals.payload_bytes)


def _describe(totals: CollectiveTotals | None) -> str:
    calls, payload = _calls_and_bytes(totals)
    return f"{calls} calls of {payload} bytes" if calls else "none"


def _has_other_collectives(record: StepRecord) -> bool:
    """Whether a step may contain collectives that are not those of its training.

    Evaluation and checkpoints may issue some, and generation does with ZeRO 3.
    """
    if not _NON_TRAINING.isdisjoint(record.phase_seconds):
        return True
    generation = record.generation
    is_silent = generation is not None and not generation.collectives
    return "generate" in record.phase_seconds and not is_silent
