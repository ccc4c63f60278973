"""Checks between the ranks: the same versions, clocks, and the links between their hosts.

The ranks use a gloo group of all ranks for the checks themselves. Links are measured over the
backend of training: NCCL between GPUs, otherwise gloo.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common import accelerator
from ...common.gloo_interface import gloo_interface_chosen
from .verdicts import Finding, Job, Verdict, failed, ok, skipped, warning

GIGABIT = 1e9 / 8  # bytes per second
RECOMMENDED_BYTES_PER_SECOND = 10 * GIGABIT
# Below this, ZeRO waits for communication most of the time with any model.
LEAST_BYTES_PER_SECOND = 1 * GIGABIT
HIGH_LATENCY_SECONDS = 1e-3
# Traces of the ranks are drawn side by side by their clocks; alerts compare the clock of rank 0
# with that of Prometheus.
SKEW_SECONDS = 0.1
LARGE_SKEW_SECONDS = 5.0
SLOW_RATIO = 0.8

CONNECT_SECONDS = 60.0
# All ranks wait for the host whose checks take longest.
HOST_CHECKS_SECONDS = 660.0
# Above the limit of `check_links`: after this time NCCL's watchdog ends the process.
_NCCL_SECONDS = 180.0
_CLOCK_EXCHANGES = 10
_LATENCY_EXCHANGES = 30
_FIRST_BYTES = 2**16
_LARGEST_BYTES = 2**28
_ENOUGH_SECONDS = 0.25  # a transfer this long is measured well
_MATMUL = "flops_per_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: Name of the host.
        device: Product name of the rank's GPU; empty on CPU, and for a rank without a GPU of its
            own, with which NCCL refuses to connect.
        versions: Versions that must be equal on all ranks.
    """

    rank: int
    host: str
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)


class Ranks:
    """All ranks of the job that runs the check.

    Attributes:
        rank: This rank.
        local_rank: This rank among those of its host: the index of its GPU.
        local_ranks: Ranks on this host that see the same GPUs. Those of several agents, whose local
            ranks are equal, do not add up.
        places: The ranks, in order; empty before `meet`.
        hosts: The first rank of each host, in order.
    """

    def __init__(self, job: Job) -> None:
        """Connect the ranks. No device is used before `meet`.

        Raises:
            RuntimeError: They do not all connect in time.
        """
        assert job.world_size is not None
        with gloo_interface_chosen(job.world_size):
            dist.init_process_group(
                "gloo",
                timeout=timedelta(seconds=CONNECT_SECONDS),
                rank=job.rank,
                world_size=job.world_size,
            )
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=HOST_CHECKS_SECONDS)
            )
        self.rank = job.rank
        self.local_rank = job.local_rank
        self.places: list[Place] = []
        own = (_machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        found = self.gather((*own, job.local_rank))
        self.local_ranks = len({each for each in found if each[:2] == own})
        machines = [machine for machine, *_ in found]
        first: dict[str, int] = {}
        for rank, machine in enumerate(machines):
            first.setdefault(machine, rank)
        self.hosts = list(first.values())

    def meet(self, job: Job) -> tuple[()]:
        """Wait until the hosts are checked, and exchange the places. Return no finding."""
        self.places = self.gather(_this_place(job))
        return ()

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value, by rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> tuple[()]:
        """Wait for all ranks. Return no finding."""
        dist.barrier(self._group)
        return ()

    def name(self, rank: int) -> str:
        """Return a rank with its host."""
        return f"rank {rank} ({self.places[rank].host})"

    def close(self) -> tuple[()]:
        """Wait until all ranks are done, and leave the groups. Return no finding.

        A launcher ends the other ranks as soon as one has exited with an error.
        """
        with suppress(RuntimeError):
            self.barrier()
            dist.destroy_process_group()
        return ()


def _this_place(job: Job) -> Place:
    device, name = accelerator.current, ""
    if job.driver_answers and device.is_available() and job.local_rank < device.device_count():
        name = device.device_name(job.local_rank)
    return Place(
        rank=job.rank,
        host=socket.gethostname(),
        device=name,
        versions=_versions(),
    )


def _machine() -> str:
    """Identify this machine and its network: containers may share the one, but not the other."""
    boot_id, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot_id.read_text().strip()} {os.readlink(network)}"
    except OSError:
        return socket.gethostname()


