"""Series of a run as Prometheus would have stored them, for tests of what dashboards show.

The values are made up, and no two of them are equal: what reads another series, or aggregates it in
another way, has another result. Other runs are stored besides it: `night-6`, the run before it, and
some of which only the state is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from zerowatch.dashboards import recording_rules as recorded
from zerowatch.metrics.catalog import across_ranks, generation, window
from zerowatch.metrics.catalog import communication as comm
from zerowatch.metrics.catalog import devices as gpus
from zerowatch.metrics.catalog import memory as bytes_of
from zerowatch.metrics.catalog import overhead as watch
from zerowatch.metrics.catalog import training as steps
from zerowatch.metrics.catalog import tuner as knobs
from zerowatch.metrics.thresholds import THRESHOLDS

NOW = 1_700_000_010  # Unix time at which the dashboards are read
SHOWN_SECONDS = 600
SCRAPE_SECONDS = 15
RUN, BEFORE = "night-7", "night-6"
NODES = ("a", "b", "b")  # of the ranks 0, 1 and 2


class Named(Protocol):
    """A metric or a recording rule."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Series:
    """A series, its value now, and by how much it grows in a second, at the ends of steps."""

    name: str
    labels: Mapping[str, str]
    value: float
    growth: float = 0.0
    began: int = SHOWN_SECONDS  # seconds ago
    ended: int = 0
    step_seconds: int = 1

    def lines(self) -> Iterator[str]:
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        for ago in range(self.began, self.ended - 1, -SCRAPE_SECONDS):
            grown = -(-ago // self.step_seconds) * self.step_seconds
            value = self.value - self.growth * grown
            yield f"{self.name}{{{labels}}} {value!r} {NOW - ago}"


def whole(what: Named, value: float, run: str = RUN, **labels: str) -> list[Series]:
    """Return the series of a figure of the whole run."""
    return [Series(what.name, {"job": "zerowatch", "run": run, **labels}, value)]


def parts(what: Named, label: str, /, **values: float) -> list[Series]:
    """Return the series of a figure of the run by a label."""
    return [
        series
        for value_of_label, value in values.items()
        for series in whole(what, value, **{label: value_of_label})
    ]


def ranks(what: Named, *values: float, **labels: str) -> list[Series]:
    """Return the series of a figure of ranks 0, 1 and so on."""
    return [
        series
        for rank, value in enumerate(values)
        for series in whole(what, value, node=NODES[rank], rank=str(rank), **labels)
    ]


def growing(what: Named, *growths: float, part: str = "", **labels: str) -> list[Series]:
    """Return counters of ranks that grow by these values per second."""
    return [
        Series(series.name + part, series.labels, 1000 * growth, growth)
        for growth, series in zip(growths, ranks(what, *growths, **labels), strict=True)
    ]


class Text:
    """A series that Prometheus writes itself."""

    def __init__(self, name: str) -> None:
        self.name = name


def buckets(what: Named, values: Mapping[str, float], **labels: str) -> list[Series]:
    return [
        series for le, value in values.items() for series in whole(what, value, le=le, **labels)
    ]


UNTIL_3_SECONDS = {"0.01": 60.0, "0.03": 90.0, "0.1": 100.0, "+Inf": 100.0}
OF_COMMUNICATION = [
    *whole(recorded.EXPOSED_RATIO, 0.21),
    *whole(recorded.EXPOSED_RATIO_LONG, 0.18),
    *whole(recorded.COMM_RATIO, 0.35),
    *whole(recorded.VOLUME_RATIO, 1.37),
    *ranks(recorded.LINK_BANDWIDTH_RATIO, 0.91, 0.62, 0.83, group="dp"),
    *parts(recorded.CAUSE_RATIO, "cause", latency=0.031, bandwidth=0.11, imbalance=0.05),
    *ranks(recorded.WAIT_RATIO_BY_RANK, 0.04, 0.13, 0.09),
    *ranks(recorded.EXPOSED_RATIO_BY_RANK, 0.17, 0.28, 0.23),
    *ranks(recorded.STRAGGLER_SCORE, 0.011, 0.07, 0.032, phase="data"),
    *ranks(recorded.STRAGGLER_SCORE, 0.02, -0.04, 0.06, phase="forward"),
    *whole(recorded.BUS_BANDWIDTH, 7e8, op="all_reduce", group="dp"),
    *whole(recorded.LINK_BANDWIDTH, 5e8, group="dp"),
    *whole(recorded.LINK_BEST_BANDWIDTH, 9e8, group="dp"),
    *whole(recorded.LINK_LATENCY, 0.0003, group="dp"),
    *buckets(recorded.COLLECTIVE_BUCKETS, UNTIL_3_SECONDS, op="all_reduce"),
    *buckets(recorded.COLLECTIVE_BUCKETS, {"0.01": 3.0, "+Inf": 7.0}, op="barrier"),
    *parts(recorded.CALLS_PER_STEP, "op", all_reduce=37, barrier=2),
    *whole(recorded.WIRE_BYTES_PER_STEP, 4e7, op="all_reduce", group="dp"),
    *parts(recorded.STEP_WIRE_BYTES, "kind", measured=4.4e7, predicted=4.1e7, reference=3.9e7),
    *whole(recorded.PAYLOAD_BYTES_PER_STEP, 2.2e7, op="all_reduce", group="dp"),
    *whole(recorded.COVERAGE, 0.985),
    *ranks(comm.COLLECTIVE_MISMATCHES, 0, 2, 1),
    *ranks(comm.HANGS, 1, 0, 4),
    *parts(recorded.EXPOSED_RATIO_BY_GROUP, "group", dp=0.12, tp=0.075),
    *whole(recorded.HEARTBEAT_AGE, 5.5),
    *parts(recorded.EXCHANGE_FAILURES_RATE, "reason", store=0.002, peer=0.003),
    *ranks(comm.STEP_TIME_RATIO, 0.6, part="compute"),
    *ranks(comm.STEP_TIME_RATIO, 0.27, part="overlap"),
    *ranks(comm.COMM_EXPOSED_ERROR_RATIO, 0.014, 0.027, 0.019),
]
OF_STEPS = [
    *parts(recorded.PHASE_SECONDS_PER_STEP, "phase", forward=0.15, backward=0.33, data=0.012),
    *parts(recorded.PHASE_RATIO, "phase", forward=0.31, backward=0.63, data=0.024),
    *parts(recorded.STEP_QUANTILE_MIN, "quantile", **{"0.5": 0.48, "0.9": 0.5, "0.99": 0.52}),
    *parts(recorded.STEP_QUANTILE_MEDIAN, "quantile", **{"0.5": 0.49, "0.9": 0.53, "0.99": 0.58}),
    *parts(recorded.STEP_QUANTILE_MAX, "quantile", **{"0.5": 0.51, "0.9": 0.56, "0.99": 0.61}),
    *growing(steps.STEP_DURATION, 0.98, 0.97, 0.99, part="_sum"),
    *growing(steps.STEP_DURATION, 1.96, 1.97, 1.98, part="_count"),
    *growing(steps.STEP_DURATION, 1.2, 1.3, 1.4, part="_bucket", le="0.5"),
    *buckets(recorded.STEP_BUCKETS, {"0.5": 1.3, "+Inf": 1.95}),
    *ranks(recorded.STEP_DURATION_BY_RANK, 0.497, 0.503, 0.511),
    *ranks(recorded.DATA_RATIO_BY_RANK, 0.021, 0.033, 0.027),
    *growing(steps.STEPS, 1.96, 1.97, 1.98),
    *growing(steps.SAMPLES, 16.5, 17.5, 18.5),
    *growing(steps.TOKENS, 1650, 1750, 1850),
    *growing(steps.FLOPS, 1.1e12, 1.3e12, 1.7e12),
    *whole(recorded.MFU, 0.41),
    *whole(recorded.LOSS, 2.31),
    *whole(recorded.GRADIENT_NORM, 1.7),
    *ranks(steps.LEARNING_RATE, 3e-4),
    *ranks(steps.LOSS_SCALE, 65536),
    *ranks(steps.NONFINITE_LOSSES, 2, 0, 5),
    *whole(recorded.SKIPPED_RATIO, 0.0625),
    *whole(recorded.MICRO_BATCH_SAMPLES, 6),
    *ranks(window.ACCUMULATION_STEPS, 3),
    *whole(recorded.LARGEST_SHARE, 0.36),
    *whole(recorded.EVEN_SHARE, 0.33),
    *whole(recorded.SMALLEST_SHARE, 0.29),
    *parts(recorded.COMPRESSION_ERROR, "codec", int8=0.013),
    *whole(recorded.GENERATION_SPEED, 820),
    *growing(generation.GENERATED_TOKENS, 101, 103, 107),
    *whole(recorded.GENERATED_LENGTH, 94),
    *whole(recorded.GENERATION_WAIT, 0.44),
    *whole(recorded.GATHERS_OF_GENERATION, 71),
]
OF_MEMORY = [
    *ranks(recorded.OOM_RISK, 0.12, 0.34, 0.23, device="cuda:0"),
    *ranks(recorded.PEAK_RATIO, 0.71, 0.86, 0.78, device="cuda:0"),
    *ranks(bytes_of.MEMORY_HEADROOM, 8e9, 5e9, 7e9, device="cuda:0"),
    *ranks(bytes_of.OOM_ETA_STEPS, float("inf"), 450, 1200, device="cuda:0"),
    *parts(recorded.MEMORY_LIMIT, "device", **{"cuda:0": 8e10, "cuda:1": 7.8e10, "cpu": 5e11}),
    *whole(recorded.MEMORY_PEAK, 7e10, device="cuda:0", state="allocated"),
    *whole(recorded.MEMORY_PEAK, 7.5e10, device="cuda:0", state="reserved"),
    *whole(recorded.MEMORY_PEAK, 3e11, device="cpu", state="allocated"),
    *parts(recorded.PREDICTED_PEAK, "device", **{"cuda:0": 7.2e10, "cpu": 3.1e11}),
    *whole(recorded.MEMORY_STATES, 6e10, device="cuda:0", state="allocated"),
    *whole(recorded.MEMORY_STATES, 6.6e10, device="cuda:0", state="reserved"),
    *whole(recorded.MEMORY_STATES, 2e11, device="cpu", state="allocated"),
    *whole(recorded.MEMORY_CATEGORIES, 1.1e10, device="cuda:0", category="parameters"),
    *whole(recorded.MEMORY_CATEGORIES, 2.3e10, device="cuda:0", category="optimizer"),
    *whole(recorded.MEMORY_CATEGORIES, 4.7e10, device="cpu", category="optimizer"),
    *whole(recorded.PHASE_PEAK, 6.1e10, device="cuda:0", phase="forward"),
    *whole(recorded.PHASE_PEAK, 6.9e10, device="cuda:0", phase="backward"),
    *whole(recorded.PHASE_PEAK, 5.3e10, device="cuda:0", phase="generate"),
    *whole(recorded.PHASE_PEAK, 7.7e10, device="cuda:0", phase="eval"),
    *parts(recorded.FRAGMENTATION, "device", **{"cuda:0": 3e9, "cpu": 4e9}),
    *parts(recorded.BASELINE, "device", **{"cuda:0": 1.5e9, "cpu": 2.5e9}),
    *whole(recorded.LEAK, 2048, device="cuda:0", category="other"),
    *ranks(recorded.HEADROOM_RATIO, 0.1, 0.0625, 0.0875, device="cuda:0"),
    *parts(recorded.NODE_MEMORY_RATIO, "node", a=0.15, b=0.44),
    *parts(recorded.PREDICTION_ERROR, "device", **{"cuda:0": 0.017}),
    *ranks(bytes_of.OOMS, 1, 0, 2, device="cuda:0", outcome="replayed"),
    *ranks(bytes_of.ALLOC_RETRIES, 3, 5, 11, device="cuda:0"),
    *parts(recorded.OFFLOAD_BYTES_PER_STEP, "direction", to_host=5e8, to_device=6e8),
    *parts(recorded.OFFLOAD_RATIO, "direction", to_host=0.07, to_device=0.08),
    *ranks(window.WINDOW_REPLAYS, 4, outcome="committed"),
    *ranks(window.ENGINE_REBUILDS, 3, outcome="undone"),
    *whole(recorded.REPLAY_RATIO, 0.015),
    *whole(recorded.REPLAY_RATIO_LONG, 0.008),
]
OF_DEVICES = [
    *parts(recorded.DEVICE_UTILIZATION, "device", **{"cuda:0": 0.84, "cpu": 0.3}),
    *ranks(recorded.DEVICE_UTILIZATION_BY_RANK, 0.81, 0.93, 0.72, device="cuda:0"),
    *whole(recorded.CLOCK, 1.41e9, device="cuda:0"),
    *ranks(gpus.DEVICE_CLOCK, 1.41e9, 1.5e9, 1.6e9, device="cuda:0"),
    *ranks(gpus.DEVICE_LOST, 0, 1, 1, device="cuda:0"),
    *ranks(gpus.DEVICE_XID_ERRORS, 1, 4, 2, device="cuda:0", xid="79"),
    *ranks(gpus.DEVICE_ECC_ERRORS, 3, 4, 9, device="cuda:0", kind="corrected"),
    *ranks(gpus.DEVICE_ROW_REMAP, 0, 1, 0, device="cuda:0", state="pending"),
    *growing(gpus.DEVICE_THROTTLED_SECONDS, 0.2, 0.5, 0.1, device="cuda:0", reason="hw_thermal"),
    *growing(gpus.DEVICE_LINK_ERRORS, 0.1, 0.2, 0.4, device="cuda:0", link="nvlink", kind="crc"),
    *ranks(gpus.DEVICE_INFO, 1, device="cuda:0", name="H100", uuid="U", pci_bus_id="P", driver="D"),
    *ranks(recorded.TEMPERATURE_BY_RANK, 61, 74, 66, device="cuda:0"),
    *ranks(gpus.DEVICE_TEMPERATURE_LIMIT, 87, 90, 88, device="cuda:0"),
    *whole(recorded.POWER, 1350),
    *ranks(gpus.DEVICE_ENERGY, 1e6, 2e6, 5e6, device="cuda:0"),
    *whole(recorded.SM_ACTIVE, 0.66, device="cuda:0"),
    *whole(recorded.LINK_BYTES_RATE, 8e9, link="nvlink", direction="sent"),
]
OF_THE_TUNER = [
    *ranks(knobs.TUNER_STATE, 1, state="trial"),
    *ranks(knobs.TUNER_STATE, 0, state="observe"),
    *ranks(knobs.TUNER_DECISIONS, 3, verdict="accepted"),
    *ranks(knobs.TUNER_EXPLORATION_SECONDS, 95),
    *ranks(knobs.TUNER_SYMPTOM, 0.06, symptom="comm_latency"),
    *ranks(knobs.TUNER_SYMPTOM, -0.02, symptom="data_bound"),
    *ranks(knobs.TUNER_KNOB_VALUE, 5e8, knob="bucket"),
    *ranks(knobs.TUNER_GAIN, 0.057, knob="bucket"),
    *ranks(knobs.TUNER_GAIN_LOWER_BOUND, 0.031, knob="bucket"),
]
OF_MONITORING = [
    *ranks(recorded.WATCH_RATIO_BY_RANK, 0.0041, 0.0032, 0.0029),
    *parts(recorded.WATCH_RATIO_BY_PART, "part", hooks=0.0021, watch_thread=0.0009),
    *ranks(Text("up"), 1, 1, 0),
    *ranks(watch.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 3, NOW - 7, NOW - 2),
    *ranks(watch.HOOK_FAILURES, 1, 3, 2, hook="step"),
    *ranks(watch.EXPORTER_FAILURES, 2, 5, 1, exporter="http"),
    *ranks(watch.DROPPED_RECORDS, 7, 4, 2, part="run_log"),
    *ranks(Text("scrape_duration_seconds"), 0.02, 0.05, 0.08),
    *ranks(Text("scrape_samples_scraped"), 450, 360, 330),
]
OF_THE_RUN = [
    *whole(recorded.RUN_STATE, 1),
    *whole(recorded.ACTIVE_RANKS, 2),
    *whole(recorded.WORLD_SIZE, 3),
    *whole(recorded.RUN_ATTEMPT, 4),
    *whole(recorded.STEPS_DONE, 1234),
    *whole(recorded.LAST_STEP, 5234),
    *whole(recorded.RUN_START, NOW - 5000),
    *whole(recorded.SAMPLES_RATE, 52),
    *whole(recorded.GOODPUT, 0.93),
    *whole(recorded.LAST_CHECKPOINT_IN_WEEK, NOW - 700),
    *ranks(steps.LAST_STEP_TIMESTAMP, NOW - 5, NOW - 9, NOW - 6),
    *ranks(steps.RUN_ACTIVE, 1, 1, 0),
    *ranks(steps.CHECKPOINTS, 17, outcome="saved"),
    *ranks(steps.CHECKPOINTS, 1, outcome="failed"),
    *ranks(steps.LAST_CHECKPOINT_BYTES, 1.4e10),
    *ranks(steps.CHECKPOINT_SECONDS, 61, 66, 63),
    *ranks(
        steps.RUN_INFO,
        1,
        zero_stage="2",
        backend="nccl",
        accelerator="cuda",
        torch="T",
        deepspeed="D",
    ),
    *(
        Series(
            "ALERTS",
            {
                "job": "zerowatch",
                "run": RUN,
                "alertname": "ZerowatchDataBound",
                "alertstate": state,
                "severity": severity,
                "rank": rank,
            },
            1,
        )
        for rank, state, severity in (
            ("0", "firing", "warning"),
            ("1", "firing", "warning"),
            ("2", "pending", "warning"),
        )
    ),
    *(
        Series(
            "ALERTS_FOR_STATE",
            {
                "job": "zerowatch",
                "run": RUN,
                "alertname": "ZerowatchDataBound",
                "severity": "warning",
                "rank": rank,
            },
            NOW - seconds,
        )
        for rank, seconds in (("0", 300), ("1", 330), ("2", 20))
    ),
]
OF_ALL_RANKS = [
    series
    for number, spec in enumerate(across_ranks.STATISTICS.values(), start=1)
    for place, stat in enumerate(("min", "median", "max"))
    for series in ranks(spec, number + place / 8, stat=stat)
] + [
    *ranks(across_ranks.RANKS_EXTREME, 2, figure="data", stat="min"),
    *ranks(across_ranks.RANKS_EXTREME, 1, figure="data", stat="max"),
    *ranks(across_ranks.RANKS_REPORTING, 3, figure="data"),
]
# Each threshold of the run is a tenth above its default.
OF_LIMITS = [
    series
    for threshold in THRESHOLDS.values()
    for series in whole(recorded.ALERT_THRESHOLD, 1.1 * threshold, name=threshold.name)
]
OF_THE_RUN_BEFORE = [
    *whole(recorded.RUN_STATE, 14, BEFORE),
    *whole(recorded.WORLD_SIZE, 5, BEFORE),
    *whole(recorded.STEPS_DONE, 900, BEFORE),
    *whole(recorded.RUN_START, NOW - 9000, BEFORE),
    *whole(recorded.LOSS, 2.5, BEFORE),
    *whole(recorded.SAMPLES_RATE, 40, BEFORE),
    *whole(recorded.STEP_QUANTILE_MEDIAN, 0.7, BEFORE, quantile="0.5"),
    *whole(recorded.STEP_QUANTILE_MEDIAN, 0.8, BEFORE, quantile="0.99"),
    *whole(recorded.MFU, 0.32, BEFORE),
    *whole(recorded.EXPOSED_RATIO, 0.28, BEFORE),
    *whole(recorded.VOLUME_RATIO, 1.5, BEFORE),
    *whole(recorded.GOODPUT, 0.85, BEFORE),
    *whole(recorded.GRADIENT_NORM, 2.2, BEFORE),
    *whole(recorded.MEMORY_PEAK, 6.5e10, BEFORE, device="cuda:0", state="allocated"),
    *whole(recorded.MEMORY_PEAK, 9.5e10, BEFORE, device="cuda:0", state="reserved"),
    *whole(recorded.ALERT_THRESHOLD, 0.65, BEFORE, name="device_utilization_low"),
    *whole(recorded.ALERT_THRESHOLD, 0.15, BEFORE, name="exposed_comm_ratio_high"),
]
# Runs of which only the state is known. The last two do not answer any more.
OF_OTHER_RUNS = [
    *whole(recorded.RUN_STATE, 3, "stalled"),
    *whole(recorded.RUN_STATE, 4, "hanging"),
    *(
        Series(recorded.RUN_STATE.name, {"job": "zerowatch", "run": run}, state, ended=300)
        for run, state in (("vanished", 1), ("completed", 10))
    ),
]
# Of the run that vanished: Prometheus returns none of these series any more.
OF_THE_VANISHED_RUN = [
    replace(series, labels={**series.labels, "run": "vanished"}, ended=400)
    for series in (
        *whole(recorded.LAST_CHECKPOINT_IN_WEEK, NOW - 900),
        *ranks(steps.CHECKPOINTS, 15, outcome="saved"),
        *ranks(steps.CHECKPOINT_SECONDS, 51),
        *ranks(steps.LAST_CHECKPOINT_BYTES, 1.3e10),
        *ranks(bytes_of.OOMS, 0, 1, device="cuda:0", outcome="fatal"),
        *ranks(bytes_of.ALLOC_RETRIES, 7, 6, device="cuda:0"),
        *ranks(window.WINDOW_REPLAYS, 8, outcome="gave_up"),
        *ranks(window.ENGINE_REBUILDS, 9, outcome="refused"),
        *whole(recorded.RUN_ATTEMPT, 1),
    )
]
# Rank 0 of this run has just moved from one address to another.
OF_THE_MOVED_RUN = [
    replace(series, labels={**series.labels, "run": "moved", "instance": instance}, ended=ended)
    for instance, ended in (("10.1.0.1:9464", 15), ("10.1.0.2:9464", 0))
    for series in (
        *growing(steps.STEP_DURATION, 0.75, part="_sum"),
        *growing(steps.STEP_DURATION, 1.25, part="_count"),
        *growing(steps.STEP_DURATION, 1.25, part="_bucket", le="0.68"),
    )
]
# Prometheus drops the buckets of this run.
OF_THE_RUN_WITHOUT_BUCKETS = [
    replace(series, labels={**series.labels, "run": "without buckets"})
    for series in OF_THE_MOVED_RUN
    if not series.name.endswith("_bucket")
]
# Rank 0 of this run answers and rank 1 does not any more. Its last values are those of its end.
OF_THE_RUN_WITH_A_DEAD_RANK = [
    replace(series, labels={**series.labels, "run": "a dead rank"}, ended=ended)
    for device, values, ended in (("cuda:0", (0,), 0), ("cuda:1", (0, 1), 400))
    for series in (
        *ranks(gpus.DEVICE_LOST, *values, device=device),
        *ranks(gpus.DEVICE_ECC_ERRORS, *values, device=device, kind="uncorrected"),
        *ranks(bytes_of.OOMS, *values, device=device, outcome="fatal"),
        *ranks(watch.HOOK_FAILURES, *values, hook="step"),
    )
    if series.labels["rank"] == str(len(values) - 1)
]


def devices_with_faults(
    run: str, *devices: tuple[str, str, str, float, int, int]
) -> Iterator[Series]:
    """Yield the series of ranks on node b: rank, device, UUID, fault, when they began and ended.

    An empty UUID is unknown.
    """
    for rank, device, uuid, fault, began, ended in devices:
        labels = {"job": "zerowatch", "run": run, "rank": rank, "node": "b", "device": device}
        for spec, own, value in (
            (gpus.DEVICE_LOST, {}, fault),
            (gpus.DEVICE_ROW_REMAP, {"state": "pending"}, fault),
            *([(gpus.DEVICE_INFO, {"uuid": uuid}, 1)] if uuid else []),
        ):
            yield Series(spec.name, labels | own, value, began=began, ended=ended)


# Rank 1 of this run has died, and rank 0 now has its GPU, which is lost. So is that of rank 2.
OF_THE_SHRUNK_RUN = [
    *devices_with_faults(
        "shrunk",
        ("1", "cuda:0", "A", 1, 600, 400),
        ("2", "cuda:1", "B", 1, 600, 400),
        ("0", "cuda:0", "A", 1, 300, 0),
    )
]
# Each process of this run sees one GPU only. Rank 0 is healthy, and has a GPU that was rank 1's.
OF_THE_RUN_WITH_ONE_GPU_EACH = [
    *devices_with_faults(
        "one GPU each",
        ("0", "cuda:0", "A", 0, 600, 0),
        ("1", "cuda:0", "A", 0, 600, 560),
        ("1", "cuda:0", "B", 1, 545, 400),
        ("2", "cuda:0", "C", 1, 600, 400),
        ("3", "cuda:0", "", 1, 600, 400),
    )
]
# A step of this run takes 40 seconds, in which Prometheus scrapes it two or three times.
OF_THE_RUN_WITH_LONG_STEPS = [
    replace(series, labels={**series.labels, "run": "long steps"}, step_seconds=40)
    for series in (
        *growing(steps.STEPS, 0.025, 0.025),
        *growing(steps.SAMPLES, 12.8, 12.8),
        *growing(steps.TOKENS, 6400, 6400),
        *growing(steps.FLOPS, 1e12, 1e12),
        *growing(generation.GENERATED_TOKENS, 51.2, 51.2),
    )
]
# This run began 90 seconds ago.
OF_THE_NEW_RUN = [
    replace(series, labels={**series.labels, "run": "new"}, value=value, began=90)
    for series, value in (
        *((series, 90) for series in growing(steps.STEPS, 1)),
        *((series, 900) for series in growing(steps.SAMPLES, 10)),
        *((series, 90) for series in growing(steps.STEP_DURATION, 1, part="_sum")),
        *((series, 90) for series in growing(steps.STEP_DURATION, 1, part="_count")),
        *((series, NOW) for series in growing(steps.LAST_STEP_TIMESTAMP, 1)),
    )
]
# Names that are patterns which other names match.
OF_RUNS_WITH_SIMILAR_NAMES = [
    replace(series, labels={**series.labels, "job": "c++ (nightly)", "run": run})
    for run, value in (("lr0.1", 1.25), ("lr0-1", 1.5))
    for series in (*whole(recorded.GRADIENT_NORM, value), *whole(recorded.VOLUME_RATIO, value))
]
# Seconds ago at which, in the run "marked", rank 0 started, the tuner decided and an alert fired.
STARTED = (20_000, 9_000, 1_000)
DECIDED = (19_000, 15_500, 8_000, 2_000)
FIRED = 14_000


def from_to(*moments: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last scrape of each time between two moments."""
    yield from zip(moments, (*(ago + SCRAPE_SECONDS for ago in moments[1:]), 0), strict=True)


# This run began and ended between two points of a range of a day.
BRIEFLY = (660, 600)

OF_A_BRIEF_RUN = [
    replace(series, labels={**series.labels, "run": "brief"}, began=BRIEFLY[0], ended=BRIEFLY[1])
    for series in (
        *ranks(Text("process_start_time_seconds"), NOW - 700),
        *ranks(knobs.TUNER_DECISIONS, 1, verdict="accepted"),
    )
]
OF_MARKS = [
    replace(series, labels={**series.labels, "run": "marked"}, began=began, ended=ended)
    for series, began, ended in (
        *(
            (series, began, ended)
            for began, ended in from_to(*STARTED)
            for series in ranks(Text("process_start_time_seconds"), NOW - began - 60)
        ),
        *(
            (series, began, ended)
            for count, (began, ended) in enumerate(from_to(STARTED[0], *DECIDED))
            for series in ranks(knobs.TUNER_DECISIONS, count, verdict="accepted")
        ),
        *(
            (series, FIRED, FIRED - 60)
            for series in whole(Text("ALERTS"), 1, alertstate="firing", alertname="A")
        ),
    )
]
# When the processes of rank 0 started: long ago, shortly before their first scrape, and again.
OF_STARTS = [
    replace(series, labels={**series.labels, "run": run}, began=began, ended=ended)
    for run, started, began, ended in (
        ("long ago", 5000, 600, 0),
        ("with a gap", 5000, 600, 500),
        ("with a gap", 5000, 30, 0),
        ("a large model", 900, 45, 0),
        ("again", 5000, 600, 45),
        ("again", 40, 30, 0),
    )
    for series in ranks(Text("process_start_time_seconds"), NOW - started)
]
# The ranks of these runs share what they train on.
OF_SHARING_RUNS = [
    replace(series, labels={**series.labels, "run": run})
    for run, shared in (("pipeline", ("samples",)), ("tensor", ("samples", "tokens")))
    for series in (
        *growing(steps.SAMPLES, 4, 4),
        *growing(steps.TOKENS, 800, 0),
        *(each for work in shared for each in ranks(steps.SHARED_WORK, 1, 1, of=work)),
    )
]
STORED = [
    *OF_COMMUNICATION,
    *OF_STEPS,
    *OF_MEMORY,
    *OF_DEVICES,
    *OF_THE_TUNER,
    *OF_MONITORING,
    *OF_THE_RUN,
    *OF_ALL_RANKS,
    *OF_LIMITS,
    *OF_THE_RUN_BEFORE,
    *OF_OTHER_RUNS,
    *OF_THE_VANISHED_RUN,
    *OF_THE_MOVED_RUN,
    *OF_THE_RUN_WITHOUT_BUCKETS,
    *OF_THE_RUN_WITH_A_DEAD_RANK,
    *OF_THE_SHRUNK_RUN,
    *OF_THE_RUN_WITH_ONE_GPU_EACH,
    *OF_THE_RUN_WITH_LONG_STEPS,
    *OF_THE_NEW_RUN,
    *OF_RUNS_WITH_SIMILAR_NAMES,
    *OF_MARKS,
    *OF_A_BRIEF_RUN,
    *OF_STARTS,
    *OF_SHARING_RUNS,
]
