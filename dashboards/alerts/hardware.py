"""Alerts on the hardware of GPUs, from the figures that each rank reads by NVML.

Each alert names rank, node and device, and where it is known the card by UUID and PCI address. A
fault of the hardware often ends the process within seconds. The alerts on faults therefore do not
ask whether the run is training, and keep firing for an hour.
"""

from __future__ import annotations

from ...metrics import xid_errors
from ...metrics.catalog import devices
from ...metrics.thresholds import (
    NVLINK_CRC_ERRORS_HIGH,
    PCIE_REPLAYS_HIGH,
    TEMPERATURE_MARGIN_LOW,
    THROTTLED_RATIO_HIGH,
)
from ..limits import above, below, shown
from ..promql import IDENTITY, by, increase, last_value, rate, select
from ..timing import HOUR, MINUTE, SHORT_SECONDS, Timing
from .alert import DEVICE, NODE, NUMBER, PERCENT, RANK, RUN, Alert, InhibitRule
from .guards import while_training

DASHBOARD = "zerowatch-devices"
GPU = ("rank", "node", "device")  # the labels that identify a GPU of a run
ROW_REMAP = "ZerowatchGpuRowRemap"
XID_MINOR = "ZerowatchGpuXidMinor"
# XIDs after which the GPU must be reset. The matcher is anchored.
DRAIN_XIDS = "|".join(sorted(xid_errors.DRAIN_XIDS, key=int))
# Reasons by which faulty cooling or power lowers the clock. The power cap is usual at full load.
FAULTY_REASONS = 'reason!="power_cap"'
_NVLINK, _PCIE = 'link="nvlink"', 'link="pcie"'
_RETRIES, _CRC = 'kind=~"replay|recovery"', 'kind="crc"'

_WHERE = f"{DEVICE} of rank {RANK} on {NODE}"
CARD = (
    "{{ with $labels.uuid }} The card is {{ . }}"
    "{{ with $labels.pci_bus_id }}, PCI address {{ . }}{{ end }}.{{ end }}"
)


def hardware_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _gpu_lost(timing),
        _gpu_xid(timing),
        _gpu_xid_minor(timing),
        _gpu_uncorrectable_ecc(timing),
        _gpu_row_remap_failed(timing),
        _gpu_row_remap(timing),
        _gpu_link_errors(timing),
        _gpu_throttled(timing),
        _gpu_hot(timing),
    )


def with_card(expression: str, timing: Timing, seconds: float | None = MINUTE) -> str:
    """Return `expression` with the UUID and the PCI address of each GPU, where they are known.

    Args:
        expression: PromQL whose result has the labels of a GPU.
        timing: Scales the seconds.
        seconds: How long the card of a process that has ended is known. Where the expression still
            has results then, this is its range: without the card, an alert would be another one.
            None if only the GPUs of running processes matter. The card is then known at any scrape
            interval up to Prometheus's five minutes, so that `for` is not begun again.
    """
    gpu = ", ".join((*IDENTITY, *GPU))
    info = devices.DEVICE_INFO
    known = select(info) if seconds is None else last_value(info, timing, seconds=seconds)
    # A rank that restarts on another card may have two for a moment.
    card = f"topk by ({gpu}) (1, {known})"
    return (
        f"({expression})\n* on ({gpu}) group_left (uuid, pci_bus_id) {card}\n"
        f"or\n({expression})\nunless on ({gpu}) {card}"
    )


