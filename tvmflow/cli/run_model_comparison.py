"""A delivered library beside another runtime, on the same inputs: `tvmflow run-model --compare`."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.documents import get_field
from tvmflow.core.errors import BundleError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, latency_text, names_text, quoted
from tvmflow.core.logs import explain_wait
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.statistics import judge_ratio
from tvmflow.core.text import columns, did_you_mean
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.engine.builds import list_kernel_calls
from tvmflow.engine.report import ReportedFacts, StageReport
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.inputs import array_of
from tvmflow.frontends.peers import PEERS, Peer, open_peer
from tvmflow.runtime import samples
from tvmflow.runtime.labels import format_predictions
from tvmflow.runtime.module import Module
from tvmflow.runtime.statements import Statement, find_statements, read_statements
from tvmflow.stages import build, import_model
from tvmflow.stages.build import KernelCall
from tvmflow.stages.verify.comparison import FLOAT32, Tolerance, compare, tolerance_for
from tvmflow.stages.verify.latency import measure_peer
from tvmflow.store.file_digests import find_files
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles

_MAX_SHOWN: Final = 8
_KEY: Final = re.compile("[0-9a-f]{64}")


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
    """An output at a glance: all of few values, or the least, largest and mean of the finite ones."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    infinite: int


class ComparedOutput(NamedTuple):
    """An output beside that of another runtime, or the problem that keeps it from being compared.

    `of_largest` is the largest error relative to the largest value of the other runtime's output.
    """

    agrees: bool
    largest_error: float
    of_largest: float
    problem: str = ""


class ComparedRun(NamedTuple):
    """The same model in another runtime.

    Both latencies are medians in seconds of interleaved calls; the note is of the runtime or the file. The speedup
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
        """Return its fields, and whether it differs."""
        return {**self._asdict(), "differs": self.differs}


class ModelRun(NamedTuple):
    """The outputs of a model, and the measurements that were requested.

    `top` has the largest elements of each output and sample, `predictions` the best classes of each image as JSON,
    `ms` the latency statistics of a call, `operators` the time of each operator, `trace` the trace that was written,
    `compared` the comparison with other runtimes. Each is None unless it was requested.
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
    trace: Mapping[str, Json] | None = None
    compared: Sequence[ComparedRun] | None = None

    def to_json(self) -> Json:
        """Return the known facts."""
        value = {name: value for name, value in self._asdict().items() if value is not None}
        if self.top is not None:
            value["top"] = {
                name: [list(map(list, row)) for row in rows] for name, rows in self.top.items()
            }
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
    """Yield the lines for people."""
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
    if result.trace is not None:
        calls = count_text(result.trace["calls"], "call")
        yield f"trace of {calls}: {result.trace['path']} (https://ui.perfetto.dev shows it)"
        if not result.trace["names_nodes"]:
            yield (
                "the nodes that its kernels compute are not known: the results from which the library was "
                "built are not in this store (--store)"
            )
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


_MODEL: Final = "model"


class OtherRuntime(NamedTuple):
    """A runtime that can run the model of a library.

    The name is one of `PEERS`; inputs are the library's, then the recipe's constant inputs
    (`bound`). The tolerance is that of `verify`, and the note is of the model's file.
    """

    name: str
    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    bound: Mapping[str, Array]
    tolerance: Tolerance
    note: str


def find_runtime(
    name: str, module: Module, bundle: Path, model: Path | None, store: LocalStore
) -> OtherRuntime:
    """Return the files and inputs to run the model of a library in another runtime.

    The statement of provenance beside the bundle, and notes of the store, say which file it was built from, if
    `model` is None.

    Raises:
        UsageError: for an unknown runtime, one that runs no such models, or a model's file that is missing.
    """
    if name not in PEERS:
        known = names_text(list(PEERS))
        hint = did_you_mean(name, PEERS)
        raise UsageError(f"--compare: there is no runtime {quoted(name)}{hint} (there are {known})")
    peer, statement = PEERS[name], _find_statement(bundle)
    _check_kind(name, peer, module, statement)
    path, note = _find_model(model, statement, store)
    files = _list_files(path, peer.kind, store)
    bound = dict(_bound_inputs(files, peer.kind, module, statement))
    constants = (TensorSpec(n, array.shape, array.dtype.name) for n, array in bound.items())
    inputs = (*module.inputs, *constants)
    return OtherRuntime(
        name=name,
        files=files,
        inputs=inputs,
        bound=bound,
        tolerance=_tolerance_of(statement),
        note=note,
    )


def compare_with(runtime: OtherRuntime, module: Module, feed: samples.Samples) -> ComparedRun:
    """Run a model in another runtime, and time both in an interleaved measurement.

    Raises:
        StageError: when the runtime rejects the model.
        EnvironmentProblem: when it is not installed.
    """
    bound = runtime.bound
    with (
        tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch,
        open_peer(
            runtime.name,
            runtime.files,
            runtime.inputs,
            module.outputs,
            threads=module.threads,
            precision="model",
            scratch=Path(scratch),
        ) as peer,
        explain_wait(f"running {peer.name} and the library, interleaved: up to a minute"),
    ):
        expected = samples.run_samples(lambda batch: peer.run({**batch, **bound}), feed)
        actual = samples.run_samples(module.run, feed)
        first = feed.batches[0]
        times = measure_peer(module, first, peer, {**first, **bound})
        name, notes = peer.name, [note for note in (runtime.note, peer.note) if note]
    outputs = {
        output: _compare_output(array, expected[output], runtime.tolerance)
        for output, array in actual.items()
    }
    low, high = times.limits
    library_s = statistics.median(times.first)
    return ComparedRun(
        runtime=name,
        model=str(runtime.files[_MODEL]),
        note="; ".join(notes),
        outputs=outputs,
        library_s=library_s,
        runtime_s=library_s / times.ratio,
        speedup=1 / times.ratio,
        low=1 / high,
        high=1 / low,
    )


