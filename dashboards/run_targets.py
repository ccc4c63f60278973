"""Lists the ranks of this machine's runs for Prometheus, from the run folders' files.

    python -m zerowatch.dashboards.run_targets --runs runs --to targets.json

A run folder's targets.json outlives its run, and the next run serves on the same ports: scraped by
the old file, its series would carry the old run's name. So each address belongs to the newest run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ..metrics.atomic_file import atomic_write

LOOK_SECONDS = 2.0
Targets = list[dict[str, Any]]


def newest_targets(runs: Path) -> Targets:
    """Merge the runs' targets.json in file_sd form; of two that name an address the newest has it.

    A file that is gone or half written is left out until the next look.
    """
    owners: dict[str, dict[str, Any]] = {}
    for file in sorted(runs.glob("*/targets.json"), key=_age_key):
        for target in _read(file):
            for address in target["targets"]:
                owners[address] = {"targets": [address], "labels": target["labels"]}
    return [owners[address] for address in sorted(owners)]


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
    """Put the file in place in one move, so that Prometheus never reads half of it."""
    text = json.dumps(targets, indent=2) + "\n"
    if file.is_file() and file.read_text() == text:
        return
    atomic_write(file, text)


def main() -> None:
    """Follow the run folders until the process is ended."""
    parser = argparse.ArgumentParser(prog="zerowatch.dashboards.run_targets", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    while True:
        write_if_changed(options.to, newest_targets(options.runs))
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