def _versions() -> dict[str, str]:
    names = ("torch", "deepspeed", "zerowatch", "numpy")
    found = {"Python": platform.python_version(), **{name: version(name) for name in names}}
    if torch.version.cuda and dist.is_nccl_available():
        found["CUDA"] = torch.version.cuda
        found["NCCL"] = ".".join(map(str, accelerator.current.module.nccl.version()))
    return found


# The functions below run on all ranks, in the same order. Each yields findings on rank 0 only. Each
# runs in a new thread, whose current device is 0.


def check_same_versions(ranks: Ranks) -> Iterator[Finding]:
    """Compare the versions of all ranks."""
    if ranks.rank != 0:
        return
    usual, differs = ranks.places[0].versions, False
    for name, expected in usual.items():
        others = [place for place in ranks.places if place.versions.get(name) != expected]
        if others:
            differs = True
            found = others[0].versions.get(name)
            yield failed(
                f"{name} {expected} on {ranks.name(0)}, but {found} on "
                f"{_names(ranks, [place.rank for place in others])}",
                "install the same version on all hosts",
            )
    if not differs:
        yield ok(f"the same versions on all {len(ranks.places)} ranks")


def check_clocks(ranks: Ranks) -> Iterator[Finding]:
    """Compare the clock of each host, or of each rank on a single host, with that of rank 0."""
    others = ranks.hosts[1:] or list(range(1, len(ranks.places)))
    if ranks.rank == 0:
        yield from _about_clocks(ranks, _offsets(others))
    elif ranks.rank in others:
        _answer(0)


