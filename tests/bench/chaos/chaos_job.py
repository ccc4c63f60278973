"""One rank of the chaos bench: trains until the bench names the last step.

`chaos_job.py FOLDER` trains at a steady pace, saves, and does what the files in FOLDER say:

- `end.json`: the last step
- `nan.json`: positions of batches that contain a NaN on one rank, with the rank
- `oom.json`: a number, a rank and the pass in which that rank runs out of memory

`chaos_job.py FOLDER PLAN` is the undisturbed run: as fast as it can, without saves, with the
micro-batches and the NaN batches that the file PLAN lists.

Each rank logs to `events-<rank>.jsonl` in FOLDER. `at` is the time of the monotonic clock, which is
the same for all processes, and which no fault changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch
from zerowatch.errors import CheckpointError, NonFiniteLossError

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

SAMPLES, BATCH_SAMPLES, MICRO_BATCH_SAMPLES = 960, 16, 4
WIDTH, HIDDEN = 128, 512
SAVE_EVERY = 25
PACE_SECONDS = 0.05
# What a sample takes at the place that runs out of memory, and the room that is left there.
PER_SAMPLE_BYTES = 64 * 2**20
ROOM_BYTES = int(2.5 * PER_SAMPLE_BYTES)
OOM_WINDOWS = 3

CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH_SAMPLES,
    "gradient_clipping": 0.5,
    "steps_per_print": 10**9,
    # Several buckets: backward has collectives before its end.
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 40_000},
    # Losses are compared bitwise. DeepSpeed's Adam on CPU multiplies the powers of beta from step
    # to step, but raises them after a load, which gives another last bit.
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.001}},
}


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"id": index, "x": torch.randn(WIDTH, generator=generator)}


class Scarce(torch.autograd.Function):
    """Identity that needs much memory in forward or in backward, if `place` names the pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: str | None) -> torch.Tensor:
        ctx.place = place
        if place == "forward":
            allocate(len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.place == "backward":
            allocate(len(gradient))
        return gradient.clone(), None


def allocate(num_samples: int) -> None:
    torch.empty(num_samples * PER_SAMPLE_BYTES, dtype=torch.uint8)


class Net(torch.nn.Module):
    """With dropout, so that generators that are not restored show in the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(WIDTH, HIDDEN)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(HIDDEN, WIDTH)
        self.scarce_in: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Scarce.apply(torch.tanh(self.body(x)), self.scarce_in)
        return self.head(self.dropout(hidden))


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return ((model(batch["x"]) - batch["x"].flip(1)) ** 2).mean()


class EventLog:
    """Log file of this rank; each line is one write, so that a kill leaves complete lines."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"events-{rank}.jsonl").open("a", buffering=1)
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    def log(self, what: str, **facts: Any) -> None:
        moments = {"at": time.monotonic(), "at_unix_seconds": time.time()}
        line = json.dumps({"what": what, "attempt": self._attempt, **moments, **facts})
        self._file.write(f"{line}\n")


class Faults:
    """The faults that the bench orders by files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._windows_left, self._place = 0, ""

    def last_step(self) -> int | None:
        """Return the last step of the training; None if it is not known yet."""
        end = read(self._folder / "end.json")
        return None if end is None else int(end["step"])

    def has_nan(self, position: int) -> bool:
        """Whether this rank's part of the batch at this position contains a NaN."""
        ordered = read(self._folder / "nan.json") or {}
        return ordered.get(str(position)) == self._rank

    def scarce_in(self, events: EventLog) -> str | None:
        """Return in which pass of the next window there is little memory; None if in neither."""
        ordered = read(self._folder / "oom.json")
        if ordered is not None and ordered["rank"] == self._rank:
            done = self._folder / f"oom-{ordered['number']}.done"
            if not done.exists():
                done.touch()  # before the window: a restart after it must not run out again
                events.log("scarce", number=ordered["number"], place=ordered["place"])
                self._windows_left, self._place = OOM_WINDOWS, ordered["place"]
        if not self._windows_left:
            return None
        self._windows_left -= 1
        return self._place


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def little_memory(model: Net, place: str | None) -> Iterator[None]:
    """Limit the addresses of this process (RLIMIT_AS) while a pass needs much memory."""
    if place is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM_BYTES
    model.scarce_in = place
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        model.scarce_in = None


class Job:
    """The run of this rank, its batches and its log."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.events = EventLog(folder, rank)
        self.events.log("started", pid=os.getpid())
        torch.manual_seed(0)
        self.model = Net()
        self.run = zerowatch.TrainingRun(self.model, config=CONFIG, loss=loss)

    def load(self) -> None:
        self.run.load(self.folder / "disk" / "saves")

    def begin(self) -> None:
        self.loader = self.run.loader(Samples(), batch_samples=BATCH_SAMPLES, seed=1, num_workers=1)
        self._batches = self.loader.forever()
        self.events.log(
            "resumed",
            step=self.run.steps,
            position=self.loader.position,
            samples=SAMPLES,
            batch_samples=BATCH_SAMPLES,
        )

    def next_batch(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the position of the next batch, and the batch."""
        batch = next(self._batches)
        return self.loader.position - 1, batch

    def train(self, position: int, batch: dict[str, torch.Tensor], *, has_nan: bool) -> None:
        """Train on a batch, or skip it if its loss is not finite; log which."""
        ids = batch["id"].tolist()
        if has_nan:
            batch["x"][0, 0] = float("nan")
        try:
            done = self.run.train_batch(batch)
        except NonFiniteLossError:
            self.events.log("skipped", position=position, ids=ids)
            return
        self.events.log(
            "committed",
            step=done.step,
            position=position,
            ids=ids,
            loss=done.loss,
            micro_batches=done.micro_batches,
            replays=done.replays,
        )

    def save(self) -> None:
        """Save a checkpoint, each second one in the background; go on if the disk is full."""
        in_background = self.run.steps // SAVE_EVERY % 2 == 0
        try:
            self.run.save(self.folder / "disk" / "saves", background=in_background)
        except CheckpointError as error:
            self.events.log("not_saved", step=self.run.steps, error=str(error))
        else:
            self.events.log("saved", step=self.run.steps, in_background=in_background)

    def end(self) -> None:
        self.run.wait_for_save()
        parameters = [each.detach().flatten() for each in self.run.module.parameters()]
        weights = hashlib.sha256(torch.cat(parameters).numpy().tobytes()).hexdigest()
        self.events.log("ended", step=self.run.steps, weights=weights, samples=self.run.samples)
        self.run.close()
        dist.destroy_process_group()


def disturbed(job: Job) -> None:
    """Train with saves and with the faults that the bench orders."""
    faults = Faults(job.folder, job.rank)
    job.load()
    job.begin()
    while (last := faults.last_step()) is None or job.run.steps < last:
        began, before = time.monotonic(), job.run.steps
        position, batch = job.next_batch()
        with little_memory(job.model, faults.scarce_in(job.events)):
            job.train(position, batch, has_nan=faults.has_nan(position))
        if job.run.steps > before and job.run.steps % SAVE_EVERY == 0:
            job.save()
        time.sleep(max(0.0, began + PACE_SECONDS - time.monotonic()))
    job.end()


def undisturbed(job: Job, plan: Mapping[str, Any]) -> None:
    """Train as the plan says: the last step, the NaN batches, and the micro-batches from steps."""
    job.begin()
    while job.run.steps < plan["last_step"]:
        size = plan["micro_batch_samples"].get(str(job.run.steps + 1))
        if size is not None:
            job.run.set_micro_batch(size)
        position, batch = job.next_batch()
        job.train(position, batch, has_nan=plan["nan"].get(str(position)) == job.rank)
    job.end()


def main(folder: Path, plan: Path | None) -> None:
    job = Job(folder, int(os.environ["RANK"]))
    if plan is None:
        disturbed(job)
    else:
        undisturbed(job, json.loads(plan.read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
