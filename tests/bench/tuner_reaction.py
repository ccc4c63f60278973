"""The tuner on a link that becomes slow in the middle of a run, and fast again.

Sequences are longer than in tuner_link.py, and the run starts from what is best there without other
roundings: on the fast link hardly anything waits for communication, so gradients may as well travel
as they are; 8 bits take about as long there. From ZeRO-2, 8 bits are still 3 % faster at 2 Gbit/s.
With the short ones every change that pays at 200 Mbit/s pays at 2 Gbit/s too, 8 bits included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from options import Options
from table import Row
from tuner_link import told_shortly
from tuner_link_found import SUSTAINED, short
from tuner_link_hosts import Job, Told, job, missing, throttle, two_hosts

FAST, SLOW = "2gbit", "200mbit"
# How long each part lasts; steps are several times as long on the slow link.
PARTS = ((FAST, 90.0), (SLOW, 150.0), (FAST, 210.0))
ASKED = {
    "tuner": {"tuner": "auto", "contract": "statistical"},
    # Soaking is by steps, and would outlast the parts of this bench.
    "settings": {"rebuild": False, "soak_steps": 20},
    "seconds": 3600,
    "rivals": {},
    "rounds": 0,
    "settle_steps": 0,
    "steps": 0,
    "micro_batch_samples": 16,
    "stage": 0,
    "length": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What happened while the link was as fast as `rate` says."""

    rate: str
    began: float
    steps: Sequence[Told]
    decisions: Sequence[Told]
    must_change: bool

    @property
    def accepted(self) -> list[Told]:
        return [one for one in self.decisions if one["verdict"] == "accepted"]

    def row(self) -> Row:
        """Return how it began, how it ended, and what was changed between."""
        steps = [one["seconds"] for one in self.steps]
        first, last = median(steps[:SUSTAINED]), median(steps[-SUSTAINED:])
        waited = "no change"
        if self.accepted:
            first_change = self.accepted[0]
            steps_before = first_change["step"] - self.steps[0]["step"]
            seconds_before = first_change["unix_seconds"] - self.began
            waited = f"the first {steps_before} steps, {seconds_before:.0f} s after"
        return Row(
            what=f"link at {self.rate}/s: re-tuned",
            measured=f"{len(self.accepted)} changes kept of {len(self.decisions)}, {waited}",
            spread=f"{first:.2f} to {last:.2f} s a step; {short(self.steps[-1]['configuration'])}",
            goal="a change" if self.must_change else "",
            met=bool(self.accepted) if self.must_change else None,
        )


def bench(options: Options) -> Iterator[Row]:
    """Yield what the tuner did in each part."""
    reason = missing()
    if reason is not None:
        print(f"no link: {reason}")
        return
    with two_hosts(FAST) as hosts, job(hosts, "tuner_link_tuned_job.py", ASKED) as running:
        began = [go_through(running, rate, seconds, options) for rate, seconds in PARTS]
        (running.folder / "stop").touch()
        ended = running.wait(120)
    for decision in ended.decisions:
        print(told_shortly(decision))
    for number, (rate, _) in enumerate(PARTS):
        until = began[number + 1] if number + 1 < len(began) else time.time()
        within = [
            [one for one in all_ if began[number] <= one["unix_seconds"] < until]
            for all_ in (ended.told[:-1], ended.decisions)
        ]
        yield Part(
            rate=rate,
            began=began[number],
            steps=within[0],
            decisions=within[1],
            must_change=number > 0,
        ).row()


def go_through(running: Job, rate: str, seconds: float, options: Options) -> float:
    """Let the job train on a link of this bandwidth; return when that began."""
    while not running.told():
        time.sleep(0.5)  # it has not begun yet
        running.check()
    throttle(running.hosts, rate)
    began = time.time()
    time.sleep(20 if options.quick else seconds)
    running.check()
    return began
