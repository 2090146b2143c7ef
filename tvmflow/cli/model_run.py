"""Run a delivered library on files or random inputs; time it, and compare it with other runtimes."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.cli.output import check_output_file, print_result, write_file
from tvmflow.cli.run_model_options import FILLS, RANDOM, RunModelOptions
from tvmflow.core.dimensions import choose_tuning_size, sizes_text, specs_at
from tvmflow.core.documents import get_field
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, BundleError, UsageError
from tvmflow.core.file_kinds import ARRAYS, BUNDLE, IMAGES, check_kind
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, excerpt, latency_text, names_text, quoted
from tvmflow.core.logs import explain_wait
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.statistics import judge_ratio, summarize
from tvmflow.core.text import columns, did_you_mean
from tvmflow.core.trace_events import Trace
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.engine.builds import list_kernel_calls
from tvmflow.engine.report import ReportedFacts, StageReport
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.inputs import array_of
from tvmflow.frontends.peers import PEERS, open_peer
from tvmflow.runtime import loading, npz, samples
from tvmflow.runtime.input_files import InputFile, parse_input, read_inputs
from tvmflow.runtime.labels import BEST, format_predictions, predictions_json
from tvmflow.runtime.module import Module
from tvmflow.runtime.statements import Statement, find_statements, read_statements
from tvmflow.stages import build, import_model
from tvmflow.stages.build import KernelCall
from tvmflow.stages.verify.comparison import Tolerance, compare, tolerance_for
from tvmflow.stages.verify.verdict import FLOAT32
from tvmflow.store.file_digests import find_files
from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles
from tvmflow.targets.backends.cpu import CpuBackend

_MAX_SHOWN: Final = 8
_BUNDLE_SUFFIX: Final = ".tvmflow"
_KEY: Final = re.compile("[0-9a-f]{64}")


class Operator(NamedTuple):
    """The time of one operator in a call, in microseconds."""

    name: str
    calls: int
    us: float


class OutputSummary(NamedTuple):
    """An output: all values if there are few, or else minimum, maximum and mean of the finite values."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    infinite: int


class ComparedOutput(NamedTuple):
    """An output compared with that of another runtime, or the problem that prevents it.

    `of_largest` is the largest error relative to the largest value of the other runtime's output.
    """

    agrees: bool
    largest_error: float
    of_largest: float
    problem: str = ""


class ComparedRun(NamedTuple):
    """The same model in another runtime.

    Both latencies are medians in seconds of interleaved calls; `low` and `high` are the confidence limits of the
    library's speedup; `note` is about the runtime or the file.
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
    """The outputs of a model, and the requested measurements; None for others.

    `top` holds (index in the flattened sample, value) of the largest elements of each output and sample, `predictions`
    the best classes of each image, `ms` the latency statistics of a call, and `trace` the written trace.
    """

    model: str
    target: str
    samples: int
    inputs: str
    outputs: Mapping[str, tuple[int, ...]]
    summaries: Mapping[str, OutputSummary]
    top: Mapping[str, list[list[tuple[int, float]]]] | None = None
    predictions: Sequence[Mapping[str, Json]] | None = None
    probabilities: str | None = None
    ms: Mapping[str, float] | None = None
    operators: Sequence[Operator] | None = None
    trace: Mapping[str, Json] | None = None
    compared: Sequence[ComparedRun] | None = None

    def to_json(self) -> Json:
        """Return the known facts."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def run(options: RunModelOptions) -> int:
    _check_bundle(options.bundle)
    check_output_file(options.trace, (str(options.bundle),))
    if options.model and not options.compare:
        raise UsageError(
            "--model names the model that --compare runs, and nothing is compared",
            fix="add --compare onnxruntime, or another runtime",
        )
    trusted_keys = options.trusted or None
    module = loading.load(options.bundle, trusted_keys=trusted_keys, threads=options.threads)
    names = [spec.name for spec in module.inputs]
    files = [parse_input(word, names) for word in (*options.files, *options.input)]
    sizes = _choose_sizes(module, files, options.size)
    feed = _read_samples(module, files, options, sizes)
    outputs = samples.run_samples(module.run, feed)
    if options.output:
        npz.write_npz(options.output, outputs)
    fill = f"random inputs (seed {options.seed})" if options.fill == RANDOM else options.fill
    result = ModelRun(
        model=module.manifest["name"],
        target=module.manifest["target"]["name"],
        samples=feed.total,
        inputs="files" if files else f"{fill} at {sizes_text(sizes)}" if sizes else fill,
        outputs={name: tuple(array.shape) for name, array in outputs.items()},
        summaries={name: summarize_output(array) for name, array in outputs.items()},
        **_find_best(module, outputs, files, options.top),
    )
    if options.print_time:
        times = module.latency(feed.batches[0], repeat=options.repeat)
        result = result._replace(ms=summarize([seconds * 1e3 for seconds in times])._asdict())
    if options.profile:
        profile = module.profile(feed.batches[0], repeat=options.repeat)
        operators = [Operator(row.name, row.calls, row.seconds * 1e6) for row in profile]
        result = result._replace(operators=operators)
    if options.trace:
        trace = _write_trace(module, feed, options.trace, options)
        result = result._replace(trace=trace)
    if options.compare:
        store = options.store.locate()
        runtimes = [
            find_runtime(name, module, options.bundle, options.model, store)
            for name in options.compare
        ]
        result = result._replace(compared=[compare_with(other, module, feed) for other in runtimes])
    lines = (repr(module), *format_run(result, options.output))
    print_result(result, lines, options)
    differs = any(runtime.differs for runtime in result.compared or ())
    return EXIT_VERIFY if differs else EXIT_OK


