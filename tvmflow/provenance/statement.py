"""Statements of provenance: in-toto's Statement v1 with SLSA's Provenance v1, as they are made.

Equal results give equal bytes: the only times are those at which the ledger says that a trial
was measured, and there are no paths and no names of machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Json
from tvmflow.core.version import VERSION
from tvmflow.provenance.kernels import list_kernels
from tvmflow.provenance.lineage import FinishedStage, Lineage
from tvmflow.provenance.source_state import SourceState, read_builder_id
from tvmflow.provenance.tools import wheel_digest
from tvmflow.runtime.statements import (
    BUILD_TYPE,
    KERNELS,
    PREDICATE_TYPE,
    RELEASE_TYPE,
    STATEMENT_TYPE,
    VERIFICATION,
)

RECORD_DIGEST: Final = "tvmflowRecord"
"""The algorithm of a tool's digest: the beginning of the sha256 over the names and digests of its files."""

# Facts of pick_best: the share of time in kernels with a schedule, and what tuning gained.
_COVERAGE_FACTS: Final = ("tuned", "tunable", "coverage", "speedup")
# The address of a device has no effect on the result, and is not for the public.
_PRIVATE_SETTING: Final = "tracker"


def make_statement(
    lineage: Lineage, subjects: Mapping[str, str], sources: SourceState | None = None
) -> bytes:
    """Return the statement about delivered files as canonical JSON.

    Args:
        lineage: What is behind them.
        subjects: Their sha256 by name.
        sources: The state of the recipe and its repository, where they are known.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
    """
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "recipe": lineage.recipe,
            "target": lineage.target,
            **({"invocation": sources.invocation(lineage.target)} if sources else {}),
            "settings": {stage.label: _public_settings(stage) for stage in lineage.stages},
        },
        "internalParameters": {
            "stages": {stage.label: _stage_json(stage) for stage in lineage.stages}
        },
        "resolvedDependencies": [
            *(_describe_sources(sources) if sources else ()),
            *_dependencies(lineage),
        ],
    }
    details = {"builder": _builder(), "byproducts": list(_byproducts(lineage))}
    return _statement(subjects, definition, details)


def make_release_statement(
    name: str, version: str, subjects: Mapping[str, str], statements: Mapping[str, str]
) -> bytes:
    """Return the statement about a release as canonical JSON.

    Args:
        name: The pipeline.
        version: The version of the release.
        subjects: The sha256 of its files by name.
        statements: The sha256 of the texts of the statements in it, by name.
    """
    definition = {
        "buildType": RELEASE_TYPE,
        "externalParameters": {"release": name, "version": version},
        "resolvedDependencies": [
            _resource(path, statements[path], annotations={"kind": "statement"})
            for path in sorted(statements)
        ],
    }
    return _statement(subjects, definition, {"builder": _builder()})


def _statement(subjects: Mapping[str, str], definition: Json, details: Json) -> bytes:
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_resource(name, subjects[name]) for name in sorted(subjects)],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"buildDefinition": definition, "runDetails": details},
        }
    )


def _builder() -> dict[str, Json]:
    return {"id": read_builder_id(), "version": {"tvmflow": VERSION}}


def _describe_sources(sources: SourceState) -> Iterator[Json]:
    """Yield the recipe, its pipeline, and the commit of their repository."""
    for file in sources.files:
        yield _resource(file.name, file.sha256, annotations={"kind": file.kind})
    if sources.commit:
        yield {
            "name": "repository",
            "digest": {"gitCommit": sources.commit},
            "annotations": {"kind": "repository", "clean": sources.clean},
        }


def _public_settings(stage: FinishedStage) -> Json:
    remote = stage.settings.get("remote")
    if isinstance(remote, dict) and _PRIVATE_SETTING in remote:
        public = {name: value for name, value in remote.items() if name != _PRIVATE_SETTING}
        return {**stage.settings, "remote": public}
    return stage.settings


def _stage_json(stage: FinishedStage) -> Json:
    from_preimage = {name: stage.preimage[name] for name in ("version", "machine", "tools")}
    return {"key": stage.artifact.key, **from_preimage}


def _resource(name: str, sha256: str, **fields: Json) -> dict[str, Json]:
    return {"name": name, "digest": {"sha256": sha256}, **fields}


def _dependencies(lineage: Lineage) -> Iterator[Json]:
    """Yield files from outside, packages, and results that one stage read of another."""
    for source in lineage.sources():
        uri = {"uri": source.url} if source.url else {}
        yield _resource(source.role, source.sha256, annotations={"kind": "source"}, **uri)
    for tool in lineage.tools():
        wheel = wheel_digest(tool)
        yield {
            "name": tool.name,
            "uri": tool.purl,
            "digest": {RECORD_DIGEST: tool.record, **({"sha256": wheel} if wheel else {})},
            "annotations": {
                "kind": "tool",
                "version": tool.version,
                "digestOf": "wheel" if wheel else "installed files",
            },
        }
    results = sorted({result for stage in lineage.stages for result in stage.used_results()})
    for name, digest in results:
        yield _resource(name, digest, annotations={"kind": "result"})


def _byproducts(lineage: Lineage) -> Iterator[Json]:
    verdict, digest = lineage.verdict()
    if verdict is not None:
        yield _resource(VERIFICATION, digest, annotations={"verdict": verdict})
    coverage = {
        stage.spec.target: {name: stage.artifact.facts[name] for name in _COVERAGE_FACTS}
        for stage in lineage.find_stages("pick_best")
        if stage.artifact.facts.keys() >= set(_COVERAGE_FACTS)
    }
    kernels = list_kernels(lineage)
    if kernels:
        yield {"name": KERNELS, "annotations": {"kernels": kernels, "coverage": coverage}}
