"""Tests of the compose files: security, pinned images, mounted files, old and new compose."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from compose.engine import compose_program
from package_tree import ROOT
from require import program

from zerowatch.dashboards.stack import stack_ports
from zerowatch.metrics.settings import Settings
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE

DOCKER = ROOT / "docker"
OVERLAYS = ("docker/compose.gpu.yaml", "docker/compose.multi-node.yaml")
FILES = ("compose.yaml", *OVERLAYS)
# docker-compose 1.29 refuses these, or compose v2 warns of them.
REFUSED_AT_THE_TOP = {"name", "include", "version"}
REFUSED_IN_A_SERVICE = {"pull_policy", "develop", "attach", "gpus", "models", "provider"}
LINKS = {"link-trainer", "link-trainer-2"}  # they need NET_ADMIN, and root for it
# Its image has nothing but the exporter, which has no command that asks itself.
WITHOUT_HEALTH_CHECK = {"dcgm-exporter"}
HOST_FOLDERS = {"/"}  # node-exporter reads the host's file systems


def content(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


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
    # Without an overlay as a user would call it: by its place, and without options.
    files = [word for name in ("compose.yaml", overlay) for word in ("-f", str(name))]

    done = subprocess.run(
        [*command, *(files if overlay else []), "config", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

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

    if service in WITHOUT_HEALTH_CHECK:
        assert check == {"disable": True}
    else:
        assert check["test"][0] in ("CMD", "CMD-SHELL")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_limits_of_memory_cpus_and_processes(service: str) -> None:
    settings = SERVICES[service]

    assert re.fullmatch(r"(\$\{\w+:-)?\d+[mg]\}?", settings["mem_limit"])
    assert re.fullmatch(r"(\$\{\w+:-)?[\d.]+\}?", str(settings["cpus"]))
    assert 0 < settings["pids_limit"] <= 4096


def test_a_trainer_on_gpus_may_use_all_cpus_but_after_its_monitoring() -> None:
    trainer = content("docker/compose.gpu.yaml")["services"]["trainer"]

    assert trainer["cpus"] == "${TRAINER_CPUS:-0}"
    assert trainer["cpu_shares"] < 1024  # the share of a service that sets none
    assert trainer["mem_limit"] == "${TRAINER_MEMORY:-64g}"
    assert trainer["ulimits"]["memlock"] == -1


def test_a_trainer_has_time_to_be_scraped_at_its_end_before_it_is_killed() -> None:
    linger_seconds = Settings.model_fields["serve"].get_default().linger_seconds

    for name in ("trainer", "trainer-2"):
        grace = SERVICES[name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) >= linger_seconds + 10


def test_the_kernel_kills_the_trainer_before_its_monitoring() -> None:
    scores = {name: settings.get("oom_score_adj", 0) for name, settings in SERVICES.items()}

    assert {name for name, score in scores.items() if score > 0} == {"trainer", "trainer-2"}


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
                assert (ROOT / source).exists(), f"{source}: run `zerowatch dashboards build`"
            elif source in HOST_FOLDERS:
                assert rest.endswith(":ro")
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
    example = (ROOT / ".env.example").read_text()

    offered = dict(re.findall(r"^([A-Z_]+)=(.*)$", example, re.MULTILINE))

    used = {
        variable
        for name in FILES
        for variable in re.findall(r"\$\{([A-Z_]+)", (ROOT / name).read_text())
    }
    assert used - {"LINK_RATE", "MOUNTED_FILES"} <= offered.keys()
    assert not any(re.search(r"PASSWORD(?!_FILE)", name) for name in used)
    assert offered["GRAFANA_ADMIN_PASSWORD_FILE"] == ""


def test_grafana_has_no_admin_unless_a_password_file_is_given() -> None:
    secret = content("compose.yaml")["secrets"]["grafana_admin_password"]["file"]
    default = re.fullmatch(r"\$\{GRAFANA_ADMIN_PASSWORD_FILE:-(.+)\}", secret)
    script = SERVICES["grafana"]["entrypoint"][-1]

    assert default is not None
    assert (ROOT / default[1]).read_text() == ""
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE=/run/secrets/grafana_admin_password" in script
    assert "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION=true" in script
    assert not any("PASSWORD" in name for name in SERVICES["grafana"]["environment"])


def test_the_stack_command_uses_the_ports_of_the_compose_file() -> None:
    text = (ROOT / "compose.yaml").read_text()
    in_file = set(re.findall(r"127\.0\.0\.1:\$\{(\w+):-(\d+)\}:\d+", text))

    known = {
        (port.variable, str(port.number))
        for port in vars(stack_ports).values()
        if isinstance(port, stack_ports.Port)
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


def test_prometheus_scrapes_the_exporters_that_run_beside_it() -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    services = content("docker/compose.gpu.yaml")["services"]
    (on_gpus,) = yaml.safe_load((DOCKER / "prometheus/gpu/dcgm-exporter.yaml").read_text())

    (node,) = jobs["node-exporter"]["static_configs"]
    (file,) = jobs["dcgm-exporter"]["file_sd_configs"][0]["files"]

    assert node["targets"][0].partition(":")[0] in SERVICES
    assert on_gpus["targets"][0].partition(":")[0] in SERVICES
    assert services["prometheus"]["volumes"] == ["./docker/prometheus/gpu:/etc/prometheus/gpu:ro"]
    assert file.startswith("/etc/prometheus/gpu/")
    # As the ranks of the demo, whose node is the host name of their container.
    assert node["labels"] == on_gpus["labels"] == {"node": SERVICES["trainer"]["hostname"]}
    named = services["dcgm-exporter"]["environment"]["NODE_NAME"]  # alerts name the node by it
    assert named == on_gpus["labels"]["node"]


def test_provisioned_datasources_have_the_uids_that_dashboards_use() -> None:
    file = DOCKER / "grafana" / "provisioning" / "datasources" / "zerowatch.yaml"

    sources = yaml.safe_load(file.read_text())

    assert sources["apiVersion"] == 1
    assert {source["uid"]: source["type"] for source in sources["datasources"]} == {
        "prometheus": "prometheus",
        "tempo": "tempo",
        "alertmanager": "alertmanager",
        "loki": "loki",
    }
    hosts = {source["url"].split("/")[2].partition(":")[0] for source in sources["datasources"]}
    assert hosts == {"prometheus", "tempo", "alertmanager", "loki"}
    assert hosts <= SERVICES.keys()


def test_grafana_knows_the_interval_at_which_ranks_are_scraped() -> None:
    file = DOCKER / "grafana" / "provisioning" / "datasources" / "zerowatch.yaml"
    source = next(
        each
        for each in yaml.safe_load(file.read_text())["datasources"]
        if each["uid"] == "prometheus"
    )
    ranks = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]

    intervals = {
        rule["replacement"]
        for job in ranks
        for rule in job.get("relabel_configs", ())
        if rule.get("target_label") == "__scrape_interval__"
    }

    assert intervals == {source["jsonData"]["timeInterval"]}


def test_the_provisioned_dashboard_path_is_the_mounted_path() -> None:
    file = DOCKER / "grafana" / "provisioning" / "dashboards" / "zerowatch.yaml"
    (provider,) = yaml.safe_load(file.read_text())["providers"]
    grafana = SERVICES["grafana"]

    mounts = {volume.split(":")[1] for volume in grafana["volumes"]}

    assert provider["options"]["path"] in mounts
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / "dashboards" / "rendered" / "grafana" / home.name).is_file()


def test_stored_traces_and_logs_have_a_retention() -> None:
    tempo = yaml.safe_load((DOCKER / "tempo" / "tempo.yaml").read_text())
    loki = yaml.safe_load((DOCKER / "loki" / "loki.yaml").read_text())

    # Tempo 3: the scheduler plans the deletions and the worker does them.
    for section in (tempo["backend_scheduler"]["provider"]["compaction"], tempo["backend_worker"]):
        assert section["compaction"]["block_retention"] == "336h"
    assert loki["limits_config"]["retention_period"] == "336h"
    assert loki["compactor"]["retention_enabled"] is True
    assert loki["compactor"]["delete_request_store"] == "filesystem"


def test_tempo_and_loki_report_no_usage() -> None:
    tempo = yaml.safe_load((DOCKER / "tempo" / "tempo.yaml").read_text())
    loki = yaml.safe_load((DOCKER / "loki" / "loki.yaml").read_text())

    assert tempo["usage_report"] == {"reporting_enabled": False}
    assert loki["analytics"] == {"reporting_enabled": False}
    assert "--disable-reporting" in SERVICES["alloy"]["command"]


def alloy_paths() -> dict[str, str]:
    """Return the paths that Alloy reads, by the label `kind`."""
    text = (DOCKER / "alloy" / "config.alloy").read_text()
    found = re.findall(r'\{__path__ = "([^"]+)", job = "zerowatch", kind = "(\w+)"\}', text)
    assert len(found) == text.count("{__path__")
    return {kind: path for path, kind in found}


@pytest.mark.parametrize(
    ("file", "kind", "rank"),
    [
        ("hang-rank-3-1.txt", "hang", "3"),
        ("oom/rank-12-1.txt", "oom", "12"),
        ("oom/rank-0-killed.txt", "oom", "0"),
        ("exits/rank-7-killed.txt", "exit", "7"),
        ("memory/leak-rank-0.txt", "leak", "0"),
        (DECISIONS_FILE, "decision", None),
        ("rank-0.jsonl", None, None),
        ("oom/rank-0-1.pickle", None, None),
    ],
)
def test_alloy_reads_reports_and_decisions_with_run_and_rank(
    file: str, kind: str | None, rank: str | None
) -> None:
    path = f"/runs/night-7/{file}"
    rules = re.findall(
        r'regex\s+= "([^"]+)"\n\s+target_label\s+= "(\w+)"',
        (DOCKER / "alloy" / "config.alloy").read_text(),
    )

    kinds = [each for each, pattern in alloy_paths().items() if PurePosixPath(path).match(pattern)]
    labels = {
        label: found[1]
        for regex, label in rules
        if (found := re.fullmatch(regex, path)) is not None
    }

    assert kinds == ([kind] if kind else [])
    if kind:
        assert labels == {"run": "night-7"} | ({"rank": rank} if rank else {})


def test_every_component_that_alloy_refers_to_is_defined() -> None:
    text = (DOCKER / "alloy" / "config.alloy").read_text()
    defined = {
        ".".join(block) for block in re.findall(r'^([\w.]+) "(\w+)" \{$', text, re.MULTILINE)
    }

    used = re.findall(r"\b([a-z]+(?:\.[a-z_]+)+)\.(?:targets|output|receiver|input)\b", text)

    assert text.count("{") == text.count("}")
    assert len(used) == 5
    assert set(used) <= defined


def test_the_job_sends_only_what_the_otlp_receiver_takes() -> None:
    text = (DOCKER / "alloy" / "config.alloy").read_text()
    environment = SERVICES["trainer"]["environment"]

    taken = set(re.findall(r"^    (traces|logs|metrics)\s+= \[", text, re.MULTILINE))

    assert taken == {"traces", "logs"}
    assert environment["ZEROWATCH_OTEL_ENDPOINT"] == "http://alloy:4318"
    assert "ZEROWATCH_OTEL_METRICS" not in environment  # off by default


def test_alloy_runs_as_the_user_of_the_trainer_because_reports_are_private() -> None:
    dockerfile = (DOCKER / "trainer.Dockerfile").read_text()
    user = re.search(r"^USER (\d+):", dockerfile, re.MULTILINE)

    assert user is not None
    assert SERVICES["alloy"]["user"].split(":")[0] == user[1]


def test_every_counter_of_dcgm_has_a_type_and_a_help_text() -> None:
    lines = (DOCKER / "dcgm-exporter" / "counters.csv").read_text().splitlines()

    rows = [line.split(", ", 2) for line in lines if not line.startswith("#")]

    assert len({row[0] for row in rows}) == len(rows) > 20
    for name, kind, text in rows:
        assert name.startswith("DCGM_FI_DEV_")
        assert kind in ("gauge", "counter")
        assert text.endswith(".")
        assert "," not in text  # would be read as a further column


def test_dcgm_exporter_serves_every_field_that_the_alerts_read() -> None:
    rules = (ROOT / "dashboards" / "rendered" / "prometheus" / "dcgm.yaml").read_text()
    lines = (DOCKER / "dcgm-exporter" / "counters.csv").read_text().splitlines()

    served = {line.partition(",")[0] for line in lines if not line.startswith("#")}

    read = set(re.findall(r"\bDCGM_FI_\w+", rules))
    assert len(read) > 3
    assert read <= served
