"""Checks of the host: ports, the disk of the run folder, shared memory, and limits."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ....errors import SettingsError
from ....metrics.exporters.listener import candidate_ports
from ... import separate_process
from ...common.format_numbers import format_bytes
from ...common.hidden_secrets import without_secret_parts
from ...common.rank_store import CLIENTS_PER_RANK
from .verdicts import Finding, Job, failed, ok, skipped, warning

# Where torchrun and deepspeed rendezvous by default.
_RENDEZVOUS_PORT = 29500
_CONNECT_SECONDS = 3.0
_PROBE_BYTES = 2**20
_LEAST_FREE_BYTES = 64 * 2**20
_LEAST_SHARED_BYTES = 2**30
_LEAST_DESCRIPTORS = 4096
_OWN_DESCRIPTORS = 1024
_CONNECTIONS_PER_RANK = 1 + CLIENTS_PER_RANK  # one is torch's own
_SLOW_WRITE_SECONDS = 2.0
_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "fuse.sshfs", "9p")


def check_ports(job: Job) -> Iterator[Finding]:
    """Find who holds the ports of the metrics and of the rendezvous."""
    serve = job.settings.serve
    if not serve.enabled:
        yield skipped("ports of the metrics: serve.enabled is false")
    elif serve.port == 0:
        yield skipped("ports of the metrics: serve.port is 0, so each rank takes any free port")
    else:
        yield from _check_metrics_ports(job)
    # Under a launcher, the port belongs to this job.
    if not job.is_rank and (fault := _bind_error("127.0.0.1", _RENDEZVOUS_PORT)):
        yield warning(
            f"port {_RENDEZVOUS_PORT}, the rendezvous of torchrun and deepspeed by default: "
            f"{_reason(fault, _RENDEZVOUS_PORT)}",
            "start with --standalone, or with another --master-port",
        )
    endpoint = job.settings.otel.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint:
        yield _check_collector(endpoint)


def _check_metrics_ports(job: Job) -> Iterator[Finding]:
    serve, taken = job.settings.serve, 0
    for rank in range(job.local_ranks):
        try:
            ports = candidate_ports(serve.port, rank, strict=serve.strict_port)
        except SettingsError as error:
            taken += 1
            yield failed(str(error), "set a lower serve.port")
            continue
        fault = _bind_error(serve.host, ports[0])
        if fault is None:
            continue
        taken += 1
        text = f"{serve.host}:{ports[0]} for the metrics of local rank {rank}: "
        text += _reason(fault, ports[0])
        if fault.errno != errno.EADDRINUSE:
            yield failed(
                text,
                "set serve.host to an address of this machine and serve.port to a port that this "
                "user may open",
            )
        elif serve.strict_port:
            yield failed(
                f"{text}; serve.strict_port is set, so nothing is served unless it becomes free "
                "soon",
                "end the process if nobody needs it, or set serve.port "
                f"(ZEROWATCH_SERVE_PORT={ports[0] + 100})",
            )
        else:
            yield warning(
                f"{text}; the rank would serve on another port",
                "end the process if nobody needs it, or set serve.port; Prometheus finds the other "
                "port by /targets",
            )
    if not taken:
        last = f" to {serve.port + job.local_ranks - 1}" if job.local_ranks > 1 else ""
        yield ok(f"ports {serve.port}{last} of {serve.host} for the metrics are free")


def _bind_error(host: str, port: int) -> OSError | None:
    """Return why a server cannot listen on a port, or None if it can.

    The probe does not listen itself, so another one at the same time finds the port free.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _reason(error: OSError, port: int) -> str:
    if error.errno != errno.EADDRINUSE:
        return str(error.strerror)
    return f"taken by {_listener(port)}"


