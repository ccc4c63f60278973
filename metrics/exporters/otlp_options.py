"""Decides what is sent by OTLP, from the settings and OpenTelemetry's environment variables.

A setting of zerowatch takes precedence over a variable, except OTEL_SDK_DISABLED, which switches
everything off. The SDK itself reads the variables of headers, certificates and compression.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..settings import OtelSettings

Signal = Literal["traces", "metrics", "logs"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)

PROTOCOL = "http/protobuf"
# The names in OTEL_<SIGNAL>_EXPORTER that choose OTLP. The last two, of OpenTelemetry's SDK for
# Python, also choose the protocol. They take precedence over the variables of the protocol.
_OTLP, _OTLP_HTTP, _OTLP_GRPC = "otlp", "otlp_proto_http", "otlp_proto_grpc"
DEFAULT_TIMEOUT_SECONDS = 5.0
DEFAULT_METRICS_INTERVAL_SECONDS = 15.0
DEFAULT_EVERY_STEPS = 100

# Variables that have no effect on zerowatch. It sends one trace per request every two seconds, from
# a queue of fixed size, so that encoding never holds the interpreter for long.
_WITHOUT_EFFECT = re.compile(
    r"OTEL_(BSP_|BLRP_|METRIC_EXPORT_TIMEOUT|CONFIG_FILE|METRICS_EXEMPLAR_FILTER"
    r"|EXPORTER_OTLP_(\w+_)?INSECURE|\w*(COUNT|LENGTH)_LIMIT$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpOptions:
    """What is sent, where, and how often.

    Attributes:
        endpoints: The full URL of each signal that is sent. Empty if nothing is sent.
        timeouts: The timeout of an export of each signal, in seconds.
        sample_ratio: Share of the steps that are traced on all ranks, 0 to 1.
        metrics_interval_seconds: Seconds between two exports of the metrics.
        sends_increases: Whether counters and histograms are sent as the increase since the last
            export (delta temporality), instead of the total (cumulative).
        has_exponential_histograms: Whether histograms are sent with exponential buckets.
        remarks: Lines for the log, each with its level.
    """

    endpoints: Mapping[Signal, str]
    timeouts: Mapping[Signal, float]
    sample_ratio: float
    metrics_interval_seconds: float
    sends_increases: bool = False
    has_exponential_histograms: bool = False
    remarks: tuple[tuple[int, str], ...] = ()


def otlp_options(settings: OtelSettings, environment: Mapping[str, str]) -> OtlpOptions:
    """Return what is sent by OTLP.

    Args:
        settings: The section `otel` of the settings.
        environment: The environment variables.

    Examples:
        >>> options = otlp_options(OtelSettings(endpoint="http://collector:4318"), {})
        >>> options.endpoints
        {'traces': 'http://collector:4318/v1/traces'}
    """
    return _Reader(settings, environment).options()


class _Reader:
    """Reads the variables, and collects a remark on each value that is not usable."""

    def __init__(self, settings: OtelSettings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._variables = {name: text.strip() for name, text in environment.items() if text.strip()}
        self._remarks: list[tuple[int, str]] = []
        self._refused: set[str] = set()  # the remarks on endpoints that are not used

    def options(self) -> OtlpOptions:
        ratio = self._sample_ratio()
        endpoints: dict[Signal, str] = {}
        if self._lower("OTEL_SDK_DISABLED") != "true":
            for signal in SIGNALS:
                url = self._endpoint(signal) if self._is_wanted(signal) else None
                if url is not None and (signal != "traces" or ratio > 0):
                    endpoints[signal] = url
        interval_seconds = self._settings.metrics_interval_seconds
        if interval_seconds is None:
            interval_ms = self._number("OTEL_METRIC_EXPORT_INTERVAL", least=1000.0)
            interval_seconds = interval_ms / 1000 if interval_ms else None
        options = OtlpOptions(
            endpoints=endpoints,
            timeouts={signal: self._timeout_seconds(signal) for signal in endpoints},
            sample_ratio=ratio,
            metrics_interval_seconds=interval_seconds or DEFAULT_METRICS_INTERVAL_SECONDS,
            sends_increases=self._choice(
                "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
                {"cumulative": False, "delta": True, "lowmemory": True},
            ),
            has_exponential_histograms=self._choice(
                "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
                {"explicit_bucket_histogram": False, "base2_exponential_bucket_histogram": True},
            ),
            remarks=(*self._remarks, *self._on_variables_without_effect()),
        )
        if endpoints or self._settings.endpoint:
            return options
        # Without an export, the variables are those of the script's own SDK.
        refused = tuple(remark for remark in options.remarks if remark[1] in self._refused)
        return replace(
            options, sends_increases=False, has_exponential_histograms=False, remarks=refused
        )

    def _is_wanted(self, signal: Signal) -> bool:
        setting = getattr(self._settings, signal)
        if setting is not None:
            return bool(setting)
        exporters = self._exporters(signal)
        if exporters:
            return not exporters.isdisjoint((_OTLP, _OTLP_HTTP, _OTLP_GRPC))
        own_endpoint = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        return signal == "traces" or own_endpoint in self._variables

    def _exporters(self, signal: Signal) -> set[str]:
        text = self._lower(f"OTEL_{signal.upper()}_EXPORTER")
        return {name.strip() for name in text.split(",")} if text else set()

    def _refused_protocol(self, signal: Signal) -> tuple[str, str] | None:
        """Return what chooses a protocol that is not supported, and what to set instead."""
        exporters, variable = self._exporters(signal), f"OTEL_{signal.upper()}_EXPORTER"
        if _OTLP_HTTP in exporters:
            return None
        if _OTLP_GRPC in exporters and _OTLP not in exporters:
            return f"{variable} is {_OTLP_GRPC}", f"{variable}={_OTLP_HTTP}"
        found = self._own_or_common(signal, "PROTOCOL")
        if found is None or found[1].lower() == PROTOCOL:
            return None
        return (
            f"{found[0]} is {found[1]}",
            f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL={PROTOCOL}",
        )

    def _endpoint(self, signal: Signal) -> str | None:
        """Return the URL of a signal, or None if there is none, or none that zerowatch supports."""
        if self._settings.endpoint is not None:
            return _below(self._settings.endpoint, signal)
        own, common = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        name = own if own in self._variables else common
        url = self._variables.get(name)
        if url is None:
            return None
        refused = self._refused_protocol(signal)
        if refused is not None:
            self._refuse(
                f"{signal} are not sent by OTLP: {refused[0]}, and zerowatch supports {PROTOCOL} "
                f"only. Set {refused[1]} and an endpoint with the collector's port for HTTP, "
                "usually 4318"
            )
            return None
        if not re.match(r"https?://", url):
            self._refuse(f"{signal} are not sent by OTLP: {name} is no http:// or https:// URL")
            return None
        return url if name == own else _below(url, signal)

    def _timeout_seconds(self, signal: Signal) -> float:
        if self._settings.timeout_seconds is not None:
            return self._settings.timeout_seconds
        found = self._own_or_common(signal, "TIMEOUT")
        seconds = None if found is None else self._number(found[0], least=0.001)
        return seconds or DEFAULT_TIMEOUT_SECONDS

    def _sample_ratio(self) -> float:
        if self._settings.every_steps is not None:
            return 1 / self._settings.every_steps
        # A step has no parent outside of zerowatch, so `parentbased_` makes no difference.
        sampler = self._lower("OTEL_TRACES_SAMPLER").removeprefix("parentbased_")
        match sampler:
            case "":
                return 1 / DEFAULT_EVERY_STEPS
            case "always_on":
                return 1.0
            case "always_off":
                return 0.0
            case "traceidratio":
                ratio = self._number("OTEL_TRACES_SAMPLER_ARG", least=0.0)
                return 1.0 if ratio is None else min(ratio, 1.0)
        self._warn(f"OTEL_TRACES_SAMPLER={sampler} is not supported: every 100th step is traced")
        return 1 / DEFAULT_EVERY_STEPS

    def _choice(self, name: str, choices: Mapping[str, bool]) -> bool:
        text = self._lower(name)
        if text and text not in choices:
            self._warn(f"{name}={text} is ignored: it is none of {', '.join(choices)}")
        return choices.get(text, False)

    def _number(self, name: str, *, least: float) -> float | None:
        text = self._variables.get(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if least <= number < float("inf"):
            return number
        self._warn(f"{name}={text} is ignored: it is no number from {least:g} on")
        return None

    def _own_or_common(self, signal: Signal, what: str) -> tuple[str, str] | None:
        """Return the name and text of a signal's own variable, else of that of all signals."""
        for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
            if name in self._variables:
                return name, self._variables[name]
        return None

    def _lower(self, name: str) -> str:
        return self._variables.get(name, "").lower()

    def _refuse(self, text: str) -> None:
        self._refused.add(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        if (logging.WARNING, text) not in self._remarks:
            self._remarks.append((logging.WARNING, text))

    def _on_variables_without_effect(self) -> Iterator[tuple[int, str]]:
        names = sorted(name for name in self._variables if _WITHOUT_EFFECT.match(name))
        if names:
            yield (
                logging.INFO,
                f"{', '.join(names)}: without effect on what zerowatch sends. It sends small "
                "requests from a queue of fixed size",
            )


def _below(base: str, signal: Signal) -> str:
    return f"{base.rstrip('/')}/v1/{signal}"
