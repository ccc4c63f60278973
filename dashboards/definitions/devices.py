"""The dashboard Devices: utilization, health and faults of GPUs and CPUs, and of their nodes."""

from __future__ import annotations

from ...metrics.catalog import devices as catalog
from ...metrics.thresholds import DEVICE_UTILIZATION_LOW
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import (
    ANY_IS_BAD,
    BYTES_PER_SECOND,
    CELSIUS,
    COUNT,
    HERTZ,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    WATTS,
    Column,
    Query,
    Stat,
    Table,
    TimeSeries,
)
from ..promql import ON_GPU, by, rate
from .queries import DEVICE, RANKS, WINDOW, limit, of_ranks, of_run, total, total_of_devices, worst
from .shared_panels import NOT_KNOWN, RANK_LEGEND, heatmaps, rank_table, sized

NOT_A_GPU = "GPUs only, or not served"
JOULES = "joule"
DEVICE_LEGEND = f"{RANK_LEGEND} {{{{device}}}}"
ON_A_GPU = of_run(recorded.DEVICE_UTILIZATION, ON_GPU)
IDLE_LIMIT = limit(DEVICE_UTILIZATION_LOW, only_if=ON_A_GPU)

USE = (
    TimeSeries(
        title="Busy: mean, highest and lowest",
        description="Share of time in which a device works, over the chosen ranks. A wide gap is "
        "an imbalance: see the dashboard Communication. Without GPUs there is no line: the value "
        "is then a share of all cores, which the ranks of a host divide among them.",
        queries=(
            Query(by("max", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "busiest"),
            Query(by("avg", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "mean"),
            Query(by("min", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "least busy"),
            IDLE_LIMIT,
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
    ),
    TimeSeries(
        title="Least busy ranks",
        description="Share of time in which a device works, for the ranks that were idle most in "
        "the selected time. Idle ranks wait for others; the busy rank may be the straggler.",
        queries=(
            Query(
                worst(recorded.DEVICE_UTILIZATION_BY_RANK, lowest=True, also="device"),
                DEVICE_LEGEND,
            ),
            IDLE_LIMIT,
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
    ),
    *sized(
        12,
        8,
        TimeSeries(
            title="Model FLOPs utilization",
            description="Floating point operations that the model needs, divided by the peak of "
            "the device, as a mean over ranks. If it is low, see the dashboard Step anatomy.",
            queries=(Query(of_run(recorded.MFU), "MFU"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            empty=NOT_KNOWN,
        ),
        TimeSeries(
            title="Slowest clock, by device",
            description="Clock frequency, the minimum over all nodes. If it falls while the device "
            "is hot or at its power limit, the device is throttled and slows down every rank: "
            "check cooling and power limit.",
            queries=(Query(of_run(recorded.CLOCK), "{{device}}"),),
            unit=HERTZ,
            minimum=0,
        ),
    ),
    rank_table(
        title="Least busy devices now",
        description="Share of time in which a device works, with its clock, which shows "
        "whether it is idle or throttled.",
        labels=DEVICE,
        columns=(
            Column(
                title="Busy",
                expression=by("min", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK), *DEVICE),
                unit=RATIO,
                decimals=0,
            ),
            Column(
                title="Clock",
                expression=by("min", of_ranks(catalog.DEVICE_CLOCK), *DEVICE),
                unit=HERTZ,
                decimals=2,
            ),
        ),
        lowest=True,
        width=24,
    ),
)

OVER_TIME = heatmaps(
    recorded.DEVICE_UTILIZATION_BY_RANK,
    title="Busy",
    description="Share of time in which a device works. **Bright** rows are idle; they wait for "
    "the dark ones.",
    operation="min",
    low_is_bad=True,
    unit=RATIO,
    minimum=0,
    maximum=1,
)

GPU_FAULTS = (
    *sized(
        6,
        6,
        Stat(
            title="Lost GPUs",
            description="Number of GPUs that the driver no longer reaches. It should be 0: see the "
            "alert ZerowatchGpuLost.",
            queries=(Query(total_of_devices(catalog.DEVICE_LOST), "lost", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
            empty=NOT_A_GPU,
        ),
        Stat(
            title="XID errors",
            description="XID errors since monitoring started, by number. The runbook of the alert "
            "ZerowatchGpuXid has a table of their meanings.",
            queries=(Query(total(catalog.DEVICE_XID_ERRORS, "xid"), "XID {{xid}}", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
            empty="none",
        ),
        Stat(
            title="Memory errors",
            description="ECC errors of the GPUs' memory since monitoring started. "
            "**corrected** ones are harmless if there are few; an **uncorrected** one ends the "
            "process: see the alert ZerowatchGpuUncorrectableEcc.",
            queries=(Query(total(catalog.DEVICE_ECC_ERRORS, "kind"), "{{kind}}", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            colors={"corrected": "text"},
            plain=True,
            empty=NOT_A_GPU,
        ),
        Stat(
            title="Row remaps",
            description="GPUs whose replacement of a memory row is **pending** until a reset, or "
            "has **failed**: see the alert ZerowatchGpuRowRemap.",
            queries=(
                Query(
                    total_of_devices(catalog.DEVICE_ROW_REMAP, "state"), "{{state}}", shape="now"
                ),
            ),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            plain=True,
            empty=NOT_A_GPU,
        ),
    ),
    *sized(
        12,
        8,
        TimeSeries(
            title="Throttled",
            description="Share of time in which the clock was lowered, by reason, for the most "
            "throttled of the chosen devices. **power_cap** is usual at full load. **hw_thermal** "
            "and **sw_thermal**: cooling. **power_brake** and **hw_slowdown**: the power supply.",
            queries=(
                Query(
                    by("max", rate(catalog.DEVICE_THROTTLED_SECONDS, WINDOW, *RANKS), "reason"),
                    "{{reason}}",
                ),
            ),
            unit=RATIO,
            minimum=0,
            maximum=1,
            empty=NOT_A_GPU,
        ),
        TimeSeries(
            title="Link errors per second",
            description="Errors of NVLink and PCIe per second, over the chosen ranks, by kind. "
            "A link that repeats transfers is slow: see the alert ZerowatchGpuLinkErrors.",
            queries=(
                Query(
                    by("sum", rate(catalog.DEVICE_LINK_ERRORS, WINDOW, *RANKS), "link", "kind"),
                    "{{link}} {{kind}}",
                ),
            ),
            unit=COUNT,
            minimum=0,
            empty=NOT_A_GPU,
        ),
    ),
    Table(
        title="Cards",
        description="The cards of the chosen ranks: their UUIDs, as in nvidia-smi and "
        "dcgm-exporter, and their addresses on the PCI bus.",
        labels={
            "rank": "Rank",
            "node": "Node",
            "device": "Device",
            "name": "Card",
            "uuid": "UUID",
            "pci_bus_id": "PCI address",
            "driver": "Driver",
        },
        columns=(
            Column(
                title="",
                expression=by(
                    "max",
                    of_ranks(catalog.DEVICE_INFO),
                    *DEVICE,
                    *("name", "uuid", "pci_bus_id", "driver"),
                ),
            ),
        ),
        empty=NOT_A_GPU,
        width=24,
        height=8,
    ),
)

GPU_HEALTH = (
    *sized(
        8,
        8,
        TimeSeries(
            title="Hottest devices",
            description="Core temperature in degrees Celsius of the hottest of the chosen ranks, "
            "and the temperature at which a device lowers its clock.",
            queries=(
                Query(
                    worst(recorded.TEMPERATURE_BY_RANK, also="device"),
                    DEVICE_LEGEND,
                ),
                Query(
                    by("min", of_ranks(catalog.DEVICE_TEMPERATURE_LIMIT)),
                    "limit of the device",
                    is_limit=True,
                ),
            ),
            unit=CELSIUS,
            empty=NOT_A_GPU,
        ),
        TimeSeries(
            title="Power",
            description="Power draw of all devices together, in watts. It falls when devices wait.",
            queries=(Query(of_run(recorded.POWER), "power"),),
            unit=WATTS,
            minimum=0,
            empty=NOT_A_GPU,
        ),
        Stat(
            title="Energy used",
            description="Energy in joules that the devices of the chosen ranks have used since "
            "monitoring began.",
            queries=(Query(total(catalog.DEVICE_ENERGY), "energy", shape="now"),),
            unit=JOULES,
            thresholds=PLAIN_TEXT,
            plain=True,
            empty=NOT_A_GPU,
        ),
    ),
    *sized(
        12,
        8,
        TimeSeries(
            title="Multiprocessors active",
            description="Share of time in which a multiprocessor of the GPU is active, as a mean "
            "over ranks. If a device is busy but not active, its kernels are too small: raise the "
            "micro-batch or compile the model.",
            queries=(Query(of_run(recorded.SM_ACTIVE), "{{device}}"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            empty=NOT_A_GPU,
        ),
        TimeSeries(
            title="Traffic on device links",
            description="Bytes per second on the links of the devices, for all ranks together, as "
            "a mean over five minutes. If PCIe traffic is high without offloading, check where "
            "batches are copied from.",
            queries=(Query(of_run(recorded.LINK_BYTES_RATE), "{{link}} {{direction}}"),),
            unit=BYTES_PER_SECOND,
            minimum=0,
            empty=NOT_A_GPU,
        ),
    ),
    *heatmaps(
        recorded.TEMPERATURE_BY_RANK,
        title="Temperature",
        description="Core temperature; brighter is hotter. A bright block of nodes: the cooling of "
        "a rack.",
        unit=CELSIUS,
        empty=NOT_A_GPU,
    ),
)

DASHBOARD = Dashboard(
    name="devices",
    title="Devices",
    description="Are the devices well used and healthy?",
    rows=(
        Row("Use", USE),
        Row("Nodes and ranks over time", OVER_TIME, collapsed=True),
        # Collapsed, because a run without GPUs has no data for them.
        Row("GPUs: faults, throttling and cards", GPU_FAULTS, collapsed=True),
        Row("GPUs: temperature, power and links", GPU_HEALTH, collapsed=True),
    ),
)
