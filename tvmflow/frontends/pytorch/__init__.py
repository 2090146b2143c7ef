"""Importer of PyTorch models (archives of `torch.export.save`) through ONNX, and their export.

Imports torch only in separate processes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, UsageError
from tvmflow.core.file_kinds import PT2
from tvmflow.core.files import output_file
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.logs import explain_wait
from tvmflow.core.processes import module_command
from tvmflow.core.types import Json, State
from tvmflow.frontends._reading import read_in_worker
from tvmflow.frontends.base import LoadedModel, ModelFacts, ModelOutput, ReferenceTraits
from tvmflow.frontends.frontend import (
    MODEL,
    Files,
    ImportCall,
    NamedFile,
    OneFile,
    OneFileFrontend,
    Specs,
)
from tvmflow.frontends.onnx import EXTERNAL
from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
from tvmflow.frontends.pytorch._archive import Archive, copy_for_pytorch, read_archive

_log = logging.getLogger(__name__)

INSTALL: Final = "pip install 'tvmflow[pytorch]'"
_WORKER: Final = "tvmflow.frontends.pytorch._worker"
_ONNX: Final = "model.onnx"
_EXPORTER = ("onnx-ir", "onnxscript", "torch")


class PytorchSource(OneFile):
    """The fields of a PyTorch model."""

    pytorch: NamedFile | None = Field(
        default=None,
        examples=["models/resnet18.pt2"],
        description="[An archive](pytorch.md) of `torch.export.save` (`.pt2`): a path or a [URL](sources.md).",
    )


@read_in_worker
def _describe(path: Path) -> ModelFacts:
    archive = read_archive(path)
    outputs = zip(archive.outputs, archive.output_types, strict=True)
    return ModelFacts(archive.inputs, outputs=tuple(ModelOutput(n, *t) for n, t in outputs))


class PytorchFrontend(OneFileFrontend):
    """The frontend for PyTorch, which is also the reference."""

    NAME = "PyTorch"
    KIND = "pytorch"
    MODELS = "PyTorch archives"
    SOURCE = PytorchSource
    TOOLS = (*OnnxFrontend.TOOLS, *_EXPORTER)
    REFERENCE = ReferenceTraits(
        name="PyTorch",
        tools=("numpy", "torch"),
        install=INSTALL,
        is_optional=True,
        note="any PyTorch 2.6 or later; importing PyTorch models needs it, too",
    )
    WORKER = _WORKER
    FILE = PT2
    NOUN = "a PyTorch archive"
    FOREIGN = "cannot be imported"
    FILE_NAME = "the PyTorch archive"
    describe = staticmethod(_describe)

    def _load(self, call: ImportCall) -> LoadedModel:
        with self.explained():
            archive = read_archive(call.files[MODEL])
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            files, inner_outputs, contents = export_to_onnx(
                archive, call.files[MODEL], call.tensors, Path(folder)
            )
            loaded = OnnxFrontend().load(
                files,
                call.inputs,
                bound=call.bound,
                dimensions=call.dimensions,
                counts_rows=call.counts_rows,
            )
        count = len(loaded.outputs) - inner_outputs
        outputs, inner = loaded.outputs[:count], loaded.outputs[count:]
        following = [spec.name for spec in outputs[count - len(contents) :]]
        names = {spec.name for spec in loaded.inputs}
        states = [
            State(name, output, initial=initial)
            for (name, initial), output in zip(contents.items(), following, strict=True)
            # A buffer that the recipe binds to a constant is not a state.
            if name in names
        ]
        return loaded._replace(outputs=outputs, tensors=inner, states=tuple(states))

    def _describe_files(self, files: Files, tensors: Specs, scratch: Path) -> dict[str, Any]:
        return {"archive": str(files[MODEL].resolve())}

    def reference_version(self) -> str:
        """Return the version of PyTorch; check that packages of its ONNX exporter are installed."""
        versions = [packages.find_package(name).version for name in _EXPORTER]
        return versions[-1]


# ---------------------------------------------------------------- the export to ONNX


def export_to_onnx(
    archive: Archive, path: Path, tensors: Sequence[str], folder: Path
) -> tuple[Mapping[str, Path], int, Mapping[str, str]]:
    """Export an archive to ONNX in an empty folder; intermediate tensors follow its outputs.

    Returns:
        The ONNX file and its external data by role, the number of intermediate tensors, and for each changed buffer the
        name of its input and its initial content (see `State`).

    Raises:
        ImportFailed: with PyTorch's message.
        EnvironmentProblem: if PyTorch or its exporter cannot be imported.
    """
    inner = [name for name in tensors if name not in archive.outputs]
    request = {
        "archive": str(copy_for_pytorch(path, folder)),
        "containers": archive.containers,
        "inputs": [value.name for value in archive.inputs],
        "outputs": archive.outputs,
        "buffers": list(archive.buffers.values()),
        "tensors": inner,
        "onnx": str(folder / _ONNX),
    }
    log = folder / "pytorch-export.log"
    with log.open("wb") as stream:
        code, answer = _run(request, folder, stream.fileno(), stream.fileno())
    text = log.read_text(errors="replace")
    _log.debug("the export to ONNX ended with code %d: %s", code, text)
    if answer is None:
        lines = text.strip().splitlines() or ["it printed nothing"]
        raise ImportFailed(
            f"the process that exports the archive to ONNX ended with code {code}: {excerpt(lines[-1])}"
        )
    if "problem" in answer:
        raise _export_error(answer["problem"], answer["reason"], archive)
    data = [file for file in folder.iterdir() if file.name.startswith(f"{_ONNX}.")]
    external = {f"{EXTERNAL}{file.name}": file for file in data}
    contents = {name: answer["contents"][buffer] for name, buffer in archive.buffers.items()}
    return {MODEL: folder / _ONNX, **external}, len(inner), contents


def _run(request: Json, folder: Path, output: int, errors: int | None = None) -> tuple[int, Json]:
    """Run the worker with these file descriptors; return its exit code, and its answer or None."""
    # Imported here because this module imports NumPy.
    from tvmflow.frontends._reference_process import worker_environment

    answer = folder / "answer.json"
    code = subprocess.run(
        module_command(_WORKER, json.dumps({**request, "answer": str(answer)})),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=worker_environment({}),
        check=False,
    ).returncode
    return code, json.loads(answer.read_text()) if answer.is_file() else None


def _export_error(problem: str, reason: str, archive: Archive) -> Exception:
    if problem == "import":
        text = f"PyTorch and its exporter to ONNX cannot be imported: {reason}"
        return EnvironmentProblem(text, fix=INSTALL)
    if problem == "load":
        return _load_error(reason, archive.torch_version)
    texts = {
        "tensor": (
            f"the model has no tensor {quoted(reason)}",
            "name nodes of the archive: `print(torch.export.load(FILE).graph)` shows them",
        ),
        "state": (
            f"the model changes its own state when it runs ({reason}) by an operator that does not say so",
            "call `model.eval()` before torch.export.export, or write the state by `copy_`",
        ),
        "content": (
            f"the buffer {reason}",
            "initialize the buffer with zeros, or return the state as an output",
        ),
        "export": (
            f"PyTorch cannot export the archive to ONNX: {reason}",
            "replace the operator in the model, or end the model before it; where none is named, "
            "update the exporter: pip install -U onnxscript",
        ),
        "signature": (
            f"PyTorch exported the archive to ONNX with {reason}",
            "report a bug of tvmflow, with the archive",
        ),
    }
    text, fix = texts[problem]
    return ImportFailed(text, fix=fix)


def _load_error(reason: str, written_by: str) -> ImportFailed:
    installed = packages.find_package("torch").version
    text = f"PyTorch {installed} cannot load the archive"
    if _release(written_by) > _release(installed):
        needed = ".".join(map(str, _release(written_by)))
        return ImportFailed(
            f"{text}, which PyTorch {excerpt(written_by)} wrote: {reason}",
            fix=f"pip install 'torch>={needed}', or save the archive again with PyTorch {installed}",
        )
    return ImportFailed(
        f"{text}: {reason}",
        fix="check that `torch.export.load` can load it; export the model with tensors, numbers and "
        "containers of these as inputs",
    )


def _release(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version, such as (2, 13), or an empty tuple."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


# ---------------------------------------------------------------- archives of models that Python code makes

_NAME: Final = r"[A-Za-z_]\w*"
_FACTORY: Final = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}", re.ASCII)
# The factory's standard output is redirected to standard error, where messages go.
_STANDARD_ERROR: Final = 2
_FIXES: Final[Mapping[str, str]] = {
    "module": "name it as `python -c 'import MODULE'` finds it from the current folder",
    "function": "name a function of MODULE that takes no arguments",
    "code": "run it by itself: `python -c 'import MODULE; MODULE.FUNCTION()'`",
    "result": "return (module, example inputs): a torch.nn.Module, and a tuple or dictionary of its arguments",
    "export": "see https://docs.pytorch.org/docs/stable/export.html for the models that torch.export accepts",
}


def is_factory(text: str) -> bool:
    """Return whether a text has the form `PACKAGE.MODULE:FUNCTION`."""
    return _FACTORY.fullmatch(text) is not None


def export_factory(factory: str, path: Path) -> str:
    """Call a factory, and export the returned module to an archive.

    Args:
        factory: `PACKAGE.MODULE:FUNCTION`; the current folder is searched first, as in `python -c`.
        path: The archive to write.

    Returns:
        The version of PyTorch.

    Raises:
        UsageError: if the function does not exist, or does not return a module with inputs.
        ImportFailed: if PyTorch cannot export the module.
        EnvironmentProblem: if PyTorch cannot be imported.
        OSError: if the archive cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder, output_file(path) as temporary:
        request = {"factory": factory, "archive": temporary}
        with explain_wait(f"calling {factory} and exporting its module: as long as PyTorch takes"):
            code, answer = _run(request, Path(folder), _STANDARD_ERROR)
        if answer is None:
            raise _factory_error(factory, "code", f"its process ended with code {code}")
        if "problem" in answer:
            if answer["problem"] == "write":
                number = int(answer["reason"])
                raise OSError(number, os.strerror(number), str(path))
            raise _factory_error(factory, answer["problem"], answer["reason"])
        return str(answer["torch"])


def _factory_error(factory: str, problem: str, reason: str) -> Exception:
    if problem == "import":
        return EnvironmentProblem(f"PyTorch cannot be imported: {reason}", fix=INSTALL)
    module, _, function = factory.partition(":")
    fix = _FIXES[problem].replace("MODULE", module).replace("FUNCTION", function)
    if problem == "export":
        return ImportFailed(f"{factory}: torch.export cannot export the module: {reason}", fix=fix)
    return UsageError(f"{factory}: {reason}", fix=fix)
