"""Builds: what a run produced for each recipe and target, from the facts of its stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from tvmflow.core.dimensions import sizes_text
from tvmflow.core.statistics import FEW_PAIRS_MARGIN, MIN_PAIRS, Judgement, judge_ratio
from tvmflow.core.types import Json
from tvmflow.engine.report import (
    SKIPPED,
    STOPPED,
    SUCCEEDED,
    ReportedFacts,
    RunReport,
    StageReport,
    sum_known,
)
from tvmflow.stages import STAGES, verify
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.build import TUNED, BuildFacts, KernelCall, find_kernel_nodes
from tvmflow.stages.export import ExportFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.quantize import QuantizeFacts, cost_text
from tvmflow.stages.tune import describe_end
from tvmflow.stages.verify.verdict import (
    Latency,
    SizeVerdict,
    Verdict,
    find_fixed_latency,
    largest,
    largest_error,
    list_compared,
    list_measured,
    shown_latency,
    sort_sizes,
)
from tvmflow.stages.verify.verdict import Speedup as MeasuredSpeedup
from tvmflow.stages.verify.verdict_text import list_gates
from tvmflow.tuning.tuning_job import TuneFacts

BuildVerdict = Literal["verified", "rejected", "not verified"]

_SHOWN_KERNELS: Final = 3
# Warnings begin with `NOT`, `WITHOUT` or `WARNING`; shorter words in capitals name kernels or runtimes (`A`, `VM`).
_SHORTEST_CAPITALS: Final = 3


class Speedup(NamedTuple):
    """A speedup: the median, its lower and upper limit, and the number of interleaved pairs."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def judgement(self) -> Judgement:
        """The judgement of the measurements: `more` means faster, by more than the noise."""
        margin = 1 + (0.0 if self.pairs >= MIN_PAIRS else FEW_PAIRS_MARGIN)
        return judge_ratio(self.median, self.low / margin, self.high * margin)


class Peer(NamedTuple):
    """Another runtime, timed in alternation with the library.

    `speedup` is the speedup of the library over this runtime. `latency_s` is the library's latency times the speedup.
    `differs` says that this runtime's outputs differ from the reference's.
    """

    name: str
    latency_s: float
    speedup: Speedup | None = None
    differs: bool = False


class KernelShare(NamedTuple):
    """A kernel: its share of the time of a call (0 to 1), and the nodes that it computes."""

    name: str
    share: float
    nodes: tuple[str, ...] = ()


class SizeResult(NamedTuple):
    """The result of `verify` for one choice of sizes of a library's dimensions.

    Latencies are medians of a call in seconds; `error` is the largest absolute error of any output. `fixed` means a
    library built for only these sizes.
    """

    sizes: str
    passed: bool
    error: float | None = None
    latency_s: float | None = None
    reference_latency_s: float | None = None
    fixed_latency_s: float | None = None


class Tolerance(NamedTuple):
    """The tolerance for an element: relative, and absolute (that of the least strict output)."""

    rtol: float
    atol: float


class CheckedLimit(NamedTuple):
    """A gate of a recipe: its field, the limit, the measured value, and whether it passed."""

    gate: str
    limit: str
    value: str
    state: str


