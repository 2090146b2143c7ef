"""Statements of provenance: in-toto Statement v1 with SLSA Provenance v1.

Equal results give equal bytes: statements contain no paths and no names of machines, and only the statement about
measurements contains times. Functions raise DamagedBlob for a missing or damaged result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import packages
from tvmflow.core.bill_of_materials import license_expression, stated_license_fields
from tvmflow.core.canonical_json import canonical
from tvmflow.core.documents import get_field
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.keys import group_files
from tvmflow.core.types import STATEMENT_SUFFIX, Artifact, Json, Need, StageSpec
from tvmflow.core.version import VERSION
from tvmflow.planning.checks import locked_settings
from tvmflow.provenance.delivered import DeliveredTarget, SourceState, read_builder_id
from tvmflow.runtime.statements import (
    BUILD_TYPE,
    KERNELS,
    MEASUREMENTS_TYPE,
    PREDICATE_TYPE,
    RELEASE_TYPE,
    STATEMENT_TYPE,
    VERIFICATION,
)
from tvmflow.stages import (
    STAGES,
    build,
    export,
    extract_tasks,
    import_model,
    join,
    pick_best,
    tune,
    verify,
)
from tvmflow.stages.base import find_facts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.tune import find_ledger_key
from tvmflow.store.addresses import HUB, parse_hub_file, scheme_of, without_secrets
from tvmflow.store.local import DamagedBlob, LocalStore
from tvmflow.store.source_files import find_snapshot
from tvmflow.tuning.trials import trial_id

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """An external file: its role, its sha256 (hex), and its URL or an empty string."""

    role: str
    sha256: str
    url: str


class Tool(NamedTuple):
    """A package whose code can change a result; `record` is the digest part of its identity."""

    name: str
    version: str
    record: str

    @property
    def purl(self) -> str:
        """The package URL; generic for a source folder, which is not on PyPI."""
        kind = "generic" if self.version == packages.UNVERSIONED else "pypi"
        return f"pkg:{kind}/{self.name}@{urllib.parse.quote(self.version, safe='.-_~')}"


class FinishedStage(NamedTuple):
    """A stage with its result and the pre-image of its key."""

    spec: StageSpec
    artifact: Artifact
    preimage: Mapping[str, Json]

    @property
    def settings(self) -> Mapping[str, Json]:
        """The settings in the pre-image."""
        settings: Mapping[str, Json] = self.preimage["settings"]
        return settings

    @property
    def locked_settings(self) -> dict[str, Json]:
        """The settings in a lock file, which are the same on every machine."""
        return locked_settings(self.spec._replace(settings=dict(self.settings)))

    def used_results(self) -> Iterator[tuple[str, str]]:
        """Yield `LABEL/FILE` and sha256 of each file read from other stages, except searches."""
        for need, role, digest in self._list_needed_files(of_searches=False):
            yield need.stage_id.partition(":")[2] + role.removeprefix(need.stage), digest

    def sources(self) -> Iterator[Source]:
        """Yield the external files in the key, and the results of searches.

        A locked run reads search results from its lock file as external files, and must give the same statement.
        """
        for name, files in group_files(self.spec.files).items():
            yield Source(name, self.preimage["inputs"][name], without_secrets(files[0].url))
        for _, role, digest in self._list_needed_files(of_searches=True):
            yield Source(role, digest, "")

    def _list_needed_files(self, *, of_searches: bool) -> Iterator[tuple[Need, str, str]]:
        """Yield need, role and sha256 of each file read from other stages."""
        for need in self.spec.needs:
            if STAGES[need.maker].TRAITS.run.searches == of_searches:
                for role, digest in self.preimage["inputs"].items():
                    if role.startswith(f"{need.stage}/"):
                        yield need, role, str(digest)

    def tools(self) -> Iterator[Tool]:
        """Yield the packages that the stage used."""
        for name, identity in self.preimage["tools"].items():
            # A local version may contain a plus, too.
            version, _, record = identity.rpartition("+")
            yield Tool(name, version, record)


class Lineage(NamedTuple):
    """The stages behind the files of one recipe for one target, in topological order."""

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[FinishedStage, ...]
    store: LocalStore

    def find_stages(self, name: str) -> tuple[FinishedStage, ...]:
        """Return the stages with a name; a partitioned model has several."""
        return tuple(stage for stage in self.stages if stage.spec.stage == name)

    @property
    def exports(self) -> tuple[FinishedStage, ...]:
        """The stages that wrote the files: `join` of a partitioned model, then `export`."""
        return (*self.find_stages(join.NAME), *self.find_stages(export.NAME))

    def read(self, stage: FinishedStage, name: str) -> Json:
        """Return the value of a stage's JSON file, or None if it is missing."""
        digest = stage.artifact.digests((name,)).get(name)
        try:
            return digest and json.loads(Path(self.store.blobs.verified_path(digest)).read_bytes())
        except ValueError:
            # A plug-in's stage may use the name for other content.
            return None

    @property
    def repeatable(self) -> tuple[FinishedStage, ...]:
        """The stages of a locked run: all except searches."""
        return tuple(stage for stage in self.stages if not stage.spec.traits.searches)

    def sources(self) -> list[Source]:
        """Return all external files and results of searches, sorted."""
        return sorted({source for stage in self.repeatable for source in stage.sources()})

    def tools(self) -> list[Tool]:
        """Return all packages, sorted."""
        return sorted({tool for stage in self.repeatable for tool in stage.tools()})

    def verdict(self, name: str = verify.VERDICT) -> tuple[Json, str]:
        """Return a JSON document of `verify` and its digest; (None, "") if `verify` did not run."""
        for stage in self.find_stages(verify.NAME):
            if (verdict := self.read(stage, name)) is not None:
                return verdict, stage.artifact.digests(())[name]
        return None, ""

    def _export_setting(self, name: str) -> str:
        return str(self.exports[0].settings.get(name, "")) if self.exports else ""

    @property
    def version(self) -> str:
        """The version in the recipe; empty if nothing was exported."""
        return self._export_setting("version")

    def license(self) -> str:
        """Return the license from the recipe or else from the Hub, or an empty string."""
        return self._export_setting("license") or next(filter(None, self._licenses_on_hub()), "")

    def _licenses_on_hub(self) -> Iterator[str]:
        """Yield the licenses of the Hub repositories with the model's files."""
        for stage in self.find_stages(import_model.NAME):
            for file in stage.spec.files:
                if scheme_of(file.url) == HUB:
                    snapshot = find_snapshot(parse_hub_file(file.url), self.store)
                    yield snapshot.license if snapshot else ""

    def signature(self) -> Json:
        """Return the signature from `import`; for a partitioned model, that of the whole model."""
        imports = self.find_stages(import_model.NAME)
        signatures = (self.read(stage, import_model.SIGNATURE) for stage in imports)
        return next(filter(None, signatures), {"inputs": [], "outputs": []})


