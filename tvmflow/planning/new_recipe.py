"""Generator of a recipe for a model: with the model's inputs, and comments on optional changes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core.errors import ImportFailed, RecipeError, UsageError
from tvmflow.core.file_kinds import MODEL, check_kind, recognize
from tvmflow.core.formatting import names_text
from tvmflow.core.generated_text import shell_word
from tvmflow.core.named_files import find_invalid_name, is_file, missing_file_text
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import InputFile, Json
from tvmflow.core.version import page_url, schema_url
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import InputRequest, ModelInput
from tvmflow.frontends.inputs import (
    SIZE,
    InputLine,
    dimensions_text,
    find_mismatches,
    find_output_problems,
    suggest_dimensions,
    suggest_inputs,
    suggest_shape,
)
from tvmflow.frontends.mxnet import list_epochs
from tvmflow.frontends.pytorch import is_factory
from tvmflow.frontends.states import suggest_states
from tvmflow.recipe import ModelSource, Recipe
from tvmflow.recipe.yaml_files import Problem, parse_yaml, validate, write_yaml
from tvmflow.store.addresses import InvalidAddress, check_address, file_name, is_address
from tvmflow.store.source_files import SourceFiles, UnpinnedFiles, pins_of
from tvmflow.targets.backends import backend_for
from tvmflow.targets.backends.cuda.gpu import detect_gpu
from tvmflow.targets.browser import find_chromium
from tvmflow.targets.emulation import find_emulated_arch, find_qemu
from tvmflow.targets.host import find_system_mismatch, read_host
from tvmflow.targets.linking import LINKERS
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.presets import NAMES, OTHER_NAMES, PRESETS, find_presets
from tvmflow.targets.tvm_target import cpu_triple, gpu_arch

SUFFIX: Final = ".tvmflow.yaml"
"""Suffix by which editors recognize recipes."""

_SYMBOL: Final = "-symbol.json"
_MAX_NAME: Final = 100
_FIELDS: Final = {".onnx": "onnx", ".pt2": "pytorch", ".tflite": "tflite", _SYMBOL: "mxnet"}
# (maximum bytes of a model, suggested minutes of tuning).
_BUDGETS: Final = ((1 << 20, 5.0), (100 << 20, 15.0))
_LARGEST_BUDGET: Final = 30.0
# A search of more minutes than this delivers interim results, about `_PARTS` times.
_MIN_IN_PARTS: Final = 2.0
_PARTS: Final = 3
_SHOWN_INPUTS: Final = 3
# The batch size in the example for `--shape`.
_OTHER_BATCH: Final = "8"
_NO_CHECK: Final = "{against: none}"
_EXPORT_AGAIN: Final = "change inputs and outputs where the model is exported"


class Model(NamedTuple):
    """A model for a recipe: `source` holds the fields below `model`, `size` the bytes of its local files.

    `states` are the inputs that look like states, as `state` in a recipe has them.
    """

    name: str
    kind: str
    source: Mapping[str, Json]
    inputs: tuple[ModelInput, ...]
    size: int
    states: Mapping[str, str] = MappingProxyType({})


class Choices(NamedTuple):
    """A user's choices for a recipe; `is_dynamic` keeps dynamic dimensions."""

    targets: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}
    minutes: float | None = None
    is_dynamic: bool = False
    is_quantized: bool = False


class NewRecipe(NamedTuple):
    """The text of a recipe, and its gaps and notes.

    `unsized_lines` are the numbers of lines with SIZE in place of an unknown size; `unsized_shapes` holds the inputs
    with such sizes. `batches_of_one`: the inputs whose dynamic batch became 1, with their shapes in model and recipe.
    """

    text: str
    unsized_lines: tuple[int, ...]
    unsized_shapes: Mapping[str, tuple[str, ...]]
    batches_of_one: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType({})

    def describe_batch(self) -> list[str]:
        """Return a note about dynamic batch sizes that became 1 and how to change them, if there are any."""
        if not self.batches_of_one:
            return []
        inputs = [f"{name} {dims}" for name, (dims, _) in self.batches_of_one.items()]
        names = names_text(inputs, _SHOWN_INPUTS)
        name, (_, shape) = next(iter(self.batches_of_one.items()))
        other = ",".join(_OTHER_BATCH if size == "1" else size for size in shape)
        return [
            f"the batch size is dynamic in the model and 1 here: {names}; "
            f"for another one: --shape {name}={other}"
        ]


