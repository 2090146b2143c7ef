"""The frontend of ONNX models: fields of recipes, files, and ONNX Runtime as the reference.

Imports tvm and onnx only inside functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

from pydantic import Field

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import ONNX
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, obstacle
from tvmflow.core.packages import install_command
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import InputFile
from tvmflow.frontends._reading import read_in_worker
from tvmflow.frontends.base import LoadedModel, ReferenceTraits, SourceFields, Where
from tvmflow.frontends.frontend import (
    MODEL,
    Files,
    ImportCall,
    NamedFile,
    OneFile,
    OneFileFrontend,
    Specs,
    pinned_by_name,
    shown,
)
from tvmflow.frontends.onnx import EXTERNAL
from tvmflow.frontends.onnx._header import read_header
from tvmflow.store.addresses import HUB, OCI, scheme_of, sibling
from tvmflow.store.source_files import SourceFiles, UnpinnedFiles

_INLINED_NOTE: Final = (
    "ONNX Runtime takes the opset of the model for its functions, too: the reference has them inlined, "
    "each converted from its own opset"
)


class OnnxSource(OneFile):
    """The fields of an ONNX model."""

    takes_operators: ClassVar[bool] = True

    onnx: NamedFile | None = Field(
        default=None, description="An ONNX file: a path or a [URL](sources.md)."
    )


class OnnxFrontend(OneFileFrontend):
    """ONNX, and ONNX Runtime as the reference."""

    NAME = "ONNX"
    KIND = "onnx"
    MODELS = "ONNX models"
    SOURCE = OnnxSource
    TOOLS = ("apache-tvm", "numpy", "onnx")
    REFERENCE = ReferenceTraits(
        name="ONNX Runtime",
        tools=("numpy", "onnx", "onnxruntime"),
        install=install_command("onnxruntime"),
        is_optional=False,
    )
    WORKER = "tvmflow.frontends.onnx._reference_worker"
    FILE = ONNX
    NOUN = "an ONNX model"
    FOREIGN = "is not an ONNX model"
    FOREIGN_FIX = "export or download it again"
    describe = staticmethod(read_in_worker(read_header))

    def files(
        self, source: SourceFields, base: Path, where: Where, sources: SourceFiles
    ) -> tuple[InputFile, ...]:
        """Return the ONNX file, and the external data files that it names.

        For a file that is not downloaded yet, the recipe names them. If the recipe need not do so, as on the Hub, the
        file is downloaded to read the names.

        Raises:
            RecipeError: also when external data is missing, or outside the folder of the ONNX file.
        """
        named = self.named_file(source, base, where)
        assert isinstance(source, OnnxSource)
        try:
            model = sources.resolve(named)
        except UnpinnedFiles as error:
            # The file was downloaded to compute its digest, so the error can name all files at once.
            (model,) = error.files
            names = self.check_file(model).data_files
            try:
                sources.resolve_all(_list_external_files(names, model, source, where))
            except UnpinnedFiles as others:
                raise UnpinnedFiles([model, *others.files]) from None
            raise
        if scheme_of(model.url) in (HUB, OCI) and source.files is None:
            model = sources.fetch(model)
        if not model.path:
            names = tuple(source.files or ())
        else:
            names = self.check_file(model).data_files
            _check_pinned_names(source, names, where)
        return (model, *sources.resolve_all(_list_external_files(names, model, source, where)))

    def find_unnamed_files(self, files: Sequence[InputFile]) -> tuple[InputFile, ...]:
        """Return the external data files that the recipe does not name."""
        model = next(file for file in files if file.role == MODEL)
        names = self.check_file(model).data_files
        listed = _list_external_files(names, model, OnnxSource(), lambda *_: model.where)
        known = {file.role for file in files}
        return tuple(file for file in listed if file.role not in known)

    def _load(self, call: ImportCall) -> LoadedModel:
        from tvmflow.custom_operators.loading import load_operators
        from tvmflow.frontends.onnx.custom_nodes import CustomNodes
        from tvmflow.frontends.onnx.graph import node_labels
        from tvmflow.frontends.onnx.importer import import_prepared
        from tvmflow.frontends.onnx.model_files import add_outputs, read_model
        from tvmflow.frontends.onnx.prepare import prepare

        custom = CustomNodes(load_operators(call.files))
        with self.explained():
            model = read_model(call.files)
        inner_outputs = add_outputs(model, call.tensors)
        custom.mark(model)
        labels = node_labels(model)
        prepared = prepare(model, call.inputs, call.bound, custom)
        return import_prepared(
            prepared, inner_outputs, custom, labels, call.dimensions, counts_rows=call.counts_rows
        )

    def _describe_files(self, files: Files, tensors: Specs, scratch: Path) -> dict[str, Any]:
        from tvmflow.custom_operators.loading import operator_paths, prepare_calls
        from tvmflow.frontends.onnx._inlining import mixes_opsets
        from tvmflow.frontends.onnx.graph import read_without_large_tensors
        from tvmflow.frontends.onnx.model_files import link_files, save_for_reference

        path = link_files(files, scratch)
        inlines = False
        # errors are ignored here, because the reference reads the same file, and explains them
        with contextlib.suppress(Exception):
            inlines = mixes_opsets(read_without_large_tensors(path))
        if tensors or inlines:
            names = tuple(spec.name for spec in tensors)
            path = save_for_reference(path, names, inlines=inlines)
        return {
            "model": str(path),
            "note": _INLINED_NOTE if inlines else "",
            "operators": operator_paths(files),
            "calls": str(prepare_calls(scratch)),
        }

    def list_tensors(self, files: Files) -> Mapping[str, str]:
        """Return the intermediate tensors of the main graph, and the node that computes each."""
        import onnx

        from tvmflow.frontends.onnx.graph import node_labels

        model = onnx.load(str(files[MODEL]), load_external_data=False)
        outputs = {value.name for value in model.graph.output}
        labels = node_labels(model)
        inner = [name for node in model.graph.node for name in node.output if name]
        return {name: labels[name] for name in inner if name not in outputs}

    def reference_version(self) -> str:
        """Return the version of ONNX Runtime."""
        import onnxruntime

        return str(onnxruntime.__version__)


# ---------------------------------------------------------------- external data


def _list_external_files(
    names: Sequence[str], model: InputFile, source: OnnxSource, where: Where
) -> list[InputFile]:
    """Return a model's external data files, each once, without resolving them."""
    listed = (_external_file(name, model, source, where) for name in names)
    return list({file.role: file for file in listed}.values())