def _check_bundle(path: Path) -> None:
    check_kind(path, BUNDLE)
    if not is_file(path):
        inside = sorted(path.glob(f"*{_BUNDLE_SUFFIX}")) if path.is_dir() else []
        fix = f"name the bundle in it: {inside[0]}" if inside else "`tvmflow run RECIPE` builds one"
        raise UsageError(missing_file_text(path), fix=fix)


def _choose_sizes(
    module: Module, files: Sequence[InputFile], words: Sequence[str]
) -> dict[str, int]:
    dimensions = {dimension.name: dimension for dimension in module.dimensions}
    if files and words:
        raise UsageError(
            "--size is for inputs without a file; files determine the sizes of their inputs",
            fix="leave --size out",
        )
    chosen = {name: choose_tuning_size(dimension) for name, dimension in dimensions.items()}
    for word in words:
        name, _, text = word.partition("=")
        if name not in dimensions:
            listed = f"it has {names_text([*dimensions])}"
            known = listed if dimensions else "all its sizes are fixed"
            problem = f"the model has no dimension {quoted(name)}{did_you_mean(name, dimensions)}"
            raise UsageError(f"--size {excerpt(word)}: {problem} ({known})")
        if not text.isdecimal():
            raise UsageError(f"--size {excerpt(word)}: write a whole number, such as {name}=37")
        chosen[name] = int(text)
        if problem := dimensions[name].find_problem(chosen[name]):
            raise UsageError(f"--size {excerpt(word)}: {problem}")
    return chosen


def _read_samples(
    module: Module, files: Sequence[InputFile], options: RunModelOptions, sizes: Mapping[str, int]
) -> samples.Samples:
    for file in files:
        check_kind(Path(file.path), ARRAYS, IMAGES)
    if files:
        try:
            return read_inputs(module.inputs, module.images, files, module.dimensions)
        except UsageError as error:
            raise UsageError(error.message, fix=error.fix or f"this model is {module!r}") from error
    inputs = specs_at(module.inputs, sizes)
    if options.fill == RANDOM:
        return samples.random_samples(inputs, {}, batches=1, seed=options.seed)
    return samples.constant_samples(inputs, FILLS[options.fill])


def _find_best(
    module: Module, outputs: Mapping[str, Array], files: Sequence[InputFile], top: int | None
) -> dict[str, Any]:
    """Return the best classes of each image, or the requested largest elements, as fields."""
    has_images = files and all(file.is_image for file in files)
    if module.classes and has_images and len(module.inputs) == 1:
        name = module.outputs[0].name
        best = module.classes.rank(outputs[name], top or BEST)
        return {
            "predictions": predictions_json([file.path for file in files], best),
            "probabilities": module.classes.describe(outputs[name], name),
        }
    largest = {name: _find_largest(array, top) for name, array in outputs.items()} if top else None
    return {"top": largest}


def _write_trace(
    module: Module, feed: samples.Samples, path: Path, options: RunModelOptions
) -> Mapping[str, Json]:
    name, target = module.manifest["name"], module.manifest["target"]
    kind, threads = target["tvm"]["kind"], count_text(module.threads, "thread")
    place = f"calls with {threads}" if kind == CpuBackend.KIND else f"calls on {kind}"
    nodes = find_kernel_nodes_of(options.bundle, options.store.locate())
    calls = module.trace(feed.batches[0], repeat=options.repeat)
    trace = Trace({"model": name, "target": target["name"], "threads": module.threads})
    track = trace.track(f"{name} for {target['name']}", place)
    for number, call in enumerate(calls, 1):
        track.slice(f"call {number}", call.began_s, call.ended_s - call.began_s)
        # Each call of a kernel computes other nodes.
        left = {kernel: list(known) for kernel, known in nodes.items()}
        for kernel in call.kernels:
            known = left.get(kernel.name)
            arguments = {"nodes": ", ".join(known.pop(0).nodes) if known else None}
            track.slice(kernel.name, kernel.began_s, kernel.seconds, arguments)
    write_file(path, trace.to_bytes(path))
    return {"path": str(path), "calls": len(calls), "names_nodes": bool(nodes)}


def _find_largest(array: Array, count: int) -> list[list[tuple[int, float]]]:
    """Return the largest elements of each sample, the largest first; NaN is never among them."""
    import numpy as np

    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    order = np.argsort(np.where(np.isnan(rows), -np.inf, rows), axis=1)[:, ::-1][:, :count]
    return [
        [(int(position), float(row[position])) for position in positions]
        for row, positions in zip(rows, order, strict=True)
    ]