def inspect_model(model: str, folder: Path, sources: SourceFiles) -> Model:
    """Return a model's fields for a recipe, without importing a framework.

    Addresses are pinned: on the Hub by the current commit, elsewhere by digests.

    Raises:
        UsageError: if the file is not a model that can be imported.
        RecipeError: if a frontend cannot read the model.
        DownloadError: if the address cannot be looked up.
    """
    kind = _find_kind(model)
    model = sources.pin(model)
    # Paths are relative to the current folder, because the recipe's folder may not exist yet.
    fields, pins = _describe_source(kind, model, Path()), {}
    try:
        files = _list_files(model, kind, fields, sources)
    except UnpinnedFiles as error:
        pins = pins_of(error.files)
        files = _list_files(model, kind, {**fields, **pins}, sources)
    paths = {file.role: Path(file.path) for file in files}
    try:
        facts = FRONTENDS[kind].read_facts(paths)
        inputs = FRONTENDS[kind].list_dynamic_inputs(paths)
    except ImportFailed as error:
        raise UsageError(error.message, fix=error.fix) from error
    if problems := list(find_output_problems([output.name for output in facts.outputs])):
        raise UsageError("\n".join(problems), fix=_EXPORT_AGAIN)
    return Model(
        name=name_of(model),
        kind=kind,
        source={**_describe_source(kind, model, folder), **pins},
        inputs=tuple(inputs),
        size=sum(path.stat().st_size for path in paths.values()),
        states=facts.states
        or suggest_states(*([v.name for v in values] for values in (inputs, facts.outputs))),
    )


