"""The commands `zerowatch dashboards`, `stack`, `targets` and `export`.

Each command imports its implementation only when it runs, so that --help needs no extra packages.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import CommandLineError
from ..metrics.thresholds import parsed_thresholds
from .stack.alert_log import printable

if TYPE_CHECKING:
    from .stack.native_stack import NativeStack

RENDERED = Path(__file__).resolve().parent / "rendered"
_native = click.option(
    "--native", is_flag=True, help="Without Docker: prometheus and alertmanager from PATH."
)


def _web_address(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> str | None:
    """Return the text if it is an address that a message can link to."""
    if text is None or re.fullmatch(r"https?://[^/\s?#]\S*", text):
        return text
    address = re.sub(r"^([a-z]+:)?/+|\s", "", text, flags=re.IGNORECASE) or "g.example.com"
    raise click.BadParameter(
        f"{printable(text)!r} is no address of a page; write https://{printable(address)}"
    )


@click.group(short_help="Build dashboards, rules and alerts from their sources.")
def dashboards() -> None:
    """Build dashboards, rules and alerts from their sources."""


@dashboards.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RENDERED,
    help="Folder to write to; by default where the stack reads them.",
)
@click.option(
    "--grafana",
    metavar="URL",
    callback=_web_address,
    help="Your Grafana, for the links in alerts, such as https://grafana.example.com.",
)
@click.option(
    "--runbook",
    metavar="URL",
    callback=_web_address,
    help="Your copy of runbook.md, for the links in alerts.",
)
@click.option(
    "--set",
    "changes",
    metavar="NAME=VALUE",
    multiple=True,
    help="Another default of a threshold of the alerts, such as EXPOSED_COMM_RATIO_HIGH=0.35; may "
    "be repeated. If a name is unknown, the error lists all names.",
)
@click.option("--check", is_flag=True, help="Write nothing; fail if files are not up to date.")
def build(
    out: Path, grafana: str | None, runbook: str | None, changes: tuple[str, ...], check: bool
) -> None:
    """Write the dashboards, rules and alerts that Grafana, Prometheus and Kubernetes read.

    With --check the exit code is 1 if a file is missing, left over or was edited by hand.
    """
    if (grafana or runbook or changes) and (check or out == RENDERED):
        raise click.UsageError(
            "--grafana, --runbook and --set go with --out: what is shipped stays"
        )
    try:
        thresholds = parsed_thresholds(changes)
    except ValueError as error:
        raise click.UsageError(f"--set: {error}") from None
    try:
        from .alerts.alert import Links
        from .build import build as build_files
        from .build import stale
    except ModuleNotFoundError as error:
        if error.name not in ("grafanalib", "yaml"):
            raise
        raise CommandLineError(
            f"dashboards build: {error.name} is missing; pip install 'zerowatch[dashboards]'"
        ) from None
    if not check:
        given = {"grafana": grafana and grafana.rstrip("/"), "runbook": runbook}
        links = Links(**{name: url for name, url in given.items() if url})
        try:
            files = build_files(out, links, thresholds)
        except OSError as error:
            raise CommandLineError(
                f"dashboards build: cannot write {error.filename or out}: {error.strerror}; choose "
                "another folder by --out"
            ) from None
        _print_lines([f"{len(files)} files in {out}"])
        return
    faults = stale(out)
    if faults:
        _print_lines(faults)
        sys.exit(1)


@click.group(short_help="Start Prometheus, Alertmanager, Grafana, Tempo and a demo; or stop them.")
def stack() -> None:
    """Start or stop what shows your runs: Prometheus, Alertmanager, Grafana, Tempo."""


@stack.command()
@_native
@click.option(
    "--without-trainer", is_flag=True, help="Do not start the demo; for a job of your own."
)
@click.option("--gpu", is_flag=True, help="Let the demo train on this machine's GPUs.")
def up(native: bool, without_trainer: bool, gpu: bool) -> None:
    """Start the stack in the background, with a demo to look at.

    With --native there is no demo, Grafana or Tempo; the runs of this directory are watched.
    Ports are chosen in .env beside compose.yaml or by variables such as PROMETHEUS_PORT.
    """
    if native and (without_trainer or gpu):
        raise click.UsageError("--native starts no trainer: leave out --without-trainer and --gpu")
    if native:
        _print_lines(_native_stack().up())
        return
    from .stack.compose_stack import up as compose_up

    _print_lines(compose_up(with_trainer=not without_trainer, gpu=gpu))


@stack.command()
@_native
@click.option("--volumes", is_flag=True, help="Also remove what was stored (not with --native).")
def down(native: bool, volumes: bool) -> None:
    """Stop the stack."""
    if native and volumes:
        raise click.UsageError(
            "--native keeps what was stored; to forget it remove the folder .zerowatch-stack"
        )
    if native:
        _print_lines(_native_stack().down())
        return
    from .stack.compose_stack import down as compose_down

    with _native_hint("down"):
        compose_down(volumes=volumes)


@stack.command()
@_native
def status(native: bool) -> None:
    """Show what runs, which ranks Prometheus reaches, which rules fail and which alerts fire."""
    if native:
        _print_lines(_native_stack().status())
        return
    from .stack.compose_stack import status as compose_status

    with _native_hint("status"):
        _print_lines(compose_status())


@click.command(short_help="Serve the targets of all runs in a folder to Prometheus.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder in which jobs write their runs; by default the setting run_log.folder.",
)
@click.option(
    "--listen",
    metavar="[HOST]:PORT",
    default="127.0.0.1:9463",
    show_default=True,
    help="Address to listen on; without HOST all IPv4 addresses of this machine.",
)
@click.option(
    "--forget-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=24.0,
    show_default=True,
    help="Drop a killed run if its rank 0 has written nothing for so long.",
)
def targets(runs: Path | None, listen: str, forget_hours: float) -> None:
    """Serve the targets of all runs in a folder, as one address for http_sd_configs of Prometheus.

    The folder may be on a file system that all nodes of a cluster mount. A run is listed from its
    start until its end. Jobs need ZEROWATCH_SERVE_HOST=0.0.0.0, so that Prometheus can reach them.

    Example: zerowatch targets --runs /shared/runs --listen :9463
    """
    from ..metrics.settings import load_settings
    from .stack.targets_server import TargetsServer, listen_address

    try:
        host, port = listen_address(listen)
    except ValueError as error:
        raise click.UsageError(f"--listen: {error}") from None
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    folder = load_settings().run_log.folder if runs is None else runs
    server = TargetsServer(folder.absolute(), host, port, forget_seconds=forget_hours * 3600)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    _print_lines([f"serving the targets of the runs in {folder} on {host}:{server.port}/targets"])
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


@click.command(short_help="Convert the metrics of a run, for a Prometheus that did not scrape it.")
@click.argument(
    "run_folder",
    metavar="RUN_DIR",
    type=click.Path(file_okay=False, path_type=Path),
)
@click.option(
    "--openmetrics",
    is_flag=True,
    help="Write OpenMetrics text, which promtool makes into blocks of Prometheus.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File to write; by default the text is printed.",
)
@click.option("--job", default="zerowatch", show_default=True, help="Value of the label `job`.")
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank; may be repeated.")
def export(
    run_folder: Path, openmetrics: bool, output: Path | None, job: str, ranks: tuple[int, ...]
) -> None:
    """Convert the metrics that the run in RUN_DIR has recorded, to see them in Grafana.

    Prints the commands that make blocks of Prometheus, and the panels that stay empty.

    Example: zerowatch export runs/night-7 --openmetrics --output night-7.om
    """
    if not openmetrics:
        raise click.UsageError("name the format: --openmetrics")
    from .run_export import export_openmetrics

    lines = export_openmetrics(run_folder, output, job=job, ranks=ranks, rendered=RENDERED)
    for line in lines:
        click.echo(printable(line), err=output is None)


@contextmanager
def _native_hint(command: str) -> Iterator[None]:
    """Extend an error of Docker by the native command, if a native stack was started here."""
    try:
        yield
    except CommandLineError as error:
        from .stack.native_stack import STATE_FOLDER

        if not STATE_FOLDER.is_dir():
            raise
        raise CommandLineError(
            f"{error}. For the native stack of this directory: `zerowatch stack {command} --native`"
        ) from None


def _native_stack() -> NativeStack:
    from ..metrics.settings import load_settings
    from .stack.native_stack import NativeStack

    return NativeStack(load_settings().run_log.folder)


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines, which may contain texts of run folders, job logs and alerts."""
    for line in lines:
        click.echo(printable(line))
