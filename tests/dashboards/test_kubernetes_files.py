"""Tests of the Kubernetes objects: complete, valid, with the same rules, routes and dashboards."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from package_tree import ROOT
from promql_parts import series_of_ranks
from require import program

from zerowatch.dashboards.alerts.prometheus import EXPECTED_DISCOVERY
from zerowatch.dashboards.build import dashboard_files
from zerowatch.dashboards.kubernetes_files import ALERTMANAGER_FILE, kubernetes_files
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.metrics.settings import Settings, load_settings

KUBERNETES = ROOT / "docker" / "kubernetes"
RENDERED = ROOT / "dashboards" / "rendered"
CUSTOM_RESOURCES = Path(__file__).with_name("custom_resources.yaml")
CONFIG_MAP_BYTES = 2**20  # Kubernetes refuses more
RELEASE = "1.31"
GRACE_SECONDS = 10  # more than a rank waits for its last scrape
# Fields of a kustomization that the kustomize of kubectl 1.20 (2.0.3) knows.
KNOWN_IN_KUBECTL_1_20 = {
    *("apiVersion", "kind", "bases", "resources", "images", "namespace", "commonLabels"),
    *("configMapGenerator", "generatorOptions", "patchesStrategicMerge", "patchesJson6902"),
}
FOLDERS = sorted(file.parent for file in KUBERNETES.rglob("kustomization.yaml"))
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))
WRITTEN = sorted(
    file
    for file in KUBERNETES.rglob("*.yaml")
    if file.name != "kustomization.yaml" and "overlays" not in file.parts
)


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return {**rule_files(), **dashboard_files()}


@pytest.fixture(scope="module")
def manifests(generated: dict[str, str]) -> dict[str, str]:
    return kubernetes_files(generated)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads a bare `=` as text, as Kubernetes does, and as kustomize writes it."""


_Loader.add_constructor("tag:yaml.org,2002:value", lambda _, node: node.value)


def objects(text: str) -> list[dict[str, Any]]:
    return [thing for thing in yaml.load_all(text, Loader=_Loader) if thing]


def written_objects() -> list[dict[str, Any]]:
    return [thing for file in WRITTEN for thing in objects(file.read_text())]


@functools.cache
def custom_schemas() -> dict[str, Any]:
    return dict(yaml.safe_load(CUSTOM_RESOURCES.read_text()))


def validate(thing: dict[str, Any]) -> None:
    """Check an object against Kubernetes' own schema, or that of its custom resource."""
    schemas = custom_schemas()
    schema = schemas.get(thing["kind"])
    if schema is None or thing["apiVersion"] == "batch/v1":
        kubernetes_validate.validate(thing, RELEASE, strict=True)
        return
    assert thing["apiVersion"] == schema["apiVersion"]
    for part, part_schema in (
        (thing["metadata"], schemas["$defs"]["metadata"]),
        (thing["spec"], schema["spec"]),
    ):
        jsonschema.Draft202012Validator({"$defs": schemas["$defs"], **part_schema}).validate(part)
    for template in pod_templates(thing):
        named = {"metadata": {"name": "x"}, "apiVersion": "v1", "kind": "PodTemplate"}
        kubernetes_validate.validate({**named, "template": template}, RELEASE, strict=True)


def pod_templates(thing: Any) -> Iterator[dict[str, Any]]:
    """Yield the pod templates of a job of any kind."""
    spec = thing["spec"]
    match thing["kind"], thing["apiVersion"]:
        case "PyTorchJob", _:
            yield from (replica["template"] for replica in spec["pytorchReplicaSpecs"].values())
        case "JobSet", _:
            for job in spec["replicatedJobs"]:
                inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
                kubernetes_validate.validate({**inner, **job["template"]}, RELEASE, strict=True)
                yield job["template"]["spec"]["template"]
        case "TrainJob", _:
            trainer = spec["trainer"]
            container = {name: trainer[name] for name in ("image", "command", "env")}
            yield {"spec": {"containers": [{"name": "node", **container}]}}
        case "Job", "batch.volcano.sh/v1alpha1":
            yield from (task["template"] for task in spec["tasks"])
        case "Job" | "Deployment", _:
            yield spec["template"]


def test_the_kustomizations_list_exactly_the_existing_files() -> None:
    for folder in FOLDERS:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        listed = {
            *kustomization.get("resources", []),
            *kustomization.get("patchesStrategicMerge", []),
        }

        there = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"}

        assert listed == there
        assert all((folder / base).is_dir() for base in kustomization.get("bases", []))


