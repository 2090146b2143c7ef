"""Peer runtimes that `verify` compares with a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import Reference, ReferenceTraits
from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
from tvmflow.frontends.pytorch import PytorchFrontend


class Peer(NamedTuple):
    """A runtime for models of the frontend `kind`, to compare latency with."""

    traits: ReferenceTraits
    kind: str
    is_reference: bool = False
    needs_gpu: bool = False

    def unsupported_reason(self, kind: str, device: str) -> str:
        """Return why it cannot run models of a frontend on a kind of device, or an empty string."""
        name = self.traits.name
        if kind != self.kind:
            own, other = (FRONTENDS[kind].NAME for kind in (self.kind, kind))
            return f"{name} runs {own} models, and this one is of {other}"
        if self.needs_gpu and device != "cuda":
            return f"{name} runs only on NVIDIA GPUs"
        return ""

    def is_installed(self) -> bool:
        """Return whether all of its distributions are installed."""
        try:
            for distribution in self.traits.tools:
                packages.find_package(distribution)
        except EnvironmentProblem:
            return False
        return True


PEERS: Final[Mapping[str, Peer]] = {
    "onnxruntime": Peer(OnnxFrontend.REFERENCE, kind=OnnxFrontend.KIND, is_reference=True),
    "openvino": Peer(
        ReferenceTraits("OpenVINO", ("openvino",), "pip install openvino", True),
        kind=OnnxFrontend.KIND,
    ),
    "tensorrt": Peer(
        ReferenceTraits(
            "TensorRT", ("onnxruntime", "tensorrt"), "pip install onnxruntime-gpu tensorrt", True
        ),
        kind=OnnxFrontend.KIND,
        needs_gpu=True,
    ),
    "pytorch": Peer(PytorchFrontend.REFERENCE, kind=PytorchFrontend.KIND, is_reference=True),
}


def open_peer(
    name: str,
    files: Mapping[str, Path],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    threads: int,
    precision: str,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Run a model in a peer runtime, in a separate process while the block runs.

    Raises:
        StageError: if the runtime rejects the model.
        EnvironmentProblem: if the runtime cannot be imported.
    """
    from tvmflow.frontends import _reference_process
    from tvmflow.frontends.onnx.model_files import link_files

    peer = PEERS[name]
    if peer.is_reference:
        start = FRONTENDS[peer.kind].reference
        return start(files, tuple(inputs), tuple(outputs), threads=threads, scratch=scratch)
    first = {
        "runtime": name,
        "model": str(link_files(files, scratch)),
        "threads": threads,
        "precision": precision,
        "shapes": {
            spec.name: [size if isinstance(size, int) else -1 for size in spec.sizes or spec.shape]
            for spec in inputs
        },
    }
    framework, install = peer.traits.name, peer.traits.install
    worker = OnnxFrontend.WORKER
    return _reference_process.start(framework, install, worker, first, inputs, outputs, scratch)
