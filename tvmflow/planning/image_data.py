"""What recipes name as `verify.data`: images are listed, and all is checked as far as nothing has to be decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import NPZ, STAND_INS, ZIP, recognize
from tvmflow.core.formatting import excerpt
from tvmflow.core.named_files import missing_file_text
from tvmflow.core.types import TensorSpec
from tvmflow.frontends._base import InputProblem
from tvmflow.planning.planned_recipe import PlannedRecipe, Target
from tvmflow.runtime.image_files import is_pillow_installed
from tvmflow.runtime.images import ImageMismatch, Preprocessing
from tvmflow.runtime.labels import parse_labels
from tvmflow.stages._image_data import ImageList, is_image_data, is_table, list_folder, read_table


class ImageFiles(NamedTuple):
    """The images of recipes.

    Attributes:
        files: The images of each `verify.data`, by their paths in its folder.
        read: All files and folders that this was read from.
    """

    files: dict[str, tuple[str, ...]]
    read: list[Path]


def list_mismatches(planned: PlannedRecipe, inputs: Iterable[TensorSpec]) -> Iterator[str]:
    """Yield where the preprocessing of a recipe does not fit its inputs, whose shapes the model may have told."""
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


def list_images(recipes: Iterable[PlannedRecipe]) -> ImageFiles:
    """List the images that `verify` of recipes and their variants reads.

    Raises:
        RecipeError: when there are none, when they have no input or no classes, or a label is missing;
            and for a file that is neither a table of images nor an npz file.
    """
    listed = ImageFiles({}, [])
    problems = [problem for planned in recipes for problem in _list_problems(planned, listed)]
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return listed


def _list_problems(planned: PlannedRecipe, listed: ImageFiles) -> Iterator[str]:
    """Add the images of a recipe to `listed`, and yield what is wrong with labels and images."""
    folder, labels = planned.loaded.path.parent, planned.recipe.labels
    names: tuple[str, ...] = ()
    if labels is not None:
        listed.read.append(folder / labels)
        try:
            names = parse_labels((folder / labels).read_bytes()).names
        except (OSError, ValueError) as error:
            yield f"{planned.loaded.where('labels')}: labels: {labels} cannot be read: {error}"
            return
    if "verify" not in planned.stages:
        return
    for target in planned.targets:
        data = planned.recipe_for(target).verify.data
        if data is None:
            continue
        try:
            if is_image_data(data, folder / data):
                images = _list(data, folder / data, listed)
                _check(planned, target, images, names)
            else:
                _check_arrays(folder / data)
        except (OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{excerpt(str(error.filename))}: {error.strerror}"
            yield f"{planned.data_position(target)}: verify.data: {data}: {reason}"


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


def _check(
    planned: PlannedRecipe, target: Target, images: ImageList, labels: tuple[str, ...]
) -> None:
    """Check that images have an input, classes where these are needed, and labels for them.

    Raises:
        ValueError: otherwise.
    """
    recipe = planned.recipe_for(target)
    inputs = [name for name, spec in recipe.inputs.items() if spec.image is not None]
    if len(inputs) != 1:
        count = "no input" if not inputs else f"{len(inputs)} inputs"
        raise ValueError(f"images are for one input, and {count} of the recipe has `image`")
    if not images.classes and recipe.verify.min_accuracy is not None:
        raise ValueError(
            "has no folders of classes, which verify.min_accuracy needs: "
            "put the images of each class into a folder with its name"
        )
    images.find_indices(labels)
    if not is_pillow_installed():
        raise ValueError(
            "Pillow, which decodes images, is not installed: pip install 'tvmflow[images]'"
        )
