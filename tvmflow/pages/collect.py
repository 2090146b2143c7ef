"""Content of a run's page: from its record, and from results that the store still has.

Results that garbage collection removed are listed as missing.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, duration_text, names_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import RecipeOrigin
from tvmflow.engine.builds import (
    Build,
    list_kernel_calls,
    list_kernel_shares,
    read_kernel_times,
    read_tuning_speedup,
)
from tvmflow.engine.kernel_details import read_tasks
from tvmflow.engine.report import (
    SUCCEEDED,
    ReportedFacts,
    StageReport,
    group_by_target,
    list_known_needs,
)
from tvmflow.engine.run_records import RunRecord, SourceText, list_runs
from tvmflow.pages.content import (
    Gate,
    Kernel,
    Library,
    LibraryKernels,
    Page,
    Progress,
    RecipeText,
    StageEntry,
)
from tvmflow.stages import extract_tasks, tune
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.quantize import QuantizeFacts
from tvmflow.stages.tune import find_ledger_key
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.store.local import ActionRecord, LocalStore
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.ledger_folders import read_records
from tvmflow.tuning.trials import Trial, sort_by_record
from tvmflow.tuning.tuning_job import TuneFacts, WorkloadFacts

_log = logging.getLogger(__name__)

_BUFFER: Final = re.compile(r"(?:bfloat|float|uint|int|bool)(\d*)\[([0-9×]*)\]")
_REUSED: Final = frozenset({"hit", "fetched"})


def list_stages(reports: Sequence[StageReport], store: LocalStore | None) -> tuple[StageEntry, ...]:
    """Return the stages of a run, with their inputs and the time saved by reused results."""
    known = {report.stage_id for report in reports}
    entries = []
    for report in reports:
        record = store.record(report.key) if store and report.key else None
        parts = (part for part in _list_parts(report, record) if part in known)
        saved_s = record.seconds if report.outcome in _REUSED and record else 0.0
        entries.append(StageEntry(report, saved_s, (*list_known_needs(report, known), *parts)))
    return tuple(entries)


def _list_parts(report: StageReport, record: ActionRecord | None) -> Iterator[str]:
    inputs = record.preimage.get("inputs", {}) if record else {}
    for role in dict.fromkeys(inputs):
        # A role `STAGE/PART/FILE` is a file of a part.
        stage, _, rest = role.partition("/")
        part, slash, _ = rest.partition("/")
        if slash:
            yield f"{report.recipe}:{stage}/{report.target}.{part}"


def read_recipes(origins: Iterable[RecipeOrigin]) -> tuple[RecipeText, ...]:
    """Return the current text of each recipe file."""
    recipes = []
    for path in dict.fromkeys(origin.path for origin in origins):
        text, note = "", ""
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            note = f"It cannot be read: {error.strerror}."
        recipes.append(RecipeText(shortest_path(path), text, note))
    return tuple(recipes)


def list_kernels(
    reports: Sequence[StageReport], store: LocalStore | None
) -> tuple[LibraryKernels, ...]:
    """Return the known facts of the kernels of each library."""
    facts = ReportedFacts(reports)
    # Facts of an old or damaged record may be unreadable, and are then left out.
    for problem in facts.problems.values():
        _log.warning("%s", problem)
    libraries = (
        _read_kernels(f"{recipe}/{target}", stages, facts.of(stages.values()), store)
        for (recipe, target), stages in group_by_target(reports).items()
        if target
    )
    return tuple(library for library in libraries if library.kernels)


def list_quantized(reports: Sequence[StageReport]) -> Mapping[str, QuantizeFacts]:
    """Return the facts of each quantized model with known layers, by its library's label."""
    reported = ReportedFacts(reports)
    known = {
        f"{recipe}/{target}": reported.of(stages.values()).get(QuantizeFacts)
        for (recipe, target), stages in group_by_target(reports).items()
        if target
    }
    return {label: facts for label, facts in known.items() if facts is not None and facts.layers}


def _read_kernels(
    label: str, stages: Mapping[str, StageReport], facts: KnownFacts, store: LocalStore | None
) -> LibraryKernels:
    """Return the kernels of one library, from its search or else from its profile."""
    search = facts.get(TuneFacts)
    if search is not None and search.workloads:
        return _read_tuned(label, stages, facts, search, store)
    times = _read_times(facts)
    kernels = (
        _time_in_library(Kernel(name, nodes), times, (name,))
        for name, _, nodes in list_kernel_shares(facts)
    )
    return LibraryKernels(label, tuple(kernels))


def _read_times(facts: KnownFacts) -> dict[str, tuple[float, float | None]]:
    times = read_kernel_times(facts.get(Verdict))
    return {
        kernel.name: (kernel.share, times.get(kernel.name)) for kernel in list_kernel_shares(facts)
    }


def _time_in_library(
    kernel: Kernel, times: Mapping[str, tuple[float, float | None]], names: Collection[str]
) -> Kernel:
    """Add the time in the library to a kernel; `names` are all kernels of its workload."""
    if not names or not times.keys() >= set(names):
        return kernel
    seconds = [times[name][1] for name in names]
    return kernel._replace(
        share=sum(times[name][0] for name in names),
        library_s=None if None in seconds else sum(filter(None, seconds)) / kernel.calls,
    )


