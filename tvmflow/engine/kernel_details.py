"""Everything known about one kernel of a library, from stages, store and ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core import errors
from tvmflow.core.codec import without_empty
from tvmflow.core.errors import StageError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.fork_server import WITH_TVM, ForkServer
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.logs import explain_wait
from tvmflow.core.text import nearest
from tvmflow.core.types import Json
from tvmflow.engine.builds import list_kernel_calls, list_kernel_shares, read_kernel_times
from tvmflow.engine.report import ReportedFacts, StageReport, group_by_target
from tvmflow.planning.checks import LOCKED
from tvmflow.runtime.bundles import C_RUNTIME
from tvmflow.stages import build, extract_tasks, tune
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.build import CHOSEN_ROLE, BuildFacts, KernelCode, calls_text, make_code
from tvmflow.stages.extract_tasks import TASKS
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.tune import find_ledger_key
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.store.local import DamagedBlob, LocalStore
from tvmflow.tuning.ledger_folders import WorkloadTrials, list_target_folders, read_workload_trials
from tvmflow.tuning.trials import trial_id
from tvmflow.tuning.tuning_job import TuneFacts


class BuiltLibrary(NamedTuple):
    """A built library, named `RECIPE/TARGET`; `command` is the command that makes missing results.

    `keys` maps each stage's name to the key of its result. `problem` says why some facts are unreadable.
    """

    name: str
    command: str
    facts: KnownFacts
    keys: Mapping[str, str]
    problem: str = ""

    @property
    def built(self) -> BuildFacts:
        """The facts of the stage that built its code."""
        built = self.facts.get(BuildFacts)
        if built is None or self.problem:
            text = f"{self.name} in this record: {self.problem or f'no facts of {build.NAME}'}"
            raise UsageError(text, fix=f"`{self.command}` makes what is missing")
        return built


def list_libraries(stages: Iterable[StageReport], command: str) -> list[BuiltLibrary]:
    """Return the libraries that the stages have built; `command` makes missing results."""
    known = [stage for stage in stages if stage.facts]
    reported = ReportedFacts(known)
    libraries = []
    for (recipe, target), own in group_by_target(known).items():
        if build.NAME not in own:
            continue
        problems = (reported.problems.get(stage.stage_id, "") for stage in own.values())
        libraries.append(
            BuiltLibrary(
                name=f"{recipe}/{target}",
                command=command,
                # If the library is a part, `cut` comes after `import`, and its facts name the nodes.
                facts=reported.of(own.values()),
                keys={name: stage.key for name, stage in own.items()},
                problem=next(filter(None, problems), ""),
            )
        )
    return libraries


def list_rows(library: BuiltLibrary, store: LocalStore) -> list[KernelRow]:
    """Return the kernels of a library, the slowest first."""
    return list_kernel_rows(library.built, library.facts, _read_workload_names(library, store))


def _read_workload_names(library: BuiltLibrary, store: LocalStore) -> dict[str, str]:
    tasks = read_tasks(library.keys.get(extract_tasks.NAME, ""), store)
    return {name: task["names"][0] for task in tasks for name in task["names"]}


def read_tasks(key: str, store: LocalStore) -> list[dict[str, Json]]:
    """Return the workloads in a result of `extract_tasks`; empty if it is not in the store any more."""
    artifact = store.find(key) if key else None
    digest = artifact.digests((TASKS,)).get(TASKS) if artifact else None
    try:
        path = digest and store.blobs.verified_path(digest)
        tasks: list[dict[str, Json]] = json.loads(Path(path).read_bytes()) if path else []
    except (DamagedBlob, OSError, ValueError):
        return []
    return tasks


def find_kernel(libraries: Iterable[BuiltLibrary], name: str) -> dict[str, str]:
    """Return for each library that has it the kernel with this name, or the only one with this prefix."""
    names = {
        library.name: [
            kernel for kernels in library.built.schedule_rules.values() for kernel in kernels
        ]
        for library in libraries
    }
    known = list(dict.fromkeys(kernel for kernels in names.values() for kernel in kernels))
    matches = [kernel for kernel in known if kernel == name] or [
        kernel for kernel in known if name and kernel.startswith(name)
    ]
    if len(matches) == 1:
        return {library: matches[0] for library, kernels in names.items() if matches[0] in kernels}
    if matches:
        raise UsageError(
            f"{quoted(name)} is the beginning of {len(matches)} kernels: {names_text(matches)}",
            fix="give more of the name",
        )
    # The name may be a mistyped prefix of a kernel's name, so prefixes of the same length are compared, too.
    beginnings = {kernel[: len(name)]: kernel for kernel in known} | {k: k for k in known}
    meant = [beginnings[match] for match in nearest(name, beginnings)]
    raise UsageError(
        f"there is no kernel {quoted(name)}" + "".join(f"; did you mean '{m}'?" for m in meant),
        fix=f"the kernels are: {names_text(known)}",
    )


class KernelDetails(NamedTuple):
    """What stages know about a kernel; None means unknown.

    `nodes` names the nodes of each call. `untuned_s` and `tuned_s` are the seconds of a call measured in isolation:
    with the rule's schedule, and with the search's (None if the search found no better one). `flops` are the operations
    of a call, and `least_s` is its time at the roofline. The search measured `trials` schedules; `failed` counts
    failures, and the best took `best_trial_s`. `size_speedups` are the speedups over the rule's schedule at several
    sizes; other times are then geometric means, and `flops` and `least_s` are unknown.
    """

    row: KernelRow
    nodes: tuple[tuple[str, ...], ...] = ()
    untuned_s: float | None = None
    tuned_s: float | None = None
    flops: float | None = None
    peak_gflops: float | None = None
    least_s: float | None = None
    trials: int | None = None
    failed: int = 0
    best_trial_s: float | None = None
    size_speedups: Mapping[str, float] = MappingProxyType({})

    @property
    def call_s(self) -> float | None:
        """The seconds of a call in the library; if unknown, those of a call measured in isolation."""
        if self.row.seconds is not None and self.row.calls:
            return self.row.seconds / self.row.calls
        return self.untuned_s if self.tuned_s is None else self.tuned_s

    @property
    def gflops(self) -> float | None:
        """Its arithmetic throughput in GFLOP/s."""
        return self.flops / self.call_s / 1e9 if self.flops and self.call_s else None

    @property
    def roofline_share(self) -> float | None:
        """Its throughput as a fraction of the roofline."""
        return min(self.least_s / self.call_s, 1.0) if self.least_s and self.call_s else None

    def to_json(self) -> dict[str, Json]:
        """Return the details as plain JSON."""
        derived = {"gflops": self.gflops, "roofline_share": self.roofline_share}
        own = {name: value for name, value in self._asdict().items() if name != "row"}
        return without_empty({**self.row._asdict(), **own, **derived}, ("size_speedups",))


def read_details(library: BuiltLibrary, kernel: str, store: LocalStore) -> KernelDetails:
    """Return everything that a library's stages know about a kernel."""
    facts, names = library.facts, _read_workload_names(library, store)
    row = next(row for row in list_rows(library, store) if row.name == kernel)
    workload = names.get(kernel, kernel)
    search, chosen = facts.get(TuneFacts), facts.get(PickBestFacts)
    tuned = next((w for w in search.workloads if w.name == workload), None) if search else None
    judged = next((k for k in chosen.kernels if k.name == workload), None) if chosen else None
    untuned = judged or tuned
    is_dynamic = bool(tuned and tuned.sizes)
    return KernelDetails(
        row,
        nodes=tuple(call.nodes for call in list_kernel_calls(facts).get(kernel, ())),
        untuned_s=_seconds(untuned and untuned.untuned_us),
        tuned_s=_seconds(judged and judged.tuned_us),
        flops=None if is_dynamic else (judged and judged.flops) or None,
        peak_gflops=chosen and chosen.peak_gflops,
        least_s=None if is_dynamic else _seconds(tuned and tuned.roofline_us),
        trials=tuned and tuned.trials,
        failed=tuned.failed if tuned else 0,
        best_trial_s=_seconds(tuned and tuned.best_us),
        size_speedups=chosen.size_speedups.get(workload, {}) if chosen else {},
    )