def summarize_output(array: Array) -> OutputSummary:
    """Return a summary of an output's values."""
    import numpy as np

    floats = array.astype(np.float64)
    finite = floats[np.isfinite(floats)]
    has_all = array.size <= _MAX_SHOWN and finite.size == array.size
    return OutputSummary(
        dtype=array.dtype.name,
        shape=tuple(array.shape),
        values=tuple(floats.reshape(-1).tolist()) if has_all else (),
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        nan=int(np.isnan(floats).sum()),
        infinite=int(np.isinf(floats).sum()),
    )


def format_run(result: ModelRun, output: Path | None) -> Iterator[str]:
    """Yield the result of a run as lines of text."""
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
    yield f"compared with {runtime.runtime} on {runtime.model}{note}:"
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
    word, factors = "fast", [runtime.low, runtime.speedup, runtime.high]
    if judgement != "more":
        word, factors = "slow", [1 / factor for factor in factors]
    low, ratio, high = sorted(factors)
    yield f"  {ratio:.2f} times as {word}: {times} ({low:.2f} to {high:.2f})"


_MODEL: Final = "model"


class OtherRuntime(NamedTuple):
    """A runtime, one of `PEERS`, that can run the model of a library.

    `inputs` are the library's inputs, then the model's inputs that the recipe binds to constants (`bound`). `tolerance`
    is that of `verify`; `note` is about the model's file.
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

    Without `model`, the store is searched for the file named by the statement beside the bundle.

    Raises:
        UsageError: if the runtime is unknown or cannot run such models, or a file is missing.
    """
    if name not in PEERS:
        known = names_text(list(PEERS))
        hint = did_you_mean(name, PEERS)
        raise UsageError(f"--compare: there is no runtime {quoted(name)}{hint} (there are {known})")
    peer, statement = PEERS[name], _find_statement(bundle)
    device, kind = module.manifest["target"]["tvm"]["kind"], peer.kind
    if statement:
        built_from = get_field(statement.settings, import_model.NAME, "model", "kind", of=str)
        kind = str(built_from) or kind
    if reason := peer.unsupported_reason(kind, device):
        raise UsageError(f"--compare {name}: {reason}")
    path, note = _find_model(model, statement, store)
    frontend = FRONTENDS[peer.kind]
    source = frontend.SOURCE.model_validate({peer.kind: str(path.absolute())})
    listed = frontend.files(source, path.parent, lambda *_: str(path), SourceFiles(store))
    files = {file.role: Path(file.path) for file in listed}
    bound = dict(_bound_inputs(files, peer.kind, module, statement))
    constants = (TensorSpec(n, array.shape, array.dtype.name) for n, array in bound.items())
    return OtherRuntime(
        name=name,
        files=files,
        inputs=(*module.inputs, *constants),
        bound=bound,
        tolerance=_tolerance_of(statement),
        note=note,
    )


def compare_with(runtime: OtherRuntime, module: Module, feed: samples.Samples) -> ComparedRun:
    """Run a model in another runtime, and measure both interleaved.

    Raises:
        StageError: if the runtime rejects the model.
        EnvironmentProblem: if the runtime is not installed.
    """
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
        bound, first = runtime.bound, feed.batches[0]
        expected = samples.run_samples(lambda batch: peer.run({**batch, **bound}), feed)
        actual = samples.run_samples(module.run, feed)
        # This import loads TVM, which reading a bundle does not need.
        from tvmflow.stages.verify.latency import measure_peer

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


def _find_statement(bundle: Path) -> Statement | None:
    digest = hash_file(str(bundle))
    for path in find_statements(bundle):
        for signed in read_statements(path, ()):
            statement = signed.statement
            if statement and digest in statement.names and not statement.is_of_measurements:
                return statement
    return None


def find_kernel_nodes_of(bundle: Path, store: LocalStore) -> dict[str, tuple[KernelCall, ...]]:
    """Return the calls of each kernel of a bundle, with the model's nodes that each call computes.

    The result is empty for partitioned models, or if the statement or its results in the store are missing.
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


def _find_model(
    model: Path | None, statement: Statement | None, store: LocalStore
) -> tuple[Path, str]:
    sources = statement.dependencies("source") if statement else ()
    digests = {str(entry["name"]): str(entry["digest"]["sha256"]) for entry in sources}
    digest = digests.get(_MODEL, "")
    if model is None:
        if paths := find_files(store, digest):
            return Path(paths[0]), ""
        is_unknown = f"no file with its sha256, {digest[:12]}…, is known here"
        reason = is_unknown if digest else "no statement is beside it"
        raise UsageError(
            f"--compare: the model that this library was built from is not known: {reason}",
            fix="name it: --model FILE",
        )
    if not is_file(model):
        raise UsageError(f"--model: {missing_file_text(model)}")
    is_other = digest and hash_file(str(model)) != digest
    return model, "it is not the file that the library was built from" if is_other else ""


def _bound_inputs(
    files: Mapping[str, Path], kind: str, module: Module, statement: Statement | None
) -> Iterator[tuple[str, Array]]:
    """Yield the inputs that the recipe binds to constants, with their values."""
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
