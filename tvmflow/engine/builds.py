"""Builds: what a run says of each recipe for each target, taken from the facts of its stages. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeVar

from tvmflow.core.statistics import MIN_PAIRS, Judgement, judge_ratio
from tvmflow.core.types import Json
from tvmflow.engine.report import (
    BAD_FACTS,
    SKIPPED,
    STOPPED,
    SUCCEEDED,
    RunReport,
    StageReport,
    describe_result,
    unreadable_facts_text,
)
from tvmflow.stages import STAGES
from tvmflow.stages.base import Facts
from tvmflow.stages.build import TUNED
from tvmflow.stages.kernel_nodes import find_kernel_nodes
from tvmflow.stages.verify.verdict import shown_latency

_T = TypeVar("_T")

Verdict = Literal["verified", "rejected", "not verified"]

_SHOWN_KERNELS: Final = 3
# `NOT`, `WITHOUT`, `WARNING`; a kernel or a runtime may be called `A` or `VM`.
_SHORTEST_CAPITALS: Final = 3
# With few pairs, a difference within this may be noise, whatever the limits are.
_FEW_PAIRS_MARGIN: Final = 0.2


class Speedup(NamedTuple):
    """The speed of a library relative to something else: the median and its limits.

    Attributes:
        median: How many times as fast the library is.
        low: The lower limit of that.
        high: The upper limit.
        pairs: How often both were measured in turns; 0 where each was measured by itself, and the limits
            are those of single calls.
    """

    median: float
    low: float
    high: float
    pairs: int

    @property
    def judgement(self) -> Judgement:
        """The judgement of the measurements: `more` is a library that is faster beyond the noise."""
        margin = 1 + self._margin
        return judge_ratio(self.median, self.low / margin, self.high * margin)

    @property
    def _margin(self) -> float:
        return 0.0 if self.pairs >= MIN_PAIRS else _FEW_PAIRS_MARGIN


class Peer(NamedTuple):
    """Another runtime that the library was timed beside.

    Attributes:
        name: Its name and version.
        latency_s: Its latency in seconds: where both were measured in turns, the library's times the speedup.
        speedup: The speed of the library relative to it.
        differs: Its outputs are not those of the reference.
    """

    name: str
    latency_s: float
    speedup: Speedup | None = None
    differs: bool = False


class KernelShare(NamedTuple):
    """A kernel: its name, its share of the time of a call (0 to 1), and the nodes of the model it came from."""

    name: str
    share: float
    nodes: tuple[str, ...] = ()


class Tolerance(NamedTuple):
    """The limits of an element's difference from the reference: relative, and absolute for the least strict output."""

    rtol: float
    atol: float


