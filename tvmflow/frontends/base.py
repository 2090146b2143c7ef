"""Types shared by frontends: recipe fields, facts of models, imported models and references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from tvmflow.core.schema import ClosedModel
from tvmflow.core.types import Array, Dimension, Json, Size, State, TensorSpec

if TYPE_CHECKING:
    import tvm

    from tvmflow.frontends._reference_process import ObservedNode

MAX_ELEMENTS: Final = 1 << 31
"""Maximum number of elements of a tensor: compiled code has 32-bit indices."""

DYNAMIC_FIX: Final = (
    "write numbers in place of `dimensions`, and a library for each under `variants` in the recipe"
)
"""The fix for an operator that does not support dynamic dimensions."""

NEXT: Final = ".next"
"""Suffix of the output with the next value of a state that the model itself keeps."""

OPERATOR_FIX: Final = "replace the operator in the model, or end the model before it"
"""The fix for an operator that cannot be imported."""

Limits = tuple[int | None, int | None]
"""Minimum and maximum of a dynamic dimension; None if unlimited."""

Where = Callable[..., str]
"""Returns `file:line:column` of a field, given its path below `model`."""


class LoadedModel(NamedTuple):
    """A model as a Relax module, with separate weights.

    Attributes:
        mod: A module with one public Relax function `main` in dataflow form, not yet legalized. Its parameters are
            `inputs`, then `params`; its attribute `num_input` is the number of inputs. It returns a tensor or a flat
            tuple: `outputs`, `tensors`, then counts for data-dependent output shapes (`graph.counts`). Integer tensors
            that the graph needs as constants (shapes, axes) are constants here.
        params: All learned tensors, so that new weights for the same architecture give the same `mod`.
        inputs: The model's inputs, without constant ones.
        tensors: The requested intermediate tensors that are not outputs.
        nodes: Name of the node that each binding of `main` comes from, or an empty string.
        states: The inputs that the model itself keeps between calls, and the outputs that replace them.
    """

    mod: tvm.IRModule
    params: dict[str, Array]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...] = ()
    nodes: tuple[str, ...] = ()
    states: tuple[State, ...] = ()


class SourceFields(ClosedModel):
    """The fields of one frontend under `model:`, one of them named like the frontend; all default to None."""

    takes_operators: ClassVar[bool] = False
    """Whether a recipe can add custom operators for such a model."""


class MissingFile(NamedTuple):
    """A missing file of a recipe: the path of the field below `model`, and the message."""

    field: tuple[str, ...]
    text: str


class ModelInput(NamedTuple):
    """An input of a model.

    Attributes:
        dtype: The dtype; None if the model does not specify it.
        dims: Fixed sizes, and names of dynamic dimensions (which may be empty); None if the shape is unknown.
        is_required: False for an input with a default, or one that may be a weight.
        problem: Why the input cannot be compiled, as a predicate; or an empty string.
        limits: Dynamic dimension -> limits of its size, for dimensions that have the same size in all inputs.
    """

    name: str
    dtype: str | None = None
    dims: tuple[int | str, ...] | None = None
    is_required: bool = True
    problem: str = ""
    limits: Mapping[str, Limits] = MappingProxyType({})


class ModelOutput(NamedTuple):
    """An output of a model, or all outputs with a name prefix; for dtype and dims see `ModelInput`."""

    name: str
    dtype: str | None = None
    dims: tuple[int | str, ...] | None = None


class ModelFacts(NamedTuple):
    """Facts from a model's file for planning.

    Attributes:
        data_files: Names of other files with weights.
        weights: Names of weights, if the file has only weights.
        unsupported: Why the model cannot be imported, or an empty string.
        states: Inputs that are states by the model's structure, and the outputs that replace them.
    """

    inputs: tuple[ModelInput, ...] = ()
    data_files: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    unsupported: str = ""
    outputs: tuple[ModelOutput, ...] = ()
    states: Mapping[str, str] = MappingProxyType({})


def unsupported_dtype(name: str) -> str:
    """Return the problem of an input whose dtype cannot be compiled."""
    return (
        f"has dtype {name}, which no input of a library can have: export the model with another one"
    )


def number_repeated(names: Iterable[str]) -> Iterator[str]:
    """Yield names; repeated names are numbered: `y`, `y_2`, `y_3`."""
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for name in names:
        distinct, count = name, counts.get(name, 1)
        while distinct in seen:
            count += 1
            distinct = f"{name}_{count}"
        seen.add(distinct)
        counts[name] = count
        yield distinct


class InputRequest(NamedTuple):
    """A recipe's fields for an input; None for fields from the model.

    Attributes:
        shape: The shape; with dynamic shapes, the maximum shape.
        value: A constant: nested lists of numbers or booleans, or a scalar that fills the shape.
        range: Minimum and maximum of random inputs.
        image: Image preprocessing.
        sizes: The symbolic shape (integers and expressions of dimensions), or empty if all sizes are fixed.
        dimensions: The dimensions in `sizes`.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    value: Json = None
    range: tuple[float, float] | None = None
    image: Json = None
    sizes: tuple[Size, ...] = ()
    dimensions: tuple[Dimension, ...] = ()


class InputProblem(NamedTuple):
    """A problem of an input in a recipe; `input` and `field` are empty for a problem of all inputs."""

    input: str
    field: str
    text: str

    @property
    def loc(self) -> tuple[str, ...]:
        """The path of the field in a recipe."""
        return ("inputs", *filter(None, (self.input, self.field)))


class ReferenceTraits(NamedTuple):
    """Properties of the framework that serves as the reference.

    Attributes:
        name: Name in reports, without a version.
        tools: Distributions whose code can change results; they are in the key of `verify`.
        install: Command that installs it.
        is_optional: Whether tvmflow can be installed without it.
        note: Information for users before they install it.
    """

    name: str
    tools: tuple[str, ...]
    install: str
    is_optional: bool
    note: str = ""


class Reference(Protocol):
    """A framework in a separate process, with the model loaded."""

    name: str
    """Framework and version for reports, e.g. `ONNX Runtime 1.31.1`."""

    note: str
    """A note for reports, such as why this reference is a stand-in; or an empty string."""

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for one batch, by the names in `LoadedModel.outputs` and `tensors`."""
        ...

    def run_as_timed(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the optimized graph that `latency` measures."""
        ...

    can_observe: bool
    """Whether `observe` is supported."""

    def observe(self, feed: Mapping[str, Array]) -> list[ObservedNode]:
        """Return the branches of operators that one batch takes."""
        ...

    def latency(self, feed: Mapping[str, Array], *, repeat: int, min_seconds: float) -> list[float]:
        """Return seconds per call of `repeat` repeats; each repeat makes calls for at least `min_seconds`."""
        ...


class NotAModel(ValueError):
    """A file is not a model that can be imported; the message is the reason."""
