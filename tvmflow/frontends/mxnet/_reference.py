"""MXNet as the reference: what its process is told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tvmflow.errors import EnvironmentProblem
from tvmflow.frontends import _reference_process
from tvmflow.frontends._base import Reference
from tvmflow.values import TensorSpec

_ASK_VERSION: Final = (
    "from tvmflow.frontends.mxnet._reference_worker import import_mxnet; "
    "print(import_mxnet().__version__)"
)
_INSTALL: Final = "pip install 'tvmflow[mxnet]'"


def start(
    files: Mapping[str, Path],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    tensors: Sequence[TensorSpec],
    *,
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """A worker with the checkpoint loaded, giving `tensors` after its outputs; it ends with the block, or with this process."""
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
            "tensors": [spec.name for spec in tensors],
        },
        {
            # its oneDNN subgraphs are another program than the one that was saved
            "MXNET_SUBGRAPH_BACKEND": "NONE",
            "MXNET_CPU_WORKER_NTHREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
        },
        inputs,
        (*outputs, *tensors),
        scratch=scratch,
        install=_INSTALL,
    )


def version(*, timeout_s: float = 60.0) -> str:
    """MXNet's version, as its own process tells it. Raises EnvironmentProblem when it cannot be imported there."""
    told = subprocess.run(
        [sys.executable, "-c", _ASK_VERSION],
        env=_reference_process.worker_environment({}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if told.returncode != 0:
        last = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
        raise EnvironmentProblem(f"MXNet cannot be imported: {last}", fix=_INSTALL)
    return told.stdout.strip()
