"""The dashboard Devices: utilization and health of GPUs and CPUs."""

from __future__ import annotations

from ...metrics.catalog import devices as catalog
from ...metrics.thresholds import DEVICE_UTILIZATION_LOW
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import (
    BYTES_PER_SECOND,
    CELSIUS,
    HERTZ,
    PLAIN_TEXT,
    RATIO,
    WATTS,
    Column,
    Gauge,
    Query,
    Stat,
    TimeSeries,
    above,
    below,
)
from ..promql import ON_GPU, by
from .queries import of_ranks, of_run, total, worst
from .shared_panels import rank_table, sized

NOT_A_GPU = "GPUs only"
BUSY = below(DEVICE_UTILIZATION_LOW)
HOT = above(83, 90)  # GPUs begin to slow down at about 83 to 87 degrees
JOULES = "joule"
RANK_AND_DEVICE = ("rank", "device")

USE = (
    Gauge(
        title="GPUs busy",
        description="Share of the last five minutes in which a GPU worked, as a mean over the "
        f"chosen ranks. Below {DEVICE_UTILIZATION_LOW:.0%} the GPUs wait for communication or "
        "data, or need larger batches.",
        queries=(
            Query(by("avg", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK, ON_GPU)), "busy", "now"),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
        decimals=0,
        thresholds=BUSY,
        empty=NOT_A_GPU,
        width=6,
    ),
    TimeSeries(
        title="Busy: mean, highest and lowest",
        description="Share of time in which a device works, over the chosen ranks. A wide gap is "
        "an imbalance: see the dashboard Communication. The line applies to GPUs only. For a CPU "
        "the value is a share of all cores, which the ranks of a host divide among them.",
        queries=(
            Query(by("max", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "busiest"),
            Query(by("avg", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "mean"),
            Query(by("min", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "least busy"),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=BUSY,
        width=9,
    ),
    TimeSeries(
        title="Least busy ranks",
        description="Share of time in which a device works, for the ranks that were idle most in "
        "the selected time. Idle ranks wait for others; the busy rank may be the straggler.",
        queries=(
            Query(
                worst(recorded.DEVICE_UTILIZATION_BY_RANK, lowest=True, also="device"),
                "rank {{rank}} {{device}}",
            ),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=BUSY,
        width=9,
    ),
    *sized(
        8,
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
            title="Model FLOPs utilization",
            description="Floating point operations that the model needs, divided by the peak of "
            "the device, as a mean over ranks. If it is low, see the dashboard Step anatomy.",
            queries=(Query(of_run(recorded.MFU), "MFU"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            empty="the device's peak is not known",
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
)

HEALTH = (
    *sized(
        8,
        8,
        TimeSeries(
            title="Highest temperature, by device",
            description="Core temperature in degrees Celsius, the maximum over all nodes. GPUs "
            "slow down from about 85 degrees on: check fans, power limit and room temperature.",
            queries=(Query(of_run(recorded.TEMPERATURE), "{{device}}"),),
            unit=CELSIUS,
            thresholds=HOT,
            empty=NOT_A_GPU,
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
        TimeSeries(
            title="Power",
            description="Power draw of all devices together, in watts. It falls when devices wait.",
            queries=(Query(of_run(recorded.POWER), "power"),),
            unit=WATTS,
            minimum=0,
            empty=NOT_A_GPU,
        ),
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
        width=6,
    ),
    rank_table(
        title="Least busy devices now",
        description="Share of time in which a device works, with its clock and temperature, which "
        "show whether it is idle, throttled or hot.",
        labels=RANK_AND_DEVICE,
        columns=(
            Column(
                title="Busy",
                expression=by(
                    "min", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK), *RANK_AND_DEVICE
                ),
                unit=RATIO,
                decimals=0,
            ),
            Column(
                title="Clock",
                expression=by("min", of_ranks(catalog.DEVICE_CLOCK), *RANK_AND_DEVICE),
                unit=HERTZ,
                decimals=2,
            ),
            Column(
                title="Temperature",
                expression=by("max", of_ranks(catalog.DEVICE_TEMPERATURE), *RANK_AND_DEVICE),
                unit=CELSIUS,
                thresholds=HOT,
                decimals=0,
            ),
        ),
        lowest=True,
        width=18,
    ),
)

DASHBOARD = Dashboard(
    name="devices",
    title="Devices",
    description="Are the devices well used and healthy?",
    rows=(Row("Use", USE), Row("Health", HEALTH)),
)
