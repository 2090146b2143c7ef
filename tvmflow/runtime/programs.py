"""The code of a model behind one interface, whoever executes it.

This is C code of its own, or TVM's virtual machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from tvmflow.core.errors import BundleError
from tvmflow.core.types import TensorSpec

if TYPE_CHECKING:
    from tvmflow.runtime.arrays import Array

Record = Callable[[str, float], None]
"""Receives the name of an operator and the seconds of one call of it."""

Observe = Callable[[bytes | bytearray], None]
"""Receives memory with tensors of a call: what a kernel has just read and written, or all that the library has."""

Call = Callable[[], object]
"""Calls a model with inputs that are in place."""

Main = Callable[..., list[Any]]
"""The function of a part: tensors to tensors."""


def wrong_value_error(message: str) -> BundleError:
    """Return the error for an index out of range, or a divisor that is 0."""
    return BundleError(message, fix="check the values of the inputs before the call")


class Program(Protocol):
    """The code of a model."""

    @property
    def threads(self) -> int:
        """The threads that a call uses at most, the calling one included."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs for inputs; in place of None there is an array that takes an output."""
        ...

    def bound(self, inputs: Sequence[Array]) -> AbstractContextManager[Call]:
        """Give a call with inputs that are in place; outputs stay where the program puts them."""
        ...

    def profiled(self, inputs: Sequence[Array], record: Record) -> AbstractContextManager[Call]:
        """Give such a call, which reports each operator."""
        ...

    def wait(self) -> None:
        """Wait until all calls have ended: those of a GPU return earlier."""


class WatchedProgram(Program, Protocol):
    """The code of a model in one piece."""

    def watch(self, inputs: Sequence[Array], observe: Observe) -> list[Array]:
        """Return the outputs of a call that shows its memory after each kernel."""
        ...


class PartProgram(Program, Protocol):
    """The code of a part of a model: tensors stay where it computes with them."""

    def place(self, tensor: Any, spec: TensorSpec) -> Any:
        """Return an array, or the tensor of another part, as a tensor of this part."""
        ...

    def main(self, *tensors: Any) -> list[Any]:
        """Return the outputs as tensors that are valid until the next call."""
        ...

    def profiled_main(self, record: Record) -> Main:
        """Return another `main`, which is slower and reports each operator."""
        ...

    def fetch(self, tensor: Any) -> Array:
        """Return one of its tensors as an array that is valid until the next call."""
        ...
