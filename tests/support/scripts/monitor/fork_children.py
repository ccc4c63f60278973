"""Script that forks children before and during its watch, some of which open one of their own.

It prints what the exits of the children leave of its run, as JSON.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch

import zerowatch
from zerowatch.metrics.catalog import overhead

runs = Path(sys.argv[1])
torch.set_num_threads(1)  # OpenMP's threads are missing in a forked child


def train(run_id):
    """Open a watch and train a step."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"run_id": run_id, "serve": {"port": 0}, "run_log": {"folder": str(runs)}}
    watch = zerowatch.watch(model, optimizer, settings)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return watch


def train_beside_dead_threads():
    """Train, and check that the threads of the parent do not count as dead ones of this run."""
    watch = train("handler")
    assert watch.snapshot().value(overhead.DEAD_THREADS) == 0


def fork(body):
    """Run a function in a forked child, which ends by sys.exit."""
    child = os.fork()
    if child == 0:
        body()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0


def fork_by_multiprocessing(body):
    """Run a function in a child of multiprocessing, which calls no exit handlers."""
    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join()
    assert child.exitcode == 0


fork(lambda: train("before"))
watch = train("parent")
targets = watch.run_folder / "targets.json"
deadline = time.monotonic() + 60
while not targets.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
before = targets.read_text()

fork(lambda: None)
fork(watch.close)
fork_by_multiprocessing(lambda: None)
fork(lambda: train("during"))
fork_by_multiprocessing(lambda: train("during-mp"))
fork_by_multiprocessing(lambda: fork(lambda: train("grandchild")))

try:
    raise FileNotFoundError("no checkpoint")
except FileNotFoundError:
    fork_by_multiprocessing(train_beside_dead_threads)

print(json.dumps({"targets": targets.read_text() == before, "is_open": watch.is_open}))
