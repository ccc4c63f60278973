"""Tests of the diagnosis: metrics of an interval of training, and their symptoms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerowatch.metrics.catalog import communication, devices, generation, memory, overhead, training
from zerowatch.metrics.catalog.labels import OWN_GROUP
from zerowatch.metrics.catalog.tuner import SYMPTOMS
from zerowatch.metrics.recorder import Recorder, Snapshot
from zerowatch.runtime.tuner.policy.diagnose import Thresholds, context_of, diagnose
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta, metrics_between

# A rank on a CPU that waits for nothing.
BUSY = MetricsDelta(
    seconds=20.0,
    steps=100.0,
    phase_ratios={"data": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.08, "other": 0.01},
    exposed_ratio=0.05,
    comm_ratio=0.05,
    cause_ratios={"bandwidth": 0.04, "redundancy": 0.0, "latency": 0.01, "imbalance": 0.0},
    coverage=1.0,
    on_cpu=True,
    device_utilization=0.5,
    headroom_ratio=0.3,
    device_headroom_ratio=0.3,
    oom_risk=0.0,
    straggler_score=0.0,
    world_size=2,
)
GPU = replace(BUSY, on_cpu=False, device_utilization=0.95)
SLOW_LINK = {"bandwidth": 0.3, "redundancy": 0.2, "latency": 0.04, "imbalance": 0.01}


def names(reading: MetricsDelta, thresholds: Thresholds | None = None) -> list[str]:
    return [each.name for each in diagnose(reading, thresholds or Thresholds())]


def phases(**seconds: float) -> dict[str, float]:
    return {**BUSY.phase_ratios, **seconds}


@pytest.mark.parametrize(
    ("reading", "symptoms"),
    [
        pytest.param(BUSY, [], id="nothing holds a busy rank back"),
        pytest.param(GPU, [], id="nor one with a busy GPU"),
        pytest.param(MetricsDelta(), [], id="no metrics"),
        pytest.param(MetricsDelta(stale=True), [], id="stale metrics show nothing"),
        pytest.param(
            replace(GPU, exposed_ratio=0.55, cause_ratios=SLOW_LINK),
            ["comm_bandwidth", "comm_redundancy", "comm_latency"],
            id="each cause of waiting by its share, but for a tiny one",
        ),
        pytest.param(
            replace(
                BUSY,
                phase_ratios=phases(forward=0.1, backward=0.1, other=0.71),
                exposed_ratio=0.7,
                own_exposed_ratios={"other": 0.7},
                cause_ratios={"imbalance": 0.7},
            ),
            ["comm_imbalance", "straggler"],
            id="a TrainingRun's wait for another rank is no time of Python's",
        ),
        pytest.param(
            replace(
                BUSY,
                phase_ratios=phases(other=0.16),
                exposed_ratio=0.15,
                own_exposed_ratios={"other": 0.15},
            ),
            [],
            id="nor is a wait that is too short for a symptom",
        ),
        pytest.param(
            replace(
                BUSY,
                phase_ratios=phases(data=0.09, forward=0.11, backward=0.5, other=0.2),
                exposed_ratio=0.15,
                own_exposed_ratios={"backward": 0.15},
            ),
            ["device_idle", "host_bound"],
            id="a vote within backward is in its phase already, and is none of the other time",
        ),
        pytest.param(
            replace(GPU, exposed_ratio=0.2, cause_ratios={"bandwidth": 0.2}),
            [],
            id="a fifth is not yet too much",
        ),
        pytest.param(
            replace(GPU, exposed_ratio=0.55, cause_ratios=SLOW_LINK, coverage=0.98),
            [],
            id="communication that was not recorded whole is no evidence",
        ),
        pytest.param(
            replace(GPU, exposed_ratio=0.55, cause_ratios=SLOW_LINK, coverage=None),
            [],
            id="nor communication of unknown exposure",
        ),
        pytest.param(
            replace(GPU, exposed_ratio=None), [], id="waiting that is not known is not none"
        ),
        pytest.param(
            replace(BUSY, exposed_ratio=0.4, cause_ratios={"bandwidth": 0.4}),
            ["comm_bandwidth"],
            id="a CPU that waits for the link is not idle besides",
        ),
        pytest.param(
            replace(BUSY, exposed_ratio=None), [], id="unknown without exposed communication"
        ),
        pytest.param(
            replace(GPU, device_utilization=0.4),
            ["device_idle", "host_bound"],
            id="a GPU that waits for neither link nor data waits for the host",
        ),
        pytest.param(
            replace(GPU, device_utilization=0.3, phase_ratios=phases(data=0.65)),
            ["device_idle", "data_bound"],
            id="one that waits for data does not",
        ),
        pytest.param(
            replace(GPU, device_utilization=0.99, phase_ratios=phases(data=0.15, other=0.7)),
            [],
            id="a busy GPU waits for neither, whatever the host does",
        ),
        pytest.param(
            replace(GPU, device_utilization=0.8, phase_ratios=phases(data=0.15)),
            ["data_bound"],
            id="a GPU waits for data if it is idle for as long",
        ),
        pytest.param(
            replace(GPU, device_utilization=0.4, coverage=0.5),
            ["device_idle"],
            id="where communication is not known, the host is not blamed",
        ),
        pytest.param(
            replace(GPU, device_utilization=0.4, coverage=None, exposed_ratio=None, world_size=1),
            ["device_idle", "host_bound"],
            id="a lone rank has no communication",
        ),
        pytest.param(
            replace(BUSY, phase_ratios=phases(other=0.2, backward=0.4)),
            ["host_bound"],
            id="on a CPU what is outside all phases is the host's",
        ),
        pytest.param(
            replace(BUSY, phase_ratios=phases(data=0.11)), ["data_bound"], id="data to wait for"
        ),
        pytest.param(
            replace(BUSY, oom_risk=0.6, phase_ratios=phases(data=0.9)),
            ["memory_pressure", "data_bound"],
            id="what may end the run comes first",
        ),
        pytest.param(replace(GPU, oom_risk=0.5), [], id="as likely as not is not more likely"),
        pytest.param(
            replace(GPU, headroom_ratio=0.07), ["memory_pressure"], id="little memory is left"
        ),
        pytest.param(
            replace(GPU, oom_risk=None, headroom_ratio=-0.1),
            ["memory_pressure"],
            id="less than none is left",
        ),
        pytest.param(
            replace(
                GPU,
                device_utilization=0.75,
                device_headroom_ratio=0.6,
                phase_ratios=phases(data=0.2),
            ),
            ["data_bound", "memory_idle"],
            id="memory to spare comes last",
        ),
        pytest.param(
            replace(GPU, headroom_ratio=0.05, device_headroom_ratio=0.6),
            ["memory_pressure"],
            id="where another device is short, none is to spare",
        ),
        pytest.param(replace(GPU, straggler_score=0.05), ["straggler"], id="this rank is slow"),
        pytest.param(
            replace(GPU, cause_ratios={"imbalance": 0.12}, exposed_ratio=0.15),
            ["straggler"],
            id="another rank is, as long as it is waited for",
        ),
    ],
)
def test_a_reading_has_its_symptoms(reading, symptoms):
    assert names(reading) == symptoms


def test_every_symptom_is_in_the_catalog_and_has_evidence():
    bad = replace(
        GPU,
        exposed_ratio=0.6,
        cause_ratios={**SLOW_LINK, "imbalance": 0.06},
        oom_risk=0.9,
        straggler_score=0.2,
        device_utilization=0.1,
        phase_ratios=phases(data=0.3, other=0.2),
    )

    symptoms = diagnose(bad)

    assert {each.name for each in symptoms} <= set(SYMPTOMS)
    assert all(each.evidence for each in symptoms)
    assert symptoms[0].evidence == {"oom_risk_ratio": 0.9, "headroom_ratio": 0.3}


def test_thresholds_are_parameters():
    waits = replace(GPU, exposed_ratio=0.1, cause_ratios={"latency": 0.1}, device_utilization=0.6)

    assert names(
        waits, Thresholds(max_exposed_comm_ratio=0.05, min_device_utilization_ratio=0.5)
    ) == ["comm_latency"]


@pytest.mark.parametrize(
    ("bandwidth", "tokens", "context"),
    [
        (None, None, "link 2^? B/s, samples of 2^? tokens, 2 ranks"),
        (25e6, 128.0, "link 2^25 B/s, samples of 2^7 tokens, 2 ranks"),
        (26e6, 120.0, "link 2^25 B/s, samples of 2^7 tokens, 2 ranks"),
        (250e6, 512.0, "link 2^28 B/s, samples of 2^9 tokens, 2 ranks"),
    ],
)
def test_a_context_has_a_coarse_name(bandwidth, tokens, context):
    reading = replace(BUSY, link_bandwidth=bandwidth, tokens_per_sample=tokens)

    assert context_of(reading) == context


@pytest.mark.parametrize(
    ("bandwidth", "octave"),
    [(50e6, "26"), (42e6, "26"), (38e6, "25"), (110e6, "26"), (120e6, "27")],
)
def test_a_context_keeps_its_name_until_its_figures_are_well_away(bandwidth, octave):
    at_26 = replace(BUSY, link_bandwidth=2.0**26)

    context = context_of(replace(BUSY, link_bandwidth=bandwidth), near=at_26)

    assert context.startswith(f"link 2^{octave} B/s")


class Rank:
    """A rank whose watch updates metrics during training."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.set_info(
            training.RUN_INFO, "run", "1", "2.13", "0.19", "gloo", "cpu", "2", "2"
        )
        self.unix_seconds = 1000.0
        self.goes_on()

    def goes_on(self) -> None:
        """Update the watch's timestamp."""
        self.unix_seconds += 20
        self.recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, self.unix_seconds)

    def trains(self, steps: int = 10, **phases: float) -> Rank:
        """Add steps of so many seconds by phase."""
        self.recorder.add(training.STEPS, steps)
        self.recorder.add(training.SAMPLES, 8 * steps)
        self.recorder.add(training.TOKENS, 8 * 64 * steps)
        for phase, seconds in phases.items():
            self.recorder.add(training.PHASE_SECONDS, seconds, phase)
        return self

    def votes(self, *, transfer: float, wait: float) -> None:
        """Add votes within backward: their own transfer, and the wait for another rank."""
        exposed = transfer + wait
        self.recorder.add(communication.COMM_SECONDS, exposed, OWN_GROUP)
        self.recorder.add(communication.COMM_UNION_SECONDS, exposed)
        self.recorder.add(communication.COMM_EXPOSED_SECONDS, exposed, OWN_GROUP)
        self.recorder.add(communication.COMM_OWN_EXPOSED_SECONDS, exposed, "backward")
        self.recorder.add(communication.COMM_TRANSFER_SECONDS, transfer, OWN_GROUP)
        self.recorder.add(communication.COMM_WAIT_SECONDS, wait, OWN_GROUP)
        self.recorder.add(communication.COMM_CAUSE_SECONDS, transfer, "latency")
        self.recorder.add(communication.COMM_CAUSE_SECONDS, wait, "imbalance")

    def waits(self, seconds: float, cause: str, under_way: float | None = None) -> None:
        """Add a wait for collectives."""
        self.communicates(under_way or seconds)
        self.recorder.add(communication.COMM_EXPOSED_SECONDS, seconds, "dp")
        self.recorder.add(communication.COMM_CAUSE_SECONDS, seconds, cause)

    def communicates(self, seconds: float) -> None:
        """Add collectives of one group."""
        self.recorder.add(communication.COMM_SECONDS, seconds, "dp")
        self.recorder.add(communication.COMM_UNION_SECONDS, seconds)

    def snapshot(self) -> Snapshot:
        return self.recorder.snapshot()


