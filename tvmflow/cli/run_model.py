"""`tvmflow run-model`: a delivered library, run on images, the arrays of a file or random numbers, and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.cli.arguments import JSON_HELP
from tvmflow.cli.options import argument, flag, option, positive_int
from tvmflow.cli.output import print_result
from tvmflow.core.errors import EXIT_OK, BundleError, StageError, UsageError
from tvmflow.core.formatting import count_text
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.statistics import summarize
from tvmflow.core.tables import columns
from tvmflow.core.types import Json
from tvmflow.runtime import loading, samples
from tvmflow.runtime.image_files import read_files
from tvmflow.runtime.labels import BEST, format_predictions, predictions_json
from tvmflow.runtime.module import Module

_RANDOM: Final = "random"
_FILLS: Final[Mapping[str, int]] = {"zeros": 0, "ones": 1}


@dataclass(frozen=True, kw_only=True)
class RunModelOptions:
    """The options of `tvmflow run-model`."""

    bundle: Path = argument("BUNDLE", "a delivered .tvmflow file")
    images: tuple[str, ...] = argument(
        "IMAGE", "images, for a model that takes them: the best classes are shown", nargs="*"
    )
    trusted: tuple[Path, ...] = option(
        "KEYS",
        "run only what one of these keys signed: a .pub file or a folder of them (may be repeated)",
        default=(),
    )
    input: Path | None = option(
        "NPZ",
        "an array for each input, under its name; more samples than a batch holds run in batches",
    )
    fill: str = option(
        None,
        f"the values of inputs without --input ({_RANDOM})",
        default=_RANDOM,
        choices=(_RANDOM, *_FILLS),
    )
    seed: int = option("N", "the seed of random inputs (0)", default=0)
    output: Path | None = option("NPZ", "write the outputs to this file, by name")
    top: int | None = option(
        "N",
        f"show the indices of the N largest elements of each sample's outputs; for images the N best classes ({BEST})",
        type=positive_int,
    )
    threads: int | None = option(
        "N",
        "threads of kernels (TVM_NUM_THREADS, else one for each core that may be used)",
        type=positive_int,
    )
    print_time: bool = flag("show the latency of a call")
    repeat: int = option("N", "repeats of a measurement (10)", default=10, type=positive_int)
    profile: bool = flag("show the time of each operator")
    json: bool = flag(JSON_HELP)


class _Element(NamedTuple):
    """One element of an output: its position in the flattened sample, and its value."""

    position: int
    value: float


class _Operator(NamedTuple):
    """The time that one operator takes in a call, in microseconds."""

    name: str
    calls: int
    us: float


class _Result(NamedTuple):
    """The outputs of a model, and the measurements that were requested.

    Attributes:
        model: Name of the model.
        target: Name of its target.
        samples: Number of samples that were run.
        outputs: Shape of each output.
        top: For each output and sample its largest elements, if they were asked for.
        predictions: The best classes of each image, as JSON.
        probabilities: What the probabilities of these are.
        ms: Statistics of the latency of a call in milliseconds, if it was measured.
        operators: The time of each operator, if it was measured.
    """

    model: str
    target: str
    samples: int
    outputs: Mapping[str, tuple[int, ...]]
    top: Mapping[str, list[list[_Element]]] | None = None
    predictions: Sequence[Mapping[str, Json]] | None = None
    probabilities: str | None = None
    ms: Mapping[str, float] | None = None
    operators: Sequence[_Operator] | None = None

    def to_json(self) -> Json:
        """Return what is known."""
        value = {name: value for name, value in self._asdict().items() if value is not None}
        if self.operators is not None:
            value["operators"] = [operator._asdict() for operator in self.operators]
        return value


def run_model(options: RunModelOptions) -> int:
    """Run a bundle on images, on the arrays of an npz file, or on random ones."""
    module = loading.load(
        options.bundle, trusted_keys=options.trusted or None, threads=options.threads
    )
    feed = _read_samples(module, options)
    outputs = samples.run_samples(module.run, feed)
    if options.output:
        samples.write_npz(options.output, outputs)
    shapes = {name: tuple(array.shape) for name, array in outputs.items()}
    manifest = module.manifest
    result = _Result(manifest["name"], manifest["target"]["name"], feed.total, shapes)
    if options.images and module.classes:
        result = _add_predictions(result, module, outputs, options)
    elif options.top:
        top = {name: _find_largest(array, options.top) for name, array in outputs.items()}
        result = result._replace(top=top)
    if options.print_time:
        times = module.latency(feed.batches[0], repeat=options.repeat)
        result = result._replace(ms=summarize([seconds * 1e3 for seconds in times])._asdict())
    if options.profile:
        profile = module.profile(feed.batches[0], repeat=options.repeat)
        operators = [_Operator(row.name, row.calls, row.seconds * 1e6) for row in profile]
        result = result._replace(operators=operators)
    lines = (repr(module), *_format_result(result, options.output))
    print_result(result.to_json(), lines, as_json=options.json)
    return EXIT_OK


def _add_predictions(
    result: _Result, module: Module, outputs: Mapping[str, samples.Array], options: RunModelOptions
) -> _Result:
    """Return the result with the best classes of each image."""
    assert module.classes is not None
    name = module.outputs[0].name
    best = module.classes.rank(outputs[name], options.top or BEST)
    return result._replace(
        predictions=predictions_json(options.images, best),
        probabilities=module.classes.describe(outputs[name], name),
    )


def _read_samples(module: Module, options: RunModelOptions) -> samples.Samples:
    if options.images:
        return _read_images(module, options)
    if options.input is None:
        if options.fill == _RANDOM:
            return samples.random_samples(module.inputs, {}, batches=1, seed=options.seed)
        return samples.constant_samples(module.inputs, _FILLS[options.fill])
    if not is_file(options.input):
        raise UsageError(f"--input: {missing_file_text(options.input)}")
    try:
        return samples.load_samples(module.inputs, options.input, source=f"--input {options.input}")
    except StageError as error:
        raise UsageError(error.message, fix=f"this model is {module!r}") from error


def _read_images(module: Module, options: RunModelOptions) -> samples.Samples:
    if options.input is not None:
        raise UsageError("there are images and --input", fix="give one of them")
    if len(module.inputs) != len(module.images):
        raise UsageError(
            "the inputs of this model are not images alone",
            fix=f"describe them in the recipe (`inputs: {{NAME: {{image: …}}}}`), or give --input; it is {module!r}",
        )
    try:
        preprocessing = module.find_preprocessing()
        return samples.image_samples(preprocessing, read_files(options.images, preprocessing.fit))
    except BundleError as error:
        raise UsageError(error.message, fix=error.fix) from error


def _find_largest(array: samples.Array, count: int) -> list[list[_Element]]:
    """Return the largest elements of each sample, the largest first; NaN is never among them."""
    import numpy as np

    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    order = np.argsort(np.where(np.isnan(rows), -np.inf, rows), axis=1)[:, ::-1][:, :count]
    return [
        [_Element(int(position), float(row[position])) for position in positions]
        for row, positions in zip(rows, order, strict=True)
    ]


# ---------------------------------------------------------------- output


def _format_result(result: _Result, output: Path | None) -> Iterator[str]:
    yield f"ran on {count_text(result.samples, 'sample')}" if result.samples > 1 else "ran once"
    if output:
        yield f"outputs: {output}"
    if result.predictions is not None:
        yield str(result.probabilities)
        yield from format_predictions(result.predictions)
    for name, rows in (result.top or {}).items():
        yield f"{name}:"
        for row in rows:
            yield "  " + "  ".join(f"{position}: {value:.6g}" for position, value in row)
    if result.ms is not None:
        yield "milliseconds per call:"
        yield "  ".join(f"{name:>10}" for name in result.ms)
        yield "  ".join(f"{value:>10.4f}" for value in result.ms.values())
    if result.operators is not None:
        yield from _format_operators(result.operators)


def _format_operators(operators: Sequence[_Operator]) -> list[str]:
    total = sum(operator.us for operator in operators) or 1.0
    rows = [("operator", "calls", "µs", "share")]
    rows += [(name, str(calls), f"{us:.1f}", f"{us / total:.1%}") for name, calls, us in operators]
    return columns(rows, right=frozenset({1, 2, 3}))


COMMANDS: Final = {"run-model": run_model}