def _compare_output(actual: Array, expected: Array, tolerance: Tolerance) -> ComparedOutput:
    comparison = compare(actual, expected, tolerance)
    if "max_abs_error" not in comparison:
        problem = comparison.get("shape") or comparison.get("incomparable", "")
        return ComparedOutput(False, float("inf"), float("inf"), problem)
    return ComparedOutput(
        comparison["passed"],
        float(comparison["max_abs_error"]),
        float(comparison["error_of_largest"]),
    )


# ---------------------------------------------------------------- the model of a library


def _find_statement(bundle: Path) -> Statement | None:
    digest = hash_file(str(bundle))
    for path in find_statements(bundle):
        for signed in read_statements(path, ()):
            statement = signed.statement
            if statement and digest in statement.names and not statement.is_of_measurements:
                return statement
    return None


def find_kernel_nodes_of(bundle: Path, store: LocalStore) -> dict[str, tuple[KernelCall, ...]]:
    """Return the calls of each kernel of a bundle with the nodes of the model that they compute.

    The statement beside the bundle names the results that it was made from; nothing is known if it is
    missing, if the store does not have them, or if the model was partitioned.
    """
    statement = _find_statement(bundle)
    if statement is None:
        return {}
    body = get_field(statement.body, "predicate", "buildDefinition", of=dict)
    stages = get_field(body, "internalParameters", "stages", of=dict)
    reports = []
    for label in stages:
        key = get_field(stages, label, "key", of=str)
        artifact = store.find(key) if _KEY.fullmatch(key) else None
        if artifact is not None:
            reports.append(StageReport(f"{statement.recipe}:{label}", facts=artifact.facts))
    if sum(report.stage == build.NAME for report in reports) != 1:
        return {}
    return list_kernel_calls(ReportedFacts(reports).of(reports))


def _check_kind(name: str, peer: Peer, module: Module, statement: Statement | None) -> None:
    kind = peer.kind
    if statement:
        kind = (
            str(get_field(statement.settings, import_model.NAME, "model", "kind", of=str)) or kind
        )
    device = module.manifest["target"]["tvm"]["kind"]
    if reason := peer.unsupported_reason(kind, device):
        raise UsageError(f"--compare {name}: {reason}")


def _find_model(
    model: Path | None, statement: Statement | None, store: LocalStore
) -> tuple[Path, str]:
    digests = (
        {
            str(entry["name"]): str(entry["digest"]["sha256"])
            for entry in statement.dependencies("source")
        }
        if statement
        else {}
    )
    digest = digests.get(_MODEL, "")
    if model is None:
        if paths := find_files(store, digest):
            return Path(paths[0]), ""
        reason = (
            f"no file with its sha256, {digest[:12]}…, is known here"
            if digest
            else "no statement is beside it"
        )
        raise UsageError(
            f"--compare: the model that this library was built from is not known: {reason}",
            fix="name it: --model FILE",
        )
    if not is_file(model):
        raise UsageError(f"--model: {missing_file_text(model)}")
    is_other = digest and hash_file(str(model)) != digest
    return model, "it is not the file that the library was built from" if is_other else ""


def _list_files(path: Path, kind: str, store: LocalStore) -> dict[str, Path]:
    frontend = FRONTENDS[kind]
    source = frontend.SOURCE.model_validate({kind: str(path.absolute())})
    listed = frontend.files(source, path.parent, lambda *_: str(path), SourceFiles(store))
    return {file.role: Path(file.path) for file in listed}


def _bound_inputs(
    files: Mapping[str, Path], kind: str, module: Module, statement: Statement | None
) -> Iterator[tuple[str, Array]]:
    """Yield the constants that the recipe binds inputs of the model to."""
    taken = {spec.name for spec in module.inputs}
    for entry in FRONTENDS[kind].read_facts(files).inputs:
        if entry.name in taken or not entry.is_required:
            continue
        settings = statement.settings if statement else {}
        bound: dict[str, Any] = get_field(
            settings, import_model.NAME, "inputs", entry.name, of=dict
        )
        if "value" not in bound:
            raise UsageError(
                f"--compare: the model has an input {quoted(entry.name)}, and the library does not",
                fix="name the model that the library was built from: --model FILE",
            )
        dtype = str(bound.get("dtype") or entry.dtype)
        shape: Sequence[int] = bound.get("shape") or ()
        yield entry.name, array_of(TensorSpec(entry.name, tuple(shape), dtype), bound["value"])


def _tolerance_of(statement: Statement | None) -> Tolerance:
    """Return the tolerance that `verify` had; without a statement that of float32."""
    default = tolerance_for(FLOAT32, rtol=None, atol=None)
    recorded = get_field(statement.verdict, "tolerance", of=dict) if statement else {}
    if not recorded:
        return default
    try:
        fields = {name: recorded[name] for name in Tolerance._fields if name in recorded}
        return Tolerance(**fields)
    except TypeError as error:
        raise BundleError(
            f"the statement of the library has no valid tolerance: {error}"
        ) from error
