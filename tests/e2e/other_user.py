"""Commands of other users of this machine: started by root, skipped elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.project import Project, Ran

GROUP: Final = 65534
# Python may be in a folder that only root enters: the command sees another folder in its place, with Python in it.
_ENTER: Final = """
set -e
base=$1 closed=$2 user=$3 keep=$4
shift 4
mount --bind "$base" "$keep"
if [ -n "$closed" ]; then
  mount -t tmpfs -o mode=755 tmpfs "$closed"
  mkdir -p "$base"
  mount --move "$keep" "$base"
fi
exec setpriv --reuid="$user" --regid=65534 --clear-groups "$@"
"""


def needs_other_users() -> None:
    """Skip the test where commands of other users cannot be started."""
    missing = [name for name in ("unshare", "setpriv", "prlimit") if not shutil.which(name)]
    if os.getuid() or missing:
        pytest.skip(f"it needs root, unshare, setpriv and prlimit: {missing or 'this is not root'}")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this process may not have mounts of its own")


def own(folder: Path, user: int) -> None:
    """Let a folder, with all that is in it, belong to a user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, GROUP, follow_symlinks=False)


def run_as(
    user: int,
    project: Project,
    *words: str,
    umask: int = 0o022,
    limits: Sequence[str] = (),
) -> Ran:
    """Run a command of tvmflow as another user, to its end.

    Args:
        user: The number of the user, whose group is that of nobody.
        project: Where.
        words: The command line.
        umask: Of the command.
        limits: Options of `prlimit`.
    """
    base = Path(sys.base_prefix).resolve()
    closed = next((path for path in reversed(base.parents) if not path.stat().st_mode & 0o001), "")
    keep = project.folder / ".python"
    keep.mkdir(exist_ok=True)
    enter = ["sh", "-c", _ENTER, "sh", str(base), str(closed), str(user), str(keep)]
    command = ["unshare", "--mount", "--propagation", "private", *enter]
    limited = ["prlimit", *limits] if limits else []
    done = subprocess.run(
        [*command, *limited, *project.command(*words)],
        cwd=project.folder,
        env={**project.environment, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )
    return Ran(done.returncode, done.stdout, done.stderr, [])