class Build(NamedTuple):
    """The build of a recipe for one target. None means unknown: no stage has measured the value.

    Attributes:
        variant: The name of the variant; empty for the recipe itself.
        verdict: Whether `verify` accepted the library; `not verified` without a reference.
        error: Largest absolute error of any output.
        latency_std_s: Standard deviation of the repeats, in seconds.
        untuned_latency_s: Latency of the same model without tuning, in seconds: the library's times the speedup.
        quantization: What quantization costs and gains; empty without quantization.
        quantization_error: Largest root mean square error that quantization causes in an output, relative to the
            float model's output. `error` is relative to the quantized model instead.
        unexercised: A phrase for each branch of an operator that no input of `verify` took.
        search: Why this run's search ended before its budget was used, and the remaining gain.
        tuned_kernels: Number of kernels with a schedule from a search.
        slowest_kernels: The kernels that take most of the time, the slowest first.
        sizes: The result for each choice of sizes of a library with dimensions.
        measured_at: The sizes at which the latency was measured.
        inputs: The model's inputs, if the libraries of a recipe are compared.
        is_pareto_optimal: No library of the recipe for this machine and these inputs is better in one measure, and as
            good in all others.
        reused: Every stage was up to date, or came from a remote cache.
        is_skipped: The run ended before one of the build's stages began.
        is_stopped: The user stopped the run while one of the build's stages was running.
        warnings: The lines of its stages that a user must see.
    """

    recipe: str
    target: str
    variant: str = ""
    verdict: BuildVerdict | None = None
    reference: str | None = None
    error: float | None = None
    tolerance: Tolerance | None = None
    accuracy: float | None = None
    reference_accuracy: float | None = None
    latency_s: float | None = None
    latency_std_s: float | None = None
    untuned_latency_s: float | None = None
    tuning_speedup: Speedup | None = None
    peers: tuple[Peer, ...] = ()
    size_bytes: int | None = None
    weight_bytes: int | None = None
    quantization: str = ""
    quantization_error: float | None = None
    unexercised: tuple[str, ...] = ()
    search: str = ""
    kernels: int | None = None
    tuned_kernels: int | None = None
    slowest_kernels: tuple[KernelShare, ...] = ()
    sizes: tuple[SizeResult, ...] = ()
    measured_at: str = ""
    gates: tuple[CheckedLimit, ...] = ()
    inputs: str = ""
    is_pareto_optimal: bool = False
    reused: bool = False
    is_skipped: bool = False
    is_stopped: bool = False
    folder: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name in reports: `RECIPE/TARGET`."""
        return f"{self.recipe}/{self.target}"


def list_builds(report: RunReport) -> tuple[Build, ...]:
    """Return the builds of a run, in its order: one for each recipe, or variant, and target."""
    compared = {(row.recipe, row.target): row for row in report.compared_libraries}
    variants = {origin.recipe: origin.variant for origin in report.origins}
    groups: dict[tuple[str, str], dict[str, StageReport]] = {}
    shared: dict[str, dict[str, StageReport]] = {}
    parts = {
        (stage.recipe, stage.target)
        for stage in report.stages
        if stage.stage in STAGES and STAGES[stage.stage].TRAITS.scope == "part"
    }
    for stage in report.stages:
        if not stage.target:
            shared.setdefault(stage.recipe, {})[stage.stage] = stage
            continue
        is_part = (stage.recipe, stage.target) in parts
        target, _, part = stage.target.rpartition(".") if is_part else (stage.target, "", "")
        label = f"{stage.stage}/{part}" if part else stage.stage
        groups.setdefault((stage.recipe, target), {})[label] = stage
    folders = _find_folders(groups.keys(), report.delivered)
    facts = ReportedFacts(report.stages)
    builds = []
    for (recipe, target), stages in groups.items():
        row, folder = compared.get((recipe, target)), folders.get((recipe, target), "")
        build = Build(recipe, target, variants.get(recipe, ""), folder=folder)
        if row:
            build = build._replace(inputs=row.inputs, is_pareto_optimal=row.is_pareto_optimal)
        code = groups.get((recipe, f"{target}.{_find_isa_level(stages, facts)}"), {})
        builds.append(_make_build(build, {**shared.get(recipe, {}), **code, **stages}, facts))
    return tuple(builds)


def _find_isa_level(stages: Mapping[str, StageReport], facts: ReportedFacts) -> str:
    """Return the ISA level of a multi-ISA library that was measured; empty for other libraries."""
    verdict = facts.of(stages.values()).get(Verdict)
    library = verdict.get("latency", {}).get("library") if verdict else None
    if verdict is None or library is None:
        return ""
    levels = verdict.get("levels", {}).items()
    return next((name for name, level in levels if level.get("latency") == library), "")


def _make_build(build: Build, stages: Mapping[str, StageReport], facts: ReportedFacts) -> Build:
    """Return a build with the facts of its stages; stages of a part are called `NAME/PART`."""
    known = facts.of(stage for label, stage in stages.items() if "/" not in label)
    imported = find_built_model(known)
    exported = facts.list_of(ExportFacts, stages.values())
    built = facts.list_of(BuildFacts, stages.values())
    fresh = [stage for stage in stages.values() if stage.outcome == "ran"]
    searches = filter(None, facts.list_of(TuneFacts, fresh))
    picked = [entry for entry in facts.list_of(PickBestFacts, stages.values()) if entry is not None]
    kept = sum(entry.tuned for entry in picked) if picked else None
    ends = (describe_end(search, kept) for search in searches)
    problems = (stage.message for stage in stages.values() if stage.outcome != STOPPED)
    incomplete = (facts.problems.get(stage.stage_id, "") for stage in stages.values())
    warnings = [*_list_warnings(stages.values(), facts), *filter(None, incomplete)]
    return build._replace(
        **_read_verdict(stages.get(verify.NAME), known.get(Verdict)),
        kernels=sum_known(code and code.kernels for code in built),
        tuned_kernels=sum_known(code and len(code.schedule_rules.get(TUNED, ())) for code in built),
        size_bytes=sum_known(library and library.library_bytes for library in exported),
        weight_bytes=imported and imported.weight_bytes,
        quantization=cost_text(imported) if isinstance(imported, QuantizeFacts) else "",
        quantization_error=imported.error if isinstance(imported, QuantizeFacts) else None,
        search="; ".join(dict.fromkeys(filter(None, ends))),
        slowest_kernels=tuple(list_kernel_shares(known)[:_SHOWN_KERNELS]),
        reused=all(stage.outcome in ("hit", "fetched") for stage in stages.values()),
        is_skipped=any(stage.outcome == SKIPPED for stage in stages.values()),
        is_stopped=any(stage.outcome == STOPPED for stage in stages.values()),
        problems=tuple(dict.fromkeys(filter(None, problems))),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _read_verdict(stage: StageReport | None, facts: Verdict | None) -> dict[str, Json]:
    is_rejected = stage is not None and stage.outcome not in SUCCEEDED
    if facts is None:
        return {"verdict": "rejected"} if stage and stage.outcome == "rejected" else {}
    verdict: BuildVerdict = "rejected" if is_rejected else "verified"
    if verdict == "verified" and facts["against"] == "none":
        verdict = "not verified"
    library, speedup = facts.get("latency", {}).get("library"), facts.get("speedup")
    return {
        "verdict": verdict,
        "reference": facts.get("reference"),
        "error": largest_error(*list_measured(facts)),
        "tolerance": _read_tolerance(facts),
        "accuracy": facts.get("accuracy"),
        "reference_accuracy": facts.get("reference_accuracy"),
        "latency_s": library and library["median"],
        "latency_std_s": library and library["std"],
        "untuned_latency_s": library and speedup and shown_latency(library["median"], speedup),
        "tuning_speedup": read_tuning_speedup(facts),
        "peers": tuple(_list_peers(facts, library)) if library else (),
        "sizes": tuple(map(_read_size, sort_sizes(facts))),
        "unexercised": tuple(facts.get("unexercised", ())),
        "measured_at": sizes_text(facts.get("at", {})),
        "gates": tuple(CheckedLimit(*row) for row in list_gates(facts)),
    }


def _read_size(entry: SizeVerdict) -> SizeResult:
    return SizeResult(
        sizes=sizes_text(entry["sizes"]),
        passed=entry["passed"],
        error=largest_error(entry),
        latency_s=entry.get("latency_s"),
        reference_latency_s=entry.get("reference_latency_s"),
        fixed_latency_s=find_fixed_latency(entry),
    )


def _read_tolerance(facts: Verdict) -> Tolerance | None:
    outputs = list_compared(facts)
    rtol = largest(output.get("rtol", math.nan) for output in outputs)
    atol = largest(output.get("atol", math.nan) for output in outputs)
    return None if rtol is None or atol is None else Tolerance(rtol, atol)


def _list_peers(facts: Verdict, library: Latency) -> Iterator[Peer]:
    names = set()
    for runtime in facts.get("compared", {}).values():
        names.add(runtime["name"])
        if "latency" in runtime and "speedup" in runtime:
            outputs = runtime.get("outputs", {}).values()
            differs = not all(output.get("passed") for output in outputs)
            latency_s = shown_latency(library["median"], runtime["speedup"])
            yield Peer(runtime["name"], latency_s, _read_speedup(runtime["speedup"]), differs)
    reference, name = facts.get("latency", {}).get("reference"), facts.get("reference", "")
    if reference is None or not name or name in names:
        return
    if interleaved := facts.get("reference_speedup"):
        yield Peer(name, shown_latency(library["median"], interleaved), _read_speedup(interleaved))


def read_tuning_speedup(verdict: Verdict | None) -> Speedup | None:
    """Return the speedup of a library over the same model without tuning; None if it is not tuned."""
    return _read_speedup(verdict["speedup"]) if verdict and "speedup" in verdict else None


def _read_speedup(speedup: MeasuredSpeedup) -> Speedup:
    return Speedup(speedup["median"], speedup["low"], speedup["high"], speedup["pairs"])


def list_kernel_shares(facts: KnownFacts) -> list[KernelShare]:
    """Return a library's kernels with their share of the time, slowest first; empty if untimed."""
    verdict = facts.get(Verdict)
    if verdict is None or "profile" not in verdict:
        return []
    nodes = {
        kernel: tuple(dict.fromkeys(node for call in listed for node in call.nodes))
        for kernel, listed in list_kernel_calls(facts).items()
    }
    shares = verdict["profile"]["kernels"]
    return [
        KernelShare(name, share, nodes.get(name, ()))
        for name, share in sorted(shares.items(), key=lambda entry: -entry[1])
    ]


