"""The imported model as other runtimes get it: its files, its tensors, and inputs bound to constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.inputs import array_of
from tvmflow.stages.image_data import DATA

if TYPE_CHECKING:
    import numpy as np

    from tvmflow.frontends.base import LoadedModel


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
    """

    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]
    bound: Mapping[str, np.ndarray[Any, Any]]
    dimensions: tuple[Dimension, ...] = ()
    quantized: LoadedModel | None = None

    def load(self, kind: str, tensors: Sequence[str] = ()) -> LoadedModel:
        """Import it again, with inner tensors as further outputs.

        Args:
            kind: Its frontend.
            tensors: The names of the inner tensors.
        """
        from tvmflow.compiler.open_sizes import with_dimensions

        loaded = FRONTENDS[kind].load(
            self.files, self.inputs, tuple(tensors), self.bound, self.dimensions
        )
        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], self.dimensions))
        return loaded


def read_imported_model(signature: Mapping[str, Json], files: Mapping[str, Path]) -> ImportedModel:
    """Return the imported model.

    Args:
        signature: That of the `import` stage.
        files: The input files of the stage; samples are not the model's.
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
