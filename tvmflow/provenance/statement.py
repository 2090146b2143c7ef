"""The statement of provenance: in-toto's Statement v1 with SLSA's Provenance v1, from a trail, and read back.

Equal results give equal bytes: no times but those at which the ledger says that a trial was
measured, no paths, no names of machines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from tvmflow.keys import canonical
from tvmflow.provenance.documents import Unreadable, at, read_json, shown
from tvmflow.provenance.trail import Source, Step, Tool, Trail
from tvmflow.values import Json

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:tvmflow:build:v1"
"""What docs/provenance.md says the parameters and dependencies mean."""
RELEASE_TYPE: Final = "urn:tvmflow:release:v1"
"""Of a statement about a folder of such files, with what else is in it."""
BUILDER: Final = "urn:tvmflow:builder:v1"

RECORD_DIGEST: Final = "tvmflowRecord"
"""Not a digest of one file: the beginning of the sha256 over a package's list of files (see `tools`)."""

VERIFICATION: Final = "verification"
KERNELS: Final = "kernels"

_DEFINITION: Final = ("predicate", "buildDefinition")
_BYPRODUCTS: Final = ("predicate", "runDetails", "byproducts")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

# Where a device is reached says nothing about what was made, and is nobody else's business.
_PRIVATE: Final = "tracker"


# ---------------------------------------------------------------- made


def make(trail: Trail, subjects: Mapping[str, str]) -> bytes:
    """The statement about files (name -> sha256) in its one spelling. Raises Damaged."""
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_resource(name, subjects[name]) for name in sorted(subjects)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {
                        "recipe": trail.recipe,
                        "target": trail.target,
                        "settings": {step.label: _settings(step) for step in trail.steps},
                    },
                    "internalParameters": {
                        "stages": {step.label: _stage(step) for step in trail.steps}
                    },
                    "resolvedDependencies": list(_dependencies(trail)),
                },
                "runDetails": {
                    "builder": {"id": BUILDER},
                    "byproducts": list(_byproducts(trail)),
                },
            },
        }
    )


def make_release(
    name: str, version: str, subjects: Mapping[str, str], statements: Mapping[str, str]
) -> bytes:
    """The statement about a release: its files, and the sha256 of what the statements in it say, by name."""
    parameters = {"release": name, "version": version}
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_resource(each, subjects[each]) for each in sorted(subjects)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": {
                    "buildType": RELEASE_TYPE,
                    "externalParameters": parameters,
                    "resolvedDependencies": [
                        _resource(each, statements[each], annotations={"kind": "statement"})
                        for each in sorted(statements)
                    ],
                },
                "runDetails": {"builder": {"id": BUILDER}},
            },
        }
    )


def _settings(step: Step) -> Json:
    settings = step.preimage["settings"]
    remote = settings.get("remote")
    if isinstance(remote, dict) and _PRIVATE in remote:
        kept = {name: value for name, value in remote.items() if name != _PRIVATE}
        return {**settings, "remote": kept}
    return settings


def _stage(step: Step) -> Json:
    preimage = step.preimage
    return {
        "key": step.artifact.key,
        "version": preimage["version"],
        "machine": preimage["machine"],
        "tools": preimage["tools"],
    }


def _resource(name: str, sha256: str, **more: Json) -> dict[str, Json]:
    return {"name": name, "digest": {"sha256": sha256}, **more}


def _dependencies(trail: Trail) -> Iterator[Json]:
    """Files from outside, packages, and what one stage gave another."""
    yield from map(_source, trail.sources())
    yield from map(_tool, trail.tools())
    used = sorted({each for step in trail.steps for each in step.used()})
    for name, digest in used:
        yield _resource(name, digest, annotations={"kind": "result"})


def _source(source: Source) -> Json:
    uri = {"uri": source.url} if source.url else {}
    return _resource(source.role, source.sha256, annotations={"kind": "source"}, **uri)


def _tool(tool: Tool) -> Json:
    return {
        "name": tool.name,
        "uri": f"pkg:pypi/{tool.name}@{tool.version}",
        "digest": {RECORD_DIGEST: tool.record},
        "annotations": {"kind": "tool", "version": tool.version},
    }


