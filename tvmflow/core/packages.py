"""The identity of the packages that a result depends on: of what would be imported, found without importing it.

A version is not enough: a rebuilt wheel can have the same one, a file of an installed package can be
edited, and another folder on PYTHONPATH comes first. An identity is the version and a digest over
the content of the package's files, wherever they are: the same files have the same identity on
every machine.
"""

import functools
import os
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Final, NamedTuple

from tvmflow.core import package_files
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.requirements import install_command

# Packages whose module has another name than the distribution.
_MODULES: Final = {"apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi", "pillow": "PIL"}
# Distributions that share one namespace package, which says nothing of them.
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
# In a source folder, shared libraries are beside the Python code and not in it.
_SOURCE_LIBRARIES: Final = ("../../build/lib", "../../lib")
_SUFFIX: Final = ".dist-info"
_VERSION: Final = re.compile(
    r"^(?:__version__|version)\s*(?::[^=\n]+)?=\s*(?:\w+\s*=\s*)*[\"']([^\"']+)", re.M
)
_VERSION_FILES: Final = ("_version.py", "version.py", "__init__.py")
UNVERSIONED: Final = "unversioned"


class NotInstalled(EnvironmentProblem):
    """A package is not installed in this environment."""


class UnknownIdentity(EnvironmentProblem):
    """A package would be imported, and cannot be told from others."""


class Package(NamedTuple):
    """A package as it would be imported.

    Attributes:
        distribution: The distribution that installed it, or the one that was looked for.
        version: Its version; `unversioned` for a folder that says none.
        folder: The folder that has it: its files are named relative to this.
        module: The name of its own folder in there; empty where several distributions share one.
        record: The list of its installed files; empty for a source folder or a copy without metadata.
        rivals: Other distributions that installed files of the same module.
    """

    distribution: str
    version: str
    folder: str
    module: str
    record: str
    rivals: tuple[str, ...] = ()


class _Identified(NamedTuple):
    identity: str
    package: Package
    files: package_files.PackageFiles


def identity(distribution: str) -> str:
    """Return `VERSION+DIGEST` of a package.

    It is determined once in a process, which imports no other one later; see `forget`.

    Raises:
        NotInstalled: when it would not be found.
        UnknownIdentity: when what would be imported cannot be identified.
    """
    return _identify(distribution, tuple(sys.path)).identity


def identify_installed(distributions: Iterable[str]) -> dict[str, str]:
    """Return the identity of each of these packages that is there and can be identified."""
    identities = {}
    for name in distributions:
        try:
            identities[name] = identity(name)
        except EnvironmentProblem:
            continue
    return identities


def find_package(distribution: str) -> Package:
    """Return a package as it would be imported. Raises what `identity` does."""
    return _identify(distribution, tuple(sys.path)).package


def files_to_watch(distribution: str) -> dict[str, list[str]]:
    """Return folders, and the names of what is in them whose stamps tell that a package is as it was.

    These are its code and the folders with code; data and tests that it brings are not watched.
    """
    identified = _identify(distribution, tuple(sys.path))
    folder, record = identified.package.folder, identified.package.record
    watched = {
        folder: [*identified.files.code, *([os.path.relpath(record, folder)] if record else [])]
    }
    for libraries, prefix in _library_folders(distribution, identified.package):
        names = package_files.list_libraries(libraries, prefix)
        watched[libraries] = [".", *names] if os.path.isdir(libraries) else []
    return {folder: names for folder, names in watched.items() if names}


def import_folders() -> list[str]:
    """Return the folders from which this process imports: a new package in one may come before another."""
    return [os.path.abspath(entry) for entry in sys.path]


def forget() -> None:
    """Determine all identities anew when they are next asked for: for processes that live long."""
    _identify.cache_clear()


def host_platform() -> str:
    """Return the system and architecture of this host: stages give other object code on another one."""
    # Windows has no uname.
    name = os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]
    return f"{sys.platform}-{name}"


@functools.cache
def _identify(distribution: str, path: tuple[str, ...]) -> _Identified:
    package = _find(distribution)
    try:
        files = package_files.read_files(
            package.folder, package.module, package.record, walk=bool(package.rivals)
        )
        libraries = package_files.digest_libraries(_library_folders(distribution, package))
    except OSError as error:
        raise UnknownIdentity(
            f"{distribution} cannot be identified: {error.filename}: {error.strerror}",
            fix=f"make it readable, or install it again: {install_command(distribution, again=True)}",
        ) from error
    digest = package_files.digest_lines([*files.lines, *libraries])
    return _Identified(f"{package.version}+{digest}", package, files)


# ---------------------------------------------------------------- where it is