def _gpu_lost(timing: Timing) -> Alert:
    lost = by("max", last_value(devices.DEVICE_LOST, timing), *GPU)
    return Alert(
        name="ZerowatchGpuLost",
        component="devices",
        severity="critical",
        expression=with_card(f"{lost} == 1", timing),
        for_seconds=0,
        keep_firing_seconds=HOUR,
        summary=f"Training {RUN} has lost {_WHERE}",
        description=(
            "The driver no longer reaches the GPU, or must reset it first. The run cannot continue "
            f"on this node.{CARD} Drain the node, and restart the run from its last checkpoint "
            "on another one."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_xid(timing: Timing) -> Alert:
    drain = f'xid=~"{DRAIN_XIDS}"'
    errors = by("max", last_value(devices.DEVICE_XID_ERRORS, timing, drain), *GPU, "xid")
    return Alert(
        name="ZerowatchGpuXid",
        component="devices",
        severity="critical",
        # The total and not an increase, because only a reset of the GPU ends the fault.
        expression=with_card(f"{errors} > 0", timing),
        for_seconds=0,
        keep_firing_seconds=HOUR,
        summary=f"XID {{{{ $labels.xid }}}} in training {RUN}, at {_WHERE}",
        description=(
            f"The driver has reported this XID {NUMBER} times since the rank started. It asks for "
            f"a reset of the GPU or a restart of the machine.{CARD} Drain the node. The table in "
            "the runbook says what the number means, and who is to blame."
        ),
        dashboard=DASHBOARD,
        inhibits=InhibitRule(alerts=(XID_MINOR,), same=(*IDENTITY, *GPU)),
    )


def _gpu_xid_minor(timing: Timing) -> Alert:
    others = f'xid!~"{DRAIN_XIDS}"'
    recent = f"{increase(devices.DEVICE_XID_ERRORS, timing, HOUR, others, of_ended=True)} > 0"
    # By the address of the process: within an hour the rank may have restarted on another card. If
    # that serves at the same address, the card of the XID is not known.
    gpu = ", ".join((*IDENTITY, *GPU, "instance"))
    cards = last_value(devices.DEVICE_INFO, timing, seconds=HOUR)
    errors = last_value(devices.DEVICE_XID_ERRORS, timing, others, seconds=HOUR)
    without = f"max by ({gpu}) ({errors})"
    card = (
        f"(\n{cards} and on ({gpu}) count by ({gpu}) ({cards}) == 1\nor on ({gpu}) {without} ^ 0\n)"
    )
    known = f"({recent})\n* on ({gpu}) group_left (uuid, pci_bus_id) {card}"
    return Alert(
        name=XID_MINOR,
        component="devices",
        severity="warning",
        expression=by("max", known, *GPU, "xid", "uuid", "pci_bus_id"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"XID {{{{ $labels.xid }}}} in training {RUN}, at {_WHERE}",
        description=(
            "The driver has reported this XID within the last hour. No reset of the GPU is needed "
            f"at once, unless it is XID 154: the kernel log then names the reset.{CARD} Most such "
            "errors come from the script; look the number up in the runbook's table."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_uncorrectable_ecc(timing: Timing) -> Alert:
    errors = select(devices.DEVICE_ECC_ERRORS, 'kind="uncorrected"')
    growth = by("max", f"increase({errors}[{timing.short}])", *GPU)
    return Alert(
        name="ZerowatchGpuUncorrectableEcc",
        component="devices",
        severity="critical",
        expression=with_card(f"{growth} > 0", timing, SHORT_SECONDS),
        for_seconds=0,
        keep_firing_seconds=HOUR,
        summary=f"Uncorrectable memory errors in training {RUN}, at {_WHERE}",
        description=(
            "The memory of the GPU has lost data, and the driver ends the processes that used "
            f"it.{CARD} Restart the run from its last checkpoint. Reset the GPU before it is used "
            "again."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_row_remap_failed(timing: Timing) -> Alert:
    failed = by("max", last_value(devices.DEVICE_ROW_REMAP, timing, 'state="failed"'), *GPU)
    return Alert(
        name="ZerowatchGpuRowRemapFailed",
        component="devices",
        severity="critical",
        expression=with_card(f"{failed} == 1", timing),
        for_seconds=0,
        keep_firing_seconds=HOUR,
        summary=f"The memory of a GPU is worn out in training {RUN}, at {_WHERE}",
        description=(
            "A faulty row of memory could not be replaced, because no spare row is left or the "
            f"attempt failed.{CARD} Drain the node and have the card replaced."
        ),
        dashboard=DASHBOARD,
        inhibits=InhibitRule(alerts=(ROW_REMAP,), same=(*IDENTITY, *GPU)),
    )


def _gpu_row_remap(timing: Timing) -> Alert:
    pending = by("max", last_value(devices.DEVICE_ROW_REMAP, timing, 'state="pending"'), *GPU)
    return Alert(
        name=ROW_REMAP,
        component="devices",
        severity="warning",
        expression=with_card(f"{pending} == 1", timing),
        for_seconds=0,
        keep_firing_seconds=HOUR,
        summary=f"A GPU waits for a reset in training {RUN}, at {_WHERE}",
        description=(
            "A faulty row of memory is replaced at the next reset of the GPU. Until then it may "
            f"cause further errors.{CARD} Reset the GPU when the run ends."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_link_errors(timing: Timing) -> Alert:
    spec, labels = devices.DEVICE_LINK_ERRORS, (*GPU, "link", "kind")

    def per_second(*matchers: str) -> str:
        return by("max", rate(spec, timing.short, *matchers), *labels)

    # DCGM's health check fails at one replay or recovery of an NVLink, at 100 CRC errors per
    # second, and at 8 PCIe replays per minute (dcgm_gpu_hardware_limits.h).
    retried = f"{per_second(_NVLINK, _RETRIES)} > 0"
    damaged = above(per_second(_NVLINK, _CRC), NVLINK_CRC_ERRORS_HIGH)
    replayed = above(f"60 * {per_second(_PCIE)}", PCIE_REPLAYS_HIGH)
    return Alert(
        name="ZerowatchGpuLinkErrors",
        component="devices",
        severity="warning",
        expression=while_training(
            "(\n" + with_card("\nor\n".join((retried, damaged, replayed)), timing, None) + "\n)",
            "rank",
        ),
        for_seconds=0,
        keep_firing_seconds=30 * MINUTE,
        summary=f"Errors on a link of training {RUN}, at {_WHERE}",
        description=(
            "Its {{ $labels.link }} link counts errors of the kind {{ $labels.kind }}. Data is "
            "sent again, so results are right and communication is slower. A link with growing "
            f"counters usually fails later.{CARD} Check the link as the runbook says."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_throttled(timing: Timing) -> Alert:
    seconds = rate(devices.DEVICE_THROTTLED_SECONDS, timing.short, FAULTY_REASONS)
    share = above(by("max", seconds, *GPU, "reason"), THROTTLED_RATIO_HIGH)
    return Alert(
        name="ZerowatchGpuThrottled",
        component="devices",
        severity="warning",
        expression=while_training(f"(\n{with_card(share, timing, None)}\n)", "rank"),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The clock of a GPU is lowered in training {RUN}, at {_WHERE}",
        description=(
            f"For {PERCENT} of the last five minutes the clock was lowered, for the reason "
            f"{{{{ $labels.reason }}}}; up to {shown(THROTTLED_RATIO_HIGH)} is usual. All ranks "
            f"wait for this GPU.{CARD} Check the cooling and the power of the node."
        ),
        dashboard=DASHBOARD,
    )


def _gpu_hot(timing: Timing) -> Alert:
    limit = by("max", select(devices.DEVICE_TEMPERATURE_LIMIT), *GPU)
    celsius = by("max", select(devices.DEVICE_TEMPERATURE), *GPU)
    margin = f"({limit} - {celsius})"
    return Alert(
        name="ZerowatchGpuHot",
        component="devices",
        severity="warning",
        expression=while_training(
            f"(\n{with_card(below(margin, TEMPERATURE_MARGIN_LOW), timing, None)}\n)", "rank"
        ),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"A GPU is close to its temperature limit in training {RUN}, at {_WHERE}",
        description=(
            f"The GPU may get only {NUMBER} degrees hotter before it lowers its clock.{CARD} "
            "Check the fans, the coolant and the air inlet of the node."
        ),
        dashboard=DASHBOARD,
    )
