"""Writes the report of a run as one HTML file, which needs neither a network nor other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from ...metrics.catalog.labels import NON_TRAINING_PHASES
from ..common.format_numbers import UNKNOWN, format_bytes, format_duration, format_seconds
from ..tuner.policy.decision_messages import format_discarded
from .page_parts import Html, bar, chart_places, document, paragraph, section, swatch, table
from .run_charts import COLORS, NUM_COLORS, Chart
from .run_summary import (
    Finding,
    Incident,
    RunSummary,
    TimeShare,
    TunerDecision,
    num_last_steps,
    percent,
)

# Text of all error reports together; the rest is in the run folder.
MAX_INCIDENT_BYTES = 1_000_000
MAX_RANKS = 2000
MAX_DECISIONS = 500
DIAGNOSIS_SECONDS, DIAGNOSIS_STEPS = 30.0, 20  # no diagnosis is made from less
NOT_RECORDED = "not recorded"

STATUS_TEXTS = {
    "completed": ("completed", "good"),
    "running": ("active", "good"),
    "interrupted": ("interrupted", "warning"),
    "out_of_memory": ("out of memory", "critical"),
    "exception": ("ended by an exception", "critical"),
    "peer_failed": ("ended by another rank's failure", "critical"),
    "hang": ("hang", "critical"),
    "killed": ("killed", "critical"),
    "unknown": ("end unknown", "warning"),
}
CAUSE_TEXTS = {
    "imbalance": "imbalance: another rank was late",
    "latency": "latency: the fixed cost of each call",
    "redundancy": "redundancy: more was sent than the ZeRO stage needs",
    "bandwidth": "bandwidth: the link was busy",
    "unknown": "unknown: the wait of these calls was not measured",
}


def page_html(summary: RunSummary, charts: Sequence[Chart]) -> str:
    """Return the report as HTML.

    Args:
        summary: The figures.
        charts: The curves.
    """
    drawn = {chart.name: chart for chart in charts}
    sections = (
        _head(summary),
        section("What to do next", _findings(summary)),
        section("Where the time went", _time(summary), chart_places(drawn, "phases", "throughput")),
        section(
            "Why communication was waited for",
            _communication(summary),
            chart_places(drawn, "exposed", "causes"),
        ),
        section("Memory", _memory(summary), chart_places(drawn, "memory")),
        section(
            "Devices", _devices(summary), chart_places(drawn, "utilization", "temperature", "mfu")
        ),
        section("Loss", _loss(summary), chart_places(drawn, "loss", "gradient_norm")),
        section("Tuner", _tuner(summary)),
        section("Errors and hangs", _incidents(summary)),
        section("Ranks", _ranks(summary)),
        section("Cost of monitoring", _monitoring(summary)),
        section("What is missing", _missing(summary)),
    )
    return document(f"{summary.run_id} - zerowatch report", "".join(sections), charts)


def _head(summary: RunSummary) -> str:
    status, kind = STATUS_TEXTS[summary.status]
    facts = " · ".join(facts_of(summary))
    cards = "".join(
        f'<div class="card"><span>{escape(name)}</span>'
        f'<b data-figure="{figure}" data-value="{summary.figures[figure]}">{escape(text)}</b>'
        "</div>"
        for name, figure, text in headline_figures(summary)
    )
    return (
        f'<header><h1>{escape(summary.run_id)} <span class="status {kind}">{status}</span></h1>'
        f'<div class="verdict">{escape(summary.verdict)}</div>'
        f'<p class="quiet">{escape(facts)}</p><div class="cards">{cards}</div></header>'
    )


def facts_of(summary: RunSummary) -> Iterator[str]:
    """Yield what the run is, in a few words each: ranks, start, duration, versions."""
    facts, info = summary.facts, summary.facts.info
    if facts.world_size:
        hosts = f" on {len(facts.hosts)} hosts" if len(facts.hosts) > 1 else ""
        yield f"{facts.world_size} rank{'' if facts.world_size == 1 else 's'}{hosts}"
    if info:
        yield _listed(info, {"zero_stage": "ZeRO ", "accelerator": "", "backend": ""})
    if facts.started is not None:
        yield f"{datetime.fromtimestamp(facts.started, UTC):%Y-%m-%d %H:%M} UTC"
        if facts.ended is not None:
            yield format_duration(facts.ended - facts.started)
    if facts.attempts > 1:
        yield f"{facts.attempts} attempts"
    if info:
        names = {"torch": "torch ", "deepspeed": "deepspeed ", "version": "zerowatch "}
        yield _listed(info, names)


def _listed(info: Mapping[str, str], prefixes: Mapping[str, str]) -> str:
    """Join facts. Those that are "none" are left out, and those that a damaged log lacks."""
    return ", ".join(
        f"{prefix}{info[name]}"
        for name, prefix in prefixes.items()
        if info.get(name, "none") != "none"
    )


def headline_figures(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """Yield the most important figures: title, name of the figure, and text."""
    figures = summary.figures
    exposed = "waited for communication"
    rows = (
        ("steps", "steps", _count(figures["steps"])),
        ("time of a step", "step_seconds", format_seconds(figures["step_seconds"])),
        ("tokens/s", "tokens_per_second", _count(figures["tokens_per_second"])),
        ("samples/s", "samples_per_second", _count(figures["samples_per_second"])),
        ("MFU", "mfu_ratio", percent(figures["mfu_ratio"])),
        (exposed, "comm_exposed_ratio", percent(figures["comm_exposed_ratio"])),
        ("peak memory", "memory_peak_ratio", percent(figures["memory_peak_ratio"])),
        ("highest memory risk", "oom_risk_ratio", percent(figures["oom_risk_ratio"])),
        (
            "devices busy",
            "device_utilization_ratio",
            percent(figures["device_utilization_ratio"]),
        ),
        (_loss_name(figures["steps"]), "loss", _loss_text(figures["loss"])),
    )
    yield from (row for row in rows if figures[row[1]] is not None)


def _loss_name(steps: float | None) -> str:
    num = num_last_steps(steps or 0.0)
    return f"loss, last {num} steps" if num > 1 else "loss, last step"


def _loss_text(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.4g}"


def _count(number: float | None) -> str:
    if number is None:
        return UNKNOWN
    return f"{number:,.0f}" if number >= 1000 or number == int(number) else f"{number:.3g}"


def _findings(summary: RunSummary) -> str:
    if not summary.findings:
        return paragraph("No figure is beyond its usual limit.")
    return f'<ol class="findings">{"".join(map(_finding, summary.findings))}</ol>'


def _finding(finding: Finding) -> str:
    return (
        f'<li class="{finding.severity}"><strong>{escape(finding.sentence)}</strong>'
        f"<span>{escape(finding.advice)}</span></li>"
    )


def _time(summary: RunSummary) -> str:
    if not summary.phases:
        return paragraph("No step was recorded.")
    # Evaluation and checkpoints are outside of training time.
    inside = [share for share in summary.phases if share.name not in NON_TRAINING_PHASES]
    shares = [(share.name, share.ratio, COLORS.get(share.name, NUM_COLORS)) for share in inside]
    rows = [
        (
            Html(f"{swatch(COLORS.get(share.name, NUM_COLORS))}{escape(phase_text(share))}"),
            (share.ratio, percent(share.ratio)),
            (share.seconds_per_step, format_seconds(share.seconds_per_step)),
            (share.seconds, format_duration(share.seconds)),
        )
        for share in summary.phases
    ]
    phases = table(("phase", "share of training time", "per step", "of each rank"), rows)
    figures = summary.figures
    quantiles = ""
    if figures["step_seconds_p50"] is not None:
        quantiles = paragraph(
            f"Half of the steps took at most {format_seconds(figures['step_seconds_p50'])}, 90 % "
            f"at most {format_seconds(figures['step_seconds_p90'])}, 99 % at most "
            f"{format_seconds(figures['step_seconds_p99'])}."
        )
    return bar(shares) + phases + quantiles


def phase_text(share: TimeShare) -> str:
    """Return the name of a phase. Training's phases add up to its time, the others come on top."""
    besides = " (besides training, of wall time)" if share.name in NON_TRAINING_PHASES else ""
    return f"{share.name}{besides}"