def _list_files(
    model: str, kind: str, fields: Mapping[str, Json], sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Download and return the files of a model; paths in `fields` are relative to the current folder."""
    source = ModelSource.model_validate(fields)
    listed = FRONTENDS[kind].files(source, Path(), lambda *_: model, sources)
    return tuple(map(sources.fetch, listed))


def _find_kind(model: str) -> str:
    if is_address(model):
        try:
            check_address(model)
        except InvalidAddress as error:
            raise UsageError(f"{model}: {error}") from None
        kind = next((_FIELDS[end] for end in _FIELDS if file_name(model).endswith(end)), "")
        if not kind:
            text = f"the name does not say what kind of model this is (known: {', '.join(_FIELDS)})"
            raise UsageError(f"{model}: {text}", fix="download the file, and give its path")
        return kind
    path = Path(model)
    if not is_file(path) and is_factory(model):
        raise UsageError(
            f"{model} is code that makes a model, and runs only on request",
            fix=f"write its archive: `tvmflow init {shell_word(model)} --archive FILE.pt2`",
        )
    if not is_file(path):
        raise UsageError(missing_file_text(path))
    check_kind(path, MODEL)
    recognized = recognize(path)
    if recognized is None:
        raise UsageError(
            f"tvmflow does not recognize {model} as a model",
            fix="give an ONNX or TFLite file, an archive of torch.export (.pt2), or PREFIX-symbol.json",
        )
    return recognized.field


def _describe_source(kind: str, model: str, folder: Path) -> dict[str, Json]:
    """Return the fields below `model` in a recipe in `folder`."""
    name = model if is_address(model) else _path_from(folder, model)
    if kind != "mxnet":
        return {kind: name}
    if is_address(model):
        raise UsageError(
            f"{model}: the files beside it, and so the epochs of this checkpoint, cannot be listed",
            fix="write `model: {mxnet: {prefix: ADDRESS, epoch: N}}` into a recipe, or download symbol and parameters",
        )
    epochs = list_epochs(Path(model))
    if not epochs:
        raise UsageError(
            f"{model}: there are no parameters beside it, such as "
            f"{file_name(model).removesuffix(_SYMBOL)}-0000.params",
            fix="copy them beside the symbol",
        )
    return {kind: {"prefix": name.removesuffix(_SYMBOL), "epoch": epochs[-1]}}


def _path_from(folder: Path, path: str) -> str:
    """Return a path relative to a folder, or absolute if that is shorter."""
    absolute = str(Path(path).absolute())
    relative = os.path.relpath(absolute, folder)
    name = relative if len(relative) < len(absolute) else absolute
    if name.isprintable() or name.encode(errors="ignore").decode() == name:
        return name
    raise UsageError(
        f"{path}: its name is not Unicode, as paths in a recipe are", fix="rename the file"
    )


def name_of(model: str) -> str:
    """Return the name of the recipe for a model at a path or address.

    >>> name_of("ResNet 50.onnx"), name_of("con.onnx")
    ('resnet-50', 'model-con')
    """
    name = file_name(model) if is_address(model) else Path(model).name
    name = next((name.removesuffix(end) for end in _FIELDS if name.endswith(end)), Path(name).stem)
    name = re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:_MAX_NAME].strip("-._")
    if find_invalid_name([name]) is not None:
        name = f"model-{name}"
    return name[:_MAX_NAME].strip("-._")


def write_recipe(model: Model, choices: Choices) -> NewRecipe:
    """Return the recipe of a model; UsageError if a choice contradicts the model or is unknown."""
    requests = _check_shapes(model, choices.shapes)
    inputs = suggest_inputs(model.inputs, requests)
    dimensions = _list_dimensions(model, requests) if choices.is_dynamic else []
    if dimensions:
        inputs = dimensions
    head = [
        f"# yaml-language-server: $schema={schema_url('recipe')}",
        f"# All fields: {page_url('recipe')}",
        "recipe: 1",
        write_yaml({"name": model.name}).strip(),
        *write_yaml({"model": dict(model.source)}).splitlines(),
        *_head_inputs(inputs, is_dynamic=bool(dimensions)),
    ]
    lines = [
        *head,
        *_describe_inputs(model, inputs),
        *_describe_states(model),
        *_describe_targets(choices.targets),
        *_describe_budget(model, choices.minutes),
        *(_QUANTIZE if choices.is_quantized else ()),
        "outputs: [bundle]         # also c-library, wheel, cpp, shared-library, …",
        "verify:",
        f"  against: reference      # {FRONTENDS[model.kind].REFERENCE.name}, on random inputs",
        "  # data: samples.npz     # real inputs, with labels for the accuracy; or a folder of images",
    ]
    unsized_lines = tuple(at for at, line in enumerate(inputs, len(head) + 1) if line.needs_size)
    unknown = {request.name for request in requests if request.shape is None and not dimensions}
    shapes = {value.name: tuple(suggest_shape(value)) for value in model.inputs}
    unsized_shapes = {
        name: shapes[name] for name in shapes if name in unknown and SIZE in shapes[name]
    }
    batches = {
        value.name: (dimensions_text(value.dims), shapes[value.name])
        for value in model.inputs
        if value.name in unknown and value.dims and "1" in _list_free(value)
    }
    text = "\n".join(lines) + "\n"
    _check_readable(text, unsized_lines)
    return NewRecipe(text, unsized_lines, unsized_shapes, batches)


def _describe_states(model: Model) -> list[str]:
    if not model.states:
        return []
    lines = write_yaml({"state": dict(model.states)}).splitlines()
    return [
        "# The library can hold these from call to call, in sizes that are fixed but for a length with `min: 0`:",
        *(f"# {line}" for line in lines),
        *(
            f"# A KV cache takes half of the memory as {before}: {{output: {after}, dtype: float16}}; int8: a quarter."
            for before, after in list(model.states.items())[:1]
            if before.startswith("past")
        ),
    ]


_QUANTIZE: Final = (
    "quantize:",
    "  data: calibration.npz    # about 100 samples, an array for each input; or a folder of images",
    "  weights: int8            # with a scale for each channel",
    "  activations: int8        # dynamic: ranges per call, for matrix multiplications; none: weights only",
    "  max_error: 0.05          # of the outputs: layers stay float until it holds; of labelled data max_accuracy_drop",
    "  skip: []                 # nodes that stay float, by patterns of their names, such as head/*",
)


def _check_readable(text: str, unsized_lines: Sequence[int]) -> None:
    """Check that a recipe can be read, except for lines with sizes to be filled in."""
    try:
        document = parse_yaml(Path("recipe"), text)
    except RecipeError as error:
        problems = [Problem(0, 0, problem) for problem in error.problems]
    else:
        _, problems = validate(document, Recipe)
    texts = [problem.text for problem in problems if problem.line not in unsized_lines]
    if texts:
        raise UsageError(
            f"its recipe would not be valid: {texts[0]}",
            fix="rename the file of the model, or its inputs where it is exported",
        )


def _list_free(value: ModelInput) -> list[str]:
    """Return the suggested sizes for an input's dynamic dimensions."""
    pairs = zip(value.dims or (), suggest_shape(value), strict=True)
    return [suggested for size, suggested in pairs if str(size) != suggested]


def _check_shapes(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[InputRequest]:
    """Return the request for each input; UsageError if a shape contradicts the model."""
    names = dict.fromkeys([*(value.name for value in model.inputs if value.is_required), *shapes])
    requests = [InputRequest(name, shapes.get(name)) for name in names]
    if problems := list(find_mismatches(model.inputs, requests)):
        is_chosen = any(problem.input in shapes for problem in problems)
        raise UsageError(
            "\n".join(problem.text for problem in problems),
            fix="correct --shape" if is_chosen else _EXPORT_AGAIN,
        )
    return requests


def _list_dimensions(model: Model, requests: Sequence[InputRequest]) -> list[InputLine]:
    if any(request.shape for request in requests):
        text = "--open and --shape exclude each other"
        raise UsageError(text, fix="write numbers in the recipe for the sizes that are fixed")
    lines = suggest_dimensions(model.inputs, requests)
    if not lines:
        raise UsageError(
            "--open: the model has no dynamic dimensions",
            fix="leave --open out, or export the model with dynamic dimensions",
        )
    return [InputLine(line, needs_size=SIZE in line) for line in lines]


def _head_inputs(inputs: Sequence[InputLine], *, is_dynamic: bool) -> list[str]:
    has_sizes = any(line.needs_size for line in inputs)
    number = "the largest size" if is_dynamic else "a number"
    note = f"# The model has dynamic dimensions: write {number} in place of each {SIZE}."
    title = [] if is_dynamic or not inputs else ["inputs:"]
    return [*([note] if has_sizes else []), *title]


def _describe_inputs(model: Model, inputs: Sequence[InputLine]) -> list[str]:
    note = "  # random integers are 0 or 1: add `range: [0, 1000]` where the model takes others"
    has_integers = any(str(value.dtype).startswith(("int", "uint")) for value in model.inputs)
    return [*(line.text for line in inputs), *([note] if has_integers else [])]


def _describe_targets(targets: Sequence[str]) -> list[str]:
    for name in targets:
        if name not in NAMES:
            raise UsageError(
                f"--target {name}: there is no such target{did_you_mean(name, NAMES, meant=find_presets)}",
                fix="`tvmflow targets` lists them",
            )
    names = targets or ("host", *_list_gpu_targets())
    head = "targets:                  # `tvmflow targets` lists them"
    return [head, *(line for name in names for line in _describe_target(name))]


def _describe_target(name: str) -> list[str]:
    """Return the lines of a target; one that cannot run here also disables tuning and local verification."""
    tvm, host = PRESETS[OTHER_NAMES.get(name, name)].tvm, read_host()
    platform = parse_triple(cpu_triple(tvm or {}))
    is_like_host = platform.arch == host.arch and not find_system_mismatch(platform, host)
    if tvm is None or is_like_host:
        return [f"  - {name}"]
    lines = [f"  - name: {name}", f"    preset: {name}"]
    checks = _NO_CHECK
    if backend_for(tvm).IS_BESIDE_HOST:
        lines.append("    outputs: [web]")
        checks = "{run_on: chromium}" if find_chromium() else checks
    elif platform.system not in LINKERS:
        lines.append("    outputs: [c-library]")
    elif backend_for(tvm).RUNS_ON_HOST_CPU:
        arch = find_emulated_arch(cpu_triple(tvm))
        checks = "{run_on: qemu}" if arch and find_qemu(arch) else checks
    reason = "# this machine does not run it: `remote` names devices that do"
    return [*lines, f"    tune: {{trials: 0}}     {reason}", f"    verify: {checks}"]


def _list_gpu_targets() -> list[str]:
    gpu = detect_gpu().gpu
    if gpu is None:
        return []
    archs = {name: gpu_arch(preset.tvm) for name, preset in PRESETS.items() if preset.tvm}
    return [name for name, arch in archs.items() if arch == gpu.arch][:1]


def _describe_budget(model: Model, minutes: float | None) -> list[str]:
    if minutes == 0:
        line = "  trials: 0               # no search for faster kernels; `minutes: 10` searches"
        return ["tune:", line]
    reason = "search time per target; `trials: 0` instead disables the search"
    if minutes is None:
        budgets = (budget for limit, budget in _BUDGETS if model.size <= limit)
        minutes = next(budgets, _LARGEST_BUDGET)
    lines = ["tune:", f"  minutes: {minutes:<14g} # {reason}"]
    if minutes >= _MIN_IN_PARTS:
        every = round(minutes / _PARTS) or 1
        note = "# minutes of search after which the best library so far is delivered"
        lines.append(f"  deliver_every: {every:<8g} {note}")
    return lines
