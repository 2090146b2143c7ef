"""Statements of provenance: in-toto's Statement v1 with SLSA's Provenance v1, made and read.

Equal results give equal bytes: there are no paths and no names of machines, and the only times are
those at which the ledger says that a trial was measured, in the statement about measurements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Json
from tvmflow.provenance.delivered import STATEMENT_SUFFIX
from tvmflow.provenance.documents import Unreadable, get_field, quote, read_json
from tvmflow.provenance.kernels import list_kernels
from tvmflow.provenance.lineage import FinishedStage, Lineage
from tvmflow.stages import verify

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:tvmflow:build:v1"
"""The meaning of parameters and dependencies, as docs/provenance.md describes it."""
RELEASE_TYPE: Final = "urn:tvmflow:release:v1"
"""The same for a statement about the folder of a release."""
MEASUREMENTS_TYPE: Final = "urn:tvmflow:measurements:v1"
"""The same for a statement about what was measured of a target's files, or of a release."""
BUILDER: Final = "urn:tvmflow:builder:v1"

RECORD_DIGEST: Final = "tvmflowRecord"
"""The algorithm of a tool's digest: the beginning of the sha256 over a package's list of files."""

VERIFICATION: Final = "verification"
KERNELS: Final = "kernels"

_DEFINITION: Final = ("predicate", "buildDefinition")
_BYPRODUCTS: Final = ("predicate", "runDetails", "byproducts")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# Facts of pick_best: the share of time in kernels with a schedule, and what tuning gained.
_COVERAGE_FACTS: Final = ("tuned", "tunable", "coverage", "speedup")
# The address of a device has no effect on the result, and is not for the public.
_PRIVATE_SETTING: Final = "tracker"


# ---------------------------------------------------------------- making


def make_statement(lineage: Lineage, subjects: Mapping[str, str]) -> bytes:
    """Return the statement about delivered files as canonical JSON.

    A locked run gives the same bytes: what is measured, and how schedules were found, is in the
    statement of `make_measurement_statement`.

    Args:
        lineage: What is behind them.
        subjects: Their sha256 by name.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
    """
    stages = lineage.repeatable
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            **_target_parameters(lineage),
            "settings": {stage.label: _public_settings(stage.locked_settings) for stage in stages},
        },
        "internalParameters": {"stages": {stage.label: _stage_json(stage) for stage in stages}},
        "resolvedDependencies": list(_dependencies(lineage)),
    }
    byproducts = []
    verdict, digest = lineage.verdict()
    if verdict is not None:
        byproducts.append(_resource(VERIFICATION, digest, annotations={"verdict": verdict}))
    kernels = [_without_measurements(kernel) for kernel in list_kernels(lineage)]
    if kernels:
        byproducts.append({"name": KERNELS, "annotations": {"kernels": kernels}})
    return _statement(subjects, definition, {"builder": {"id": BUILDER}, "byproducts": byproducts})


def make_measurement_statement(
    lineage: Lineage, subjects: Mapping[str, str], statement: bytes
) -> bytes:
    """Return the statement about what was measured of delivered files as canonical JSON.

    Args:
        lineage: What is behind them.
        subjects: The sha256 of the measured files by name.
        statement: The text of the statement of `make_statement`.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
    """
    stages = [stage for stage in lineage.stages if not stage.spec.traits.is_locked]
    stages += [stage for stage in lineage.stages if stage.spec.traits.searches]
    name = f"{lineage.recipe}{STATEMENT_SUFFIX}"
    definition = {
        "buildType": MEASUREMENTS_TYPE,
        "externalParameters": {
            **_target_parameters(lineage),
            "settings": {stage.label: _public_settings(stage.settings) for stage in stages},
        },
        "internalParameters": {"stages": {stage.label: _stage_json(stage) for stage in stages}},
        "resolvedDependencies": [_statement_resource(name, hashlib.sha256(statement).hexdigest())],
    }
    byproducts = []
    verdict, digest = lineage.verdict(verify.MEASUREMENTS)
    if verdict is not None:
        byproducts.append(_resource(VERIFICATION, digest, annotations={"verdict": verdict}))
    kernels = list_kernels(lineage)
    if kernels:
        annotations = {"kernels": kernels, "coverage": _coverage(lineage)}
        byproducts.append({"name": KERNELS, "annotations": annotations})
    return _statement(subjects, definition, {"builder": {"id": BUILDER}, "byproducts": byproducts})


