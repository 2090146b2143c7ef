"""The content of a page as values: results, measurements and costs of a run or a release.

None is what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core.statistics import NOISE_TEXTS, Judgement
from tvmflow.engine.builds import Build, Speedup
from tvmflow.engine.report import StageReport
from tvmflow.stages.quantize import QuantizeFacts


class Library(NamedTuple):
    """A build, with the same build in the baseline.

    The judgement is that of the change of the latency, None if it is not judged; with `is_same`, both are one
    measurement. The note says how the latency was measured, or why it was not. Files have sizes in bytes; `machine` is
    the target machine.
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

    `calls` are those of an inference, `nodes` those of the user's model, `flops` operations and `bytes` parameters of a
    call. Measured alone are `untuned_s` with the schedule of a rule, `tuned_s` with a schedule of the search, None
    without one, and `curve`, the best time after each trial. `least_s` is the time at the roofline. `verify` measured its
    share of a call (0 to 1), and `library_s`, that share of the latency.
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
        """The time of a call in the library, or alone where that is not known."""
        if self.library_s is not None:
            return self.library_s
        return self.untuned_s if self.tuned_s is None else self.tuned_s

    @property
    def roofline_share(self) -> float | None:
        """Its speed, as a part of the roofline."""
        seconds = self.seconds
        return min(self.least_s / seconds, 1.0) if seconds and self.least_s else None


class KernelChange(NamedTuple):
    """A kernel whose time of a call in seconds has changed; None if a library lacks it."""

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
    """The known kernels of a library, the slowest first.

    `notes` say what the page cannot show, and why. `kept` is the number of kernels with a schedule of the search, None
    without one. The speedup is that of the library over the same model untuned.
    """

    label: str
    kernels: tuple[Kernel, ...]
    peak_gflops: float | None = None
    progress: tuple[Progress, ...] = ()
    notes: tuple[str, ...] = ()
    kept: int | None = None
    speedup: Speedup | None = None


class StageEntry(NamedTuple):
    """A stage of a run: its report, and the stages that it needs.

    `saved_s` are the seconds that an earlier run took for its result.
    """

    report: StageReport
    saved_s: float = 0.0
    needs: tuple[str, ...] = ()


class RecipeText(NamedTuple):
    """The text of a recipe, and facts about it."""

    path: str
    text: str
    note: str = ""


class Page(NamedTuple):
    """The content of a page.

    The kind is `Run` or `Release`. The libraries are compared with `previous`, if there is one. `links` are texts and
    addresses, `provenance` tables of names and values by title, and `stages` in topological order.
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