def _listener(port: int) -> str:
    """Return the process that listens on a port of this host."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        connections = []
    for each in connections:
        if each.status == psutil.CONN_LISTEN and each.laddr[1:2] == (port,) and each.pid:
            try:
                process = psutil.Process(each.pid)
                command = " ".join(process.cmdline()) or process.name()
                if separate_process.__name__ in command:
                    return f"the monitoring process {each.pid} of a run of {process.username()}"
                return f"process {each.pid} of {process.username()} ({command[:80]})"
            except psutil.Error:
                return f"process {each.pid}"
    return "a process that this user may not see"


def _check_collector(endpoint: str) -> Finding:
    """Connect to the OpenTelemetry collector."""
    shown = without_secret_parts(endpoint)
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return warning(
            f"the collector {shown} does not answer: {error}",
            "start it, or correct otel.endpoint; without it no traces are kept",
        )
    return ok(f"the collector {shown} accepts connections")


def check_disk(job: Job) -> Iterator[Finding]:
    """Write a file where the run folder will be, and look at the space and kind of the disk."""
    log = job.settings.run_log
    if not log.enabled:
        yield skipped("run_log.enabled is false: no run folder is written")
        return
    folder = log.folder.absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        seconds = _write_seconds(existing)
    except OSError as error:
        yield _write_fault(folder, existing, error)
        return
    free = shutil.disk_usage(existing).free
    kind = _file_system(existing)
    # A log of steps and, by default, one of metrics.
    num_logs = job.local_ranks * (2 if log.metrics_interval_seconds else 1)
    needed = num_logs * log.segment_bytes * log.max_segments
    text = f"run folder {folder} ({kind}): writable, {format_bytes(free)} free"
    figures = {"free_bytes": float(free), "write_seconds": seconds}
    enlarge = "free some space, or set run_log.folder to another disk"
    if free < _LEAST_FREE_BYTES:
        yield failed(text, enlarge, **figures)
    elif free < needed:
        yield warning(
            f"{text}; the logs of {job.local_ranks} rank(s) grow to {format_bytes(needed)}",
            f"{enlarge}, or lower run_log.max_segments",
            **figures,
        )
    elif kind in _IN_MEMORY:
        yield warning(
            f"{text}; it lies in memory and is lost at the next boot",
            "set run_log.folder to a disk",
            **figures,
        )
    elif kind == "overlay":
        yield warning(
            f"{text}; it lies in the container and is lost with it",
            "set run_log.folder to a mounted volume",
            **figures,
        )
    elif seconds > _SLOW_WRITE_SECONDS:
        yield warning(
            f"{text}; writing {format_bytes(_PROBE_BYTES)} takes {seconds:.1f} s",
            "set run_log.folder to another disk",
            **figures,
        )
    else:
        network = ", a network file system" if kind in _NETWORK else ""
        yield ok(f"{text}{network}", **figures)


def _write_seconds(folder: Path) -> float:
    """Write a file and remove it; return the time until it was on the disk."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zerowatch-check-") as file:
        file.write(os.urandom(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - began


def _write_fault(folder: Path, existing: Path, error: OSError) -> Finding:
    """Explain why a file cannot be written, down to where the disk is full."""
    place = f"run folder {folder}" + ("" if existing == folder else f", to be made in {existing}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_bytes(shutil.disk_usage(existing).free)
        what = f"{place} ({_file_system(existing)}): the disk is full, {free} free"
        return failed(what, "free some space, or set run_log.folder to another disk")
    return failed(
        f"{place} ({_file_system(existing)}): cannot be written: {error.strerror}",
        "set run_log.folder (ZEROWATCH_RUN_LOG_FOLDER) to a folder that this user may write",
    )


def _file_system(path: Path) -> str:
    """Return the kind of the file system that a path is on, such as "ext4"."""
    real = path.resolve()
    mounts = [
        each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)
    ]
    # The last mount on a folder hides the others.
    longest = max((len(each.mountpoint) for each in mounts), default=0)
    return next(
        (each.fstype for each in reversed(mounts) if len(each.mountpoint) == longest),
        "unknown file system",
    )


def _limit_advice(least: int, hard: int) -> str:
    """Return how to raise the limit of open files, above the hard limit only if it is too low."""
    if hard == resource.RLIM_INFINITY:
        return f"ulimit -n {max(least, 65536)}"
    if hard >= least:
        return f"ulimit -n {max(least, min(hard, 65536))}"
    return (
        f"raise the hard limit to {least} first, as root: nofile in /etc/security/limits.conf, "
        f"LimitNOFILE={least} of a systemd service such as slurmd, or --ulimit "
        f"nofile={least}:{least} of a container"
    )


def check_limits(job: Job) -> Iterator[Finding]:
    """Look at shared memory and at the limit of open files."""
    faults = 0
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        if usage.free < _LEAST_SHARED_BYTES:
            faults += 1
            yield warning(
                f"{shared}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}; "
                "DataLoader workers and NCCL share data there and end with a bus error when it is "
                "full",
                "in a container: --shm-size=8g or --ipc=host (Kubernetes: a volume emptyDir with "
                "medium Memory)",
                free_bytes=float(usage.free),
            )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The process that holds the store of the job, rank 0 or its launcher, has connections to each
    # rank. Only rank 0 makes room for those of zerowatch by itself.
    ranks = "ranks" if job.world_size is None else f"{job.world_size} ranks"
    least = max(
        _LEAST_DESCRIPTORS, _OWN_DESCRIPTORS + _CONNECTIONS_PER_RANK * (job.world_size or 1)
    )
    if soft != resource.RLIM_INFINITY and soft < least:
        faults += 1
        yield warning(
            f"limit of open files: {soft} (hard limit {hard}); workers and the connections of the "
            f"{ranks} to the job's store may need {least}",
            _limit_advice(least, hard),
        )
    if not faults:
        yield ok(f"shared memory and the limit of open files ({soft}) suffice")
