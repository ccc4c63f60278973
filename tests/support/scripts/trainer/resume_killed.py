"""Kills a process at each file operation of `save_checkpoint`, and loads the remaining files.

`resume_killed.py FOLDER` writes FOLDER/found.json: for each kill what was being done, and the step,
the weights' step and the checkpoints found afterwards. The folder holds steps 1 and 2 before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.runtime.trainer.checkpoint.load import find_checkpoint, load_checkpoint
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def kill_at(number: int, folder: str) -> list[str]:
    """Kill this process at the number-th operation in the folder; return those before it."""
    done: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in WATCHED or not any(folder in str(each) for each in arguments):
            return
        done.append(f"{event} {arguments[0]}")
        if len(done) == number:
            os.write(report, done[-1].encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return done


def save(engine: PlainEngine, folder: Path) -> None:
    engine.step()
    steps = engine.global_steps
    state = RunState(
        steps=steps,
        samples=8 * steps,
        config={},
        micro_batch_plan={"micro_batch_samples": 4},
        client_state={"step": steps},
    )
    save_checkpoint(folder, engine, SingleRankHostGroup(), state)


def found_in(folder: Path, killed_at: str) -> dict:
    """Load as after a restart; save a checkpoint again."""
    engine = PlainEngine()
    engine.module.weight.data.zero_()
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


if __name__ == "__main__":
    target = Path(sys.argv[1])
    saves = target / "saves"
    kills = []
    for number in range(1, 200):
        shutil.rmtree(saves, ignore_errors=True)
        engine = PlainEngine()
        engine.module.weight.data.zero_()
        save(engine, saves)
        save(engine, saves)
        reading, report = os.pipe()
        child = os.fork()
        if child == 0:
            kill_at(number, str(saves))
            save(engine, saves)
            os._exit(0)
        os.close(report)
        _, status = os.waitpid(child, 0)
        killed_at = os.read(reading, 1000).decode()
        os.close(reading)
        kills.append(found_in(saves, killed_at))
        if not os.WIFSIGNALED(status):
            break
    (target / "found.json").write_text(json.dumps(kills))
