"""The dashboard Compare: two runs side by side, over their steps."""

from __future__ import annotations

from ...metrics.catalog.training import RUN_INFO
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.dashboard_json import RUN_A, RUN_B
from ..grafana.links import RUN_HEADING
from ..grafana.panels import (
    BYTES,
    COUNT,
    PLAIN,
    RATIO,
    SECONDS,
    Column,
    Curve,
    Query,
    Stat,
    Step,
    Table,
    XYChart,
)
from ..promql import by, select
from ..recording_rules import RecordingRule
from .queries import JOBS, last_goodput, latest, state_of
from .shared_panels import STATES, sized

COLORS = {"A": "blue", "B": "orange"}
MATCHERS = {name: (*JOBS, f'run="${variable}"') for name, variable in (("A", RUN_A), ("B", RUN_B))}
# Between backquotes, as the format regex escapes by single backslashes.
BOTH = (*JOBS, f"run=~`${{{RUN_A}:regex}}|${{{RUN_B}:regex}}`")
STEP = "step"
MEDIAN = 'quantile="0.5"'
FIRST = 'rank="0"'


def step_of(*matchers: str) -> str:
    """Return the last step of runs; of a run of an earlier version, how many steps it has taken."""
    # A process that resumes a run has taken none before it knows the last step.
    taken = f"{by('max', recorded.STEPS_DONE.select(*matchers))} > 0"
    return f"{by('max', recorded.LAST_STEP.select(*matchers))}\nor on (job, run) {taken}"


def over_steps(
    rule: RecordingRule, *matchers: str, title: str, description: str, unit: str
) -> XYChart:
    """Return a panel of a figure of both runs over their steps, counted over restarts."""
    return XYChart(
        title=title,
        description=description,
        curves=tuple(
            Curve(
                name=name,
                x=step_of(*of_it),
                y=by("max", rule.select(*of_it, *matchers)),
                color=COLORS[name],
            )
            for name, of_it in MATCHERS.items()
        ),
        x_title=STEP,
        unit=unit,
    )


def mean(rule: RecordingRule, *matchers: str) -> str:
    """Return the mean of a rule of both runs over the time range."""
    return by("max", f"avg_over_time({rule.select(*BOTH, *matchers)}[$__range])")


def change(rule: RecordingRule, *matchers: str) -> str:
    """Return by how much run B is above run A, as a share of run A, in the mean."""
    a, b = (
        f"scalar(max(avg_over_time({rule.select(*of_it, *matchers)}[$__range])))"
        for of_it in MATCHERS.values()
    )
    return f"vector({b} / {a} - 1)"


def changed(title: str, rule: RecordingRule, *matchers: str, more_is_better: bool) -> Stat:
    """Return a panel with the change of a figure from run A to run B."""
    good, bad = (Step("green"), Step("red"))
    steps = (
        (bad, Step("text", -0.02), Step("green", 0.02))
        if more_is_better
        else (good, Step("text", -0.02), Step("red", 0.02))
    )
    return Stat(
        title=title,
        description="Run B against run A: the change of the mean over the time range. Changes of "
        "less than 2% are within the usual noise.",
        queries=(Query(change(rule, *matchers), "B against A", shape="now"),),
        unit=RATIO,
        decimals=1,
        thresholds=steps,
        plain=True,
    )


DIFFERENCES = (
    *sized(
        6,
        4,
        changed("Step time", recorded.STEP_QUANTILE_MEDIAN, MEDIAN, more_is_better=False),
        changed("Samples per second", recorded.SAMPLES_RATE, more_is_better=True),
        changed("Exposed communication", recorded.EXPOSED_RATIO, more_is_better=False),
        changed("Model FLOPs utilization", recorded.MFU, more_is_better=True),
    ),
    Table(
        title="Figures of both runs",
        description="Means over the time range, and the last step and loss. Choose a time range "
        "that includes both runs.",
        labels={"run": RUN_HEADING},
        columns=(
            Column(title="State", expression=state_of(*BOTH), unit=PLAIN, named=STATES),
            Column(title="Ranks", expression=latest(recorded.WORLD_SIZE, *BOTH), unit=PLAIN),
            Column(
                title="Step",
                expression=f"{latest(recorded.LAST_STEP, *BOTH)}\n"
                f"or on (job, run) {latest(recorded.STEPS_DONE, *BOTH)}",
                unit=PLAIN,
            ),
            Column(title="Loss", expression=latest(recorded.LOSS, *BOTH), unit=PLAIN, decimals=3),
            Column(
                title="Step time",
                expression=mean(recorded.STEP_QUANTILE_MEDIAN, MEDIAN),
                unit=SECONDS,
            ),
            Column(title="Samples/s", expression=mean(recorded.SAMPLES_RATE), unit=COUNT),
            Column(title="MFU", expression=mean(recorded.MFU), unit=RATIO, decimals=1),
            Column(
                title="Exposed",
                expression=mean(recorded.EXPOSED_RATIO),
                unit=RATIO,
                decimals=1,
            ),
            Column(
                title="Sent over minimum",
                expression=mean(recorded.VOLUME_RATIO),
                unit=PLAIN,
                decimals=2,
            ),
            Column(title="Goodput", expression=last_goodput(*BOTH), unit=RATIO),
        ),
        width=24,
        height=5,
    ),
    Table(
        title="Settings of both runs",
        description="What the runs were started with. A difference here may explain the others.",
        labels={
            "run": RUN_HEADING,
            "zero_stage": "ZeRO stage",
            "backend": "Backend",
            "accelerator": "Device",
            "torch": "torch",
            "deepspeed": "DeepSpeed",
        },
        columns=(
            Column(
                title="",
                expression=by(
                    "max",
                    f"last_over_time({select(RUN_INFO, *BOTH, FIRST)}[$__range])",
                    *("zero_stage", "backend", "accelerator", "torch", "deepspeed"),
                ),
            ),
        ),
        width=24,
        height=5,
    ),
)

OVER_STEPS = sized(
    12,
    9,
    over_steps(
        recorded.LOSS,
        title="Loss over steps",
        description="Mean loss over ranks at each step. At the same step, the lower curve learns "
        "faster.",
        unit=PLAIN,
    ),
    over_steps(
        recorded.STEP_QUANTILE_MEDIAN,
        MEDIAN,
        title="Step time over steps",
        description="Median step time of the middle rank. Compare the runs at the same step, where "
        "they do the same work.",
        unit=SECONDS,
    ),
    over_steps(
        recorded.SAMPLES_RATE,
        title="Throughput over steps",
        description="Samples per second of all ranks together, as a mean over five minutes. They "
        "are not known if ranks share samples.",
        unit=COUNT,
    ),
    over_steps(
        recorded.EXPOSED_RATIO,
        title="Exposed communication over steps",
        description="Share of training time in which training only waits for communication.",
        unit=RATIO,
    ),
    over_steps(
        recorded.GRADIENT_NORM,
        title="Gradient norm over steps",
        description="Norm of the gradients before clipping, the largest of all ranks.",
        unit=PLAIN,
    ),
    over_steps(
        recorded.MEMORY_PEAK,
        recorded.ALLOCATED,
        title="Peak memory over steps",
        description="Highest peak of the last minute of all ranks and devices.",
        unit=BYTES,
    ),
)

DASHBOARD = Dashboard(
    name="compare",
    title="Compare",
    description="How do two runs differ, at the same step?",
    rows=(Row("Run A against run B", DIFFERENCES), Row("Over steps: A blue, B orange", OVER_STEPS)),
    span="24h",
    about="two runs",
    refresh="1m",
)
