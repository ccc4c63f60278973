"""Scenarios of an independent review of the rules, with the outcome that an engineer would want.

Most raised nothing, or a false alarm, with the rules of that time. A scenario that was right even
then is a guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rules.history import Series

from zerowatch.dashboards.recording_rules import STEP_QUANTILE_MEDIAN


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A history, and the names of all alerts that fire at given times.

    Args:
        title: A sentence.
        series: Values in promtool's notation, by series.
        fires: The names of the alerts that fire, without the prefix "Zerowatch", by the time.
        records: Values of expressions by time, in addition.
        every: Seconds between two scrapes.
        guard: Whether the rules of the review's time gave the same outcome.
    """

    title: str
    series: Series
    fires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    records: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    every: float = 15.0
    guard: bool = False

    def test(self) -> dict[str, Any]:
        """Return the scenario in the format of promtool."""
        firing = 'count by (alertname) (ALERTS{alertstate="firing", run!=""})'
        looks = [
            {
                "expr": firing,
                "eval_time": moment,
                "exp_samples": [
                    {"labels": f'{{alertname="Zerowatch{name}"}}', "value": 1} for name in names
                ],
            }
            for moment, names in self.fires.items()
        ]
        looks += [
            {
                "expr": expression,
                "eval_time": moment,
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in values.items()
                ],
            }
            for (expression, moment), values in self.records.items()
        ]
        return {
            "name": self.title,
            "interval": f"{self.every:g}s",
            "input_series": [
                {"series": series, "values": values} for series, values in self.series.items()
            ],
            "promql_expr_test": looks,
        }


def of(metric: str, values: str, *, rank: int = 0, run: str = "r", **labels: str) -> Series:
    """Return a series of a rank, which has a host of its own unless `node` is given."""
    node = labels.get("node")
    known = {
        "job": "z",
        "run": run,
        "rank": str(rank),
        "instance": f"{node}:{9464 + rank}" if node else f"host-{rank}:9464",
        "node": f"host-{rank}",
        **labels,
    }
    matchers = ", ".join(f'{name}="{value}"' for name, value in known.items() if value)
    name = metric if metric == "up" else f"zerowatch_{metric}"
    return {f"{name}{{{matchers}}}": values}


def alive(scrapes: int, *, rank: int = 0, per_scrape: float = 15) -> Series:
    """Return the series of a rank that takes a step each second."""
    pace = f"0+{per_scrape:g}x{scrapes}"
    return (
        of("up", f"1x{scrapes}", rank=rank)
        | of("run_active", f"1x{scrapes}", rank=rank)
        | of("steps_total", pace, rank=rank)
        | of("last_activity_timestamp_seconds", pace, rank=rank)
        | of("watch_last_update_timestamp_seconds", pace, rank=rank)
    )


GONE_AFTER_5 = "1x20 stale"
# A step takes 200 s: 13 scrapes.
STEPS_OF_200_SECONDS = " ".join(f"{step}x13" for step in range(30))

