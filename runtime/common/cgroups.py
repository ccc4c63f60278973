"""Finds the folders with the limits of this process's control group (cgroup) and its parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders that may have a controller's limits, innermost first.

    In a container, the path of the group may be a path of the host that is not mounted in the
    container. In this case the mount point is the container's group. The result may include
    folders that do not exist.

    Args:
        controller: The name of a cgroup controller, such as "memory".
        root: The root of the file system. Tests set another root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return []
    return [folder for line in lines for folder in _folders(line, controller, root)]


def _folders(line: str, controller: str, root: Path) -> Iterator[Path]:
    _, controllers, group = line.split(":", 2)
    if controllers and controller not in controllers.split(","):
        return
    mount = root / "sys/fs/cgroup"
    if controllers:  # version 1
        mount /= controller
    own = mount / group.lstrip("/")
    yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))