def _communication(summary: RunSummary) -> str:
    figures = summary.figures
    exposed, comm = figures["comm_exposed_ratio"], figures["comm_ratio"]
    if exposed is None and comm is None:
        return paragraph("Communication was not recorded.")
    most = "at most " if summary.is_upper_bound else ""
    text = (
        f"A collective was in flight {most}{percent(comm)} of wall time. Training waited for "
        f"communication {percent(exposed)} of its time; the rest was hidden behind computation."
    )
    parts = [paragraph(text)]
    if summary.causes:
        whole = sum(share.seconds for share in summary.causes)
        if whole:
            parts.append(bar([(s.name, s.seconds / whole, COLORS[s.name]) for s in summary.causes]))
        rows = [
            (
                Html(swatch(COLORS[share.name]) + escape(CAUSE_TEXTS[share.name])),
                percent(share.seconds / whole) if whole else UNKNOWN,
                (share.ratio, percent(share.ratio)),
                (share.seconds_per_step, format_seconds(share.seconds_per_step)),
                (share.seconds, format_duration(share.seconds)),
            )
            for share in summary.causes
        ]
        heads = ("cause", "share of waiting", "share of training time", "per step", "of each rank")
        parts.append(table(heads, rows))
    else:
        parts.append(paragraph(f"Causes: {NOT_RECORDED}.", "quiet"))
    checks = [
        f"{name} {text}"
        for name, text in (
            ("recorded collectives", _known_percent(figures["comm_coverage_ratio"])),
            ("bytes over the reference of the ZeRO stage", _factor(figures["comm_volume_ratio"])),
            ("link against its best bandwidth", _known_percent(figures["link_bandwidth_ratio"])),
        )
        if text
    ]
    if checks:
        parts.append(paragraph("; ".join(checks) + ".", "quiet"))
    if summary.collectives:
        operations = [
            (
                each.op,
                f"{each.calls_per_step:.3g}",
                format_bytes(each.payload_bytes_per_step),
                format_bytes(each.wire_bytes_per_step),
                format_seconds(each.seconds_per_step),
                UNKNOWN if each.bandwidth is None else f"{format_bytes(each.bandwidth)}/s",
            )
            for each in summary.collectives
        ]
        heads_of_operations = (
            "per step and rank",
            "calls",
            "payload",
            "sent",
            "in flight",
            "bandwidth",
        )
        parts.append(table(heads_of_operations, operations))
    return "".join(parts)


