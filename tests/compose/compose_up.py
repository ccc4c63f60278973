"""Starts compose.yaml and follows the life of a run: training, crash and normal end.

    PYTHONPATH=tests python -m compose.compose_up

A service is left out and named if its image is neither present nor available.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import yaml
from compose.engine import Project, docker, get_json, has_image, seconds_until, why_no_engine

ROOT = Path(__file__).resolve().parent.parent.parent
HEALTHY_SECONDS = 60
RULES_SECONDS = 150  # rates need two scrapes, and rules are evaluated every 15 s
ALERT_SECONDS = 180
SILENT_SECONDS = 100  # longer than the alert of a killed run takes: a minute, and two intervals
OURS = {"trainer"}  # built here
# A short demo on the CPU has no GPUs, offloading or leaks, and too few peaks for a prediction.
EMPTY_ON_CPU = re.compile(
    "device_(power|sm|temp|link)|offload|leak|fragmentation|predict|_oom_|headroom"
)
RANK_DOWN = "ZerowatchRankVanished"


def main() -> None:
    """Run all checks in turn; an AssertionError describes the first failure."""
    compose_file = ROOT / "compose.yaml"
    services = yaml.safe_load(compose_file.read_text())["services"]
    chosen = [name for name in services if name in OURS or has_image(services[name]["image"])]
    left_out = sorted(services.keys() - set(chosen))
    say(
        f"services: {', '.join(chosen)}"
        + (f"; no image of: {', '.join(left_out)}" * bool(left_out))
    )
    project = Project(f"zerowatch-test-{os.getpid()}", compose_file)
    try:
        begun = time.monotonic()
        project.compose("build", "trainer")
        say(f"built in {time.monotonic() - begun:.0f} s")
        starts_and_fills(project, chosen)
        a_kill_raises_an_alert(project)
        a_normal_end_is_silent(project)
    finally:
        if sys.exc_info()[0] is not None:
            say(project.compose("logs", "--no-color", "--tail", "20"))
        project.compose("down", "--volumes", "--timeout", "5")
    assert project.leftovers() == []
    say("down --volumes left nothing")


def starts_and_fills(project: Project, services: list[str]) -> None:
    """Check that services become healthy, both ranks are found and rules have series."""
    begun = time.monotonic()
    project.compose("up", "--detach", *services)
    seconds_until(
        lambda: all(project.is_healthy(service) for service in services),
        within=HEALTHY_SECONDS - (time.monotonic() - begun),
        what=f"all of {services} healthy",
    )
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    say(f"all healthy after {time.monotonic() - begun:.0f} s ({load})")
    seconds_until(
        lambda: ranks_up(project) == {"0": "1", "1": "1"}, within=60, what="both ranks up"
    )
    say(
        f"both ranks are up, found by http_sd, after {time.monotonic() - begun:.0f} s: "
        f"run {run_of(project)}"
    )
    if "node-exporter" in services:
        seconds_until(
            lambda: project.query('up{job="node-exporter"} == 1'),
            within=60,
            what="node-exporter is up",
        )
        say("node-exporter is up")
    seconds_until(
        lambda: all(EMPTY_ON_CPU.search(name) for name in filled(project)[1]),
        within=RULES_SECONDS,
        what="recording rules have series",
    )
    full, empty = filled(project)
    say(f"{len(full)} recording rules have series; without: {', '.join(empty) or 'none'}")
    health = {rule["health"] for rule in rules(project)}
    assert health == {"ok"}, [rule for rule in rules(project) if rule["health"] != "ok"]
    say(f"all {len(rules(project))} rules are evaluated without error")


def a_kill_raises_an_alert(project: Project) -> None:
    """Kill the trainer, and check that the alert reaches Alertmanager and the alert log."""
    run = run_of(project)
    docker("kill", project.container("trainer"))
    took = seconds_until(
        lambda: down_alerts(project, run), within=ALERT_SECONDS, what=f"{RANK_DOWN} in Alertmanager"
    )
    say(f"docker kill of run {run}: {RANK_DOWN} in Alertmanager after {took:.0f} s")
    seconds_until(lambda: logged_alerts(project), within=60, what="it in the alert log")
    say(f"alert log: {logged_alerts(project)[0]}")


def a_normal_end_is_silent(project: Project) -> None:
    """Let another run end normally, and check that its ranks are not reported as down."""
    killed = run_of(project)
    project.compose("up", "--detach", "trainer", DEMO_STEPS="40")
    seconds_until(
        lambda: run_of(project) != killed and ranks_up(project) == {"0": "1", "1": "1"},
        within=90,
        what="the second run is up",
    )
    run = run_of(project)
    seconds_until(
        lambda: project.state("trainer")["Status"] == "exited", within=400, what="the run has ended"
    )
    code = project.state("trainer")["ExitCode"]
    assert code == 0, f"the demo ended with {code}"
    seconds_until(lambda: ranks_up(project) == {"0": "0", "1": "0"}, within=60, what="up is 0")
    say(f"run {run} ended with exit code 0; up is 0 on both ranks")
    time.sleep(SILENT_SECONDS)
    assert get_json(f"{project.alertmanager}/api/v2/status"), "Alertmanager does not answer"
    assert down_alerts(project, run) == []
    say(f"{SILENT_SECONDS} s later there is no {RANK_DOWN} of it")


def ranks_up(project: Project) -> dict[str, str]:
    return {
        series["metric"]["rank"]: series["value"][1]
        for series in project.query('up{job="zerowatch"}')
    }


def run_of(project: Project) -> str:
    found = project.query('up{job="zerowatch", rank="0"}')
    return str(found[0]["metric"]["run"]) if found else ""


def rules(project: Project) -> list[dict[str, object]]:
    found = get_json(f"{project.prometheus}/api/v1/rules")
    return [rule for group in found["data"]["groups"] for rule in group["rules"]]


def filled(project: Project) -> tuple[list[str], list[str]]:
    """Return the names of the recording rules with series, and of those without."""
    names = sorted({str(rule["name"]) for rule in rules(project) if rule["type"] == "recording"})
    full = [name for name in names if project.query(name)]
    return full, [name for name in names if name not in full]


def down_alerts(project: Project, run: str) -> list[dict[str, object]]:
    return [
        alert
        for alert in project.alerts()
        if alert["labels"]["alertname"] == RANK_DOWN and alert["labels"]["run"] == run
    ]


def logged_alerts(project: Project) -> list[str]:
    lines = project.compose("logs", "--no-color", "alert-log").splitlines()
    return [line for line in lines if RANK_DOWN in line]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    reason = why_no_engine()
    if reason:
        sys.exit(f"compose_up: {reason}")
    main()
