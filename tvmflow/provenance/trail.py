"""Walks back from delivered files through the store: every stage behind them, its inputs, and what its files say."""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.provenance.beside import Group
from tvmflow.stages import build, extract_tasks, import_model, pick_best, tune, verify
from tvmflow.stores.local import Damaged, LocalStore
from tvmflow.tuning import ledger
from tvmflow.values import Artifact, Json, StageSpec

_ABSENT: Final = "absent"


class Source(NamedTuple):
    """A file from outside: what it is to the model, its sha256 (hex), and where it came from, if from a URL."""

    role: str
    sha256: str
    url: str


class Tool(NamedTuple):
    """A package whose code can change a result; `record` is the beginning of the digest of its list of files."""

    name: str
    version: str
    record: str


class Step(NamedTuple):
    """A finished stage with the pre-image of its key."""

    spec: StageSpec
    artifact: Artifact
    preimage: Mapping[str, Json]

    @property
    def label(self) -> str:
        return self.spec.label

    def used(self) -> Iterator[tuple[str, str]]:
        """`(<label>/<file>, sha256)` of every file of another stage that it read."""
        for need in self.spec.needs:
            label = need.stage_id.partition(":")[2]
            for role, digest in self.preimage["inputs"].items():
                if role.startswith(f"{need.stage}/"):
                    yield label + role.removeprefix(need.stage), str(digest)

    def sources(self) -> Iterator[Source]:
        """The files from outside that are part of its key."""
        for file in self.spec.files:
            if file.keyed:
                yield Source(file.role, self.preimage["inputs"][file.role], public_url(file.url))

    def tools(self) -> Iterator[Tool]:
        """The packages that it used."""
        for name, identity in self.preimage["tools"].items():
            # a local version has a plus of its own
            version, _, record = identity.rpartition("+")
            if identity != _ABSENT:
                yield Tool(name, version, record)


class Trail(NamedTuple):
    """All that is behind the files of one recipe for one target, in the order in which it was made."""

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    store: LocalStore

    def of(self, stage: str) -> tuple[Step, ...]:
        """The steps of one stage: several where a model is in parts."""
        return tuple(step for step in self.steps if step.spec.stage == stage)

    def read(self, step: Step, name: str) -> Json:
        """What is in a JSON file of a step; None when it gave none of that name. Raises Damaged."""
        digest = step.artifact.digests((name,)).get(name)
        try:
            return digest and json.loads(Path(self.store.checked_blob(digest)).read_bytes())
        except ValueError:
            # what a stage calls so need not be ours: there may be other stages of that name
            return None

    def sources(self) -> list[Source]:
        """All files from outside."""
        return sorted({source for step in self.steps for source in step.sources()})

    def tools(self) -> list[Tool]:
        """All packages."""
        return sorted({tool for step in self.steps for tool in step.tools()})

    def verdict(self) -> tuple[Json, str]:
        """What `verify` found and the digest of the file that says so; None where it was left out."""
        for step in self.of("verify"):
            found = self.read(step, verify.VERDICT)
            if found is not None:
                return found, step.artifact.digests(())[verify.VERDICT]
        return None, ""

    def signature(self) -> Json:
        """Inputs and outputs, as `import` wrote them; of a model in parts, those of the whole."""
        found = [self.read(step, import_model.SIGNATURE) for step in self.of("import")]
        return next(filter(None, found), {"inputs": [], "outputs": []})

    def kernels(self) -> list[dict[str, Json]]:
        """Every kernel in the library and where its schedule came from, with the trial behind it if it was tuned."""
        return [
            entry for step in self.of("build") for entry in _kernels(self, step, self._at(step))
        ]

    def _at(self, step: Step) -> dict[str, Step]:
        """The steps by stage that are for what this one is for."""
        return {
            each.spec.stage: each for each in self.steps if each.spec.target == step.spec.target
        }


def walk(group: Group, store: LocalStore) -> Trail:
    """The trail behind a delivery. Raises Damaged for a result that the store no longer has."""
    steps = []
    for spec in group.stages:
        artifact = group.artifacts[spec.id]
        preimage = store.preimage(artifact.key)
        if preimage is None:
            raise Damaged(artifact.key, f"{store.root}/actions")
        steps.append(Step(spec, artifact, preimage))
    return Trail(group.recipe, group.target, group.files, tuple(steps), store)


def public_url(url: str) -> str:
    """A URL without what may be secret in it: name and password, query, fragment.

    >>> public_url("https://me:pw@models.example:8443/net.onnx?token=1")
    'https://models.example:8443/net.onnx'
    """
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(
        (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
    )


# ---------------------------------------------------------------- kernels


def _kernels(trail: Trail, built: Step, at: Mapping[str, Step]) -> Iterator[dict[str, Json]]:
    roads: Mapping[str, str] = trail.read(built, build.KERNELS) or {}
    workloads = _workloads(trail, at)
    locked = _locked_choice(built)
    for name, road in sorted(roads.items()):
        entry: dict[str, Json] = {"name": name, "schedule": road}
        if built.spec.target != trail.target:
            entry["part"] = built.spec.target
        if name in workloads:
            entry["workload"] = workloads[name]
            if road == build.TUNED and "pick_best" in at:
                entry["record"] = _record(trail, at, workloads[name])
            elif road == build.TUNED and workloads[name] in locked:
                entry["record"] = {"trial": ledger.trial_id(locked[workloads[name]])}
        yield entry


def _workloads(trail: Trail, at: Mapping[str, Step]) -> dict[str, str]:
    """Kernel -> the durable key of what it computes."""
    if "extract_tasks" not in at:
        return {}
    tasks = trail.read(at["extract_tasks"], extract_tasks.TASKS)
    return {name: task["key"] for task in tasks for name in task["names"]}


def _locked_choice(built: Step) -> Mapping[str, Json]:
    """Workload -> trace, where these came out of a lock and nothing was searched."""
    role = f"pick_best/{pick_best.CHOSEN}"
    for file in built.spec.files:
        if file.role == role:
            content = Path(file.path).read_bytes()
            if hashlib.sha256(content).hexdigest() != built.preimage["inputs"][role]:
                raise Damaged(built.preimage["inputs"][role], file.path)
            choice: Mapping[str, Json] = json.loads(content)
            return choice
    return {}


def _record(trail: Trail, at: Mapping[str, Step], workload: str) -> dict[str, Json]:
    """The measured trial that won, in seconds: when it was found, and when the finalists were measured again."""
    judged = trail.read(at["pick_best"], pick_best.FINALISTS)[workload]
    finalists = trail.read(at["tune"], tune.RECORDS)[workload]
    trial = next(each for each in finalists if each["id"] == judged["winner"])
    settings = at["tune"].preimage["settings"]
    target = ledger.target_key(
        settings["target"], at["tune"].preimage["tools"]["apache-tvm"], settings["device"]
    )
    return {
        "trial": trial["id"],
        "target": target,
        "seconds": trial["seconds"],
        "when": trial["when"],
        "again_seconds": judged["tuned_us"] / 1e6,
        "untuned_seconds": judged["untuned_us"] / 1e6,
    }
