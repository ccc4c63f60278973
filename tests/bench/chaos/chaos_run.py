"""The disturbed run of the chaos bench: its host, disk and clock, and what is seen of it.

The run has a network namespace for its link, a tmpfs for its disk, a folder in place of /dev/shm,
and a clock of its own (libfaketime). So no fault reaches anything else on this machine, and what
the run leaves behind can be counted.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench.chaos import fake_clock
from bench.chaos import planned_faults as planned
from bench.chaos.fake_clock import clock_variables, set_clock
from bench.chaos.figure_checks import FigureChecks
from bench.chaos.observations import LAUNCHER, RANKS, Event, PlantedFault, Reading, Scrape
from bench.chaos.planned_faults import Fault
from bench.monitoring_cost.scrape_client import scrape
from bench.monitoring_cost.slow_clients import slow_clients
from lab import two_hosts
from lab.two_hosts import Host, one_host, throttle
from scripts.launching import TWO_RANKS, ZEROWATCH, environment

SCRIPT = Path(__file__).with_name("chaos_job.py")
SERVES = 9464
DISK = "96m"
SLOW_LINK = "20mbit"
CLIENTS_A_RANK = 50
POLL_SECONDS = 0.25
READ_SECONDS = 5.0
# Windows between an order and the window that it is for: all ranks have read it by then.
NOTICE = 40
STEADY_WINDOWS = 5
LOGS = {"RUN_LOG_SEGMENT_BYTES": str(2**20), "RUN_LOG_MAX_SEGMENTS": "4"}


def missing() -> str | None:
    """Return why the bench cannot run here; None if it can."""
    return fake_clock.missing() or two_hosts.missing()


class RunFailedError(RuntimeError):
    """The run ended too early, or does not train any more; the text holds its last output."""


class EventReader:
    """Follows the event logs of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.events: list[list[Event]] = [[] for _ in RANKS]
        self._paths = [folder / f"events-{rank}.jsonl" for rank in RANKS]
        self._offsets = [0 for _ in RANKS]
        self._lock = threading.Lock()

    def update(self) -> list[list[Event]]:
        """Read what was added, and return all events by rank."""
        with self._lock:
            for rank, path in enumerate(self._paths):
                if not path.exists():
                    continue
                with path.open("rb") as file:
                    file.seek(self._offsets[rank])
                    whole = file.read().rpartition(b"\n")[0]
                if whole:
                    self._offsets[rank] += len(whole) + 1
                    self.events[rank] += map(json.loads, whole.splitlines())
            return self.events

    def last(self, rank: int, what: str) -> Event | None:
        """Return a rank's last event of a kind."""
        return next((one for one in reversed(self.events[rank]) if one["what"] == what), None)

    def pid(self, rank: int) -> int | None:
        """Return the process of a rank's last attempt."""
        started = self.last(rank, "started")
        return None if started is None else int(started["pid"])

    def attempt(self, rank: int) -> int:
        """Return the number of a rank's last attempt."""
        started = self.last(rank, "started")
        return -1 if started is None else int(started["attempt"])