def _find(distribution: str) -> Package:
    if distribution.startswith(_NAMESPACE_PREFIX):
        return _find_distribution(distribution)
    module = _MODULES.get(distribution, distribution.replace("-", "_"))
    folder = os.path.dirname(_package_folder(distribution, module))
    owners = _find_owners(folder, distribution, module)
    if owners:
        [(name, version, record), *others] = owners
        rivals = tuple(other for other, _, _ in others)
        return Package(name, version, folder, module, record, rivals)
    version = _editable_version(distribution, folder) or _read_version(f"{folder}/{module}")
    return Package(distribution, version, folder, module, "")


def _package_folder(distribution: str, module: str) -> str:
    """Return the folder that `import MODULE` would read."""
    spec = _find_spec(module)
    if spec is None:
        raise NotInstalled(f"{distribution} is not installed", fix=_install(distribution))
    if spec.origin is None or spec.origin == "namespace":
        [folder, *_] = spec.submodule_search_locations or [module]
        raise NotInstalled(
            f"{distribution} is not installed: {folder} is only a folder of the same name",
            fix=_install(distribution),
        )
    if not os.path.isfile(spec.origin):
        raise UnknownIdentity(
            f"{distribution} would be imported from an archive: {spec.origin}",
            fix="install it unpacked, with pip, and take the archive out of PYTHONPATH",
        )
    if not spec.submodule_search_locations:
        raise UnknownIdentity(
            f"{spec.origin} would be imported in place of the package {distribution}",
            fix="rename that file, or take its folder out of PYTHONPATH",
        )
    return os.path.dirname(os.path.abspath(spec.origin))


def _find_spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


def is_extra(distribution: str) -> bool:
    """Return whether tvmflow is installed without a distribution, unless one of its extras is requested."""
    return any(distribution.startswith(prefix) for prefix in _EXTRAS)


def _install(distribution: str) -> str:
    extras = (extra for prefix, extra in _EXTRAS.items() if distribution.startswith(prefix))
    return install_command(next(extras, distribution))


def _find_distribution(distribution: str) -> Package:
    """Return a distribution by its metadata: what it installs has no module of its own."""
    for folder in import_folders():
        for name, version, path in _list_dist_infos(folder):
            if name == distribution and os.path.isfile(f"{path}/RECORD"):
                return Package(name, version, folder, "", f"{path}/RECORD")
    raise NotInstalled(f"{distribution} is not installed", fix=_install(distribution))


# ---------------------------------------------------------------- whose it is


def _find_owners(folder: str, distribution: str, module: str) -> list[tuple[str, str, str]]:
    """Return name, version and RECORD of each distribution that installed the module, the right one first.

    Of two that are left from an interrupted installation, the later one counts.
    """
    entries = [(*entry, f"{entry[2]}/RECORD") for entry in _list_dist_infos(folder)]
    related = [entry for entry in entries if distribution in entry[0] or module in entry[0]]
    for candidates in (related, entries):
        owners = [
            (name != distribution, -os.stat(record).st_mtime_ns, name, version, record)
            for name, version, _, record in candidates
            if package_files.lists_module(record, module)
        ]
        if owners:
            return [(name, version, record) for _, _, name, version, record in sorted(owners)]
    return []


def _list_dist_infos(folder: str) -> list[tuple[str, str, str]]:
    """Return normalized name, version and path of every `.dist-info` folder."""
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
    """Return the version of an editable installation of a source folder; an empty string where there is none."""
    for folder in import_folders():
        for name, version, path in _list_dist_infos(folder):
            if name == distribution and _is_editable(f"{path}/direct_url.json", source):
                return version
    return ""


def _is_editable(path: str, source: str) -> bool:
    """Return whether pip's note of an installation names a folder that has `source`."""
    import json
    import urllib.parse

    try:
        with open(path, encoding="utf-8") as stream:
            note = json.load(stream)
        root = urllib.parse.unquote(urllib.parse.urlsplit(note["url"]).path)
        return bool(note["dir_info"]["editable"]) and f"{source}/".startswith(f"{root}/")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_version(folder: str) -> str:
    """Return the version that a package's source names."""
    for name in _VERSION_FILES:
        try:
            with open(f"{folder}/{name}", encoding="utf-8", errors="replace") as stream:
                match = _VERSION.search(stream.read())
        except OSError:
            continue
        if match:
            return match[1]
    return UNVERSIONED


def _library_folders(distribution: str, package: Package) -> list[tuple[str, str]]:
    """Return the folders outside of TVM's packages from which they load shared libraries, each with a prefix of names."""
    if distribution not in _MODULES:
        return []
    named = os.environ.get(TVM_LIBRARY_VARIABLE) if distribution == "apache-tvm" else None
    own = f"{package.folder}/{package.module}"
    source_folders = (
        [] if os.path.isdir(f"{own}/lib") else [f"{own}/{name}" for name in _SOURCE_LIBRARIES]
    )
    return [(folder, f"lib{package.module}") for folder in (named, *source_folders) if folder]