@pytest.fixture
def rank() -> Rank:
    return Rank().trains(forward=5.0, backward=5.0)


def test_ratios_are_those_of_the_interval(rank):
    rank.waits(9.0, "latency")
    before = rank.snapshot()

    rank.trains(data=1.0, forward=3.0, backward=6.0).waits(4.0, "bandwidth", under_way=5.0)
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert reading.seconds == pytest.approx(10)
    assert reading.steps == 10
    assert reading.phase_ratios == pytest.approx({"data": 0.1, "forward": 0.3, "backward": 0.6})
    assert (reading.exposed_ratio, reading.comm_ratio) == pytest.approx((0.4, 0.5))
    assert reading.cause_ratios == pytest.approx({"bandwidth": 0.4, "latency": 0.0})
    assert (reading.tokens_per_sample, reading.world_size) == (64, 2)


def test_the_transfer_of_votes_is_no_latency_that_a_knob_reduces(rank):
    rank.waits(1.0, "latency")
    before = rank.snapshot()

    rank.trains(forward=2.0, backward=8.0).waits(1.0, "latency")
    rank.votes(transfer=3.0, wait=0.5)
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert reading.exposed_ratio == pytest.approx(0.15)
    assert reading.own_transfer_ratio == pytest.approx(0.3)
    assert reading.comm_ratio == pytest.approx(0.1)
    assert reading.cause_ratios == pytest.approx({"latency": 0.1, "imbalance": 0.05})
    assert reading.own_exposed_ratios == pytest.approx({"backward": 0.35})


