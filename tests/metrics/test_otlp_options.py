"""Tests of what is sent by OTLP: settings and OpenTelemetry's environment variables."""

from __future__ import annotations

import logging

import pytest

from zerowatch.metrics.exporters.otlp_options import otlp_options
from zerowatch.metrics.settings import OtelSettings

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}


def options(settings=None, **variables):
    return otlp_options(
        OtelSettings(**(settings or {})),
        {name: str(text) for name, text in variables.items()},
    )


def warnings(found):
    return [text for level, text in found.remarks if level >= logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "variables", "expected"),
    [
        ({}, {}, {}),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, {}),
        ({}, ENDPOINT, {"traces": "http://a:4318/v1/traces"}),
        ({"endpoint": "http://b:1/"}, ENDPOINT, {"traces": "http://b:1/v1/traces"}),
        (
            {"metrics": True, "traces": False},
            ENDPOINT,
            {"metrics": "http://a:4318/v1/metrics"},
        ),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/t"}, {"traces": "http://b/t"}),
        ({}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://b/m"}, {"metrics": "http://b/m"}),
        ({}, {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://b/l"}, {"logs": "http://b/l"}),
        (
            {},
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://b/l"},
            {"traces": "http://a:4318/v1/traces", "logs": "http://b/l"},
        ),
        ({}, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, {}),
        ({}, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "console"}, {}),
        (
            {},
            {
                **ENDPOINT,
                "OTEL_TRACES_EXPORTER": "otlp_proto_http",
                "OTEL_METRICS_EXPORTER": "console,OTLP_proto_http",
                "OTEL_LOGS_EXPORTER": "otlp_proto_http",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            {signal: f"http://a:4318/v1/{signal}" for signal in ("traces", "metrics", "logs")},
        ),
        (
            {},
            {**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp_proto_grpc,otlp"},
            {"traces": "http://a:4318/v1/traces"},
        ),
        (
            {"endpoint": "http://b:1"},
            {"OTEL_TRACES_EXPORTER": "otlp_proto_grpc"},
            {"traces": "http://b:1/v1/traces"},
        ),
        ({}, {"OTEL_TRACES_EXPORTER": "otlp_proto_grpc"}, {}),
        (
            {"traces": True},
            {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
            {"traces": "http://a:4318/v1/traces"},
        ),
        (
            {},
            {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "otlp,console"},
            {"metrics": "http://a:4318/v1/metrics"},
        ),
        (
            {},
            {
                **ENDPOINT,
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://b/m",
            },
            {"traces": "http://a:4318/v1/traces"},
        ),
        ({}, {**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, {}),
        ({"endpoint": "http://b:1"}, {"OTEL_SDK_DISABLED": "true"}, {}),
        ({}, {**ENDPOINT, "OTEL_TRACES_SAMPLER": "always_off"}, {}),
    ],
)
def test_each_signal_is_sent_to_its_endpoint_if_it_is_wanted(settings, variables, expected):
    found = options(settings, **variables)

    assert found.endpoints == expected
    assert found.timeouts.keys() == expected.keys()
    assert warnings(found) == []


@pytest.mark.parametrize("name", ["PROTOCOL", "TRACES_PROTOCOL"])
def test_a_protocol_that_is_not_supported_is_warned_of(name):
    found = options(**ENDPOINT, **{f"OTEL_EXPORTER_OTLP_{name}": "grpc"})

    assert found.endpoints == {}
    [line] = warnings(found)
    assert f"OTEL_EXPORTER_OTLP_{name} is grpc" in line
    assert "http/protobuf" in line
    assert "4318" in line


def test_an_exporter_whose_protocol_is_not_supported_is_warned_of():
    found = options(
        **ENDPOINT,
        OTEL_TRACES_EXPORTER="none",
        OTEL_METRICS_EXPORTER="otlp_proto_grpc",
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
    )

    assert found.endpoints == {}
    [line] = warnings(found)
    assert "OTEL_METRICS_EXPORTER is otlp_proto_grpc" in line
    assert "OTEL_METRICS_EXPORTER=otlp_proto_http" in line
    assert "4318" in line


def test_the_protocol_of_a_signal_takes_precedence():
    found = options(
        **ENDPOINT,
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
    )

    assert list(found.endpoints) == ["traces"]
    assert warnings(found) == []


def test_the_protocol_of_the_script_does_not_concern_an_endpoint_of_the_settings():
    found = options({"endpoint": "http://b:1"}, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")

    assert list(found.endpoints) == ["traces"]
    assert warnings(found) == []


def test_an_endpoint_that_is_no_url_is_warned_of():
    found = options(OTEL_EXPORTER_OTLP_ENDPOINT="collector:4317")

    assert found.endpoints == {}
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in warnings(found)[0]


@pytest.mark.parametrize(
    ("settings", "variables", "seconds"),
    [
        ({}, {}, 5.0),
        ({}, {"OTEL_EXPORTER_OTLP_TIMEOUT": 7}, 7.0),
        ({}, {"OTEL_EXPORTER_OTLP_TIMEOUT": 7, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": 8}, 8.0),
        ({"timeout_seconds": 2}, {"OTEL_EXPORTER_OTLP_TIMEOUT": 7}, 2.0),
    ],
)
def test_the_timeout_is_the_settings_else_the_signals(settings, variables, seconds):
    assert options(settings, **ENDPOINT, **variables).timeouts == {"traces": seconds}


@pytest.mark.parametrize(
    ("settings", "variables", "ratio"),
    [
        ({}, {}, 0.01),
        ({"every_steps": 50}, {"OTEL_TRACES_SAMPLER": "always_on"}, 0.02),
        ({}, {"OTEL_TRACES_SAMPLER": "always_on"}, 1.0),
        ({}, {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, 1.0),
        ({}, {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": 0.25}, 0.25),
        (
            {},
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": 0.5},
            0.5,
        ),
        ({}, {"OTEL_TRACES_SAMPLER": "traceidratio"}, 1.0),
    ],
)
def test_the_share_of_traced_steps_is_the_settings_else_the_samplers(settings, variables, ratio):
    found = options(settings, **ENDPOINT, **variables)

    assert found.sample_ratio == ratio
    assert warnings(found) == []


@pytest.mark.parametrize(
    ("settings", "variables", "seconds"),
    [
        ({}, {}, 15.0),
        ({}, {"OTEL_METRIC_EXPORT_INTERVAL": 60_000}, 60.0),
        ({"metrics_interval_seconds": 5}, {"OTEL_METRIC_EXPORT_INTERVAL": 60_000}, 5.0),
    ],
)
def test_the_interval_of_metrics_is_the_settings_else_the_variables(settings, variables, seconds):
    assert options(settings, **ENDPOINT, **variables).metrics_interval_seconds == seconds


@pytest.mark.parametrize(
    ("text", "sends_increases"),
    [("cumulative", False), ("DELTA", True), ("lowmemory", True)],
)
def test_the_temporality_is_the_preferred_one(text, sends_increases):
    name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"

    assert options(**ENDPOINT, **{name: text}).sends_increases is sends_increases


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_TRACES_SAMPLER",
        "OTEL_EXPORTER_OTLP_TIMEOUT",
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
    ],
)
def test_a_value_that_cannot_be_used_is_warned_of_and_the_default_is_taken(name):
    plain, found = options(**ENDPOINT), options(**ENDPOINT, **{name: "-odd"})

    [line] = warnings(found)
    assert line.startswith(f"{name}=-odd")
    assert (found.endpoints, found.timeouts) == (plain.endpoints, plain.timeouts)
    assert found.sample_ratio == plain.sample_ratio


def test_variables_without_effect_are_named_once():
    found = options(
        **ENDPOINT,
        OTEL_BSP_MAX_QUEUE_SIZE=99,
        OTEL_BLRP_SCHEDULE_DELAY=99,
        OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=9,
        OTEL_PROPAGATORS="b3",
    )

    [(level, line)] = found.remarks
    assert level == logging.INFO
    assert line.startswith(
        "OTEL_BLRP_SCHEDULE_DELAY, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT: "
    )


def test_nothing_is_remarked_on_if_nothing_is_sent():
    assert options(OTEL_BSP_MAX_QUEUE_SIZE=99, OTEL_TRACES_SAMPLER="odd").remarks == ()
