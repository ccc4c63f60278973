"""Lists all checks in the order of the table, and runs them on one process or on all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....errors import ZerowatchError
from ....metrics.settings import load_settings
from ...common.ds_config import ZEROWATCH_KEY, read_config
from .ds_settings import check_ds_config
from .hardware import check_accelerator, check_allocator, check_nvml, check_speed
from .host import check_disk, check_limits, check_ports
from .software import check_builds, check_compiler, check_environment, check_versions
from .verdicts import SEVERITY, Check, Finding, Job, Runner, Verdict, skipped

if TYPE_CHECKING:
    from .between_ranks import Ranks

# Importing DeepSpeed takes seconds, on a network file system tens of seconds.
CHECKS = (
    Check(name="versions", limit_seconds=60, run=check_versions),
    Check(name="accelerator", limit_seconds=120, run=check_accelerator),
    Check(name="NVML", limit_seconds=30, run=check_nvml),
    Check(name="allocator", limit_seconds=30, run=check_allocator),
    Check(name="compiler", limit_seconds=30, run=check_compiler),
    Check(name="builds", limit_seconds=30, run=check_builds),
    Check(name="environment", limit_seconds=30, run=check_environment),
    Check(name="ports", limit_seconds=30, run=check_ports),
    Check(name="run folder", limit_seconds=30, run=check_disk),
    Check(name="host limits", limit_seconds=30, run=check_limits),
    Check(name="ds config", limit_seconds=60, run=check_ds_config),
    Check(name="speed", limit_seconds=60, run=check_speed, each_rank=True),
)
_ORDER = {check.name: number for number, check in enumerate(CHECKS)}
_ALONE = "there is one process; give --nproc, or start it with the launcher of the job"


def job_of_environment(ds_config: str | None, local_ranks: int | None) -> Job:
    """Return the job that a launcher's variables and the options describe.

    Args:
        ds_config: Path of the ds config; None without one.
        local_ranks: Ranks on this host; None to read LOCAL_WORLD_SIZE, else one per GPU.
    """
    environ = os.environ
    world_size = int(environ["WORLD_SIZE"]) if "WORLD_SIZE" in environ else None
    if local_ranks is None:
        local_ranks = int(environ.get("LOCAL_WORLD_SIZE", 0)) or None
    if local_ranks is None:
        from ...common import accelerator

        local_ranks = 1 if world_size else max(1, accelerator.current.device_count())
    job = Job(
        rank=int(environ.get("RANK", 0)),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_ranks=local_ranks,
        world_size=world_size,
        ds_config=ds_config,
    )
    try:
        job = replace(job, settings=load_settings())
    except ZerowatchError as error:
        return replace(job, settings_error=str(error))
    block = {} if ds_config is None else read_config(ds_config).get(ZEROWATCH_KEY, {})
    with suppress(ZerowatchError):  # the check of the ds config reports it
        job = replace(job, settings=load_settings(ds_block=block))
    return job


def check_alone(job: Job, runner: Runner) -> list[Finding]:
    """Run all checks of one process."""
    found = [each for check in CHECKS for each in runner.run(check, job)]
    return [*found, replace(skipped(_ALONE), check="between ranks")]


def check_together(job: Job, runner: Runner) -> tuple[list[Finding], Ranks | None]:
    """Run all checks on all ranks, which call this together.

    Returns:
        The findings of all ranks, on each rank, and the ranks, which the caller closes. If they do
        not connect, the findings of this rank alone, and None.
    """
    from . import between_ranks

    own = [
        replace(each, where=socket.gethostname() if not check.each_rank else f"rank {job.rank}")
        for check in CHECKS
        if check.each_rank or job.local_rank == 0
        for each in runner.run(check, job)
    ]
    connected: list[between_ranks.Ranks] = []

    def connect() -> Iterable[Finding]:
        try:
            connected.append(between_ranks.Ranks(job))
        except (RuntimeError, ZerowatchError) as error:
            yield between_ranks.connect_fault(job, error)

    # torch tries again after its own timeout.
    limit_seconds = between_ranks.CONNECT_SECONDS + 5
    late = between_ranks.connect_fault(job, TimeoutError("timed out"))
    faults = runner.call("connection", limit_seconds, connect, late)
    if not connected:
        return [*own, *faults], None
    ranks = connected[0]
    for name, limit_seconds, check_ranks in between_ranks.BETWEEN_RANKS:
        own += runner.call(name, limit_seconds, partial(check_ranks, ranks))
    gathered: list[Finding] = []
    faults = runner.call("connection", 60, partial(_exchange, ranks, own, gathered))
    return merged([*gathered, *faults] if gathered else [*own, *faults]), ranks


def _exchange(ranks: Ranks, own: Sequence[Finding], into: list[Finding]) -> Iterable[Finding]:
    from .between_ranks import slow_ranks

    found = [each for of_rank in ranks.gather(list(own)) for each in of_rank]
    into += [*found, *(replace(each, check="speed") for each in slow_ranks(ranks, found))]
    return ()


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Join equal findings of several hosts or ranks, in the order of the checks."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for each in findings:
        alike.setdefault((each.check, each.verdict, each.text), []).append(each)
    joined = [
        replace(first, where=_places([each.where for each in (first, *others)]))
        for first, *others in alike.values()
    ]
    return sorted(joined, key=lambda each: _ORDER.get(each.check, len(_ORDER)))


def _places(places: Sequence[str]) -> str:
    shown = ", ".join(dict.fromkeys(places[:3]))
    return shown if len(places) <= 3 else f"{shown} and {len(places) - 3} more"


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """Return 1 if a check has failed, or with `strict` if one warns; else 0."""
    least = Verdict.WARNING if strict else Verdict.FAILED
    return int(any(SEVERITY[each.verdict] >= SEVERITY[least] for each in findings))
