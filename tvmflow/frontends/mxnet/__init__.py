"""MXNet checkpoints (`PREFIX-symbol.json`, `PREFIX-0000.params`); importing them needs no MXNet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tvmflow.errors import RecipeError
from tvmflow.frontends._base import LoadedModel, Reference
from tvmflow.values import InputFile, TensorSpec

KIND = "mxnet"
TOOLS: tuple[str, ...] = ("apache-tvm", "numpy")
REFERENCE_TOOLS: tuple[str, ...] = ("mxnet", "numpy")


def settings(model: Any) -> dict[str, Any]:
    """Nothing: the two files say it all."""
    return {}


def files(model: Any, base: Path, where: Any) -> tuple[InputFile, ...]:
    """The symbol and the parameters of the recipe's prefix and epoch. Raises RecipeError when one is not there."""
    prefix = base / model.mxnet.prefix
    found = {
        "symbol": prefix.with_name(f"{prefix.name}-symbol.json"),
        "params": prefix.with_name(f"{prefix.name}-{model.mxnet.epoch:04d}.params"),
    }
    places = {"symbol": where("mxnet", "prefix"), "params": where("mxnet", "epoch")}
    missing = [
        f"{places[role]}: there is no file {path}{_epochs(prefix) if role == 'params' else ''}"
        for role, path in found.items()
        if not path.is_file()
    ]
    if missing:
        raise RecipeError(
            missing,
            fix="a checkpoint of MXNet is PREFIX-symbol.json and PREFIX-EPOCH.params with four digits for the epoch",
        )
    return tuple(InputFile(role, str(path), places[role]) for role, path in found.items())


def _epochs(prefix: Path) -> str:
    """What there is instead, for the message."""
    endings = [
        path.name.removeprefix(f"{prefix.name}-").removesuffix(".params")
        for path in prefix.parent.glob(f"{prefix.name}-*.params")
    ]
    epochs = sorted(int(ending) for ending in endings if ending.isdecimal())
    return f" (there is epoch {', '.join(map(str, epochs))})" if epochs else ""


def load(
    files: Mapping[str, Path], inputs: tuple[TensorSpec, ...], settings: Mapping[str, Any]
) -> LoadedModel:
    """Import a checkpoint for these input shapes. Raises ImportFailed with operator and node."""
    from tvmflow.frontends.mxnet._graph import build
    from tvmflow.frontends.mxnet._params import read_params
    from tvmflow.frontends.mxnet._symbol import read_symbol

    return build(read_symbol(files["symbol"]), read_params(files["params"]), inputs)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    settings: Mapping[str, Any],
    *,
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start MXNet in an isolated process. Raises EnvironmentProblem when it is not installed."""
    from tvmflow.frontends.mxnet._reference import start

    return start(files, inputs, outputs, threads=threads, scratch=scratch)