def _check_pinned_names(source: OnnxSource, names: tuple[str, ...], where: Where) -> None:
    valid = {_normal(name) for name in names}
    for name in source.files or ():
        if _normal(name) not in valid:
            hint = did_you_mean(name, valid)
            text = f"model.files: the model has no external data in {quoted(name)}{hint}"
            raise RecipeError(f"{where('files', name)}: {text}")


def _normal(location: str) -> str:
    return str(PurePosixPath(location))


def _external_file(location: str, model: InputFile, source: OnnxSource, where: Where) -> InputFile:
    """Return an external data file; an untrusted model must not name files outside its folder."""
    inside, name, normal = PurePosixPath(location), quoted(location), _normal(location)
    is_inside = bool(location) and not inside.is_absolute() and ".." not in inside.parts
    start = f"{model.where}: model.onnx: {shown(model)}"
    if not is_inside or not (model.url or _is_in_model_folder(model.path, location)):
        raise RecipeError(
            f"{start} refers to data outside its folder: {name}",
            fix="save the model again with its external data beside it",
        )
    # A model at an address may not be read yet, so the normalized path in `files` is the role.
    role = f"{EXTERNAL}{normal if model.url else location}"
    url = sibling(model.url, normal) if model.url else ""
    path = "" if url else str(Path(model.path).parent / normal)
    file = pinned_by_name(InputFile(role, path, model.where, url), normal, source, where)
    if not file.url and not is_file(Path(file.path)):
        problem = obstacle(Path(file.path)) or "does not exist"
        raise RecipeError(
            f"{start} has weights in {name}, which {problem}",
            fix="copy the external data files of the model together with it",
        )
    return file


def _is_in_model_folder(path: str, location: str) -> bool:
    """Return whether a file is in the model's folder, after following all symbolic links.

    If the model is a link, the data may also be beside its target, as in the caches of download tools.
    """
    model = Path(path)
    try:
        folders = (model.parent.resolve(), model.resolve().parent)
        real = (model.parent / location).resolve()
    except (OSError, RuntimeError, ValueError):
        # An invalid name or a loop of links is reported later, as a missing file.
        return True
    return any(real.is_relative_to(folder) for folder in folders)
