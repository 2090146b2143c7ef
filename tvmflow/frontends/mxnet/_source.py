"""The fields of a recipe that name an MXNet checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from tvmflow.core.named_files import is_file, list_siblings, missing_file_text
from tvmflow.core.schema import ClosedModel
from tvmflow.core.types import Json
from tvmflow.frontends._base import MissingFile, ModelInput, SourceFields
from tvmflow.frontends.mxnet._symbol import read_symbol

SYMBOL: Final = "symbol"
PARAMS: Final = "params"
"""The roles of the two files of a checkpoint."""

_MAX_EPOCH: Final = 9999


class MxnetCheckpoint(ClosedModel):
    """An MXNet checkpoint, as `mx.model.load_checkpoint(prefix, epoch)` names it."""

    prefix: str = Field(
        min_length=1,
        examples=["models/digits"],
        description="Path of the checkpoint without `-symbol.json` and `-0000.params`, from the recipe's folder.",
    )
    epoch: int = Field(
        ge=0, le=_MAX_EPOCH, examples=[10], description="The number in `prefix-NNNN.params`."
    )


class MxnetSource(SourceFields):
    """The fields of an MXNet model."""

    mxnet: MxnetCheckpoint | None = Field(
        default=None,
        examples=[{"prefix": "models/digits", "epoch": 10}],
        description="An MXNet checkpoint.",
    )


def checkpoint_paths(prefix: str, epoch: int, base: Path) -> tuple[Path, Path]:
    """Return the files of a checkpoint: its symbol and its parameters."""
    return base / f"{prefix}-symbol.json", base / f"{prefix}-{epoch:04d}.params"


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the missing file of a checkpoint, with the nearest name or the epochs that exist."""
    fields = model.get("mxnet")
    if not isinstance(fields, dict):
        return
    prefix, epoch = fields.get("prefix"), fields.get("epoch")
    if not (isinstance(prefix, str) and prefix and type(epoch) is int and 0 <= epoch <= _MAX_EPOCH):
        return
    symbol, params = checkpoint_paths(prefix, epoch, base)
    if not is_file(symbol):
        yield MissingFile(("mxnet", "prefix"), missing_file_text(symbol))
    elif not is_file(params):
        text = f"{missing_file_text(params, suggest=False)} (available epochs: {_epochs(symbol)})"
        yield MissingFile(("mxnet", "epoch"), text)


def read_inputs(files: Mapping[str, Path]) -> Sequence[ModelInput]:
    """Return the variables of the symbol: which of them are weights, and all shapes, are only known to the import.

    Raises:
        ImportFailed: when the file is not a symbol.
    """
    symbol = read_symbol(files[SYMBOL])
    variables = dict.fromkeys(node.name for node in symbol.nodes if node.op == "null")
    return [ModelInput(name, is_required=False) for name in variables]


def _epochs(symbol: Path) -> str:
    stem = symbol.name.removesuffix("symbol.json")
    ends = [name.removeprefix(stem) for name in list_siblings(symbol) if name.startswith(stem)]
    numbers = [end.removesuffix(".params") for end in ends if end.endswith(".params")]
    epochs = [str(int(number)) for number in numbers if number.isascii() and number.isdigit()]
    return ", ".join(epochs) or "none"
