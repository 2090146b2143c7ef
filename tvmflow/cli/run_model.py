"""`tvmflow run-model`: a delivered library, run on files or random inputs, timed and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import StoreOptions
from tvmflow.cli.options import argument, flag, option, positive_int
from tvmflow.cli.output import check_output_file, print_result, write_file
from tvmflow.core.dimensions import choose_tuning_size, sizes_text, specs_at
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, UsageError
from tvmflow.core.formatting import count_text, excerpt, names_text, quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.text import did_you_mean

if TYPE_CHECKING:
    from tvmflow.cli.run_model_comparison import Element, ModelRun
    from tvmflow.core.types import Array, Json
    from tvmflow.runtime import samples
    from tvmflow.runtime.input_files import InputFile
    from tvmflow.runtime.module import Module

_RANDOM: Final = "random"

_FILLS: Final[Mapping[str, int]] = {"zeros": 0, "ones": 1}


class RunModelOptions(StoreOptions):
    """Run a bundle on images, arrays, or random numbers.

    Examples:
        # the classes of images
        tvmflow run-model dist/net/host/net.tvmflow cat.jpg dog.jpg --top 3
        # all samples of an npz file; write the outputs
        tvmflow run-model net.tvmflow in.npz --output out.npz
        # a file for each of two inputs, an array and numbers as text
        tvmflow run-model net.tvmflow ids=ids.npy scale=scale.txt
        # random inputs with a size for a dynamic dimension, timed
        tvmflow run-model net.tvmflow --size seq=37 --print-time
        # beside another runtime
        tvmflow run-model net.tvmflow --compare onnxruntime
        # when each kernel ran, and which nodes it computes, for Perfetto
        tvmflow run-model net.tvmflow --trace trace.json
    """

    bundle: Path = argument("BUNDLE", "a delivered .tvmflow file")
    files: tuple[str, ...] = argument(
        "INPUT",
        "files with inputs, FILE or NAME=FILE: npz (an array for each input, by name), npy, numbers as text, images; - is the standard input",
        nargs="*",
    )
    trusted: tuple[Path, ...] = option(
        "KEYS",
        "run only what one of these keys signed: a .pub file or a folder of them (may be repeated)",
        default=(),
    )
    input: tuple[str, ...] = option(
        "INPUT",
        "the same as a file without this option; more samples than a batch holds run in batches (may be repeated)",
        default=(),
    )
    fill: str = option(
        None,
        f"the values of inputs where no file is given ({_RANDOM})",
        default=_RANDOM,
        choices=(_RANDOM, *_FILLS),
    )
    size: tuple[str, ...] = option(
        "NAME=N",
        "the size of a dynamic dimension of random inputs; without it, one in the middle of its range (may be repeated)",
        default=(),
    )
    seed: int = option("N", "the seed of random inputs (0)", default=0)
    output: Path | None = option("NPZ", "write the outputs to this file, by name")
    top: int | None = option(
        "N",
        "show the indices of the N largest elements of each sample's outputs; for images the N best classes (5)",
        type=positive_int,
    )
    threads: int | None = option(
        "N",
        "threads of kernels (TVM_NUM_THREADS, else one for each core that may be used)",
        type=positive_int,
    )
    print_time: bool = flag("show the latency of a call")
    repeat: int = option(
        "N", "repeats of a measurement, and calls in a trace (10)", default=10, type=positive_int
    )
    profile: bool = flag("show the time of each operator")
    trace: Path | None = option(
        "FILE",
        "write when each kernel of some calls (--repeat) ran, and the nodes that it computes, for Perfetto and other viewers; packed if it ends in .gz",
    )
    compare: tuple[str, ...] = option(
        "RUNTIME",
        "run the model in onnxruntime, openvino, pytorch or tensorrt, too, and compare outputs and latency (may be repeated)",
        default=(),
    )
    model: Path | None = option(
        "FILE",
        "the model's file for --compare; without it, the one that the library was built from, if this machine still has it",
    )


_BUNDLE_SUFFIX: Final = ".tvmflow"


def run_model(options: RunModelOptions) -> int:
    from tvmflow.cli.run_model_comparison import (
        ModelRun,
        compare_with,
        find_runtime,
        format_run,
        summarize_output,
    )
    from tvmflow.runtime import loading, npz, samples
    from tvmflow.runtime.input_files import parse_input

    _check_bundle(options.bundle)
    check_output_file(options.trace, (str(options.bundle),))
    if options.model and not options.compare:
        raise UsageError(
            "--model names the model that --compare runs, and nothing is compared",
            fix="add --compare onnxruntime, or another runtime",
        )
    module = loading.load(
        options.bundle, trusted_keys=options.trusted or None, threads=options.threads
    )
    names = [spec.name for spec in module.inputs]
    files = [parse_input(word, names) for word in (*options.files, *options.input)]
    sizes = _choose_sizes(module, files, options.size)
    feed = _read_samples(module, files, options, sizes)
    outputs = samples.run_samples(module.run, feed)
    if options.output:
        npz.write_npz(options.output, outputs)
    fill = f"random inputs (seed {options.seed})" if options.fill == _RANDOM else options.fill
    result = ModelRun(
        model=module.manifest["name"],
        target=module.manifest["target"]["name"],
        samples=feed.total,
        inputs="files" if files else f"{fill} at {sizes_text(sizes)}" if sizes else fill,
        outputs={name: tuple(array.shape) for name, array in outputs.items()},
        summaries={name: summarize_output(array) for name, array in outputs.items()},
    )
    result = _add_best(result, module, outputs, files, options.top)
    result = _add_times(result, module, feed, options)
    if options.trace:
        result = result._replace(trace=_write_trace(module, feed, options))
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
    from tvmflow.core.file_kinds import BUNDLE, check_kind

    check_kind(path, BUNDLE)
    if not is_file(path):
        inside = sorted(path.glob(f"*{_BUNDLE_SUFFIX}")) if path.is_dir() else []
        fix = f"name the bundle in it: {inside[0]}" if inside else "`tvmflow run RECIPE` builds one"
        raise UsageError(missing_file_text(path), fix=fix)


def _choose_sizes(
    module: Module, files: Sequence[InputFile], words: Sequence[str]
) -> dict[str, int]:
    """Return the sizes of inputs without a file, by dimension: those of the user, and representative ones."""
    dimensions = {dimension.name: dimension for dimension in module.dimensions}
    if files and words:
        raise UsageError(
            "--size is for inputs without a file, and those of files have their own sizes",
            fix="leave --size out",
        )
    chosen = {name: choose_tuning_size(dimension) for name, dimension in dimensions.items()}
    for word in words:
        name, _, text = word.partition("=")
        if name not in dimensions:
            known = (
                f"it has {names_text([*dimensions])}" if dimensions else "all its sizes are fixed"
            )
            hint = did_you_mean(name, dimensions)
            raise UsageError(
                f"--size {excerpt(word)}: the model has no dimension {quoted(name)}{hint} ({known})"
            )
        if not text.isdecimal():
            raise UsageError(f"--size {excerpt(word)}: write a whole number, such as {name}=37")
        chosen[name] = int(text)
        if problem := dimensions[name].find_problem(chosen[name]):
            raise UsageError(f"--size {excerpt(word)}: {problem}")
    return chosen


def _read_samples(
    module: Module, files: Sequence[InputFile], options: RunModelOptions, sizes: Mapping[str, int]
) -> samples.Samples:
    from tvmflow.core.file_kinds import ARRAYS, IMAGES, check_kind
    from tvmflow.runtime import samples
    from tvmflow.runtime.input_files import read_inputs

    for file in files:
        check_kind(Path(file.path), ARRAYS, IMAGES)
    if files:
        try:
            return read_inputs(module.inputs, module.images, files, module.dimensions)
        except UsageError as error:
            raise UsageError(error.message, fix=error.fix or f"this model is {module!r}") from error
    inputs = specs_at(module.inputs, sizes)
    if options.fill == _RANDOM:
        return samples.random_samples(inputs, {}, batches=1, seed=options.seed)
    return samples.constant_samples(inputs, _FILLS[options.fill])


def _add_best(
    result: ModelRun,
    module: Module,
    outputs: Mapping[str, Array],
    files: Sequence[InputFile],
    top: int | None,
) -> ModelRun:
    """Return the result with the best classes of each image, or the requested largest elements."""
    from tvmflow.runtime.labels import BEST, predictions_json

    has_images = files and all(file.is_image for file in files)
    if module.classes and has_images and len(module.inputs) == 1:
        name = module.outputs[0].name
        best = module.classes.rank(outputs[name], top or BEST)
        return result._replace(
            predictions=predictions_json([file.path for file in files], best),
            probabilities=module.classes.describe(outputs[name], name),
        )
    if top:
        largest = {name: _find_largest(array, top) for name, array in outputs.items()}
        return result._replace(top=largest)
    return result


def _add_times(
    result: ModelRun, module: Module, feed: samples.Samples, options: RunModelOptions
) -> ModelRun:
    from tvmflow.cli.run_model_comparison import Operator
    from tvmflow.core.statistics import summarize

    if options.print_time:
        times = module.latency(feed.batches[0], repeat=options.repeat)
        result = result._replace(ms=summarize([seconds * 1e3 for seconds in times])._asdict())
    if options.profile:
        profile = module.profile(feed.batches[0], repeat=options.repeat)
        operators = [Operator(row.name, row.calls, row.seconds * 1e6) for row in profile]
        result = result._replace(operators=operators)
    return result


def _write_trace(
    module: Module, feed: samples.Samples, options: RunModelOptions
) -> Mapping[str, Json]:
    from tvmflow.cli.run_model_comparison import find_kernel_nodes_of
    from tvmflow.core.trace_events import Trace
    from tvmflow.targets.backends.cpu import CpuBackend

    path = options.trace
    assert path is not None
    name, target = module.manifest["name"], module.manifest["target"]
    kind, threads = target["tvm"]["kind"], count_text(module.threads, "thread")
    place = f"calls with {threads}" if kind == CpuBackend.KIND else f"calls on {kind}"
    nodes = find_kernel_nodes_of(options.bundle, options.store.locate())
    calls = module.trace(feed.batches[0], repeat=options.repeat)
    trace = Trace({"model": name, "target": target["name"], "threads": module.threads})
    track = trace.track(f"{name} for {target['name']}", place)
    for number, call in enumerate(calls, 1):
        track.slice(f"call {number}", call.began_s, call.ended_s - call.began_s)
        # a kernel that is called several times computes other nodes each time
        left = {kernel: list(known) for kernel, known in nodes.items()}
        for kernel in call.kernels:
            known = left.get(kernel.name)
            arguments = {"nodes": ", ".join(known.pop(0).nodes) if known else None}
            track.slice(kernel.name, kernel.began_s, kernel.seconds, arguments)
    write_file(path, trace.to_bytes(path))
    return {"path": str(path), "calls": len(calls), "names_nodes": bool(nodes)}


def _find_largest(array: Array, count: int) -> list[list[Element]]:
    """Return the largest elements of each sample, the largest first; NaN is never among them."""
    import numpy as np

    from tvmflow.cli.run_model_comparison import Element

    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    order = np.argsort(np.where(np.isnan(rows), -np.inf, rows), axis=1)[:, ::-1][:, :count]
    return [
        [Element(int(position), float(row[position])) for position in positions]
        for row, positions in zip(rows, order, strict=True)
    ]


COMMANDS: Final = {"run-model": run_model}
