"""Tests of the settings: precedence of the sources, `start_folder.py`, and errors in values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from zerowatch.errors import SettingsError
from zerowatch.metrics import settings as settings_module
from zerowatch.metrics.settings import LAUNCHED_RUN_ID, Settings, load_settings
from zerowatch.metrics.thresholds import DEVICE_UTILIZATION_LOW, EXPOSED_COMM_RATIO_HIGH


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ZEROWATCH_")]:
        monkeypatch.delenv(name)


def error_of(arguments=None, ds_block=None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(arguments, ds_block)
    return str(caught.value)


def test_without_any_source_the_defaults_apply():
    settings = load_settings()

    assert settings == Settings()
    assert (settings.serve.host, settings.serve.port) == ("127.0.0.1", 9464)


def test_each_source_overrides_the_sources_below_it(monkeypatch, tmp_path):
    ports = [load_settings().serve.port]
    (tmp_path / "zerowatch.toml").write_text("[serve]\nport = 1001\n")
    ports.append(load_settings().serve.port)
    ds_block = {"serve": {"port": 1002}}
    ports.append(load_settings(None, ds_block).serve.port)
    monkeypatch.setenv("ZEROWATCH_SERVE_PORT", "1003")
    ports.append(load_settings(None, ds_block).serve.port)
    ports.append(load_settings({"serve": {"port": 1004}}, ds_block).serve.port)

    assert ports == [9464, 1001, 1002, 1003, 1004]


@pytest.mark.parametrize(
    ("in_output", "port"), [("", 1001), ("[serve]\nport = 1002\n", 1002)], ids=["none", "another"]
)
def test_a_script_that_changes_its_folder_keeps_the_file_of_its_start(
    tmp_path: Path, in_output: str, port: int
) -> None:
    (tmp_path / "zerowatch.toml").write_text("[serve]\nport = 1001\n")
    (tmp_path / "output").mkdir()
    if in_output:
        (tmp_path / "output/zerowatch.toml").write_text(in_output)
    script = (
        "import os, zerowatch; os.chdir('output')\n"
        "from zerowatch.metrics.settings import load_settings; print(load_settings().serve.port)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{port}\n"


def test_an_error_in_the_file_of_the_start_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start/zerowatch.toml").write_text("[serve]\nport = -1\n")
    monkeypatch.setattr(settings_module, "START_FOLDER", tmp_path / "start")

    assert error_of().startswith(f"setting 'serve.port' ({tmp_path}/start/zerowatch.toml): ")


def test_a_start_in_a_deleted_folder_is_no_error(tmp_path: Path) -> None:
    start = tmp_path / "deleted"
    start.mkdir()
    script = (
        f"import os, sys; os.rmdir({str(start)!r}); import zerowatch; os.chdir('/')\n"
        "from zerowatch.metrics.settings import load_settings\n"
        "from zerowatch.metrics.start_folder import START_FOLDER\n"
        "print(START_FOLDER, load_settings().serve.port)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=start, capture_output=True, text=True, check=True
    )

    assert done.stdout == "None 9464\n"


def test_the_run_id_of_the_launcher_is_used_if_no_source_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LAUNCHED_RUN_ID, "made")

    run_ids = [load_settings().run_id, load_settings(None, {"run_id": "block"}).run_id]
    (tmp_path / "zerowatch.toml").write_text("run_id = 'file'\n")
    run_ids.append(load_settings().run_id)

    assert run_ids == ["made", "block", "file"]


def test_sources_are_merged_setting_by_setting(monkeypatch, tmp_path):
    (tmp_path / "zerowatch.toml").write_text("[serve]\nhost = '127.0.0.2'\nport = 1001\n")
    monkeypatch.setenv("ZEROWATCH_SERVE_LINGER_SECONDS", "3")

    serve = load_settings({"serve": {"port": 1004}}).serve

    assert (serve.host, serve.port, serve.linger_seconds) == ("127.0.0.2", 1004, 3.0)


@pytest.mark.parametrize(
    ("variable", "text", "section", "option", "value"),
    [
        ("ZEROWATCH_ENABLED", "false", None, "enabled", False),
        ("ZEROWATCH_RUN_ID", "night-7", None, "run_id", "night-7"),
        ("ZEROWATCH_RUN_LOG_SEGMENT_BYTES", "8192", "run_log", "segment_bytes", 8192),
        ("ZEROWATCH_SERVE_STRICT_PORT", "1", "serve", "strict_port", True),
        (
            "ZEROWATCH_SAMPLING_DEVICE_INTERVAL_SECONDS",
            "0.5",
            "sampling",
            "device_interval_seconds",
            0.5,
        ),
        ("ZEROWATCH_TUNER_MODE", "auto", "tuner", "mode", "auto"),
        ("ZEROWATCH_TUNER_MAX_EXPOSED_COMM_RATIO", "0.3", "tuner", "max_exposed_comm_ratio", 0.3),
    ],
)
def test_settings_of_every_section_have_an_environment_variable(
    monkeypatch, variable, text, section, option, value
):
    monkeypatch.setenv(variable, text)

    settings = load_settings()

    assert getattr(getattr(settings, section) if section else settings, option) == value


def test_an_empty_environment_variable_is_ignored(monkeypatch):
    monkeypatch.setenv("ZEROWATCH_RUN_ID", "")
    monkeypatch.setenv("ZEROWATCH_SERVE_TLS_KEY", "")

    assert load_settings() == Settings()


def test_a_misspelled_setting_is_reported_with_its_source_and_a_suggestion():
    message = error_of({"serve": {"prot": 1}})

    assert message == (
        "setting 'serve.prot' (call argument) does not exist; did you mean 'serve.port'?"
    )


def test_a_setting_that_is_not_nested_is_reported_with_its_nested_form():
    message = error_of({"serve.port": 9500})

    assert message == (
        "setting 'serve.port' (call argument) must be nested: {'serve': {'port': ...}}"
    )


def test_a_misspelled_section_is_reported_with_a_suggestion():
    message = error_of(None, {"serv": {"port": 1}})

    assert message == (
        "setting 'serv' (\"zerowatch\" block of the ds config) does not exist; "
        "did you mean 'serve'?"
    )


def test_an_unknown_setting_without_a_close_match_gets_no_suggestion():
    assert error_of({"xyzzy": 1}) == "setting 'xyzzy' (call argument) does not exist"


def test_a_misspelled_environment_variable_is_reported_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("ZEROWATCH_SERVE_PROT", "1")

    assert error_of() == (
        "environment variable ZEROWATCH_SERVE_PROT is no setting; "
        "did you mean 'ZEROWATCH_SERVE_PORT'?"
    )


def service_links(service: str, port: int = 80, protocol: str = "TCP") -> dict[str, str]:
    """Return the variables that Kubernetes sets for a Service with a port called `http`."""
    name = service.upper().replace("-", "_")
    url = f"{protocol.lower()}://10.96.0.7:{port}"
    return {
        f"{name}_SERVICE_HOST": "10.96.0.7",
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP": str(port),
        f"{name}_PORT": url,
        f"{name}_PORT_{port}_{protocol}": url,
        f"{name}_PORT_{port}_{protocol}_PROTO": protocol.lower(),
        f"{name}_PORT_{port}_{protocol}_PORT": str(port),
        f"{name}_PORT_{port}_{protocol}_ADDR": "10.96.0.7",
    }


@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize(
    "service", ["zerowatch", "zerowatch-targets", "zerowatch-service", "zerowatch-serve"]
)
def test_the_variables_of_a_service_of_kubernetes_are_no_settings(monkeypatch, service, protocol):
    for name, text in service_links(service, 9463, protocol).items():
        monkeypatch.setenv(name, text)

    assert load_settings() == Settings()


def test_a_setting_is_read_beside_a_service_whose_variable_has_its_name(monkeypatch):
    # What the pod itself sets has precedence over the variables of Services.
    for name, text in {**service_links("zerowatch-serve"), "ZEROWATCH_SERVE_PORT": "1003"}.items():
        monkeypatch.setenv(name, text)

    assert load_settings().serve.port == 1003


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ZEROWATCH_SERVICE_PORT", "9500"),
        ("ZEROWATCH_SERVE_SERVICE_HOST", "0.0.0.0"),
        ("ZEROWATCH_SERVER_PORT", "9500"),
        ("ZEROWATCH_TARGETS_RUNS", "/runs"),
    ],
)
def test_a_name_that_only_looks_like_a_service_is_reported(monkeypatch, name, text):
    for link, value in service_links("zerowatch-targets").items():
        monkeypatch.setenv(link, value)
    monkeypatch.setenv(name, text)

    assert error_of().startswith(f"environment variable {name} is no setting")


def test_a_value_of_the_wrong_type_is_reported_with_the_given_value(monkeypatch):
    monkeypatch.setenv("ZEROWATCH_SERVE_PORT", "http")

    message = error_of()

    assert message.startswith("setting 'serve.port' (environment): Input should be a valid integer")
    assert message.endswith("got 'http'")


def test_a_value_out_of_bounds_is_reported_with_the_bounds():
    assert error_of({"serve": {"port": 70000}}) == (
        "setting 'serve.port' (call argument): "
        "Input should be less than or equal to 65535, got 70000"
    )


def test_an_unknown_choice_is_reported_with_the_choices():
    message = error_of({"flops": {"method": "exact"}})

    assert "'analytic' or 'off'" in message
    assert message.endswith("got 'exact'")


def test_an_invalid_value_in_the_file_is_reported_with_the_file_name(tmp_path):
    (tmp_path / "zerowatch.toml").write_text("[serve]\nport = -1\n")

    assert error_of().startswith("setting 'serve.port' (zerowatch.toml): ")


def test_a_file_that_is_not_valid_toml_is_reported(tmp_path):
    (tmp_path / "zerowatch.toml").write_text("serve: {port: 1}\n")

    assert error_of().startswith("zerowatch.toml is not valid TOML: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_reported(tmp_path):
    (tmp_path / "zerowatch.toml").touch(mode=0o000)

    assert error_of() == "zerowatch.toml cannot be read: Permission denied"


RUN_IDS_OF_NO_FOLDER = ["../elsewhere", ".", "..", ".tuner", "", "a\n", "a b", 81 * "x"]


@pytest.mark.parametrize("run_id", RUN_IDS_OF_NO_FOLDER)
def test_a_run_id_that_is_no_plain_folder_name_is_rejected(run_id):
    message = error_of({"run_id": run_id})

    assert message.startswith("setting 'run_id' (call argument): ")
    assert "1 to 80 letters" in message


@pytest.mark.parametrize("run_id", ["night-7", "a.b", "_x", 80 * "x"])
def test_a_run_id_that_is_a_plain_folder_name_is_accepted(run_id):
    assert load_settings({"run_id": run_id}).run_id == run_id


def test_a_certificate_without_its_key_is_rejected():
    message = error_of({"serve": {"tls_certificate": "a.pem"}})

    assert "tls_certificate and tls_key go together" in message


def test_a_client_authority_without_a_certificate_is_rejected():
    message = error_of({"serve": {"tls_client_ca": "a.pem"}})

    assert "tls_client_ca needs tls_certificate and tls_key" in message


def test_a_certificate_and_its_key_may_come_from_different_sources(monkeypatch):
    monkeypatch.setenv("ZEROWATCH_SERVE_TLS_KEY", "/run/secrets/key.pem")

    serve = load_settings(None, {"serve": {"tls_certificate": "cert.pem"}}).serve

    assert (str(serve.tls_certificate), str(serve.tls_key)) == ("cert.pem", "/run/secrets/key.pem")


@pytest.mark.parametrize("text", ["http://127.0.0.1:4318", "https://c.example/otlp/", "http://c"])
def test_a_base_url_of_a_collector_is_accepted_unchanged(text):
    assert load_settings({"otel": {"endpoint": text}}).otel.endpoint == text


@pytest.mark.parametrize(
    "text", ["c:4318", "http://c:4318/v1/traces", "http://c:4318?key=1", "ftp://c", "http://a b"]
)
def test_an_invalid_base_url_is_reported_with_an_example(text):
    assert error_of({"otel": {"endpoint": text}}) == (
        "setting 'otel.endpoint' (call argument): must be a base URL such as "
        "http://127.0.0.1:4318, without /v1/traces and without credentials, which go into "
        f"OTEL_EXPORTER_OTLP_HEADERS, got {text!r}"
    )


@pytest.mark.parametrize("password", ["hunter2", "hun@ter2", "hun/ter2"])
def test_an_address_with_a_password_is_rejected_and_the_password_is_not_shown(
    monkeypatch, password
):
    monkeypatch.setenv("ZEROWATCH_OTEL_ENDPOINT", f"http://me:{password}@c:4318")

    assert error_of().endswith("got 'http://***@c:4318'")


def test_an_unknown_numerics_level_is_rejected():
    message = error_of({"tuner": {"numerics": "exact"}})

    assert message.startswith("setting 'tuner.numerics' (call argument): Input should be 'bitwise'")
    assert message.endswith("got 'exact'")


def test_the_thresholds_of_the_tuner_are_those_of_the_dashboards():
    tuner = load_settings().tuner

    assert tuner.max_exposed_comm_ratio == EXPOSED_COMM_RATIO_HIGH
    assert tuner.min_device_utilization_ratio == DEVICE_UTILIZATION_LOW


def float_options() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name, inner in field.annotation.model_fields.items()
        if inner.annotation is float or {*get_args(inner.annotation)} == {float, type(None)}
    ]


def test_there_are_options_with_a_fraction():
    assert {"hang.timeout_seconds", "serve.linger_seconds"} <= set(float_options())


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
@pytest.mark.parametrize("option", float_options())
def test_a_number_that_is_not_finite_is_an_error(option, value):
    section, name = option.split(".")

    messages = [error_of({section: {name: given}}) for given in (value, float(value))]

    assert all(f"{option!r} (call argument)" in message for message in messages)
    assert all("finite" in message or "greater than" in message for message in messages)


@pytest.mark.parametrize("option", [name for name in float_options() if "seconds" in name])
def test_a_time_beyond_what_a_clock_can_wait_for_is_an_error(option):
    section, name = option.split(".")

    assert f"{option!r} (call argument): " in error_of({section: {name: 1e308}})
    assert load_settings({section: {name: 30 * 86400}})


def test_the_error_about_an_infinite_hang_limit_names_the_switch():
    assert "hang.enabled=false" in error_of({"hang": {"timeout_seconds": float("inf")}})


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings({"serve": {"port": "9" * 100_000}})

    assert len(str(raised.value)) < 500
    assert "100,002 characters" in str(raised.value)


def test_a_long_name_is_cut_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROWATCH_" + "X" * 10_000, "1")

    with pytest.raises(SettingsError) as raised:
        load_settings()

    assert len(str(raised.value)) < 500


def test_a_deeply_nested_file_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zerowatch.toml").write_text("a = " + "[" * 100_000)

    with pytest.raises(SettingsError, match="nested too deeply"):
        load_settings()


@pytest.mark.parametrize("settings", ["port=3", 7, [("port", 1)], {1: 2}, Settings()])
def test_settings_that_are_not_a_mapping_of_names_are_reported_with_what_is_allowed(
    settings,
) -> None:
    message = error_of(settings)

    assert message.startswith("settings (call argument)")
    assert repr(settings)[:20] in message
    assert "{'serve': {'port': 9500}}" in message


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"port": 9500}, "'serve.port'"),
        ({"numerics": "bitwise"}, "'tuner.numerics'"),
        ({"hang": {"endpoint": "http://x"}}, "'otel.endpoint'"),
    ],
)
def test_an_option_outside_its_section_is_reported_with_its_section(settings, meant) -> None:
    assert error_of(settings).endswith(f"does not exist; did you mean {meant}?")


def test_thresholds_of_alerts_are_read_from_a_table_and_from_the_environment(monkeypatch, tmp_path):
    (tmp_path / "zerowatch.toml").write_text(
        "[alerts]\nthresholds = {exposed_comm_ratio_high = 0.35}\n"
    )
    from_file = load_settings().alerts.thresholds
    monkeypatch.setenv("ZEROWATCH_ALERTS_THRESHOLDS", "DATA_RATIO_HIGH=0.2, restarts_high=5")

    assert from_file == {"exposed_comm_ratio_high": 0.35}
    assert load_settings().alerts.thresholds == {"data_ratio_high": 0.2, "restarts_high": 5}


def test_an_unknown_threshold_is_reported_with_its_source_and_a_suggestion(monkeypatch):
    monkeypatch.setenv("ZEROWATCH_ALERTS_THRESHOLDS", "exposed_com_ratio_high=0.35")

    assert error_of() == (
        "setting 'alerts.thresholds' (environment): 'exposed_com_ratio_high' is no threshold of an "
        "alert; did you mean exposed_comm_ratio_high?, got 'exposed_com_ratio_high=0.35'"
    )


@pytest.mark.parametrize(
    ("section", "option", "value", "is_advised"),
    [
        ("hang", "timeout_seconds", float("inf"), True),
        ("hang", "timeout_seconds", 1e30, True),
        ("hang", "timeout_seconds", -1, False),
        ("serve", "linger_seconds", float("inf"), False),
    ],
)
def test_who_wants_to_detect_no_hangs_is_advised_to_disable_them(
    section, option, value, is_advised
):
    message = error_of({section: {option: value}})

    assert f"{section}.{option}" in message
    assert ("hang.enabled=false" in message) == is_advised