def load_lineage(delivered: DeliveredTarget, store: LocalStore) -> Lineage:
    """Return the lineage of delivered files."""
    stages = []
    for spec in delivered.stages:
        artifact = delivered.artifacts[spec.id]
        preimage = store.preimage(artifact.key)
        if preimage is None:
            raise DamagedBlob(artifact.key, f"{store.root}/actions")
        stages.append(FinishedStage(spec, artifact, preimage))
    _log.debug("%d stages are behind %s/%s", len(stages), delivered.recipe, delivered.target)
    return Lineage(
        recipe=delivered.recipe,
        target=delivered.target,
        files=delivered.files,
        stages=tuple(stages),
        store=store,
    )


RECORD_DIGEST: Final = "tvmflowRecord"
"""The digest algorithm of tools: a prefix of the sha256 over names and digests of files."""

# The address of a device is private and has no effect on the result.
_PRIVATE_SETTING: Final = "tracker"


def make_statement(
    lineage: Lineage, subjects: Mapping[str, str], sources: SourceState | None = None
) -> bytes:
    """Return the statement about delivered files as canonical JSON; `subjects` maps files to sha256.

    A locked run gives the same bytes: measurements and the schedule search are in the statement of
    `make_measurement_statement`. `sources` is the state of the recipe and its repository, if known.
    """
    stages = [(stage, stage.locked_settings) for stage in lineage.repeatable]
    dependencies = [*(_describe_sources(sources) if sources else ()), *_dependencies(lineage)]
    invoked = sources and sources._replace(locked=False)
    definition = _define_build(BUILD_TYPE, lineage, invoked, stages, dependencies)
    kernels = [_without_measurements(kernel) for kernel in list_kernels(lineage)]
    byproducts = _list_byproducts(lineage.verdict(), {"kernels": kernels})
    return _statement(subjects, definition, {"builder": _builder(), "byproducts": byproducts})


