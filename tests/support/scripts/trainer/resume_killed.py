"""Kills a process in each part of a save, and loads the remaining files.

`resume_killed.py FOLDER [background]` writes FOLDER/found.json: for each kill what was being done,
and the step, the weights' step and the checkpoints found afterwards. The folder holds steps 1 and
2 before. With `background`, the state is copied, the engine trains on, and a thread writes.

A process is killed before each file operation that Python reports, and within each file that is
written: by the kernel (SIGXFSZ), once the file has reached a size.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch
from resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.runtime.trainer.checkpoint.background_save import BackgroundSaver, copy_checkpoint
from zerowatch.runtime.trainer.checkpoint.folder_owner import OWNER, FolderOwner
from zerowatch.runtime.trainer.checkpoint.load import find_checkpoint, load_checkpoint
from zerowatch.runtime.trainer.checkpoint.rank_exchange import StoreExchange
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
# The state of the run, the weights and the moments take 8, 16 and 32 KB, and are written in this
# order, so that each size is reached within a file of its own.
WIDTH, NOISE = 2048, 2048
FILES = ("zerowatch-rank-00000.pt", "model.pt", "optimizer.pt")
SMALL_FILE_BYTES = 8
SIZES = (0, *range(500, 40_000, 2500))


@dataclass(frozen=True)
class Moment:
    """A moment to kill at: a file operation, and the size of the file if the kill is within it.

    Without an operation, it is the moment at which any file has this size.
    """

    operation: int | None = None
    size: int | None = None


def moments(num_operations: int) -> Iterator[Moment]:
    for operation in range(1, num_operations + 1):
        yield Moment(operation=operation)
        yield Moment(operation=operation, size=SMALL_FILE_BYTES)
    for size in SIZES:
        yield Moment(size=size)


def kill_at(moment: Moment, folder: str, report: int) -> list[str]:
    """Kill this process at a moment of a save into the folder; return the operations before it."""
    done: list[str] = []
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if moment.operation is None and moment.size is not None:
        limit_file_size(moment.size)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in WATCHED or not any(folder in str(each) for each in arguments):
            return
        done.append(f"{event} {arguments[0]}")
        if len(done) != moment.operation:
            return
        if moment.size is None:
            os.write(report, done[-1].encode())
            os.kill(os.getpid(), signal.SIGKILL)
        elif event == "open" and int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            os.write(report, f"write {arguments[0]}".encode())
            limit_file_size(moment.size)

    sys.addaudithook(hook)
    return done


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def save(engine: PlainEngine, folder: Path, *, background: bool = False) -> None:
    engine.step()
    steps = engine.global_steps
    state = RunState(
        steps=steps,
        samples=8 * steps,
        config={},
        micro_batch_plan={"micro_batch_samples": 4},
        client_state={"step": steps, "noise": torch.zeros(NOISE)},
    )
    host_group = SingleRankHostGroup()
    owner = FolderOwner("killed", ["launcher"], attempt=token_hex(8))  # as after a restart
    if background:
        pending = copy_checkpoint(folder, engine, host_group, state, lambda: 2**30, owner=owner)
        saver = BackgroundSaver()
        saver.start(pending, StoreExchange(host_group), lambda saved, seconds: None)
        for _ in range(100):  # of other weights, which must not be in the files
            engine.step()
        saver.close()
        engine.module.weight.data.sub_(100)
        engine.global_steps -= 100
    else:
        save_checkpoint(folder, engine, host_group, state, owner=owner)
    owner.close()


def found_in(folder: Path, killed_at: str) -> dict:
    """Load as after a restart; save a checkpoint again."""
    engine = new_engine()
    found_checkpoint = find_checkpoint(folder, engine, SingleRankHostGroup())
    assert found_checkpoint is not None
    load_checkpoint(found_checkpoint, engine, SingleRankHostGroup())
    state = found_checkpoint.state
    found = {
        "killed_at": killed_at.replace(str(folder), ""),
        "steps": [state.steps, state.client_state["step"], engine.global_steps],
        "weight": engine.module.weight.data.mean().item(),
    }
    save(engine, folder)
    return found | {"after": sorted(path.name for path in folder.iterdir())}


def new_engine() -> PlainEngine:
    engine = PlainEngine(WIDTH)
    engine.module.weight.data.zero_()
    return engine


def kill(saves: Path, moment: Moment, *, background: bool) -> dict | None:
    """Return what is found after a kill; None if the process was not killed at this moment."""
    killed_at, status = save_in_child(saves, moment, background=background)
    if not os.WIFSIGNALED(status):
        return None
    return found_in(saves, killed_at or f"write {last_written(saves)}")


def save_in_child(saves: Path, moment: Moment, *, background: bool) -> tuple[str, int]:
    """Save twice, and then in a child that is killed at a moment.

    Returns:
        What the child was doing, or the number of its file operations if it ended by itself; and
        its status.
    """
    shutil.rmtree(saves, ignore_errors=True)
    engine = new_engine()
    save(engine, saves)
    save(engine, saves)
    reading, report = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        done = kill_at(moment, str(saves), report)
        save(engine, saves, background=background)
        os.write(report, str(len(done)).encode())
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read(), status


def last_written(saves: Path) -> str:
    """Return the file of the incomplete checkpoint that was written last."""
    partials = list(saves.glob(".partial-*"))
    written = [each for each in FILES for folder in partials if (folder / each).exists()]
    return str(partials[0] / written[-1]) if written else str(saves / OWNER)


def count_operations(saves: Path, *, background: bool) -> int:
    """Return the number of file operations of a save."""
    operations, _ = save_in_child(saves, Moment(), background=background)
    return int(operations)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    is_background = sys.argv[2:] == ["background"]
    folder = target / "saves"
    found = [
        kill(folder, moment, background=is_background)
        for moment in moments(count_operations(folder, background=is_background))
    ]
    (target / "found.json").write_text(json.dumps([each for each in found if each is not None]))