@dataclass
class ChaosRun:
    """A run that trains, and the means to disturb it.

    Attributes:
        folder: Orders, event logs and output; `disk` in it is the disk of the run.
        patience_seconds: How long to wait for training to go on.
        readings: What the processes held, at regular times.
        scrapes: Requests of /metrics, at regular times.
        figures: What was wrong with the answers.
    """

    folder: Path
    host: Host
    launcher: subprocess.Popen[bytes]
    patience_seconds: float
    began: float = 0.0
    readings: list[Reading] = field(default_factory=list)
    scrapes: list[Scrape] = field(default_factory=list)
    figures: FigureChecks = field(default_factory=FigureChecks)
    _stop: threading.Event = field(default_factory=threading.Event)
    _num_ooms: int = 0

    def __post_init__(self) -> None:
        self.log = EventReader(self.folder)

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def wait_for_first_step(self) -> None:
        """Wait until all ranks train, from which moment on times count."""
        self._wait_until_steady(time.monotonic())
        self.began = time.monotonic()

    def sleep_until(self, seconds: float) -> None:
        """Wait until so many seconds after the first step."""
        while (left := self.began + seconds - time.monotonic()) > 0:
            self._check_alive()
            time.sleep(min(left, POLL_SECONDS))

    def plant(self, fault: Fault) -> PlantedFault:
        """Let a fault happen, and wait until it is over and all ranks train again."""
        self.log.update()
        attempts = [self.log.attempt(rank) for rank in RANKS]
        began = time.monotonic()
        with self._disturb(fault) as has_happened:
            time.sleep(fault.lasts_seconds)
            self._wait_until(has_happened, f"an effect of {fault.name}")
        ended = time.monotonic()
        self._wait_until_steady(ended)
        return PlantedFault(
            fault=fault,
            began=began,
            ended=ended,
            recovered=time.monotonic(),
            restarts=max(self.log.attempt(rank) - attempts[rank] for rank in RANKS),
        )

    def end(self) -> int:
        """Let the training end in good order; return the exit code of the launcher."""
        self.log.update()
        _order(self.folder / "end.json", {"step": self._last_step() + NOTICE})
        try:
            return self.launcher.wait(self.patience_seconds)
        except subprocess.TimeoutExpired as error:
            raise RunFailedError(f"the run did not end:\n{self.output()[-3000:]}") from error
        finally:
            self._stop.set()
            self.log.update()

    def observe(self) -> None:
        """Read processes and /metrics at regular times until the run ends; for a thread."""
        interval = READ_SECONDS
        while not self._stop.wait(interval):
            self.log.update()
            self._read_process(LAUNCHER, self.launcher.pid)
            for rank in RANKS:
                pid = self.log.pid(rank)
                if pid is not None:
                    self._read_process(rank, pid)
                    self._scrape(rank, pid)

    def _read_process(self, rank: int, pid: int) -> None:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            with process.oneshot():
                self.readings.append(
                    Reading(
                        at=time.monotonic(),
                        rank=rank,
                        pid=pid,
                        resident_bytes=process.memory_info().rss,
                        descriptors=process.num_fds(),
                        threads=process.num_threads(),
                    )
                )

    def _scrape(self, rank: int, pid: int) -> None:
        began, text, error = time.monotonic(), "", None
        try:
            text = scrape(f"{self.host.management_address}:{SERVES + rank}")[0]
        except (OSError, http.client.HTTPException, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        self.log.update()
        if self.log.pid(rank) != pid:  # another process may have answered
            return
        self.scrapes.append(Scrape(at=began, seconds=seconds, error=error))
        if error is None:
            self.figures.add(rank, pid, text)

    @contextmanager
    def _disturb(self, fault: Fault) -> Iterator[Callable[[], bool]]:
        """Hold a fault; yield a function that returns whether it has had its effect."""
        with ExitStack() as undo:
            yield self._begin(fault, undo)

    def _begin(self, fault: Fault, undo: ExitStack) -> Callable[[], bool]:
        match fault.kind:
            case planned.KILL:
                return self._kill(_rank_of(fault))
            case planned.STOP:
                pid = self._pid(_rank_of(fault))
                os.kill(pid, signal.SIGSTOP)
                undo.callback(_signal, pid, signal.SIGCONT)
            case planned.SLOW_LINK:
                throttle([self.host], SLOW_LINK)
                undo.callback(throttle, [self.host], None)
            case planned.FULL_DISK:
                undo.enter_context(_full(self.disk / "filling"))
                return self._has_refused_to_save()
            case planned.OUT_OF_MEMORY:
                return self._run_out_of_memory(_rank_of(fault), fault.detail)
            case planned.NAN_BATCH:
                return self._order_nan(_rank_of(fault))
            case planned.SLOW_CLIENTS:
                for rank in RANKS:
                    address = f"{self.host.management_address}:{SERVES + rank}"
                    undo.enter_context(slow_clients(address, CLIENTS_A_RANK))
            case planned.CLOCK_JUMP:
                set_clock(self.folder, fault.detail)
                undo.callback(set_clock, self.folder, "+0")
                return self._has_jumped(float(fault.detail))
            case _:
                raise ValueError(f"{fault.kind}: no such fault")
        return lambda: True

    def _kill(self, rank: int) -> Callable[[], bool]:
        before = [self.log.attempt(each) for each in RANKS]
        os.kill(self._pid(rank), signal.SIGKILL)

        def is_restarted() -> bool:
            self.log.update()
            return all(self.log.attempt(each) > before[each] for each in RANKS)

        return is_restarted

    def _run_out_of_memory(self, rank: int, place: str) -> Callable[[], bool]:
        self._num_ooms += 1
        number = self._num_ooms
        _order(self.folder / "oom.json", {"number": number, "rank": rank, "place": place})

        def has_run_out() -> bool:
            """Whether the rank has committed a window after the one that ran out."""
            self.log.update()
            scarce = self.log.last(rank, "scarce")
            committed = self.log.last(rank, "committed")
            happened = scarce is not None and scarce["number"] == number
            return happened and committed is not None and committed["at"] > scarce["at"]

        return has_run_out

    def _order_nan(self, rank: int) -> Callable[[], bool]:
        path = self.folder / "nan.json"
        ordered: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        committed = self.log.last(rank, "committed")
        assert committed is not None
        position = committed["position"] + NOTICE
        _order(path, ordered | {str(position): rank})

        def is_skipped() -> bool:
            self.log.update()
            skips = [self.log.last(each, "skipped") for each in RANKS]
            return all(one is not None and one["position"] >= position for one in skips)

        return is_skipped

    def _has_refused_to_save(self) -> Callable[[], bool]:
        began = time.monotonic()

        def has_refused() -> bool:
            self.log.update()
            refused = [self.log.last(rank, "not_saved") for rank in RANKS]
            return all(one is not None and one["at"] > began for one in refused)

        return has_refused

    def _has_jumped(self, seconds: float) -> Callable[[], bool]:
        began = time.monotonic()

        def has_jumped() -> bool:
            """Whether a rank has logged a time that is off by about so many seconds."""
            difference = time.time() - time.monotonic() + seconds
            self.log.update()
            last = [self.log.last(rank, "committed") for rank in RANKS]
            return any(
                one is not None
                and one["at"] > began
                and abs(one["at_unix_seconds"] - one["at"] - difference) < 60.0
                for one in last
            )

        return has_jumped

    def _pid(self, rank: int) -> int:
        pid = self.log.pid(rank)
        assert pid is not None
        return pid

    def _last_step(self) -> int:
        done = (self.log.last(rank, "committed") for rank in RANKS)
        return max(0 if one is None else int(one["step"]) for one in done)

    def _wait_until_steady(self, since: float) -> None:
        """Wait until each rank has committed some windows in its last attempt since a moment."""
        self._wait_until(
            lambda: all(self._num_committed(rank, since) >= STEADY_WINDOWS for rank in RANKS),
            "training to go on",
        )

    def _num_committed(self, rank: int, since: float) -> int:
        number = 0
        for event in reversed(self.log.update()[rank]):
            if event["at"] <= since or event["what"] == "started":
                break
            number += event["what"] == "committed"
        return number

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.patience_seconds
        while not condition():
            self._check_alive()
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"waited {self.patience_seconds:.0f} s for {what}:\n{self.output()[-3000:]}"
                )
            time.sleep(POLL_SECONDS)

    def _check_alive(self) -> None:
        if self.launcher.poll() is not None:
            raise RunFailedError(
                f"the run ended with code {self.launcher.returncode}:\n{self.output()[-3000:]}"
            )


