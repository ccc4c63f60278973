"""Exports a run that no Prometheus has scraped, so that the dashboards can show it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ..errors import CommandLineError
from ..metrics.exporters.openmetrics_file import ExportedRun, write_openmetrics
from ..metrics.metrics_log_reader import log_files

# The folder of blocks and the address of Prometheus in the commands that are shown.
DATA = "data"
# Not 9090: there listens the Prometheus of the stack, and promtool would ask that one.
ADDRESS = "127.0.0.1:9095"
# Time between two evaluations of the recording rules, as in their files.
EVALUATION_SECONDS = 15
MAX_NAMED_RANKS = 8  # in one sentence


def export_openmetrics(
    run_folder: Path, output: Path | None, *, job: str, ranks: Collection[int], rendered: Path
) -> Iterator[str]:
    """Write the metrics of a run as OpenMetrics text, and yield lines about it.

    Args:
        run_folder: The run folder.
        output: The file to write; standard output if None.
        job: The value of the label `job`.
        ranks: The ranks to write; all if empty.
        rendered: Folder of the generated dashboards and rules.

    Raises:
        CommandLineError: The run has no metrics log, or a file cannot be read or written.
    """
    try:
        with _opened(output) as file:
            exported = write_openmetrics(run_folder, file, job=job, ranks=ranks)
            if not exported.num_samples:
                reasons = exported.problems or [_no_log(run_folder, ranks)]
                raise CommandLineError(f"export: nothing to export: {'; '.join(reasons)}")
    except OSError as error:
        raise CommandLineError(f"export: {error.filename}: {error.strerror}") from None
    if missing := set(ranks) - set(log_files(run_folder)):
        yield f"incomplete: {_no_log(run_folder, missing)}"
    yield from (f"incomplete: {problem}" for problem in exported.problems)
    yield (
        f"{exported.num_samples} samples of {len(exported.series)} series of run "
        f"{exported.run_id}, {_utc(exported.first_seconds)} to {_utc(exported.last_seconds)}"
    )
    yield from _commands(exported, output, rendered)
    yield from _empty_panels(exported, rendered)


def _no_log(run_folder: Path, ranks: Collection[int]) -> str:
    """Return why there is no metrics log to export."""
    if recorded := list(log_files(run_folder)):
        return (
            f"{run_folder} has no metrics log of {_named(ranks)}; the run has logs of "
            f"{_named(recorded)}"
        )
    return (
        f"{run_folder} has no metrics log (metrics-<rank>.jsonl); "
        "run_log.metrics_interval_seconds was 0, or an older zerowatch has written it"
    )


def _named(ranks: Collection[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:MAX_NAMED_RANKS]))
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{more}"


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """Open the output. A file appears under its name only once it is complete."""
    if output is None:
        yield sys.stdout
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _commands(exported: ExportedRun, output: Path | None, rendered: Path) -> Iterator[str]:
    """Yield the commands that make the export visible, in order."""
    shown = shlex.quote(str(output or "FILE"))
    # The rules see the last values at the evaluation that follows them.
    end = math.ceil(exported.last_seconds) + EVALUATION_SECONDS
    times = f"--start={math.floor(exported.first_seconds)} --end={end}"
    # A series ends that long after its last value: a file cannot mark the end of a series.
    lookback = 4 * math.ceil(max(exported.interval_seconds, EVALUATION_SECONDS))
    yield "To see the run in Grafana:"
    yield f"  promtool tsdb create-blocks-from openmetrics {shown} {DATA}"
    yield f"  touch empty.yml && prometheus --config.file=empty.yml --storage.tsdb.path={DATA} \\"
    yield f"      --storage.tsdb.retention.time=10y --query.lookback-delta={lookback}s \\"
    yield f"      --web.listen-address={ADDRESS} &"
    yield (
        "  For the recorded series, the next commands in order; wait a minute after each one, or "
        "restart"
    )
    yield "  Prometheus, because it finds new blocks once a minute:"
    for rules in sorted((rendered / "backfill").glob("*.yaml")):
        yield (
            f"  promtool tsdb create-blocks-from rules {times} --url=http://{ADDRESS} "
            f"--output-dir={DATA} {shlex.quote(str(rules))}"
        )


def _empty_panels(exported: ExportedRun, rendered: Path) -> Iterator[str]:
    """Yield the panels that the exported series do not fill."""
    try:
        from .panel_coverage import empty_panels
    except ModuleNotFoundError as error:
        if error.name != "promql_parser":
            raise
        yield "pip install 'zerowatch[dashboards]' to see what is missing in which panels"
        return
    panels = empty_panels(rendered / "grafana", exported.series)
    if panels:
        yield "What the run has not recorded is missing in these panels:"
    for panel in panels:
        state = "partly empty" if panel.is_partly_filled else "empty"
        yield f"  {panel.dashboard} / {panel.panel} ({state}): {', '.join(panel.missing)}"


def _utc(unix_seconds: float) -> str:
    return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
