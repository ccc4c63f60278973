"""Tests of the stack in containers with a fake docker: commands, reports and error messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from servers.free_port import free_port

from zerowatch.dashboards.stack import compose_stack as stack
from zerowatch.dashboards.stack import stack_ports
from zerowatch.errors import CommandLineError

# A docker that notes what it was asked, and answers by the files beside it.
FAKE = f"""#!{sys.executable}
import json, os, pathlib, sys
here, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
with (here / "asked").open("a") as asked:
    asked.write(json.dumps(arguments) + "\\n")
(here / "digest").write_text(os.environ.get("MOUNTED_FILES", ""))
kind = arguments[0] if arguments[0] != "compose" else "compose " + arguments[-1]
answers = json.loads((here / "answers.json").read_text())
answer = next((answers[key] for key in (kind, arguments[0]) if key in answers), {{}})
print(answer.get("out", ""), end="")
print(answer.get("err", ""), end="", file=sys.stderr)
sys.exit(answer.get("code", 0))
"""


class Docker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "docker"
        program.write_text(FAKE)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.answer()

    def answer(self, **answers: dict[str, object]) -> None:
        (self.folder / "answers.json").write_text(json.dumps(answers))

    @property
    def composed(self) -> list[str]:
        """The arguments of the last compose command, from the project name on."""
        lines = (self.folder / "asked").read_text().splitlines()
        calls = [arguments for line in lines if "--project-name" in (arguments := json.loads(line))]
        return calls[-1][1:] if calls else []


SERVICES = ("GRAFANA", "PROMETHEUS", "ALERTMANAGER", "ALERT_LOG", "TRAINER", "TEMPO", "OTLP")


REFUSE_UNREADABLE = stack._refuse_unreadable


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    monkeypatch.setenv("PATH", str(tmp_path))
    # This checkout may have been made with any umask.
    monkeypatch.setattr(stack, "_refuse_unreadable", lambda root, gpu: None)
    for variable in (
        "GRAFANA",
        "PROMETHEUS",
        "ALERTMANAGER",
        "ALERT_LOG",
        "TRAINER",
        "TEMPO",
        "OTLP",
    ):
        monkeypatch.setenv(f"{variable}_PORT", str(free_port()))
    return Docker(tmp_path)


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def compose_file() -> str:
    return str(stack.ROOT / "compose.yaml")


def test_up_builds_the_demo_and_starts_all_services_in_the_background(docker: Docker) -> None:
    stack.up()

    assert docker.composed == [
        *("--project-name", "zerowatch", "--file", compose_file()),
        *("up", "--detach", "--build"),
    ]


def test_up_with_gpu_adds_the_gpu_compose_file(docker: Docker) -> None:
    stack.up(gpu=True)

    assert docker.composed[4:6] == ["--file", str(stack.ROOT / "docker" / "compose.gpu.yaml")]


def test_up_does_not_build_if_an_image_of_the_demo_is_given(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_IMAGE", "registry.example.com/zerowatch:1")

    stack.up()

    assert docker.composed[4:] == ["up", "--detach"]


def test_a_given_image_of_the_demo_needs_no_sources(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages" / "zerowatch"
    installed.mkdir(parents=True)
    shutil.copy(stack.ROOT / "compose.yaml", installed)
    monkeypatch.setattr(stack, "ROOT", installed)
    monkeypatch.setenv("TRAINER_IMAGE", "registry.example.com/zerowatch:1")

    stack.up()

    assert docker.composed[4:] == ["up", "--detach"]


def test_up_gives_compose_another_label_of_the_services_if_a_mounted_file_has_changed(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root" / "dashboards").mkdir(parents=True)
    shutil.copy(stack.ROOT / "compose.yaml", tmp_path / "root")
    monkeypatch.setattr(stack, "ROOT", tmp_path / "root")
    rules = tmp_path / "root" / "dashboards" / "rendered" / "prometheus"
    labels = []

    for name in ("alerts.yaml", "alerts.yaml", "other.yaml"):
        rules.mkdir(parents=True)
        (rules / name).write_text("groups: []\n")
        stack.up(with_trainer=False)
        labels.append((docker.folder / "digest").read_text())
        shutil.rmtree(rules)

    assert labels[0] == labels[1] != labels[2]
    services = yaml.safe_load((stack.ROOT / "compose.yaml").read_text())["services"]
    labeled = {name for name, service in services.items() if service["labels"]}
    assert labeled == set(stack.SERVICES)
    assert services["prometheus"]["labels"] == {"zerowatch.files": "${MOUNTED_FILES:-}"}


def test_up_with_gpu_gives_compose_another_label_if_a_file_of_the_gpu_services_has_changed(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "docker").mkdir(parents=True)
    for name in ("compose.yaml", "docker/compose.gpu.yaml"):
        shutil.copy(stack.ROOT / name, root / name)
    monkeypatch.setattr(stack, "ROOT", root)
    labels: dict[bool, list[str]] = {True: [], False: []}

    for name in ("dcgm-exporter/counters.csv", "prometheus/gpu/dcgm.yml"):
        for text in ("old", "new"):
            file = root / "docker" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            for gpu, found in labels.items():
                stack.up(with_trainer=False, gpu=gpu)
                found.append((docker.folder / "digest").read_text())

    assert len(set(labels[True])) == 4
    assert len(set(labels[False])) == 1
    services = yaml.safe_load((stack.ROOT / "docker/compose.gpu.yaml").read_text())["services"]
    for name in stack.GPU_SERVICES:
        assert services[name]["labels"] == {"zerowatch.files": "${MOUNTED_FILES:-}"}


def test_up_without_the_demo_on_gpus_starts_the_exporter_of_the_gpus(docker: Docker) -> None:
    stack.up(with_trainer=False, gpu=True)

    assert docker.composed[6:] == ["up", "--detach", *stack.SERVICES, *stack.GPU_SERVICES]


def test_up_without_the_demo_starts_only_the_other_services(docker: Docker) -> None:
    stack.up(with_trainer=False)

    assert docker.composed[4:] == ["up", "--detach", *stack.SERVICES]


def test_up_returns_the_addresses_of_the_services(docker: Docker) -> None:
    lines = stack.up()

    for variable in ("GRAFANA_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT"):
        assert any(f"http://127.0.0.1:{os.environ[variable]}" in line for line in lines)


def test_down_removes_stored_data_only_with_volumes(docker: Docker) -> None:
    stack.down()
    kept = docker.composed
    stack.down(volumes=True)

    assert kept[4:] == ["down", "--remove-orphans"]
    assert docker.composed[4:] == ["down", "--remove-orphans", "--volumes"]


def test_the_standalone_docker_compose_is_used_without_the_plugin(docker: Docker) -> None:
    docker.answer(**{"compose version": {"code": 1}})
    alone = docker.folder / "docker-compose"
    alone.symlink_to("docker")

    stack.down()

    lines = (docker.folder / "asked").read_text().splitlines()
    assert json.loads(lines[-1])[0] == "--project-name"


def test_without_docker_the_error_suggests_the_native_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(
        CommandLineError, match=r"no docker on PATH.* `zerowatch stack up --native`"
    ):
        stack.up()


def test_without_compose_the_error_names_the_package(docker: Docker) -> None:
    docker.answer(**{"compose version": {"code": 1}})

    with pytest.raises(CommandLineError, match="no `compose`; install docker-compose-plugin"):
        stack.down()


def test_an_engine_that_does_not_answer_is_reported_with_its_reason(docker: Docker) -> None:
    docker.answer(version={"code": 1, "err": "Client: 28\nCannot connect to the Docker daemon\n"})

    with pytest.raises(CommandLineError, match=r"does not answer \(Cannot connect to the Docker"):
        stack.status()


def test_a_port_in_use_is_reported_with_its_service_and_variable(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as port:
        monkeypatch.setenv("ALERTMANAGER_PORT", str(port))

        with pytest.raises(
            CommandLineError, match=f"port {port} .* for alertmanager, is taken.*ALERTMANAGER_PORT="
        ):
            stack.up()


def test_a_port_used_by_the_same_service_is_accepted(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.answer(ps={"out": "alertmanager\n"})
    with listening() as port:
        monkeypatch.setenv("ALERTMANAGER_PORT", str(port))

        stack.up()

    assert docker.composed[4] == "up"


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:9090", "0", "65536"])
def test_an_invalid_port_number_is_rejected(
    docker: Docker, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PROMETHEUS_PORT", text)

    with pytest.raises(CommandLineError, match=r"PROMETHEUS_PORT is .* such as 9090"):
        stack.up()


def test_an_env_file_is_read_by_the_rules_of_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPO_PORT", "3201")
    monkeypatch.delenv("GRAFANA_PORT", raising=False)
    file = tmp_path / ".env"
    file.write_text(
        "Ports\n\n#GRAFANA_PORT=3000\nGRAFANA_PORT=3001 # as 3000 is taken\nTEMPO_PORT='3202'\n"
        "#GRAFANA_PORT=3003\nALERT_LOG_PORT = 1\n"
    )

    settings = stack_ports.port_settings(file)

    assert stack_ports.chosen(stack_ports.GRAFANA, settings).number == 3001
    assert stack_ports.chosen(stack_ports.TEMPO, settings).number == 3201
    assert stack_ports.chosen(stack_ports.ALERT_LOG, settings).number == 1


def test_without_sources_the_error_suggests_up_without_trainer(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "ROOT", tmp_path / "site-packages" / "zerowatch")

    with pytest.raises(CommandLineError, match=r"without its sources.*stack up --without-trainer"):
        stack.up()


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("docker/grafana/provisioning", 0o754),
        ("docker/grafana/provisioning", 0o751),
        ("docker/grafana/provisioning/datasources/all.yaml", 0o640),
        ("dashboards/runbook.md", 0o600),
        ("docker/dcgm-exporter/counters.csv", 0o600),
        ("docker/prometheus/gpu", 0o700),
    ],
)
def test_files_that_the_services_may_not_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, mode: int
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "docker").mkdir()
    mounted: list[str] = []
    for name in ("compose.yaml", "docker/compose.gpu.yaml"):
        shutil.copy(stack.ROOT / name, tmp_path / name)
        mounted += re.findall(r"\./(\S+?):/", (tmp_path / name).read_text())
    for each in [*mounted, "docker/grafana/provisioning/datasources/all.yaml"]:
        made = tmp_path / each
        made.parent.mkdir(parents=True, exist_ok=True)
        if made.suffix:
            made.touch()
        else:
            made.mkdir(exist_ok=True)
    for each in tmp_path.rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    REFUSE_UNREADABLE(tmp_path, gpu=True)  # all of them are readable

    (tmp_path / path).chmod(mode)

    with pytest.raises(CommandLineError, match=rf"may not read {tmp_path / path}; run: chmod -R o"):
        REFUSE_UNREADABLE(tmp_path, gpu=True)


def test_files_that_only_gpu_services_mount_may_be_unreadable_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "docker" / "dcgm-exporter").mkdir(parents=True)
    shutil.copy(stack.ROOT / "docker/compose.gpu.yaml", tmp_path / "docker")
    (tmp_path / "compose.yaml").touch()
    (tmp_path / "docker" / "dcgm-exporter" / "counters.csv").touch(mode=0o600)

    REFUSE_UNREADABLE(tmp_path, gpu=False)


def test_a_failure_of_compose_is_reported_with_command_and_exit_code(docker: Docker) -> None:
    docker.answer(**{"compose --remove-orphans": {"code": 17}})

    with pytest.raises(
        CommandLineError, match=r"`docker compose .* --remove-orphans` failed with exit code 17"
    ):
        stack.down()


def test_status_without_services_says_how_to_start_them(docker: Docker) -> None:
    assert stack.status() == ["nothing is up; `zerowatch stack up` starts it"]


def test_status_lists_the_services_and_the_state_of_prometheus(docker: Docker) -> None:
    ports = f"127.0.0.1:{free_port()}->9090/tcp"
    docker.answer(ps={"out": f"prometheus\tUp 2 minutes (healthy) {ports}\n"})

    lines = stack.status()

    assert lines[0].startswith("prometheus      Up 2 minutes (healthy)")
    assert lines[1].startswith(f"Prometheus does not answer on http://{ports.partition('->')[0]}")
