"""Implements `zerowatch report`: the report of a run as tables and a page, Markdown or JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from ...errors import CommandLineError

EXIT_CODE_OF_CONDITION = 3
_STANDARD_OUTPUT = Path("-")


@click.command(short_help="Report where the time of a run went, and what to do next.")
@click.argument(
    "run_dir", type=click.Path(path_type=Path, file_okay=False), metavar="[RUN_DIR]", required=False
)
@click.option(
    "--html",
    "form",
    flag_value="html",
    default="html",
    help="Print tables and write an HTML page; the default.",
)
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="File to write; - prints.  [default: RUN_DIR/report.html for HTML]",
)
@click.option(
    "--fail-on",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with code 3 if a figure meets the condition, such as 'comm_exposed_ratio>0.3'. May "
    "be given several times.",
)
@click.option("--figures", "lists_figures", is_flag=True, help="List the figures for --fail-on.")
def report(
    run_dir: Path | None,
    form: Literal["html", "markdown", "json"],
    output: Path | None,
    conditions: tuple[str, ...],
    lists_figures: bool,
) -> None:
    """Report on the run whose folder is RUN_DIR, by default the newest run below ./runs.

    The terminal shows where the time went, the ranks, errors, and what to try next. The page adds
    charts, collectives, memory, devices, loss, and the tuner's decisions. It is one HTML file that
    opens without a network. Damaged or missing parts of the folder are listed.

    In CI, --fail-on checks figures: exit code 3 means that a condition holds, 2 that it cannot be
    checked.

    Example: zerowatch report runs/nightly --markdown --fail-on 'comm_exposed_ratio>0.3'
    """
    from ...metrics.atomic_file import atomic_write
    from ...metrics.settings import load_settings
    from ..reports.end_tables import print_end_tables
    from ..reports.fail_on import Condition
    from ..reports.run_summary import FIGURES
    from ..reports.write_report import REPORT_FILE, make_report
    from ..top.run_source import newest_run

    if lists_figures:
        width = max(map(len, FIGURES))
        click.echo("\n".join(f"{name:{width}}  {text}" for name, text in FIGURES.items()))
        return
    if run_dir is None:
        if conditions:  # a check of another run than the intended one would go unnoticed
            raise click.UsageError("--fail-on needs RUN_DIR.", click.get_current_context())
        run_dir = newest_run(load_settings().run_log.folder)
    parsed = [Condition.parse(text) for text in conditions]
    summary, text = make_report(run_dir, form)
    if output is None:
        output = run_dir / REPORT_FILE if form == "html" else _STANDARD_OUTPUT
    if output == _STANDARD_OUTPUT:
        click.echo(text, nl=False)
    else:
        try:
            atomic_write(output, text)
        except OSError as error:
            raise CommandLineError(
                f"cannot write {output}: {error.strerror}; give another file by --output"
            ) from None
        if form == "html":
            print_end_tables(summary, sys.stdout, is_whole=True)
            click.echo(f"\nThe whole report: {output}")
        else:
            click.echo(f"{summary.verdict}\n{output}")
    held = [condition for condition in parsed if condition.holds(summary.figures)]
    for condition in held:
        value = summary.figures[condition.figure]
        click.echo(f"zerowatch: {condition}: it is {value:.4g}", err=True)
    if held:
        sys.exit(EXIT_CODE_OF_CONDITION)