@contextmanager
def chaos_run(folder: Path, *, max_restarts: int, patience_seconds: float) -> Iterator[ChaosRun]:
    """Start a run on a host of its own, and end it in any case.

    Args:
        folder: An empty folder.
        max_restarts: Of the launcher.
        patience_seconds: How long training may stand still before the run has failed.
    """
    for name in ("disk", "shm", "temporary"):
        (folder / name).mkdir()
    variables = {**clock_variables(folder), "TMPDIR": str(folder / "temporary")}
    with ExitStack() as undo:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder / "disk")]
        subprocess.run(mount, check=True)
        undo.callback(subprocess.run, ["umount", "--lazy", str(folder / "disk")], check=False)
        host = undo.enter_context(one_host())
        output = undo.enter_context((folder / "output.txt").open("wb"))
        command = launch_command("--max-restarts", max_restarts, SCRIPT, folder)
        # `ip netns exec` gives the command mounts of its own.
        inside = ["sh", "-c", 'mount --bind "$0" /dev/shm && exec env "$@"', folder / "shm"]
        process = subprocess.Popen(
            host.command(*inside, *(f"{name}={value}" for name, value in variables.items()))
            + command,
            cwd=folder,
            env=environment(
                ZEROWATCH_SERVE_HOST="0.0.0.0",
                ZEROWATCH_SERVE_PORT=str(SERVES),
                ZEROWATCH_RUN_LOG_FOLDER=str(folder / "disk" / "runs"),
                **{f"ZEROWATCH_{name}": value for name, value in LOGS.items()},
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        undo.callback(_kill_all, host)
        undo.callback(process.wait)
        undo.callback(process.kill)
        run = ChaosRun(folder, host, process, patience_seconds)
        observer = threading.Thread(target=run.observe, daemon=True)
        undo.callback(observer.join)
        undo.callback(run._stop.set)
        observer.start()
        yield run


def launch_command(*arguments: object) -> list[str]:
    """Return the command line of two ranks on one host."""
    return [ZEROWATCH, "run", *TWO_RANKS, *map(str, arguments)]


def processes_of(host: Host) -> list[int]:
    """Return the processes that run on a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


def train_undisturbed(folder: Path, plan: Mapping[str, Any], timeout_seconds: float) -> None:
    """Train as a plan says, without monitoring, faults, saves and restarts.

    Raises:
        RunFailedError: The run failed, or did not end in time.
    """
    _order(folder / "plan.json", plan)
    process = subprocess.Popen(
        launch_command(SCRIPT, folder, folder / "plan.json"),
        cwd=folder,
        env=environment(ZEROWATCH_ENABLED="false"),
        stdout=(folder / "output.txt").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code: int | None = process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code != 0:
        output = (folder / "output.txt").read_text(errors="replace")[-3000:]
        raise RunFailedError(f"the undisturbed run ended with code {code}:\n{output}")


@contextmanager
def _full(file: Path) -> Iterator[None]:
    """Keep the file system of a file full, also if something else on it is deleted."""
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(file, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        file.unlink(missing_ok=True)


def _fill(file: Path, stop: threading.Event) -> None:
    with file.open("wb", buffering=0) as filling:
        while not stop.is_set():
            try:
                filling.write(bytes(2**16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                stop.wait(0.1)


def _order(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file so that a reader finds it whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def _rank_of(fault: Fault) -> int:
    assert fault.rank is not None
    return fault.rank


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_all(host: Host) -> None:
    pids: Sequence[int] = processes_of(host)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