def _offsets(others: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return the offset of each clock from this one, and its error, in seconds.

    The remote clock is read between two readings of the own clock. The exchange with the shortest
    way there and back has the smallest error, as in NTP (RFC 5905).
    """
    found = {}
    for other in others:
        readings = []
        for _ in range(_CLOCK_EXCHANGES):
            answer = torch.zeros(1, dtype=torch.float64)
            before = time.time()
            dist.send(answer, other)
            dist.recv(answer, other)
            after = time.time()
            readings.append(((after - before) / 2, answer.item() - (before + after) / 2))
        error, offset = min(readings)
        found[other] = offset, error
    return found


def _answer(asker: int) -> None:
    for _ in range(_CLOCK_EXCHANGES):
        question = torch.zeros(1, dtype=torch.float64)
        dist.recv(question, asker)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), asker)


def _about_clocks(ranks: Ranks, offsets: dict[int, tuple[float, float]]) -> Iterator[Finding]:
    advice = "synchronize the clocks: chronyd or systemd-timesyncd on each host (timedatectl)"
    skewed = False
    for rank, (offset, error) in offsets.items():
        # Certainly beyond the limit, whatever the way there and back took.
        skew = abs(offset) - error
        if skew < SKEW_SECONDS:
            continue
        skewed = True
        report = failed if skew >= LARGE_SKEW_SECONDS else warning
        direction = "ahead of" if offset > 0 else "behind"
        yield report(
            f"the clock of {ranks.name(rank)} is {abs(offset):.3g} s {direction} that of "
            f"{ranks.name(0)}: traces of the ranks do not line up, and alerts on silence are wrong",
            advice,
            offset_seconds=offset,
        )
    if not skewed:
        largest = max(abs(offset) for offset, _ in offsets.values())
        error = max(error for _, error in offsets.values())
        yield ok(
            f"the clocks differ by at most {largest * 1e3:.2g} ms (+-{error * 1e3:.2g} ms)",
            offset_seconds=largest,
        )


def check_links(ranks: Ranks) -> Iterator[Finding]:
    """Measure the link between each host and the next one, no host in two transfers at once."""
    between_hosts = len(ranks.hosts) > 1
    pairs = neighbors(ranks.hosts if between_hosts else [0, 1])
    measured: list[tuple[int, int, float, float]] = []
    link = _Link(ranks)
    for pairs_at_once in rounds_of(pairs):
        for first, second in pairs_at_once:
            if ranks.rank == first:
                latency, rate = link.measure(second)
                measured.append((first, second, latency, rate))
            elif ranks.rank == second:
                link.serve(first)
        ranks.barrier()
    every = [each for found in ranks.gather(measured) for each in found]
    if ranks.rank == 0:
        if not between_hosts:
            yield skipped("link between hosts: all ranks are on one host")
        for first, second, latency, rate in sorted(every):
            ends_named = f"{ranks.name(first)} to {ranks.name(second)} by {link.backend}"
            yield link_finding(ends_named, latency, rate, between_hosts=between_hosts)


def neighbors(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return each end with the next one, and the last with the first."""
    return [*pairwise(ends), *([(ends[-1], ends[0])] if len(ends) > 2 else [])]


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs into rounds in which no rank is in two pairs."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = [each for each in rounds if not any(set(pair) & set(other) for other in each)]
        if free:
            free[0].append(pair)
        else:
            rounds.append([pair])
    return rounds


def link_finding(
    ends: str, latency_seconds: float, bytes_per_second: float, *, between_hosts: bool
) -> Finding:
    """Compare a link with the recommendation.

    Args:
        ends: The two ends, and the backend.
        latency_seconds: Time of a small message, one way.
        bytes_per_second: Rate of a large message.
        between_hosts: Whether the ends are on different hosts. Only then there is a recommendation.
    """
    gigabits = bytes_per_second / GIGABIT
    text = f"{ends}: {gigabits:.3g} Gb/s, latency {latency_seconds * 1e6:.3g} us"
    figures = {"bytes_per_second": bytes_per_second, "latency_seconds": latency_seconds}
    advice = (
        "check which interface is used (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME), its "
        "speed (ethtool) and who else uses the link; `zerowatch estimate` shows what a step sends"
    )
    if not between_hosts:
        return ok(text, **figures)
    if bytes_per_second < LEAST_BYTES_PER_SECOND:
        return failed(f"{text}; slow link, 10 Gb/s are recommended", advice, **figures)
    if bytes_per_second < RECOMMENDED_BYTES_PER_SECOND:
        return warning(f"{text}; 10 Gb/s are recommended", advice, **figures)
    if latency_seconds > HIGH_LATENCY_SECONDS:
        return warning(
            f"{text}; a latency below 1 ms is usual in one data center",
            "place the hosts in one zone, or make fewer and larger collectives "
            "(reduce_bucket_size)",
            **figures,
        )
    return ok(text, **figures)


class _Link:
    """Measures the link to another rank with the backend of training."""

    def __init__(self, ranks: Ranks) -> None:
        on_gpus = all(place.device for place in ranks.places) and dist.is_nccl_available()
        self.backend = "nccl" if on_gpus else "gloo"
        self._device = "cpu"
        if on_gpus:
            self._device = f"{accelerator.current.kind}:{ranks.local_rank}"
            # NCCL refuses two ranks of a host on one device.
            accelerator.current.module.set_device(ranks.local_rank)
        self._group = (
            dist.new_group(backend="nccl", timeout=timedelta(seconds=_NCCL_SECONDS))
            if on_gpus
            else None
        )

    def measure(self, other: int) -> tuple[float, float]:
        """Return the latency in seconds and the rate in bytes per second to a rank that serves."""
        self._exchange(other, 1)  # connects
        latency = statistics.median(self._exchange(other, 1) / 2 for _ in range(_LATENCY_EXCHANGES))
        num_bytes, seconds = _FIRST_BYTES, 0.0
        while True:
            seconds = self._exchange(other, num_bytes)
            if seconds >= _ENOUGH_SECONDS or num_bytes >= _LARGEST_BYTES:
                break
            # At most 8 times as large, because a slow link may have a buffer.
            factor = min(8.0, 1.5 * _ENOUGH_SECONDS / max(seconds, 1e-6))
            num_bytes = min(_LARGEST_BYTES, max(2 * num_bytes, int(num_bytes * factor)))
        self._send(torch.zeros(1, dtype=torch.int64), other)  # ends `serve`
        return latency, num_bytes / max(seconds - 2 * latency, seconds / 2)

    def serve(self, other: int) -> None:
        """Receive what a measuring rank sends, and confirm it."""
        while True:
            size = torch.zeros(1, dtype=torch.int64)
            size = self._receive(size, other)
            num_bytes = int(size.item())
            if num_bytes == 0:
                return
            data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            self._send(torch.zeros(1, dtype=torch.uint8), other)  # ready
            self._receive(data, other)
            self._send(torch.zeros(1, dtype=torch.uint8), other)

    def _exchange(self, other: int, num_bytes: int) -> float:
        """Return the seconds until a message has been confirmed."""
        self._send(torch.tensor([num_bytes], dtype=torch.int64), other)
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._receive(torch.zeros(1, dtype=torch.uint8), other)
        began = time.perf_counter()
        self._send(data, other)
        self._receive(torch.zeros(1, dtype=torch.uint8), other)
        return time.perf_counter() - began

    def _send(self, data: torch.Tensor, other: int) -> None:
        dist.send(data.to(self._device), other, group=self._group)

    def _receive(self, into: torch.Tensor, other: int) -> torch.Tensor:
        into = into.to(self._device)
        dist.recv(into, other, group=self._group)
        self._synchronize()
        return into

    def _synchronize(self) -> None:
        if self._device != "cpu":
            accelerator.current.module.synchronize()


def slow_ranks(ranks: Ranks, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Name the ranks whose GPU is slower than that of the median rank, with the same GPU.

    Args:
        ranks: All ranks.
        findings: The findings of all ranks, on rank 0.
    """
    rates = {each.where: each.figures[_MATMUL] for each in findings if _MATMUL in each.figures}
    devices = {place.device for place in ranks.places}
    if len(rates) < 2 or len(devices) > 1 or devices == {""}:  # cores of a CPU may be shared
        return
    median = statistics.median(rates.values())
    for where, rate in rates.items():
        if rate < SLOW_RATIO * median:
            yield warning(
                f"{where} computes at {rate / median:.0%} of the median rank's rate; all ranks "
                "wait for it",
                "look at its clocks and temperature: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
            )


def _names(ranks: Ranks, numbers: Sequence[int]) -> str:
    shown = ", ".join(ranks.name(number) for number in numbers[:3])
    return shown if len(numbers) <= 3 else f"{shown} and {len(numbers) - 3} more"


BETWEEN_RANKS: tuple[tuple[str, float, Callable[[Ranks], Iterator[Finding]]], ...] = (
    ("same versions", 30.0, check_same_versions),
    ("clocks", 60.0, check_clocks),
    ("links", 150.0, check_links),
)


def connect_fault(job: Job, error: BaseException) -> Finding:
    """Explain why the ranks did not connect."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    reason = str(error).strip().partition("\n")[0]
    return Finding(
        verdict=Verdict.FAILED,
        text=f"the {job.world_size} ranks did not connect over {address} within "
        f"{CONNECT_SECONDS:g} s: {reason}",
        advice="check that all ranks were started, that the hosts reach that address and each "
        "other (firewall), and set GLOO_SOCKET_IFNAME to the interface between them",
    )
