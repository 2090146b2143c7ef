"""MXNet checkpoints (`PREFIX-symbol.json`, `PREFIX-0000.params`); importing them needs no MXNet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tvmflow.frontends._base import LoadedModel, Reference
from tvmflow.values import InputFile, TensorSpec

KIND = "mxnet"
TOOLS: tuple[str, ...] = ("apache-tvm", "numpy")
REFERENCE_TOOLS: tuple[str, ...] = ("mxnet", "numpy")


def settings(model: Any) -> dict[str, Any]:
    """Nothing: the two files say it all."""
    return {}


def files(model: Any, base: Path, where: Any) -> tuple[InputFile, ...]:
    """The symbol and the parameters of the recipe's prefix and epoch."""
    symbol, params = model.mxnet.paths(base)
    return (
        InputFile("symbol", str(symbol), where("mxnet", "prefix")),
        InputFile("params", str(params), where("mxnet", "epoch")),
    )


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    settings: Mapping[str, Any],
    tensors: tuple[str, ...] = (),
) -> LoadedModel:
    """Import a checkpoint for these input shapes. Raises ImportFailed with operator and node."""
    from tvmflow.frontends.mxnet._graph import build
    from tvmflow.frontends.mxnet._params import read_params
    from tvmflow.frontends.mxnet._symbol import read_symbol

    symbol = read_symbol(files["symbol"])
    return build(symbol, read_params(files["params"]), inputs, tensors)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    settings: Mapping[str, Any],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start MXNet in an isolated process. Raises EnvironmentProblem when it is not installed."""
    from tvmflow.frontends.mxnet._reference import start

    return start(files, inputs, outputs, tensors, threads=threads, scratch=scratch)
