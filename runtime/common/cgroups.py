"""Where the kernel keeps the limits of this process's cgroup and of all its parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """List the folders that may hold a controller's limits, innermost first.

    Inside a container the group's path may be the host's, which is not mounted there; the
    container's own group is then the mount itself. A folder that does not exist may be listed.

    Args:
        controller: Such as "memory"; a mount of its own in version 1, everywhere in version 2.
        root: The root of the file system, for tests.
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
