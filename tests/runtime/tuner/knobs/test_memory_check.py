"""Boundaries of the checks of memory before a change."""

from __future__ import annotations

import pytest

from zerowatch.runtime.trainer.oom_recovery.micro_batch_planner import (
    UNBOUND,
    MemoryMeasurements,
    PeakSample,
)
from zerowatch.runtime.tuner.knobs.memory_check import (
    exceeds_fit,
    exceeds_free,
    exceeds_host,
    peaks_of,
)

GROWING = ((2, 400.0), (4, 600.0))  # 200 bytes, and 100 a sample


def measured(
    *peaks: tuple[int, float], limit: float = 1000.0, length: int = 6
) -> MemoryMeasurements:
    samples = [PeakSample(samples=num, length=length, peak_bytes=used) for num, used in peaks]
    return MemoryMeasurements(peaks=samples, limit_bytes=limit)


@pytest.mark.parametrize(
    ("extra_bytes", "peak", "reason"),
    # 920 of 1,000 bytes may be used.
    [
        (220, 700.0, None),
        (221, 700.0, "221 B more needed, 220 B free"),
        (1, 950.0, "1 B more needed, 0 B free"),
        (0, 950.0, None),
    ],
)
def test_a_change_may_use_what_the_highest_peak_leaves_of_92_percent(
    extra_bytes: int, peak: float, reason: str | None
) -> None:
    known = measured((2, peak), (2, 300.0))

    assert exceeds_free(known, extra_bytes=extra_bytes, length=6) == reason


def test_only_peaks_of_one_configuration_and_of_no_larger_micro_batches_are_kept() -> None:
    peaks = [
        PeakSample(samples=samples, length=6, peak_bytes=peak, configuration=configuration)
        for samples, peak, configuration in [(2, 600.0, 0), (4, 650.0, 0), (2, 690.0, 1)]
    ]
    known = MemoryMeasurements(peaks=peaks, limit_bytes=800.0)

    assert peaks_of(known, 0, samples=2).peaks == peaks[:1]
    assert peaks_of(known, 0).peaks == peaks[:2]
    assert peaks_of(known, 1).peaks == peaks[2:]


@pytest.mark.parametrize(("num_later", "is_refused"), [(19, True), (20, False)])
def test_only_the_last_20_peaks_count(num_later: int, is_refused: bool) -> None:
    known = measured((2, 900.0), *[(2, 300.0)] * num_later)

    assert (exceeds_free(known, extra_bytes=100, length=6) is not None) is is_refused


@pytest.mark.parametrize(
    ("length", "is_known"), [(4, False), (5, True), (8, True), (9, False), (300, False)]
)
def test_lengths_up_to_the_same_power_of_two_share_their_peaks(length: int, is_known: bool) -> None:
    known = measured((2, 900.0), length=6)

    assert (exceeds_free(known, extra_bytes=100, length=length) is not None) is is_known


@pytest.mark.parametrize(
    ("samples", "extra_bytes", "reason"),
    [
        (7, 0, None),
        (8, 0, "micro-batches of 8 are likely to run out of memory, 7 fit"),
        (5, 210, None),
        (6, 210, "micro-batches of 6 are likely to run out of memory, 5 fit"),
    ],
)
def test_the_size_that_fits_is_where_the_line_of_peaks_meets_92_percent_of_memory(
    samples: int, extra_bytes: int, reason: str | None
) -> None:
    known = measured(*GROWING)

    assert (
        exceeds_fit(known, samples=samples, extra_bytes=extra_bytes, length=6, bound=UNBOUND)
        == reason
    )


def test_peaks_of_other_lengths_do_not_tell_what_fits() -> None:
    known = measured(*GROWING)

    assert exceeds_fit(known, samples=99, extra_bytes=0, length=60, bound=UNBOUND) is None


@pytest.mark.parametrize(("samples", "is_refused"), [(3, False), (4, True)])
def test_the_largest_size_that_did_not_run_out_of_memory_is_allowed(
    samples: int, is_refused: bool
) -> None:
    reason = exceeds_fit(measured(), samples=samples, extra_bytes=0, length=6, bound=3)

    assert (reason is not None) is is_refused


@pytest.mark.parametrize(
    ("risk", "reason"),
    [
        (0.49, None),
        (0.5, "the host itself may run out of memory, with probability 50%"),
        (0.875, "the host itself may run out of memory, with probability 88%"),
    ],
)
def test_state_moves_to_a_host_whose_memory_is_likely_to_suffice(
    risk: float, reason: str | None
) -> None:
    there = {"offload_param": True}

    assert exceeds_host({}, there, host_risk=risk) == reason
    assert exceeds_host({}, {"activation_checkpointing": True}, host_risk=risk) is None