def test_time_without_training_does_not_reduce_ratios(rank):
    before = rank.snapshot()

    rank.trains(data=1.0, backward=9.0, eval=50.0, checkpoint=40.0)
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert reading.seconds == pytest.approx(10)
    assert reading.phase_ratios == pytest.approx({"forward": 0, "data": 0.1, "backward": 0.9})


def test_generation_and_its_waits_are_left_out(rank):
    rank.waits(1.0, "latency")
    before = rank.snapshot()

    rank.trains(forward=4.0, backward=6.0, generate=80.0).waits(62.0, "latency", under_way=63.0)
    rank.recorder.add(generation.GENERATE_COMM_EXPOSED_SECONDS, 60.0)
    rank.recorder.add(communication.COLLECTIVE_CALLS, 30, "all_reduce", "dp", "backward")
    rank.recorder.add(communication.COLLECTIVE_CALLS, 900, "all_gather", "dp", "generate")
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert reading.seconds == pytest.approx(10)
    assert reading.phase_ratios == pytest.approx({"forward": 0.4, "backward": 0.6})
    assert (reading.exposed_ratio, reading.comm_ratio) == pytest.approx((0.2, 0.3))
    assert reading.cause_ratios == pytest.approx({"latency": 0.2})
    assert reading.step_calls == 3


