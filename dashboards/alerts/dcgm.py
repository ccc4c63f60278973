"""The alerts on hardware from the figures of dcgm-exporter, where it runs.

They are a rule file of their own. Without dcgm-exporter there are no series, and nothing fires. The
metrics and their meaning are those of the exporter's list of counters (etc/default-counters.csv of
github.com/NVIDIA/dcgm-exporter). `docker/dcgm-exporter/counters.csv` enables those that are read
here; the exporter's own default leaves out ECC errors, errors of NVLinks and reasons of clocks.

An alert has the labels node, gpu and uuid. If a run trains on the GPU, it also has the labels of
that rank, by a join on the UUID with device_info.
"""

from __future__ import annotations

from ...metrics.catalog import devices
from ...metrics.thresholds import NVLINK_CRC_ERRORS_HIGH, PCIE_REPLAYS_HIGH
from ..promql import earlier, select
from ..timing import HOUR, MINUTE, Timing
from .alert import Alert, InhibitRule, Severity
from .hardware import CARD, DASHBOARD, DRAIN_XIDS

PREFIX = "ZerowatchDcgm"
LAST_XID = "gpu_xid:DCGM_FI_DEV_XID_ERRORS:last"
XID = "DCGM_FI_DEV_XID_ERRORS"
XID_VALUE = "gpu:DCGM_FI_DEV_XID_ERRORS:max"
# Data-center GPUs lower their clock at 87 to 92 degrees.
CELSIUS_HIGH = 85
# Bits of DCGM_FI_DEV_CLOCKS_EVENT_REASONS: HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE.
_FAULTY_BITS = (8, 32, 64, 128)
_ON = "UUID, Hostname, gpu"  # the exporter's labels that identify a GPU
_RUN_LABELS = "job, run, rank, node, device, pci_bus_id"

_WHERE = "GPU {{ $labels.gpu }} on {{ $labels.node }}"
_RUN = "{{ with $labels.run }} Rank {{ $labels.rank }} of training {{ . }} uses it.{{ end }}"


def dcgm_recording_rules() -> dict[str, str]:
    """Return the PromQL of the recording rules that the alerts read, by name."""
    # The exporter serves the number as a value. A label can be matched.
    return {
        XID_VALUE: _each(XID),
        LAST_XID: f'count_values by ({_ON}) ("xid", {XID_VALUE})',
    }


