"""Every knob that the tuner may turn, as data. How one is turned is not known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .types import Numerics, Tier, Value

# What a symptom wants of a knob: a number that is larger, smaller, or either as the measurement
# says; or values, the most promising first.
Trigger = Literal["up", "down", "either"] | tuple[Value, ...]
# A domain that is not closed: which numbers make sense, ascending.
Rule = Literal["whole numbers from 1", "powers of two", "powers of two, and 0"]

_COMM = ("comm_bandwidth", "comm_redundancy", "comm_latency")
_BYTES = ("comm_bandwidth", "comm_redundancy")
_ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSpec:
    """One knob.

    Attributes:
        name: As everybody calls it.
        numerics: The strictest value that allows it in a plain job; see `required_numerics`.
        tier: Whether the engine has to be rebuilt.
        domain: All its values in order, or a rule where they are too many.
        triggers: What each symptom that it may help against wants of it.
        device_only: Whether it does nothing where the CPU itself trains.
        settle_steps: Steps after a change that say nothing of its speed: one in which memory is
            allocated anew, and one more; ZeRO 3 records its trace again, which takes three.
        ds_key: Where it stands in a ds config; None where it stands nowhere.
        what: What it is, in half a sentence.
    """

    name: str
    numerics: Numerics
    domain: tuple[Value, ...] | Rule
    triggers: Mapping[str, Trigger]
    what: str
    ds_key: tuple[str, ...] | None = None
    tier: Tier = "live"
    device_only: bool = False
    settle_steps: int = 2

    def has(self, value: Value) -> bool:
        """Whether a knob can have a value at all."""
        if isinstance(self.domain, tuple):
            return value in self.domain
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _at(trigger: Trigger, *symptoms: str) -> dict[str, Trigger]:
    return dict.fromkeys(symptoms, trigger)


KNOBS: tuple[KnobSpec, ...] = (
    KnobSpec(
        name="micro_batch_samples",
        numerics=Numerics.REASSOCIATION,
        domain="whole numbers from 1",
        triggers={
            **_at("up", *_COMM, "host_bound", "device_idle"),
            **_at("down", "memory_pressure"),
        },
        ds_key=("train_micro_batch_size_per_gpu",),
        what="samples of a micro-batch; the whole batch stays as it is",
    ),
    KnobSpec(
        name="activation_checkpointing",
        numerics=Numerics.BITWISE,
        domain=(False, True),
        triggers={**_at((True,), "memory_pressure"), **_at((False,), "memory_idle")},
        settle_steps=3,
        what="activations worked out again in backward instead of kept",
    ),
    KnobSpec(
        name="reduce_bucket_size",
        numerics=Numerics.REASSOCIATION,
        domain="powers of two",
        triggers={
            **_at("either", "comm_bandwidth", "comm_redundancy"),
            **_at("up", "comm_latency"),
            **_at("down", "memory_pressure"),
        },
        ds_key=(_ZERO, "reduce_bucket_size"),
        what="elements of gradients that are reduced by one call",
    ),
    KnobSpec(
        name="prefetch_bucket_size",
        numerics=Numerics.BITWISE,
        domain="powers of two, and 0",
        triggers={
            **_at("up", "comm_bandwidth", "comm_latency"),
            **_at("down", "memory_pressure"),
        },
        ds_key=(_ZERO, "stage3_prefetch_bucket_size"),
        settle_steps=3,
        what="elements of parameters that are fetched ahead of their use",
    ),
    KnobSpec(
        name="max_live_parameters",
        numerics=Numerics.BITWISE,
        domain="powers of two, and 0",
        triggers={
            **_at("up", "comm_bandwidth", "comm_latency"),
            **_at("down", "memory_pressure"),
        },
        ds_key=(_ZERO, "stage3_max_live_parameters"),
        settle_steps=3,
        what="elements of parameters that may be there at once before fetching ahead stops",
    ),
    KnobSpec(
        name="max_reuse_distance",
        numerics=Numerics.BITWISE,
        domain="powers of two, and 0",
        triggers={**_at("up", *_COMM), **_at("down", "memory_pressure")},
        ds_key=(_ZERO, "stage3_max_reuse_distance"),
        settle_steps=3,
        what="how soon a parameter must be used again to stay where it was fetched",
    ),
    # Larger is not always faster: what stays is gathered after each step, one call each.
    KnobSpec(
        name="param_persistence_threshold",
        numerics=Numerics.BITWISE,
        domain="powers of two, and 0",
        triggers={**_at("either", "comm_latency"), **_at("down", "memory_pressure")},
        ds_key=(_ZERO, "stage3_param_persistence_threshold"),
        settle_steps=3,
        what="elements up to which a parameter is never let go",
    ),
    KnobSpec(
        name="optimizer_sleep",
        numerics=Numerics.BITWISE,
        domain=(False, True),
        triggers={**_at((True,), "memory_pressure"), **_at((False,), "memory_idle")},
        device_only=True,
        what="optimizer states in host memory while forward and backward run",
    ),
    KnobSpec(
        name="timers.throughput.synchronized",
        numerics=Numerics.BITWISE,
        domain=(False, True),
        triggers=_at((False,), "host_bound", "device_idle"),
        ds_key=("timers", "throughput", "synchronized"),
        device_only=True,
        what="a wait for the device at each micro-batch, to time it",
    ),
    KnobSpec(
        name="python_gc",
        numerics=Numerics.BITWISE,
        domain=("automatic", "between_steps"),
        triggers=_at(("between_steps",), "host_bound", "comm_imbalance", "straggler"),
        what="when Python looks for garbage",
    ),
    KnobSpec(
        name="use_multi_rank_bucket_allreduce",
        numerics=Numerics.REASSOCIATION,
        domain=(False, True),
        triggers={**_at((False, True), *_BYTES), **_at((True,), "comm_latency")},
        ds_key=(_ZERO, "use_multi_rank_bucket_allreduce"),
        what="one all-reduce for the parts of all ranks, not one reduce for each",
    ),
    KnobSpec(
        name="reduce_scatter",
        numerics=Numerics.REASSOCIATION,
        domain=(False, True),
        triggers=_at((True, False), *_COMM),
        ds_key=(_ZERO, "reduce_scatter"),
        what="each rank gets its part of the sums only",
    ),
    KnobSpec(
        name="overlap_comm",
        numerics=Numerics.REASSOCIATION,
        domain=(False, True),
        triggers={**_at((True,), *_COMM), **_at((False,), "memory_pressure")},
        ds_key=(_ZERO, "overlap_comm"),
        device_only=True,
        what="reduction on a stream of its own while backward goes on",
    ),
    KnobSpec(
        name="asynchronous_reduction",
        numerics=Numerics.REASSOCIATION,
        domain=(False, True),
        triggers=_at((True,), *_COMM),
        what="gradients that travel while backward goes on",
    ),
    KnobSpec(
        name="balance",
        numerics=Numerics.REASSOCIATION,
        domain=(False, True),
        triggers=_at((True,), "straggler", "comm_imbalance"),
        what="samples shared out by the ranks' measured speeds",
        settle_steps=6,  # one to agree, and what workers have loaded ahead
    ),
    KnobSpec(
        name="gradient_compression",
        numerics=Numerics.STATISTICAL,
        domain=(None, "bf16", "int8", "fp8"),
        triggers=_at(("int8", "fp8", "bf16"), *_BYTES),
        what="the form in which gradients travel",
    ),
    KnobSpec(
        name="zero_stage",
        numerics=Numerics.REASSOCIATION,
        tier="rebuild",
        domain=(0, 1, 2, 3),
        triggers={**_at("down", *_COMM), **_at("up", "memory_pressure")},
        ds_key=(_ZERO, "stage"),
        settle_steps=3,
        what="what of the training state the ranks share out",
    ),
    KnobSpec(
        name="offload_optimizer",
        numerics=Numerics.REASSOCIATION,
        tier="rebuild",
        domain=(False, True),
        triggers={
            **_at((True,), "memory_pressure"),
            **_at((False,), "memory_idle"),
        },
        ds_key=(_ZERO, "offload_optimizer", "device"),
        what="the optimizer and its states on the host",
    ),
    KnobSpec(
        name="offload_param",
        numerics=Numerics.REASSOCIATION,
        tier="rebuild",
        domain=(False, True),
        triggers={
            **_at((True,), "memory_pressure"),
            **_at((False,), "memory_idle"),
        },
        ds_key=(_ZERO, "offload_param", "device"),
        settle_steps=3,
        what="parameters on the host until they are used",
    ),
    KnobSpec(
        name="batch_samples",
        numerics=Numerics.UNRESTRICTED,
        domain="whole numbers from 1",
        triggers=_at("up", *_COMM, "host_bound", "device_idle"),
        ds_key=("train_batch_size",),
        what="samples of the whole batch, with the learning rate scaled along",
        settle_steps=6,  # one to agree, and what workers have loaded ahead
    ),
)
SPECS: Mapping[str, KnobSpec] = {spec.name: spec for spec in KNOBS}