def find_built_model(facts: KnownFacts) -> ImportFacts | QuantizeFacts | None:
    """Return the facts of the model that a library is built from; None if unknown."""
    return facts.get(QuantizeFacts) or facts.get(ImportFacts)


def list_kernel_calls(facts: KnownFacts) -> dict[str, tuple[KernelCall, ...]]:
    """Return the calls of each kernel of a build with the nodes that they compute, as far as known."""
    built, imported = facts.get(BuildFacts), find_built_model(facts)
    return find_kernel_nodes(
        built.kernel_nodes if built else {}, imported.nodes if imported else ()
    )


def read_kernel_times(verdict: Verdict | None) -> dict[str, float]:
    """Return the seconds that each kernel takes in one call of a library; empty if unknown."""
    library = verdict.get("latency", {}).get("library") if verdict else None
    if verdict is None or library is None or "profile" not in verdict:
        return {}
    shares = verdict["profile"]["kernels"]
    return {name: share * library["median"] for name, share in shares.items()}


def _list_warnings(stages: Iterable[StageReport], facts: ReportedFacts) -> Iterator[str]:
    """Yield the warnings of stages, which are the lines that begin with a word in capitals."""
    for stage in stages:
        for line in facts.describe(stage):
            word = line.partition(" ")[0].rstrip(":")
            if len(word) >= _SHORTEST_CAPITALS and word.isalpha() and word.isupper():
                yield line


def _find_folders(
    names: Collection[tuple[str, str]], delivered: Iterable[str]
) -> dict[tuple[str, str], str]:
    folders: dict[tuple[str, str], str] = {}
    for path in delivered:
        parts = path.split("/")
        for end in range(len(parts) - 1, 1, -1):
            name = (parts[end - 2], parts[end - 1])
            if name in names:
                folders.setdefault(name, "/".join(parts[:end]))
                break
    return folders
