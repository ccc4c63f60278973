"""Writes the file_sd file by which Prometheus finds the ranks of the runs on this machine.

    python -m zerowatch.dashboards.stack.run_targets --runs runs --to targets.json

Each run folder contains a targets.json. A run that ends normally empties it; one that was killed
does not. The next run usually serves on the same ports, so two files may name the same address:
then the newest file determines the labels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...metrics.atomic_file import atomic_write

POLL_SECONDS = 2.0
# Ranks end some seconds apart, and each is scraped once more at its end. An address is therefore
# listed for so long after rank 0 has withdrawn it.
WITHDRAWN_SECONDS = 30.0
Targets = list[dict[str, Any]]


def newest_targets(runs: Path) -> Targets:
    """Return the targets of all runs in file_sd format, each address with its newest labels.

    A file that is missing or incomplete is ignored.

    Args:
        runs: The folder of run folders.
    """
    owners: dict[str, dict[str, Any]] = {}
    for file in sorted(runs.glob("*/targets.json"), key=_age_key):
        for target in _read(file):
            for address in target["targets"]:
                owners[address] = {"targets": [address], "labels": target["labels"]}
    return [owners[address] for address in sorted(owners)]


class RunTargets:
    """The targets of all runs, including targets that were withdrawn a moment ago.

    Args:
        runs: The folder of run folders.
        now: A monotonic clock, in seconds.
    """

    def __init__(self, runs: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._runs = runs
        self._now = now
        self._listed: dict[str, tuple[float, dict[str, Any]]] = {}

    def read(self) -> Targets:
        """Return the targets as they are now."""
        now = self._now()
        self._listed |= {each["targets"][0]: (now, each) for each in newest_targets(self._runs)}
        self._listed = {
            address: (at, target)
            for address, (at, target) in self._listed.items()
            if now - at < WITHDRAWN_SECONDS
        }
        return [self._listed[address][1] for address in sorted(self._listed)]


def _age_key(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, file.parent.name
    except OSError:
        return 0.0, file.parent.name


def _read(file: Path) -> Targets:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    whole = isinstance(content, list) and all(
        isinstance(target, dict) and {"targets", "labels"} <= target.keys() for target in content
    )
    return content if whole else []


def write_if_changed(file: Path, targets: Targets) -> None:
    """Replace the file atomically if its content changes, so that Prometheus reads it whole."""
    text = json.dumps(targets, indent=2) + "\n"
    if file.is_file() and file.read_text() == text:
        return
    atomic_write(file, text)


def main() -> None:
    """Update the file every two seconds until the process is terminated."""
    parser = argparse.ArgumentParser(
        prog="zerowatch.dashboards.stack.run_targets", description=__doc__
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    targets = RunTargets(options.runs)
    while True:
        write_if_changed(options.to, targets.read())
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