def dcgm_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    hour, gap, short = timing.duration(HOUR), timing.history, timing.short
    before = f"({earlier(XID_VALUE, hour, gap)} or {_each(earlier(XID, hour, gap))})"
    is_same = f"{before} == {XID_VALUE} and changes({XID_VALUE}[{hour}]) == 0"
    is_old = f"unless on ({_ON}) ({is_same})"
    drain = f'{LAST_XID}{{xid=~"{DRAIN_XIDS}"}} {is_old}'
    other = f'{LAST_XID}{{xid!~"0|{DRAIN_XIDS}"}} {is_old}'

    def rate(metric: str) -> str:
        return _each(f"rate({metric}[{short}])")

    retried = [
        (f"{rate(f'DCGM_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL')} > 0", "nvlink", kind.lower())
        for kind in ("REPLAY", "RECOVERY")
    ]
    crc = f"{rate('DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL')} > {NVLINK_CRC_ERRORS_HIGH:g}"
    replays = f"60 * {rate('DCGM_FI_DEV_PCIE_REPLAY_COUNTER')} > {PCIE_REPLAYS_HIGH:g}"
    links = [*retried, (crc, "nvlink", "crc"), (replays, "pcie", "replay")]
    reasons = _each("DCGM_FI_DEV_CLOCKS_EVENT_REASONS")
    bits = " + ".join(f"floor({reasons} / {bit}) % 2" for bit in _FAULTY_BITS)
    return (
        # The exporter goes on serving the last XID. It is new if another was served an hour ago, or
        # since then, as after a reset. Prometheus may have been down an hour ago, so the last value
        # of the six hours before counts: the recorded one, or, if the rule did not exist yet, the
        # exporter's.
        _alert(
            "Xid",
            "critical",
            drain,
            summary=f"XID {{{{ $labels.xid }}}} at {_WHERE}",
            description="The XID asks for a reset of the GPU or a restart of the machine. Drain "
            "the node.",
        ),
        _alert(
            "XidMinor",
            "warning",
            other,
            summary=f"XID {{{{ $labels.xid }}}} at {_WHERE}",
            description="No reset of the GPU is needed at once, unless it is XID 154: the kernel "
            "log then names the reset. Look the number up in the runbook's table.",
        ),
        _alert(
            "UncorrectableEcc",
            "critical",
            f"{_each(f'increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[{short}])')} > 0",
            keep=HOUR,
            summary=f"Uncorrectable memory errors at {_WHERE}",
            description="The memory of the GPU has lost data. Reset the GPU before it is used "
            "again.",
        ),
        _alert(
            "RowRemapFailed",
            "critical",
            f"{_each('DCGM_FI_DEV_ROW_REMAP_FAILURE')} == 1",
            summary=f"The memory is worn out at {_WHERE}",
            description="A faulty row of memory could not be replaced. Drain the node and have "
            "the card replaced.",
        ),
        _alert(
            "RowRemap",
            "warning",
            f"{_each('DCGM_FI_DEV_ROW_REMAP_PENDING')} == 1",
            summary=f"A reset is pending at {_WHERE}",
            description="A faulty row of memory is replaced at the next reset of the GPU. Reset "
            "it when it is idle.",
        ),
        _alert(
            "LinkErrors",
            "warning",
            "\nor ".join(_labelled(part, link=link, kind=kind) for part, link, kind in links),
            keep=30 * MINUTE,
            summary=f"Errors on a link at {_WHERE}",
            description="Its {{ $labels.link }} link counts errors of the kind "
            "{{ $labels.kind }}. Check the link as the runbook says.",
        ),
        _alert(
            "Throttled",
            "warning",
            f"{bits} > 0",
            wait=2 * MINUTE,
            summary=f"The clock is lowered at {_WHERE}",
            description="For two minutes heat, the power brake or the hardware has lowered the "
            "clock. Check the cooling and the power of the node.",
        ),
        _alert(
            "Hot",
            "warning",
            f"{_each('DCGM_FI_DEV_GPU_TEMP')} >= {CELSIUS_HIGH}",
            wait=5 * MINUTE,
            summary=f"High temperature at {_WHERE}",
            description="The GPU is close to the temperature at which it lowers its clock. Check "
            "the fans, the coolant and the air inlet of the node.",
        ),
    )


def dcgm_inhibitions(timing: Timing) -> tuple[tuple[str, InhibitRule], ...]:
    """Return which alert of `hardware.py` inhibits which alert from dcgm-exporter, on one card."""
    return tuple(
        (alert.page, InhibitRule(alerts=(alert.name,), same=("uuid",)))
        for alert in dcgm_alerts(timing)
    )


def _alert(
    subject: str,
    severity: Severity,
    expression: str,
    *,
    summary: str,
    description: str,
    wait: float = 0,
    keep: float = 5 * MINUTE,
) -> Alert:
    """Return an alert that shares the page of the alert of `hardware.py` on the same subject."""
    return Alert(
        name=PREFIX + subject,
        component="devices",
        severity=severity,
        expression=_of_run(expression),
        for_seconds=wait,
        keep_firing_seconds=keep,
        summary=summary,
        description=f"{description}{_RUN}{CARD}",
        dashboard=DASHBOARD,
        about_run=False,  # a GPU may have none
        page=f"ZerowatchGpu{subject}",
    )


def _each(expression: str) -> str:
    """Return one series for each GPU. MIG devices of one GPU share its figures."""
    return f"max by ({_ON}) ({expression})"


def _labelled(expression: str, **labels: str) -> str:
    for name, value in labels.items():
        expression = f'label_replace({expression}, "{name}", "{value}", "", "")'
    return expression


def _of_run(expression: str) -> str:
    """Return `expression` with the labels node and uuid, and those of the rank on the GPU."""
    named = f'label_replace({expression}, "node", "$1", "Hostname", "(.+)")'
    named = f'label_replace({named}, "uuid", "$1", "UUID", "(.+)")'
    info = f'label_replace({select(devices.DEVICE_INFO)}, "UUID", "$1", "uuid", "(.+)")'
    # Several ranks may share a GPU.
    rank = f"topk by (UUID) (1, {info})"
    return (
        f"{named}\n* on (UUID) group_left ({_RUN_LABELS}) {rank}\n"
        f"or\n{named}\nunless on (UUID) {rank}"
    )
