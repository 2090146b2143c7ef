"""Delivered targets: their files, the stages behind them, and the state of their sources.

The state of sources is a function of recipe, pipeline and the commit of their repository: who builds the same
commit elsewhere gets the same values. An up-to-date run imports this module, which imports next to nothing.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import STATEMENT_SUFFIX, Artifact, Delivery, Plan, RecipeOrigin, StageSpec
from tvmflow.store.file_digests import stamp

BOM_SUFFIX = ".cdx.json"
MEASUREMENTS_SUFFIX = ".measurements" + STATEMENT_SUFFIX

README = "README.md"

MEASURED_FILES = ("measurements.json",)
"""Delivered files with figures that differ whenever they are measured; all other files are reproducible."""


class SidecarPaths(NamedTuple):
    """The paths of the sidecar files of a target: two statements, the bill of materials, and the README."""

    statement: str
    bom: str
    measurements: str
    readme: str


class DeliveredTarget(NamedTuple):
    """The delivered files of one recipe for one target, and every stage behind them.

    `files` are names in the folder with their sha256, `stages` are in the order of the plan,
    `artifacts` has their results by stage id, and `origin` says where the recipe is.
    """

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[StageSpec, ...]
    artifacts: Mapping[str, Artifact]
    origin: RecipeOrigin | None = None

    def sidecar_paths(self, dist: str) -> SidecarPaths:
        """Return the paths of the sidecar files."""
        folder = os.path.join(dist, self.recipe, self.target)
        base = os.path.join(folder, self.recipe)
        return SidecarPaths(
            base + STATEMENT_SUFFIX,
            base + BOM_SUFFIX,
            base + MEASUREMENTS_SUFFIX,
            os.path.join(folder, README),
        )

    @property
    def reproducible_files(self) -> tuple[tuple[str, str], ...]:
        """The files that every run with the same lock file gives."""
        return tuple(file for file in self.files if file[0] not in MEASURED_FILES)

    @property
    def measured_files(self) -> tuple[tuple[str, str], ...]:
        """The files with figures that differ whenever they are measured."""
        return tuple(file for file in self.files if file[0] in MEASURED_FILES)


def list_delivered_targets(plan: Plan, artifacts: Mapping[str, Artifact]) -> list[DeliveredTarget]:
    """Return the targets of every recipe whose deliveries are all present and, if required, verified."""
    groups: dict[tuple[str, str], list[Delivery]] = {}
    for delivery in plan.deliveries:
        groups.setdefault((delivery.recipe, delivery.target), []).append(delivery)
    positions = {spec.id: index for index, spec in enumerate(plan.stages)}
    origins = {origin.recipe: origin for origin in plan.origins}
    targets: list[DeliveredTarget] = []
    for (recipe, target), deliveries in groups.items():
        makers = {delivery.stage_id for delivery in deliveries}
        gates = {delivery.verified_by for delivery in deliveries if delivery.verified_by}
        if not makers | gates <= artifacts.keys():
            continue
        files: list[tuple[str, str]] = []
        for delivery in deliveries:
            digests = delivery.digests(artifacts)
            files += [(delivered, digests[stored]) for stored, delivered in delivery.files]
        if files:
            stages = _with_needs(makers | gates, plan.stages, positions)
            origin = origins.get(recipe)
            targets.append(
                DeliveredTarget(
                    recipe=recipe,
                    target=target,
                    files=tuple(sorted(files)),
                    stages=stages,
                    artifacts=artifacts,
                    origin=origin,
                )
            )
    return targets


def _with_needs(
    ids: set[str], stages: tuple[StageSpec, ...], positions: Mapping[str, int]
) -> tuple[StageSpec, ...]:
    """Return the stages with these ids and all that they need, directly or not, in the order of the plan."""
    needed: set[int] = set()
    pending = list(ids)
    # Scanning the whole plan for every target would take quadratic time.
    while pending:
        position = positions[pending.pop()]
        if position not in needed:
            needed.add(position)
            pending += [need.stage_id for need in stages[position].needs]
    return tuple(stages[position] for position in sorted(needed))


# ---------------------------------------------------------------- the state of the sources

BUILDER_VARIABLE: Final = "TVMFLOW_BUILDER_ID"
DEFAULT_BUILDER: Final = "urn:tvmflow:builder:v1"

CLEAN: Final = "yes"
CHANGED: Final = "no"
_NO_GIT: Final = "unknown: git is not installed"
_GIT_FAILED: Final = "unknown: git cannot read the repository"
_GIT_TIMEOUT_S: Final = 30.0
_MAX_LINKS: Final = 5


class SourceFile(NamedTuple):
    """A file that a user wrote: `recipe` or `pipeline`, its name in its repository, and its sha256."""

    kind: str
    name: str
    sha256: str


class SourceState(NamedTuple):
    """The sources of a planned recipe: files of recipe and pipeline, and the commit that is checked out.

    `clean` says whether the files are as in that commit: `yes`, `no`, or why that is unknown. The variant is
    empty for the recipe itself.
    """

    files: tuple[SourceFile, ...]
    commit: str
    clean: str
    locked: bool
    variant: str

    def invocation(self, target: str) -> list[str]:
        """Return the shortest command that requests the files of a target."""
        names = {file.kind: file.name for file in self.files}
        options = ["--pipeline", names["pipeline"], "--target", target]
        options += ["--variant", self.variant] if self.variant else []
        return ["tvmflow", "run", names["recipe"], *options, *(["--locked"] if self.locked else [])]


def read_source_state(origin: RecipeOrigin) -> SourceState | None:
    """Return the state of a recipe's sources; None when a file has disappeared since it was planned."""
    # A recipe with many targets asks for each of them, and git is a process.
    paths = [origin.path, origin.pipeline, *list_repository_files(origin)]
    return _read_source_state(origin, tuple(map(_stamp_or_none, paths)))


