"""Each panel of the dashboards shows the right figures of a stored run.

The series are in `tests/support/stored_run.py`. The figures have their names in the legend of the
panel; in a table, the heading of the column and the labels of the row.
"""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.scraper import eventually
from require import program
from servers.grafana_reader import DashboardQuery, Reader, dashboard_queries
from servers.prometheus_server import Prometheus
from stored_run import BEFORE, BRIEFLY, DECIDED, FIRED, NOW, RUN, SHOWN_SECONDS, STARTED, STORED

from zerowatch.dashboards.definitions import (
    COMPARE,
    DASHBOARDS,
    DEVICES,
    MEMORY,
    OVERHEAD,
    OVERVIEW,
    STEP_ANATOMY,
)
from zerowatch.dashboards.grafana.dashboard import Dashboard
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json, graph_annotations
from zerowatch.dashboards.grafana.panels import Panel, Table, XYChart

EXPECTED: dict[str, dict[str, dict[str, float]]] = {
    "overview": {
        "State": {"state": 1},
        "Alerts firing": {
            "alerts": 2,
            "Since: ZerowatchDataBound warning - 0 - ZerowatchDataBound": 300,
            "Since: ZerowatchDataBound warning - 1 - ZerowatchDataBound": 330,
        },
        "Ranks": {"training": 2, "missing": 1},
        "Time since the last step": {"since": 5, "typical steps": 5 / 0.49},
        "Step": {"steps": 1234, "earlier attempts": 4},
        "Last checkpoint": {"ago": 700},
        "Bottlenecks": {
            "Now: waiting for communication of training time communication": 0.21,
            "Now: slowest rank of a step behind communication": 0.07,
            "Now: waiting for data of training time step-anatomy": 0.033,
            "Now: idle GPUs of time devices": 0.16,
            "Now: out of memory probability in 50 steps memory": 0.34,
            "Now: replayed windows of training time memory": 0.015,
            "Limit: waiting for communication of training time communication": 0.22,
            "Limit: slowest rank of a step behind communication": 0.055,
            "Limit: waiting for data of training time step-anatomy": 0.11,
            "Limit: idle GPUs of time devices": 0.23,
            "Limit: out of memory probability in 50 steps memory": 0.55,
            "Limit: replayed windows of training time memory": 0.055,
            "Of the limit: waiting for communication of training time communication": 0.21 / 0.22,
            "Of the limit: slowest rank of a step behind communication": 0.07 / 0.055,
            "Of the limit: waiting for data of training time step-anatomy": 0.3,
            "Of the limit: idle GPUs of time devices": 0.16 / 0.23,
            "Of the limit: out of memory probability in 50 steps memory": 0.34 / 0.55,
            "Of the limit: replayed windows of training time memory": 0.015 / 0.055,
        },
        "Step time by phase": {"backward": 0.33, "data": 0.012, "forward": 0.15},
        "Step time": {
            "median, fastest rank": 0.48,
            "median, middle rank": 0.49,
            "median, slowest rank": 0.51,
            "p99, fastest rank": 0.52,
            "p99, middle rank": 0.58,
            "p99, slowest rank": 0.61,
            "mean of rank 0": 0.5,
        },
        "Throughput": {"samples/s": 52},
        "Loss": {"loss": 2.31},
        "Exposed communication": {"5 minutes": 0.21, "30 minutes": 0.18, "limit": 0.22},
        "Devices busy": {"mean": 0.82, "least busy": 0.72, "limit": 0.77},
        "Risk of running out of memory": {
            "rank 0 a cuda:0": 0.12,
            "rank 1 b cuda:0": 0.34,
            "rank 2 b cuda:0": 0.23,
            "limit": 0.55,
        },
        "The 10 ranks that delay the others": {
            "Behind: 1 b": 0.07,
            "Behind: 2 b": 0.06,
            "Behind: 0 a": 0.02,
            "Step time: 0 a": 0.497,
            "Step time: 1 b": 0.503,
            "Step time: 2 b": 0.511,
            "Exposed: 0 a": 0.17,
            "Exposed: 1 b": 0.28,
            "Exposed: 2 b": 0.23,
            "Busy: 0 a": 0.81,
            "Busy: 1 b": 0.93,
            "Busy: 2 b": 0.72,
            "Memory risk: 0 a": 0.12,
            "Memory risk: 1 b": 0.34,
            "Memory risk: 2 b": 0.23,
        },
        "Goodput": {"goodput": 0.93},
        "Model FLOPs utilization": {"MFU": 0.41},
        "Checkpoints": {"failed": 1, "saved": 17},
        "Cost of checkpoints": {"size": 1.4e10, "time": 66},
        "Spread of step time": {"max": 1.25, "median": 1.125, "min": 1},
        "Spread of exposed communication": {"max": 2.25, "median": 2.125, "min": 2},
        "Spread of waiting in collectives": {"max": 3.25, "median": 3.125, "min": 3},
        "Spread of waiting for data": {"max": 4.25, "median": 4.125, "min": 4},
        "Spread of memory peak over limit": {"max": 5.25, "median": 5.125, "min": 5},
        "Spread of out-of-memory risk": {"max": 6.25, "median": 6.125, "min": 6},
        "Spread of utilization": {"max": 7.25, "median": 7.125, "min": 7},
        "Spread of temperature": {"max": 8.25, "median": 8.125, "min": 8},
        "Spread of model FLOPs utilization": {"max": 9.25, "median": 9.125, "min": 9},
        "Spread of samples per second": {"max": 10.25, "median": 10.125, "min": 10},
        "Extreme ranks": {"Minimum on rank: data": 2, "Maximum on rank: data": 1, "Ranks: data": 3},
    },
    "communication": {
        "Exposed communication": {"exposed": 0.21},
        "Overlapped communication": {"hidden": 0.4},
        "Volume over the minimum": {"ratio": 1.37},
        "Link bandwidth over the usual": {"of the usual": 0.62},
        "Communication share of training time": {
            "exposed, 5 minutes": 0.21,
            "exposed, 30 minutes": 0.18,
            "all": 0.35,
            "limit": 0.22,
        },
        "Causes of exposed communication": {"bandwidth": 0.11, "imbalance": 0.05, "latency": 0.031},
        "Ranks that wait least": {
            "rank 0 a": 0.04,
            "rank 1 b": 0.13,
            "rank 2 b": 0.09,
            "longest of all": 0.13,
        },
        "Exposed communication of the worst ranks": {
            "rank 0 a": 0.17,
            "rank 1 b": 0.28,
            "rank 2 b": 0.23,
            "limit": 0.22,
        },
        "Straggler score of the worst ranks": {
            "rank 0 a data": 0.011,
            "rank 0 a forward": 0.02,
            "rank 1 b data": 0.07,
            "rank 2 b data": 0.032,
            "rank 1 b forward": -0.04,
            "rank 2 b forward": 0.06,
            "limit": 0.055,
        },
        "Stragglers now": {
            "Behind: 1 b data": 0.07,
            "Behind: 2 b forward": 0.06,
            "Behind: 2 b data": 0.032,
            "Behind: 0 a forward": 0.02,
            "Behind: 0 a data": 0.011,
            "Behind: 1 b forward": -0.04,
        },
        "Waiting in collectives, by node": {"a": 0.04, "b": 0.09},
        "Waiting in collectives, by rank": {"a rank 0": 0.04, "b rank 1": 0.13, "b rank 2": 0.09},
        "Exposed communication, by node": {"a": 0.17, "b": 0.28},
        "Exposed communication, by rank": {"a rank 0": 0.17, "b rank 1": 0.28, "b rank 2": 0.23},
        "Bandwidth by operation": {"all_reduce dp": 7e8},
        "Bandwidth of the link": {"dp now": 5e8, "dp best": 9e8},
        "Latency of the link": {"dp": 0.0003},
        "Links furthest below their usual bandwidth": {
            "rank 0 a dp": 0.91,
            "rank 1 b dp": 0.62,
            "rank 2 b dp": 0.83,
            "limit": 0.55,
        },
        "Collective duration, 95th percentile": {"all_reduce": 0.065, "barrier": 0.01},
        "Collectives in a step, by operation": {"all_reduce": 37, "barrier": 2},
        "Sent in a step, by operation": {"all_reduce dp": 4e7},
        "Bytes of a step on the wire": {
            "measured": 4.4e7,
            "predicted": 4.1e7,
            "reference": 3.9e7,
        },
        "Payload of a step, by operation": {"all_reduce dp": 2.2e7},
        "Collective durations": {"+Inf": 107, "0.01": 63, "0.03": 90, "0.1": 100},
        "Coverage": {"coverage": 0.985},
        "Collective mismatches": {"mismatches": 3},
        "Hangs": {"hangs": 5},
        "Exposed communication by group": {"dp": 0.12, "tp": 0.075},
    },
    "step_anatomy": {
        "A step by phase": {"backward": 0.33, "data": 0.012, "forward": 0.15},
        "Share of each phase": {"backward": 0.63, "data": 0.024, "forward": 0.31},
        "Step time": {
            "median, fastest rank": 0.48,
            "median, middle rank": 0.49,
            "median, slowest rank": 0.51,
            "p99, fastest rank": 0.52,
            "p99, middle rank": 0.58,
            "p99, slowest rank": 0.61,
            "mean of rank 0": 0.5,
        },
        "Step durations": {"+Inf": 1.95, "0.5": 1.3},
        "Step time of the slowest ranks": {"rank 0 a": 0.497, "rank 1 b": 0.503, "rank 2 b": 0.511},
        "Waiting for data: the worst ranks": {
            "rank 0 a": 0.021,
            "rank 1 b": 0.033,
            "rank 2 b": 0.027,
            "limit": 0.11,
        },
        "Steps per second": {"steps/s": 1.98},
        "Samples and tokens per second": {"samples/s": 52.5, "tokens/s": 5250},
        "FLOPs per second": {"FLOP/s": 4.1e12},
        "Model FLOPs utilization": {"MFU": 0.41},
        "Loss": {"loss": 2.31},
        "Gradient norm": {"norm": 1.7},
        "Learning rate": {"learning rate": 0.0003},
        "Non-finite losses": {"steps": 7},
        "Skipped updates": {"skipped": 0.0625},
        "Loss scale": {"scale": 65536},
        "Step time, by node": {"a": 0.497, "b": 0.511},
        "Step time, by rank": {"a rank 0": 0.497, "b rank 1": 0.503, "b rank 2": 0.511},
        "Waiting for data, by node": {"a": 0.021, "b": 0.033},
        "Waiting for data, by rank": {"a rank 0": 0.021, "b rank 1": 0.033, "b rank 2": 0.027},
        "Generated tokens per second": {
            "one rank, while generating": 820,
            "all ranks, over all time": 311,
        },
        "Length of generated sequences": {"tokens": 94},
        "Memory in generation and in training": {
            "generation": 5.3e10,
            "training": 6.9e10,
        },
        "Generation that waits for communication": {"waiting": 0.44},
        "Gathers of parameters in generation": {"gathers": 71},
        "Micro-batches of a step": {"samples of a micro-batch": 6, "micro-batches": 3},
        "Shares of the batch": {"largest": 0.36, "even": 0.33, "smallest": 0.29},
        "Compression error": {"int8": 0.013},
        "The last profiled step": {"compute": 0.6, "overlap": 0.27},
        "Exposed time: zerowatch against the profiler": {"difference": 0.027},
    },
    "memory": {
        "Risk of running out of memory": {"risk": 0.34},
        "Peak over limit": {"peak": 0.86},
        "Headroom": {"headroom": 5e9},
        "Steps until out of memory": {"steps": 450},
        "Risk of the ranks most at risk": {
            "rank 0 a cuda:0": 0.12,
            "rank 1 b cuda:0": 0.34,
            "rank 2 b cuda:0": 0.23,
            "limit of OomRiskHigh": 0.55,
            "limit of OomRiskCritical": 0.88,
        },
        "Peak against limit": {
            "limit": 7.8e10,
            "peak": 7e10,
            "predicted peak": 7.2e10,
            "allocated": 6e10,
        },
        "Device memory at a step's peak": {"optimizer": 2.3e10, "parameters": 1.1e10},
        "Host memory": {"optimizer": 4.7e10},
        "Peak of each phase": {
            "backward": 6.9e10,
            "eval": 7.7e10,
            "forward": 6.1e10,
            "generate": 5.3e10,
        },
        "Reserved, allocated and fragmented": {
            "reserved": 6.6e10,
            "allocated": 6e10,
            "fragmented": 3e9,
            "before training": 1.5e9,
        },
        "Leaks per step": {"cuda:0 other": 2048},
        "Fullest ranks": {
            "rank 0 a cuda:0": 0.71,
            "rank 1 b cuda:0": 0.86,
            "rank 2 b cuda:0": 0.78,
        },
        "Ranks with the least headroom now": {
            "Headroom: 1 b cuda:0": 0.0625,
            "Headroom: 2 b cuda:0": 0.0875,
            "Headroom: 0 a cuda:0": 0.1,
            "Risk: 0 a cuda:0": 0.12,
            "Risk: 1 b cuda:0": 0.34,
            "Risk: 2 b cuda:0": 0.23,
        },
        "Host memory of a node": {"b": 0.44, "a": 0.15},
        "Prediction error of peaks": {"cuda:0": 0.017},
        "Peak over limit, by node": {"a": 0.71, "b": 0.86},
        "Peak over limit, by rank": {"a rank 0": 0.71, "b rank 1": 0.86, "b rank 2": 0.78},
        "Out-of-memory errors": {"replayed": 3},
        "Allocator retries": {"retries": 19},
        "Offloaded bytes per step": {"to_device": 6e8, "to_host": 5e8},
        "Offloading time": {"to_device": 0.08, "to_host": 0.07},
        "Replayed windows": {"committed": 4},
        "Time lost to replayed windows": {"5 minutes": 0.015, "30 minutes": 0.008, "limit": 0.055},
        "Engine rebuilds": {"undone": 3},
        "Restarts": {"restarts": 4},
    },
    "devices": {
        "Busy: mean, highest and lowest": {
            "busiest": 0.93,
            "mean": 0.82,
            "least busy": 0.72,
            "limit": 0.77,
        },
        "Least busy ranks": {
            "rank 0 a cuda:0": 0.81,
            "rank 1 b cuda:0": 0.93,
            "rank 2 b cuda:0": 0.72,
            "limit": 0.77,
        },
        "Model FLOPs utilization": {"MFU": 0.41},
        "Slowest clock, by device": {"cuda:0": 1.41e9},
        "Least busy devices now": {
            "Busy: 2 b cuda:0": 0.72,
            "Busy: 0 a cuda:0": 0.81,
            "Busy: 1 b cuda:0": 0.93,
            "Clock: 0 a cuda:0": 1.41e9,
            "Clock: 1 b cuda:0": 1.5e9,
            "Clock: 2 b cuda:0": 1.6e9,
        },
        "Busy, by node": {"a": 0.81, "b": 0.72},
        "Busy, by rank": {"a rank 0": 0.81, "b rank 1": 0.93, "b rank 2": 0.72},
        "Lost GPUs": {"lost": 2},
        "XID errors": {"XID 79": 7},
        "Memory errors": {"corrected": 16},
        "Row remaps": {"pending": 1},
        "Throttled": {"hw_thermal": 0.5},
        "Link errors per second": {"nvlink crc": 0.7},
        "Cards": {": 0 a cuda:0 H100 U P D": 1},
        "Hottest devices": {
            "rank 0 a cuda:0": 61,
            "rank 1 b cuda:0": 74,
            "rank 2 b cuda:0": 66,
            "limit of the device": 87,
        },
        "Power": {"power": 1350},
        "Energy used": {"energy": 8e6},
        "Multiprocessors active": {"cuda:0": 0.66},
        "Traffic on device links": {"nvlink sent": 8e9},
        "Temperature, by node": {"a": 61, "b": 74},
        "Temperature, by rank": {"a rank 0": 61, "b rank 1": 74, "b rank 2": 66},
    },
    "tuner": {
        "State now": {": trial": 1},
        "Decisions": {"accepted": 3},
        "Time spent on trials": {"trials": 95},
        "States over time": {"observe": 0, "trial": 1},
        "Symptoms": {"comm_latency": 0.06},
        "Step time": {
            "median, fastest rank": 0.48,
            "median, middle rank": 0.49,
            "median, slowest rank": 0.51,
            "p99, fastest rank": 0.52,
            "p99, middle rank": 0.58,
            "p99, slowest rank": 0.61,
            "mean of rank 0": 0.5,
        },
        "Exposed communication": {"exposed": 0.21},
        "Knobs now": {"Value: bucket": 5e8, "Gain: bucket": 0.057, "At least: bucket": 0.031},
        "Knobs over time": {"bucket": 5e8},
        "Measured gains": {"bucket": 0.057, "bucket at least": 0.031},
        "Throughput": {"samples/s": 52},
    },
    "overhead": {
        "Cost of monitoring": {"cost": 0.0041},
        "Cost by part": {"hooks": 0.0021, "watch_thread": 0.0009},
        "Cost on the worst ranks": {
            "rank 0 a": 0.0041,
            "rank 1 b": 0.0032,
            "rank 2 b": 0.0029,
            "limit": 0.022,
        },
        "Ranks that answer": {"up": 2},
        "Coverage of collectives": {"coverage": 0.985},
        "Age of the metrics": {"age": 7},
        "Failed hooks": {"step": 6},
        "Failed exports": {"http": 8},
        "Dropped records": {"run_log": 13},
        "Failed exchanges per second": {"peer": 0.003, "store": 0.002},
        "Longest time since a rank's report": {"silence": 5.5},
        "Scrape duration": {"slowest": 0.08, "mean": 0.05},
        "Series per rank": {"most": 450, "mean": 380},
        "Most expensive ranks now": {"Cost: 0 a": 0.0041, "Cost: 1 b": 0.0032, "Cost: 2 b": 0.0029},
    },
    "runs": {
        "Runs that train": {"runs": 3},
        "Stalled or hanging": {"runs": 2},
        "Vanished": {"runs": 1},
        "Alerts firing": {
            "alerts": 2,
            "Since: night-7 zerowatch ZerowatchDataBound warning - 0 - ZerowatchDataBound": 300,
            "Since: night-7 zerowatch ZerowatchDataBound warning - 1 - ZerowatchDataBound": 330,
        },
        "Ranks training": {"ranks": 2},
        "Samples per second": {"rate": 92},
        "Runs": {
            "State: hanging zerowatch": 4,
            "State: night-6 zerowatch": 14,
            "State: night-7 zerowatch": 1,
            "State: stalled zerowatch": 3,
            "State: completed zerowatch": 10,
            "State: vanished zerowatch": 20,
            "Alerts: night-7 zerowatch": 2,
            "Ranks: night-7 zerowatch": 2,
            "World: night-6 zerowatch": 5,
            "World: night-7 zerowatch": 3,
            "Step: night-6 zerowatch": 900,
            "Step: night-7 zerowatch": 1234,
            "Step time: night-6 zerowatch": 0.7,
            "Step time: night-7 zerowatch": 0.49,
            "Samples/s: night-6 zerowatch": 40,
            "Samples/s: night-7 zerowatch": 52,
            "MFU: night-6 zerowatch": 0.32,
            "MFU: night-7 zerowatch": 0.41,
            "Goodput: night-6 zerowatch": 0.85,
            "Exposed: night-6 zerowatch": 0.28,
            "Exposed: night-7 zerowatch": 0.21,
            "Loss: night-6 zerowatch": 2.5,
            "Loss: night-7 zerowatch": 2.31,
            "Age: night-7 zerowatch": 5000,
            "Age: night-6 zerowatch": 9000,
            "Started: night-6 zerowatch": 1000 * (NOW - 9000),
            "Started: night-7 zerowatch": 1000 * (NOW - 5000),
            "Seen: completed zerowatch": 1000 * (NOW - 300),
            "Seen: hanging zerowatch": 1000 * NOW,
            "Seen: night-6 zerowatch": 1000 * NOW,
            "Seen: night-7 zerowatch": 1000 * NOW,
            "Seen: stalled zerowatch": 1000 * NOW,
            "Seen: vanished zerowatch": 1000 * (NOW - 300),
        },
        "States over time": {
            "completed": 10,
            "hanging": 4,
            "night-6": 14,
            "night-7": 1,
            "stalled": 3,
            "vanished": 1,
        },
    },
    "compare": {
        "Step time": {"B against A": -0.3},
        "Samples per second": {"B against A": 0.3},
        "Exposed communication": {"B against A": -0.25},
        "Model FLOPs utilization": {"B against A": 0.28125},
        "Figures of both runs": {
            "State: night-6": 14,
            "State: night-7": 1,
            "Ranks: night-6": 5,
            "Ranks: night-7": 3,
            "Step: night-6": 900,
            "Step: night-7": 5234,
            "Loss: night-6": 2.5,
            "Loss: night-7": 2.31,
            "Step time: night-6": 0.7,
            "Step time: night-7": 0.49,
            "Samples/s: night-6": 40,
            "Samples/s: night-7": 52,
            "MFU: night-6": 0.32,
            "MFU: night-7": 0.41,
            "Exposed: night-6": 0.28,
            "Exposed: night-7": 0.21,
            "Sent over minimum: night-6": 1.5,
            "Sent over minimum: night-7": 1.37,
            "Goodput: night-6": 0.85,
        },
        "Settings of both runs": {": night-7 2 nccl cuda T D": 1},
        "Loss over steps": {"A x": 900, "A": 2.5, "B x": 5234, "B": 2.31},
        "Step time over steps": {"A x": 900, "A": 0.7, "B x": 5234, "B": 0.49},
        "Throughput over steps": {"A x": 900, "A": 40, "B x": 5234, "B": 52},
        "Exposed communication over steps": {"A x": 900, "A": 0.28, "B x": 5234, "B": 0.21},
        "Gradient norm over steps": {"A x": 900, "A": 2.2, "B x": 5234, "B": 1.7},
        "Peak memory over steps": {"A x": 900, "A": 6.5e10, "B x": 5234, "B": 3e11},
    },
}
# The Overview of a run of which little is stored. It has no GPU, so there is no limit of idle GPUs.
OF_THE_RUN_BEFORE = {
    "State": {"state": 14},
    "Alerts firing": {"alerts": 0},
    "Ranks": {"training": 0},
    "Step": {"steps": 900},
    "Bottlenecks": {
        "Now: waiting for communication of training time communication": 0.28,
        "Limit: waiting for communication of training time communication": 0.15,
        "Of the limit: waiting for communication of training time communication": 0.28 / 0.15,
    },
    "Step time": {"median, middle rank": 0.7, "p99, middle rank": 0.8},
    "Throughput": {"samples/s": 40},
    "Loss": {"loss": 2.5},
    "Exposed communication": {"5 minutes": 0.28, "limit": 0.15},
    "Goodput": {"goodput": 0.85},
    "Model FLOPs utilization": {"MFU": 0.32},
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has stored the series."""
    folder = tmp_path_factory.mktemp("stored")
    lines = [line for series in STORED for line in series.lines()]
    stored, data = folder / "series.om", folder / "data"
    backfill = ["tsdb", "create-blocks-from", "openmetrics", str(stored), str(data)]
    stored.write_text("\n".join([*lines, "# EOF\n"]))
    promtool = program("promtool", apt="prometheus")
    subprocess.run([promtool, *backfill], capture_output=True, check=True)
    with contextlib.closing(
        Prometheus(folder, "", "--storage.tsdb.retention.time=50y")
    ) as prometheus:
        assert eventually(prometheus.is_ready, 300, pause=0.05), prometheus.log.read_text()
        yield prometheus


def shown(
    prometheus: Prometheus, dashboard: Dashboard, run: str = RUN, **chosen: str
) -> dict[str, dict[str, float]]:
    """Return the values of each panel, by their names in its legend or table."""
    json = dashboard_json(dashboard)
    names = {"job": "zerowatch", "run": run, "run_a": BEFORE, "run_b": RUN, **chosen}
    variables = {variable: [name] for variable, name in names.items()}
    reader = Reader(variables=variables, range_seconds=SHOWN_SECONDS)

    def series(expression: str) -> list[dict[str, Any]]:
        query = DashboardQuery(
            dashboard=dashboard.uid, panel="", ref="", expression=expression, is_instant=True
        )
        return prometheus.series(reader.fill_in(query, json), time=NOW)

    values: dict[str, dict[str, float]] = {}
    for panel in dashboard.panels():
        found = values.setdefault(panel.title, {})
        for name, expression, labels in questions(panel):
            for one in series(expression):
                key = shown_name(name, labels, one["metric"])
                assert key not in found, f"two series of {panel.title} are called {key}"
                found[key] = float(one["value"][1])
    return {title: found for title, found in values.items() if found}


def shown_name(name: str, labels: tuple[str, ...], metric: dict[str, str]) -> str:
    """Return the name of a series in a legend, or of a cell of a table with these labels."""
    if labels:
        return f"{name}: {' '.join(metric.get(label, '-') for label in labels)}"
    return re.sub(r"{{(\w+)}}", lambda match: metric.get(match[1], "-"), name)


def questions(panel: Panel) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the names and the expressions of a panel, and the labels of the rows of a table."""
    yield from ((query.legend, query.expression, ()) for query in panel.queries)
    if isinstance(panel, Table):
        yield from ((each.title, each.expression, tuple(panel.labels)) for each in panel.columns)
    if isinstance(panel, XYChart):
        for curve in panel.curves:
            yield from ((f"{curve.name} x", curve.x, ()), (curve.name, curve.y, ()))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_panels_of_a_dashboard_show_the_stored_figures(
    prometheus: Prometheus, dashboard: Dashboard
) -> None:
    found = shown(prometheus, dashboard)

    assert found == {title: about(values) for title, values in EXPECTED[dashboard.name].items()}


def test_the_overview_of_a_run_that_exports_little_shows_what_there_is(
    prometheus: Prometheus,
) -> None:
    found = shown(prometheus, OVERVIEW, BEFORE)

    assert found == {title: about(values) for title, values in OF_THE_RUN_BEFORE.items()}


# Of a run that vanished. Its state, alerts and ranks are those of any run.
LAST_KNOWN = {
    "Last checkpoint": {"ago": 900},
    "Checkpoints": {"saved": 15},
    "Cost of checkpoints": {"size": 1.3e10, "time": 51},
    "Out-of-memory errors": {"fatal": 1},
    "Allocator retries": {"retries": 13},
    "Replayed windows": {"gave_up": 8},
    "Engine rebuilds": {"refused": 9},
    "Restarts": {"restarts": 1},
}


def test_the_last_counts_of_a_run_that_vanished_are_shown(prometheus: Prometheus) -> None:
    found = shown(prometheus, OVERVIEW, "vanished") | shown(prometheus, MEMORY, "vanished")

    assert {title: found.get(title) for title in LAST_KNOWN} == LAST_KNOWN


@pytest.mark.parametrize("run", ["moved", "without buckets"])
def test_the_step_time_is_shown_after_a_move_of_rank_0_and_without_buckets(
    prometheus: Prometheus, run: str
) -> None:
    assert shown(prometheus, OVERVIEW, run)["Step time"] == about({"mean of rank 0": 0.6})


@pytest.mark.parametrize(
    ("run", "is_marked"),
    [("long ago", False), ("with a gap", False), ("a large model", True), ("again", True)],
)
def test_a_start_is_marked_at_the_first_point_after_the_first_scrape(
    prometheus: Prometheus, run: str, is_marked: bool
) -> None:
    (starts,) = [each for each in graph_annotations() if each["name"] == "Starts"]
    expression = starts["expr"].replace("$job", "zerowatch").replace("$run", run)
    expression = expression.replace("$__interval", "1m")

    assert bool(prometheus.series(expression, time=NOW)) == is_marked


@pytest.mark.parametrize("hours", [6, 24])
@pytest.mark.parametrize(
    ("name", "moments"), [("Alerts", (FIRED,)), ("Tuner", DECIDED), ("Starts", STARTED)]
)
def test_each_event_is_marked_at_one_point_of_any_time_range(
    prometheus: Prometheus, name: str, moments: tuple[int, ...], hours: int
) -> None:
    json = dashboard_json(OVERVIEW)
    (query,) = [each for each in dashboard_queries(json) if each.panel == f"annotation {name}"]
    reader = Reader(
        variables={"job": ["zerowatch"], "run": ["marked"]}, range_seconds=hours * 3600.0
    )
    step = reader.step_seconds(query)

    answer = reader.ask(prometheus, query, json, NOW)

    marks = sorted(time for series in answer for time, _ in series["values"])
    assert marks == [math.ceil((NOW - ago) / step) * step for ago in moments]


@pytest.mark.parametrize("name", ["Tuner", "Starts"])
def test_the_events_of_a_run_that_ends_before_the_next_point_are_marked_once(
    prometheus: Prometheus, name: str
) -> None:
    json = dashboard_json(OVERVIEW)
    (query,) = [each for each in dashboard_queries(json) if each.panel == f"annotation {name}"]
    reader = Reader(variables={"job": ["zerowatch"], "run": ["brief"]}, range_seconds=24 * 3600.0)
    step = reader.step_seconds(query)

    answer = reader.ask(prometheus, query, json, NOW + step)

    began, ended = (math.ceil((NOW - ago) / step) * step for ago in BRIEFLY)
    assert began == ended
    assert [time for series in answer for time, _ in series["values"]] == [began]


def test_what_a_dead_rank_has_counted_is_shown_while_another_answers(
    prometheus: Prometheus,
) -> None:
    run = "a dead rank"

    devices, memory, overhead = (
        shown(prometheus, dashboard, run) for dashboard in (DEVICES, MEMORY, OVERHEAD)
    )

    assert devices["Lost GPUs"] == {"lost": 1}
    assert devices["Memory errors"] == {"uncorrected": 1}
    assert memory["Out-of-memory errors"] == {"fatal": 1}
    assert overhead["Failed hooks"] == {"step": 1}


@pytest.mark.parametrize(("run", "num_lost"), [("shrunk", 2), ("one GPU each", 3)])
def test_a_gpu_is_counted_once_though_another_rank_has_it_now_or_another_the_same_number(
    prometheus: Prometheus, run: str, num_lost: int
) -> None:
    found = shown(prometheus, DEVICES, run)

    assert (found["Lost GPUs"], found["Row remaps"]) == ({"lost": num_lost}, {"pending": num_lost})


@pytest.mark.parametrize(
    ("title", "rates"),
    [
        ("Steps per second", [0.025]),
        ("Samples and tokens per second", [25.6, 12800]),
        ("FLOPs per second", [2e12]),
        ("Generated tokens per second", [102.4]),
    ],
)
def test_a_rate_is_right_at_each_point_if_a_step_takes_longer_than_a_scrape_interval(
    prometheus: Prometheus, title: str, rates: list[float]
) -> None:
    json = dashboard_json(STEP_ANATOMY)
    queries = [each for each in dashboard_queries(json) if each.panel == title]
    variables = {"job": ["zerowatch"], "run": ["long steps"]}
    reader = Reader(variables=variables, range_seconds=SHOWN_SECONDS / 2)

    lines = [
        [float(value) for _, value in series["values"]]
        for query in queries
        for series in reader.ask(prometheus, query, json, NOW)
    ]

    for line, rate in zip(lines, rates, strict=True):
        assert line == pytest.approx([rate] * 21, rel=0.15)


def test_the_rate_of_a_new_run_is_not_too_low(prometheus: Prometheus) -> None:
    found = shown(prometheus, STEP_ANATOMY, "new")["Samples and tokens per second"]

    assert found == pytest.approx({"samples/s": 10}, rel=0.15)


@pytest.mark.parametrize(("run", "norm"), [("lr0.1", 1.25), ("lr0-1", 1.5)])
def test_a_run_is_not_shown_with_another_that_its_name_matches_as_a_pattern(
    prometheus: Prometheus, run: str, norm: float
) -> None:
    found = shown(prometheus, STEP_ANATOMY, run, job="c++ (nightly)")

    assert found == {"Gradient norm": {"norm": norm}}


def test_two_runs_are_compared_without_others_that_their_names_match(
    prometheus: Prometheus,
) -> None:
    found = shown(prometheus, COMPARE, run_a="lr0.1", run_b="lr0.1")

    assert found["Figures of both runs"] == {"Sent over minimum: lr0.1": 1.25}
    assert found["Gradient norm over steps"] == {"A": 1.25, "B": 1.25}


@pytest.mark.parametrize(("run", "known"), [("pipeline", {"tokens/s": 800}), ("tensor", None)])
def test_what_ranks_share_is_not_added_up(
    prometheus: Prometheus, run: str, known: dict[str, float] | None
) -> None:
    found = shown(prometheus, STEP_ANATOMY, run)

    assert found.get("Samples and tokens per second") == known


def test_the_overview_of_a_run_without_series_counts_no_alert_and_no_rank(
    prometheus: Prometheus,
) -> None:
    found = shown(prometheus, OVERVIEW, "unknown")

    assert found == {"Alerts firing": {"alerts": 0}, "Ranks": {"training": 0}}


def about(values: dict[str, float]) -> Any:
    """Return values that are equal to those of divisions and rates."""
    return pytest.approx(values, rel=1e-10)