def test_a_missing_metric_is_none(rank):
    before = rank.snapshot()

    rank.trains(backward=1.0)
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert (reading.exposed_ratio, reading.coverage, reading.oom_risk) == (None, None, None)
    assert (reading.headroom_ratio, reading.straggler_score) == (None, None)
    assert (reading.on_cpu, reading.link_bandwidth, dict(reading.cause_ratios)) == (None, None, {})


def test_metrics_that_are_not_updated_are_stale(rank):
    rank.waits(9.0, "bandwidth")
    before = rank.snapshot()

    rank.trains(forward=1.0, backward=9.0)

    assert metrics_between(before, rank.snapshot()) == MetricsDelta(stale=True)


def test_waiting_without_a_cross_rank_comparison_is_unknown(rank):
    rank.waits(9.0, "bandwidth")
    before = rank.snapshot()

    rank.trains(backward=10.0).communicates(5.0)
    rank.recorder.add(communication.COMM_SECONDS, 4.0, "tp")  # meanwhile
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert (reading.exposed_ratio, reading.comm_ratio) == (None, pytest.approx(0.5))
    assert dict(reading.cause_ratios) == {}


def test_a_counter_that_was_reset_is_none(rank):
    rank.waits(9.0, "bandwidth")
    before = rank.snapshot()

    again = Rank().trains(forward=6.0, backward=6.0)
    again.waits(1.0, "bandwidth")
    again.unix_seconds += 100
    again.goes_on()

    assert metrics_between(before, again.snapshot()).exposed_ratio is None


def test_coverage_is_the_lower_value_of_both_ends(rank):
    rank.recorder.set(communication.COMM_COVERAGE_RATIO, 0.9)
    before = rank.snapshot()

    rank.recorder.set(communication.COMM_COVERAGE_RATIO, 1.0)
    rank.goes_on()

    assert metrics_between(before, rank.snapshot()).coverage == 0.9


def test_a_rank_with_a_gpu_is_measured_by_it(rank):
    put = rank.recorder
    for device, busy, free in (("cpu", 0.1, 5), ("cuda:0", 0.8, 60)):
        put.set(devices.DEVICE_UTILIZATION, busy, device)
        put.add(devices.DEVICE_SECONDS, 1000.0, device, "idle")
        put.set(memory.MEMORY_HEADROOM, free, device)
        put.set(memory.MEMORY_LIMIT, 100, device)
        put.set(memory.OOM_RISK, busy, device)
    before = rank.snapshot()

    put.set(devices.DEVICE_UTILIZATION, 0.0, "cuda:0")  # at this moment
    put.add(devices.DEVICE_SECONDS, 18.0, "cuda:0", "busy")
    put.add(devices.DEVICE_SECONDS, 2.0, "cuda:0", "idle")
    put.add(devices.DEVICE_SECONDS, 20.0, "cpu", "idle")
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert (reading.on_cpu, reading.device_utilization) == (False, pytest.approx(0.9))
    assert (reading.headroom_ratio, reading.device_headroom_ratio) == (0.05, 0.6)
    assert reading.oom_risk == 0.8


def test_the_link_figures_are_those_of_the_group_that_sends_most(rank):
    put = rank.recorder
    for group, sent, bandwidth in (("world", 10, 1e9), ("dp", 500, 25e6)):
        put.add(communication.COLLECTIVE_WIRE_BYTES, sent, "all_reduce", group)
        put.add(communication.COLLECTIVE_CALLS, 20, "all_reduce", group, "backward")
        put.set(communication.COMM_LINK_BANDWIDTH, bandwidth, group)
    before = Rank().snapshot()

    rank.trains(backward=1.0)
    rank.goes_on()
    reading = metrics_between(before, rank.snapshot())

    assert reading.link_bandwidth == 25e6
    assert (reading.step_wire_bytes, reading.step_calls) == pytest.approx((25.5, 2))


def test_the_straggler_score_is_that_of_the_slowest_phase(rank):
    for phase, score in (("data", 0.3), ("forward", -0.2)):
        rank.recorder.set(communication.STRAGGLER_SCORE, score, phase)
    before = rank.snapshot()
    rank.goes_on()

    assert metrics_between(before, rank.snapshot()).straggler_score == 0.3
