"""Which stages of a plan are up to date, which must run, and why: one truth for plan, explain and run."""

from tvmflow import tools
from tvmflow.errors import LockMismatch, RecipeError
from tvmflow.keys import difference, key_of
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import LocalStore
from tvmflow.values import Artifact, Decision, InputFile, Plan, StageKey, StageSpec

# What one line has room for; `tvmflow explain` shows them all.
_SHOWN_CAUSES = 3


class Survey:
    """What is known of a plan's stages so far. Filled in topological order, first by `look`, then by the run."""

    def __init__(self, store: LocalStore, digests: FileDigests) -> None:
        self._store = store
        self._digests = digests
        self._tools: dict[str, str] = {}
        self.machine = tools.machine()
        self.keys: dict[str, StageKey] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.decisions: dict[str, Decision] = {}

    def look(self, plan: Plan) -> None:
        """Decide about every stage as far as that is possible before anything runs."""
        for spec in plan.stages:
            self.decide(spec)

    def decide(self, spec: StageSpec) -> Decision:
        """Decide about one stage; those that it needs must have been decided about before."""
        makers = [need.maker for need in spec.needs if need.stage_id not in self.artifacts]
        if makers:
            decision = Decision(spec.id, "wait", f"after {' and '.join(dict.fromkeys(makers))}")
        else:
            key = self._key(spec)
            self.keys[spec.id] = key
            artifact = self._store.find(key.digest)
            if artifact is not None:
                check_pinned(spec, artifact)
                self.artifacts[spec.id] = artifact
                decision = Decision(spec.id, "hit", "unchanged")
            else:
                causes = self._causes(spec, key)
                decision = Decision(spec.id, "run", _in_short(causes), causes)
        self.decisions[spec.id] = decision
        return decision

    def forget(self, spec: StageSpec) -> None:
        """A stage's result turned out to be damaged."""
        self.artifacts.pop(spec.id, None)

    def _key(self, spec: StageSpec) -> StageKey:
        inputs = self.outside(spec)
        for need in spec.needs:
            found = self.artifacts[need.stage_id].digests(need.files)
            inputs.update({f"{need.stage}/{name}": digest for name, digest in found.items()})
        return key_of(spec, inputs, self.tools(spec), self.machine)

    def outside(self, spec: StageSpec) -> dict[str, str]:
        """Role -> sha256 of the files from outside the store that count. Raises RecipeError."""
        return {file.role: self._digest(file) for file in spec.files if file.keyed}

    def tools(self, spec: StageSpec) -> dict[str, str]:
        """The identity of at least those packages that the stage uses."""
        for name in spec.tools:
            if name not in self._tools:
                self._tools[name] = self._tool(name)
        return self._tools

    def _tool(self, distribution: str) -> str:
        """A tool's identity; the digest of its RECORD is remembered by the record's own content stamp."""
        try:
            version, record = tools.record_file(distribution)
        except tools.NotInstalled:
            return "absent"
        note = self._digests.digest(record)
        known = self._store.read_note("facts", f"tool-{note}")
        if known is None:
            known = tools.digest_record(record)
            self._store.write_note(known, "facts", f"tool-{note}")
        return f"{version}+{known}"

    def _digest(self, file: InputFile) -> str:
        if file.url:
            return file.sha256
        try:
            digest = self._digests.digest(file.path)
        except OSError as error:
            raise RecipeError(f"{file.where}: {file.path}: {error.strerror}") from error
        if file.sha256 and digest != file.sha256:
            raise RecipeError(
                f"{file.sha256_where or file.where}: model.sha256: {file.path} has the digest {digest}, "
                f"not {file.sha256}",
                fix="fetch the file again, or write its digest into the recipe if this is the right one",
            )
        return digest

    def _causes(self, spec: StageSpec, key: StageKey) -> tuple[str, ...]:
        last = self._store.last_key(spec.recipe, spec.label)
        if last is None:
            return ("never ran",)
        if last == key.digest:
            return ("its result is no longer in the store",)
        before = self._store.preimage(last)
        if before is None:
            return ("its last result is no longer in the store",)
        return tuple(difference(before, key.preimage)) or ("changed",)


def surveyed(plan: Plan, store: LocalStore) -> Survey:
    """What is known of a plan before anything of it runs, or after all of it did. Raises what `decide` does."""
    survey = Survey(store, FileDigests(store))
    survey.look(plan)
    return survey


def check_pinned(spec: StageSpec, artifact: Artifact) -> None:
    """Raises LockMismatch for a result with other files than the lock names."""
    found = artifact.digests(())
    for name, digest in spec.pinned:
        if found.get(name) != digest:
            raise LockMismatch(
                f"{spec.id}: {name} has the digest {found.get(name, '(not made)')}, and the lock says {digest}",
                fix="`tvmflow run --check-reproducible` tells what is different in it; "
                "nothing that depends on it was made or delivered",
            )


def _in_short(causes: tuple[str, ...]) -> str:
    more = len(causes) - _SHOWN_CAUSES
    shown = "; ".join(causes[:_SHOWN_CAUSES])
    return f"{shown}; and {more} more" if more > 0 else shown
