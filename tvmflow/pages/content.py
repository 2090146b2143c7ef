"""Page content as values: results, measurements and costs of a run or a release. None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core.statistics import NOISE_TEXTS, Judgement
from tvmflow.engine.builds import Build, Speedup
from tvmflow.engine.report import StageReport
from tvmflow.stages.quantize import QuantizeFacts


class Library(NamedTuple):
    """A build, and the same build in the baseline (`previous`).

    `judgement` is about the change of the latency; with `is_same`, both builds have the same measurement. `note` says
    how the latency was measured, or why it was not. `files` maps names to sizes in bytes; `machine` is the target.
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
        """True if the difference of both latencies is within the noise of their measurements."""
        return self.judgement in NOISE_TEXTS

    @property
    def label(self) -> str:
        """The library as `RECIPE/TARGET`."""
        return self.build.name

    @property
    def state(self) -> str:
        """The verdict as text; empty if there is none."""
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
    """A kernel of a library; times are seconds per kernel call.

    `calls` is the number per inference, `nodes` are nodes of the user's model, `flops` and `bytes` are operations and
    bytes of parameters per call. Measured in isolation: `untuned_s` with a rule's schedule, `tuned_s` with a searched
    schedule, and `curve`, the best time after each trial. `least_s` is the time at the roofline. Measured by `verify`:
    `share` of the inference (0 to 1), and `library_s`, the resulting time.
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
        """The seconds per call in the library, or in isolation if that is unknown."""
        if self.library_s is not None:
            return self.library_s
        return self.untuned_s if self.tuned_s is None else self.tuned_s

    @property
    def roofline_share(self) -> float | None:
        """The speed relative to the roofline, from 0 to 1."""
        seconds = self.seconds
        return min(self.least_s / seconds, 1.0) if seconds and self.least_s else None


class KernelChange(NamedTuple):
    """A kernel with a changed time in seconds per call; None if a side does not have the kernel."""

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
    """The state of a search: trials so far, seconds of measuring, and the best total time of all kernels."""

    trials: int
    measuring_s: float
    best_s: float


class LibraryKernels(NamedTuple):
    """The known kernels of a library, slowest first.

    `notes` say what the page cannot show, and why. `kept` is the number of kernels with a schedule of the search; None
    without a search. `speedup` is the library's speedup over the same model untuned.
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

    `saved_s` is the time in seconds that an earlier run took for the reused result.
    """

    report: StageReport
    saved_s: float = 0.0
    needs: tuple[str, ...] = ()


class RecipeText(NamedTuple):
    """The path and the text of a recipe; `note` says why the text is missing or differs from the file."""

    path: str
    text: str
    note: str = ""


class Page(NamedTuple):
    """The content of a page.

    `kind` is `Run` or `Release`. `previous` names the baseline, if any. `links` are (text, address) pairs, `provenance`
    lists (title, rows of names and values), and `stages` are in topological order.
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