def _read_tuned(
    label: str,
    stages: Mapping[str, StageReport],
    facts: KnownFacts,
    search: TuneFacts,
    store: LocalStore | None,
) -> LibraryKernels:
    """Return the workloads of a search, slowest first; times of `pick_best` take precedence."""
    trials, buffers, notes = _read_trials(stages[tune.NAME], search.workloads, store)
    tasks = stages.get(extract_tasks.NAME)
    names = {
        str(task["key"]): tuple(map(str, task["names"]))
        for task in (read_tasks(tasks.key, store) if tasks and store else ())
    }
    chosen, calls, times = facts.get(PickBestFacts), list_kernel_calls(facts), _read_times(facts)
    by_name = {kernel.name: kernel for kernel in (chosen.kernels if chosen else ())}
    kernels = []
    for workload in search.workloads:
        again, own = by_name.get(workload.name), names.get(workload.key, ())
        nodes = (node for name in own for call in calls.get(name, ()) for node in call.nodes)
        kernel = Kernel(
            name=workload.name,
            nodes=tuple(dict.fromkeys(nodes)),
            calls=workload.calls,
            flops=again and again.flops,
            bytes=count_bytes(buffers.get(workload.key, ())),
            untuned_s=_seconds((again or workload).untuned_us),
            tuned_s=_seconds(again.tuned_us if again else workload.best_us),
            least_s=_seconds(workload.roofline_us),
            curve=_best_so_far(trials.get(workload.key, ())),
            trials=workload.trials,
        )
        timed = _time_in_library(kernel, times, own)
        # The library was timed at one size only, but times of the search are means over several sizes.
        kernels.append(timed._replace(library_s=None) if workload.sizes else timed)
    kernels.sort(key=lambda one: (-(one.share or 0.0), -one.calls * (one.seconds or 0.0)))
    kept = {kernel.name for kernel in kernels if kernel.tuned_s is not None}
    return LibraryKernels(
        label=label,
        kernels=tuple(kernels),
        peak_gflops=chosen and chosen.peak_gflops,
        progress=make_progress(search.workloads, trials, kept),
        notes=notes,
        kept=len(kept),
        speedup=read_tuning_speedup(facts.get(Verdict)),
    )


