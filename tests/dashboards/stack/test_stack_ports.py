"""The ports of the stack: their defaults, what changes them, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from servers.free_port import free_port

from zerowatch.dashboards.stack import stack_ports
from zerowatch.dashboards.stack.stack_ports import (
    GRAFANA,
    PROMETHEUS,
    Port,
    chosen,
    is_taken,
    port_settings,
    refuse_taken,
)
from zerowatch.errors import CommandLineError


def test_each_service_has_its_usual_port() -> None:
    ports = [port for port in vars(stack_ports).values() if isinstance(port, Port)]

    assert {(port.service, port.variable, port.number) for port in ports} == {
        ("grafana", "GRAFANA_PORT", 3000),
        ("prometheus", "PROMETHEUS_PORT", 9090),
        ("alertmanager", "ALERTMANAGER_PORT", 9093),
        ("trainer", "TRAINER_PORT", 9464),
        ("tempo", "TEMPO_PORT", 3200),
        ("alloy", "OTLP_PORT", 4318),
        ("alert-log", "ALERT_LOG_PORT", 9099),
    }
    assert GRAFANA.url == "http://127.0.0.1:3000"


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({}, 3000),
        ({"GRAFANA_PORT": ""}, 3000),
        ({"PROMETHEUS_PORT": "9"}, 3000),
        ({"GRAFANA_PORT": " 3001 "}, 3001),
        ({"GRAFANA_PORT": "1"}, 1),
        ({"GRAFANA_PORT": "65535"}, 65535),
    ],
)
def test_a_variable_changes_the_number_of_its_port_alone(
    settings: dict[str, str], number: int
) -> None:
    assert chosen(GRAFANA, settings) == Port(
        service="grafana", variable="GRAFANA_PORT", number=number
    )


@pytest.mark.parametrize("text", ["0", "65536", "-1", "many", "3000.5"])
def test_what_is_no_port_number_is_refused(text: str) -> None:
    with pytest.raises(CommandLineError) as caught:
        chosen(GRAFANA, {"GRAFANA_PORT": text})

    assert str(caught.value) == (
        f"stack: GRAFANA_PORT is {text!r}; it takes the number of a port, such as 3000"
    )


def test_an_env_file_is_read_as_compose_reads_it_and_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".env"
    file.write_text(
        "# GRAFANA_PORT=1\nwords\n A = 'b=c' # why\nGRAFANA_PORT=3001\nOTLP_PORT=\"4319\"\n"
    )
    monkeypatch.setenv("OTLP_PORT", "4320")

    settings = port_settings(file)

    found = {name: settings.get(name) for name in ("A", "GRAFANA_PORT", "OTLP_PORT", "words")}
    assert found == {"A": "b=c", "GRAFANA_PORT": "3001", "OTLP_PORT": "4320", "words": None}
    assert port_settings(tmp_path / "absent")["OTLP_PORT"] == "4320"


def test_a_port_of_another_program_is_refused_but_not_that_of_a_running_service() -> None:
    port = Port(service="grafana", variable="GRAFANA_PORT", number=free_port())
    refuse_taken([port])
    with socket.create_server(("127.0.0.1", port.number)):
        assert is_taken(port.number)
        with pytest.raises(CommandLineError) as caught:
            refuse_taken([port], running=["prometheus"])
        refuse_taken([port], running=["grafana"])

    assert str(caught.value) == (
        f"stack: port {port.number} of 127.0.0.1, for grafana, is taken; free it, or choose "
        "another: export GRAFANA_PORT=NUMBER"
    )
    assert not is_taken(port.number)


def test_two_services_on_one_port_are_refused() -> None:
    number = free_port()
    same = [
        Port(service=each.service, variable=each.variable, number=number)
        for each in (GRAFANA, PROMETHEUS)
    ]

    with pytest.raises(CommandLineError) as caught:
        refuse_taken(same)

    assert str(caught.value) == (
        f"stack: GRAFANA_PORT and PROMETHEUS_PORT are both {number}; choose two"
    )