def _seconds(us: float | None) -> float | None:
    return us / 1e6 if us else None


class ChosenTrials(NamedTuple):
    """The ledger's trials of a kernel's workload, by target.

    `chosen` is the id of the trial whose schedule the library uses; empty if it uses a rule's schedule.
    """

    chosen: str
    workloads: tuple[WorkloadTrials, ...]

    def select(self) -> list[WorkloadTrials]:
        """Return the workloads with only the chosen trial, or with the best one if a rule's schedule is used."""
        selected = []
        for workload in self.workloads:
            trials = [t for t in workload.trials if t.id == self.chosen] or workload.trials[:1]
            if trials and (not self.chosen or trials[0].id == self.chosen):
                selected.append(workload._replace(trials=trials))
        return selected


def find_trials(library: BuiltLibrary, row: KernelRow, store: LocalStore) -> ChosenTrials:
    """Return the trials of a kernel for the target of the library's tuning, if known."""
    inputs = _list_inputs(library, store)
    path = inputs.get(CHOSEN_ROLE)
    chosen = json.loads(Path(path).read_bytes()) if path else {}
    trace = chosen.get(row.workload)
    preimage = store.preimage(library.keys.get(tune.NAME) or "-") or {}
    target = find_ledger_key(preimage)
    workloads = [
        read_workload_trials(folder, key, path)
        for folder in list_target_folders(Path(store.ledger))
        if target in ("", folder.key)
        for key, path in folder.workload_files([row.workload])
        if row.workload
    ]
    return ChosenTrials(trial_id(trace) if trace else "", tuple(workloads))


