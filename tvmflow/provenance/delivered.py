"""Delivered targets: their files, stages, sidecar files and sources.

Sidecar files are statements of provenance and measurements, a bill of materials, and a README. They describe finished
results and may be signed, so they are not in the store; a note in the store has their timestamps, which show that they
are up to date. Imports almost nothing, for fast up-to-date runs.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import excerpt
from tvmflow.core.processes import read_text
from tvmflow.core.types import (
    STATEMENT_SUFFIX,
    Artifact,
    Delivery,
    Json,
    Plan,
    RecipeOrigin,
    StageSpec,
)
from tvmflow.store.file_digests import note_name, stamp
from tvmflow.store.local import LocalStore

BOM_SUFFIX = ".cdx.json"
MEASUREMENTS_SUFFIX = ".measurements" + STATEMENT_SUFFIX

README = "README.md"

MEASURED_FILES = ("measurements.json",)
"""Delivered files with measurements; all other files are reproducible."""

# Version of the sidecar files: raise it if the same results are described differently.
_VERSION: Final = 3
# A copy from core.signing, whose import takes much longer than an up-to-date run.
_KEY_VARIABLE: Final = "TVMFLOW_SIGNING_KEY"


class SidecarPaths(NamedTuple):
    """The paths of the sidecar files of a target: two statements, the bill of materials, and the README."""

    statement: str
    bom: str
    measurements: str
    readme: str


class DeliveredTarget(NamedTuple):
    """The delivered files (name, sha256) of a recipe for a target, and the stages that made them."""

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[StageSpec, ...]
    artifacts: Mapping[str, Artifact]
    origin: RecipeOrigin | None = None

    def sidecar_paths(self, dist: str) -> SidecarPaths:
        """Return the paths of the sidecar files."""
        folder = os.path.join(dist, self.recipe, self.target)
        suffixes = (STATEMENT_SUFFIX, BOM_SUFFIX, MEASUREMENTS_SUFFIX)
        names = (*(f"{self.recipe}{suffix}" for suffix in suffixes), README)
        return SidecarPaths(*(os.path.join(folder, name) for name in names))

    @property
    def reproducible_files(self) -> tuple[tuple[str, str], ...]:
        """The files that every run with the same lock file reproduces."""
        return tuple(file for file in self.files if file[0] not in MEASURED_FILES)

    @property
    def measured_files(self) -> tuple[tuple[str, str], ...]:
        """The files with measurements, which differ between runs."""
        return tuple(file for file in self.files if file[0] in MEASURED_FILES)


def list_delivered_targets(plan: Plan, artifacts: Mapping[str, Artifact]) -> list[DeliveredTarget]:
    """Return the targets whose deliveries are all available and, if required, verified."""
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
            delivered = DeliveredTarget(
                recipe=recipe,
                target=target,
                files=tuple(sorted(files)),
                stages=_with_needs(makers | gates, plan.stages, positions),
                artifacts=artifacts,
                origin=origins.get(recipe),
            )
            targets.append(delivered)
    return targets


def _with_needs(
    ids: set[str], stages: tuple[StageSpec, ...], positions: Mapping[str, int]
) -> tuple[StageSpec, ...]:
    """Return the stages with ids in `ids` and their transitive inputs, in the plan's order."""
    needed: set[int] = set()
    pending = list(ids)
    # A scan of the whole plan for every target would take quadratic time.
    while pending:
        position = positions[pending.pop()]
        if position not in needed:
            needed.add(position)
            pending += [need.stage_id for need in stages[position].needs]
    return tuple(stages[position] for position in sorted(needed))


# ---------------------------------------------------------------- sidecar files


def find_sidecars(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str] | None:
    """Return the paths of all sidecar files in `dist`, or None if any must be written."""
    targets = list(list_sidecars(plan, artifacts, store, dist))
    if not all(is_current for _, is_current in targets):
        return None
    return [path for delivered, _ in targets for path in delivered.sidecar_paths(dist)]


