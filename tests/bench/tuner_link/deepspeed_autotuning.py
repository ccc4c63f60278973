"""DeepSpeed's own autotuner on the two hosts; each trial is a new job, over pdsh and ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.result_table import Row
from bench.tuner_link.search_space import START
from bench.tuner_link.two_host_jobs import DEEPSPEED, Host, environment, two_hosts

MOST_SECONDS = 900
GLOBAL_BATCH = 32
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": START["micro_batch_samples"],
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": START["zero_stage"]},
    "autotuning": {"enabled": True, "fast": True, "max_train_batch_size": GLOBAL_BATCH},
}
SSH = """#!/bin/sh
exec {ssh} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
-i {folder}/key "$@"
"""
SSHD = """HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin yes
PidFile none
"""


def autotuning(rate: str) -> Row:
    """Run the autotuner on a link of this bandwidth; return its result, or why it fails."""
    what = f"DeepSpeed's autotuner (fast), {rate}/s"
    began = time.monotonic()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="zerowatch-bench-")))
        hosts = undo.enter_context(two_hosts(rate))
        serve_ssh(hosts, folder, undo)
        (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
        (folder / "hostfile").write_text("".join(f"{host.address} slots=1\n" for host in hosts))
        script = Path(__file__).with_name("autotuned_script.py")
        arguments = ("--deepspeed", "--deepspeed_config", "ds.json")
        ended = subprocess.run(
            hosts[0].command(
                DEEPSPEED, "--hostfile=hostfile", "--autotuning=tune", script, *arguments
            ),
            env=environment(PATH=f"{folder}:{Path(DEEPSPEED).parent}:{os.environ['PATH']}"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
        found = folder / "autotuning_results" / "ds_config_optimal.json"
        if not found.exists():
            return Row(what=what, measured="does not run here", spread=reason(ended))
        best = json.loads(found.read_text())
        trials = len([*(folder / "autotuning_results").glob("*/cmd.txt")])
    micro_batch = best["train_micro_batch_size_per_gpu"]
    return Row(
        what=what,
        measured=f"micro-batch {micro_batch}, accumulation {best['gradient_accumulation_steps']}",
        spread=f"{trials} jobs started, {time.monotonic() - began:.0f} s without training; "
        f"global batch {best['train_batch_size']} instead of {GLOBAL_BATCH}",
    )


def serve_ssh(hosts: Sequence[Host], folder: Path, undo: ExitStack) -> None:
    """Start an ssh server on each host, with a key that all accept; do nothing without sshd."""
    server, client = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh")
    if not Path(server).exists() or client is None:
        return
    for key in ("key", "host"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
        subprocess.run(command, check=True)
    (folder / "ssh").write_text(SSH.format(ssh=client, folder=folder))
    (folder / "ssh").chmod(0o755)
    (folder / "sshd").write_text(SSHD.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)
    for host in hosts:
        variables = f"GLOO_SOCKET_IFNAME={host.device} DS_ACCELERATOR=cpu OMP_NUM_THREADS=1"
        command = host.command(server, "-D", "-f", folder / "sshd", "-o", f"SetEnv={variables}")
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        undo.callback(process.wait)
        undo.callback(process.terminate)


def reason(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the output that contains an error."""
    lines = (ended.stdout + ended.stderr).splitlines()
    errors = [line for line in lines if "Error" in line or "ERROR" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()