def make_measurement_statement(
    lineage: Lineage,
    subjects: Mapping[str, str],
    statement: bytes,
    sources: SourceState | None = None,
) -> bytes:
    """Return the statement with measurements as canonical JSON; `subjects` maps files to sha256.

    `statement` is the text of `make_statement`, and `sources` holds the recipe and its pipeline, if known.
    """
    stages = [
        (stage, stage.settings)
        for stage in lineage.stages
        if stage.spec.traits.searches or not stage.spec.traits.is_locked
    ]
    name = f"{lineage.recipe}{STATEMENT_SUFFIX}"
    dependencies = [
        _statement_resource(name, hashlib.sha256(statement).hexdigest()),
        *(_describe_files(sources, "pipeline") if sources else ()),
    ]
    definition = _define_build(MEASUREMENTS_TYPE, lineage, sources, stages, dependencies)
    kernels = {"kernels": list_kernels(lineage), "coverage": _coverage(lineage)}
    byproducts = _list_byproducts(lineage.verdict(verify.MEASUREMENTS), kernels)
    return _statement(subjects, definition, {"builder": _builder(), "byproducts": byproducts})


def _define_build(
    build_type: str,
    lineage: Lineage,
    sources: SourceState | None,
    stages: Sequence[tuple[FinishedStage, Mapping[str, Json]]],
    dependencies: Sequence[Json],
) -> Json:
    invocation = {"invocation": sources.invocation(lineage.target)} if sources else {}
    names = {"recipe": lineage.recipe, "target": lineage.target, **invocation}
    settings, internal = dict[str, Json](), dict[str, Json]()
    for stage, own in stages:
        label, remote = stage.spec.label, own.get("remote")
        if isinstance(remote, dict):
            remote = {name: value for name, value in remote.items() if name != _PRIVATE_SETTING}
            own = {**own, "remote": remote}
        settings[label] = own
        internal[label] = {name: stage.preimage[name] for name in ("version", "machine", "tools")}
        if stage.spec.traits.is_locked:
            internal[label]["key"] = stage.artifact.key
    return {
        "buildType": build_type,
        "externalParameters": {**names, "settings": settings},
        "internalParameters": {"stages": internal},
        "resolvedDependencies": dependencies,
    }


def _list_byproducts(verdict: tuple[Json, str], kernels: Mapping[str, Json]) -> list[Json]:
    value, digest = verdict
    byproducts: list[Json] = []
    if value is not None:
        byproducts.append(_resource(VERIFICATION, digest, annotations={"verdict": value}))
    if kernels["kernels"]:
        byproducts.append({"name": KERNELS, "annotations": kernels})
    return byproducts


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

    `subjects` and `statements` map files, and other statements in the folder, to the sha256 of their content. Another
    statement, with the build type `MEASUREMENTS_TYPE`, covers the files `measured`.
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
    """Yield the recipe, and the commit of its repository."""
    yield from _describe_files(sources, "recipe")
    if sources.commit:
        yield {
            "name": "repository",
            "digest": {"gitCommit": sources.commit},
            "annotations": {"kind": "repository", "clean": sources.clean},
        }


def _describe_files(sources: SourceState, kind: str) -> Iterator[Json]:
    """Yield the recipe or the pipeline; they affect delivered files only through recorded settings."""
    for file in sources.files:
        if file.kind == kind:
            yield _resource(file.name, file.sha256, annotations={"kind": kind})


def _resource(name: str, sha256: str, **fields: Json) -> dict[str, Json]:
    return {"name": name, "digest": {"sha256": sha256}, **fields}


def _statement_resource(name: str, sha256: str) -> dict[str, Json]:
    return _resource(name, sha256, annotations={"kind": "statement"})


def _dependencies(lineage: Lineage) -> Iterator[Json]:
    """Yield external files, packages, and files that stages read from other stages."""
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
    results = sorted({result for stage in lineage.repeatable for result in stage.used_results()})
    for name, digest in results:
        yield _resource(name, digest, annotations={"kind": "result"})


def _without_measurements(kernel: Mapping[str, Json]) -> dict[str, Json]:
    """Reduce the trial of a kernel to its id, which depends only on the trace."""
    if "record" not in kernel:
        return dict(kernel)
    return {**kernel, "record": {"trial": kernel["record"]["trial"]}}


def _coverage(lineage: Lineage) -> Json:
    """Return target -> share of time in kernels with a schedule."""
    return {
        stage.spec.target: {
            "tuned": facts.tuned,
            "tunable": facts.tunable,
            "coverage": facts.coverage,
        }
        for stage in lineage.find_stages(pick_best.NAME)
        if (facts := find_facts(PickBestFacts, stage.artifact.facts)) is not None
    }


# ---------------------------------------------------------------- kernels


def list_kernels(lineage: Lineage) -> list[dict[str, Json]]:
    """Return a statement's entry for each kernel in the library.

    An entry has `name` and `schedule` (`tuned` or a rule), `part` for a partitioned model, the key `workload` in a
    tuned model, and for a tuned kernel its trial (`record`), which in a locked run has only the id.
    """
    return [
        kernel
        for built in lineage.find_stages(build.NAME)
        for kernel in _kernels_of_build(lineage, built)
    ]


