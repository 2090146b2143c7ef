"""MXNet as the reference: what its process is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tvmflow.errors import EnvironmentProblem
from tvmflow.frontends import _reference_process
from tvmflow.frontends._base import Reference
from tvmflow.values import TensorSpec

_INSTALL: Final = "pip install 'tvmflow[mxnet]'"


def start(
    files: Mapping[str, Path],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """A worker with the checkpoint loaded; it ends with the block, or with this process."""
    if importlib.util.find_spec("mxnet") is None:
        raise EnvironmentProblem(
            "the reference for MXNet checkpoints is MXNet, which is not installed", fix=_INSTALL
        )
    return _reference_process.start(
        "MXNet",
        "tvmflow.frontends.mxnet._reference_worker",
        {
            "symbol": str(files["symbol"].resolve()),
            "params": str(files["params"].resolve()),
            "inputs": [spec.to_json() for spec in inputs],
        },
        {
            # its oneDNN subgraphs are another program than the one that was saved
            "MXNET_SUBGRAPH_BACKEND": "NONE",
            "MXNET_CPU_WORKER_NTHREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
        },
        inputs,
        outputs,
        scratch=scratch,
        install=_INSTALL,
    )
