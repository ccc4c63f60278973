"""Decisions of each kind in a real run, and after each what every rank's engine uses.

`decisions_job.py FOLDER`, two ranks; rank r writes FOLDER/rank-r.json. What is tried and how a
trial ends is scripted. The times of steps are replaced, so that nothing depends on measured ones.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tuned_training import SETTINGS, Results, Trained, make

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.separate_ranks import meet as join

from zerowatch.runtime.engine.rebuild import engine_replacement
from zerowatch.runtime.monitor import watch_thread
from zerowatch.runtime.tuner import controller_runner
from zerowatch.runtime.tuner.policy import trial, trial_search
from zerowatch.runtime.tuner.policy.ab_comparison import AbComparison, Variant
from zerowatch.runtime.tuner.policy.knob_registry import SPECS
from zerowatch.runtime.tuner.policy.policy_types import Numerics, Proposal, Symptom, Value
from zerowatch.runtime.tuner.policy.proposals import TunerInput

LONGEST = 2000  # steps; usually 380, but a trial on a busy machine starts over
ACCEPTED, REFUSED = -0.9, 9.0  # minimum gains that any trial or no trial reaches
SYMPTOM = Symptom(name="comm_redundancy", ratio=0.5, evidence={})
TUNER = {**SETTINGS["tuner"], "rebuild": True}


@dataclass(frozen=True, kw_only=True)
class Try:
    """A scripted trial.

    Attributes:
        event: What happens in it: "", "slow", "verify fails", "stop file" or "rebuild refused".
    """

    knob: str
    value: Value
    min_gain: float
    event: str = ""


SCRIPT = (
    Try(knob="zero_stage", value=0, min_gain=ACCEPTED),
    Try(knob="zero_stage", value=3, min_gain=REFUSED, event="slow"),
    Try(knob="python_gc", value="between_steps", min_gain=ACCEPTED),
    Try(knob="zero_stage", value=2, min_gain=ACCEPTED, event="verify fails"),
    Try(knob="reduce_bucket_size", value=512, min_gain=REFUSED, event="stop file"),
    Try(knob="zero_stage", value=1, min_gain=REFUSED, event="rebuild refused"),
)


class Director:
    """Proposes the trials of the script on rank 0, and lets their events happen."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._remaining = trained, iter(SCRIPT)
        self.current: Try | None = None
        design_of = trial_search.TrialSearch._design
        add = AbComparison.add
        AbComparison.add = lambda comparison, seconds: add(  # type: ignore[method-assign]
            comparison, None if seconds is None else self._seconds_of(comparison.variant)
        )
        trial_search.diagnose = lambda reading, thresholds: (SYMPTOM,)
        trial_search.propose = self._propose
        trial_search.TrialSearch._design = lambda *args: replace(  # type: ignore[method-assign]
            design_of(*args),
            block_steps=2,
            settle_steps=1,
            first_interim_pair=2,
            max_pairs=2,
            interim_level=0.5,
            initial_a_block=(),
            noise=1e6,  # no early end
            min_gain=self.current.min_gain if self.current else ACCEPTED,
        )

    def _propose(self, inputs: TunerInput) -> Iterator[Proposal]:
        self.current = next(self._remaining, None)
        if self.current is not None:
            yield Proposal(
                changes={self.current.knob: self.current.value},
                symptom=SYMPTOM,
                apply_mode=SPECS[self.current.knob].apply_mode,
                numerics=Numerics.REASSOCIATION,
                predicted_gain=1.0,
                reason="the script asks for it",
            )

    def _seconds_of(self, variant: Variant) -> float:
        """Return the time that counts for a step."""
        is_slow = variant == "B" and self.current is not None and self.current.event == "slow"
        return 5.0 if is_slow else 1.0

    def before_step(self) -> None:
        """Cause the event of the present trial."""
        own = json.dumps(self.current.event if self.current else "")
        event = json.loads(self._trained.run._host_group.broadcast_text(own))
        knobs, is_last = self._trained.run._tuner._knobs, dist.get_rank() == 1
        vars(knobs).pop("verify", None)
        if event == "verify fails" and is_last:
            knobs.verify = lambda target: False
        if event == "rebuild refused" and is_last:
            engine_replacement.unsupported_reason = lambda engine, old, new: (
                "the test refuses it" if new["zero_optimization"]["stage"] == 0 else None
            )
        is_on_trial = self._trained.agreed(self._trained.is_on_trial)
        if event == "stop file" and is_on_trial and dist.get_rank() == 0:
            self._stop_file.touch()

    def after_decision(self) -> None:
        if dist.get_rank() == 0:
            self._stop_file.unlink(missing_ok=True)

    @property
    def _stop_file(self) -> Path:
        return self._trained.run.watch.run_folder / "tuner.stop"


def read_back(trained: Trained) -> Results:
    """Return what this rank's knobs and engine use."""
    engine = trained.run.engine
    return {
        "knobs": dict(trained.run._tuner._knobs.values()),
        "stage": engine.zero_optimization_stage(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "collects": gc.isenabled(),
        "config": trained.run.config["zero_optimization"]["stage"],
    }


def main(folder: Path) -> None:
    """Train until all of the script is decided."""
    torch.set_num_threads(1)
    join()
    controller_runner.POLL_SECONDS = 0.0
    watch_thread.TICK_SECONDS = 0.05
    trial.SHIFTED_STEPS = LONGEST  # a busy machine interrupts nothing
    settings = {**SETTINGS, "tuner": TUNER}
    run = make(folder, settings=settings, default_optimizer=True, tuner="auto")
    trained = Trained(run)
    director = Director(trained)
    read: list[Results] = []
    while run.steps < LONGEST and len(read) < len(SCRIPT):
        director.before_step()
        trained.step()
        if trained.agreed(lambda: len(trained.decisions()) > len(read)):
            read.append(read_back(trained))
            director.after_decision()
    trained.steps(3)  # training goes on after the last one
    results = {"read back": read, "decisions": trained.decisions(), "steps": run.steps}
    results |= {"ended": trained.end()}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
