"""Whether a process that ended without a word was killed for want of memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ....metrics.thresholds import OOM_RISK_HIGH
from .liveness_file import Kills, ProcessMarker

# A last reading so near its limit makes it likely that the next step passed it.
NEAR_LIMIT_RATIO = 0.9


class ExitCause(Enum):
    """What ended it."""

    OOM_KILLER = "was killed by the kernel's OOM killer"
    PROBABLY = "was probably killed by the kernel's OOM killer"
    UNKNOWN = "ended without a word; whether for want of memory cannot be told"
    OTHERWISE = (
        "ended without a word, and not by the kernel's OOM killer: by a signal such as SIGKILL or "
        "SIGTERM, by a crash, or by os._exit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFinding:
    """A verdict and what it rests on, in words."""

    verdict: ExitCause
    why: str


def classify_exit(
    life: ProcessMarker,
    *,
    same_boot: bool,
    now: Kills,
    died_together: int = 1,
    limit_ratio: float | None = None,
    risk_ratio: float | None = None,
) -> ExitFinding:
    """Judge from the kernel's counters, and where they cannot tell from the last readings.

    Args:
        life: The process, with the counters as it started.
        same_boot: Whether the machine has not been started anew since; counters begin at 0 then.
        now: The counters of the same cgroup now.
        died_together: Ranks of this run and cgroup that ended without a word, this one included:
            a launcher kills the others when one is gone.
        limit_ratio: The last peak over its limit.
        risk_ratio: The last risk.
    """
    if not same_boot:
        return _by_readings("the machine was started anew since", limit_ratio, risk_ratio)
    cgroup = _rise(life.kills.cgroup, now.cgroup)
    host = _rise(life.kills.host, now.host)
    if cgroup is not None and life.kills.cgroup_inode == now.cgroup_inode:
        return _by_cgroup(cgroup, host, died_together)
    if host:
        why = f"it has killed {host} process(es) on this host since, of which cgroup is not known"
        return ExitFinding(verdict=ExitCause.PROBABLY, why=why)
    if host == 0:
        why = "it has killed nobody on this host since"
        return ExitFinding(verdict=ExitCause.OTHERWISE, why=why)
    return _by_readings("the kernel does not count", limit_ratio, risk_ratio)


def _by_cgroup(kills: int, on_host: int | None, died_together: int) -> ExitFinding:
    said = f"it has killed {kills} process(es) of this rank's memory cgroup since"
    if kills >= died_together:
        return ExitFinding(verdict=ExitCause.OOM_KILLER, why=said)
    if kills:
        why = f"{said}, and {died_together} ranks ended together: this one or another"
        return ExitFinding(verdict=ExitCause.PROBABLY, why=why)
    elsewhere = f", but {on_host} elsewhere on this host" if on_host else ""
    why = f"it has killed nobody in this rank's memory cgroup since{elsewhere}"
    return ExitFinding(verdict=ExitCause.OTHERWISE, why=why)


def _by_readings(reason: str, limit_ratio: float | None, risk_ratio: float | None) -> ExitFinding:
    signs = []
    if limit_ratio is not None and limit_ratio >= NEAR_LIMIT_RATIO:
        signs.append(f"its last peak was {100 * limit_ratio:.0f} % of the limit")
    if risk_ratio is not None and risk_ratio > OOM_RISK_HIGH:
        signs.append(f"its last risk was {100 * risk_ratio:.0f} %")
    verdict = ExitCause.PROBABLY if signs else ExitCause.UNKNOWN
    return ExitFinding(
        verdict=verdict, why=f"{reason}; " + (" and ".join(signs) or "no sign of it")
    )


def _rise(then: int | None, now: int | None) -> int | None:
    return None if then is None or now is None or now < then else now - then
