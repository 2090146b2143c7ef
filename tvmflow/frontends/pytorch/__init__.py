"""PyTorch models: archives of `torch.export.save`, imported by way of ONNX.

Imports torch only in processes of its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field

from tvmflow.core import packages
from tvmflow.core.file_kinds import PT2
from tvmflow.frontends._reading import read_in_worker
from tvmflow.frontends.base import LoadedModel, ModelFacts, ModelOutput, ReferenceTraits
from tvmflow.frontends.frontend import (
    MODEL,
    ImportCall,
    NamedFile,
    OneFile,
    OneFileFrontend,
    ReferenceCall,
)
from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
from tvmflow.frontends.pytorch._archive import read_archive

_EXPORTER = ("onnx-ir", "onnxscript", "torch")


class PytorchSource(OneFile):
    """The fields of a PyTorch model."""

    pytorch: NamedFile | None = Field(
        default=None,
        examples=["models/resnet18.pt2"],
        description="An archive of `torch.export.save` (`.pt2`): a path from the recipe's folder, or an address: see "
        "[sources.md](sources.md).",
    )


@read_in_worker
def _describe(path: Path) -> ModelFacts:
    """Return what planning needs of an archive."""
    archive = read_archive(path)
    outputs = zip(archive.outputs, archive.output_types, strict=True)
    return ModelFacts(archive.inputs, outputs=tuple(ModelOutput(n, *t) for n, t in outputs))


class PytorchFrontend(OneFileFrontend):
    """PyTorch, also as the reference."""

    NAME = "PyTorch"
    KIND = "pytorch"
    MODELS = "PyTorch archives"
    SOURCE = PytorchSource
    TOOLS = (*OnnxFrontend.TOOLS, *_EXPORTER)
    REFERENCE = ReferenceTraits(
        name="PyTorch",
        tools=("numpy", "torch"),
        install="pip install 'tvmflow[pytorch]'",
        is_optional=True,
        note="any PyTorch from 2.6 on; importing PyTorch models needs it, too",
    )
    WORKER = "tvmflow.frontends.pytorch._reference_worker"
    FILE = PT2
    NOUN = "a PyTorch archive"
    FOREIGN = "cannot be imported"
    FILE_NAME = "the PyTorch archive"
    describe = staticmethod(_describe)

    def _load(self, call: ImportCall) -> LoadedModel:
        from tvmflow.frontends.pytorch.export import export_to_onnx

        with self.explained():
            archive = read_archive(call.files[MODEL])
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            files, inner_outputs = export_to_onnx(
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
        return loaded._replace(outputs=outputs, tensors=inner)

    def _first_message(self, call: ReferenceCall) -> dict[str, Any]:
        return {
            "archive": str(call.files[MODEL].resolve()),
            "scratch": str(call.scratch),
            "tensors": [spec.name for spec in call.tensors],
            "threads": call.threads,
        }

    def reference_version(self) -> str:
        """Return the version of the installed PyTorch, which also needs its exporter to ONNX."""
        versions = [packages.find_package(name).version for name in _EXPORTER]
        return versions[-1]