def _read_trials(
    report: StageReport, workloads: Sequence[WorkloadFacts], store: LocalStore | None
) -> tuple[dict[str, Sequence[Trial]], dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the search's trials and the kernels' parameters by workload key, and notes."""
    if store is None:
        return {}, {}, ("Tuning curves need the store that the libraries were made with.",)
    record = store.record(report.key) if report.key else None
    target = find_ledger_key(record.preimage) if record else ""
    if record is None or not target:
        lost = (
            "The result of tune is no longer in the store, and with it which trials it chose from."
        )
        return {}, {}, (lost,)
    ledger = Ledger(Path(store.ledger, target))
    trials, buffers = dict[str, Sequence[Trial]](), dict[str, tuple[str, ...]]()
    for key in (workload.key for workload in workloads):
        records = read_records(Path(store.ledger, target, f"{key}.jsonl")).records
        measured = (t for t in records.trials.values() if t.when[:19] <= record.made[:19])
        trials[key] = sort_by_record(measured)
        buffers[key] = ledger.description(key).buffers
    missing = sum(max(w.trials - len(trials[w.key]), 0) for w in workloads)
    note = f"No longer in the ledger: {count_text(missing, 'trial')} of this search."
    return trials, buffers, (note,) if missing else ()


def _seconds(us: float | None) -> float | None:
    return us / 1e6 if us else None


def _best_so_far(trials: Sequence[Trial]) -> tuple[float, ...]:
    """Return the best time after each trial, starting with the first successful trial."""
    best, curve = math.inf, []
    for trial in trials:
        best = min(best, trial.seconds)
        if best < math.inf:
            curve.append(best)
    return tuple(curve)


def count_bytes(buffers: Sequence[str]) -> float | None:
    """Return the bytes of a kernel's parameters, such as `float32[1×3×8×8]`, or None if any is unknown."""
    matches = [_BUFFER.fullmatch(buffer) for buffer in buffers]
    if not matches or not all(matches):
        return None
    return sum(
        int(match[1] or 8) / 8 * math.prod(int(extent) for extent in match[2].split("×") if extent)
        for match in matches
        if match
    )


def make_progress(
    workloads: Sequence[WorkloadFacts], trials: Mapping[str, Sequence[Trial]], kept: Collection[str]
) -> tuple[Progress, ...]:
    """Return the progress of a search: the total time of all kernels after each trial.

    A kernel counts with its untuned time until a trial is faster, or always if its schedule was not `kept`. Kernels
    with unknown untuned time do not count.
    """
    kept_keys = {w.key for w in workloads if w.name in kept}
    best = {w.key: w.untuned_us / 1e6 for w in workloads if w.untuned_us}
    calls = {w.key: w.calls for w in workloads}
    ordered = sorted(
        ((key, trial) for key, measured in trials.items() if key in best for trial in measured),
        key=lambda entry: (entry[1].when, entry[1].id),
    )
    if not ordered:
        return ()
    total = sum(calls[key] * seconds for key, seconds in best.items())
    is_timed = all(trial.ran for _, trial in ordered)
    measuring_s, progress = 0.0, [Progress(0, 0.0, total)]
    for number, (key, trial) in enumerate(ordered, 1):
        measuring_s += trial.ran[1] - trial.ran[0] if is_timed else 0.0
        if key in kept_keys and trial.seconds < best[key]:
            total -= calls[key] * (best[key] - trial.seconds)
            best[key] = trial.seconds
        elif number < len(ordered):
            continue
        progress.append(Progress(number, measuring_s, total))
    return tuple(progress)


_SHOWN_NAMES: Final = 3


def describe_run(record: RunRecord, store: LocalStore) -> Page:
    """Return the page of a run without a comparison."""
    names = list(dict.fromkeys(map(_recipe_name, record.builds))) or ["Run"]
    more = f" and {count_text(len(names) - _SHOWN_NAMES, 'more recipe')}"
    return Page(
        kind="Run",
        gates=tuple(Gate(build.name, *gate) for build in record.builds for gate in build.gates),
        title=", ".join(names[:_SHOWN_NAMES]) + (more if len(names) > _SHOWN_NAMES else ""),
        about=tuple(_list_facts(record)),
        libraries=tuple(Library(build, _recipe_name(build)) for build in record.builds),
        notes=tuple(_list_notes(record)),
        kernels=list_kernels(record.stages, store),
        quantized=list_quantized(record.stages),
        stages=list_stages(record.stages, store),
        recipes=tuple(map(_describe_source, record.sources)),
        provenance=tuple(_list_provenance(record, store)),
    )


def find_previous(record: RunRecord, store: LocalStore) -> RunRecord | None:
    """Return the last earlier run with a latency of any of the run's libraries."""
    timed = {build.name for build in record.builds if build.latency_s is not None}
    for candidate in list_runs(store).runs:
        is_older = candidate.began_s < record.began_s
        if is_older and any(b.name in timed and b.latency_s is not None for b in candidate.builds):
            return candidate
    return None


def _recipe_name(build: Build) -> str:
    return build.recipe.removesuffix(f"-{build.variant}") if build.variant else build.recipe


def time_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as text in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _list_facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "run", record.id
    yield "when", time_text(record.began_s)
    yield "took", duration_text(record.seconds)
    yield "command", " ".join(["tvmflow", *record.argv])
    machine = record.machine
    yield "machine", f"{machine.name}: {machine.cpu}, {count_text(machine.cpus, 'CPU')}"
    yield "exit code", str(record.exit_code)
    commits = {source.commit: source.clean for source in record.recipes if source.commit}
    for commit, clean in commits.items():
        yield "commit", commit[:12] + ("" if clean == "yes" else " with changes")


def _list_notes(record: RunRecord) -> Iterator[str]:
    if record.message:
        yield record.message
    names: dict[str, list[str]] = {}
    for build in record.builds:
        for text in (*build.problems, *build.warnings):
            names.setdefault(text, []).append(build.name)
    yield from (f"{names_text(own, _SHOWN_NAMES)}: {text}" for text, own in names.items())
    yield from (f"A damaged file was set aside: {path}" for path in record.damage)


def _describe_source(source: SourceText) -> RecipeText:
    path = shortest_path(source.path)
    if not source.text:
        return RecipeText(path, "", "Its text is too large for the record of a run.")
    try:
        is_same = hash_file(source.path) == source.sha256
    except OSError:
        return RecipeText(path, source.text, "The file is no longer there.")
    note = "" if is_same else "The file has changed since: this is what the run read."
    return RecipeText(path, source.text, note)


def _list_provenance(
    record: RunRecord, store: LocalStore
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    tools, files, lost = {"tvmflow": record.tvmflow}, dict[str, str](), 0
    for stage in record.stages:
        result = store.record(stage.key) if stage.key else None
        if result is None:
            # Rejected results have a key, but are not stored.
            lost += bool(stage.key) and stage.outcome in SUCCEEDED
            continue
        tools |= result.preimage.get("tools", {})
        inputs = result.preimage.get("inputs", {}).items()
        files |= {f"{stage.recipe}: {role}": digest for role, digest in inputs if "/" not in role}
    if lost:
        tools["note"] = f"{count_text(lost, 'result')} of this run no longer in the store"
    yield "Tools", tuple(sorted(tools.items()))
    yield "Files from outside, sha256", tuple(files.items())
    sources = [(Path(source.path).name, source.sha256) for source in record.sources]
    yield "Recipes and pipelines, sha256", tuple(sources)
    yield "Delivered to", tuple((b.name, b.folder) for b in record.builds if b.folder)
