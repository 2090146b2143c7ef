"""The identities of packages that a result depends on, found without importing them.

A version is not enough: a rebuilt wheel can have the same version, an installed file can be edited, and PYTHONPATH can
put another folder first. An identity is the version and a digest of the content of the package's files. The same files
have the same identity on every machine.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.files import RACY_NS, write_atomically
from tvmflow.core.processes import read_text

# Distribution -> its module, if the names differ.
_MODULES: Final = {"apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi", "pillow": "PIL"}
# Distributions that share one namespace package, so that they are found by metadata.
_NAMESPACE_PREFIX: Final = "nvidia-"
_EXTRAS: Final = {
    "ai-edge-litert": "tvmflow[tflite]",
    "mxnet": "tvmflow[mxnet]",
    "nvidia-": "tvmflow[cuda]",
    "onnx-ir": "tvmflow[pytorch]",
    "onnxscript": "tvmflow[pytorch]",
    "torch": "tvmflow[pytorch]",
    "pillow": "tvmflow[images]",
}
# Where TVM looks for its shared libraries before its own folder.
TVM_LIBRARY_VARIABLE: Final = "TVM_LIBRARY_PATH"
# In a source checkout of TVM, shared libraries are outside of the Python package.
_SOURCE_LIBRARIES: Final = ("../../build/lib", "../../lib")
_SUFFIX: Final = ".dist-info"
_VERSION: Final = re.compile(
    r"^(?:__version__|version)\s*(?::[^=\n]+)?=\s*(?:\w+\s*=\s*)*[\"']([^\"']+)", re.M
)
_VERSION_FILES: Final = ("_version.py", "version.py", "__init__.py")
UNVERSIONED: Final = "unversioned"


class NotInstalled(EnvironmentProblem):
    """A package is not installed in this environment."""


class Package(NamedTuple):
    """A package as Python would import it; the version is `unversioned` if none is found.

    Files are named relative to `folder`, the import folder. `module` is the package's folder in there, or empty if
    distributions share a namespace package. `record` is the path of the RECORD with its installed files, or empty
    without metadata. `rivals` are other distributions that install files of the same module.
    """

    distribution: str
    version: str
    folder: str
    module: str
    record: str = ""
    rivals: tuple[str, ...] = ()


class _Identified(NamedTuple):
    identity: str
    package: Package
    files: PackageFiles


def identity(distribution: str) -> str:
    """Return `VERSION+DIGEST` of a package, cached for this process until `forget`.

    Raises:
        NotInstalled: if the package cannot be found.
        EnvironmentProblem: if the package cannot be identified.
    """
    return _identify(distribution, tuple(sys.path)).identity


def identify_installed(distributions: Iterable[str]) -> dict[str, str]:
    """Return the identities of the distributions that are installed and can be identified."""
    identities = {}
    for name in distributions:
        with contextlib.suppress(EnvironmentProblem):
            identities[name] = identity(name)
    return identities


def find_package(distribution: str) -> Package:
    """Return a package as Python would import it. Raises the same as `identity`."""
    return _identify(distribution, tuple(sys.path)).package


def files_to_watch(distribution: str) -> dict[str, list[str]]:
    """Return folder -> names of its files whose timestamps show that a package is unchanged.

    Code and folders with code are watched; data and tests are not.
    """
    identified = _identify(distribution, tuple(sys.path))
    folder, record = identified.package.folder, identified.package.record
    records = [os.path.relpath(record, folder)] if record else []
    watched = {folder: [*identified.files.list_code(), *records]}
    for libraries, prefix in _library_folders(distribution, identified.package):
        names = list_libraries(libraries, prefix)
        watched[libraries] = [".", *names] if os.path.isdir(libraries) else []
    return {folder: names for folder, names in watched.items() if names}


def import_folders() -> list[str]:
    """Return the absolute import folders of this process; a new package in them may hide another."""
    return [os.path.abspath(entry) for entry in sys.path]


def forget() -> None:
    """Clear the cache of identities, for long-lived processes."""
    _identify.cache_clear()


def host_platform() -> str:
    """Return the system and architecture of this host, on which object code may depend."""
    # Windows has no uname.
    name = os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]
    return f"{sys.platform}-{name}"


@functools.cache
def _identify(distribution: str, path: tuple[str, ...]) -> _Identified:
    package = _find(distribution)
    try:
        files = read_files(
            package.folder, package.module, package.record, walk=bool(package.rivals)
        )
        libraries = digest_libraries(_library_folders(distribution, package))
    except OSError as error:
        raise EnvironmentProblem(
            f"{distribution} cannot be identified: {error.filename}: {error.strerror}",
            fix=f"make it readable, or install it again: {install_command(distribution, again=True)}",
        ) from error
    digest = digest_lines([*files.lines, *libraries])
    return _Identified(f"{package.version}+{digest}", package, files)


def _find(distribution: str) -> Package:
    if distribution.startswith(_NAMESPACE_PREFIX):
        return _find_distribution(distribution)
    module = _MODULES.get(distribution, distribution.replace("-", "_"))
    folder = os.path.dirname(_package_folder(distribution, module))
    if owners := _find_owners(folder, distribution, module):
        [(name, version, record), *others] = owners
        rivals = tuple(other for other, _, _ in others)
        return Package(name, version, folder, module, record=record, rivals=rivals)
    version = _editable_version(distribution, folder) or _read_version(f"{folder}/{module}")
    return Package(distribution, version, folder, module)


def _package_folder(distribution: str, module: str) -> str:
    spec: ModuleSpec | None = None
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(module)
    if spec is None:
        raise NotInstalled(f"{distribution} is not installed", fix=install_command(distribution))
    if spec.origin is None or spec.origin == "namespace":
        [folder, *_] = spec.submodule_search_locations or [module]
        raise NotInstalled(
            f"{distribution} is not installed: {folder} is only a folder of the same name",
            fix=install_command(distribution),
        )
    if not os.path.isfile(spec.origin):
        raise EnvironmentProblem(
            f"{distribution} would be imported from an archive: {spec.origin}",
            fix="install it unpacked, with pip, and take the archive out of PYTHONPATH",
        )
    if not spec.submodule_search_locations:
        raise EnvironmentProblem(
            f"{spec.origin} would be imported in place of the package {distribution}",
            fix="rename that file, or take its folder out of PYTHONPATH",
        )
    return os.path.dirname(os.path.abspath(spec.origin))


def is_extra(distribution: str) -> bool:
    """Return whether a distribution belongs to an optional extra of tvmflow."""
    return any(distribution.startswith(prefix) for prefix in _EXTRAS)


def _find_distribution(distribution: str) -> Package:
    """Find a distribution without a module of its own by its metadata."""
    for folder in import_folders():
        for name, version, path in _list_dist_infos(folder):
            if name == distribution and os.path.isfile(f"{path}/RECORD"):
                return Package(name, version, folder, module="", record=f"{path}/RECORD")
    raise NotInstalled(f"{distribution} is not installed", fix=install_command(distribution))


def _find_owners(folder: str, distribution: str, module: str) -> list[tuple[str, str, str]]:
    """Return name, version and RECORD of each distribution that installed the module, best match first.

    Of two versions that an interrupted installation left, the later one is first.
    """
    entries = [(*entry, f"{entry[2]}/RECORD") for entry in _list_dist_infos(folder)]
    related = [entry for entry in entries if distribution in entry[0] or module in entry[0]]
    for candidates in (related, entries):
        owners = [
            (name != distribution, -os.stat(record).st_mtime_ns, name, version, record)
            for name, version, _, record in candidates
            if lists_module(record, module)
        ]
        if owners:
            return [(name, version, record) for _, _, name, version, record in sorted(owners)]
    return []


def _list_dist_infos(folder: str) -> list[tuple[str, str, str]]:
    try:
        entries = sorted(entry for entry in os.listdir(folder) if entry.endswith(_SUFFIX))
    except OSError:
        return []
    words = [(entry.removesuffix(_SUFFIX).partition("-"), entry) for entry in entries]
    return [
        (re.sub(r"[-_.]+", "-", name).lower(), version, f"{folder}/{entry}")
        for (name, _, version), entry in words
    ]


def _editable_version(distribution: str, source: str) -> str:
    for folder in import_folders():
        for name, version, path in _list_dist_infos(folder):
            if name == distribution and _is_editable(f"{path}/direct_url.json", source):
                return version
    return ""


def _is_editable(path: str, source: str) -> bool:
    import urllib.parse

    try:
        with open(path, encoding="utf-8") as stream:
            note = json.load(stream)
        root = urllib.parse.unquote(urllib.parse.urlsplit(note["url"]).path)
        return bool(note["dir_info"]["editable"]) and f"{source}/".startswith(f"{root}/")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_version(folder: str) -> str:
    for name in _VERSION_FILES:
        if match := _VERSION.search(read_text(f"{folder}/{name}")):
            return match[1]
    return UNVERSIONED


def _library_folders(distribution: str, package: Package) -> list[tuple[str, str]]:
    """Return folders outside of the package from which TVM loads shared libraries, with name prefixes."""
    if distribution not in _MODULES:
        return []
    named = os.environ.get(TVM_LIBRARY_VARIABLE) if distribution == "apache-tvm" else None
    own = f"{package.folder}/{package.module}"
    sources = () if os.path.isdir(f"{own}/lib") else _SOURCE_LIBRARIES
    folders = (named, *(f"{own}/{name}" for name in sources))
    return [(folder, f"lib{package.module}") for folder in folders if folder]


# ---------------------------------------------------------------- package files
# pip writes the digest of every file into a distribution's RECORD, after all other files. A file that has the
# recorded size and is older than the RECORD is unchanged, which costs one `stat`. Other files are hashed; their
# digests are cached in the user's cache folder and valid while size, times and inode stay the same.

_CODE: Final = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
_TESTS: Final = re.compile(r"(^|/)tests?/")
_EXECUTABLE: Final = 0o111
_CHUNK: Final = 1 << 20
_SHA256: Final = "sha256"


class PackageFiles(NamedTuple):
    """The files of a package: their RECORD lines, their names, and the names of executables."""

    lines: list[str]
    names: list[str]
    programs: set[str]

    def list_code(self) -> list[str]:
        """Return the names of files that Python and the system can load or run, and of their folders."""
        names = [name for name in self.names if not _TESTS.search(name)]
        code = {n for n in names if n.endswith(_CODE) or ".so." in n or n in self.programs}
        return sorted(code | {os.path.dirname(name) or "." for name in code})


def digest_lines(lines: Iterable[str]) -> str:
    """Return the first 12 hex digits of the sha256 over lines in sorted order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def lists_module(record: str, module: str) -> bool:
    """Return whether a RECORD lists a module's `__init__` file."""
    return f"\n{module}/__init__.py" in f"\n{read_text(record)}"


