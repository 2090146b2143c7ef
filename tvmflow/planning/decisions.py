"""Decisions about a plan's stages, for plan, explain and run: up to date or must run, and why."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvmflow.core import packages
from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, LockMismatch, RecipeError, TvmflowError
from tvmflow.core.files import read_regular
from tvmflow.core.formatting import count_text
from tvmflow.core.keys import group_files, list_changes, stage_key
from tvmflow.core.logs import IDENTITY_WAIT, explain_wait
from tvmflow.core.types import Artifact, Decision, InputFile, Plan, StageKey, StageSpec
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages import extract_tasks, import_model
from tvmflow.stages.base import find_facts, name_some
from tvmflow.stages.import_model import ImportFacts
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore, find_failure

# The maximum number of causes in the one-line reason; `tvmflow explain` shows all causes.
_SHOWN_CAUSES = 3
_MAX_CAUSE = 80
_ENCLOSING = frozenset("\"'([{")
_MODEL = f"{import_model.NAME}/model.json"
_KERNELS = f"{extract_tasks.NAME}/tasks.json"
FORCED = "forced by --force"
"""The reason of a stage that runs although it is up to date."""


class PlanState:
    """The known keys, results and decisions of a plan's stages, by stage id.

    Filled in topological order: first by `decide_all`, then by the run. `forced` maps ids of stages that must run to
    the reason.
    """

    def __init__(self, store: LocalStore, forced: Iterable[str] = ()) -> None:
        self.store = store
        self.forced = dict.fromkeys(forced, FORCED)
        self._digests = FileDigests(store)
        self._tools: dict[str, str] = {}
        self.machine = packages.host_platform()
        self.keys: dict[str, StageKey] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.decisions: dict[str, Decision] = {}
        self._earlier: dict[str, str] = {}

    def decide_all(self, plan: Plan) -> None:
        """Decide about every stage; stages with unknown inputs wait.

        Raises:
            RecipeError: if a file cannot be read, or its digest differs from the recipe's.
            EnvironmentProblem: if a tool is not installed or cannot be identified.
            LockMismatch: if a result in a locked run differs from its digest in the lock file.
        """
        # Missing requirements of the last stage are reported before the first one runs.
        for spec in plan.stages:
            self.tool_identities(spec)
        for spec in plan.stages:
            self.decide(spec)

    def decide(self, spec: StageSpec) -> Decision:
        """Decide about one stage after its inputs; raise the same errors as `decide_all`."""
        makers = [need.maker for need in spec.needs if need.stage_id not in self.artifacts]
        if makers:
            decision = Decision(spec.id, "wait", f"after {' and '.join(dict.fromkeys(makers))}")
        else:
            key = self.keys[spec.id] = self._compute_key(spec, self.artifacts)
            artifact = self.store.find(*key)
            if artifact is not None and spec.id in self.forced:
                reason = self.forced[spec.id]
                decision = Decision(spec.id, "run", reason, (reason,))
            elif artifact is not None:
                check_pinned(spec, artifact)
                self.artifacts[spec.id] = artifact
                decision = Decision(spec.id, "hit", "unchanged")
            else:
                causes = self._list_causes(spec, key)
                decision = Decision(spec.id, "run", _shorten(causes), causes)
        self.decisions[spec.id] = decision
        return decision

    def find_result(self, spec: StageSpec, artifacts: Mapping[str, Artifact]) -> Artifact | None:
        """Return the stage's result for the given input artifacts, if it is in the store."""
        return self.store.find(*self._compute_key(spec, artifacts))

    def digest_files(self, spec: StageSpec) -> dict[str, str]:
        """Return the sha256 of the keyed external files, by their names in the key.

        Raises RecipeError if a file cannot be read, or its digest differs from the recipe's.
        """
        groups = group_files(spec.files)
        return {
            name: self._digest_folder(files) if files[0].folder else self._digest(files[0])
            for name, files in groups.items()
        }

    def tool_identities(self, spec: StageSpec) -> dict[str, str]:
        """Return the identities of distributions, at least those that the stage uses."""
        for name in spec.tools:
            if name not in self._tools:
                self._tools[name] = identify_tool(name, spec)
        return self._tools

    def _compute_key(self, spec: StageSpec, artifacts: Mapping[str, Artifact]) -> StageKey:
        inputs = {**self.digest_files(spec), **input_digests(spec, artifacts)}
        return stage_key(spec, inputs, self.tool_identities(spec), self.machine)

    def _digest(self, file: InputFile) -> str:
        if file.url:
            return file.sha256
        try:
            digest = self._digests.digest(file.path)
        except OSError as error:
            raise unreadable(f"{file.where}: {file.path}", error) from error
        if file.sha256 and digest != file.sha256:
            raise RecipeError(
                f"{file.sha256_where or file.where}: model.{file.sha256_field}: {file.path} has the digest "
                f"{digest}, not {file.sha256}",
                fix="fetch the file again, or write its digest into the recipe if this is the right one",
            )
        return digest

    def _digest_folder(self, files: Sequence[InputFile]) -> str:
        names = [file.role.partition("/")[2] for file in files]
        try:
            return self._digests.digest_folder(files[0].folder, names)
        except OSError as error:
            raise unreadable(f"{files[0].where}: {error.filename}", error) from error

    def _list_causes(self, spec: StageSpec, key: StageKey) -> tuple[str, ...]:
        failure = find_failure(self.store, spec.id)
        if failure is not None and failure.key == key.digest:
            return (failure.text,)
        last = self.store.last_key(spec.recipe, spec.label)
        if last is None:
            return ("never ran",) if failure is None else (f"changed, and {failure.text}",)
        if last == key.digest:
            return ("its result is no longer in the store",)
        before = self.store.preimage(last)
        if before is None:
            return ("its last result is no longer in the store",)
        self._earlier[spec.id] = last
        described = self._describe_inputs(spec, before, key.preimage)
        return tuple(list_changes(before, key.preimage, described)) or ("changed",)

    def _describe_inputs(
        self, spec: StageSpec, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return the known changes of layers and kernels, by the stage that produces them."""
        described = {}
        if before["inputs"].get(_MODEL) != after["inputs"].get(_MODEL):
            described[import_model.NAME] = self._describe_layers(spec)
        files = [inputs.get(_KERNELS) for inputs in (before["inputs"], after["inputs"])]
        if all(files) and files[0] != files[1]:
            described[extract_tasks.NAME] = _describe_kernels(*map(self._read_kernels, files))
        return described

    def _describe_layers(self, spec: StageSpec) -> str:
        """Return which nodes were added or removed, or which weights changed shape; empty if unknown."""
        for need in spec.needs:
            last, new = self._earlier.get(need.stage_id), self.artifacts.get(need.stage_id)
            old = self.store.find(last) if last else None
            if old is None or new is None:
                continue
            facts = [find_facts(ImportFacts, artifact.facts) for artifact in (old, new)]
            if facts[0] and facts[1]:
                text = _describe_nodes(facts[0].nodes, facts[1].nodes)
                return text or _describe_shapes(self._read_shapes(old), self._read_shapes(new))
        return ""

    def _read_shapes(self, imported: Artifact) -> dict[str, tuple[int, ...]]:
        files = {file.name: file.digest for file in imported.files}
        try:
            weights = read_safetensors(self.store.blobs.path(files[import_model.PARAMS]))
        except (KeyError, OSError, TvmflowError):
            return {}
        return {name: array.shape for name, array in weights.items()}

    def _read_kernels(self, digest: str) -> dict[str, str]:
        """Return workload key -> kernel name; empty if unknown."""
        try:
            tasks = json.loads(read_regular(self.store.blobs.path(digest)))
            return {task["key"]: task["names"][0] for task in tasks}
        except (OSError, ValueError, LookupError, TypeError):
            return {}


def _describe_nodes(old: Iterable[str], new: Iterable[str]) -> str:
    before, after = (dict.fromkeys(filter(None, nodes)) for nodes in (old, new))
    added = name_some([node for node in after if node not in before])
    removed = name_some([node for node in before if node not in after])
    if added and removed:
        return f"the model has {added} in place of {removed}"
    return f"the model also has {added}" if added else removed and f"the model lacks {removed}"


def _describe_shapes(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    changed = [name for name in new if name in old and old[name] != new[name]]
    verb = "has a different shape" if len(changed) == 1 else "have different shapes"
    return f"{name_some(changed)} {verb}" if changed else ""


def _describe_kernels(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    added = [name for key, name in new.items() if key not in old]
    if not old or not new:
        return ""
    verb = f"new ({name_some(added)})" if added else "new"
    return f"{count_text(len(added), 'kernel')} {verb}, {len(new) - len(added)} reused"


def identify_tool(name: str, spec: StageSpec) -> str:
    """Return the identity of a distribution; EnvironmentProblem, with the stage, if it has none."""
    try:
        with explain_wait(IDENTITY_WAIT.format(name)):
            return packages.identity(name)
    except EnvironmentProblem as problem:
        raise type(problem)(f"{spec.id}: {problem.message}", fix=problem.fix) from None


def evaluate_plan(plan: Plan, store: LocalStore, forced: Iterable[str] = ()) -> PlanState:
    """Return the state of a plan before or after its run; stages in `forced` must run."""
    state = PlanState(store, forced)
    state.decide_all(plan)
    return state


def input_digests(spec: StageSpec, artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    """Return `<stage>/<file>` -> digest of each file that a stage reads from other stages."""
    return {
        f"{need.stage}/{name}": digest
        for need in spec.needs
        for name, digest in artifacts[need.stage_id].digests(need.files).items()
    }


def check_pinned(spec: StageSpec, artifact: Artifact) -> None:
    """Check the files of a result against a lock file; LockMismatch if they differ."""
    digests = artifact.digests(())
    for name, expected in spec.pinned:
        actual = digests.get(name, "(not made)")
        if actual != expected:
            raise LockMismatch(
                f"{spec.id}: {name} has the digest {actual}, and the lock file says {expected}",
                fix="`tvmflow run --check-reproducible` shows the first difference; "
                "nothing that depends on it was made or delivered",
            )


def _shorten(causes: tuple[str, ...]) -> str:
    heads = [_without_list(cause) if len(cause) > _MAX_CAUSE else cause for cause in causes]
    shown, more = "; ".join(heads[:_SHOWN_CAUSES]), len(causes) - _SHOWN_CAUSES
    return f"{shown}; and {more} more" if more > 0 else shown


def _without_list(cause: str) -> str:
    """Return a cause without the list after its colon, such as all settings of a search."""
    head, _, _ = cause.partition(": ")
    # a colon inside quotes, brackets or JSON precedes no list
    return cause if _ENCLOSING.intersection(head) else head
