"""Exports an archive to ONNX with PyTorch's own exporter, in an isolated process."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem, ImportFailed
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.processes import module_command
from tvmflow.frontends._reference_process import worker_environment
from tvmflow.frontends.onnx.source import EXTERNAL
from tvmflow.frontends.onnx.source import MODEL as ONNX_MODEL
from tvmflow.frontends.pytorch._archive import Archive, copy_for_pytorch
from tvmflow.frontends.pytorch._source import read_importable

_log = logging.getLogger(__name__)

INSTALL: Final = "pip install 'tvmflow[pytorch]'"
_WORKER: Final = "tvmflow.frontends.pytorch._export_worker"
_ONNX: Final = "model.onnx"


class ExportedModel(NamedTuple):
    """An archive as ONNX.

    Attributes:
        files: The ONNX file and its external data by their roles.
        inner_outputs: How many of its outputs, the last ones, are inner tensors.
    """

    files: Mapping[str, Path]
    inner_outputs: int


def export_to_onnx(path: Path, tensors: Sequence[str], folder: Path) -> ExportedModel:
    """Export an archive to ONNX.

    Args:
        path: The archive.
        tensors: Names of tensors; the ONNX model returns the inner ones after its outputs.
        folder: An empty folder for it.

    Raises:
        ImportFailed: with what PyTorch says of it.
        EnvironmentProblem: when PyTorch or its exporter cannot be imported.
    """
    archive = read_importable(path)
    inner = [name for name in tensors if name not in archive.outputs]
    answer_file, log = folder / "answer.json", folder / "pytorch-export.log"
    request = {
        "archive": str(copy_for_pytorch(path, folder)),
        "containers": archive.containers,
        "inputs": [value.name for value in archive.inputs],
        "outputs": archive.outputs,
        "tensors": inner,
        "onnx": str(folder / _ONNX),
        "answer": str(answer_file),
    }
    with log.open("wb") as stream:
        code = subprocess.run(
            module_command(_WORKER, json.dumps(request)),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=worker_environment({}),
            check=False,
        ).returncode
    text = log.read_text(errors="replace")
    _log.debug("the export to ONNX ended with code %d: %s", code, text)
    if not answer_file.is_file():
        lines = text.strip().splitlines() or ["it printed nothing"]
        raise ImportFailed(
            f"the process that exports the archive to ONNX ended with code {code}: {excerpt(lines[-1])}"
        )
    answer = json.loads(answer_file.read_text())
    if answer:
        raise _error(answer["problem"], answer["reason"], archive)
    data = [file for file in folder.iterdir() if file.name.startswith(f"{_ONNX}.")]
    external = {f"{EXTERNAL}{file.name}": file for file in data}
    return ExportedModel({ONNX_MODEL: folder / _ONNX, **external}, len(inner))


def _error(problem: str, reason: str, archive: Archive) -> Exception:
    """Return the error for an answer of the worker."""
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
            f"the model changes its own state when it runs ({reason}), which a library cannot",
            "call `model.eval()` before torch.export.export, or return the state as an output",
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
    """Return the error for an archive that the installed PyTorch does not load."""
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
    """Return major and minor number of a version, such as (2, 13); nothing if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
