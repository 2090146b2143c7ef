"""`tvmflow run-model`: a delivered library, run on files or random numbers, timed, and compared with other runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.cli.definitions.run_model import _FILLS, _RANDOM, RunModelOptions
from tvmflow.cli.output import print_result
from tvmflow.cli.run_model_result import (
    ComparedRun,
    Element,
    ModelRun,
    Operator,
    format_run,
    summarize_output,
)
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, UsageError
from tvmflow.core.file_kinds import ARRAYS, BUNDLE, IMAGES, check_kind
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.statistics import summarize
from tvmflow.runtime import loading, samples
from tvmflow.runtime.input_files import InputFile, parse_input, read_inputs
from tvmflow.runtime.labels import BEST, predictions_json
from tvmflow.runtime.module import Module

_BUNDLE_SUFFIX: Final = ".tvmflow"


def run_model(options: RunModelOptions) -> int:
    """Run a bundle on images, arrays, or random numbers."""
    _check_bundle(options.bundle)
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
    feed = _read_samples(module, files, options)
    outputs = samples.run_samples(module.run, feed)
    if options.output:
        samples.write_npz(options.output, outputs)
    result = ModelRun(
        model=module.manifest["name"],
        target=module.manifest["target"]["name"],
        samples=feed.total,
        inputs="files" if files else _describe_fill(options),
        outputs={name: tuple(array.shape) for name, array in outputs.items()},
        summaries={name: summarize_output(array) for name, array in outputs.items()},
    )
    result = _add_best(result, module, outputs, files, options.top)
    result = _add_times(result, module, feed, options)
    if options.compare:
        result = result._replace(compared=_compare(module, feed, options))
    lines = (repr(module), *format_run(result, options.output))
    print_result(result.to_json(), lines, as_json=options.json)
    differs = any(runtime.differs for runtime in result.compared or ())
    return EXIT_VERIFY if differs else EXIT_OK


def _check_bundle(path: Path) -> None:
    """Check that a file may be a bundle.

    Raises:
        UsageError: when there is no file, or it is certainly something else.
    """
    check_kind(path, BUNDLE)
    if not is_file(path):
        inside = sorted(path.glob(f"*{_BUNDLE_SUFFIX}")) if path.is_dir() else []
        fix = f"name the bundle in it: {inside[0]}" if inside else "`tvmflow run RECIPE` builds one"
        raise UsageError(missing_file_text(path), fix=fix)


def _describe_fill(options: RunModelOptions) -> str:
    return f"random inputs (seed {options.seed})" if options.fill == _RANDOM else options.fill


def _read_samples(
    module: Module, files: Sequence[InputFile], options: RunModelOptions
) -> samples.Samples:
    for file in files:
        check_kind(Path(file.path), ARRAYS, IMAGES)
    if files:
        try:
            return read_inputs(module.inputs, module.images, files)
        except UsageError as error:
            raise UsageError(error.message, fix=error.fix or f"this model is {module!r}") from error
    if options.fill == _RANDOM:
        return samples.random_samples(module.inputs, {}, batches=1, seed=options.seed)
    return samples.constant_samples(module.inputs, _FILLS[options.fill])


def _add_best(
    result: ModelRun,
    module: Module,
    outputs: Mapping[str, samples.Array],
    files: Sequence[InputFile],
    top: int | None,
) -> ModelRun:
    """Return the result with the best classes of each image, or the largest elements that were asked for."""
    if (
        module.classes
        and files
        and all(file.is_image for file in files)
        and len(module.inputs) == 1
    ):
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
    """Return the result with the measurements that were asked for."""
    if options.print_time:
        times = module.latency(feed.batches[0], repeat=options.repeat)
        result = result._replace(ms=summarize([seconds * 1e3 for seconds in times])._asdict())
    if options.profile:
        profile = module.profile(feed.batches[0], repeat=options.repeat)
        operators = [Operator(row.name, row.calls, row.seconds * 1e6) for row in profile]
        result = result._replace(operators=operators)
    return result


def _compare(module: Module, feed: samples.Samples, options: RunModelOptions) -> list[ComparedRun]:
    # most calls of this command need no frontends
    from tvmflow.cli.run_model_comparison import compare_with, find_runtime

    store = options.store.locate()
    runtimes = [
        find_runtime(name, module, options.bundle, options.model, store) for name in options.compare
    ]
    return [compare_with(runtime, module, feed) for runtime in runtimes]


def _find_largest(array: samples.Array, count: int) -> list[list[Element]]:
    """Return the largest elements of each sample, the largest first; NaN is never among them."""
    import numpy as np

    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    order = np.argsort(np.where(np.isnan(rows), -np.inf, rows), axis=1)[:, ::-1][:, :count]
    return [
        [Element(int(position), float(row[position])) for position in positions]
        for row, positions in zip(rows, order, strict=True)
    ]


COMMANDS: Final = {"run-model": run_model}