def make_kernel_code(
    library: BuiltLibrary,
    kernel: str,
    store: LocalStore,
    *,
    with_assembly: bool = False,
    with_candidates: bool = False,
) -> KernelCode:
    """Return the code of a kernel, compiled again from the inputs of the library's build."""
    payload = {
        "settings": _read_preimage(library, store)["settings"],
        "inputs": _list_inputs(library, store),
        "kernel": kernel,
        "is_plain_c": library.built.runtime == C_RUNTIME,
        "with_assembly": with_assembly,
        "with_candidates": with_candidates,
    }
    timeout_s = build.TRAITS.timeout_s
    text = "lowering the model once more: some seconds, or a minute for a large one"
    with explain_wait(text), ForkServer.start(WITH_TVM) as fork_server:
        outcome = fork_server.call(make_code, payload, timeout_s=timeout_s)
    if outcome.kind != "ok":
        error = getattr(errors, outcome.error, StageError)
        text = f"{library.name}: the code of {kernel} cannot be made again: {outcome.message}"
        raise error(text, fix=outcome.fix)
    return KernelCode(**outcome.value)


def _read_preimage(library: BuiltLibrary, store: LocalStore) -> Mapping[str, Json]:
    preimage = store.preimage(library.keys[build.NAME])
    if preimage is None:
        raise _lost(library, store)
    return preimage


def _list_inputs(library: BuiltLibrary, store: LocalStore) -> dict[str, str]:
    inputs: Mapping[str, str] = _read_preimage(library, store)["inputs"]
    try:
        return {role: _find_input(digest, store) for role, digest in inputs.items()}
    except DamagedBlob as error:
        raise _lost(library, store) from error


def _find_input(digest: str, store: LocalStore) -> str:
    # A locked run took its schedules from the lock file.
    locked = Path(store.root, LOCKED, digest)
    is_locked = locked.is_file() and hash_file(str(locked)) == digest
    return str(locked) if is_locked else store.blobs.verified_path(digest)


def _lost(library: BuiltLibrary, store: LocalStore) -> UsageError:
    return UsageError(
        f"{store.root} no longer has all files that {library.name} was built from",
        fix=f"`{library.command}` makes it again",
    )


class KernelRow(NamedTuple):
    """A kernel of a library. None means unknown.

    `share` is the kernel's share of an inference's time (0 to 1), and `seconds` is `share` times the latency. `calls`
    is the number of calls per inference, and `alone_s` is `calls` times the time per call that `pick_best` measured.
    `schedule` is `tuned` or a rule's name, `workload` a key (empty without tuning), and `nodes` the names of the
    model's nodes.
    """

    name: str
    share: float | None
    calls: int | None
    seconds: float | None
    alone_s: float | None
    schedule: str
    workload: str
    nodes: str


def list_kernel_rows(
    built: BuildFacts, facts: KnownFacts, workload_names: Mapping[str, str] = MappingProxyType({})
) -> list[KernelRow]:
    """Return the kernels of a build, slowest first; `workload_names` holds the names of equal kernels."""
    rules = {name: rule for rule, names in built.schedule_rules.items() for name in names}
    calls = list_kernel_calls(facts)
    shares = {kernel.name: kernel.share for kernel in list_kernel_shares(facts)}
    times = read_kernel_times(facts.get(Verdict))
    chosen, search = facts.get(PickBestFacts), facts.get(TuneFacts)
    measured = {kernel.name: kernel for kernel in chosen.kernels} if chosen else {}
    workloads = {workload.name: workload.key for workload in search.workloads} if search else {}
    rows = []
    for name, rule in rules.items():
        workload = workload_names.get(name, name)
        own = measured.get(workload)
        count = len(calls[name]) if name in calls else own and own.calls
        alone_s = count * own.call_us / 1e6 if count is not None and own else None
        measured_times = (shares.get(name), count, times.get(name), alone_s)
        nodes = calls_text(calls.get(name, ()))
        rows.append(KernelRow(name, *measured_times, rule, workloads.get(workload, ""), nodes))
    return sorted(rows, key=lambda row: (-(row.share or 0.0), -(row.alone_s or 0.0), row.name))
