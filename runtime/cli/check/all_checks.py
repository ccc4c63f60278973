"""Lists all checks in the order of the table, and runs them on one process or on all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ....errors import ZerowatchError
from ....metrics.settings import load_settings
from ...common.ds_config import ZEROWATCH_KEY, read_config
from ...common.gloo_interface import local_place
from .ds_settings import check_ds_config
from .hardware import (
    check_accelerator,
    check_allocator,
    check_nvml,
    check_speed,
    driver_answers,
)
from .host import check_disk, check_limits, check_ports
from .software import check_builds, check_compiler, check_environment, check_versions
from .verdicts import SEVERITY, Check, Finding, Job, Runner, Verdict, skipped

if TYPE_CHECKING:
    from .between_ranks import Ranks

# Importing DeepSpeed takes seconds, on a network file system tens of seconds.
CHECKS = (
    Check(name="versions", limit_seconds=60, run=check_versions),
    Check(name="accelerator", limit_seconds=120, run=check_accelerator),
    Check(name="NVML", limit_seconds=30, run=check_nvml, uses_driver=True),
    Check(name="allocator", limit_seconds=30, run=check_allocator, uses_driver=True),
    Check(name="compiler", limit_seconds=30, run=check_compiler, uses_driver=True),
    Check(name="builds", limit_seconds=30, run=check_builds),
    Check(name="environment", limit_seconds=30, run=check_environment),
    Check(name="ports", limit_seconds=30, run=check_ports),
    Check(name="run folder", limit_seconds=30, run=check_disk),
    Check(name="host limits", limit_seconds=30, run=check_limits),
    Check(name="ds config", limit_seconds=60, run=check_ds_config, uses_driver=True),
    Check(name="speed", limit_seconds=60, run=check_speed, each_rank=True, uses_driver=True),
)
_ORDER = {check.name: number for number, check in enumerate(CHECKS)}
_ALONE = "there is one process; give --nproc, or start it with the launcher of the job"


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as a rank.

    Batch scripts set WORLD_SIZE, and Kubeflow sets RANK too, for a process that only starts the
    ranks.
    """
    return environ.keys() >= {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def job_of_environment(ds_config: str | None, local_ranks: int | None) -> Job:
    """Return the job that a launcher's variables and the options describe.

    Args:
        ds_config: Path of the ds config; None without one.
        local_ranks: Ranks on this host; None to read the launcher's variables. Without a launcher,
            there is one per GPU.
    """
    environ = os.environ
    own_rank, place = is_rank(environ), local_place(environ)
    # Beside a RANK that is the number of a pod, WORLD_SIZE may be the number of pods.
    has_size = "WORLD_SIZE" in environ and (own_rank or "RANK" not in environ)
    job = Job(
        is_rank=own_rank,
        rank=int(environ["RANK"]) if own_rank else 0,
        local_rank=int(environ["LOCAL_RANK"]) if own_rank else 0,
        local_ranks=local_ranks or place.num_ranks,
        local_ranks_given=local_ranks is not None or place.is_known,
        world_size=int(environ["WORLD_SIZE"]) if has_size else None,
        ds_config=ds_config,
    )
    if not job.has_other_ranks:  # otherwise after the ranks have connected, which must not wait
        job = replace(job, driver_answers=driver_answers())
    if not own_rank and not job.local_ranks_given and job.driver_answers:
        from ...common import accelerator

        job = replace(job, local_ranks=max(1, accelerator.current.device_count()))
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

    The ranks connect first, because the checks of one host may take longer than another's. No rank
    uses its GPU before all hosts are checked.

    Returns:
        The findings of all ranks, on each rank, and the ranks, which the caller closes. If they do
        not connect, the findings of this rank alone, and None.
    """
    from . import between_ranks

    ranks, faults = _connected(job, runner)
    if ranks is not None:
        local_ranks = job.local_ranks if job.local_ranks_given else ranks.local_ranks
        job = replace(job, local_ranks=local_ranks, num_hosts=len(ranks.hosts))
    job = replace(job, driver_answers=driver_answers())
    own: list[Finding] = []
    if job.local_rank == 0:
        own += _run(job, runner, socket.gethostname(), each_rank=False)
    if ranks is not None:
        faults = runner.call(
            "connection", between_ranks.HOST_CHECKS_SECONDS, partial(ranks.meet, job)
        )
    own += _run(job, runner, f"rank {job.rank}", each_rank=True)
    if ranks is not None and not faults:
        limit_seconds = 30 + sum(check.limit_seconds for check in CHECKS if check.each_rank)
        faults = runner.call("connection", limit_seconds, ranks.barrier)
    if ranks is None or faults:
        return [*own, *faults], None
    for name, limit_seconds, check_ranks in between_ranks.BETWEEN_RANKS:
        own += runner.call(name, limit_seconds, partial(check_ranks, ranks))
    gathered: list[Finding] = []
    faults = runner.call("connection", 60, partial(_exchange, ranks, own, gathered))
    return merged([*gathered, *faults] if gathered else [*own, *faults]), ranks


def _connected(job: Job, runner: Runner) -> tuple[Ranks | None, list[Finding]]:
    """Return the connected ranks, or None and why they do not connect."""
    from . import between_ranks

    connected: list[Ranks] = []

    def connect() -> Iterable[Finding]:
        try:
            connected.append(between_ranks.Ranks(job))
        except (RuntimeError, ZerowatchError) as error:
            yield between_ranks.connect_fault(job, error)

    # torch tries again after its own timeout.
    limit_seconds = between_ranks.CONNECT_SECONDS + 5
    late = between_ranks.connect_fault(job, TimeoutError("timed out"))
    faults = runner.call("connection", limit_seconds, connect, late)
    return (connected[0] if connected else None), faults


def _run(job: Job, runner: Runner, where: str, *, each_rank: bool) -> Iterator[Finding]:
    for check in CHECKS:
        if check.each_rank == each_rank:
            yield from (replace(each, where=where) for each in runner.run(check, job))


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
