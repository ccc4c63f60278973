"""Test cases of live settings: ds config, new value, and the collectives that should change."""

from __future__ import annotations

from dataclasses import dataclass, field

STAGE_3 = {"stage3_param_persistence_threshold": 100, "reduce_bucket_size": 5_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A live setting at one value.

    Attributes:
        shows: What the script counts per window that must differ while the value is set; more
            if positive.
    """

    stage: int
    setting: str
    value: int | bool
    shows: tuple[tuple[str, int], ...]
    zero: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"stage {self.stage}, {self.setting} {self.value}"


CASES = [
    Case(stage=0, setting="reduce_bucket_size", value=500, shows=(("all_reduce", +1),)),
    Case(stage=1, setting="reduce_bucket_size", value=500, shows=(("all_reduce", +1),)),
    Case(stage=1, setting="contiguous_gradients", value=False, shows=(("buffers", -1),)),
    Case(stage=1, setting="reduce_scatter", value=False, shows=(("scattered", -1),)),
    Case(
        stage=1,
        setting="use_multi_rank_bucket_allreduce",
        value=False,
        shows=(("reduce", +1), ("all_reduce", -1)),
    ),
    Case(stage=2, setting="reduce_bucket_size", value=500, shows=(("all_reduce", +1),)),
    Case(stage=2, setting="contiguous_gradients", value=False, shows=(("buffers", -1),)),
    Case(stage=2, setting="reduce_scatter", value=False, shows=(("scattered", -1),)),
    Case(
        stage=2,
        setting="use_multi_rank_bucket_allreduce",
        value=False,
        shows=(("reduce", +1), ("all_reduce", -1)),
    ),
    Case(stage=2, setting="overlap_comm", value=True, shows=(("buffers", +1),)),
    Case(
        stage=2, setting="timers.throughput.synchronized", value=False, shows=(("synchronize", -1),)
    ),
    Case(
        stage=3,
        setting="reduce_bucket_size",
        value=900,
        zero=STAGE_3,
        shows=(("reduce_scatter_tensor", +1),),
    ),
    Case(
        stage=3,
        setting="reduce_bucket_size",
        value=10**6,
        zero=STAGE_3,
        shows=(("reduce_scatter_tensor", -1),),
    ),
    Case(
        stage=3,
        setting="reduce_scatter",
        value=False,
        zero=STAGE_3,
        shows=(("reduce_scatter_tensor", -1), ("all_reduce", +1)),
    ),
    Case(
        stage=3,
        setting="contiguous_gradients",
        value=False,
        zero=STAGE_3,
        shows=(("buffers", -1),),
    ),
    Case(
        stage=3,
        setting="prefetch_bucket_size",
        value=0,
        zero=STAGE_3,
        shows=(("all_gather_into_tensor", +1),),
    ),
    Case(
        stage=3,
        setting="max_live_parameters",
        value=0,
        zero=STAGE_3,
        shows=(("all_gather_into_tensor", +1),),
    ),
    Case(
        stage=3,
        setting="max_reuse_distance",
        value=0,
        zero=STAGE_3 | {"stage3_prefetch_bucket_size": 500},
        shows=(("all_gather_into_tensor", +1),),
    ),
    Case(
        stage=3,
        setting="param_persistence_threshold",
        value=0,
        zero=STAGE_3,
        shows=(("all_gather_into_tensor", -1), ("kept_bytes", -1)),
    ),
    Case(
        stage=3,
        setting="param_persistence_threshold",
        value=10**5,
        zero=STAGE_3,
        shows=(("all_gather_into_tensor", +1), ("kept_bytes", +1)),
    ),
]

# One of each kind, since four ranks take twice as long.
ON_FOUR_RANKS = [
    case
    for case in CASES
    if (case.stage, case.setting, case.value)
    in {
        (0, "reduce_bucket_size", 500),
        (2, "reduce_bucket_size", 500),
        (2, "overlap_comm", True),
        (3, "reduce_bucket_size", 900),
        (3, "prefetch_bucket_size", 0),
        (3, "max_live_parameters", 0),
        (3, "param_persistence_threshold", 10**5),
    }
]
