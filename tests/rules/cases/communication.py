"""Test cases of the alerts on communication."""

from __future__ import annotations

from rules.history import counter, gauge, of_both, of_rank, training, training_rank
from rules.promtool import Case, annotations_of

LABELS = {"component": "communication", "job": "zerowatch", "run": "night-7"}
BOTTLENECK = {"alertname": "ZerowatchCommBottleneck", "severity": "warning", **LABELS}
LINK = {"alertname": "ZerowatchLinkSlow", "severity": "warning", "group": "dp", **LABELS}
STRAGGLER = {"alertname": "ZerowatchStragglerRank", "severity": "warning", "rank": "1", **LABELS}
MISMATCH = {"alertname": "ZerowatchCollectiveMismatch", "severity": "critical", **LABELS}
SCORE = "zerowatch_straggler_score_ratio"
COVERAGE = {"alertname": "ZerowatchCommCoverageLow", "severity": "info", **LABELS}


def exposed(*stretches: tuple[float, float]) -> dict[str, str]:
    minutes = sum(stretch[0] for stretch in stretches)
    ratio = counter(*stretches)
    return training(minutes) | of_both("zerowatch_comm_exposed_seconds_total", ratio, group="dp")


def link(*stretches: tuple[float, float]) -> dict[str, str]:
    """A link whose bandwidth changes; its best is 1 GB/s."""
    minutes = sum(stretch[0] for stretch in stretches)
    now, best = gauge(*stretches), gauge((minutes, 1e9))
    return (
        training(minutes)
        | of_both("zerowatch_comm_link_bandwidth_bytes_per_second", now, group="dp")
        | of_both("zerowatch_comm_link_best_bandwidth_bytes_per_second", best, group="dp")
    )


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
        title="Fires after about ten minutes if exposed communication rises to 50 %",
        series=exposed((30, 0.05), (15, 0.5), (10, 0.05)),
        alert=BOTTLENECK,
        fires_at="42m15s",
        recovers_at="53m30s",
    ),
    Case(
        title="Does not fire at 20 % exposed communication",
        series=exposed((15, 0.2)),
        until="15m",
    ),
    Case(
        title="Does not fire on five minutes of exposed communication in half an hour",
        series=exposed((25, 0.05), (5, 0.6), (10, 0.05)),
        until="40m",
    ),
    Case(
        title="Does not fire in the first nine steps",
        series=exposed((20, 0.5)) | of_both("zerowatch_steps_total", counter((20, 9 / 20 / 60))),
        until="20m",
    ),
    Case(
        title="Fires if a link has 10 % of its best bandwidth",
        series=link((5, 1e9), (10, 1e8), (15, 9.5e8)),
        alert=LINK,
        fires_at="10m",
        recovers_at="22m30s",
        annotations=annotations_of(
            "ZerowatchLinkSlow",
            dashboard="zerowatch-communication",
            summary="A link of training night-7 has become slow, in group dp",
            description="The link's bandwidth is 10% of the best that it sustained in this run. "
            "The dashboard shows which ranks measure it. Check the network of their hosts for "
            "errors and other traffic.",
        ),
        words_at="12m",  # when the mean covers only the slow stretch
    ),
    Case(
        title="Does not fire if a link has 60 % of its best bandwidth",
        series=link((5, 1e9), (15, 6e8)),
        until="20m",
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
            summary="Rank 1 of training night-7 is slow in backward",
            description="During 75% of the last five minutes this rank was slower than the median "
            "rank by at least 6% of a step, and all other ranks wait for it. Check its host first "
            "for other processes, throttled clocks and a slow disk.",
        ),
    ),
    Case(
        title="Does not fire if two ranks are slow by turns",
        series=slow_backward(*((1, 0.3), (1, 0)) * 8)
        | of_rank(0, SCORE, gauge(*((1, 0), (1, 0.3)) * 8), phase="backward"),
        until="16m",
    ),
    Case(
        title="Does not fire if a rank is 4 % of a step behind",
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
        series=training(40)
        | of_both("zerowatch_comm_coverage_ratio", gauge((5, 1), (15, 0.978), (20, 0.9995))),
        alert=COVERAGE,
        fires_at="12m30s",
        recovers_at="38m",
    ),
    Case(
        title="Does not fire on one lapse of coverage",
        series=training(15)
        | of_both("zerowatch_comm_coverage_ratio", gauge((5, 1), (0.5, 0.95), (9.5, 1))),
        until="15m",
    ),
    Case(
        title="Does not fire on a single rank",
        series=training_rank(0, (15, 1)),
        until="15m",
    ),
)
