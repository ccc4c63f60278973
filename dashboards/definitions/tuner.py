"""The dashboard Tuner: state, decisions, knobs and measured gains."""

from __future__ import annotations

from ...metrics.catalog import tuner
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import (
    BAD,
    COUNT,
    GOOD,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    Column,
    Named,
    Query,
    Stat,
    StateTimeline,
    Step,
    Table,
    Text,
    TimeSeries,
    below,
)
from ..promql import by
from .queries import of_first_rank, of_run
from .shared_panels import SAMPLES_SHARED, sized, step_seconds

NO_TUNER = "no tuner in this run"
OFF_AND_ON = (Named(0, "-", "transparent"), Named(1, "in this state", "blue"))
VERDICTS = {
    "accepted": "green",
    "rolled_back": "orange",
    "rejected": "text",
    "interrupted": "text",
    "not_undone": "red",
    "advised": "blue",
}

NOW = (
    Table(
        title="State now",
        description="The current state of the tuner. **observe** is the usual state. "
        "**safe_mode**: two changes failed, or one could not be undone. The tuner then starts no "
        "trials and changes settings only if memory is about to run out: see the alert "
        "ZerowatchTunerSafeMode.",
        labels={"state": "State"},
        columns=(
            Column(
                title="", expression=f"{by('max', of_first_rank(tuner.TUNER_STATE), 'state')} == 1"
            ),
        ),
        empty=NO_TUNER,
        width=6,
        height=6,
    ),
    Stat(
        title="Decisions",
        description="Number of decisions since the start, by verdict. Many rejected: the run is "
        "too noisy, or already as fast as it can be. Many rolled back: the trials did harm.",
        queries=(Query(of_first_rank(tuner.TUNER_DECISIONS), "{{verdict}}", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        colors=VERDICTS,
        plain=True,
        empty=NO_TUNER,
        width=10,
        height=6,
    ),
    Stat(
        title="Time spent on trials",
        description="Seconds since the start that trials and changes took beyond the usual "
        "training time. The setting `tuner.exploration_ratio` limits it.",
        queries=(Query(of_first_rank(tuner.TUNER_EXPLORATION_SECONDS), "trials", shape="now"),),
        unit=SECONDS,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NO_TUNER,
        width=8,
        height=6,
    ),
)

COURSE = (
    StateTimeline(
        title="States over time",
        description="The state of the tuner at each time. A trial goes from propose through "
        "applied to accept or rollback. Compare it with the step time below.",
        queries=(Query(of_first_rank(tuner.TUNER_STATE), "{{state}}"),),
        unit=PLAIN,
        thresholds=(Step("transparent"), Step("blue", 1)),
        named=OFF_AND_ON,
        empty=NO_TUNER,
        width=24,
        height=9,
    ),
    *sized(
        8,
        8,
        TimeSeries(
            title="Symptoms",
            description="Strength of each symptom above its threshold, as a share of training "
            "time, of a device or of memory. The tuner proposes changes that reduce them.",
            queries=(Query(f"{of_first_rank(tuner.TUNER_SYMPTOM)} > 0", "{{symptom}}"),),
            unit=RATIO,
            minimum=0,
            empty="nothing",
        ),
        step_seconds(),
        TimeSeries(
            title="Exposed communication",
            description="Share of training time in which training only waits for communication. "
            "Most changes of the tuner are meant to lower it.",
            queries=(Query(of_run(recorded.EXPOSED_RATIO), "exposed"),),
            unit=RATIO,
            minimum=0,
        ),
    ),
)

KNOBS = (
    *sized(
        8,
        8,
        Table(
            title="Knobs now",
            description="Value of each knob, the measured gain of its last change, and the lower "
            "bound of that gain. Yes is 1 and no is 0; a number format is shown as its number of "
            "bits.",
            labels={"knob": "Knob"},
            columns=(
                Column(
                    title="Value",
                    expression=by("max", of_first_rank(tuner.TUNER_KNOB_VALUE), "knob"),
                ),
                Column(
                    title="Gain",
                    expression=by("max", of_first_rank(tuner.TUNER_GAIN), "knob"),
                    unit=RATIO,
                    thresholds=below(0),
                    decimals=1,
                ),
                Column(
                    title="At least",
                    expression=by("max", of_first_rank(tuner.TUNER_GAIN_LOWER_BOUND), "knob"),
                    unit=RATIO,
                    thresholds=below(0),
                    decimals=1,
                ),
            ),
            sort_by="Gain",
        ),
        TimeSeries(
            title="Knobs over time",
            description="Value of each knob. Each step of a line is a change, and the mark below "
            "names its verdict. The scale is logarithmic, because bucket sizes and small counts "
            "share the axis.",
            queries=(Query(of_first_rank(tuner.TUNER_KNOB_VALUE), "{{knob}}"),),
            unit=COUNT,
            log_scale=True,
            empty=NO_TUNER,
        ),
        TimeSeries(
            title="Measured gains",
            description="Gain in throughput of the last change of each knob, compared with the "
            "configuration before, and the lower confidence bound. A change below zero did harm "
            "and is rolled back.",
            queries=(
                Query(of_first_rank(tuner.TUNER_GAIN), "{{knob}}"),
                Query(of_first_rank(tuner.TUNER_GAIN_LOWER_BOUND), "{{knob}} at least"),
            ),
            unit=RATIO,
            thresholds=(Step(BAD), Step(GOOD, 0)),
            empty="no change tried in this run",
        ),
    ),
    TimeSeries(
        title="Throughput",
        description="Samples per second of all ranks together, which shows the effect of all "
        "changes. It is not known if ranks share samples.",
        queries=(Query(of_run(recorded.SAMPLES_RATE), "samples/s"),),
        minimum=0,
        empty=SAMPLES_SHARED,
        width=16,
    ),
    Text(
        title="How to read a decision",
        description="Explains the verdicts of the tuner.",
        content="**accepted**: it measured better, or memory was running out; the change is kept. "
        "**rolled_back**: the trial did harm (slower, out of memory, loss up); "
        "the change is undone. **interrupted**: the trial ended without a result and is undone. "
        "**not_undone**: the change could not be undone, and is still in use. **rejected**: the "
        "gain was too small, or the tuner did not try it, "
        "because it did not fit in memory or could not be set. **advised**: worth trying, but "
        "yours to decide. `decisions.jsonl` in the run folder has each decision with its reasons.",
        width=8,
    ),
)

DASHBOARD = Dashboard(
    name="tuner",
    title="Tuner",
    description="What did the tuner change, and what did it gain?",
    rows=(Row("Now", NOW), Row("Course", COURSE), Row("Knobs", KNOBS)),
)
