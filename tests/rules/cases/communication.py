"""Test cases of the alerts on communication."""

from __future__ import annotations

from rules.history import SCRAPE, counter, gauge, of_both, of_rank, training, training_rank
from rules.promtool import Case, annotations_of

LABELS = {"component": "communication", "job": "zerowatch", "run": "night-7"}
BOTTLENECK = {"alertname": "ZerowatchCommBottleneck", "severity": "warning", **LABELS}
LINK = {
    "alertname": "ZerowatchLinkSlow",
    "severity": "warning",
    "group": "dp",
    "node": "node-0",
    **LABELS,
}
STRAGGLER = {
    "alertname": "ZerowatchStragglerRank",
    "severity": "warning",
    "rank": "1",
    "node": "node-1",
    **LABELS,
}
ROSE = {"alertname": "ZerowatchCommRatioRose", "severity": "warning", **LABELS}
MISMATCH = {"alertname": "ZerowatchCollectiveMismatch", "severity": "critical", **LABELS}
BANDWIDTH = "zerowatch_comm_link_bandwidth_bytes_per_second"
WAIT = "zerowatch_comm_wait_seconds_total"
WORLD_SIZE = "zerowatch_world_size"
RECORDED = "zerowatch_comm_coverage_ratio"
SCORE = "zerowatch_straggler_score_ratio"
STEPS = "zerowatch_steps_total"
# A step takes 45 s.
SLOW_STEPS = of_both(STEPS, gauge(*((0.75, number) for number in range(107))))
COVERAGE = {"alertname": "ZerowatchCommCoverageLow", "severity": "info", **LABELS}


def exposed(*stretches: tuple[float, float]) -> dict[str, str]:
    minutes = sum(stretch[0] for stretch in stretches)
    ratio = counter(*stretches)
    return training(minutes) | of_both("zerowatch_comm_exposed_seconds_total", ratio, group="dp")


def link(*stretches: tuple[float, float]) -> dict[str, str]:
    """Two ranks of one host, whose link has this bandwidth."""
    minutes = sum(stretch[0] for stretch in stretches)
    bandwidth, alone = gauge(*stretches), {"node": "node-0"}
    series = training(minutes)
    for rank in (0, 1):
        series |= of_rank(rank, BANDWIDTH, bandwidth, group="dp", **alone)
    return series


def waiting(*shares: float, even: float = 0, coverage: float = 1) -> dict[str, str]:
    """Ranks that wait for others for these shares of 8 minutes, and equally long thereafter.

    Args:
        shares: The shares of the time, by rank.
        even: Minutes in which all ranks wait for 12 % of the time.
        coverage: The share of the collectives that is recorded.
    """
    series: dict[str, str] = {}
    for rank, share in enumerate(shares):
        series |= training_rank(rank, (8 + even, 1))
        series |= of_rank(rank, WAIT, counter((8, share), (even, 0.12)), group="dp")
        series |= of_rank(rank, WORLD_SIZE, gauge((8 + even, len(shares))))
        series |= of_rank(rank, RECORDED, gauge((8 + even, coverage)))
    return series


def slow_backward(*stretches: tuple[float, float]) -> dict[str, str]:
    minutes = sum(stretch[0] for stretch in stretches)
    return (
        training(minutes)
        | of_rank(0, SCORE, gauge((minutes, 0)), phase="backward")
        | of_rank(1, SCORE, gauge(*stretches), phase="backward")
    )