@pytest.mark.parametrize("folder", [*FOLDERS, RENDERED], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_kustomization_has_only_fields_that_kubectl_1_20_knows(folder: Path) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())

    assert kustomization.keys() <= KNOWN_IN_KUBECTL_1_20
    assert all(
        one.keys() == {"name", "files"} for one in kustomization.get("configMapGenerator", [])
    )


@functools.cache
def built(folder: Path) -> str:
    """Return what kubectl makes of a kustomization."""
    kubectl = program("kubectl", apt="kubernetes-client")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "folder",
    [  # the overlay contains all but targets/
        pytest.param(
            folder, marks=[] if folder.name in ("targets", "example") else pytest.mark.slow
        )
        for folder in FOLDERS
    ],
    ids=lambda folder: str(folder.relative_to(KUBERNETES)),
)
def test_kubectl_builds_each_folder_into_valid_objects(folder: Path) -> None:
    things = objects(built(folder))

    assert things
    for thing in things:
        thing["metadata"].pop("namespace", None)
        validate(thing)


def test_the_overlay_changes_image_addresses_namespace_and_labels() -> None:
    things = objects(built(KUBERNETES / "overlays" / "example"))

    by_kind = {thing["kind"]: thing for thing in things}
    selected = [thing for thing in things if "monitoring.coreos.com" in thing["apiVersion"]]
    assert {thing["metadata"]["namespace"] for thing in things} == {"training"}
    job = by_kind["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert job["image"] == "registry.example.com/zerowatch:1"
    receivers = {each["name"]: each for each in by_kind["AlertmanagerConfig"]["spec"]["receivers"]}
    assert receivers["critical"]["webhookConfigs"][0]["url"].startswith("https://pager.example.com")
    _, prometheus = by_kind["NetworkPolicy"]["spec"]["ingress"]
    (source,) = prometheus["from"]
    assert source["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "kube-prometheus-stack"
    }
    assert len(selected) == 5
    for thing in selected:
        assert thing["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_the_overlay_keeps_every_receiver_that_a_route_names(manifests: dict[str, str]) -> None:
    generated = yaml.safe_load(manifests["kubernetes/alertmanagerconfig.yaml"])["spec"]
    patch = yaml.safe_load(
        (KUBERNETES / "overlays" / "example" / "alertmanagerconfig.yaml").read_text()
    )

    names = [each["name"] for each in patch["spec"]["receivers"]]

    assert names == [each["name"] for each in generated["receivers"]]


def test_no_object_has_a_fixed_namespace() -> None:
    assert all("namespace" not in thing["metadata"] for thing in written_objects())


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: str(file.relative_to(KUBERNETES)))
def test_an_object_is_valid(file: Path) -> None:
    for thing in objects(file.read_text()):
        validate(thing)


@pytest.mark.parametrize("name", ["alerts", "dcgm", "recording", "alertmanagerconfig"])
def test_a_generated_object_is_valid(name: str, manifests: dict[str, str]) -> None:
    validate(yaml.safe_load(manifests[f"kubernetes/{name}.yaml"]))


def test_the_schemas_refuse_a_field_that_does_not_exist() -> None:
    thing = objects((KUBERNETES / "demo" / "scrapeconfig.yaml").read_text())[0]
    thing["spec"]["honourLabels"] = True

    with pytest.raises(jsonschema.ValidationError, match="honourLabels"):
        validate(thing)


def scrape_configs() -> list[dict[str, Any]]:
    return [thing for thing in written_objects() if thing["kind"] == "ScrapeConfig"]


def test_all_scrape_configs_differ_in_name_and_address_only() -> None:
    specs = [{**config["spec"], "httpSDConfigs": []} for config in scrape_configs()]

    assert len(specs) == 2 + len(EXAMPLES)
    assert all(spec == specs[0] for spec in specs)


def keep_rules() -> dict[str, str]:
    """Return the expression of each rule that keeps series of ranks, by its place."""
    rules = {}
    for file in WRITTEN:
        for config in objects(file.read_text()):
            for rule in config["spec"].get("metricRelabelings", []):
                if rule["action"] == "keep":
                    rules[str(file.relative_to(ROOT))] = rule["regex"]
    compose = ROOT / "docker" / "prometheus" / "prometheus.yml"
    blocks = {str(compose.relative_to(ROOT)): compose.read_text()}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, text in enumerate(
            re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.M | re.S)
        ):
            blocks[f"{page.relative_to(ROOT)}:{number}"] = text
    for place, text in blocks.items():
        for job in yaml.safe_load(text).get("scrape_configs", []):
            for rule in job.get("metric_relabel_configs", []):
                if rule.get("action") == "keep":
                    rules[f"{place} {job['job_name']}"] = rule["regex"]
    return rules


