"""The fields of a recipe that name an MXNet checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from pydantic import Field

from tvmflow.core.errors import ImportFailed
from tvmflow.core.named_files import is_file, list_siblings, missing_file_text
from tvmflow.core.schema import ClosedModel
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends._file_source import NamedFile, SeveralFiles, pinned_by_name
from tvmflow.frontends._reading import NotAModel, read_in_worker
from tvmflow.frontends.base import MissingFile, ModelFacts, ModelInput, Where
from tvmflow.frontends.mxnet._params import read_names
from tvmflow.frontends.mxnet._symbol import not_a_symbol, read_symbol
from tvmflow.store.addresses import file_name, is_address, with_suffix

SYMBOL: Final = "symbol"
PARAMS: Final = "params"
"""The roles of the two files of a checkpoint."""

_MAX_EPOCH: Final = 9999


class MxnetCheckpoint(ClosedModel):
    """An MXNet checkpoint, as `mx.model.load_checkpoint(prefix, epoch)` names it."""

    prefix: NamedFile = Field(
        examples=["models/digits"],
        description="Path of the checkpoint without `-symbol.json` and `-0000.params`, from the recipe's folder, or an "
        "address: see [sources.md](sources.md).",
    )
    epoch: int = Field(
        ge=0, le=_MAX_EPOCH, examples=[10], description="The number in `prefix-NNNN.params`."
    )


class MxnetSource(SeveralFiles):
    """The fields of an MXNet model."""

    takes_operators: ClassVar[bool] = True

    mxnet: MxnetCheckpoint | None = Field(
        default=None,
        examples=[{"prefix": "models/digits", "epoch": 10}],
        description="An MXNet checkpoint.",
    )


def checkpoint_files(checkpoint: MxnetCheckpoint, base: Path) -> tuple[str, str]:
    """Return the files of a checkpoint, as paths or addresses: its symbol and its parameters."""
    suffixes = "-symbol.json", f"-{checkpoint.epoch:04d}.params"
    prefix = checkpoint.prefix
    if is_address(prefix):
        symbol, params = (with_suffix(prefix, suffix) for suffix in suffixes)
    else:
        symbol, params = (str(base / f"{prefix}{suffix}") for suffix in suffixes)
    return symbol, params


def checkpoint_file(
    role: str, name: str, source: MxnetSource, position: str, where: Where
) -> InputFile:
    """Return a file of a checkpoint by its path or address, not resolved yet."""
    path, url = ("", name) if is_address(name) else (name, "")
    key = file_name(url) if url else Path(path).name
    return pinned_by_name(InputFile(role, path, position, url), key, source, where)


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the missing file of a checkpoint, with the nearest name or the epochs that exist."""
    fields = model.get("mxnet")
    if not isinstance(fields, dict):
        return
    prefix, epoch = fields.get("prefix"), fields.get("epoch")
    if not (isinstance(prefix, str) and prefix and type(epoch) is int and 0 <= epoch <= _MAX_EPOCH):
        return
    if is_address(prefix):
        return
    checkpoint = MxnetCheckpoint.model_construct(prefix=prefix, epoch=epoch)
    symbol, params = map(Path, checkpoint_files(checkpoint, base))
    if not is_file(symbol):
        yield MissingFile(("mxnet", "prefix"), missing_file_text(symbol))
    elif not is_file(params):
        epochs = ", ".join(map(str, list_epochs(symbol))) or "none"
        text = f"{missing_file_text(params, suggest=False)} (available epochs: {epochs})"
        yield MissingFile(("mxnet", "epoch"), text)


def read_inputs(files: Mapping[str, Path]) -> Sequence[ModelInput]:
    """Return the variables of the symbol: which of them are weights, and all shapes, are only known to the import.

    Raises:
        ImportFailed: when the file is not a symbol.
    """
    return read_variables(files[SYMBOL]).inputs


def read_variables(path: Path) -> ModelFacts:
    """Return the variables of a symbol as inputs, and the nodes of its outputs.

    Raises:
        ImportFailed: when the file is not a symbol.
    """
    try:
        return _variables_in(path)
    except NotAModel as error:
        raise not_a_symbol(path, str(error)) from None


def _read_variables(path: Path) -> ModelFacts:
    symbol = read_symbol(path)
    names = dict.fromkeys(node.name for node in symbol.nodes if node.op == "null")
    return ModelFacts(
        tuple(ModelInput(name, is_required=False) for name in names),
        outputs=tuple(dict.fromkeys(symbol.nodes[node].name for node, _ in symbol.heads)),
    )


def _read_weights(path: Path) -> ModelFacts:
    return ModelFacts(weights=read_names(path))


_variables_in = read_in_worker(_read_variables)
_weights_in = read_in_worker(_read_weights)


def read_outputs(files: Mapping[str, Path]) -> Sequence[str]:
    """Return the nodes that the names of outputs begin with; errors are those of `read_inputs`."""
    return read_variables(files[SYMBOL]).outputs


def list_epochs(symbol: Path) -> list[int]:
    """Return the epochs whose parameters lie beside a symbol, in order."""
    stem = symbol.name.removesuffix("symbol.json")
    ends = [name.removeprefix(stem) for name in list_siblings(symbol) if name.startswith(stem)]
    numbers = [end.removesuffix(".params") for end in ends if end.endswith(".params")]
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def list_inputs(files: Mapping[str, Path]) -> list[ModelInput]:
    """Return the variables of the symbol that are no weights, whose shapes nobody tells.

    Raises:
        ImportFailed: when a file is not of a checkpoint.
    """
    try:
        weights = set(_weights_in(files[PARAMS]).weights)
    except NotAModel as error:
        raise ImportFailed(f"{files[PARAMS].name} cannot be read: {error}") from None
    return [
        value._replace(is_required=True)
        for value in read_inputs(files)
        if value.name not in weights and not value.name.endswith("_label")
    ]