class Build(NamedTuple):
    """A recipe for one target. None is what the run does not know, because a stage is missing or did not measure it.

    Attributes:
        recipe: The name under which it is planned: of the recipe, or of its variant.
        variant: The name of the variant; empty for the recipe itself.
        target: The name of the target.
        verdict: Whether `verify` accepted the library; `not verified` when it compared it with nothing.
        reference: What the library was compared with: name and version.
        error: Largest absolute error of any output.
        tolerance: How far outputs were allowed to differ.
        accuracy: Top-1 accuracy, from 0 to 1.
        reference_accuracy: That of the reference.
        latency_s: Median latency of one call of the library, in seconds.
        latency_std_s: Standard deviation of the repeats of that, in seconds.
        untuned_latency_s: Latency of the same model untuned, in seconds: the library's times the speedup.
        tuning_speedup: The speed of the library relative to the same model untuned.
        peers: The other runtimes, in the order of the recipe.
        size_bytes: Size of the library; of all its parts, for a partitioned target.
        weight_bytes: Size of the model's weights.
        kernels: Number of kernels.
        tuned_kernels: Number of those whose schedule was found by a search.
        slowest_kernels: The kernels that take most of the time, the slowest first.
        inputs: The inputs of the model, where the libraries of a recipe are compared; empty elsewhere.
        is_pareto_optimal: No other library of the recipe for the same machine and inputs is as good in all.
        reused: Every stage was up to date, or came from a remote cache.
        is_skipped: The run ended before one of its stages began.
        is_stopped: The user stopped the run before one of its stages had ended.
        folder: The folder with what was delivered; empty when nothing was.
        problems: The messages of its stages that did not succeed.
        warnings: The lines of its stages that a user must not miss.
    """

    recipe: str
    target: str
    variant: str = ""
    verdict: Verdict | None = None
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
    kernels: int | None = None
    tuned_kernels: int | None = None
    slowest_kernels: tuple[KernelShare, ...] = ()
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
        """The name that people know it by: `RECIPE/TARGET`."""
        return f"{self.recipe}/{self.target}"

    def to_json(self) -> dict[str, Json]:
        """Return the build as plain JSON."""
        return {
            **self._asdict(),
            "tolerance": self.tolerance and self.tolerance._asdict(),
            "tuning_speedup": self.tuning_speedup and self.tuning_speedup._asdict(),
            "peers": [
                {**peer._asdict(), "speedup": peer.speedup and peer.speedup._asdict()}
                for peer in self.peers
            ],
            "slowest_kernels": [
                {**kernel._asdict(), "nodes": list(kernel.nodes)} for kernel in self.slowest_kernels
            ],
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Build:
        """Return the build that `to_json` wrote, of this version or another: what is not known is left out."""
        known = {name: value[name] for name in cls._fields if name in value}
        peers = tuple(
            Peer(
                peer["name"],
                peer["latency_s"],
                _optional(Speedup, peer.get("speedup")),
                peer.get("differs", False),
            )
            for peer in known.get("peers", ())
        )
        parsed = {
            "tolerance": _optional(Tolerance, known.get("tolerance")),
            "tuning_speedup": _optional(Speedup, known.get("tuning_speedup")),
            "peers": peers,
            "slowest_kernels": tuple(
                KernelShare(kernel["name"], kernel["share"], tuple(kernel["nodes"]))
                for kernel in known.get("slowest_kernels", ())
            ),
            "problems": tuple(known.get("problems", ())),
            "warnings": tuple(known.get("warnings", ())),
        }
        return cls(**{**known, **parsed})


def _optional(kind: Callable[..., _T], value: Json) -> _T | None:
    return kind(**value) if value else None


def list_builds(report: RunReport) -> tuple[Build, ...]:
    """Return the builds of a run, in its order: one for each recipe, or variant, and target."""
    compared = {(row.recipe, row.target): row for row in report.compared_libraries}
    variants = {origin.recipe: origin.variant for origin in report.origins}
    groups: dict[tuple[str, str], dict[str, StageReport]] = {}
    shared: dict[str, dict[str, StageReport]] = {}
    parts = set(_list_parts(report.stages))
    for stage in report.stages:
        if not stage.target:
            shared.setdefault(stage.recipe, {})[stage.stage] = stage
            continue
        is_part = (stage.recipe, stage.target) in parts
        target, _, part = stage.target.rpartition(".") if is_part else (stage.target, "", "")
        label = f"{stage.stage}/{part}" if part else stage.stage
        groups.setdefault((stage.recipe, target), {})[label] = stage
    folders = _find_folders(groups.keys(), report.delivered)
    builds = []
    for (recipe, target), stages in groups.items():
        folder = folders.get((recipe, target), "")
        build = Build(recipe, target, variants.get(recipe, ""), folder=folder)
        if row := compared.get((recipe, target)):
            build = build._replace(inputs=row.inputs, is_pareto_optimal=row.is_pareto_optimal)
        builds.append(_make_build(build, {**shared.get(recipe, {}), **stages}))
    return tuple(builds)


def _list_parts(stages: Iterable[StageReport]) -> Iterator[tuple[str, str]]:
    """Yield the recipe and the target of what runs only a part of a model: a target `TARGET.PART`."""
    for stage in stages:
        if stage.stage in STAGES and STAGES[stage.stage].TRAITS.scope == "part":
            yield stage.recipe, stage.target


def _make_build(build: Build, stages: Mapping[str, StageReport]) -> Build:
    """Return a build with what its stages say.

    Args:
        build: Its names and its folder.
        stages: Its stages by name, those of a part by `NAME/PART`.
    """
    stopped = [stage.outcome == STOPPED for stage in stages.values()]
    problems = (stage.message for stage in stages.values() if stage.outcome != STOPPED)
    fields, incomplete = dict[str, Json](), list[str]()
    for name, read in _READERS:
        try:
            fields |= read(stages)
        except BAD_FACTS as error:
            incomplete.append(unreadable_facts_text(name, error))
    warnings = [*_list_warnings(stages), *incomplete]
    return build._replace(
        **fields,
        reused=all(stage.outcome in ("hit", "fetched") for stage in stages.values()),
        is_skipped=any(stage.outcome == SKIPPED for stage in stages.values()),
        is_stopped=any(stopped),
        problems=tuple(dict.fromkeys(filter(None, problems))),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _facts(stage: StageReport | None) -> Facts:
    return stage.facts if stage is not None else {}


def _read_library_size(stages: Mapping[str, StageReport]) -> dict[str, Json]:
    return {"size_bytes": _add(stages, "export", lambda facts: facts.get("library_bytes"))}


def _read_weight_size(stages: Mapping[str, StageReport]) -> dict[str, Json]:
    return {"weight_bytes": _facts(stages.get("import")).get("weight_bytes")}


def _read_slowest_kernels(stages: Mapping[str, StageReport]) -> dict[str, Json]:
    return {"slowest_kernels": tuple(list_kernel_shares(stages)[:_SHOWN_KERNELS])}


def _read_verdict(stages: Mapping[str, StageReport]) -> dict[str, Json]:
    """Return the fields of a build that `verify` knows."""
    stage = stages.get("verify")
    facts = _facts(stage)
    if stage is None or not facts:
        is_rejected = stage is not None and stage.outcome == "rejected"
        return {"verdict": "rejected"} if is_rejected else {}
    verdict: Verdict = "rejected" if stage.outcome not in SUCCEEDED else "verified"
    if verdict == "verified" and facts.get("against") == "none":
        verdict = "not verified"
    latency = facts.get("latency", {})
    library = latency.get("library", {})
    return {
        "verdict": verdict,
        "reference": facts.get("reference"),
        "error": _largest(facts, "max_abs_error"),
        "tolerance": _read_tolerance(facts),
        "accuracy": facts.get("accuracy"),
        "reference_accuracy": facts.get("reference_accuracy"),
        "latency_s": library.get("median"),
        "latency_std_s": library.get("std"),
        "untuned_latency_s": _read_untuned(facts),
        "tuning_speedup": _read_speedup(facts.get("speedup")),
        "peers": tuple(_list_peers(facts)),
    }


def _largest(facts: Facts, field: str) -> float | None:
    """Return the largest value of a field of all outputs, and of what goes into an index; None when it is not a finite number for each."""
    compared = [*facts.get("outputs", {}).values(), *facts.get("index_inputs", {}).values()]
    # Infinities and NaN are text there.
    values = [float(output.get(field, math.nan)) for output in compared]
    return max(values) if values and all(map(math.isfinite, values)) else None


def _read_tolerance(facts: Facts) -> Tolerance | None:
    rtol, atol = _largest(facts, "rtol"), _largest(facts, "atol")
    return None if rtol is None or atol is None else Tolerance(rtol, atol)


def _list_peers(facts: Facts) -> Iterator[Peer]:
    """Yield the runtimes that were timed in turns with the library, and the reference if it is none of these."""
    names = set()
    for runtime in facts.get("compared", {}).values():
        names.add(runtime["name"])
        if "latency" in runtime:
            speedup = _read_speedup(runtime.get("speedup"))
            outputs = runtime.get("outputs", {}).values()
            differs = not all(output["passed"] for output in outputs)
            latency_s = shown_latency(facts["latency"]["library"]["median"], runtime["speedup"])
            yield Peer(str(runtime["name"]), latency_s, speedup, differs)
    latency = facts.get("latency", {})
    library, reference = latency.get("library"), latency.get("reference")
    if not library or not reference or facts["reference"] in names:
        return
    name = str(facts["reference"])
    if in_turns := facts.get("reference_speedup"):
        yield Peer(name, shown_latency(library["median"], in_turns), _read_speedup(in_turns))
    else:
        # a result of an earlier version, which measured each by itself
        median = reference["median"] / library["median"]
        low, high = reference["min"] / library["max"], reference["max"] / library["min"]
        yield Peer(name, reference["median"], Speedup(median, low, high, 0))


def _read_untuned(facts: Facts) -> float | None:
    """Return the latency of the same model untuned; None where the library is not tuned."""
    if "speedup" not in facts:
        return None
    return shown_latency(facts["latency"]["library"]["median"], facts["speedup"])


def _read_speedup(speedup: Json) -> Speedup | None:
    return Speedup(*(speedup[name] for name in Speedup._fields)) if speedup else None


def list_kernel_shares(stages: Mapping[str, StageReport]) -> list[KernelShare]:
    """Return the kernels of a library with their shares of the time, the slowest first; empty where none was timed.

    Args:
        stages: The stages of a build by name.
    """
    calls = find_kernel_nodes(_facts(stages.get("build")), _facts(stages.get("import")))
    nodes = {
        kernel: tuple(dict.fromkeys(node for call in listed for node in call.nodes))
        for kernel, listed in calls.items()
    }
    shares = _facts(stages.get("verify")).get("profile", {}).get("kernels", {})
    return [
        KernelShare(name, share, nodes.get(name, ()))
        for name, share in sorted(shares.items(), key=lambda entry: -entry[1])
    ]


def read_kernel_times(facts: Facts) -> dict[str, float]:
    """Return the seconds that each kernel takes in one call of a library; empty where that is not known.

    Args:
        facts: The facts of `verify`: the shares of kernels, and the latency that these are shares of.
    """
    try:
        seconds = facts["latency"]["library"]["median"]
        return {name: share * seconds for name, share in facts["profile"]["kernels"].items()}
    except BAD_FACTS:
        return {}


def _list_warnings(stages: Mapping[str, StageReport]) -> Iterator[str]:
    """Yield the lines of stages that begin with a word in capitals."""
    facts = {stage.stage_id: stage.facts for stage in stages.values()}
    for stage in stages.values():
        for line in describe_result(stage, facts):
            word = line.partition(" ")[0].rstrip(":")
            if len(word) >= _SHORTEST_CAPITALS and word.isalpha() and word.isupper():
                yield line


def _count_kernels(stages: Mapping[str, StageReport]) -> dict[str, Json]:
    return {
        "kernels": _add(stages, "build", lambda facts: facts.get("kernels")),
        "tuned_kernels": _add(
            stages,
            "build",
            lambda facts: len(facts["schedule_rules"].get(TUNED, ())) if facts else None,
        ),
    }


def _add(
    stages: Mapping[str, StageReport], name: str, read: Callable[[Facts], int | None]
) -> int | None:
    """Return the sum of a number over a stage and those of the parts; None when it is not known of all."""
    own = [stage for label, stage in stages.items() if label.partition("/")[0] == name]
    numbers = [read(stage.facts) for stage in own]
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


_READERS: Final = (
    ("verify", _read_verdict),
    ("build", _count_kernels),
    ("export", _read_library_size),
    ("import", _read_weight_size),
    ("the kernels", _read_slowest_kernels),
)
"""What reads the fields of a build from the facts of its stages, and whose facts these are."""


def _find_folders(
    names: Collection[tuple[str, str]], delivered: Iterable[str]
) -> dict[tuple[str, str], str]:
    """Return the folders in `dist` of recipes and targets: `DIST/RECIPE/TARGET`.

    Args:
        names: The recipes and targets.
        delivered: The paths of all delivered files.
    """
    folders: dict[tuple[str, str], str] = {}
    for path in delivered:
        parts = path.split("/")
        for end in range(len(parts) - 1, 1, -1):
            place = (parts[end - 2], parts[end - 1])
            if place in names:
                folders.setdefault(place, "/".join(parts[:end]))
                break
    return folders
