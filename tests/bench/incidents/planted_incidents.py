"""The incidents that the bench plants in real training runs, and the alert that each should raise.

The list was committed before its first run. Nothing is added, removed or exchanged because of a
result; if an alert gets another name, the name here follows.

Goals are in seconds of real time, from the fault to the alert in Alertmanager: 180 s for a run that
died, a rank that vanished and a hang, 20 minutes for a run without a first step, 5 minutes for all
other critical alerts. Warnings have no goal; their time is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_SOON_SECONDS = 180.0
CRITICAL_SECONDS = 300.0
FIRST_STEP_SECONDS = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault, and the alerts that it should and may raise.

    Attributes:
        name: The fault's name; also that of the run.
        fault: What happens.
        alert: The alert that must fire first, without the prefix "Zerowatch". None if no alert may
            fire.
        also: Alerts that may rightly follow, because they are consequences of the fault.
        goal_seconds: Longest time until the alert; None if it is only reported.
        names_host: Whether the alert must name the host of the faulty rank.
    """

    name: str
    fault: str
    alert: str | None
    also: tuple[str, ...] = ()
    goal_seconds: float | None = None
    names_host: bool = False


# Without a rank, the other rank waits in a collective.
_WAITING = ("RankHung", "TrainingStalled")
# A step that takes longer also has a lower MFU, and more of it may be communication.
_SLOWER = ("CommBottleneck", "CommRatioRose", "MfuDropped")

INCIDENTS = (
    Incident(
        name="rank-killed",
        fault="SIGKILL to rank 1; rank 0 goes on and waits",
        alert="RankVanished",
        also=(*_WAITING, "RunDied"),
        goal_seconds=KNOWN_SOON_SECONDS,
        names_host=True,
    ),
    Incident(
        name="rank-stopped",
        fault="SIGSTOP to rank 1",
        alert="RankVanished",
        also=_WAITING,
        goal_seconds=KNOWN_SOON_SECONDS,
        names_host=True,
    ),
    Incident(
        name="all-ranks-stopped",
        fault="SIGSTOP to both ranks",
        alert="RunDied",
        goal_seconds=KNOWN_SOON_SECONDS,
    ),
    Incident(
        name="hang-in-a-collective",
        fault="rank 1 sleeps before a collective in which rank 0 waits; both still answer",
        alert="RankHung",
        also=("TrainingStalled",),
        goal_seconds=KNOWN_SOON_SECONDS,
        names_host=True,
    ),
    Incident(
        name="divergent-collective",
        fault="rank 1 skips a collective of the script that rank 0 calls",
        alert="CollectiveMismatch",
        also=(*_WAITING, "RunDied", "RankVanished"),
        goal_seconds=CRITICAL_SECONDS,
    ),
    Incident(
        name="slow-rank",
        fault="the forward pass of rank 1 takes a quarter longer",
        alert="StragglerRank",
        also=_SLOWER,
        names_host=True,
    ),
    Incident(
        name="slow-link",
        fault="the link between the hosts falls to 200 Mbit/s",
        alert="LinkSlow",
        also=_SLOWER,
        names_host=True,
    ),
    Incident(
        name="stuck-before-step-1",
        fault="both ranks have an engine, and never call it",
        alert="NoFirstStep",
        also=("RankHung",),
        goal_seconds=FIRST_STEP_SECONDS,
    ),
    Incident(
        name="data-starvation",
        fault="the DataLoader of both ranks takes a third of each step",
        alert="DataBound",
        also=("MfuDropped",),
    ),
    Incident(
        name="loss-nan",
        fault="the loss of rank 1 is NaN from one step on",
        alert="LossNotFinite",
        goal_seconds=CRITICAL_SECONDS,
    ),
    Incident(
        name="loss-spike",
        fault="the loss is four times its usual value from one step on",
        alert="LossSpike",
        also=("GradientNormExploding",),
    ),
    Incident(
        name="gradient-explosion",
        fault="gradients are a thousand times their usual size from one step on",
        alert="GradientNormExploding",
        also=("LossSpike",),
    ),
    Incident(
        name="skipped-steps",
        fault="the optimizer skips all updates because of overflow",
        alert="UpdatesSkipped",
        also=("LossScaleCollapse", "GradientNormExploding", "LossNotFinite"),
    ),
    Incident(
        name="leak",
        fault="rank 1 keeps a tensor of each step",
        alert="MemoryLeak",
        also=("OomRiskHigh", "OomRiskCritical", "HostMemoryNodeFull", "HostMemoryRisk"),
        names_host=True,
    ),
    Incident(
        name="host-memory-of-several-ranks",
        fault="two ranks of one host use 48 % of its limit each",
        alert="HostMemoryNodeFull",
        also=("OomRiskHigh", "OomRiskCritical", "MemoryLeak"),
        goal_seconds=CRITICAL_SECONDS,
        names_host=True,
    ),
    Incident(
        name="disk-full",
        fault="the file system of the run folder is full",
        alert="RecordsLost",
        also=("MonitoringFailing",),
        names_host=True,
    ),
    Incident(
        name="normal-end",
        fault="the run ends in good order",
        alert=None,
    ),
    Incident(
        name="end-by-exception",
        fault="the script of rank 1 raises; the other rank ends with it",
        alert="RunDied",
        also=("RankVanished",),
        goal_seconds=KNOWN_SOON_SECONDS,
    ),
    Incident(
        name="target-vanished",
        fault="rank 1 is killed and is no target any more, as after the deletion of a pod",
        alert="RankVanished",
        also=(*_WAITING, "RunDied"),
        goal_seconds=KNOWN_SOON_SECONDS,
        names_host=True,
    ),
    Incident(
        name="scrape-blocked-by-slow-clients",
        fault="eight clients hold connections to rank 1 and send one byte a second",
        alert=None,
    ),
)
