"""Trains with a tuner that tries one change after the other, and compares with untuned runs.

`tuned_checks.py FOLDER bitwise|reassociation`; any number of ranks. Compares the numbers, not the
speed.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tuned_training import Results, Run, Trained, batch_of, be_quick, make

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.separate_ranks import meet as join

from zerowatch.errors import NonFiniteLossError

OTHER_BUCKET = 3_000
IDLE_STEPS = 25  # without an event; normally a trial starts within 10


class Compared:
    """Cases whose numbers are all those of one run without a tuner, which is trained last."""

    def __init__(self) -> None:
        self._cases: list[tuple[Results, Trained]] = []

    def end(self, trained: Trained, results: Results) -> Results:
        """End a case; `with_untuned` adds whether it is the `same`."""
        results |= trained.end()
        self._cases.append((results, trained))
        return results

    def with_untuned(self, plain: Trained) -> Results:
        """Train without a tuner as long as the longest case, and compare each bitwise."""
        plain.steps(max(each.run.steps for _, each in self._cases))
        for results, each in self._cases:
            last = each.run.steps
            first = last - len(each.losses)
            same = torch.equal(each.weights[-1], plain.weights[last - 1])
            results["same"] = same and each.losses == plain.losses[first:last]
        wrote = plain.run.watch.run_folder is not None and any(plain.decisions())
        return {"wrote decisions": wrote, **plain.end()}


def saved(folder: Path, compared: Compared) -> Results:
    """Save during a trial, continue, and resume the save in another run."""
    trained = Trained(make(folder / "saved", tuner="auto", numerics="bitwise"))
    began = trained.until_trial()
    trained.run.save(folder / "saves")
    after = trained.now()
    saved_at = trained.run.steps
    trained.until_decided()
    results = {"began": began, "after save": after, "saved at": saved_at}
    results = compared.end(trained, results)
    again = Trained(make(folder / "again", tuner="auto", numerics="bitwise"))
    again.run.load(folder / "saves")
    again.steps(IDLE_STEPS)
    results["again"] = compared.end(again, {})
    return results


def stopped(folder: Path, compared: Compared) -> Results:
    """Freeze the tuner by its stop file, resume it, then stop the watch thread."""
    trained = Trained(make(folder, tuner="auto", numerics="bitwise"))
    results: Results = {"began": trained.until_trial()}
    put_stop_file(trained, exists=True)
    trained.steps(2)
    results["frozen"] = trained.now()
    trained.steps(IDLE_STEPS)
    results["still frozen"] = trained.now()
    put_stop_file(trained, exists=False)
    results["began again"] = trained.until_trial()
    put_stop_file(trained, exists=True)
    trained.steps(2)
    trained.run.watch._thread.stop()
    put_stop_file(trained, exists=False)
    results["blind"] = trained.now()
    trained.steps(IDLE_STEPS)
    return compared.end(trained, results | {"still blind": trained.now()})


def put_stop_file(trained: Trained, *, exists: bool) -> None:
    if dist.get_rank() == 0:
        file = trained.run.watch.run_folder / "tuner.stop"
        file.touch() if exists else file.unlink()


def failing(folder: Path, compared: Compared) -> Results:
    """Make unrecorded calls; then fail a window in each of two trials."""
    trained = Trained(make(folder, tuner="auto", numerics="bitwise"))
    for _ in range(IDLE_STEPS):
        dist.group.WORLD.allreduce([torch.zeros(1)]).wait()  # bypasses the instrumentation
        trained.step()
    results = {"uncovered": trained.now(), "began": trained.until_trial()}
    spoil(trained, results)
    trained.step()
    results["after it"] = trained.now()
    trained.until_trial()
    spoil(trained, results)
    trained.run.set_micro_batch(trained.run.micro_batch_samples)
    results["after a call"] = trained.now()
    return compared.end(trained, results)


def failing_controller(folder: Path, compared: Compared) -> Results:
    """Fail rank 0's controller in the first trial: after some more, none may be left to try."""
    trained = Trained(make(folder, tuner="auto", numerics="bitwise"))
    results: Results = {"began": trained.until_trial(), "on trial": trained.now()["values"]}
    if dist.get_rank() == 0:
        trained.run._tuner._runner._controller._continue_trial = fail
    trained.steps(5)
    return compared.end(trained, results | {"failed": trained.now()})


def spoil(trained: Trained, results: Results) -> None:
    """Train with a NaN loss."""
    results.setdefault("spoiled", []).append(trained.now()["values"])
    with suppress(NonFiniteLossError):
        trained.run.train_batch({key: each / 0 for key, each in batch_of(0).items()})


def fail(*_: Any) -> None:
    raise RuntimeError("an error of the controller")


def bitwise(folder: Path) -> Results:
    """Run all cases of two ranks."""
    compared = Compared()
    results = {
        "saved": saved(folder, compared),
        "stopped": stopped(folder / "stopped", compared),
        "failing": failing(folder / "failing", compared),
        "failing controller": failing_controller(folder / "failing-controller", compared),
    }
    return results | {"off": compared.with_untuned(Trained(make(folder / "off", tuner="off")))}


def reassociation(folder: Path) -> Results:
    """Compare the distances of a tuned run and of another bucket size from the untuned run."""
    tuned = Trained(make(folder / "auto", tuner="auto", numerics="reassociation"))
    tuned.until_decided()
    results = {"tuned": tuned.end()}
    plain = trained_alike(make(folder / "off", tuner="off"), tuned)
    other = trained_alike(make(folder / "bucket", tuner="off", bucket=OTHER_BUCKET), tuned)
    expected = plain.weights[-1]
    for name, trained in (("tuned apart", tuned), ("bucket apart", other)):
        results[name] = float((trained.weights[-1] - expected).abs().max())
    return results


def trained_alike(run: Run, tuned: Trained) -> Trained:
    trained = Trained(run)
    trained.steps(tuned.run.steps)
    trained.end()
    return trained


def main(folder: Path, numerics: str) -> None:
    """Run the cases of a numerics setting."""
    torch.set_num_threads(1)
    join()
    be_quick()
    results = {"bitwise": bitwise, "reassociation": reassociation}[numerics](folder)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