SCENARIOS = (
    # end
    Scenario(
        title="A run ends in good order, and the last scrape of one rank is just missed",
        every=30,
        series=of("up", "1x21 0x60")
        | of("run_active", "1x20 0 stale")
        | of("up", "1x20 0x60", rank=1)
        | of("run_active", GONE_AFTER_5, rank=1),
        fires={"13m": (), "15m": (), "30m": ()},
    ),
    # ns
    Scenario(
        title="Runs of the same name in two namespaces have figures of their own",
        series={
            name: values
            for namespace, phases, exposed in (
                ("team-a", "0+15x60", "0+6x60"),
                ("team-b", "0+45x60", "0x60"),
            )
            for series in (
                of("steps_total", "0+15x60", run=f"{namespace}/train"),
                of("phase_seconds_total", phases, run=f"{namespace}/train", phase="backward"),
                of("comm_exposed_seconds_total", exposed, run=f"{namespace}/train", group="dp"),
            )
            for name, values in series.items()
        },
        records={
            ("run:zerowatch_comm_exposed_seconds:ratio_rate5m", "10m"): {
                'run:zerowatch_comm_exposed_seconds:ratio_rate5m{job="z", run="team-a/train"}': 0.4,
                'run:zerowatch_comm_exposed_seconds:ratio_rate5m{job="z", run="team-b/train"}': 0,
            }
        },
        guard=True,  # discovery makes the name of the run unique
    ),
    # q
    Scenario(
        title="Steps that all take 5.2 s have a median and a 99th percentile of 5.2 s",
        series=of("step_duration_quantile_seconds", "5.2x100", quantile="0.5")
        | of("step_duration_quantile_seconds", "5.2x100", quantile="0.99"),
        records={
            (STEP_QUANTILE_MEDIAN.name, "20m"): {
                f'{STEP_QUANTILE_MEDIAN.name}{{job="z", run="r", quantile="{quantile}"}}': 5.2
                for quantile in ("0.5", "0.99")
            }
        },
    ),
    # r
    Scenario(
        title="Half of the ranks never came up",
        series=alive(200) | of("world_size", "8x200") | of("up", "0x200", rank=5),
        fires={"4m": (), "45m": ("RanksMissing", "TargetNeverUp")},
    ),
    # t
    Scenario(
        title="A host dies for good, and with it the run",
        series=of("up", "1x20 0x1500", rank=1) | of("run_active", GONE_AFTER_5, rank=1),
        fires={
            "8m": ("RunDied",),
            "21m": ("RunDied",),
            "6h4m": ("RunDied",),  # six hours after its last scrape
            "6h6m": (),
        },
    ),
    Scenario(
        title="A target vanishes, as after the deletion of a pod",
        series=alive(240) | of("up", GONE_AFTER_5, rank=1) | of("run_active", GONE_AFTER_5, rank=1),
        fires={"8m": ("RankVanished",), "20m": ("RankVanished",), "50m": ("RankVanished",)},
    ),
    Scenario(
        title="A run hangs before its first step",
        series=of("up", "1x400")
        | of("run_active", "1x400")
        | of("last_activity_timestamp_seconds", "1000x400")
        | of("hangs_total", "0 1x400"),
        fires={"5m": (), "20m": ("NoFirstStep",), "40m": ("NoFirstStep",)},
    ),
    Scenario(
        title="Steps take 200 s, and 40 % of their time is exposed communication",
        series=of("run_active", "1x800")
        | of("steps_total", STEPS_OF_200_SECONDS)
        | of("last_activity_timestamp_seconds", "0+15x800")
        | of("watch_last_update_timestamp_seconds", "0+15x800")
        | of("comm_exposed_seconds_total", "0+6x800", group="dp")
        | of("phase_seconds_total", "0+15x800", phase="backward"),
        fires={"20m": (), "50m": ("CommBottleneck",)},
    ),
    Scenario(
        title="The first value of the counter of losses that are not finite is 20",
        series=of("run_active", "1x800") | of("nonfinite_losses_total", "_ _ 20x800"),
        fires={"5m": ("LossNotFinite",)},
    ),
    # v
    Scenario(
        title="A run of one rank is scraped each minute, and 30 % of its time is exposed",
        every=60,
        series=alive(60, per_scrape=60)
        | of("comm_exposed_seconds_total", "0+18x60", group="dp")
        | of("phase_seconds_total", "0+60x60", phase="backward"),
        fires={"30m": ("CommBottleneck",)},
        guard=True,
    ),
    Scenario(
        title="Eight ranks with an eighth of the limit each fill a host",
        series={
            name: values
            for rank in range(8)
            for series in (
                of("run_active", "1x200", rank=rank, node="n"),
                of("steps_total", "0+15x200", rank=rank, node="n"),
                of("memory_bytes", "99x200", rank=rank, node="n", device="cpu", state="allocated"),
                of("memory_limit_bytes", "800x200", rank=rank, node="n", device="cpu"),
                of("oom_risk_ratio", "0x200", rank=rank, node="n", device="cpu"),
            )
            for name, values in series.items()
        },
        fires={"30m": ("HostMemoryNodeFull",)},
    ),
    Scenario(
        title="Loss, gradient norm and MFU leave their range, and all updates are skipped",
        series=alive(260)
        | of("gradient_norm", "1x180 1e9x80")
        | of("loss", "2x180 12x80")
        | of("mfu_ratio", "0.5x180 0.1x80")
        | of("skipped_steps_total", "0x180 0+15x80"),
        fires={
            "40m": (),
            "60m": ("GradientNormExploding", "LossSpike", "MfuDropped", "UpdatesSkipped"),
        },
    ),
    # p
    Scenario(
        title="A whole run is dead for an hour",
        series=of("up", "1x20 0x240", rank=1) | of("run_active", GONE_AFTER_5, rank=1),
        fires={"60m": ("RunDied",)},
    ),
    Scenario(
        title="A run ends in good order, but half of its ranks could not export it",
        every=30,
        series=of("run_active", "1x20 0 stale") | of("run_active", GONE_AFTER_5, rank=1),
        fires={"20m": ()},
        guard=True,  # targets without `up` raised nothing at all
    ),
    Scenario(
        title="Two ranks fill a host",
        series={
            name: values
            for rank, allocated in ((0, 400), (1, 390))
            for series in (
                of("run_active", "1x40", rank=rank, node="n"),
                of(
                    "memory_bytes",
                    f"{allocated}x40",
                    rank=rank,
                    node="n",
                    device="cpu",
                    state="allocated",
                ),
                of("memory_limit_bytes", "800x40", rank=rank, node="n", device="cpu"),
            )
            for name, values in series.items()
        },
        fires={"9m": ("HostMemoryNodeFull",)},
    ),
    Scenario(
        title="A hang is known at once, and for as long as it lasts",
        series=alive(160, rank=3) | of("hang_active", "0x20 1x140", rank=3),
        fires={"4m45s": (), "5m45s": ("RankHung",), "35m": ("RankHung",)},
    ),
    # p2
    Scenario(
        title="A run is stuck before its first step, and has no counter of steps",
        series=of("run_active", "1x400"),
        fires={"30m": ("NoFirstStep",)},
    ),
    Scenario(
        title="One of two ranks is never reached",
        series=alive(400) | of("up", "0x400", rank=5),
        fires={"30m": ("TargetNeverUp",)},
    ),
)
