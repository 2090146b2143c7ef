"""What `tvmflow run-model` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.core.formatting import count_text, latency_text
from tvmflow.core.statistics import judge_ratio
from tvmflow.core.text import columns
from tvmflow.core.types import Json
from tvmflow.runtime.labels import format_predictions

if TYPE_CHECKING:
    from tvmflow.runtime.samples import Array

_MAX_SHOWN: Final = 8


class Element(NamedTuple):
    """One element of an output: its position in the flattened sample, and its value."""

    position: int
    value: float


class Operator(NamedTuple):
    """The time that one operator takes in a call, in microseconds."""

    name: str
    calls: int
    us: float


class OutputSummary(NamedTuple):
    """An output at a glance.

    Of few elements, it has all values. Least, largest and mean are of the finite ones; None where there are none.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    infinite: int


class ComparedOutput(NamedTuple):
    """An output beside that of another runtime.

    Attributes:
        agrees: True if it agrees within the tolerance.
        largest_error: The largest absolute difference.
        of_largest: The same relative to the largest value of the other runtime's output.
        problem: Why it cannot be compared, or nothing.
    """

    agrees: bool
    largest_error: float
    of_largest: float
    problem: str = ""


class ComparedRun(NamedTuple):
    """The same model in another runtime.

    Both latencies are medians in seconds, measured in turns; the note is of the runtime or the file. The speedup
    is how many times as fast the library is, and `low` to `high` are its limits.
    """

    runtime: str
    model: str
    note: str
    outputs: Mapping[str, ComparedOutput]
    library_s: float
    runtime_s: float
    speedup: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """True if an output does not agree."""
        return not all(output.agrees for output in self.outputs.values())

    def to_json(self) -> dict[str, Json]:
        """Return everything as plain JSON."""
        outputs = {name: output._asdict() for name, output in self.outputs.items()}
        return {**self._asdict(), "outputs": outputs, "differs": self.differs}


class ModelRun(NamedTuple):
    """The outputs of a model, and the measurements that were requested.

    `top` has the largest elements of each output and sample, `predictions` the best classes of each image as JSON,
    `ms` statistics of the latency of a call, `operators` the time of each, `compared` other runtimes: each only if
    it was asked for.
    """

    model: str
    target: str
    samples: int
    inputs: str
    outputs: Mapping[str, tuple[int, ...]]
    summaries: Mapping[str, OutputSummary]
    top: Mapping[str, list[list[Element]]] | None = None
    predictions: Sequence[Mapping[str, Json]] | None = None
    probabilities: str | None = None
    ms: Mapping[str, float] | None = None
    operators: Sequence[Operator] | None = None
    compared: Sequence[ComparedRun] | None = None

    def to_json(self) -> Json:
        """Return what is known."""
        value = {name: value for name, value in self._asdict().items() if value is not None}
        value["summaries"] = {name: entry._asdict() for name, entry in self.summaries.items()}
        if self.operators is not None:
            value["operators"] = [operator._asdict() for operator in self.operators]
        if self.compared is not None:
            value["compared"] = [runtime.to_json() for runtime in self.compared]
        return value


def summarize_output(array: Array) -> OutputSummary:
    """Return an output at a glance."""
    import numpy as np

    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    has_all = array.size <= _MAX_SHOWN and finite.size == array.size
    return OutputSummary(
        dtype=array.dtype.name,
        shape=tuple(array.shape),
        values=tuple(numbers.reshape(-1).tolist()) if has_all else (),
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        nan=int(np.isnan(numbers).sum()),
        infinite=int(np.isinf(numbers).sum()),
    )


def format_run(result: ModelRun, output: Path | None) -> Iterator[str]:
    """Give the lines for people."""
    count = f"on {count_text(result.samples, 'sample')}" if result.samples > 1 else "once"
    yield f"ran {count}" + ("" if result.inputs == "files" else f" on {result.inputs}")
    if result.predictions is not None:
        yield str(result.probabilities)
        yield from format_predictions(result.predictions)
    else:
        for name, summary in result.summaries.items():
            yield f"{name}: {_format_summary(summary)}"
    for name, rows in (result.top or {}).items():
        yield f"largest of {name}:"
        for row in rows:
            yield "  " + "  ".join(f"{position}: {value:.6g}" for position, value in row)
    if output:
        yield f"outputs: {output}"
    if result.ms is not None:
        yield "milliseconds per call:"
        yield "  ".join(f"{name:>10}" for name in result.ms)
        yield "  ".join(f"{value:>10.4f}" for value in result.ms.values())
    if result.operators is not None:
        yield from _format_operators(result.operators)
    for runtime in result.compared or ():
        yield from _format_compared(runtime)


def _format_summary(summary: OutputSummary) -> str:
    text = f"{summary.dtype}{list(summary.shape)}"
    if summary.values:
        text += " = " + " ".join(f"{value:.6g}" for value in summary.values)
    elif summary.min is not None:
        text += f" from {summary.min:.6g} to {summary.max:.6g}, mean {summary.mean:.6g}"
    if summary.nan:
        text += f", {summary.nan} NaN"
    if summary.infinite:
        text += f", {summary.infinite} infinite"
    return text


def _format_operators(operators: Sequence[Operator]) -> list[str]:
    total = sum(operator.us for operator in operators) or 1.0
    rows = [("operator", "calls", "µs", "share")]
    rows += [(name, str(calls), f"{us:.1f}", f"{us / total:.1%}") for name, calls, us in operators]
    return columns(rows, right=frozenset({1, 2, 3}))


def _format_compared(runtime: ComparedRun) -> Iterator[str]:
    note = f" ({runtime.note})" if runtime.note else ""
    yield f"beside {runtime.runtime}, which ran {runtime.model}{note}:"
    for name, output in runtime.outputs.items():
        if output.problem:
            yield f"  {name} DIFFERS: {output.problem}"
            continue
        verb = "agrees" if output.agrees else "DIFFERS"
        yield (
            f"  {name} {verb}: largest difference {output.largest_error:.2g}, "
            f"{output.of_largest:.2g} of its largest value"
        )
    times = f"{latency_text(runtime.library_s)} here, {latency_text(runtime.runtime_s)} there"
    judgement = judge_ratio(runtime.speedup, runtime.low, runtime.high)
    if judgement == "equal":
        yield f"  as fast, within the noise: {times} ({runtime.low:.2f} to {runtime.high:.2f} times)"
        return
    if judgement == "unclear":
        limits = f"{runtime.low:.2f} to {runtime.high:.2f} times as fast"
        yield f"  the machine was too noisy to compare the speed: {times} ({limits})"
        return
    factors = sorted((runtime.low, runtime.speedup, runtime.high))
    word = "fast" if judgement == "more" else "slow"
    if word == "slow":
        factors = sorted(1 / factor for factor in factors)
    low, ratio, high = factors
    yield f"  {ratio:.2f} times as {word}: {times} ({low:.2f} to {high:.2f})"
