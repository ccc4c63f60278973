"""Runs `zerowatch stack` with short intervals: the shipped ones let each test wait half a minute.

Usage: quick_stack.py up --native. The started stack scrapes, evaluates and notifies each second.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zerowatch.dashboards.cli import stack
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.stack import native_stack
from zerowatch.dashboards.stack.native_stack import NativeStack
from zerowatch.dashboards.stack.prometheus_config import (
    SCRAPE_INTERVAL,
    SERVER_INTERVAL,
    prometheus_configuration,
)
from zerowatch.dashboards.timing import Timing

SCALE = 1 / 15
commands = NativeStack._commands


def main(rendered: Path) -> None:
    """Replace what the stack reads, and run its command."""
    for name, text in rule_files(Timing(SCALE)).items():
        (rendered / name).parent.mkdir(parents=True, exist_ok=True)
        (rendered / name).write_text(text)
    vars(native_stack).update(RENDERED=rendered, prometheus_configuration=each_second)
    NativeStack._commands = sending_again
    stack()


def each_second(**addresses: Any) -> Any:
    """Return the configuration of Prometheus with an interval of a second."""
    text = json.dumps(prometheus_configuration(**addresses))
    return json.loads(re.sub(rf'"({SCRAPE_INTERVAL}|{SERVER_INTERVAL})"', '"1s"', text))


def sending_again(started: NativeStack) -> dict[str, list[str]]:
    """Return the commands with one that sends an alert again each second, not each minute.

    What fires before Prometheus knows of Alertmanager, in its first five seconds, is lost.
    """
    processes = commands(started)
    processes["prometheus"].append("--rules.alert.resend-delay=1s")
    return processes


if __name__ == "__main__":
    main(Path("rendered").absolute())
