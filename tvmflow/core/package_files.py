"""The files of an installed package, and the digest of their content at the price of their stamps.

pip writes the digest of every file into a distribution's RECORD, after all other files. A file that
has the recorded size and was not changed after that list was written is what was installed. All
others are hashed, and their digests are remembered in the user's cache folder for as long as size,
times and inode stay the same.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tvmflow.core.files import write_atomically

_NOT_CODE: Final = re.compile(r"\.dist-info/|__pycache__/|^\.\.|^/")
_BYTECODE: Final = ".pyc"
_CODE: Final = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
_TESTS: Final = re.compile(r"(^|/)tests?/")
_EXECUTABLE: Final = 0o111
_RACY_NS: Final = 2_000_000_000
_CHUNK: Final = 1 << 20
_SHA256: Final = "sha256"


class PackageFiles(NamedTuple):
    """The files of a package.

    Attributes:
        lines: One line for each, as in a RECORD: name, digest and size.
        code: The names of those that Python and the system load or start, and of their folders.
    """

    lines: list[str]
    code: list[str]


def digest_lines(lines: Iterable[str]) -> str:
    """Return the first 12 hex digits of the sha256 over lines in sorted order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def lists_module(record: str, module: str) -> bool:
    """Return whether a RECORD lists a module's `__init__` file."""
    try:
        with open(record, encoding="utf-8", errors="replace") as stream:
            return f"\n{module}/__init__.py" in f"\n{stream.read()}"
    except OSError:
        return False


def read_files(folder: str, module: str, record: str, *, walk: bool) -> PackageFiles:
    """Return the files of a package as they are now.

    Args:
        folder: The folder with its files.
        module: The folder of its module in there.
        record: Its RECORD; empty where there is none.
        walk: Whether to look for files that RECORD lacks in folders that have not changed, too.

    Raises:
        OSError: when a file cannot be read.
    """
    recorded = _read_record(record) if record else {}
    with _remembered_digests(f"{folder}/{module or record}") as digests:
        files = _PackageReader(folder, record, digests)
        for name, line in recorded.items():
            files.add(name, line)
        if not recorded or walk:
            files.walk(module)
        else:
            files.walk_changed_folders()
    return PackageFiles(list(files.lines.values()), sorted(files.code))


def digest_libraries(folders: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each file of some folders whose name begins with a prefix, without the path.

    Args:
        folders: Folders, which may be missing, each with its prefix.
    """
    lines = []
    for folder, prefix in folders:
        with _remembered_digests(f"{folder}/{prefix}") as digests:
            reader = _PackageReader(folder, "", digests)
            for name in list_libraries(folder, prefix):
                reader.add(name, None)
        lines += [f"libraries/{line}" for line in reader.lines.values()]
    return lines


def list_libraries(folder: str, prefix: str) -> list[str]:
    """Return the names of the files in a folder that begin with a prefix; none where there is no such folder."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if name.startswith(prefix))


class _PackageReader:
    """Collects the files of a package, and hashes those that may have been changed."""

    def __init__(self, folder: str, record: str, digests: "dict[str, Any]") -> None:
        self._folder = folder
        self._digests = digests
        status = os.stat(record) if record else None
        # Nothing is as it was installed where no list says what that is.
        self._modified_ns = status.st_mtime_ns if status else 0
        self._changed_ns = status.st_ctime_ns if status else 0
        self.lines: dict[str, str] = {}
        self.code: set[str] = set()

    def add(self, name: str, recorded: str | None) -> None:
        """Add a file: with the line in RECORD if it is as it was installed; leave a missing one out."""
        try:
            status = os.stat(f"{self._folder}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return
        is_installed = (
            recorded is not None
            and status.st_mtime_ns <= self._modified_ns
            and status.st_ctime_ns <= self._changed_ns
            and recorded.endswith(f",{status.st_size}")
            and not recorded.endswith(f",,{status.st_size}")
        )
        if recorded is None or not is_installed:
            algorithm = recorded.rsplit(",", 2)[1].partition("=")[0] if recorded else ""
            digest = self._digest(name, status, algorithm or _SHA256)
            recorded = f"{name},{digest},{status.st_size}"
        self.lines[name] = recorded
        is_code = name.endswith(_CODE) or status.st_mode & _EXECUTABLE or ".so." in name
        if is_code and not _TESTS.search(name):
            self.code |= {name, os.path.dirname(name) or "."}

    def walk(self, module: str) -> None:
        """Add the files below a folder that are not there yet."""
        for path, folders, names in os.walk(f"{self._folder}/{module}"):
            folders[:] = sorted(folder for folder in folders if _is_content(folder, folders))
            for name in sorted(name for name in names if _is_content(name, names)):
                relative = os.path.relpath(f"{path}/{name}", self._folder)
                if relative not in self.lines:
                    self.add(relative, None)

    def walk_changed_folders(self) -> None:
        """Add code that came into a package's folders after its RECORD was written."""
        folders = {name.rpartition("/")[0] for name in self.lines} - {""}
        for folder in sorted(folders):
            status = os.stat(f"{self._folder}/{folder}")
            if status.st_mtime_ns <= self._modified_ns:
                continue
            names = os.listdir(f"{self._folder}/{folder}")
            for name in sorted(name for name in names if _is_content(name, names)):
                relative = f"{folder}/{name}"
                if os.path.isdir(f"{self._folder}/{relative}"):
                    if relative not in folders:
                        self.walk(relative)
                elif relative not in self.lines and name.endswith(_CODE):
                    self.add(relative, None)

    def _digest(self, name: str, status: os.stat_result, algorithm: str) -> str:
        """Return the digest of a file as RECORD writes it, remembered while its stamp is the same."""
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        remembered = self._digests.get(name)
        if remembered and remembered[0] == stamp and remembered[1].startswith(algorithm):
            return str(remembered[1])
        path = f"{self._folder}/{name}"
        digest = hashlib.new(algorithm)
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        text = f"{algorithm}={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')}"
        # A coarse clock could hide a second write.
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _RACY_NS:
            self._digests[name] = [stamp, text]
        return text


def _is_content(name: str, siblings: Iterable[str]) -> bool:
    """Return whether a file or folder is part of a package, and not what Python or an editor left there."""
    if name == "__pycache__" or name.startswith(".") or name.endswith(("~", ".swp")):
        return False
    # Without its source, Python imports bytecode.
    return not name.endswith(_BYTECODE) or name.removesuffix("c") not in siblings


def _read_record(path: str) -> dict[str, str]:
    """Return the lines of a RECORD about code by the names of their files."""
    with open(path, encoding="utf-8") as stream:
        lines = stream.read().splitlines()
    return {
        line.rsplit(",", 2)[0].strip('"'): line.strip()
        for line in lines
        if line.count(",") > 1 and not _NOT_CODE.search(line)
    }


# ---------------------------------------------------------------- digests of earlier processes


@contextlib.contextmanager
def _remembered_digests(package: str) -> "Iterator[dict[str, Any]]":
    """Give the remembered digests of a package's files, and save them if there are more afterwards."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.path.realpath(package).encode()).hexdigest()[:32]
    path = f"{base}/tvmflow/packages/{name}.json"
    before = _load(path)
    digests = dict(before)
    yield digests
    if digests != before:
        # Where nothing can be remembered, the files are hashed again.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, json.dumps(digests))


def _load(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}