def _kernels_of_build(lineage: Lineage, built: FinishedStage) -> Iterator[dict[str, Json]]:
    rules: Mapping[str, str] = lineage.read(built, build.KERNELS) or {}
    target = built.spec.target
    stages = {stage.spec.stage: stage for stage in lineage.stages if stage.spec.target == target}
    workloads = _workloads_by_kernel(lineage, stages)
    locked = _locked_choice(built)
    for name, rule in sorted(rules.items()):
        kernel: dict[str, Json] = {"name": name, "schedule": rule}
        if target != lineage.target:
            kernel["part"] = target
        workload = workloads.get(name, "")
        if workload:
            kernel["workload"] = workload
        if workload and rule == build.TUNED and pick_best.NAME in stages:
            kernel["record"] = _find_winner(lineage, stages, workload)
        elif rule == build.TUNED and workload in locked:
            kernel["record"] = {"trial": trial_id(locked[workload])}
        yield kernel


def _workloads_by_kernel(lineage: Lineage, stages: Mapping[str, FinishedStage]) -> dict[str, str]:
    """Return kernel -> key of its workload; empty if the model was not tuned."""
    if extract_tasks.NAME not in stages:
        return {}
    tasks = lineage.read(stages[extract_tasks.NAME], extract_tasks.TASKS)
    return {name: task["key"] for task in tasks for name in task["names"]}


def _locked_choice(built: FinishedStage) -> Mapping[str, Json]:
    """Return workload -> trace from the lock file; empty for a run with a search."""
    role = f"{pick_best.NAME}/{pick_best.CHOSEN}"
    for file in built.spec.files:
        if file.role == role:
            content = Path(file.path).read_bytes()
            expected = built.preimage["inputs"][role]
            if hashlib.sha256(content).hexdigest() != expected:
                raise DamagedBlob(expected, file.path)
            choice: Mapping[str, Json] = json.loads(content)
            return choice
    return {}


def _find_winner(lineage: Lineage, stages: Mapping[str, FinishedStage], workload: str) -> Json:
    """Return the best trial of a workload, with times from the ledger and from `pick_best`."""
    tuned = stages[tune.NAME]
    judged = lineage.read(stages[pick_best.NAME], pick_best.FINALISTS)[workload]
    finalists = lineage.read(tuned, tune.RECORDS)[workload]
    winner = next(trial for trial in finalists if trial["id"] == judged["winner"])
    return {
        "trial": winner["id"],
        "target": find_ledger_key(tuned.preimage),
        "seconds": winner["seconds"],
        "when": winner["when"],
        "again_seconds": judged["tuned_us"] / 1e6,
        "untuned_seconds": judged["untuned_us"] / 1e6,
    }


# ---------------------------------------------------------------- installed packages

# License field of older packages -> SPDX identifier.
_SPDX: Final = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license v2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
_CLASSIFIER: Final = "License ::"


def find_license(tool: Tool) -> dict[str, Json]:
    """Return a package's license as an SPDX expression, or as the name in its metadata.

    Empty if the metadata has none, or another build of the package is installed now.
    """
    folder = _metadata_folder(tool)
    if folder is None:
        return {}
    try:
        text = (folder / "METADATA").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    metadata = HeaderParser().parsestr(text)
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith(_CLASSIFIER)
    ]
    # A multi-line field is the whole text of the license.
    text = str(metadata.get("License", "")).strip()
    names = [str(metadata.get("License-Expression", "")), *([] if "\n" in text else [text])]
    stated = [_SPDX.get(name.lower(), name) for name in (*names, *classifiers) if name]
    # An SPDX expression is preferred, because other names may be ambiguous.
    return stated_license_fields(next(filter(license_expression, stated), next(iter(stated), "")))


def wheel_digest(tool: Tool) -> str:
    """Return the sha256 (hex) of the archive that a package was installed from; empty if unknown.

    pip records this digest only for archives that were installed by file or URL, not from an index.
    """
    folder = _metadata_folder(tool)
    if folder is None:
        return ""
    try:
        note = json.loads((folder / "direct_url.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return get_field(note, "archive_info", "hashes", "sha256", of=str)


def _metadata_folder(tool: Tool) -> Path | None:
    """Return the `.dist-info` folder of a package, or None if another build is installed now."""
    try:
        if packages.identity(tool.name) != f"{tool.version}+{tool.record}":
            return None
        record = packages.find_package(tool.name).record
    except EnvironmentProblem:
        return None
    return Path(record).parent if record else None
