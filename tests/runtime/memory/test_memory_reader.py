"""A reader with several callers loses no peak, and applies budgets to limits."""

from __future__ import annotations

from collections.abc import Mapping

from zerowatch.runtime.memory.memory_reader import MemoryReader


class Probe:
    """Returns the states it was created with; its peak is that since the last reading."""

    def __init__(self, **states: float) -> None:
        self.states = states

    def __call__(self) -> Mapping[str, float]:
        return dict(self.states)


def test_a_peak_read_in_between_is_not_lost() -> None:
    probe = Probe(allocated=100.0, peak_allocated=900.0)
    reader = MemoryReader({"cpu": probe}, {})
    reader.read()
    probe.states["peak_allocated"] = 200.0

    first, second = reader.sample_step(), reader.sample_step()

    assert first["cpu"]["peak_allocated"] == 900.0
    assert second["cpu"]["peak_allocated"] == 200.0


def test_each_phase_has_its_own_peak_and_the_step_has_the_highest() -> None:
    probe = Probe(allocated=100.0)
    reader = MemoryReader({"cpu": probe}, {})
    phases = []
    for peak in (300.0, 900.0, 200.0):
        probe.states["peak_allocated"] = peak
        phases.append(reader.sample_phase()["cpu"]["peak_allocated"])

    step = reader.sample_step()["cpu"]["peak_allocated"]

    assert phases == [300.0, 900.0, 200.0]
    assert step == 900.0


def test_a_budget_lowers_the_limit_and_never_raises_it() -> None:
    probe = Probe(allocated=1.0, limit=1000.0)

    limits = [
        MemoryReader({"cpu": probe}, {"cpu": budget}).sample_step()["cpu"]["limit"]
        for budget in (600.0, 5000.0)
    ]

    assert limits == [600.0, 1000.0]


def test_a_budget_is_the_limit_if_no_other_is_known() -> None:
    reader = MemoryReader({"cpu": Probe(allocated=1.0)}, {"cpu": 600.0})

    assert reader.sample_step()["cpu"]["limit"] == 600.0


def test_a_failed_probe_is_left_out() -> None:
    reader = MemoryReader({"cpu": Probe(allocated=1.0), "cuda:0": lambda: None}, {})

    assert set(reader.sample_step()) == {"cpu"}


def test_the_age_is_that_of_the_last_reading() -> None:
    reader = MemoryReader({"cpu": Probe(allocated=1.0)}, {})

    before, _ = reader.age_seconds, reader.read()

    assert before == float("inf")
    assert reader.age_seconds < 60


def test_a_peak_that_cannot_be_reset_belongs_to_no_phase_and_to_no_generation() -> None:
    probe = Probe(allocated=100.0, peak_allocated=300.0)
    reader = MemoryReader({"cuda:0": probe}, {}, lambda device: False)
    reader.begin_generation()
    probe.states["peak_allocated"] = 900.0  # from now on, also after the generation
    reader.end_generation()

    phase = reader.sample_phase()
    step = reader.sample_step()

    assert reader.take_generation_peaks() == {}
    assert phase == {"cuda:0": {"allocated": 100.0}}
    assert step["cuda:0"]["peak_allocated"] == 900.0
