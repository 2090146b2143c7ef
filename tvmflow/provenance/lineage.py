"""Lineage: every stage, source and tool behind delivered files, read from the store."""

from __future__ import annotations

import json
import logging
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tvmflow.core import packages
from tvmflow.core.keys import group_files
from tvmflow.core.types import Artifact, Json, Need, StageSpec
from tvmflow.planning.enforce_lock import locked_settings
from tvmflow.provenance.delivered import DeliveredTarget
from tvmflow.stages import STAGES, export, import_model, join, verify
from tvmflow.store.addresses import HUB, parse_hub_file, scheme_of, without_secrets
from tvmflow.store.blobs import DamagedBlob
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import find_snapshot

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """A file from outside: its role for the model, its sha256 (hex), and its URL if it has one."""

    role: str
    sha256: str
    url: str


class Tool(NamedTuple):
    """A package whose code can change a result.

    `record` is the beginning of the digest of its list of files (see `core.packages`).
    """

    name: str
    version: str
    record: str

    @property
    def purl(self) -> str:
        """Its package URL; generic for a source folder, which is no release of a package index."""
        kind = "generic" if self.version == packages.UNVERSIONED else "pypi"
        return f"pkg:{kind}/{self.name}@{urllib.parse.quote(self.version, safe='.-_~')}"


class FinishedStage(NamedTuple):
    """A stage with its result and the pre-image of its key."""

    spec: StageSpec
    artifact: Artifact
    preimage: Mapping[str, Json]

    @property
    def label(self) -> str:
        """The stage as a user names it: `STAGE[/TARGET]`."""
        return self.spec.label

    @property
    def settings(self) -> Mapping[str, Json]:
        """The settings in the pre-image."""
        settings: Mapping[str, Json] = self.preimage["settings"]
        return settings

    @property
    def locked_settings(self) -> dict[str, Json]:
        """The settings that are the same on every machine, as a lock file has them."""
        return locked_settings(self.spec._replace(settings=dict(self.settings)))

    def used_results(self) -> Iterator[tuple[str, str]]:
        """Yield `LABEL/FILE` and sha256 of every file of another stage that it read."""
        for need in self.spec.needs:
            label = need.stage_id.partition(":")[2]
            for role, digest in self._inputs_of(need):
                if not STAGES[need.maker].TRAITS.run.searches:
                    yield label + role.removeprefix(need.stage), digest

    def sources(self) -> Iterator[Source]:
        """Yield the files from outside that are part of its key, and the result of a search.

        A locked run has that result from its lock file, and the same is said of both.
        """
        for name, files in group_files(self.spec.files).items():
            yield Source(name, self.preimage["inputs"][name], without_secrets(files[0].url))
        for need in self.spec.needs:
            if STAGES[need.maker].TRAITS.run.searches:
                yield from (Source(role, digest, "") for role, digest in self._inputs_of(need))

    def _inputs_of(self, need: Need) -> Iterator[tuple[str, str]]:
        """Yield role and sha256 of every file of a need that it read."""
        for role, digest in self.preimage["inputs"].items():
            if role.startswith(f"{need.stage}/"):
                yield role, str(digest)

    def tools(self) -> Iterator[Tool]:
        """Yield the packages that it used."""
        for name, identity in self.preimage["tools"].items():
            # A local version has a plus of its own.
            version, _, record = identity.rpartition("+")
            # Results of earlier versions name packages that were absent.
            if version:
                yield Tool(name, version, record)


class Lineage(NamedTuple):
    """The stages behind the files of one recipe for one target, in topological order."""

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[FinishedStage, ...]
    store: LocalStore

    def find_stages(self, name: str) -> tuple[FinishedStage, ...]:
        """Return the stages of a name: several where a model is in parts."""
        return tuple(stage for stage in self.stages if stage.spec.stage == name)

    @property
    def exports(self) -> tuple[FinishedStage, ...]:
        """The stages that made the files: the one that joined the parts of a model before those of the parts."""
        return (*self.find_stages(join.NAME), *self.find_stages(export.NAME))

    def read(self, stage: FinishedStage, name: str) -> Json:
        """Return the value of a JSON file of a stage; None when it gave none of that name.

        Raises:
            DamagedBlob: The file is not what it should be.
        """
        digest = stage.artifact.digests((name,)).get(name)
        try:
            return digest and json.loads(Path(self.store.blobs.verified_path(digest)).read_bytes())
        except ValueError:
            # A stage of a plug-in may use the name for something else.
            return None

    @property
    def repeatable(self) -> tuple[FinishedStage, ...]:
        """The stages that a locked run has too: all but those that search."""
        return tuple(stage for stage in self.stages if not stage.spec.traits.searches)

    def sources(self) -> list[Source]:
        """Return all files from outside, and the results of searches, sorted."""
        return sorted({source for stage in self.repeatable for source in stage.sources()})

    def tools(self) -> list[Tool]:
        """Return all packages, sorted."""
        return sorted({tool for stage in self.repeatable for tool in stage.tools()})

    def verdict(self, name: str = verify.VERDICT) -> tuple[Json, str]:
        """Return a document of `verify` and the digest of its file; None where it did not run."""
        for stage in self.find_stages(verify.NAME):
            verdict = self.read(stage, name)
            if verdict is not None:
                return verdict, stage.artifact.digests(())[name]
        return None, ""

    def license(self) -> str:
        """Return the license that the recipe names for the model, or else the Hub; empty where none does."""
        named = str(self.exports[0].settings.get("license", "")) if self.exports else ""
        return named or next(filter(None, self._licenses_on_hub()), "")

    def _licenses_on_hub(self) -> Iterator[str]:
        """Yield the licenses of the repositories that the model's files are from."""
        for stage in self.find_stages(import_model.NAME):
            for file in stage.spec.files:
                if scheme_of(file.url) == HUB:
                    snapshot = find_snapshot(parse_hub_file(file.url), self.store)
                    yield snapshot.license if snapshot else ""

    def signature(self) -> Json:
        """Return inputs and outputs as `import` wrote them; for a model in parts, the model's."""
        imports = self.find_stages(import_model.NAME)
        signatures = (self.read(stage, import_model.SIGNATURE) for stage in imports)
        return next(filter(None, signatures), {"inputs": [], "outputs": []})


def load_lineage(delivered: DeliveredTarget, store: LocalStore) -> Lineage:
    """Return the lineage behind delivered files.

    Raises:
        DamagedBlob: The store no longer has a result.
    """
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