def read_files(folder: str, module: str, record: str, *, walk: bool) -> PackageFiles:
    """Return the current files of a package; `walk` also finds unlisted files in unchanged folders."""
    recorded = _read_record(record) if record else {}
    with _remembered_digests(f"{folder}/{module or record}") as digests:
        files = _PackageReader(folder, record, digests)
        files.add_recorded(recorded)
        if not recorded or walk:
            files.walk(module)
        else:
            files.walk_changed_folders()
    return PackageFiles(list(files.lines.values()), list(files.lines), files.programs)


def digest_libraries(folders: Iterable[tuple[str, str]]) -> list[str]:
    """Return a RECORD-like line for each library in (folder, name prefix) pairs; folders may be missing."""
    lines = []
    for folder, prefix in folders:
        with _remembered_digests(f"{folder}/{prefix}") as digests:
            reader = _PackageReader(folder, "", digests)
            for name in list_libraries(folder, prefix):
                reader.add(name, None)
        lines += [f"libraries/{line}" for line in reader.lines.values()]
    return lines


def list_libraries(folder: str, prefix: str) -> list[str]:
    """Return the names in a folder that begin with a prefix; none if the folder is missing."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if name.startswith(prefix))


class _PackageReader:
    """A reader of a package's files, which hashes files that may have changed."""

    def __init__(self, folder: str, record: str, digests: dict[str, Any]) -> None:
        self._folder = folder
        self._digests = digests
        status = os.stat(record) if record else None
        # Without a RECORD, every file counts as changed.
        self._modified_ns = status.st_mtime_ns if status else 0
        self._changed_ns = status.st_ctime_ns if status else 0
        self.lines: dict[str, str] = {}
        self.programs: set[str] = set()

    def add_recorded(self, recorded: Mapping[str, str]) -> None:
        """Add the files of a RECORD. The loop is optimized for tens of thousands of files."""
        stat, lines, prefix = os.stat, self.lines, f"{self._folder}/"
        modified_ns, changed_ns = self._modified_ns, self._changed_ns
        for name, line in recorded.items():
            try:
                status = stat(prefix + name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            _, digest, size = line.rsplit(",", 2)
            if (
                status.st_mtime_ns <= modified_ns
                and status.st_ctime_ns <= changed_ns
                and size == str(status.st_size)
                and digest
            ):
                lines[name] = line
                if status.st_mode & _EXECUTABLE:
                    self.programs.add(name)
            else:
                self.add(name, line)

    def add(self, name: str, recorded: str | None) -> None:
        """Add a file that may have changed, with its digest; ignore a missing file."""
        try:
            status = os.stat(f"{self._folder}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return
        algorithm = recorded.rsplit(",", 2)[1].partition("=")[0] if recorded else ""
        digest = self._digest(name, status, algorithm or _SHA256)
        self.lines[name] = f"{name},{digest},{status.st_size}"
        if status.st_mode & _EXECUTABLE:
            self.programs.add(name)

    def walk(self, module: str) -> None:
        for path, folders, names in os.walk(f"{self._folder}/{module}"):
            folders[:] = sorted(folder for folder in folders if _is_content(folder, folders))
            for name in sorted(name for name in names if _is_content(name, names)):
                relative = os.path.relpath(f"{path}/{name}", self._folder)
                if relative not in self.lines:
                    self.add(relative, None)

    def walk_changed_folders(self) -> None:
        """Add code that was put into the package's folders after its RECORD was written."""
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
        """Return the digest of a file in RECORD's format, from the cache if its timestamps are unchanged."""
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
        # A recent file is not cached, because a coarse clock could hide a second write.
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > RACY_NS:
            self._digests[name] = [stamp, text]
        return text


def _is_content(name: str, siblings: Iterable[str]) -> bool:
    """Return whether a file or folder is part of a package, not a cache or an editor's leftover."""
    if name == "__pycache__" or name.startswith(".") or name.endswith(("~", ".swp")):
        return False
    # Python imports bytecode only if its source is missing.
    return not name.endswith(".pyc") or name.removesuffix("c") not in siblings


def _read_record(path: str) -> dict[str, str]:
    """Return file name -> line of a RECORD, without metadata and caches."""
    with open(path, encoding="utf-8") as stream:
        lines = stream.read().splitlines()
    return {
        line.rsplit(",", 2)[0].strip('"'): line.strip()
        for line in lines
        if line.count(",") > 1
        and not (".dist-info/" in line or "__pycache__/" in line or line.startswith(("..", "/")))
    }


# ---------------------------------------------------------------- digests of earlier processes


@contextlib.contextmanager
def _remembered_digests(package: str) -> Iterator[dict[str, Any]]:
    """Yield the cached digests of a package's files, and save them if they changed."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.path.realpath(package).encode()).hexdigest()[:32]
    path = f"{base}/tvmflow/packages/{name}.json"
    before = _load(path)
    digests = dict(before)
    yield digests
    if digests != before:
        # Without a writable cache, the next process hashes the files again.
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


REQUIREMENTS = {
    "apache-tvm": "apache-tvm==0.27.0.post1",
    "apache-tvm-ffi": "apache-tvm-ffi>=0.1.14.post0,<0.1.15",
    "numpy": "numpy>=1.26,<2.5",
    "onnx": "onnx>=1.21,<2",
    "onnxruntime": "onnxruntime>=1.20,<2",
    "safetensors": "safetensors>=0.5",
    "xgboost-cpu": "xgboost-cpu>=3.0",
    "ziglang": "ziglang>=0.13,<0.18",
}
"""Distribution -> its requirement from pyproject.toml."""


def install_command(*distributions: str, again: bool = False) -> str:
    """Return the command that installs distributions in supported versions, or installs them `again`."""
    requirements = []
    for name in distributions:
        extras = (extra for prefix, extra in _EXTRAS.items() if name.startswith(prefix))
        requirements.append(next(extras, REQUIREMENTS.get(name, name)))
    names = " ".join(f"'{name}'" for name in dict.fromkeys(requirements))
    return f"pip install {'--force-reinstall ' if again else ''}{names}"
