"""The decisions about the stages of a plan: up to date, or must run, and why.

They are the one truth for plan, explain and run.
"""

from collections.abc import Iterable, Mapping, Sequence

from tvmflow.core import packages
from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, LockMismatch, RecipeError
from tvmflow.core.keys import group_files, list_changes, stage_key
from tvmflow.core.slow_steps import IDENTITY_WAIT, explain_wait
from tvmflow.core.types import Artifact, Decision, InputFile, Plan, StageKey, StageSpec
from tvmflow.store.failures import find_failure
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore

# One line has room for so many; `tvmflow explain` shows them all.
_SHOWN_CAUSES = 3
_MAX_CAUSE = 80
FORCED = "forced by --force"
"""The reason of a stage that runs although its result is in the store."""


class PlanState:
    """The state of a plan's stages: keys, results and decisions by stage id, as far as known.

    It is filled in topological order: first by `decide_all`, then by the run.

    Attributes:
        forced: The stages that must run also if their results are in the store, and why.
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

    def decide_all(self, plan: Plan) -> None:
        """Decide about every stage, as far as that is possible before anything runs.

        Raises:
            RecipeError: when a file cannot be read, or has another digest than the recipe says.
            EnvironmentProblem: when a tool is not installed or cannot be identified.
            LockMismatch: when a result of a locked run has other files than its lock file says.
        """
        # What is missing for the last stage is better reported before the first one runs.
        for spec in plan.stages:
            self.tool_identities(spec)
        for spec in plan.stages:
            self.decide(spec)

    def decide(self, spec: StageSpec) -> Decision:
        """Decide about one stage, after those that it needs. Raises what `decide_all` does."""
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
        """Return the result that a stage would have, if it is in the store.

        It follows from these results of the stages that it needs.
        """
        return self.store.find(*self._compute_key(spec, artifacts))

    def digest_files(self, spec: StageSpec) -> dict[str, str]:
        """Return the sha256 of the files from outside the store that are part of the key, by name.

        The names are those in the key.

        Raises:
            RecipeError: when one cannot be read, or has another digest than the recipe says.
        """
        groups = group_files(spec.files)
        return {
            name: self._digest_folder(files) if files[0].folder else self._digest(files[0])
            for name, files in groups.items()
        }

    def tool_identities(self, spec: StageSpec) -> dict[str, str]:
        """Return the identity of at least those distributions that the stage uses.

        Raises:
            EnvironmentProblem: when one is not installed or cannot be identified.
        """
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
        """Return one digest of many files in a folder."""
        folder, where = files[0].folder, files[0].where
        names = [file.role.partition("/")[2] for file in files]
        try:
            return self._digests.digest_folder(folder, names)
        except OSError as error:
            raise unreadable(f"{where}: {error.filename}", error) from error

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
        return tuple(list_changes(before, key.preimage)) or ("changed",)


def identify_tool(name: str, spec: StageSpec) -> str:
    """Return the identity of a distribution that a stage uses.

    Raises:
        EnvironmentProblem: when it is not installed or cannot be identified.
    """
    try:
        with explain_wait(IDENTITY_WAIT.format(name)):
            return packages.identity(name)
    except EnvironmentProblem as problem:
        raise type(problem)(f"{spec.id}: {problem.message}", fix=problem.fix) from None


def evaluate_plan(plan: Plan, store: LocalStore, forced: Iterable[str] = ()) -> PlanState:
    """Return the state of a plan before anything of it runs, or after all of it did.

    The stages `forced` must run also if their results are there.

    Raises:
        TvmflowError: as `PlanState.decide_all` does.
    """
    state = PlanState(store, forced)
    state.decide_all(plan)
    return state


def input_digests(spec: StageSpec, artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    """Return the digest of each file of other stages that a stage reads, by `<stage>/<file>`."""
    return {
        f"{need.stage}/{name}": digest
        for need in spec.needs
        for name, digest in artifacts[need.stage_id].digests(need.files).items()
    }


def check_pinned(spec: StageSpec, artifact: Artifact) -> None:
    """Check the files of a result against those that a lock file names.

    Raises:
        LockMismatch: when one is missing or has another digest.
    """
    digests = artifact.digests(())
    for name, expected in spec.pinned:
        actual = digests.get(name, "(not made)")
        if actual != expected:
            raise LockMismatch(
                f"{spec.id}: {name} has the digest {actual}, and the lock file says {expected}",
                fix="`tvmflow run --check-reproducible` shows the first difference; "
                "nothing that depends on it was made or delivered",
            )


def _shorten_cause(cause: str) -> str:
    """Return a cause without a long list at its end, as of all settings that a search brings with it."""
    head, colon, _ = cause.partition(": ")
    return head if colon and len(cause) > _MAX_CAUSE else cause


def _shorten(causes: tuple[str, ...]) -> str:
    more = len(causes) - _SHOWN_CAUSES
    shown = "; ".join(map(_shorten_cause, causes[:_SHOWN_CAUSES]))
    return f"{shown}; and {more} more" if more > 0 else shown
