"""Implements `zerowatch compare`: two runs side by side, with what differs significantly."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from .figure_options import (
    EXIT_CODE_OF_CONDITION,
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

COMPARISON_FILE = "compare.html"


@click.command(short_help="Compare two runs over their common steps.")
@click.argument("a", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.argument("b", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--text", is_flag=True, help="Print tables; the default.")
@markdown_option
@json_option
@click.option("--html", is_flag=True, help="Write an HTML page with charts.")
@output_option("B/compare.html")
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    help="Common steps to leave out at the beginning.  [default: a tenth, from 5 to 50]",
)
@fail_on_option("throughput_ratio<0.95")
@figures_option
def compare(
    a: Path | None,
    b: Path | None,
    output: Path | None,
    warm_up: int | None,
    conditions: tuple[str, ...],
    lists_figures: bool,
    **forms: bool,
) -> None:
    """Compare the run whose folder is B with the reference A.

    Of the steps that both runs have, throughput, phases, communication, memory and loss are
    compared, with intervals that allow for the correlation of successive steps. The comparison
    lists what differs in settings, ds config, software and hardware, and in which respects the runs
    are not comparable.

    In CI, --fail-on checks figures: exit code 3 means that a condition holds, 2 that none holds
    and one cannot be checked.

    Example: zerowatch compare runs/before runs/after --fail-on 'throughput_ratio_upper<1'
    """
    import orjson

    from ..common.plain_text import encodable
    from ..reports.comparison_page import comparison_page
    from ..reports.comparison_text import comparison_markdown, comparison_text
    from ..reports.fail_on import Condition
    from ..reports.run_comparison import COMPARISON_FIGURES, read_source
    from ..reports.run_comparison import compare as compare_sources

    form, is_given = chosen_form(forms, default="text"), output is not None
    if lists_figures:
        print_figures(COMPARISON_FIGURES)
        return
    if a is None or b is None:
        missing = "A" if a is None else "B"
        raise click.UsageError(f"Missing argument '{missing}'.", click.get_current_context())
    parsed = [Condition.parse(text, COMPARISON_FIGURES, "compare") for text in conditions]
    first, second = read_source(a), read_source(b)
    comparison = compare_sources(first, second, warm_up=warm_up)
    if form == "html":
        text = comparison_page(comparison, first, second)
        output = output or b / COMPARISON_FILE
    elif form == "markdown":
        text = comparison_markdown(comparison)
    elif form == "json":
        text = orjson.dumps(comparison, option=orjson.OPT_INDENT_2).decode() + "\n"
    else:
        is_terminal = output in (None, STANDARD_OUTPUT) and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        text = comparison_text(comparison, width=width)
    if output in (None, STANDARD_OUTPUT):
        click.echo(encodable(text, sys.stdout), nl=False)
    else:
        assert output is not None
        write_output(output, text, is_given=is_given)
        click.echo(f"{comparison.verdict}\n{output}")
    exit_code = check_conditions(parsed, comparison.figures)
    if exit_code == EXIT_CODE_OF_CONDITION:
        for each in comparison.incomparable:
            click.echo(f"zerowatch: {each.sentence}", err=True)
    if exit_code:
        sys.exit(exit_code)