KEEP_RULES = keep_rules()


def test_each_scrape_config_has_a_keep_rule() -> None:
    files = {place for place in KEEP_RULES if place.startswith("docker/kubernetes/")}

    assert len(files) == len(scrape_configs())
    assert {place.partition(":")[0] for place in KEEP_RULES if place.startswith("docs/")} == {
        "docs/deployment.md",
        "docs/slurm.md",
    }


@pytest.mark.parametrize("place", KEEP_RULES)
def test_a_keep_rule_keeps_every_series_of_a_rank_that_an_alert_or_a_dashboard_reads(
    place: str, generated: dict[str, str]
) -> None:
    names = {name for text in generated.values() for name in re.findall(r"[A-Za-z_]\w*", text)}
    read = names & series_of_ranks().keys()

    dropped = {name for name in read if not re.fullmatch(KEEP_RULES[place], name)}

    assert "process_start_time_seconds" in read
    assert len(read) > 100
    assert dropped == set()


def test_nobody_has_to_answer_where_a_job_is_that_ends() -> None:
    (expected,) = re.findall(r'config!~"(.+)"', EXPECTED_DISCOVERY)
    configs = {thing["metadata"]["name"] for thing in scrape_configs()}

    # The operator writes scrapeConfig/<namespace>/<name> into the label `config`.
    ignored = {name for name in configs if re.fullmatch(expected, f"scrapeConfig/training/{name}")}

    assert configs - ignored == {"zerowatch-targets"}


def test_promtool_accepts_what_the_operator_makes_of_a_scrape_config(tmp_path: Path) -> None:
    promtool = program("promtool", apt="prometheus")
    jobs = []
    for number, config in enumerate(scrape_configs()):
        spec = config["spec"]
        jobs.append(
            {
                "job_name": f"scrapeConfig/{number}",
                "scrape_interval": spec["scrapeInterval"],
                "sample_limit": spec["sampleLimit"],
                "target_limit": spec["targetLimit"],
                "http_sd_configs": [
                    {"url": each["url"], "refresh_interval": each["refreshInterval"]}
                    for each in spec["httpSDConfigs"]
                ],
                "relabel_configs": [in_snake_case(each) for each in spec["relabelings"]],
                "metric_relabel_configs": [
                    in_snake_case(each) for each in spec["metricRelabelings"]
                ],
            }
        )
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": jobs}))

    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def in_snake_case(fields: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("([A-Z])", lambda one: f"_{one[1].lower()}", k): v for k, v in fields.items()}


