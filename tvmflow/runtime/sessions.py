"""Sessions of models with states, such as a KV cache.

Each step leaves the states for the next one in the library's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from tvmflow.core.dimensions import WrongSize, derive_sizes, evaluate_shape, ranges_text
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Dimension, Json, Size, State, TensorSpec
from tvmflow.runtime.arrays import dtype_of, match_inputs
from tvmflow.runtime.c_loader import NativeProgram, Sampling, StepContext

_STATES: Final = "the states"


def holds_states(program: object) -> TypeGuard[NativeProgram]:
    """Return whether a program is a library whose contexts hold states."""
    return isinstance(program, NativeProgram) and "step" in program.loaded.functions


class Session:
    """A sequence of steps of a model with states; each session has states of its own.

    One thread at a time may use it. Sessions of one model share its weights.

    Attributes:
        signature: That of the model.
        inputs: The inputs of a step: those of the model that are not states.
        outputs: The outputs of a step.
        dimensions: The dimensions of the model.
        length_dimension: The dimension that is the length of the growing states; None if none grows.

    Raises:
        BundleError: The model has no states, or is not run by the C runtime.
    """

    def __init__(
        self,
        program: object,
        signature: Mapping[str, Json],
        context: StepContext | None = None,
    ) -> None:
        self._program, self.signature = program, signature
        self._states = State.list_of(signature)
        if not self._states or not holds_states(program):
            raise BundleError(
                "the model has no states that its library holds",
                fix="name them in the recipe: `state: {INPUT: OUTPUT}`, and build it with `runtime: c`",
            )
        tensors = {
            kind: tuple(map(TensorSpec.from_json, signature[kind]))
            for kind in ("inputs", "outputs")
        }
        self._kept = [
            next(s for s in tensors["inputs"] if s.name == state.input) for state in self._states
        ]
        held = {name for state in self._states for name in (state.input, state.output)}
        self.inputs, self.outputs = (
            tuple(spec for spec in specs if spec.name not in held) for specs in tensors.values()
        )
        self.dimensions = Dimension.list_of(signature)
        self.length_dimension = State.find_length(signature)
        self._length_name = self.length_dimension.name if self.length_dimension else ""
        self._sizes: dict[str, Sequence[Size]] = {
            spec.name: spec.sizes or spec.shape for spec in self.inputs
        }
        if self._length_name:
            self._sizes[_STATES] = (self._length_name,)
        counts = (len(self.inputs), len(self.outputs))
        self._context = context or StepContext(program, counts)

    def __repr__(self) -> str:
        names = ", ".join(state.input for state in self._states)
        return f"<tvmflow.Session of {names}, length {self.length}>"

    @property
    def length(self) -> int:
        """The length of the growing states, such as the tokens in a KV cache; 0 if none grows."""
        return self._context.length

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        """Compute the next step.

        Args:
            feed: A tensor for each of `inputs` by name, as `Module.run` takes them.

        Returns:
            An array for each of `outputs`.

        Raises:
            BundleError: a ValueError that names the mismatch; the states are unchanged.
        """
        import numpy as np

        arrays = match_inputs(self.inputs, feed, self)
        sizes = self._derive([array.shape for array in arrays])
        results = [
            np.empty(
                evaluate_shape(spec.sizes, sizes) if spec.sizes else spec.shape,
                dtype_of(spec.dtype),
            )
            for spec in self.outputs
        ]
        sizes.pop(self._length_name, None)
        self._context.step(sizes, arrays, results)
        return {spec.name: array for spec, array in zip(self.outputs, results, strict=True)}

    def _derive(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each dimension in a step."""
        if not self.dimensions:
            return {}
        known = {spec.name: shape for spec, shape in zip(self.inputs, shapes, strict=True)}
        if self._length_name:
            known[_STATES] = (self.length,)
        try:
            return derive_sizes(self.dimensions, self._sizes, known)
        except WrongSize as error:
            raise BundleError(
                str(error),
                fix=f"after {self.length} steps of its states, {ranges_text(self.dimensions)}",
            ) from error

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Generate the tokens of a language model that follow some.

        The given tokens are computed in steps of as many as the model takes at once. The session then holds all
        tokens but the last one, and a later call goes on from there: give it that token and those that follow.

        Args:
            tokens: The tokens of the prompt, at least one.
            max_tokens: So many are generated at most; None for as many as the states can hold.
            stop: Tokens after which generation ends; they are given, too.
            temperature: The divisor of logits; 0 chooses the token of the largest logit.
            top_k: Only so many tokens of the largest logits are chosen from, at most 1024; 0 for all.
            top_p: Only the most probable tokens are chosen from, whose probabilities together reach this.
            repetition_penalty: The divisor of positive logits of earlier tokens, and the factor of negative ones.
            seed: The random state to begin with; None goes on with that of the session.

        Raises:
            BundleError: The model is not a language model with a KV cache or a recurrent state, or an argument is wrong.
        """
        from tvmflow.runtime.generation import Generation

        generation = Generation(
            self, self._context, Sampling(temperature, top_k, top_p, repetition_penalty)
        )
        if seed is not None:
            self._context.seed(seed)
        return generation.run(tokens, max_tokens, frozenset(stop))

    def reset(self) -> None:
        """Go back to the beginning: growing states are empty, the others 0, or what the model begins with."""
        self._context.reset()

    def truncate(self, length: int) -> None:
        """Shorten the growing states to a length; the next step continues from there.

        Raises:
            BundleError: The length is not from 0 to `length`, or a state is replaced by each step as a whole.
        """
        self._context.truncate(length)

    @property
    def states(self) -> dict[str, Array]:
        """A copy of each state by the name of its input."""
        import numpy as np

        found = {}
        for place, spec in enumerate(self._kept):
            shape = evaluate_shape(spec.sizes or spec.shape, {self._length_name: self.length})
            flat = np.frombuffer(self._context.read(place), dtype_of(spec.dtype))
            found[spec.name] = flat.reshape(shape).copy()
        return found

    def save(self) -> bytes:
        """Return all states, for `load` of any session of this model."""
        return self._context.save()

    def load(self, data: bytes) -> None:
        """Continue from the result of `save`.

        Raises:
            BundleError: It is damaged, or was saved by another model; the states are as before.
        """
        self._context.load(data)

    def fork(self) -> Session:
        """Return an independent session that starts with a copy of the states."""
        return Session(self._program, self.signature, self._context.fork())
