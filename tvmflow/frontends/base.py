"""Arguments and results of frontends: fields, files and facts of models, imported models, references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from tvmflow.core.schema import ClosedModel
from tvmflow.core.types import Dimension, Json, Size, State, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from tvmflow.frontends._reference_process import ObservedNode

MAX_ELEMENTS: Final = 1 << 31
"""The most elements of a tensor: its indices are 32-bit integers in compiled code."""

DYNAMIC_FIX: Final = (
    "write numbers in place of `dimensions`, and a library for each under `variants` in the recipe"
)
"""The remedy for an operator that cannot follow the dimensions."""

NEXT: Final = ".next"
"""The ending of the name of an output that replaces a state that the model itself keeps."""

Limits = tuple[int | None, int | None]
"""The smallest and the largest size of a free dimension, if there is one."""

Where = Callable[..., str]
"""Returns `file:line:column` of a field, given its path below `model`."""


class LoadedModel(NamedTuple):
    """A model as a Relax module, with separate weights.

    Attributes:
        mod: One public Relax function `main` in dataflow form, not yet legalized. Its parameters are `inputs`, then
            `params`; its attribute `num_input` counts the former. It returns a tensor or a flat tuple: `outputs`,
            `tensors`, then the counts of outputs whose size is known only after a call (`graph.counts`). Integer
            tensors that the graph needs as constants (shapes, axes) are constants here.
        params: Everything else that is learned, so that new weights for the same architecture give the same `mod`.
        inputs: The model's inputs, without constant ones.
        tensors: The requested inner tensors that are not outputs anyway.
        nodes: The name of the node that each binding of `main` came from; empty for a binding without one.
        states: The inputs that the model itself keeps from call to call, and the outputs that replace them.
    """

    mod: tvm.IRModule
    params: dict[str, np.ndarray[Any, Any]]
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
    """A file that a recipe names and that does not exist: the field below `model`, and the message."""

    field: tuple[str, ...]
    text: str


class ModelInput(NamedTuple):
    """An input of a model.

    Attributes:
        dtype: Its dtype; None if the model does not say.
        dims: Fixed sizes, and names of free dimensions (which may be empty); None without a shape.
        is_required: False for one that has a default, or that may be a weight.
        problem: Why it cannot be compiled, as the end of a sentence; or nothing.
        limits: Of each free dimension that has the same size in all inputs: that size's limits.
    """

    name: str
    dtype: str | None = None
    dims: tuple[int | str, ...] | None = None
    is_required: bool = True
    problem: str = ""
    limits: Mapping[str, Limits] = MappingProxyType({})


class ModelOutput(NamedTuple):
    """An output of a model, or all whose names begin so; dtype and dims are as those of `ModelInput`."""

    name: str
    dtype: str | None = None
    dims: tuple[int | str, ...] | None = None


class ModelFacts(NamedTuple):
    """The facts in a model's file that planning needs.

    Attributes:
        data_files: The names of other files with weights.
        weights: The names of weights, if the file has only weights.
        unsupported: Why the model cannot be imported, as the end of a sentence; or nothing.
    """

    inputs: tuple[ModelInput, ...] = ()
    data_files: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    unsupported: str = ""
    outputs: tuple[ModelOutput, ...] = ()


def unsupported_dtype(name: str) -> str:
    """Return the problem of an input whose dtype cannot be compiled."""
    return (
        f"has dtype {name}, which no input of a library can have: export the model with another one"
    )


def number_repeated(names: Iterable[str]) -> Iterator[str]:
    """Yield names, with a number where one is repeated: `y`, `y_2`, `y_3`."""
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
    """The fields of an input in a recipe; None for fields that the model decides.

    Attributes:
        shape: Its shape; with dynamic shapes, the largest one.
        value: Its constant: nested lists of numbers or truth values, or one of them, which fills the shape.
        range: Minimum and maximum of random inputs.
        image: How an image becomes this input.
        sizes: Its sizes if some are dynamic, each an integer or an expression of dimensions; else empty.
        dimensions: The dimensions in its sizes.
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
    """A problem of an input in a recipe; its name and field are empty for a problem of all inputs."""

    input: str
    field: str
    text: str

    @property
    def loc(self) -> tuple[str, ...]:
        """The path of the field in a recipe."""
        return ("inputs", *filter(None, (self.input, self.field)))


class ReferenceTraits(NamedTuple):
    """The properties of the framework that serves as the reference.

    Attributes:
        name: Its name in reports, without a version.
        tools: Distributions whose code can change its results; they enter the key of `verify`.
        install: The command that installs it.
        is_optional: tvmflow is installed without it.
        note: Further information for users before they install it.
    """

    name: str
    tools: tuple[str, ...]
    install: str
    is_optional: bool
    note: str = ""


class Reference(Protocol):
    """A running framework, in a process of its own, with the model loaded."""

    name: str
    """Framework and version as reports show it, e.g. `ONNX Runtime 1.31.1`."""

    note: str
    """The note of reports: that this reference is a stand-in, and why; or nothing."""

    def run(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs for one batch, by the names in `LoadedModel.outputs` and `tensors`."""
        ...

    def run_as_timed(
        self, feed: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a call as `latency` times it: with rewrites of the graph."""
        ...

    can_observe: bool
    """Whether it can observe which branches of operators inputs take."""

    def observe(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> list[ObservedNode]:
        """Return the branches of operators that one batch takes."""
        ...

    def latency(
        self, feed: Mapping[str, np.ndarray[Any, Any]], *, repeat: int, min_seconds: float
    ) -> list[float]:
        """Return seconds per call of `repeat` repeats, each of whole calls for at least `min_seconds`."""
        ...


class NotAModel(ValueError):
    """A file is not a model that can be imported; the message is the reason."""