def _stamp_or_none(path: str) -> tuple[int, ...] | None:
    try:
        return tuple(stamp(path))
    except OSError:
        return None


@functools.lru_cache(maxsize=64)
def _read_source_state(origin: RecipeOrigin, stamps: tuple[object, ...]) -> SourceState | None:
    paths = [
        ("recipe", os.path.abspath(origin.path)),
        ("pipeline", os.path.abspath(origin.pipeline)),
    ]
    repository = _find_repository(os.path.dirname(paths[0][1]))
    root = repository.root if repository else ""
    try:
        files = tuple(
            SourceFile(kind, _name_in(root, path), hash_file(path)) for kind, path in paths
        )
    except OSError:
        return None
    commit = _read_commit(repository) if repository else ""
    inside = [path for _, path in paths if root and path.startswith(f"{root}/")]
    clean = _read_cleanliness(root, inside) if commit else ""
    return SourceState(
        files=files, commit=commit, clean=clean, locked=origin.locked, variant=origin.variant
    )


def list_repository_files(origin: RecipeOrigin) -> list[str]:
    """Return the files of git whose change may mean another commit, whether they exist or not."""
    repository = _find_repository(os.path.dirname(os.path.abspath(origin.path)))
    if repository is None:
        return []
    own, common = repository.folder, repository.common
    branch = _read_text(f"{own}/HEAD").removeprefix("ref: ")
    return [f"{own}/HEAD", f"{own}/index", f"{common}/packed-refs", f"{common}/{branch}"]


def read_builder_id() -> str:
    """Return the id of the builder: `$TVMFLOW_BUILDER_ID`, or that of any tvmflow.

    Raises:
        UsageError: when it is not a URI.
    """
    import urllib.parse

    value = os.environ.get(BUILDER_VARIABLE, "")
    try:
        parts = urllib.parse.urlsplit(value)
    except ValueError:
        parts = urllib.parse.urlsplit("")
    is_uri = bool(parts.scheme and (parts.netloc or parts.path)) and value.isprintable()
    if value and (not is_uri or " " in value or "@" in parts.netloc):
        raise UsageError(
            f"{BUILDER_VARIABLE} is not a URI: '{excerpt(value)}'",
            fix="name the builder with a URI without a password, such as https://example.org/builders/ci",
        )
    return value or DEFAULT_BUILDER


# ---------------------------------------------------------------- git


class _Repository(NamedTuple):
    root: str
    folder: str
    common: str


def _find_repository(folder: str) -> _Repository | None:
    root, parent = folder, os.path.dirname(folder)
    while True:
        own = f"{root}/.git"
        if os.path.isfile(own):
            # a further worktree, or a submodule
            own = os.path.join(root, _read_text(own).removeprefix("gitdir: "))
        if os.path.isfile(f"{own}/HEAD"):
            common = os.path.join(own, _read_text(f"{own}/commondir") or ".")
            return _Repository(root, os.path.normpath(own), os.path.normpath(common))
        if parent == root:
            return None
        root, parent = parent, os.path.dirname(parent)


def _read_text(path: str) -> str:
    """Return the content of a small file without its last line end; empty when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _read_commit(repository: _Repository) -> str:
    """Return the commit that is checked out, read without git; empty when there is none yet."""
    value = _read_text(f"{repository.folder}/HEAD")
    for _ in range(_MAX_LINKS):
        if not value.startswith("ref: "):
            return value if _is_commit(value) else ""
        name = value.removeprefix("ref: ")
        value = (
            _read_text(f"{repository.folder}/{name}")
            or _read_text(f"{repository.common}/{name}")
            or _find_packed(repository, name)
        )
    return ""


def _find_packed(repository: _Repository, name: str) -> str:
    for line in _read_text(f"{repository.common}/packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return ""


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and not set(text) - set("0123456789abcdef")


def _read_cleanliness(root: str, paths: Sequence[str]) -> str:
    """Return whether files are as in the commit; git knows, and neither writes nor asks here."""
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    command = ["git", "--no-optional-locks", "-C", root, "status", "--porcelain", "--ignored"]
    try:
        done = subprocess.run(
            [*command, "--untracked-files=all", "--", *paths],
            capture_output=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return _NO_GIT
    except (OSError, subprocess.TimeoutExpired):
        return _GIT_FAILED
    if done.returncode:
        return _GIT_FAILED
    return CHANGED if done.stdout.strip() else CLEAN


def _name_in(root: str, path: str) -> str:
    """Return the name of a file in its repository; outside of it, only the file's own name."""
    inside = root and path.startswith(f"{root}/")
    return path.removeprefix(f"{root}/") if inside else os.path.basename(path)