def _byproducts(trail: Trail) -> Iterator[Json]:
    verdict, digest = trail.verdict()
    if verdict is not None:
        yield _resource(VERIFICATION, digest, annotations={"verdict": verdict})
    tuning = {
        step.spec.target: {name: step.artifact.facts[name] for name in _COVERAGE}
        for step in trail.of("pick_best")
        if step.artifact.facts.keys() >= set(_COVERAGE)
    }
    kernels = trail.kernels()
    if kernels:
        yield {"name": KERNELS, "annotations": {"kernels": kernels, "coverage": tuning}}


# How much of the time is spent in kernels with a schedule, and what tuning bought.
_COVERAGE: Final = ("tuned", "tunable", "coverage", "speedup")


# ---------------------------------------------------------------- read back


class Statement(NamedTuple):
    """A statement of ours that somebody gave us: `subjects` are names in its folder with their sha256.

    `names` has for each sha256 the first that it stands under. Of `body` no more is known than that it is JSON: whoever reads it takes what has the type it wants.
    """

    subjects: Mapping[str, str]
    names: Mapping[str, str]
    body: Mapping[str, Json]

    @property
    def about(self) -> str:
        """In words: a recipe for a target, or a release with its version."""
        parameters = at(self.body, *_DEFINITION, "externalParameters", of=dict)
        release, version = (at(parameters, word, of=str) for word in ("release", "version"))
        return f"{release} {version}" if release else f"{self.recipe} for {self.target}"

    @property
    def recipe(self) -> str:
        return str(at(self.body, *_DEFINITION, "externalParameters", "recipe", of=str))

    @property
    def target(self) -> str:
        return str(at(self.body, *_DEFINITION, "externalParameters", "target", of=str))

    @property
    def settings(self) -> Mapping[str, Json]:
        """By stage, as each was in the recipe for this target."""
        found: Mapping[str, Json] = at(
            self.body, *_DEFINITION, "externalParameters", "settings", of=dict
        )
        return found

    def dependencies(self, kind: str) -> list[Mapping[str, Json]]:
        """Those of one kind: `source`, `tool` or `result`."""
        every: Sequence[Json] = at(self.body, *_DEFINITION, "resolvedDependencies", of=list)
        return [each for each in every if at(each, "annotations", "kind", of=str) == kind]

    def byproduct(self, name: str) -> Mapping[str, Json]:
        """What is said under this name; empty when nothing is."""
        for each in at(self.body, *_BYPRODUCTS, of=list):
            if at(each, "name", of=str) == name:
                found: Mapping[str, Json] = at(each, "annotations", of=dict)
                return found
        return {}

    @property
    def verdict(self) -> Mapping[str, Json]:
        found: Mapping[str, Json] = at(self.byproduct(VERIFICATION), "verdict", of=dict)
        return found

    @property
    def kernels(self) -> list[Mapping[str, Json]]:
        every: Sequence[Json] = at(self.byproduct(KERNELS), "kernels", of=list)
        return [each for each in every if isinstance(each, dict)]


def read(text: bytes) -> Statement:
    """A statement as `make` wrote it. Raises Unreadable for anything else, saying what it is."""
    body = read_json(text)
    _require(body, (STATEMENT_TYPE,), "_type")
    _require(body, (PREDICATE_TYPE,), "predicateType")
    _require(body, (BUILD_TYPE, RELEASE_TYPE), *_DEFINITION, "buildType")
    subjects: dict[str, str] = {}
    for each in at(body, "subject", of=list):
        name, digest = at(each, "name", of=str), at(each, "digest", "sha256", of=str)
        if not _is_inside(name):
            raise Unreadable(f"it names a file that is not in its folder: {shown(name)}")
        if not _SHA256.fullmatch(digest):
            raise Unreadable(f"it gives no sha256 for {shown(name)}")
        if subjects.setdefault(name, digest) != digest:
            raise Unreadable(f"it gives two digests for {shown(name)}")
    if not subjects:
        raise Unreadable("it is about no file")
    # the last one to be put in stays
    names = {digest: name for name, digest in reversed(subjects.items())}
    return Statement(subjects, names, body)


def _require(body: Json, wanted: tuple[str, ...], *path: str) -> None:
    found: Any = at(body, *path, of=str)
    if found not in wanted:
        raise Unreadable(f"its {path[-1]} is {shown(found)} and not {' or '.join(wanted)}")


def _is_inside(name: str) -> bool:
    """Whether it is a plain relative name: what the file system makes of it is what it says."""
    path = PurePosixPath(name)
    return (
        bool(name)
        and name.isprintable()
        and "\\" not in name
        and str(path) == name
        and not path.is_absolute()
        and not {".", ".."} & set(path.parts)
    )
