"""Trains until a file asks it to end; other files plant incidents.

Usage: incident_job.py FOLDER. While a file is there, its incident is. On both ranks: `end` (every
rank ends in good order), `starve`, `spike`, `explode`, `overflow`, `fill`. On rank 1 only: `slow`,
`sleep`, `skip`, `nan`, `keep`, `raise`. `stuck` and `half` count at the start: ranks that never
train, and fp16. The file `limit` holds the bytes of host memory that a rank may use.

INCIDENT_SCALE is the factor by which the waits of rules and runs are multiplied. With INCIDENT_GPU,
the ranks read GPU 0 of the NVML that the loader finds, which should be a compiled nvml_library.c.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, IterableDataset

import zerowatch
from zerowatch.runtime.devices.nvml_probe import nvml_device
from zerowatch.runtime.monitor import build_watch
from zerowatch.runtime.separate_process import build as build_separate

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed refuses fp16 on CPUs; torch computes it.
get_accelerator().is_fp16_supported = lambda: True

FAULTY_RANK = 1
MIB = 2**20
# 1.6 MB of gradients in four buckets: 2.4 MB on the wire a step, which 200 Mbit/s carry in 0.1 s.
LAYERS, WIDTH, BATCH, BUCKET = 4, 316, 8, 100_000
# A sleep replaces computing, as the host sleeps while a GPU computes. Communication then takes 10
# to 15 ms of a step; the share of 20 %, from which it is reported, is four times as much. Steps are
# not longer, because the limit of a hang is at least ten steps, and 30 s scaled by 1/15 are 2 s.
COMPUTE_SECONDS, SLOWER_SECONDS, LOADING_SECONDS = 0.25, 0.0625, 0.14
KEPT_BYTES = MIB
SHARE_OF_HOST = 0.48
ON_BOTH = ("end", "starve", "spike", "explode", "overflow", "fill")


class Incidents:
    """Which incidents this rank has now, by the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_faulty = dist.get_rank() == FAULTY_RANK
        self._kept: list[torch.Tensor] = []
        self._filling: torch.Tensor | None = None

    def has(self, name: str) -> bool:
        return (name in ON_BOTH or self._is_faulty) and (self._folder / name).exists()

    def at_start(self, name: str) -> bool:
        return (self._folder / name).exists()

    def limit_bytes(self) -> int:
        return int((self._folder / "limit").read_text())

    def compute(self, *_: object) -> None:
        """Sleep as long as a forward pass takes; a hook on the model."""
        time.sleep(COMPUTE_SECONDS + (SLOWER_SECONDS if self.has("slow") else 0.0))

    def after_step(self) -> None:
        """Use memory, raise, or wait for ever."""
        if self.has("keep"):
            self._kept.append(torch.ones(KEPT_BYTES, dtype=torch.uint8))
        if self.has("fill") and self._filling is None:
            missing = int(SHARE_OF_HOST * self.limit_bytes()) - in_use_bytes()
            self._filling = torch.ones(max(missing, 0), dtype=torch.uint8)
        if self.has("raise"):
            raise ValueError("an incident: the script of rank 1 raises")
        while self.has("sleep"):
            time.sleep(0.1)

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a step, with the incidents of this rank."""
        if self.has("nan"):
            return loss + float("nan")
        return 4 * loss if self.has("spike") else loss

    def changed_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the model's output, with the incidents of this rank."""
        if self.has("overflow"):
            return gradient * float("inf")
        return 1000 * gradient if self.has("explode") else gradient


class Batches(IterableDataset):
    """Equal batches, which take their time during an incident."""

    def __init__(self, incidents: Incidents, dtype: torch.dtype) -> None:
        self._incidents = incidents
        self._batch = torch.ones(BATCH, WIDTH, dtype=dtype)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self._incidents.has("starve"):
                time.sleep(LOADING_SECONDS)
            yield self._batch


def in_use_bytes() -> int:
    """Return RSS without mapped files, as zerowatch reads it."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def read_gpu() -> None:
    """Let the watch read device 0 of NVML, in place of the CPU."""
    probe = nvml_device(0)
    if probe is None:
        raise SystemExit("no NVML: LD_LIBRARY_PATH should name the folder of a compiled library")
    for module in (build_watch, build_separate):
        module.device_probes = lambda *, device_index: [probe]


def make_engine(incidents: Incidents):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model.register_forward_pre_hook(incidents.compute)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": BUCKET},
    }
    if incidents.at_start("half"):  # a static scale: a dynamic one ends the run at its minimum
        config["fp16"] = {"enabled": True, "loss_scale": 128}
    return zerowatch.initialize(
        settings={"memory": {"host_limit_bytes": incidents.limit_bytes()}},
        model=model,
        # Not DeepSpeed's own: its compilation would be waited for at the first run of a machine.
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-5),
        config=config,
    )[0]


def train(engine, incidents: Incidents) -> None:
    """Train until any rank finds the request to end; all ranks end at the same step."""
    ending = torch.zeros(1)
    # Not all_reduce: a rank that skips it would meet one of DeepSpeed's, of another size, and gloo
    # would end the process. With another operation the ranks wait, as with NCCL.
    requests = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dtype = torch.half if incidents.at_start("half") else torch.float
    for batch in DataLoader(Batches(incidents, dtype), batch_size=None):
        output = engine(batch)
        output.register_hook(incidents.changed_gradient)
        engine.backward(incidents.changed(output.float().square().mean()))
        engine.step()
        incidents.after_step()
        ending.fill_(incidents.has("end"))
        if not incidents.has("skip"):
            dist.all_gather(requests, ending)
        if any(requests):
            return


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if "INCIDENT_GPU" in os.environ:
        read_gpu()
    deepspeed.init_distributed("gloo", verbose=False)
    incidents = Incidents(folder)
    engine = make_engine(incidents)
    (folder / f"rank-{dist.get_rank()}.pid").write_text(str(os.getpid()))
    while incidents.at_start("stuck"):
        time.sleep(0.1)
    train(engine, incidents)
    engine.watch.close()