def make_release_statement(
    name: str,
    version: str,
    subjects: Mapping[str, str],
    statements: Mapping[str, str],
    *,
    measured: Sequence[str] = (),
    build_type: str = RELEASE_TYPE,
) -> bytes:
    """Return a statement about the folder of a release as canonical JSON.

    Args:
        name: The pipeline.
        version: The version of the release.
        subjects: The sha256 of its files by name.
        statements: The sha256 of the texts of other statements in it, by name.
        measured: The names of the measured files, which another statement covers.
        build_type: `MEASUREMENTS_TYPE` for the statement about what was measured.
    """
    parameters: dict[str, Json] = {"release": name, "version": version}
    if measured:
        parameters["measured"] = list(measured)
    definition = {
        "buildType": build_type,
        "externalParameters": parameters,
        "resolvedDependencies": [
            _statement_resource(path, statements[path]) for path in sorted(statements)
        ],
    }
    return _statement(subjects, definition, {"builder": {"id": BUILDER}})


def _statement(subjects: Mapping[str, str], definition: Json, details: Json) -> bytes:
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_resource(name, subjects[name]) for name in sorted(subjects)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"buildDefinition": definition, "runDetails": details},
        }
    )


def _target_parameters(lineage: Lineage) -> dict[str, Json]:
    return {"recipe": lineage.recipe, "target": lineage.target}


def _public_settings(settings: Mapping[str, Json]) -> Json:
    remote = settings.get("remote")
    if isinstance(remote, dict) and _PRIVATE_SETTING in remote:
        public = {name: value for name, value in remote.items() if name != _PRIVATE_SETTING}
        return {**settings, "remote": public}
    return settings


def _stage_json(stage: FinishedStage) -> Json:
    """Return key, version, machine and tools of a stage; without the key where that depends on this machine."""
    key = {"key": stage.artifact.key} if stage.spec.traits.is_locked else {}
    return {**key, **{name: stage.preimage[name] for name in ("version", "machine", "tools")}}


def _resource(name: str, sha256: str, **fields: Json) -> dict[str, Json]:
    return {"name": name, "digest": {"sha256": sha256}, **fields}


def _statement_resource(name: str, sha256: str) -> dict[str, Json]:
    return _resource(name, sha256, annotations={"kind": "statement"})


def _dependencies(lineage: Lineage) -> Iterator[Json]:
    """Yield files from outside, packages, and results that one stage read of another."""
    for source in lineage.sources():
        uri = {"uri": source.url} if source.url else {}
        yield _resource(source.role, source.sha256, annotations={"kind": "source"}, **uri)
    for tool in lineage.tools():
        yield {
            "name": tool.name,
            "uri": tool.purl,
            "digest": {RECORD_DIGEST: tool.record},
            "annotations": {"kind": "tool", "version": tool.version},
        }
    results = sorted({result for stage in lineage.repeatable for result in stage.used_results()})
    for name, digest in results:
        yield _resource(name, digest, annotations={"kind": "result"})


def _without_measurements(kernel: Mapping[str, Json]) -> dict[str, Json]:
    """Return a kernel with nothing of its trial but the id, which the trace gives."""
    if "record" not in kernel:
        return dict(kernel)
    return {**kernel, "record": {"trial": kernel["record"]["trial"]}}


def _coverage(lineage: Lineage) -> Json:
    return {
        stage.spec.target: {name: stage.artifact.facts[name] for name in _COVERAGE_FACTS}
        for stage in lineage.find_stages("pick_best")
        if stage.artifact.facts.keys() >= set(_COVERAGE_FACTS)
    }


# ---------------------------------------------------------------- reading


