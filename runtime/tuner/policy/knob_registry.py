"""Lists every knob of the tuner as data, with the numerics that a change of the knob needs.

To add a knob, add a KnobSpec here, and a class in `tuner/knobs/` that reads and sets the knob. Add
the class to the list that its file returns (such as `attachment_knobs`) or to `RunKnobs`. If the
knob is to be advised in plain runs too, add it to `ReadOnlyKnobs`. A live setting of DeepSpeed's
engine needs a row in `engine/live_settings/all_settings.py` instead of the class.
`test_knobs_job.py` lists the knobs that each stage has. If predictions do not decide, knobs are
proposed in the order of KNOBS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .policy_types import ApplyMode, Configuration, JobFacts, Numerics, Value

# How to change a knob against a symptom. It is a direction, where "either" leaves the direction to
# the trial, or the values to try, the most promising first.
Trigger = Literal["up", "down", "either"] | tuple[Value, ...]
# A domain that is not enumerated: which numbers are useful, ascending.
Rule = Literal["whole numbers from 1", "powers of two", "powers of two, and 0"]
Saturation = Literal["num_gradients", "num_parameters", "2 x num_parameters"]
# How candidates follow from the value in use: a multiple of it, all others, or by the number of
# micro-batches that they give.
Stepping = Literal["factor", "all", "micro_batches"]

EXACT_RANKS = 2  # the sum of two values is the same in either order

_COMM = ("comm_bandwidth", "comm_redundancy", "comm_latency")
_BYTES = ("comm_bandwidth", "comm_redundancy")
_ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSpec:
    """Data of one knob: its values, what it helps against, and how it is changed.

    Attributes:
        name: Name in configurations, metrics and messages.
        numerics: The strictest numerics that allow a change in a plain job; see
            `required_numerics`.
        domain: All values in order, or a rule if there are too many values to list.
        triggers: Direction or values of a change, by symptom that it may help against.
        description: What it sets, as half a sentence for messages.
        ds_key: Path in a ds config; None if it has none.
        advice: What to write into a script, with a {value}; None if the ds config is enough.
        apply_mode: Whether the engine has to be rebuilt.
        device_only: Whether it has no effect if the CPU trains.
        settle_steps: Usable steps after a change whose times are not representative. Memory is
            allocated again in one step, and one more step is left out. ZeRO 3 records its trace
            again, which takes three steps.
        reorders_sums: Whether it changes the order in which ranks' gradients are summed.
        splits_batch: Whether it changes which samples are in a micro-batch together.
        stepping: Rule by which candidates follow from the value in use.
        step_factor: The factor for stepping "factor". Half of this factor would change the step
            time by less than a trial can measure.
        saturation: The size above which larger values have the same effect; None if there is none.
        buffer_is_preallocated: Whether its size is allocated at once, used or not.
        zero_stages: ZeRO stages at which it has an effect. At other stages it is switched off. None
            in this list stands for a job in which the stage is not a knob.
        brings_zero_stage: The ZeRO stage to switch to along with it.
        excluded_by: Values of other knobs with which this knob has no effect, or cannot be on.
        needs_several_buckets: Whether it is useless if one bucket holds all gradients, because this
            bucket is sent only when backward has ended.
        saving: Direction or values that free memory, if `triggers` has none for memory pressure.
        moves_to_host: Whether it moves state to the host.
        memory_neutral: Whether micro-batches fit as before after a change.
        fully_predicted: Whether it helps against communication only as predicted.
    """

    name: str
    numerics: Numerics
    domain: tuple[Value, ...] | Rule
    triggers: Mapping[str, Trigger]
    description: str
    ds_key: tuple[str, ...] | None = None
    advice: str | None = None
    apply_mode: ApplyMode = "live"
    device_only: bool = False
    settle_steps: int = 2
    reorders_sums: bool = False
    splits_batch: bool = False
    stepping: Stepping = "factor"
    step_factor: int = 4
    saturation: Saturation | None = None
    buffer_is_preallocated: bool = False
    zero_stages: tuple[int | None, ...] | None = None
    brings_zero_stage: int | None = None
    excluded_by: tuple[Configuration, ...] = ()
    needs_several_buckets: bool = False
    saving: Trigger | None = None
    moves_to_host: bool = False
    memory_neutral: bool = False
    fully_predicted: bool = False

    def has(self, value: Value) -> bool:
        """Whether the knob can have a value at all."""
        if isinstance(self.domain, tuple):
            return value in self.domain
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def saturation_size(self, facts: JobFacts) -> float:
        """Return the size above which larger values have the same effect; inf if there is none."""
        if self.saturation is None:
            return math.inf
        return {
            "num_gradients": facts.num_gradients,
            "num_parameters": facts.num_parameters,
            "2 x num_parameters": 2 * facts.num_parameters,
        }[self.saturation]

    def needs_memory(self, now: Value, value: Value) -> bool:
        """Whether a change needs more memory: it is the opposite of one that frees memory."""
        saving = self.triggers.get("memory_pressure", self.saving)
        if isinstance(saving, tuple):
            return now in saving and value not in saving
        if saving is None or not isinstance(now, int) or not isinstance(value, int):
            return False
        return value > now if saving == "down" else value < now

    def has_no_effect(self, configuration: Configuration) -> bool:
        """Whether the knob should be off in a configuration."""
        stage = configuration.get(ZERO_STAGE.name)
        is_at_stage = self.zero_stages is None or stage in self.zero_stages
        return not is_at_stage or self.is_excluded(configuration)

    def is_excluded(self, configuration: Configuration) -> bool:
        """Whether values of other knobs exclude this knob."""
        return any(each.items() <= configuration.items() for each in self.excluded_by)


def _at(trigger: Trigger, *symptoms: str) -> dict[str, Trigger]:
    return dict.fromkeys(symptoms, trigger)


MICRO_BATCH_SAMPLES = KnobSpec(
    name="micro_batch_samples",
    numerics=Numerics.REASSOCIATION,
    domain="whole numbers from 1",
    triggers={
        **_at("up", *_COMM, "host_bound", "device_idle"),
        **_at("down", "memory_pressure"),
    },
    ds_key=("train_micro_batch_size_per_gpu",),
    description="samples of a micro-batch; the global batch stays the same",
    advice="DataLoader(..., batch_size={value}), TrainingArguments(per_device_train_batch_size="
    "{value}), or what else cuts batches",
    splits_batch=True,
    stepping="micro_batches",
    memory_neutral=True,  # the plan of micro-batches is kept by configuration
)
ACTIVATION_CHECKPOINTING = KnobSpec(
    name="activation_checkpointing",
    numerics=Numerics.BITWISE,
    domain=(False, True),
    triggers={**_at((True,), "memory_pressure"), **_at((False,), "memory_idle")},
    settle_steps=3,
    description="activations recomputed in backward instead of kept",
    advice="run.checkpoint_activations({value}), or the model's own switch",
)
REDUCE_BUCKET_SIZE = KnobSpec(
    name="reduce_bucket_size",
    numerics=Numerics.REASSOCIATION,
    domain="powers of two",
    triggers={
        **_at("either", "comm_bandwidth", "comm_redundancy"),
        **_at("up", "comm_latency"),
        **_at("down", "memory_pressure"),
    },
    ds_key=(_ZERO, "reduce_bucket_size"),
    description="gradient elements reduced by one call",
    reorders_sums=True,
    saturation="num_gradients",
    buffer_is_preallocated=True,
)
PREFETCH_BUCKET_SIZE = KnobSpec(
    name="prefetch_bucket_size",
    numerics=Numerics.BITWISE,
    domain="powers of two, and 0",
    triggers={
        **_at("up", "comm_bandwidth", "comm_latency"),
        **_at("down", "memory_pressure"),
    },
    ds_key=(_ZERO, "stage3_prefetch_bucket_size"),
    settle_steps=3,
    description="parameter elements prefetched",
    saturation="num_parameters",
)
MAX_LIVE_PARAMETERS = KnobSpec(
    name="max_live_parameters",
    numerics=Numerics.BITWISE,
    domain="powers of two, and 0",
    triggers={
        **_at("up", "comm_bandwidth", "comm_latency"),
        **_at("down", "memory_pressure"),
    },
    ds_key=(_ZERO, "stage3_max_live_parameters"),
    settle_steps=3,
    description="gathered parameter elements above which prefetching stops",
    saturation="num_parameters",
)
MAX_REUSE_DISTANCE = KnobSpec(
    name="max_reuse_distance",
    numerics=Numerics.BITWISE,
    domain="powers of two, and 0",
    triggers={**_at("up", *_COMM), **_at("down", "memory_pressure")},
    ds_key=(_ZERO, "stage3_max_reuse_distance"),
    settle_steps=3,
    description="distance of the next use up to which a parameter stays gathered",
    saturation="2 x num_parameters",
)
# A larger value is not always faster. Each parameter that stays resident is gathered after each
# step, by a call of its own.
PARAM_PERSISTENCE_THRESHOLD = KnobSpec(
    name="param_persistence_threshold",
    numerics=Numerics.BITWISE,
    domain="powers of two, and 0",
    triggers={**_at("either", "comm_latency"), **_at("down", "memory_pressure")},
    ds_key=(_ZERO, "stage3_param_persistence_threshold"),
    settle_steps=3,
    description="elements up to which a parameter is never released",
    saturation="num_parameters",
)
OPTIMIZER_STATE_OFFLOAD = KnobSpec(
    name="optimizer_state_offload",
    numerics=Numerics.BITWISE,
    domain=(False, True),
    triggers={**_at((True,), "memory_pressure"), **_at((False,), "memory_idle")},
    device_only=True,
    description="optimizer states in host memory during forward and backward",
    zero_stages=(None, 1, 2, 3),
    excluded_by=({"offload_optimizer": True},),
    moves_to_host=True,
)
TIMERS_SYNCHRONIZED = KnobSpec(
    name="timers.throughput.synchronized",
    numerics=Numerics.BITWISE,
    domain=(False, True),
    triggers=_at((False,), "host_bound", "device_idle"),
    ds_key=("timers", "throughput", "synchronized"),
    device_only=True,
    description="a device synchronization per micro-batch, for timing",
    memory_neutral=True,
)
PYTHON_GC = KnobSpec(
    name="python_gc",
    numerics=Numerics.BITWISE,
    domain=("automatic", "between_steps"),
    triggers=_at(("between_steps",), "host_bound", "comm_imbalance", "straggler"),
    description="when Python collects garbage",
    # Workers of a DataLoader inherit it, and would never collect.
    advice="gc.disable(), gc.collect(1) after each step, gc.enable() in the DataLoader's "
    "worker_init_fn",
    memory_neutral=True,
)
MULTI_RANK_BUCKET_ALLREDUCE = KnobSpec(
    name="use_multi_rank_bucket_allreduce",
    numerics=Numerics.REASSOCIATION,
    domain=(False, True),
    triggers={**_at((False, True), *_BYTES), **_at((True,), "comm_latency")},
    ds_key=(_ZERO, "use_multi_rank_bucket_allreduce"),
    description="one all-reduce for all ranks' partitions instead of one reduce each",
    reorders_sums=True,
)
REDUCE_SCATTER = KnobSpec(
    name="reduce_scatter",
    numerics=Numerics.REASSOCIATION,
    domain=(False, True),
    triggers=_at((True, False), *_COMM),
    ds_key=(_ZERO, "reduce_scatter"),
    description="each rank receives only its partition of the sums",
    reorders_sums=True,
)
OVERLAP_COMM = KnobSpec(
    name="overlap_comm",
    numerics=Numerics.REASSOCIATION,
    domain=(False, True),
    triggers={**_at((True,), *_COMM), **_at((False,), "memory_pressure")},
    ds_key=(_ZERO, "overlap_comm"),
    device_only=True,
    description="reduction on a separate stream during backward",
    reorders_sums=True,
    needs_several_buckets=True,
)
ASYNCHRONOUS_REDUCTION = KnobSpec(
    name="asynchronous_reduction",
    numerics=Numerics.REASSOCIATION,
    domain=(False, True),
    triggers=_at((True,), *_COMM),
    description="gradients reduced asynchronously during backward",
    advice="run.compress(..., asynchronous={value})",
    saving=(False,),
    reorders_sums=True,
    needs_several_buckets=True,
    zero_stages=(1, 2),
    # A TrainingRun does not overlap at stage 1.
    excluded_by=({"reduce_scatter": False}, {"overlap_comm": True, "zero_stage": 2}),
)
BALANCE = KnobSpec(
    name="balance",
    numerics=Numerics.REASSOCIATION,
    domain=(False, True),
    triggers=_at((True,), "straggler", "comm_imbalance"),
    description="samples per rank by measured speed",
    advice="TrainingRun(..., balance={value})",
    splits_batch=True,
)
GRADIENT_COMPRESSION = KnobSpec(
    name="gradient_compression",
    numerics=Numerics.STATISTICAL,
    domain=(None, "bf16", "int8", "fp8"),
    triggers=_at(("int8", "fp8", "bf16"), *_BYTES),
    description="data type of gradients on the wire",
    advice="run.compress({value})",
    saving=(None,),
    fully_predicted=True,
)
ZERO_STAGE = KnobSpec(
    name="zero_stage",
    numerics=Numerics.REASSOCIATION,
    apply_mode="rebuild",
    domain=(0, 1, 2, 3),
    triggers={**_at("down", *_COMM), **_at("up", "memory_pressure")},
    ds_key=(_ZERO, "stage"),
    settle_steps=3,
    description="which training state ZeRO partitions",
    stepping="all",
    fully_predicted=True,
)
OFFLOAD_OPTIMIZER = KnobSpec(
    name="offload_optimizer",
    numerics=Numerics.REASSOCIATION,
    apply_mode="rebuild",
    domain=(False, True),
    triggers={
        **_at((True,), "memory_pressure"),
        **_at((False,), "memory_idle"),
    },
    ds_key=(_ZERO, "offload_optimizer", "device"),
    description="optimizer and its states on the host",
    zero_stages=(None, 1, 2, 3),
    moves_to_host=True,
)
OFFLOAD_PARAM = KnobSpec(
    name="offload_param",
    numerics=Numerics.REASSOCIATION,
    apply_mode="rebuild",
    domain=(False, True),
    triggers={
        **_at((True,), "memory_pressure"),
        **_at((False,), "memory_idle"),
    },
    ds_key=(_ZERO, "offload_param", "device"),
    settle_steps=3,
    description="parameters on the host until used",
    zero_stages=(3,),
    brings_zero_stage=3,
    moves_to_host=True,
)
BATCH_SAMPLES = KnobSpec(
    name="batch_samples",
    numerics=Numerics.UNRESTRICTED,
    domain="whole numbers from 1",
    triggers=_at("up", *_COMM, "host_bound", "device_idle"),
    ds_key=("train_batch_size",),
    description="samples of the global batch, learning rate scaled with it",
    saving="down",
    step_factor=2,
    fully_predicted=True,
)

KNOBS: tuple[KnobSpec, ...] = (
    MICRO_BATCH_SAMPLES,
    ACTIVATION_CHECKPOINTING,
    REDUCE_BUCKET_SIZE,
    PREFETCH_BUCKET_SIZE,
    MAX_LIVE_PARAMETERS,
    MAX_REUSE_DISTANCE,
    PARAM_PERSISTENCE_THRESHOLD,
    OPTIMIZER_STATE_OFFLOAD,
    TIMERS_SYNCHRONIZED,
    PYTHON_GC,
    MULTI_RANK_BUCKET_ALLREDUCE,
    REDUCE_SCATTER,
    OVERLAP_COMM,
    ASYNCHRONOUS_REDUCTION,
    BALANCE,
    GRADIENT_COMPRESSION,
    ZERO_STAGE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    BATCH_SAMPLES,
)
SPECS: Mapping[str, KnobSpec] = {spec.name: spec for spec in KNOBS}


def required_numerics(knobs: Iterable[str], facts: JobFacts) -> Numerics | None:
    """Return the strictest numerics that allow a change of these knobs; None if none do."""
    required = Numerics.BITWISE
    for knob in knobs:
        numerics = _required_by(SPECS[knob], facts)
        if numerics is None:
            return None
        required = max(required, numerics)
    return required


def _required_by(spec: KnobSpec, facts: JobFacts) -> Numerics | None:
    traits = facts.traits
    if spec.splits_batch and traits.expert_capacity:
        return None
    if spec.reorders_sums and facts.world_size <= EXACT_RANKS:
        return Numerics.BITWISE
    depends_on_split = traits.dropout or traits.batch_statistics or not traits.loss_decomposable
    if spec.splits_batch and depends_on_split:
        return Numerics.STATISTICAL
    return spec.numerics
