"""Background processes that outlive the command that started them; a later one stops them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

STOP_SECONDS = 10.0
_START_TOLERANCE_SECONDS = 2.0  # the kernel counts starts from its boot, whose time is adjusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process started here; `started` is a Unix time, because a pid may be reused."""

    name: str
    pid: int
    started: float
    command: list[str]


class NativeProcesses:
    """The processes noted down in `stack.json` of a folder, where their logs are too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notes = folder / "stack.json"

    def known(self) -> list[Child]:
        """Return those noted down, whether they still run or not."""
        try:
            return [Child(**note) for note in json.loads(self._notes.read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def start(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start each command by its name, with its output in a log."""
        children: list[Child] = []
        for name, command in commands.items():
            with self.log(name).open("a") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in this terminal is not meant for it
                )
            started = psutil.Process(process.pid).create_time()
            child = Child(name=name, pid=process.pid, started=started, command=list(command))
            children.append(child)
            # After each, so that `stop` finds those that run, whatever happens to the next.
            self._notes.write_text(json.dumps([asdict(each) for each in children], indent=2) + "\n")

    def stop(self) -> int:
        """Stop those that run and are ours, and return how many. Safe to call twice."""
        found = [process for child in self.known() if (process := process_of(child))]
        for process in found:
            process.terminate()
        _, stubborn = psutil.wait_procs(found, timeout=STOP_SECONDS)
        for process in stubborn:
            process.kill()
        psutil.wait_procs(stubborn, timeout=STOP_SECONDS)
        self._notes.unlink(missing_ok=True)
        return len(found)

    def log(self, name: str) -> Path:
        """Return the file that holds a process's output."""
        return self._folder / f"{name}.log"


def process_of(child: Child) -> psutil.Process | None:
    """Return the process if it still runs and is the one we started, not a later one of its pid."""
    try:
        process = psutil.Process(child.pid)
        same_start = abs(process.create_time() - child.started) < _START_TOLERANCE_SECONDS
        is_ours = same_start and _ends_with(process.cmdline(), child.command[1:])
    except psutil.Error:
        return None
    return process if is_ours and process.status() != psutil.STATUS_ZOMBIE else None


def _ends_with(command: Sequence[str], arguments: Sequence[str]) -> bool:
    """Compare arguments only: what is on PATH may be a script that starts the program proper."""
    return list(command[len(command) - len(arguments) :]) == list(arguments)