class Statement(NamedTuple):
    """A statement that was read from a file.

    Attributes:
        subjects: The sha256 of each file that it is about, by name in its folder.
        names: The first name of each sha256.
        body: The whole statement, of which nothing else was checked.
    """

    subjects: Mapping[str, str]
    names: Mapping[str, str]
    body: Mapping[str, Json]

    @property
    def about(self) -> str:
        """A recipe for a target, or a release with its version, for people."""
        release, version = self._parameter("release"), self._parameter("version")
        return f"{release} {version}" if release else f"{self.recipe} for {self.target}"

    @property
    def recipe(self) -> str:
        """The recipe; empty for a release."""
        return self._parameter("recipe")

    @property
    def target(self) -> str:
        """The target; empty for a release."""
        return self._parameter("target")

    @property
    def settings(self) -> Mapping[str, Json]:
        """The settings of each stage."""
        return get_field(self.body, *_DEFINITION, "externalParameters", "settings", of=dict)

    @property
    def text_digest(self) -> str:
        """The sha256 (hex) of its text, if tvmflow made it."""
        return hashlib.sha256(canonical(self.body)).hexdigest()

    @property
    def is_of_measurements(self) -> bool:
        """True if it says what was measured of its subjects, and not what they were made from."""
        return get_field(self.body, *_DEFINITION, "buildType", of=str) == MEASUREMENTS_TYPE

    @property
    def measured_files(self) -> list[str]:
        """The files of a release that the statement about measurements names."""
        names = get_field(self.body, *_DEFINITION, "externalParameters", "measured", of=list)
        return [name for name in names if isinstance(name, str)]

    def _parameter(self, name: str) -> str:
        return get_field(self.body, *_DEFINITION, "externalParameters", name, of=str)

    def dependencies(self, kind: str) -> list[Mapping[str, Json]]:
        """Return the dependencies of a kind: `source`, `tool`, `result` or `statement`."""
        entries = get_field(self.body, *_DEFINITION, "resolvedDependencies", of=list)
        return [
            entry for entry in entries if get_field(entry, "annotations", "kind", of=str) == kind
        ]

    def byproduct(self, name: str) -> Mapping[str, Json]:
        """Return the annotations of a by-product; empty when it is not there."""
        for entry in get_field(self.body, *_BYPRODUCTS, of=list):
            if get_field(entry, "name", of=str) == name:
                return get_field(entry, "annotations", of=dict)
        return {}

    @property
    def verdict(self) -> Mapping[str, Json]:
        """The verdict of `verify`; empty when it did not run."""
        return get_field(self.byproduct(VERIFICATION), "verdict", of=dict)

    @property
    def kernels(self) -> list[Mapping[str, Json]]:
        """The kernels, as `list_kernels` returns them."""
        entries = get_field(self.byproduct(KERNELS), "kernels", of=list)
        return [entry for entry in entries if isinstance(entry, dict)]


def parse_statement(text: bytes) -> Statement:
    """Return the statement in a text that `make_statement` or `make_release_statement` made.

    Raises:
        Unreadable: It is anything else; the message says what.
    """
    body = read_json(text)
    _require(body, (STATEMENT_TYPE,), "_type")
    _require(body, (PREDICATE_TYPE,), "predicateType")
    _require(body, (BUILD_TYPE, RELEASE_TYPE, MEASUREMENTS_TYPE), *_DEFINITION, "buildType")
    subjects: dict[str, str] = {}
    for entry in get_field(body, "subject", of=list):
        name = get_field(entry, "name", of=str)
        digest = get_field(entry, "digest", "sha256", of=str)
        if not _is_inside(name):
            raise Unreadable(f"it names a file that is not in its folder: {quote(name)}")
        if not _SHA256.fullmatch(digest):
            raise Unreadable(f"it gives no sha256 for {quote(name)}")
        if subjects.setdefault(name, digest) != digest:
            raise Unreadable(f"it gives two digests for {quote(name)}")
    if not subjects:
        raise Unreadable("it is about no file")
    # Of two names with one digest the last one inserted stays.
    names = {digest: name for name, digest in reversed(subjects.items())}
    return Statement(subjects, names, body)


def _require(body: Json, expected: tuple[str, ...], *path: str) -> None:
    actual = get_field(body, *path, of=str)
    if actual not in expected:
        raise Unreadable(f"its {path[-1]} is {quote(actual)} and not {' or '.join(expected)}")


def _is_inside(name: str) -> bool:
    """Return whether a name is a plain relative path that the file system reads as it is written."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name
    is_normal = bool(name) and str(path) == name and not path.is_absolute()
    return is_plain and is_normal and not {".", ".."} & set(path.parts)
