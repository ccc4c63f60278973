"""A meter that several ask loses no peak, and holds a budget against what the device grants."""

from __future__ import annotations

from collections.abc import Mapping

from zerowatch.runtime.memory.memory_reader import MemoryReader


class Probe:
    """Answers with what it is given; its peak is that since it was last read."""

    def __init__(self, **states: float) -> None:
        self.states = states

    def __call__(self) -> Mapping[str, float]:
        return dict(self.states)


def test_a_peak_read_in_between_is_not_lost() -> None:
    probe = Probe(allocated=100.0, peak_allocated=900.0)
    meter = MemoryReader({"cpu": probe}, {})
    meter.read()
    probe.states["peak_allocated"] = 200.0

    first, second = meter.take(), meter.take()

    assert first["cpu"]["peak_allocated"] == 900.0
    assert second["cpu"]["peak_allocated"] == 200.0


def test_phases_have_peaks_of_their_own_and_the_step_has_the_highest() -> None:
    probe = Probe(allocated=100.0)
    meter = MemoryReader({"cpu": probe}, {})
    phases = []
    for peak in (300.0, 900.0, 200.0):
        probe.states["peak_allocated"] = peak
        phases.append(meter.sample_phase()["cpu"]["peak_allocated"])

    step = meter.take()["cpu"]["peak_allocated"]

    assert phases == [300.0, 900.0, 200.0]
    assert step == 900.0


def test_a_budget_lowers_the_limit_and_never_raises_it() -> None:
    probe = Probe(allocated=1.0, limit=1000.0)

    limits = [
        MemoryReader({"cpu": probe}, {"cpu": budget}).take()["cpu"]["limit"]
        for budget in (600.0, 5000.0)
    ]

    assert limits == [600.0, 1000.0]


def test_a_budget_stands_in_where_no_limit_is_known() -> None:
    meter = MemoryReader({"cpu": Probe(allocated=1.0)}, {"cpu": 600.0})

    assert meter.take()["cpu"]["limit"] == 600.0


def test_a_probe_that_failed_is_left_out() -> None:
    meter = MemoryReader({"cpu": Probe(allocated=1.0), "cuda:0": lambda: None}, {})

    assert set(meter.take()) == {"cpu"}


def test_the_age_is_that_of_the_last_reading() -> None:
    meter = MemoryReader({"cpu": Probe(allocated=1.0)}, {})

    before, _ = meter.age_seconds, meter.read()

    assert before == float("inf")
    assert meter.age_seconds < 60