CASES = (
    Case(
        title="Fires if communication is exposed for 25 % of the time from the start on",
        series=exposed((10, 0.25), (20, 0.05)),
        alert=BOTTLENECK,
        fires_at="2m15s",
        recovers_at="16m15s",
        annotations=annotations_of(
            "ZerowatchCommBottleneck",
            dashboard="zerowatch-communication",
            summary="Training night-7 waits for communication",
            description="Training spends 25% of its time only waiting for collectives; up to 20% "
            "is usual. Look up the largest cause on the dashboard: imbalance, latency, redundancy "
            "or bandwidth. The runbook lists what to do about each.",
        ),
    ),
    Case(
        # At 27 % the mean of half an hour would be 20 % at the instant of an evaluation.
        title="Fires if exposed communication rises from 19 to 28 %",
        series=exposed((30, 0.19), (15, 0.28), (10, 0.05)),
        alert=BOTTLENECK,
        fires_at="35m30s",
        recovers_at="51m45s",
    ),
    Case(
        title="Does not fire at 20 % exposed communication",
        near="ZerowatchCommBottleneck",
        series=exposed((15, 0.2)),
        until="15m",
    ),
    Case(
        title="Does not fire on five minutes of exposed communication in half an hour",
        near="ZerowatchCommBottleneck",
        series=exposed((25, 0.05), (5, 0.6), (10, 0.05)),
        until="40m",
    ),
    Case(
        title="Does not fire in the first nine steps",
        near="ZerowatchCommBottleneck",
        series=exposed((20, 0.5)) | of_both("zerowatch_steps_total", counter((20, 9 / 20 / 60))),
        until="20m",
    ),
    Case(
        title="Fires if a link has 10 % of its usual bandwidth",
        series=link((5, 1e9), (10, 1e8), (15, 9.5e8)),
        alert=LINK,
        fires_at="10m",
        recovers_at="22m30s",
        annotations=annotations_of(
            "ZerowatchLinkSlow",
            dashboard="zerowatch-communication",
            summary="A link of training night-7 has become slow, seen from node-0 in group dp",
            description="The bandwidth that ranks on node-0 measure is 10% of the usual one of the "
            "last six hours. If all hosts of a run report this, the slowest link may be at any of "
            "them. Check the network of these hosts for errors and other traffic.",
        ),
        words_at="12m",  # when the mean covers only the slow stretch
    ),
    Case(
        title="Does not fire if a link has 60 % of its usual bandwidth",
        near="ZerowatchLinkSlow",
        series=link((5, 1e9), (15, 6e8)),
        until="20m",
    ),
    Case(
        title="Does not fire if one of two ranks estimates a low bandwidth",
        near="ZerowatchLinkSlow",
        series=link((5, 1e9), (15, 1e9))
        | of_rank(1, BANDWIDTH, gauge((5, 1e9), (15, 1e8)), group="dp", node="node-0"),
        until="20m",
    ),
    Case(
        title="Does not fire after a single estimate that was far too high",
        near="ZerowatchLinkSlow",
        series=link((9, 1e9), (0.25, 5e9), (15, 1e9)),
        until="24m",
    ),
    Case(
        title="Fires if exposed communication rises from 6 to 15 %",
        series=exposed((40, 0.06), (20, 0.15), (15, 0.06)),
        alert=ROSE,
        fires_at="51m45s",
        recovers_at="68m15s",
        annotations=annotations_of(
            "ZerowatchCommRatioRose",
            dashboard="zerowatch-communication",
            summary="Training night-7 waits longer for communication than it did",
            description="The share of training time that is only spent waiting for collectives is "
            "2.5 times the median of the run's own last six hours; up to 1.5 is usual. Something "
            "changed since: a link, a rank, the data or a setting. The dashboard shows which cause "
            "grew.",
        ),
        words_at="56m",
    ),
    Case(
        title="Does not fire if exposed communication rises from 1 to 4 %",
        near="ZerowatchCommRatioRose",
        series=exposed((40, 0.01), (20, 0.04)),
        until="60m",
    ),
    Case(
        title="Fires if a rank stays 6 % of a step behind",
        series=slow_backward((5, 0), (10, 0.06), (10, 0.03)),
        alert={**STRAGGLER, "phase": "backward"},
        fires_at="11m",
        recovers_at="21m30s",
        annotations=annotations_of(
            "ZerowatchStragglerRank",
            dashboard="zerowatch-communication",
            summary="Rank 1 of training night-7 is slow on node-1",
            description="During 75% of the last five minutes, or of thirty if steps are slow, this "
            "rank was slower than the median rank by at least 6% of a step, in backward, and all "
            "other ranks wait for it. Check node-1 first for other processes, throttled clocks and "
            "a slow disk.",
        ),
    ),
    Case(
        title="Does not fire during an evaluation on the last comparison before",
        near="ZerowatchStragglerRank",
        series=slow_backward((30 - SCRAPE, 0), (20, 0.07))
        | of_both(STEPS, counter((30, 2), (20, 0))),
        until="50m",
    ),
    Case(
        title="Does not fire as training goes on after a long evaluation",
        near="ZerowatchStragglerRank",
        series=slow_backward((30 - SCRAPE, 0), (40 + 2 * SCRAPE, 0.07), (10, 0))
        | of_both(STEPS, counter((30, 0.25), (40, 0), (10, 0.25))),
        until="80m",
    ),
    Case(
        title="Fires if a rank stays 6 % of a step behind in steps of 45 s",
        series=slow_backward((20, 0), (30, 0.06), (25, 0)) | SLOW_STEPS,
        alert={**STRAGGLER, "phase": "backward"},
        fires_at="44m45s",
        recovers_at="62m45s",
    ),
    Case(
        title="Does not fire on a single comparison of eight steps of 45 s",
        near="ZerowatchStragglerRank",
        series=slow_backward((30, 0), (6, 0.07), (24, 0)) | SLOW_STEPS,
        until="60m",
    ),
    Case(
        title="Fires on the rank that waits least where phases are not compared",
        series=waiting(0.12, 0.02, 0.14, 0.12, even=10),
        alert=STRAGGLER,
        fires_at="2m15s",
        recovers_at="16m45s",
        annotations=annotations_of(
            "ZerowatchStragglerRank",
            dashboard="zerowatch-communication",
            summary="Rank 1 of training night-7 is slow on node-1",
            description="During 75% of the last five minutes, or of thirty if steps are slow, this "
            "rank was slower than the median rank by at least 10% of a step, and all other ranks "
            "wait for it. Check node-1 first for other processes, throttled clocks and a slow "
            "disk.",
        ),
        words_at="7m",
    ),
    Case(
        title="Fires on the one of two ranks that waits less",
        series=waiting(0.12, 0.02, even=10),
        alert=STRAGGLER,
        fires_at="2m15s",
        recovers_at="16m45s",
    ),
    Case(
        title="Does not fire on waits if most collectives are not recorded, such as those of DDP",
        near="ZerowatchStragglerRank",
        series=waiting(0.12, 0.02, 0.14, 0.12, coverage=0.1),
        until="4m30s",
    ),
    Case(
        title="Does not fire if one of four ranks waits most",
        near="ZerowatchStragglerRank",
        series=waiting(0.02, 0.4, 0.02, 0.02),
        until="8m",
    ),
    Case(
        title="Does not fire on waits where phases are compared",
        near="ZerowatchStragglerRank",
        series=waiting(0.12, 0.02) | of_both(SCORE, gauge((8, 0.01)), phase="backward"),
        until="8m",
    ),
    Case(
        title="Does not fire if two ranks are slow by turns",
        near="ZerowatchStragglerRank",
        series=slow_backward(*((1, 0.3), (1, 0)) * 8)
        | of_rank(0, SCORE, gauge(*((1, 0), (1, 0.3)) * 8), phase="backward"),
        until="16m",
    ),
    Case(
        title="Does not fire if a rank is 4 % of a step behind",
        near="ZerowatchStragglerRank",
        series=slow_backward((15, 0.04)),
        until="15m",
    ),
    Case(
        title="Fires on one collective mismatch until the run ends",
        series=training(25)
        | of_rank(0, "zerowatch_collective_mismatches_total", gauge((5, 0), (20, 1)))
        | of_both("zerowatch_run_active", gauge((15, 1), (10, 0))),
        alert=MISMATCH,
        fires_at="5m15s",
        recovers_at="20m15s",
    ),
    Case(
        title="Fires if 2 % of the collectives are not recorded",
        series=training(40) | of_both(RECORDED, gauge((5, 1), (15, 0.978), (20, 0.9995))),
        alert=COVERAGE,
        fires_at="12m30s",
        recovers_at="38m",
    ),
    Case(
        title="Does not fire on one lapse of coverage",
        near="ZerowatchCommCoverageLow",
        series=training(15) | of_both(RECORDED, gauge((5, 1), (0.5, 0.95), (9.5, 1))),
        until="15m",
    ),
    Case(
        title="Does not fire on a single rank",
        near="ZerowatchCommCoverageLow",
        series=training_rank(0, (15, 1)) | of_rank(0, WORLD_SIZE, gauge((15, 1))),
        until="15m",
    ),
)
