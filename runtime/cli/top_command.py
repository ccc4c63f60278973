"""Implements `zerowatch top`: a run on a terminal, live or recorded."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ...errors import CommandLineError

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="Show a run on the terminal, live or after its end.")
@click.argument("run", metavar="[TARGETS_URL|RUN_DIR]", required=False)
@click.option("--run", "run_id", metavar="RUN_ID", help="The run, if TARGETS_URL lists several.")
@click.option(
    "--prometheus",
    metavar="URL",
    help="Show the alerts of this Prometheus, instead of what the ranks' own figures exceed.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=1.0),
    default=2.0,
    show_default=True,
    help="Seconds between two readings.",
)
@click.option("--token-file", type=_FILE, help="File with the bearer token of the run.")
@click.option("--basic-auth-file", type=_FILE, help="File with a line user:password of the run.")
@click.option("--ca-file", type=_FILE, help="PEM file of the authority of the certificates.")
@click.option("--client-cert", type=_FILE, help="PEM file with a client's certificate and key.")
@click.option("--prometheus-token-file", type=_FILE, help="The same for Prometheus.")
@click.option("--prometheus-basic-auth-file", type=_FILE, help="The same for Prometheus.")
def top(
    run: str | None,
    run_id: str | None,
    prometheus: str | None,
    interval: float,
    token_file: Path | None,
    basic_auth_file: Path | None,
    ca_file: Path | None,
    client_cert: Path | None,
    prometheus_token_file: Path | None,
    prometheus_basic_auth_file: Path | None,
) -> None:
    """Show a run on the terminal: ranks, phases, exposed communication, memory, alerts, tuner.

    TARGETS_URL is the address of rank 0, such as http://node-0:9464/targets, or of `zerowatch
    targets`. RUN_DIR is a run folder: while the run is active and its ranks answer, they are read;
    else the logs in the folder are. Without an argument, the newest run below the folder of runs is
    shown.

    The files with secrets have the form of serve.auth_token_file and serve.basic_auth_file, and
    these settings are their defaults.

    Keys: q quits, s sorts the ranks, space pauses, tab and the arrow keys scroll.

    Example: zerowatch top http://node-0:9464/targets --prometheus http://127.0.0.1:9090
    """
    if find_spec("textual") is None:
        raise CommandLineError(
            "`zerowatch top` needs the library textual; install it by "
            "`pip install 'zerowatch[top]'` or `pip install textual`"
        )
    if not has_terminal():
        raise CommandLineError(
            "`zerowatch top` needs a terminal; with ssh use `ssh -t`, and for text use "
            "`zerowatch report RUN_DIR`"
        )
    if prometheus is not None and not prometheus.lower().startswith(("http://", "https://")):
        raise CommandLineError(
            f"--prometheus is {prometheus}, without http:// or https://; give a URL such as "
            f"http://{prometheus.lstrip('/')}"
        )
    from ...metrics.settings import load_settings
    from ..top.http_client import Access, HttpClient
    from ..top.run_source import ServedRun, WithAlerts, open_source
    from ..top.screen import TopScreen

    settings = load_settings()
    if token_file is None and basic_auth_file is None:
        token_file = settings.serve.auth_token_file
        basic_auth_file = settings.serve.basic_auth_file
    client = HttpClient(
        Access(
            token_file=token_file,
            basic_auth_file=basic_auth_file,
            ca_file=ca_file,
            client_certificate=client_cert,
        )
    )
    source = open_source(run, runs=settings.run_log.folder, get=client.get, run_id=run_id)
    if isinstance(source, ServedRun):
        source.read()  # an error of the first reading is one of the command line
    if prometheus is not None:
        access = Access(
            token_file=prometheus_token_file,
            basic_auth_file=prometheus_basic_auth_file,
            ca_file=ca_file,
        )
        source = WithAlerts(source, prometheus, HttpClient(access).get)
    TopScreen(source, interval_seconds=interval).run()


def has_terminal() -> bool:
    """Whether standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
