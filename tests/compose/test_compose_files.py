"""Tests of the compose files: security, pinned images, mounted files, old and new compose."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose.engine import compose_program
from package_tree import ROOT
from require import program

from zerowatch.dashboards.stack import stack_ports
from zerowatch.metrics.settings import Settings

DOCKER = ROOT / "docker"
OVERLAYS = ("compose.gpu.yaml", "compose.multi-node.yaml")
FILES = ("compose.yaml", *OVERLAYS)
# docker-compose 1.29 refuses these, or compose v2 warns of them.
REFUSED_AT_THE_TOP = {"name", "include", "version"}
REFUSED_IN_A_SERVICE = {"pull_policy", "develop", "attach", "gpus", "models", "provider"}
LINKS = {"link-trainer", "link-trainer-2"}  # they need NET_ADMIN, and root for it


def content(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / name).read_text()))


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each service that its file defines completely; overlays only change some."""
    for name in FILES:
        for service, settings in content(name)["services"].items():
            if name == "compose.yaml" or service not in content("compose.yaml")["services"]:
                yield service, settings


SERVICES = dict(services())


@pytest.mark.parametrize("name", FILES)
def test_the_file_matches_the_schemas_of_old_and_new_compose(name: str) -> None:
    file = content(name)

    assert REFUSED_AT_THE_TOP.isdisjoint(file)
    for settings in file["services"].values():
        assert REFUSED_IN_A_SERVICE.isdisjoint(settings)
        assert "start_interval" not in settings.get("healthcheck", {})
        assert isinstance(settings.get("env_file", ""), str)
    assert not any("content" in config for config in file.get("configs", {}).values())


@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
def test_compose_accepts_the_file(overlay: str | None) -> None:
    command = compose_program() if shutil.which("docker") else shutil.which("docker-compose")
    if not command:
        pytest.skip("needs docker-compose (apt-get install docker-compose) or docker compose")
    command = [command] if isinstance(command, str) else command
    names = ["compose.yaml", *([overlay] if overlay else [])]
    files = [word for name in names for word in ("-f", str(DOCKER / name))]

    done = subprocess.run([*command, *files, "config", "-q"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_pinned(service: str) -> None:
    image = SERVICES[service]["image"]

    tag = re.sub(r"\$\{\w+:-(.+?)\}", r"\1", image).rpartition(":")[2]

    assert tag
    assert tag != "latest"


@pytest.mark.parametrize("service", SERVICES)
def test_published_ports_are_on_loopback_and_configurable(service: str) -> None:
    for port in SERVICES[service].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z_]+_PORT:-\d+\}:\d+", port)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_a_health_check(service: str) -> None:
    check = SERVICES[service]["healthcheck"]

    assert check["test"][0] in ("CMD", "CMD-SHELL")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_runs_without_extra_privileges(service: str) -> None:
    settings = SERVICES[service]

    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings.get("cap_add", []) == (["NET_ADMIN"] if service in LINKS else [])
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in settings
    assert settings.get("user") not in ("0", "root")


@pytest.mark.parametrize("name", FILES)
def test_mounted_files_are_read_only_and_exist_after_a_build(name: str) -> None:
    for settings in content(name)["services"].values():
        for volume in settings.get("volumes", []):
            source, _, rest = volume.partition(":")
            if source.startswith("."):
                assert rest.endswith(":ro")
                assert (DOCKER / source).exists(), f"{source}: run `zerowatch dashboards build`"
            else:
                assert source in content("compose.yaml")["volumes"]


def test_the_environment_of_the_trainer_has_valid_settings() -> None:
    for settings in SERVICES.values():
        names = [name for name in settings.get("environment", {}) if name.startswith("ZEROWATCH_")]
        for name in names:
            section, _, option = name.removeprefix("ZEROWATCH_").lower().partition("_")
            fields = Settings.model_fields
            section = "run_log" if section == "run" else section
            assert section in fields
            assert option.removeprefix("log_") in type(fields[section].default).model_fields


def test_the_example_env_file_names_every_variable_and_no_password() -> None:
    example = (DOCKER / ".env.example").read_text()

    offered = dict(re.findall(r"^([A-Z_]+)=(.*)$", example, re.MULTILINE))

    used = {
        variable
        for name in FILES
        for variable in re.findall(r"\$\{([A-Z_]+)", (DOCKER / name).read_text())
    }
    assert used - {"ZEROWATCH_TAG", "LINK_RATE"} <= offered.keys()
    assert offered["GRAFANA_ADMIN_PASSWORD"] == ""


def test_the_stack_command_uses_the_ports_of_the_compose_file() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    in_file = set(re.findall(r"127\.0\.0\.1:\$\{(\w+):-(\d+)\}:\d+", text))

    known = {
        (port.variable, str(port.number))
        for port in vars(stack_ports).values()
        if isinstance(port, stack_ports.Port) and port != stack_ports.ALERT_LOG
    }

    assert known == in_file


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    promtool = program("promtool", apt="prometheus")

    # --syntax-only: the rule files lie elsewhere in the container.
    file = DOCKER / "prometheus" / "prometheus.yml"
    done = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(file)], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_provisioned_datasources_have_the_uids_that_dashboards_use() -> None:
    file = DOCKER / "grafana" / "provisioning" / "datasources" / "zerowatch.yaml"

    sources = yaml.safe_load(file.read_text())

    assert sources["apiVersion"] == 1
    assert {source["uid"]: source["type"] for source in sources["datasources"]} == {
        "prometheus": "prometheus",
        "tempo": "tempo",
        "alertmanager": "alertmanager",
    }
    names = {"prometheus", "tempo", "alertmanager"}
    assert {
        source["url"].split("/")[2].partition(":")[0] for source in sources["datasources"]
    } == names


def test_the_provisioned_dashboard_path_is_the_mounted_path() -> None:
    file = DOCKER / "grafana" / "provisioning" / "dashboards" / "zerowatch.yaml"
    (provider,) = yaml.safe_load(file.read_text())["providers"]
    grafana = SERVICES["grafana"]

    mounts = {volume.split(":")[1] for volume in grafana["volumes"]}

    assert provider["options"]["path"] in mounts
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "dashboards" / "rendered" / "grafana" / home.name).is_file()


def test_the_tempo_configuration_uses_options_of_both_versions_only() -> None:
    settings = yaml.safe_load((DOCKER / "tempo" / "tempo.yaml").read_text())

    assert settings.keys() == {"server", "distributor", "storage", "usage_report"}
    assert settings["distributor"]["receivers"].keys() == {"otlp"}
    assert settings["usage_report"] == {"reporting_enabled": False}
