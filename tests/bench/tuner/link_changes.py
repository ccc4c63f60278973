"""Runs the tuner on a link that becomes slow in the middle of a run, and fast again.

Sequences are longer than in slow_link.py, and the run starts from what is best there without other
roundings. On this machine 8 bits are some per cent faster at 2 Gbit/s too, as they cost hardly any
time: so back on the fast link the right answer is to measure what was used there, and to stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner_link.link_figures import SUSTAINED, Tuned, short
from bench.tuner_link.search_space import at
from bench.tuner_link.slow_link import short_decision
from bench.tuner_link.two_host_jobs import Job, Report, job, missing, throttle, two_hosts

FAST, SLOW = "2gbit", "200mbit"
# How long each part lasts; steps are several times as long on the slow link.
PARTS = ((FAST, 100.0), (SLOW, 220.0), (FAST, 280.0))
FIRST = at(stage=0, micro_batch=16)
LEAST = 0.98  # of the better one's throughput: what a change no longer needed may cost
ASKED = {
    "tuner": {"tuner": "auto", "numerics": "statistical"},
    # The cooldown is counted in steps, and would outlast the parts of this bench.
    "settings": {"rebuild": False, "cooldown_steps": 20},
    "seconds": 3600,
    "rivals": {"at first": FIRST},
    "rounds": 4,
    "settle_steps": 1,
    "steps": 3,
    "micro_batch_samples": FIRST["micro_batch_samples"],
    "stage": FIRST["zero_stage"],
    "length": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Steps and decisions while the link had the bandwidth `rate`."""

    rate: str
    began: float
    steps: Sequence[Report]
    decisions: Sequence[Report]
    must_decide: bool

    def row(self) -> Row:
        """Return the first and last step times of the part, and the decisions in it."""
        steps = [one["seconds"] for one in self.steps]
        first, last = median(steps[:SUSTAINED]), median(steps[-SUSTAINED:])
        kept = sum(one["verdict"] == "accepted" for one in self.decisions)
        waited = ""
        if self.decisions:
            steps_before = self.decisions[0]["step"] - self.steps[0]["step"]
            seconds_before = self.decisions[0]["unix_seconds"] - self.began
            waited = f", the first {steps_before} steps, {seconds_before:.0f} s after"
        return Row(
            what=f"link at {self.rate}/s: decisions",
            measured=f"{len(self.decisions)} decisions, {kept} to change{waited}",
            spread=f"{first:.2f} to {last:.2f} s a step; {short(self.steps[-1]['configuration'])}",
            goal="a decision" if self.must_decide else "",
            met=bool(self.decisions) if self.must_decide else None,
        )


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each part of the run: its step times and decisions."""
    reason = missing()
    if reason is not None:
        print(f"no link: {reason}")
        return
    with two_hosts(FAST) as hosts, job(hosts, "tuner_link/tuned_link_job.py", ASKED) as running:
        began = [go_through(running, rate, seconds, options) for rate, seconds in PARTS]
        (running.folder / "stop").touch()
        ended = running.wait(240)
    for decision in ended.decisions:
        print(short_decision(decision))
    compared = Tuned.read(ended.reports)
    for number, (rate, _) in enumerate(PARTS):
        until = began[number + 1] if number + 1 < len(began) else time.time()
        within = [
            [one for one in all_ if began[number] <= one["unix_seconds"] < until]
            for all_ in (compared.steps, ended.decisions)
        ]
        yield Part(
            rate=rate,
            began=began[number],
            steps=within[0],
            decisions=within[1],
            must_decide=number > 0,
        ).row()
    ratio, ratios = compared.ratio("at first"), compared.ratios("at first")
    yield Row(
        what=f"back at {FAST}/s: throughput over that with what was used there first",
        measured=f"{ratio:.3f}",
        spread=f"{min(ratios):.2f} to {max(ratios):.2f}",
        goal=f">= {LEAST}",
        met=ratio >= LEAST,
    )


def go_through(running: Job, rate: str, seconds: float, options: Options) -> float:
    """Set the bandwidth of the job's link; return the start time."""
    while not running.reports():
        time.sleep(0.5)  # it has not begun yet
        running.check()
    throttle(running.hosts, rate)
    began = time.time()
    time.sleep(20 if options.quick else seconds)
    running.check()
    return began
