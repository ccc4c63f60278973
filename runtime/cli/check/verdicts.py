"""What a check finds, and how a check is run: bounded in time, and without stopping the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from ....metrics.settings import Settings


class Verdict(StrEnum):
    """Result of a check, from best to worst.

    Attributes:
        NOT_APPLICABLE: The subject does not exist here, such as a GPU.
        WARNING: The run works, but is slower, or loses something.
        FAILED: The run does not start, waits forever, or fails later.
    """

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


SEVERITY = {verdict: number for number, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result.

    Attributes:
        text: What was found, and where.
        advice: What to do; empty if nothing.
        figures: What was measured, in base units, by name.
        check: Name of the check.
        where: Host, or host and rank; empty where there is one only.
    """

    verdict: Verdict
    text: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    check: str = ""
    where: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self) | {"verdict": self.verdict.value}


def ok(text: str, **figures: float) -> Finding:
    """Return that all is well."""
    return Finding(verdict=Verdict.OK, text=text, figures=figures)


def skipped(text: str) -> Finding:
    """Return that there is nothing to check here."""
    return Finding(verdict=Verdict.NOT_APPLICABLE, text=text)


def warning(text: str, advice: str, **figures: float) -> Finding:
    """Return a fault with which the run works."""
    return Finding(verdict=Verdict.WARNING, text=text, advice=advice, figures=figures)


def failed(text: str, advice: str, **figures: float) -> Finding:
    """Return a fault with which the run does not work."""
    return Finding(verdict=Verdict.FAILED, text=text, advice=advice, figures=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that is to run, as far as it is known.

    Attributes:
        is_rank: Whether a launcher has started this process as a rank of the job.
        local_ranks: Ranks on this host.
        local_ranks_given: Whether the launcher or an option gives `local_ranks`.
        world_size: Ranks of the job; None if it is not known.
        num_hosts: Hosts of the job; None before its ranks have connected.
        driver_answers: Whether the driver of the GPUs answers. If not, a call of it may never end.
        ds_config: Path of the ds config; None without one.
        settings: Those of zerowatch; the defaults if they cannot be read.
        settings_error: Why they cannot be read.
    """

    is_rank: bool = False
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
    local_ranks_given: bool = False
    world_size: int | None = None
    num_hosts: int | None = None
    driver_answers: bool = True
    ds_config: str | None = None
    settings: Settings = field(default_factory=Settings)
    settings_error: str | None = None

    @property
    def has_other_ranks(self) -> bool:
        """Whether this process is one of several ranks."""
        return self.is_rank and (self.world_size or 1) > 1

    @property
    def has_other_hosts(self) -> bool:
        """Whether ranks of the job are on other hosts, as far as it is known."""
        if self.num_hosts is not None:
            return self.num_hosts > 1
        return (self.world_size or 1) > self.local_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        limit_seconds: Time after which the check counts as failed.
        run: Yields findings.
        each_rank: Whether all ranks run it, or only the first of each host.
        uses_driver: Whether it calls the driver of the GPUs, also by an import of DeepSpeed.
    """

    name: str
    limit_seconds: float
    run: Callable[[Job], Iterable[Finding]]
    each_rank: bool = False
    uses_driver: bool = False


@dataclass(slots=True)
class Runner:
    """Runs checks one after the other.

    Attributes:
        hung: Checks that have not ended in time. Their threads still run.
    """

    hung: list[str] = field(default_factory=list)

    def run(self, check: Check, job: Job) -> list[Finding]:
        """Return the findings of a check, with its name. An error of the check is a finding."""
        if check.uses_driver and not job.driver_answers:
            return [replace(skipped("the driver of the GPUs does not answer"), check=check.name)]
        return self.call(check.name, check.limit_seconds, lambda: check.run(job))

    def call(
        self,
        name: str,
        limit_seconds: float,
        body: Callable[[], Iterable[Finding]],
        timed_out: Finding | None = None,
    ) -> list[Finding]:
        """Return what `body` yields within a time, as findings of the check `name`.

        Args:
            name: The check.
            limit_seconds: Time after which `body` is not waited for.
            body: Yields findings.
            timed_out: Added after that time; by default a finding that only names the time.
        """
        found: list[Finding] = []

        def collect() -> None:
            for finding in body():  # one by one: those before a timeout count
                found.append(finding)

        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"check {name}")
        future = pool.submit(collect)
        wait([future], timeout=limit_seconds)
        pool.shutdown(wait=False)
        if not future.done():
            self.hung.append(name)
            found = [*found, timed_out or _timed_out(limit_seconds)]
        elif (error := future.exception()) is not None:
            found.append(_broken(error))
        return [replace(finding, check=name) for finding in found]


def _timed_out(limit_seconds: float) -> Finding:
    return failed(
        f"not done after {limit_seconds:g} s",
        "a driver, a file system or a network does not answer: look at `dmesg` and at the mounts "
        "of this host",
    )


def _broken(error: BaseException) -> Finding:
    reason = " ".join(str(error).split())
    return failed(
        f"could not be checked: {type(error).__name__}: {reason}",
        "correct what the error names; if it names nothing of yours, please report it",
    )
