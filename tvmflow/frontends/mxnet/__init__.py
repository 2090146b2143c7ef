"""Importer of MXNet checkpoints (`PREFIX-symbol.json`, `PREFIX-0000.params`) through ONNX.

Imports tvm and onnx only inside functions.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import Field

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, RecipeError
from tvmflow.core.named_files import is_file, list_siblings, missing_file_text
from tvmflow.core.processes import code_command
from tvmflow.core.schema import ClosedModel
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends._reading import read_in_worker
from tvmflow.frontends.base import (
    LoadedModel,
    MissingFile,
    ModelFacts,
    ModelInput,
    ModelOutput,
    NotAModel,
    ReferenceTraits,
    SourceFields,
    Where,
)
from tvmflow.frontends.frontend import (
    Files,
    Frontend,
    ImportCall,
    NamedFile,
    SeveralFiles,
    Specs,
    pinned_by_name,
)
from tvmflow.frontends.mxnet._checkpoint import (
    find_states,
    not_a_symbol,
    read_shape,
    read_stored,
    read_symbol,
)
from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
from tvmflow.store.addresses import file_name, is_address, with_suffix
from tvmflow.store.source_files import SourceFiles

SYMBOL: Final = "symbol"
PARAMS: Final = "params"
"""The roles of the two files of a checkpoint."""

_MAX_EPOCH: Final = 9999
_VERSION_TIMEOUT_S: Final = 60.0


class MxnetCheckpoint(ClosedModel):
    """An MXNet checkpoint, with the arguments of `mx.model.load_checkpoint(prefix, epoch)`."""

    prefix: NamedFile = Field(
        examples=["models/digits"],
        description="Path or [URL](sources.md) of the checkpoint without `-symbol.json` and `-0000.params`.",
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


def _checkpoint_files(checkpoint: MxnetCheckpoint, base: Path) -> tuple[str, str]:
    """Return the symbol file and the parameter file of a checkpoint, as paths or addresses."""
    suffixes = "-symbol.json", f"-{checkpoint.epoch:04d}.params"
    prefix = checkpoint.prefix
    if is_address(prefix):
        symbol, params = (with_suffix(prefix, suffix) for suffix in suffixes)
    else:
        symbol, params = (str(base / f"{prefix}{suffix}") for suffix in suffixes)
    return symbol, params


def _checkpoint_file(
    role: str, name: str, source: MxnetSource, position: str, where: Where
) -> InputFile:
    path, url = ("", name) if is_address(name) else (name, "")
    key = file_name(url) if url else Path(path).name
    return pinned_by_name(InputFile(role, path, position, url), key, source, where)


def list_epochs(symbol: Path) -> list[int]:
    """Return the sorted epochs with a parameter file beside a symbol file."""
    stem = symbol.name.removesuffix("symbol.json")
    ends = [name.removeprefix(stem) for name in list_siblings(symbol) if name.startswith(stem)]
    numbers = [end.removesuffix(".params") for end in ends if end.endswith(".params")]
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


@read_in_worker
def read_variables(path: Path) -> ModelFacts:
    """Return the variables of a symbol as inputs, and its output nodes as outputs.

    Raises:
        ImportFailed: if the file is not a symbol.
    """
    symbol = read_symbol(path)
    variables = {node.name: read_shape(node) for node in symbol.nodes if node.op == "null"}
    return ModelFacts(
        tuple(ModelInput(name, dims=dims, is_required=False) for name, dims in variables.items()),
        outputs=tuple(
            map(ModelOutput, dict.fromkeys(symbol.nodes[node].name for node, _ in symbol.heads))
        ),
        states=find_states(symbol),
    )


@read_in_worker
def read_weights(path: Path) -> ModelFacts:
    """Return the names of the weights in a parameter file.

    Raises:
        ImportFailed: if the file is damaged or of another kind.
    """
    return ModelFacts(weights=tuple(read_stored(path)))


class MxnetFrontend(Frontend):
    """The frontend for MXNet, which is also the reference."""

    NAME = "MXNet"
    KIND = "mxnet"
    MODELS = "MXNet checkpoints"
    SOURCE = MxnetSource
    TOOLS = OnnxFrontend.TOOLS
    REQUIRES_INPUTS = True
    REFERENCE = ReferenceTraits(
        name="MXNet",
        tools=("mxnet", "numpy"),
        install="pip install 'tvmflow[mxnet]'",
        is_optional=True,
        note="x86-64 Linux only; importing MXNet models works without it",
    )
    WORKER = "tvmflow.frontends.mxnet._reference_worker"
    MODULE = "mxnet"

    def find_missing_files(self, model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
        """Yield the missing file of a checkpoint, with a similar name or the available epochs."""
        fields = model.get("mxnet")
        if not isinstance(fields, dict):
            return
        prefix, epoch = fields.get("prefix"), fields.get("epoch")
        is_prefix = isinstance(prefix, str) and prefix and not is_address(prefix)
        if not (is_prefix and type(epoch) is int and 0 <= epoch <= _MAX_EPOCH):
            return
        checkpoint = MxnetCheckpoint.model_construct(prefix=prefix, epoch=epoch)
        symbol, params = map(Path, _checkpoint_files(checkpoint, base))
        if not is_file(symbol):
            yield MissingFile(("mxnet", "prefix"), missing_file_text(symbol))
        elif not is_file(params):
            epochs = ", ".join(map(str, list_epochs(symbol))) or "none"
            text = f"{missing_file_text(params, suggest=False)} (available epochs: {epochs})"
            yield MissingFile(("mxnet", "epoch"), text)

    def files(
        self, source: SourceFields, base: Path, where: Where, sources: SourceFiles
    ) -> tuple[InputFile, ...]:
        """Return the symbol file and the parameter file of the checkpoint."""
        assert isinstance(source, MxnetSource)
        assert source.mxnet is not None
        names = _checkpoint_files(source.mxnet, base)
        symbol, params = sources.resolve_all(
            _checkpoint_file(role, name, source, where("mxnet", field), where)
            for role, field, name in zip((SYMBOL, PARAMS), ("prefix", "epoch"), names, strict=True)
        )
        if symbol.path:
            start = f"{symbol.where}: model.mxnet.prefix"
            try:
                self.read_facts({SYMBOL: Path(symbol.path)})
            except ImportFailed as error:
                raise RecipeError(f"{start}: {error.message}") from None
            except OSError as error:
                raise unreadable(f"{start}: {symbol.path}", error) from error
        return symbol, params

    def read_facts(self, files: Files) -> ModelFacts:
        """Return the variables of the symbol; only the import separates weights and finds shapes."""
        facts = self._read_variables(files)
        return facts._replace(inputs=tuple(value._replace(dims=None) for value in facts.inputs))

    def _read_variables(self, files: Files) -> ModelFacts:
        """Return the variables with their shapes in training, which are only a hint."""
        try:
            return read_variables(files[SYMBOL])
        except NotAModel as error:
            raise not_a_symbol(files[SYMBOL], str(error)) from None

    def list_dynamic_inputs(self, files: Files) -> Sequence[ModelInput]:
        """Return the variables that are not weights, with their dynamic dimensions."""
        try:
            weights = set(read_weights(files[PARAMS]).weights)
        except NotAModel as error:
            raise ImportFailed(f"{files[PARAMS].name} cannot be read: {error}") from None
        return [
            value._replace(is_required=True, dims=value.dims if "" in (value.dims or ()) else None)
            for value in self._read_variables(files).inputs
            if value.name not in weights and not value.name.endswith("_label")
        ]

    def _load(self, call: ImportCall) -> LoadedModel:
        from tvmflow.custom_operators.loading import load_operators
        from tvmflow.frontends.mxnet._checkpoint import read_params
        from tvmflow.frontends.mxnet._graph import build

        operators = load_operators(call.files)
        symbol = read_symbol(call.files[SYMBOL])
        return build(symbol, read_params(call.files[PARAMS]), call, operators)

    def _describe_files(self, files: Files, tensors: Specs, scratch: Path) -> dict[str, Any]:
        from tvmflow.custom_operators.loading import operator_paths, prepare_calls

        prepare_calls(scratch)
        paths = {role: str(files[role].resolve()) for role in (SYMBOL, PARAMS)}
        return {**paths, "operators": operator_paths(files)}

    def _environment(self, threads: int) -> Mapping[str, str]:
        return {
            # oneDNN fusion would run a different graph than the saved one.
            "MXNET_SUBGRAPH_BACKEND": "NONE",
            "MXNET_CPU_WORKER_NTHREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
        }

    def list_tensors(self, files: Files) -> Mapping[str, str]:
        """Return intermediate tensor -> the node that computes it."""
        from tvmflow.frontends.mxnet import _graph

        return _graph.list_tensors(read_symbol(files[SYMBOL]))

    def reference_version(self) -> str:
        """Return the version of MXNet, which is imported in a separate process."""
        from tvmflow.frontends._reference_process import worker_environment

        worker = self.WORKER
        process = subprocess.run(
            code_command(f"from {worker} import import_mxnet; print(import_mxnet().__version__)"),
            env=worker_environment({}),
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
        if process.returncode != 0:
            last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise EnvironmentProblem(
                f"MXNet cannot be imported: {last}", fix=self.REFERENCE.install
            )
        return process.stdout.strip()