def _known_percent(ratio: float | None) -> str:
    return "" if ratio is None else percent(ratio)


def _factor(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _memory(summary: RunSummary) -> str:
    if not summary.memory:
        return paragraph(f"Memory: {NOT_RECORDED}.", "quiet")
    parts = []
    for each in summary.memory:
        sentences = [
            f"{each.device} on rank {each.rank}, the fullest: peak {format_bytes(each.peak_bytes)} "
            f"of {format_bytes(each.limit_bytes)} ({percent(each.peak_ratio)})"
        ]
        if each.headroom_bytes is not None:
            sentences.append(f"{format_bytes(each.headroom_bytes)} left at the predicted next peak")
        if each.risk_ratio is not None:
            sentences.append(
                f"risk to run out of memory within 50 steps {percent(each.risk_ratio)} at the end, "
                f"{percent(each.highest_risk_ratio)} at the highest"
            )
        parts.append(paragraph("; ".join(sentences) + "."))
        limit = each.limit_bytes or sum(each.categories.values())
        if each.categories and limit:
            shares = [
                (name, size / limit, 1 + place)
                for place, (name, size) in enumerate(each.categories.items())
            ]
            rows = [
                (
                    Html(swatch(color) + escape(name)),
                    (each.categories[name], format_bytes(each.categories[name])),
                    percent(share),
                )
                for name, share, color in shares
            ]
            parts.append(bar(shares))
            parts.append(table(("category at a step's peak", "size", "share of limit"), rows))
        else:
            parts.append(paragraph(f"Categories on {each.device}: {NOT_RECORDED}.", "quiet"))
        for category, growth in each.leak_bytes_per_step.items():
            parts.append(
                paragraph(f"Leak in {category}: {format_bytes(growth)} per step.", "warning")
            )
    return "".join(parts)


def _devices(summary: RunSummary) -> str:
    if not summary.devices:
        return paragraph(f"Devices: {NOT_RECORDED}.", "quiet")
    rows = [
        (f"{each.device}: {_reading_name(name)}", *(_reading(name, value) for value in values))
        for each in summary.devices
        for name, values in each.readings.items()
    ]
    readings = table(("reading, over ranks and time", "lowest", "mean", "highest"), rows)
    events = [
        f"{name}: {value:,.3g}" for each in summary.devices for name, value in each.events.items()
    ]
    note = "On the CPU, a rank measures only its own use."
    return readings + paragraph("; ".join(events) if events else note, "quiet")


def _reading_name(name: str) -> str:
    return name.rsplit("_", 1)[0].replace("_", " ")


def _reading(name: str, value: float) -> str:
    unit = name.rsplit("_", 1)[-1]
    if unit == "ratio":
        return percent(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "hertz":
        return f"{value / 1e9:.2f} GHz"
    return f"{value:,.4g} {dict(celsius='°C', watts='W', joules='J').get(unit, unit)}"


def _loss(summary: RunSummary) -> str:
    figures = summary.figures
    if figures["loss"] is not None:
        text = f"Mean of all ranks over the last steps: {figures['loss']:.4g}."
    elif figures["nonfinite_losses"]:
        text = "The loss of the last steps was nan or inf."
    else:
        return paragraph(f"Loss: {NOT_RECORDED}.", "quiet")
    if skipped := figures["skipped_ratio"]:
        text += f" Skipped steps: {percent(skipped)}."
    if nonfinite := figures["nonfinite_losses"]:
        text += f" Steps with nan or inf: {nonfinite:.0f}."
    return paragraph(text)


def _tuner(summary: RunSummary) -> str:
    tuner = summary.tuner
    decisions = tuner.decisions[-MAX_DECISIONS:]
    if not decisions:
        return paragraph(without_decisions(summary), "quiet")
    rows = [
        (
            str(each.step),
            Html(escape(each.change)),
            each.verdict.replace("_", " "),
            gain_text(each),
            f"{each.pairs} pairs, {each.steps} steps, {format_seconds(each.exploration_seconds)}",
            Html(escape(f"{each.symptom}; {each.numerics}; {each.reason}".strip("; "))),
        )
        for each in decisions
    ]
    heads = ("step", "change", "verdict", "gain", "proof and cost", "why")
    return table(heads, rows, kind="wide")


def without_decisions(summary: RunSummary) -> str:
    """Return why there are no decisions of the tuner, as far as it is recorded."""
    tuner = summary.tuner
    if tuner.mode == "off":
        return "The tuner was off."
    mode = "" if tuner.mode is None else f" The tuner was in the mode {tuner.mode}."
    if tuner.symptoms is None and tuner.discarded_observations:
        duration = format_duration(summary.figures["seconds"] or 0.0)
        reason = format_discarded(tuner.discarded_observations, duration)
        return f"No decision or advice: {reason}.{mode}"
    if tuner.symptoms is None:
        return f"No decision or advice was recorded.{mode}"
    problems = ", ".join(
        f"{name} {percent(value)}"
        for name, value in tuner.symptoms.items()
        if name != "memory_idle"
    )
    state = "" if tuner.state is None else f" Last state: {tuner.state}."
    seconds, steps = summary.figures["seconds"] or 0.0, summary.figures["steps"] or 0.0
    if problems:
        found = f"Symptoms: {problems}."
    elif seconds < DIAGNOSIS_SECONDS or steps < DIAGNOSIS_STEPS:
        found = "The run was too short for a diagnosis."
    else:
        found = "It found nothing that holds the run back."
    return f"No decision or advice.{mode} {found}{state}"


def gain_text(decision: TunerDecision) -> str:
    """Return the measured gain with its bounds, or the predicted one."""
    if decision.gain is None:
        predicted = decision.predicted_gain
        return UNKNOWN if predicted is None else f"predicted {100 * predicted:+.1f} %"
    text = f"{100 * decision.gain:+.1f} %"
    if decision.lower is None or decision.upper is None:
        return text
    return f"{text} ({100 * decision.lower:+.1f} to {100 * decision.upper:+.1f} %)"


def _incidents(summary: RunSummary) -> str:
    if not summary.incidents:
        return paragraph("No report on an error, a leak or a hang.")
    parts = []
    room = MAX_INCIDENT_BYTES
    for each in summary.incidents:
        text = each.text if len(each.text) <= room else "The text is in the run folder."
        room -= len(text)
        parts.append(_incident(each, text))
    return "".join(parts)


def _incident(incident: Incident, text: str) -> str:
    return (
        f"<details><summary><b>{escape(incident.kind.replace('_', ' '))}</b> "
        f"<code>{escape(incident.path)}</code>: {escape(incident.headline)}</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def _ranks(summary: RunSummary) -> str:
    if not summary.ranks:
        return paragraph("No rank has recorded a step.", "quiet")
    rows = [
        (
            (row.rank, row.rank),
            row.host,
            (row.steps, f"{row.steps:,}"),
            (row.last_step, f"{row.last_step:,}"),
            (row.step_seconds, format_seconds(row.step_seconds)),
            (row.exposed_ratio, percent(row.exposed_ratio)),
            (row.wait_ratio, percent(row.wait_ratio)),
            (row.data_ratio, percent(row.data_ratio)),
            (row.straggler_score, _straggler(row.straggler_phase, row.straggler_score)),
            (row.memory_peak_ratio, percent(row.memory_peak_ratio)),
            (row.oom_risk_ratio, percent(row.oom_risk_ratio)),
            (row.utilization_ratio, percent(row.utilization_ratio)),
            (row.mfu_ratio, percent(row.mfu_ratio)),
        )
        for row in summary.ranks[:MAX_RANKS]
    ]
    heads = (
        "rank",
        "host",
        "steps",
        "last step",
        "step time",
        "exposed",
        "waits for later ranks",
        "data",
        "behind the median rank",
        "peak memory",
        "highest risk",
        "busy",
        "MFU",
    )
    more = len(summary.ranks) - MAX_RANKS
    notes = [f"{more} more ranks are in the JSON report."] if more > 0 else []
    notes += summary.notes
    return table(heads, rows, kind="sortable") + "".join(paragraph(x, "quiet") for x in notes)


def _straggler(phase: str | None, score: float | None) -> str:
    return UNKNOWN if score is None else f"{100 * score:+.1f} % in {phase}"


def _monitoring(summary: RunSummary) -> str:
    cost = summary.monitoring
    if cost.ratio is None:
        return paragraph(f"Cost: {NOT_RECORDED}.", "quiet")
    rows = [(part.replace("_", " "), format_seconds(value)) for part, value in cost.seconds.items()]
    lost = [
        *(f"{value:,.0f} records lost by {part}" for part, value in cost.dropped.items()),
        *(
            f"{value:,.0f} failures of the hook {hook}"
            for hook, value in cost.hook_failures.items()
        ),
    ]
    return (
        paragraph(f"Monitoring took {percent(cost.ratio)} of the time of each rank.")
        + table(("part", "of each rank"), rows)
        + paragraph("; ".join(lost) + "." if lost else "Nothing was lost, no hook failed.")
    )


def _missing(summary: RunSummary) -> str:
    if not summary.problems:
        return paragraph("All files of the run were there and whole.")
    items = "".join(f"<li>{escape(problem)}</li>" for problem in summary.problems)
    return f"<ul>{items}</ul>"
