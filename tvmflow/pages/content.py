"""The content of a page as values: results, measurements and costs of a run or a release.

None is what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core.statistics import NOISE_TEXTS, Judgement
from tvmflow.engine.builds import Build, Speedup
from tvmflow.stages.quantize.facts import QuantizeFacts


class Library(NamedTuple):
    """A build, with the same build in the baseline.

    The judgement is what both measurements say of the change of the latency, None if it is not judged; with
    `is_same`, both are one measurement. The note says how the latency was measured, or why it was not. Files
    have sizes in bytes, and `machine` is what it is for.
    """

    build: Build
    recipe: str
    previous: Build | None = None
    judgement: Judgement | None = None
    is_same: bool = False
    note: str = ""
    machine: str = ""
    files: Mapping[str, int] = MappingProxyType({})
    previous_files: Mapping[str, int] = MappingProxyType({})

    @property
    def is_noise(self) -> bool:
        """True if the difference of both latencies lies within the noise of their measurements."""
        return self.judgement in NOISE_TEXTS

    @property
    def label(self) -> str:
        """The library as `RECIPE/TARGET`."""
        return self.build.name

    @property
    def state(self) -> str:
        """The verdict on it, for people; empty if there is none."""
        if self.build.verdict or self.build.problems:
            return self.build.verdict or "failed"
        if self.build.is_stopped:
            return "stopped"
        return "skipped" if self.build.is_skipped else ""


class Gate(NamedTuple):
    """A limit that a library must meet: `state` is `passed`, `failed` or `not measured`."""

    label: str
    gate: str
    limit: str
    value: str
    state: str


class Kernel(NamedTuple):
    """A kernel of a library; times in seconds of one call.

    `calls` are those in one inference, `nodes` those of the user's model that it computes, `flops` arithmetic
    operations of a call and `bytes` those of its parameters. Measured by themselves are `untuned_s` with the
    schedule of a rule and `tuned_s` with the schedule that was found, None if it keeps that of the rule;
    `least_s` is at the roofline of the machine, and `curve` the best time after each trial. As `verify`
    measured it, its share of the time of a call is from 0 to 1, and `library_s` that share of the latency.
    """

    name: str
    nodes: tuple[str, ...] = ()
    calls: int = 1
    flops: float | None = None
    bytes: float | None = None
    untuned_s: float | None = None
    tuned_s: float | None = None
    least_s: float | None = None
    curve: tuple[float, ...] = ()
    trials: int = 0
    share: float | None = None
    library_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """The time of a call: in the library, or by itself where that is not known."""
        if self.library_s is not None:
            return self.library_s
        return self.untuned_s if self.tuned_s is None else self.tuned_s

    @property
    def roofline_share(self) -> float | None:
        """The part of the speed at the roofline that it reaches."""
        seconds = self.seconds
        return min(self.least_s / seconds, 1.0) if seconds and self.least_s else None


class KernelChange(NamedTuple):
    """A kernel that takes other seconds in a call than before; None if a library lacks it."""

    label: str
    name: str
    before_s: float | None
    after_s: float | None


class Change(NamedTuple):
    """A difference: `place` is a recipe, a build or `everywhere`, `what` its kind, `text` both values."""

    place: str
    what: str
    text: str


class Progress(NamedTuple):
    """A search after some trials, seconds of measuring, and the best time of all kernels together."""

    trials: int
    measuring_s: float
    best_s: float


class LibraryKernels(NamedTuple):
    """The kernels of a library, as far as they are known, the one that takes longest first.

    `notes` say what the page cannot show, and why; `kept` is how many of the kernels that were searched for
    have a schedule of the search, None without one. The speedup is that of the library over the same model
    untuned, as `verify` measured both.
    """

    label: str
    kernels: tuple[Kernel, ...]
    peak_gflops: float | None = None
    progress: tuple[Progress, ...] = ()
    notes: tuple[str, ...] = ()
    kept: int | None = None
    speedup: Speedup | None = None


class StageEntry(NamedTuple):
    """A stage of a run: its id, `RECIPE:STAGE[/TARGET]`, its outcome, and why it ran or failed.

    `spent_s` are seconds in this run, and `saved_s` those when its result was made, where that is used again;
    it needs the results of other stages.
    """

    id: str
    outcome: str
    reason: str = ""
    spent_s: float = 0.0
    saved_s: float = 0.0
    needs: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """The recipe, or the variant."""
        return self.id.partition(":")[0]

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.id.partition(":")[2].partition("/")[0]

    @property
    def target(self) -> str:
        """The target; empty for a stage that runs once for all."""
        return self.id.partition(":")[2].partition("/")[2]


class RecipeText(NamedTuple):
    """The text of a recipe, and facts about it."""

    path: str
    text: str
    note: str = ""


class Page(NamedTuple):
    """The content of a page.

    The kind is `Run` or `Release`. `previous` is what the libraries are compared with, and empty for nothing;
    `kernel_changes` and `changes` are the differences from it. `links` are texts and addresses, `provenance`
    tables of names and values by title, and `stages` in topological order.
    """

    kind: str
    title: str
    about: tuple[tuple[str, str], ...] = ()
    previous: str = ""
    libraries: tuple[Library, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    gates: tuple[Gate, ...] = ()
    kernel_changes: tuple[KernelChange, ...] = ()
    changes: tuple[Change, ...] = ()
    kernels: tuple[LibraryKernels, ...] = ()
    quantized: Mapping[str, QuantizeFacts] = MappingProxyType({})
    stages: tuple[StageEntry, ...] = ()
    recipes: tuple[RecipeText, ...] = ()
    provenance: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
