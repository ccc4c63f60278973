"""Implements `zerowatch report`: the report of a run as tables and a page, Markdown or JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .figure_options import (
    STANDARD_OUTPUT,
    check_conditions,
    chosen_form,
    fail_on_option,
    figures_option,
    json_option,
    markdown_option,
    output_option,
    print_figures,
    write_output,
)


@click.command(short_help="Report where the time of a run went, and what to do next.")
@click.argument(
    "run_dir", type=click.Path(path_type=Path, file_okay=False), metavar="[RUN_DIR]", required=False
)
@click.option("--html", is_flag=True, help="Print tables and write an HTML page; the default.")
@markdown_option
@json_option
@output_option("RUN_DIR/report.html")
@fail_on_option("comm_exposed_ratio>0.3")
@figures_option
def report(
    run_dir: Path | None,
    output: Path | None,
    conditions: tuple[str, ...],
    lists_figures: bool,
    **forms: bool,
) -> None:
    """Report on the run whose folder is RUN_DIR, by default the newest run below ./runs.

    The terminal shows where the time went, the ranks, errors, and what to try next. The page adds
    charts, collectives, memory, devices, loss, and the tuner's decisions. It is one HTML file that
    opens without a network. Damaged or missing parts of the folder are listed.

    In CI, --fail-on checks figures: exit code 3 means that a condition holds, 2 that none holds
    and one cannot be checked.

    Example: zerowatch report runs/nightly --markdown --fail-on 'comm_exposed_ratio>0.3'
    """
    from ...metrics.settings import load_settings
    from ..common.plain_text import encodable
    from ..monitor.step_ring import recover
    from ..reports.end_tables import print_end_tables
    from ..reports.fail_on import Condition
    from ..reports.run_summary import FIGURES
    from ..reports.write_report import REPORT_FILE, REPORT_MODE, make_report
    from ..top.run_source import newest_run

    form = chosen_form(forms, default="html")
    if lists_figures:
        print_figures(FIGURES)
        return
    if run_dir is None:
        if conditions:  # a check of another run than the intended one would go unnoticed
            raise click.UsageError("--fail-on needs RUN_DIR.", click.get_current_context())
        run_dir = newest_run(load_settings().run_log.folder)
    recover(run_dir)
    parsed = [Condition.parse(text) for text in conditions]
    summary, text = make_report(run_dir, form)
    is_given, mode = output is not None, 0o644
    if output is None and form == "html":
        output, mode = run_dir / REPORT_FILE, REPORT_MODE
    elif output is None:
        output = STANDARD_OUTPUT
    if output == STANDARD_OUTPUT:
        click.echo(encodable(text, sys.stdout), nl=False)
    else:
        write_output(output, text, is_given=is_given, mode=mode)
        if form == "html":
            print_end_tables(summary, sys.stdout, is_whole=True)
            click.echo(f"\nThe whole report: {output}")
        else:
            click.echo(f"{summary.verdict}\n{output}")
    if exit_code := check_conditions(parsed, summary.figures):
        sys.exit(exit_code)