def list_sidecars_to_write(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Return the paths of the sidecar files that must be written."""
    targets = list_sidecars(plan, artifacts, store, dist)
    old = (delivered for delivered, is_current in targets if not is_current)
    return [path for delivered in old for path in delivered.sidecar_paths(dist)]


def list_sidecars(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> Iterator[tuple[DeliveredTarget, bool]]:
    """Yield each target, and whether its sidecar files are up to date."""
    for delivered in list_delivered_targets(plan, artifacts):
        yield delivered, _is_current(store, delivered, delivered.sidecar_paths(dist))


def _is_current(store: LocalStore, delivered: DeliveredTarget, paths: SidecarPaths) -> bool:
    note = read_note(store, paths)
    try:
        if note.get("of") != _fingerprint(delivered):
            return False
        if note.get("stamps") != [stamp(path) for path in paths]:
            return False
        # A run without a key keeps existing signatures.
        return not os.environ.get(_KEY_VARIABLE) or note.get("key") == _key_stamp()
    except OSError:
        return False


def recipe_path(delivered: DeliveredTarget) -> str:
    """Return the absolute path of a target's recipe, or an empty string."""
    return os.path.abspath(delivered.origin.path) if delivered.origin else ""


def write_note(store: LocalStore, delivered: DeliveredTarget, paths: SidecarPaths) -> None:
    """Record in the store that the sidecar files of a target are up to date."""
    note = {
        "of": _fingerprint(delivered),
        "stamps": [stamp(path) for path in paths],
        "key": _key_stamp(),
        "recipe": recipe_path(delivered),
    }
    store.notes.write(json.dumps(note), "delivered", note_name(paths[0]))


def read_note(store: LocalStore, paths: SidecarPaths) -> dict[str, Json]:
    """Return the note of `write_note`, or an empty one."""
    try:
        value = json.loads(store.notes.read("delivered", note_name(paths[0])) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _key_stamp() -> Json:
    path = os.environ.get(_KEY_VARIABLE)
    return [os.path.abspath(path), stamp(path)] if path else None


def _fingerprint(delivered: DeliveredTarget) -> str:
    """Return a digest of everything that the sidecar files depend on."""
    stages = [
        [
            spec.label,
            delivered.artifacts[spec.id].key,
            [file.digest for file in delivered.artifacts[spec.id].files],
            [file.url for file in spec.files],
        ]
        for spec in delivered.stages
    ]
    sources = read_source_state(delivered.origin) if delivered.origin else None
    of = [_VERSION, delivered.recipe, delivered.target, delivered.files, stages]
    return digest_of([*of, sources, read_builder_id()])


# ---------------------------------------------------------------- the state of the sources
# The state depends only on recipe, pipeline and their commit, so it is the same on every machine.

BUILDER_VARIABLE: Final = "TVMFLOW_BUILDER_ID"
DEFAULT_BUILDER: Final = "urn:tvmflow:builder:v1"

CLEAN: Final = "yes"
CHANGED: Final = "no"
_NO_GIT: Final = "unknown: git is not installed"
_GIT_FAILED: Final = "unknown: git cannot read the repository"
_GIT_TIMEOUT_S: Final = 30.0
_MAX_LINKS: Final = 5


class SourceFile(NamedTuple):
    """A source file: its kind (`recipe` or `pipeline`), its name in its repository, and its sha256."""

    kind: str
    name: str
    sha256: str


class SourceState(NamedTuple):
    """The sources of a planned recipe: files of recipe and pipeline, and the checked-out commit.

    `clean`: whether the files are unchanged since the commit (`yes`, `no`, or why that is unknown). `variant` is empty
    for the recipe itself.
    """

    files: tuple[SourceFile, ...]
    commit: str
    clean: str
    locked: bool
    variant: str

    def invocation(self, target: str) -> list[str]:
        """Return the shortest command that builds the files of a target."""
        names = {file.kind: file.name for file in self.files}
        options = ["--pipeline", names["pipeline"], "--target", target]
        options += ["--variant", self.variant] if self.variant else []
        return ["tvmflow", "run", names["recipe"], *options, *(["--locked"] if self.locked else [])]


def read_source_state(origin: RecipeOrigin) -> SourceState | None:
    """Return the state of a recipe's sources, or None if a file disappeared after planning."""
    # Cached, because every target of a recipe asks, and each answer starts git.
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
    """Return the files of git that change with the commit; some may be missing."""
    repository = _find_repository(os.path.dirname(os.path.abspath(origin.path)))
    if repository is None:
        return []
    own, common = repository.folder, repository.common
    branch = read_text(f"{own}/HEAD").strip().removeprefix("ref: ")
    return [f"{own}/HEAD", f"{own}/index", f"{common}/packed-refs", f"{common}/{branch}"]


def read_builder_id() -> str:
    """Return the id of the builder: `$TVMFLOW_BUILDER_ID` or a default; UsageError if it is not a URI."""
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
            # In an additional worktree or a submodule, `.git` is a file with the path.
            own = os.path.join(root, read_text(own).strip().removeprefix("gitdir: "))
        if os.path.isfile(f"{own}/HEAD"):
            common = os.path.join(own, read_text(f"{own}/commondir").strip() or ".")
            return _Repository(root, os.path.normpath(own), os.path.normpath(common))
        if parent == root:
            return None
        root, parent = parent, os.path.dirname(parent)


def _read_commit(repository: _Repository) -> str:
    """Return the checked-out commit, read without git; empty if there is none."""
    value = read_text(f"{repository.folder}/HEAD").strip()
    for _ in range(_MAX_LINKS):
        if not value.startswith("ref: "):
            is_commit = len(value) in (40, 64) and not set(value) - set("0123456789abcdef")
            return value if is_commit else ""
        name = value.removeprefix("ref: ")
        packed = read_text(f"{repository.common}/packed-refs").splitlines()
        commits = {ref: commit for commit, _, ref in (line.partition(" ") for line in packed)}
        value = (
            read_text(f"{repository.folder}/{name}").strip()
            or read_text(f"{repository.common}/{name}").strip()
            or commits.get(name, "")
        )
    return ""


def _read_cleanliness(root: str, paths: Sequence[str]) -> str:
    """Return whether files are unchanged since the commit; git neither writes nor prompts."""
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
    """Return the path of a file inside its repository; for other files, only the name."""
    inside = root and path.startswith(f"{root}/")
    return path.removeprefix(f"{root}/") if inside else os.path.basename(path)
