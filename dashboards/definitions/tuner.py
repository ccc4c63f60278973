"""What did the tuner change, and what did it gain?"""

from __future__ import annotations

from ...metrics.catalog import tuner
from ...metrics.catalog.training import SAMPLES
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import Column, Stat, StateTimeline, Table, Text, TimeSeries
from ..grafana.style import (
    BAD,
    COUNT,
    GOOD,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    Named,
    Query,
    Step,
    below,
)
from ..promql import by
from ..recording import communication
from .parts import sized, step_seconds
from .queries import of_first_rank, of_run, rate_of_ranks

NO_TUNER = "no tuner in this run"
OFF_AND_ON = (Named(0, "-", "transparent"), Named(1, "in this state", "blue"))
VERDICTS = {"accepted": "green", "rolled_back": "orange", "rejected": "text", "advised": "blue"}

NOW = (
    Table(
        title="State now",
        description="**observe** is the usual one. **safe_mode**: two changes failed, or "
        "one could not be undone; the tuner tries nothing more, and acts only before memory runs "
        "out; see the alert ZerowatchTunerSafeMode.",
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
        description="Since the start, by verdict. Many rejected: the run is too noisy, or "
        "already as fast as it gets. Many rolled back: what was tried did harm.",
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
        title="Spent on trials",
        description="Seconds since the start that trials and changes took beyond training as it "
        "was before them.",
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
        description="A trial goes from propose over applied to accept or rollback. Compare with "
        "the step time below.",
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
            title="What holds training back",
            description="Every symptom that passes its threshold, as the share that it is about: "
            "of training time, of a device, of memory. What is at 0 is no symptom.",
            queries=(Query(f"{of_first_rank(tuner.TUNER_SYMPTOM)} > 0", "{{symptom}}"),),
            unit=RATIO,
            minimum=0,
            empty="nothing",
        ),
        step_seconds(),
        TimeSeries(
            title="Communication that training waits for",
            description="What most changes are meant to lower, as a share of training time.",
            queries=(Query(of_run(communication.EXPOSED_RATIO), "exposed"),),
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
            description="Value of each knob, the measured gain of its last change, and what that "
            "gained at least. Yes is 1, no is 0, a form of numbers its bits.",
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
            description="Each step is a change; marks name the verdict. The scale is logarithmic, "
            "because bucket sizes and small counts share the axis.",
            queries=(Query(of_first_rank(tuner.TUNER_KNOB_VALUE), "{{knob}}"),),
            unit=COUNT,
            log_scale=True,
            empty=NO_TUNER,
        ),
        TimeSeries(
            title="Measured gains",
            description="Of the last change of each knob, against the run before it, and what it "
            "gained at least by its interval. Below the line it did harm and is rolled back.",
            queries=(
                Query(of_first_rank(tuner.TUNER_GAIN), "{{knob}}"),
                Query(of_first_rank(tuner.TUNER_GAIN_LOWER_BOUND), "{{knob}} at least"),
            ),
            unit=RATIO,
            thresholds=(Step(BAD), Step(GOOD, 0)),
            empty=NO_TUNER,
        ),
    ),
    TimeSeries(
        title="Throughput",
        description="Samples a second of all ranks: what all changes came to.",
        queries=(Query(rate_of_ranks(SAMPLES), "samples/s"),),
        minimum=0,
        width=16,
    ),
    Text(
        title="How to read a decision",
        description="The words that the tuner uses for its verdicts.",
        content="**accepted**: measured better, or done because memory was running out; kept. "
        "**rolled_back**: tried and harmful (slower, out of memory, loss up), or interrupted; "
        "taken back. **rejected**: tried and not faster enough, or not tried, as it did not fit in "
        "memory or could not be set. "
        "**advised**: worth trying, but yours to decide. Each is in `decisions.jsonl` in the run "
        "folder, with its reasons.",
        width=8,
    ),
)

DASHBOARD = Dashboard(
    name="tuner",
    title="Tuner",
    description="What did the tuner change, and what did it gain?",
    rows=(Row("Now", NOW), Row("Course", COURSE), Row("Knobs", KNOBS)),
)
