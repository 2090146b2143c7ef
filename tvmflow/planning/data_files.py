"""The files of data and labels that recipes name, compared with the signature of the model.

Images are listed, and all is checked as far as nothing has to be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import RecipeError, TvmflowError
from tvmflow.core.file_kinds import NPZ, STAND_INS, ZIP, recognize
from tvmflow.core.formatting import count_text, excerpt, names_text
from tvmflow.core.named_files import missing_file_text
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.base import InputProblem, InputRequest, ModelInput, ModelOutput
from tvmflow.frontends.inputs import resolve_inputs
from tvmflow.planning.recipes import PlannedRecipe, Target
from tvmflow.recipe import Recipe
from tvmflow.runtime.image_files import check_files, is_pillow_installed
from tvmflow.runtime.images import ImageMismatch, Preprocessing
from tvmflow.runtime.labels import parse_labels
from tvmflow.runtime.npz import describe_npz
from tvmflow.runtime.samples import make_samples
from tvmflow.stages import export, verify
from tvmflow.stages.images import ImageList, is_image_data, is_table, list_folder, read_table

_VERIFIED: Final = "verify.data"
# So many images of a folder are opened, which takes half a second.
_MAX_OPENED: Final = 1000


class Signature(NamedTuple):
    """Inputs and outputs of a library, as far as the model's files tell without a framework.

    Attributes:
        inputs: Its inputs; None where they are not known.
        scores: The first output, which labels name the scores of; None where it is not known.
    """

    inputs: tuple[TensorSpec, ...] | None = None
    scores: TensorSpec | None = None


def read_signature(
    inputs: Sequence[ModelInput],
    outputs: Sequence[ModelOutput],
    requests: Sequence[InputRequest],
) -> Signature:
    """Return the signature of a library whose recipe fits the model."""
    bound = {request.name for request in requests if request.value is not None}
    specs = {spec.name: spec for spec in resolve_inputs(inputs, requests)}
    # the sizes of outputs in the file are those for its own inputs; another batch changes no scores
    is_unchanged = all(
        isinstance(dim, str) or dim == size
        for value in inputs
        if value.name in specs
        for dim, size in zip((value.dims or ())[1:], specs[value.name].shape[1:], strict=False)
    )
    name, dtype, dims = outputs[0] if outputs else ModelOutput("")
    classes = [size for size in (dims or ())[1:] if isinstance(size, int)]
    scores = None
    if is_unchanged and dtype and dims and len(classes) == len(dims) - 1:
        scores = TensorSpec(name, (1, *classes), dtype)
    return Signature(tuple(spec for name, spec in specs.items() if name not in bound), scores)


class ImageFiles(NamedTuple):
    """The images of recipes.

    Attributes:
        files: The images of each `verify.data`, by their paths in its folder.
        read: All files and folders that this was read from.
    """

    files: dict[str, tuple[str, ...]]
    read: list[Path]


def list_mismatches(planned: PlannedRecipe, inputs: Iterable[TensorSpec]) -> Iterator[str]:
    """Yield where the preprocessing of a recipe does not fit its inputs.

    The model may have told their shapes.
    """
    specs = {spec.name: spec for spec in inputs}
    for name, spec in planned.recipe.inputs.items():
        if spec.image is None:
            continue
        try:
            Preprocessing.of(spec.image.to_fields(), specs[name])
        except ImageMismatch as error:
            loc = planned.input_loc(InputProblem(name, "image", str(error)))
            path = (*loc, *filter(None, [error.field]))
            yield f"{planned.loaded.where(*path)}: {excerpt('.'.join(path))}: {error}"


def list_images(recipes: Iterable[tuple[PlannedRecipe, Signature]]) -> ImageFiles:
    """List the images that stages of recipes and their variants read.

    Raises:
        RecipeError: when there are none, when they have no input or no classes, or a label is missing;
            for a file that is neither a table of images nor an npz file; and where labels, arrays or
            images do not fit the signature.
    """
    listed = ImageFiles({}, [])
    problems = [
        problem
        for planned, signature in recipes
        for problem in _list_problems(planned, signature, listed)
    ]
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return listed


def _list_problems(
    planned: PlannedRecipe, signature: Signature, listed: ImageFiles
) -> Iterator[str]:
    """Add the images of a recipe to `listed`, and yield what is wrong with labels and data."""
    folder, labels = planned.loaded.path.parent, planned.recipe.labels
    names: tuple[str, ...] = ()
    if labels is not None:
        listed.read.append(folder / labels)
        try:
            parsed = parse_labels((folder / labels).read_bytes())
        except (OSError, ValueError) as error:
            yield f"{planned.loaded.where('labels')}: labels: {labels} cannot be read: {error}"
            return
        names = parsed.names
        try:
            if signature.scores is not None and export.NAME in planned.stages:
                parsed.check(signature.scores, is_activation_known=False)
        except ValueError as error:
            where = planned.loaded.where("labels")
            yield f"{where}: labels: {labels} does not fit the model: {error}"
    for target in planned.targets:
        recipe = planned.recipe_for(target)
        for field, data, position in _list_data(planned, target):
            try:
                if is_image_data(data, folder / data):
                    is_opened = data in listed.files
                    images = _list(data, folder / data, listed)
                    _check(recipe, images, names, signature, is_verified=field == _VERIFIED)
                    if not is_opened:
                        _open_images(folder / data, images)
                else:
                    _check_arrays(folder / data)
                    _check_fit(recipe, field, folder / data, signature)
            except (OSError, ValueError, TvmflowError) as error:
                reason = str(error)
                if isinstance(error, TvmflowError):
                    reason = error.message.removeprefix(f"{field} ").removeprefix(f"{field}: ")
                if isinstance(error, OSError) and error.strerror:
                    reason = f"{excerpt(str(error.filename))}: {error.strerror}"
                yield f"{position}: {field}: {data}: {reason}"


def _list_data(planned: PlannedRecipe, target: Target) -> Iterator[tuple[str, str, str]]:
    """Yield the data that stages read for a target: their field, path, and the field's position."""
    recipe = planned.recipe_for(target)
    is_read = recipe.quantize is not None or verify.NAME in planned.stages
    if recipe.verify.data is not None and is_read:
        yield _VERIFIED, recipe.verify.data, planned.setting_position(target, "verify", "data")
    if recipe.quantize is not None and recipe.quantize.data is not None:
        where = planned.loaded.where(*planned.setting_loc("quantize", "data"))
        yield "quantize.data", recipe.quantize.data, where