def jobs_with_pods() -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return job, first container and ScrapeConfig of the demo and of each example."""
    found = {}
    for name, files in {
        "demo": [KUBERNETES / "demo" / "job.yaml", KUBERNETES / "demo" / "scrapeconfig.yaml"],
        **{file.stem: [file] for file in EXAMPLES},
    }.items():
        things = [thing for file in files for thing in objects(file.read_text())]
        (config,) = (thing for thing in things if thing["kind"] == "ScrapeConfig")
        (job,) = (thing for thing in things if "Job" in thing["kind"])
        found[name] = (job, next(pod_templates(job))["spec"]["containers"][0], config)
    return found


JOBS = jobs_with_pods()


@pytest.mark.parametrize("name", JOBS)
def test_a_job_serves_all_ranks_of_a_pod_under_a_name_with_its_namespace(name: str) -> None:
    _, container, _ = JOBS[name]
    environment = {each["name"]: each for each in container["env"]}

    values = {k: each.get("value", "") for k, each in environment.items()}

    assert values["ZEROWATCH_RUN_ID"] == "$(NAMESPACE).$(JOB)"
    assert environment["NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    assert "job" in environment["JOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    # A variable can refer only to those before it.
    order = list(environment)
    assert order.index("ZEROWATCH_RUN_ID") > max(order.index("NAMESPACE"), order.index("JOB"))
    assert values["ZEROWATCH_SERVE_HOST"] == "0.0.0.0"
    address = environment["ZEROWATCH_SERVE_ADVERTISE_HOST"]["valueFrom"]["fieldRef"]
    assert address["fieldPath"] == "status.podIP"


def test_a_run_name_of_namespace_and_job_is_a_valid_run_id() -> None:
    assert load_settings({"run_id": "team-a.train-7"}).run_id == "team-a.train-7"


@pytest.mark.parametrize("name", JOBS)
def test_a_scrape_config_asks_rank_0_of_its_job(name: str) -> None:
    job, container, config = JOBS[name]
    (discovery,) = config["spec"]["httpSDConfigs"]
    found = re.fullmatch(r"http://([a-z0-9.-]+):(\d+)/targets", discovery["url"])

    assert found is not None
    assert found[1].startswith(job["metadata"]["name"])
    assert config["metadata"]["name"] == f"{job['metadata']['name']}-optional"
    assert int(found[2]) == Settings.model_fields["serve"].get_default().port
    for argument in container.get("args", []) + container.get("command", []):
        if "master-addr=" in argument:
            # Rank 0 is where the ranks meet; Prometheus needs the namespace too.
            assert found[1] == f"{argument.partition('=')[2]}.training"


@pytest.mark.parametrize("name", JOBS)
def test_a_pod_that_others_need_before_it_is_ready_has_a_name_or_no_probe(name: str) -> None:
    _, container, _ = JOBS[name]

    # A rank answers /healthz only after all ranks have met, and they meet by these names.
    assert publishes_not_ready_pods(name) or "readinessProbe" not in container


def publishes_not_ready_pods(name: str) -> bool:
    """Whether the Service of a job gives names to pods that are not ready."""
    job, _, _ = JOBS[name]
    match job["kind"], job["apiVersion"]:
        case "JobSet", _:
            return bool(job["spec"]["network"]["publishNotReadyAddresses"])
        case "TrainJob", _:
            return True  # JobSet's default
        case "Job", "batch.volcano.sh/v1alpha1":
            return "--publish-not-ready-addresses" in job["spec"]["plugins"]["svc"]
        case "Job", _:
            things = objects((KUBERNETES / "demo" / "job.yaml").read_text())
            (service,) = (thing for thing in things if thing["kind"] == "Service")
            return bool(service["spec"]["publishNotReadyAddresses"])
        case _:
            return False


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("trainjob", "pytorchjob")])
def test_a_pod_is_ready_while_monitoring_works(name: str) -> None:
    _, container, _ = JOBS[name]

    probe = container["readinessProbe"]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert probe["path"] == "/healthz"
    assert ports[probe["port"]] == 9464


@pytest.mark.parametrize("name", [name for name in JOBS if name != "trainjob"])
def test_a_pod_ends_after_its_last_scrape_and_not_because_of_monitoring(name: str) -> None:
    job, container, _ = JOBS[name]
    linger_seconds = Settings.model_fields["serve"].get_default().linger_seconds

    pod = next(pod_templates(job))

    assert "livenessProbe" not in container
    assert pod["spec"]["terminationGracePeriodSeconds"] >= linger_seconds + GRACE_SECONDS


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("trainjob", "demo")])
def test_an_example_has_8_gpus_in_a_pod(name: str) -> None:
    _, container, _ = JOBS[name]

    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_the_network_policy_admits_prometheus_to_the_ports_of_all_ranks() -> None:
    (policy,) = (thing for thing in written_objects() if thing["kind"] == "NetworkPolicy")
    ranks, prometheus = policy["spec"]["ingress"]
    deployment = next(thing for thing in written_objects() if thing["kind"] == "Deployment")

    admitted = {
        port
        for each in prometheus["ports"]
        for port in range(each["port"], each.get("endPort", each["port"]) + 1)
    }

    assert {9463, *range(9464, 9464 + 16)} == admitted
    assert "ports" not in ranks  # NCCL uses any port
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for name in ("demo", "jobset", "pytorchjob", "volcano"):
        labels = next(pod_templates(JOBS[name][0]))["metadata"]["labels"]
        assert selected.items() <= labels.items()
    assert selected.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_no_service_adds_variables_with_the_prefix_of_settings_to_later_pods() -> None:
    services = [thing for thing in written_objects() if thing["kind"] == "Service"]

    # Kubernetes adds none for a Service without a cluster IP.
    assert {each["metadata"]["name"]: each["spec"].get("clusterIP") for each in services} == {
        "zerowatch-demo": "None",
        "zerowatch-targets": "None",
    }


def test_the_targets_of_a_shared_volume_are_served_where_the_scrape_config_asks() -> None:
    things = {
        thing["kind"]: thing
        for file in (KUBERNETES / "targets").glob("*.yaml")
        for thing in objects(file.read_text())
    }
    (discovery,) = things["ScrapeConfig"]["spec"]["httpSDConfigs"]
    pod = things["Deployment"]["spec"]["template"]
    service = things["Service"]

    host, port = discovery["url"].removeprefix("http://").partition("/")[0].split(":")

    assert host == f"{service['metadata']['name']}.training"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["containers"][0]["args"][-1] == f":{port}"


def test_the_pods_of_the_demo_reach_their_master_through_the_service() -> None:
    things = objects((KUBERNETES / "demo" / "job.yaml").read_text())
    by_kind = {thing["kind"]: thing for thing in things}
    job, service = by_kind["Job"], by_kind["Service"]
    name, domain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]

    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]

    assert domain == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--master-addr={name}-0.{domain}" in arguments
    assert {port["port"] for port in service["spec"]["ports"]} == {29500, 9464}


@pytest.mark.parametrize("file", ["alerts", "dcgm", "recording"])
def test_a_prometheus_rule_has_the_same_groups_as_the_rule_file(
    file: str, generated: dict[str, str], manifests: dict[str, str]
) -> None:
    thing = yaml.safe_load(manifests[f"kubernetes/{file}.yaml"])

    for group in thing["spec"]["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert "$labels.run" in rule["labels"].pop("namespace")
    assert thing["metadata"]["name"] == f"zerowatch-{file}"
    assert thing["spec"] == yaml.safe_load(generated[f"prometheus/{file}.yaml"])


@pytest.mark.parametrize("file", ["alerts", "dcgm", "recording"])
def test_promtool_accepts_the_groups_of_a_prometheus_rule(
    file: str, manifests: dict[str, str], tmp_path: Path
) -> None:
    promtool = program("promtool", apt="prometheus")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(yaml.safe_load(manifests[f"kubernetes/{file}.yaml"])["spec"]))

    done = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_has_the_namespace_of_its_run_as_a_label(
    manifests: dict[str, str], tmp_path: Path
) -> None:
    promtool = program("promtool", apt="prometheus")
    spec = yaml.safe_load(manifests["kubernetes/alerts.yaml"])["spec"]
    label = spec["groups"][0]["rules"][0]["labels"]["namespace"]
    rule = {"alert": "A", "expr": "m > 0", "labels": {"namespace": label}}
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]})
    )
    series = [
        {"series": 'm{run="team-a.train.7"}', "values": "1x5"},
        {"series": 'm{other="x"}', "values": "1x5"},
    ]
    expected = [
        {"exp_labels": {"run": "team-a.train.7", "namespace": "team-a"}},
        {"exp_labels": {"other": "x"}},
    ]
    alerts = [{"eval_time": "2m", "alertname": "A", "exp_alerts": expected}]
    test = {
        "rule_files": ["rules.yaml"],
        "tests": [{"input_series": series, "alert_rule_test": alerts}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))

    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alertmanager_config_has_the_routes_and_inhibitions_of_the_configuration(
    generated: dict[str, str], manifests: dict[str, str], tmp_path: Path
) -> None:
    expected = yaml.safe_load(generated[ALERTMANAGER_FILE])
    spec = yaml.safe_load(manifests["kubernetes/alertmanagerconfig.yaml"])["spec"]

    routes = [
        {**in_snake_case(route), "matchers": as_texts(route["matchers"])}
        for route in spec["route"].pop("routes")
    ]
    made = {
        "route": {**in_snake_case(spec["route"]), "routes": routes},
        "inhibit_rules": [
            {
                "source_matchers": as_texts(rule["sourceMatch"]),
                "target_matchers": as_texts(rule["targetMatch"]),
                "equal": rule["equal"],
            }
            for rule in spec["inhibitRules"]
        ],
        "receivers": spec["receivers"],
    }

    assert made["route"] == expected["route"]
    assert made["inhibit_rules"] == expected["inhibit_rules"]
    assert [each["name"] for each in made["receivers"]] == [
        each["name"] for each in expected["receivers"]
    ]
    amtool = program("amtool", apt="prometheus-alertmanager")
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(made))
    done = subprocess.run(
        [amtool, "check-config", "alertmanager.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def as_texts(matchers: list[dict[str, str]]) -> list[str]:
    return [f'{each["name"]}{each["matchType"]}"{each["value"]}"' for each in matchers]


def test_each_dashboard_becomes_a_config_map_with_the_label_of_grafanas_sidecar(
    generated: dict[str, str], manifests: dict[str, str]
) -> None:
    kustomization = yaml.safe_load(manifests["kustomization.yaml"])
    dashboards = sorted(path for path in generated if path.startswith("grafana/"))
    options = kustomization["generatorOptions"]

    assert options["labels"] == {"grafana_dashboard": "1"}
    assert options["annotations"] == {"grafana_folder": "zerowatch"}
    assert [one["files"] for one in kustomization["configMapGenerator"]] == [
        [path] for path in dashboards
    ]
    for one in kustomization["configMapGenerator"]:
        (path,) = one["files"]
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": one["name"], "labels": options["labels"]},
            "data": {Path(path).name: generated[path]},
        }
        kubernetes_validate.validate(config_map, RELEASE, strict=True)
        assert len(json.dumps(config_map).encode()) < CONFIG_MAP_BYTES


def test_the_rendered_kustomization_names_the_generated_objects(manifests: dict[str, str]) -> None:
    kustomization = yaml.safe_load(manifests["kustomization.yaml"])

    assert set(kustomization["resources"]) == manifests.keys() - {"kustomization.yaml"}


def test_small_files_become_these_objects() -> None:
    rules = {
        "groups": [
            {
                "name": "g",
                "rules": [
                    {"record": "r", "expr": "up"},
                    {"alert": "A", "expr": "up", "labels": {"severity": "info"}},
                ],
            }
        ]
    }
    configuration = {
        "route": {
            "receiver": "warning",
            "group_wait": "30s",
            "routes": [
                {"matchers": ['severity="info"'], "receiver": "info", "repeat_interval": "1d"}
            ],
        },
        "inhibit_rules": [
            {
                "source_matchers": ['alertname="A"'],
                "target_matchers": ['alertname=~"B|C"', 'severity!="critical"'],
                "equal": ["run"],
            }
        ],
        "receivers": [{"name": "info", "webhook_configs": [{"url": "http://there"}]}],
    }

    found = kubernetes_files(
        {
            "prometheus/alerts.yaml": yaml.safe_dump(rules),
            ALERTMANAGER_FILE: yaml.safe_dump(configuration),
            "grafana/zerowatch-b.json": "{}",
            "grafana/zerowatch-a.json": "{}",
        }
    )

    part_of = {"app.kubernetes.io/part-of": "zerowatch"}
    objects = {path: yaml.load(text, _Loader) for path, text in found.items()}
    assert objects == {
        "kubernetes/alerts.yaml": {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "zerowatch-alerts", "labels": part_of},
            "spec": {
                "groups": [
                    {
                        "name": "g",
                        "rules": [
                            {"record": "r", "expr": "up"},
                            {
                                "alert": "A",
                                "expr": "up",
                                "labels": {
                                    "severity": "info",
                                    "namespace": '{{ reReplaceAll "[.].*" "" $labels.run }}',
                                },
                            },
                        ],
                    }
                ]
            },
        },
        "kubernetes/alertmanagerconfig.yaml": {
            "apiVersion": "monitoring.coreos.com/v1alpha1",
            "kind": "AlertmanagerConfig",
            "metadata": {"name": "zerowatch", "labels": part_of},
            "spec": {
                "route": {
                    "receiver": "warning",
                    "groupWait": "30s",
                    "routes": [
                        {
                            "receiver": "info",
                            "repeatInterval": "1d",
                            "matchers": [{"name": "severity", "matchType": "=", "value": "info"}],
                        }
                    ],
                },
                "inhibitRules": [
                    {
                        "sourceMatch": [{"name": "alertname", "matchType": "=", "value": "A"}],
                        "targetMatch": [
                            {"name": "alertname", "matchType": "=~", "value": "B|C"},
                            {"name": "severity", "matchType": "!=", "value": "critical"},
                        ],
                        "equal": ["run"],
                    }
                ],
                "receivers": [{"name": "info"}],
            },
        },
        "kustomization.yaml": {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["kubernetes/alertmanagerconfig.yaml", "kubernetes/alerts.yaml"],
            "generatorOptions": {
                "disableNameSuffixHash": True,
                "labels": {"grafana_dashboard": "1"},
                "annotations": {"grafana_folder": "zerowatch"},
            },
            "configMapGenerator": [
                {"name": "zerowatch-a", "files": ["grafana/zerowatch-a.json"]},
                {"name": "zerowatch-b", "files": ["grafana/zerowatch-b.json"]},
            ],
        },
    }
