"""Control groups: the groups of Linux that this process is in; they may limit its CPUs and memory.

Imported by runs that are up to date and by wheels, so it imports next to nothing.
"""

from collections.abc import Iterator
from typing import Final

GROUPS_FOLDER: Final = "/sys/fs/cgroup"
OWN_GROUPS: Final = "/proc/self/cgroup"


def list_groups(controller: str, own: str = OWN_GROUPS, root: str = GROUPS_FOLDER) -> Iterator[str]:
    """Yield the folder of each group with a controller that this process is in, and of all around it.

    In a container, the paths may be those of the machine, and the root is the container's own group.

    Args:
        controller: `cpu` or `memory`.
        own: The file that lists the control groups of this process.
        root: The folder in which control groups are mounted.
    """
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        # version 2 has one tree for all controllers, and names none
        if not controllers or controller in controllers.split(","):
            folder = f"{root}/{controllers}" if controllers else root
            yield folder
            for name in filter(None, path.split("/")):
                folder = f"{folder}/{name}"
                yield folder


def read_text(path: str) -> str:
    """Return the content of a file of the kernel; nothing where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