def _list(data: str, path: Path, listed: ImageFiles) -> ImageList:
    """Return the images of `verify.data`, which is at a path."""
    if is_table(data):
        images, read = read_table(path), [path]
        for file in dict.fromkeys(images.files):
            if not (path.parent / file).is_file():
                raise ValueError(missing_file_text(path.parent / file))
    else:
        images, read = list_folder(path)
    listed.files[data] = images.files
    listed.read.extend(read)
    return images


def _check_arrays(path: Path) -> None:
    """Check that a file may be an npz file, by its beginning and the names of what is in it.

    Raises:
        ValueError: when it is certainly none.
    """
    kind = recognize(path)
    if kind in (NPZ, ZIP):
        return
    if kind in STAND_INS:
        raise ValueError(f"{kind.text}; {kind.fix}")
    raise ValueError(
        f"{kind.text if kind else 'is not an npz file'}; "
        "give an npz file (`numpy.savez(path, <input name>=array, label=labels)`), "
        "or a folder or a table of images"
    )


def _check_fit(recipe: Recipe, field: str, path: Path, signature: Signature) -> None:
    """Check that arrays fit the inputs of the model, and have the labels that limits need.

    Raises:
        StageError: otherwise, as the stage does that reads them.
        ValueError: when there are fewer samples than the recipe asks for.
    """
    if signature.inputs is None:
        return
    label, needed_by = recipe.verify.label, ""
    section = recipe.quantize
    if field == _VERIFIED and recipe.verify.min_accuracy is not None:
        needed_by = "verify.min_accuracy"
    elif field == _VERIFIED and section and section.max_accuracy_drop is not None:
        needed_by = "quantize.max_accuracy_drop"
    samples = make_samples(
        signature.inputs,
        describe_npz(path, field, read=(label,)),
        source=field,
        label=label,
        labels_needed_by=needed_by,
        dimensions=recipe.list_dimensions(),
    )
    calibrates = section is not None and (field != _VERIFIED or section.data is None)
    if calibrates and section is not None and (section.samples or 0) > samples.total:
        raise ValueError(
            f"it has {count_text(samples.total, 'sample')}, and quantize.samples asks for {section.samples}"
        )


def _open_images(path: Path, images: ImageList) -> None:
    """Check that files are images, by what stands at their beginnings.

    Raises:
        BundleError: with each that is none.
    """
    folder = path.parent if path.is_file() else path
    step = -(-len(images.files) // _MAX_OPENED)
    check_files(folder / file for file in images.files[::step])


def _check(
    recipe: Recipe,
    images: ImageList,
    labels: tuple[str, ...],
    signature: Signature,
    *,
    is_verified: bool,
) -> None:
    """Check that images have an input, classes where these are needed, and labels for them.

    Raises:
        ValueError: otherwise.
    """
    inputs = [name for name, spec in recipe.inputs.items() if spec.image is not None]
    if len(inputs) != 1:
        count = "no input" if not inputs else f"{len(inputs)} inputs"
        raise ValueError(f"images are for one input, and {count} of the recipe has `image`")
    others = [spec.name for spec in signature.inputs or () if spec.name not in inputs]
    if others:
        raise ValueError(
            f"is images, and the model has the further input {names_text(others)}: give an npz file with an array "
            "for each input, or bind the input with `value`"
        )
    if not is_verified:
        return
    needed_by = [
        f"{section}.{limit}"
        for section, limit in (("verify", "min_accuracy"), ("quantize", "max_accuracy_drop"))
        if getattr(getattr(recipe, section), limit, None) is not None
    ]
    if not images.classes and needed_by:
        raise ValueError(
            f"has no folders of classes, which {needed_by[0]} needs: "
            "put the images of each class into a folder with its name"
        )
    images.find_indices(labels)
    if not is_pillow_installed():
        raise ValueError(
            "Pillow, which decodes images, is not installed: pip install 'tvmflow[images]'"
        )
