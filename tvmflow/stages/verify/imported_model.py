"""The imported model as other runtimes get it: its files, its tensors, and inputs bound to constants."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Json, Size, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.inputs import array_of
from tvmflow.stages.images import DATA
from tvmflow.stages.verify_settings import InputSettings, VerifySettings

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from tvmflow.frontends.base import LoadedModel

# Random divisors of both signs reach remainders of both.
_MOST_DIVISOR: Final = 9


class Operand(NamedTuple):
    """An input whose integers are indices or divisors.

    Attributes:
        input: Its name.
        sizes: The sizes of the axes that it indexes; empty for a divisor.
    """

    input: str
    sizes: tuple[Size, ...]


class ImportedModel(NamedTuple):
    """The model that a library was built from.

    Attributes:
        files: Its files by role.
        inputs: All its inputs, those that the recipe binds to constants last.
        outputs: Its outputs.
        tensors: Those of its parameters that a reference needs to know.
        bound: The constants, by input.
        dimensions: The sizes that each call of its library chooses.
        quantized: What the reference computes in place of the model that `quantize` made, with inner tensors.
        operands: The inputs whose integers are indices or divisors.
    """

    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]
    bound: Mapping[str, np.ndarray[Any, Any]]
    dimensions: tuple[Dimension, ...] = ()
    quantized: LoadedModel | None = None
    operands: tuple[Operand, ...] = ()

    def load(self, kind: str, tensors: Sequence[str] = ()) -> LoadedModel:
        """Import it again, with inner tensors as further outputs."""
        from tvmflow.compiler.open_sizes import with_dimensions

        loaded = FRONTENDS[kind].load(
            self.files, self.inputs, tuple(tensors), self.bound, self.dimensions
        )
        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], self.dimensions))
        return loaded


def read_imported_model(signature: Mapping[str, Json], files: Mapping[str, Path]) -> ImportedModel:
    """Return the imported model.

    Samples are no files of the model.
    """
    inputs, bound, outputs, tensors = (
        tuple(map(TensorSpec.from_json, signature.get(kind, ())))
        for kind in ("inputs", "bound", "outputs", "tensors")
    )
    values = {
        spec.name: array_of(spec, entry["value"])
        for spec, entry in zip(bound, signature.get("bound", ()), strict=True)
    }
    own = {role: path for role, path in files.items() if role.partition("/")[0] != DATA}
    return ImportedModel(
        files=own,
        inputs=(*inputs, *bound),
        outputs=outputs,
        tensors=tensors,
        bound=values,
        dimensions=Dimension.list_of(signature),
    )


def find_operands(mod: tvm.IRModule) -> tuple[Operand, ...]:
    """Return the inputs of an imported model whose integers are indices or divisors."""
    from tvmflow.compiler import ir
    from tvmflow.compiler.open_sizes import NoSize, size_text
    from tvmflow.compiler.passes.operand_checks import find_input_bounds, has_computed_operands

    operands: dict[Operand, None] = {}
    for var, bound in find_input_bounds(mod["main"]):
        if ir.dtype_of(var).startswith(("int", "uint")):
            with contextlib.suppress(NoSize):
                sizes = tuple(size_text(size) for size in bound.sizes or () if size is not None)
                if sizes or bound.sizes is None:
                    operands[Operand(str(var.name), sizes)] = None
    if has_computed_operands(mod):
        # of any integer, it may be made an index out of range: 0 and 1 are safest
        known = {operand.input for operand in operands}
        for var in mod["main"].params[: int(mod["main"].attrs["num_input"])]:
            if ir.dtype_of(var).startswith(("int", "uint")) and str(var.name) not in known:
                operands[Operand(str(var.name), (2,))] = None
    return tuple(operands)


def limit_draws(
    settings: VerifySettings, operands: Sequence[Operand], sizes: Mapping[str, int]
) -> VerifySettings:
    """Return settings by which random indices are within their axes, and random divisors are not 0.

    Ranges of the recipe stay as they are.
    """
    limits: dict[str, InputSettings] = {}
    for operand in operands:
        known = settings.inputs.get(operand.input, InputSettings())
        limit = limits.get(operand.input, known)
        update: dict[str, Any] = {}
        if not operand.sizes:
            update = {"nonzero": True, "range": limit.range or (-_MOST_DIVISOR, _MOST_DIVISOR)}
        elif not known.range:
            last = max(min(evaluate_shape(operand.sizes, sizes)) - 1, 0)
            update = {"range": (0, min(limit.range[1], last) if limit.range else last)}
        limit = limit.model_copy(update=update)
        limits[operand.input] = limit
    return settings.model_copy(update={"inputs": {**settings.inputs, **limits}})
