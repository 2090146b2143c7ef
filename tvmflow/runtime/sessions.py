"""Sessions of models with states, such as a KV cache, and generation of tokens with them.

The states stay in the library's memory between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from tvmflow.core.dimensions import (
    WrongSize,
    derive_sizes,
    evaluate_shape,
    is_name,
    ranges_text,
)
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Dimension, Json, Size, State, TensorSpec
from tvmflow.runtime.arrays import dtype_of, match_inputs
from tvmflow.runtime.c_loader import NativeProgram, Sampling, StepContext

_STATES: Final = "the states"
_LOGITS: Final = "logits"
_STEP_FIX: Final = "call `session.run` with these inputs, token by token"


def holds_states(program: object) -> TypeGuard[NativeProgram]:
    """Return whether a program is a library whose contexts hold states."""
    return isinstance(program, NativeProgram) and "step" in program.loaded.functions


class Session:
    """A sequence of steps of a model with states; each session has its own states.

    One thread at a time may use it. Sessions of one model share its weights.

    Attributes:
        signature: The signature of the model.
        inputs: The inputs of a step: the model's inputs that are not states.
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

    @property
    def dropped(self) -> int:
        """The rows that `drop` took from the growing states since a reset, saved with the states."""
        return self._context.dropped

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        """Compute the next step; `feed` and the result map the names of inputs and outputs to tensors.

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
        """Return the size of each dynamic dimension in a step with inputs of these shapes."""
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
        position: int | None = None,
        drop: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Generate the tokens of a language model that follow a prompt.

        The prompt is processed in steps of as many tokens as the model takes at once. Afterwards the session holds all
        tokens except the last one. A later call continues from there: pass it that token and those that follow.

        Args:
            tokens: The tokens of the prompt, at least one.
            max_tokens: The maximum number of tokens; None for as many as the states can hold, or with `drop` for no limit.
            stop: Tokens that end the generation; the stop token is yielded, too.
            position: The position of the first token. A model with positions or masks and without growing states needs
                it; otherwise it is `length + dropped`.
            drop: Where the states are full, `drop` this many of the oldest tokens and continue; 0 ends the generation.
            temperature: The divisor of logits; 0 chooses the token of the largest logit.
            top_k: Sample only from this many tokens with the largest logits, at most 1024; 0 for all tokens.
            top_p: Sample only from the most probable tokens whose probabilities together reach this value.
            repetition_penalty: Of earlier tokens, positive logits are divided by it, and negative logits multiplied.
            seed: The seed of the random state; None continues with the session's random state.

        Raises:
            BundleError: The model is not a language model with a KV cache or a recurrent state, or an argument is wrong.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        generation = _Generation(self, self._context, sampling, position, drop)
        if seed is not None:
            self._context.seed(seed)
        return generation.run(tokens, max_tokens, frozenset(stop))

    def reset(self) -> None:
        """Reset the states: growing states become empty, others 0 or the model's initial values."""
        self._context.reset()

    def truncate(self, length: int) -> None:
        """Shorten the growing states to a length; the next step continues from there.

        Raises:
            BundleError: The length is not from 0 to `length`, or the model has a state that does not grow.
        """
        self._context.truncate(length)

    def drop(self, count: int) -> None:
        """Drop the oldest rows of the growing states; `length` becomes smaller, positions of tokens do not.

        Raises:
            BundleError: The count is not from 0 to `length`, or the model has a state that does not grow.
        """
        self._context.drop(count)

    @property
    def states(self) -> dict[str, Array]:
        """A copy of each state by the name of its input."""
        import numpy as np

        found = {}
        for index, spec in enumerate(self._kept):
            shape = evaluate_shape(spec.sizes or spec.shape, {self._length_name: self.length})
            flat = np.frombuffer(self._context.read(index), dtype_of(spec.dtype))
            found[spec.name] = flat.reshape(shape).copy()
        return found

    def save(self) -> bytes:
        """Return all states as bytes; any session of this model can `load` them."""
        return self._context.save()

    def load(self, data: bytes) -> None:
        """Continue from the result of `save`.

        Raises:
            BundleError: The data are damaged, or from another model or version of tvmflow; the states are unchanged.
        """
        self._context.load(data)

    def fork(self) -> Session:
        """Return an independent session that starts with the same states.

        Growing states share their memory until both sessions have continued.
        """
        return Session(self._program, self.signature, self._context.fork())


# ---------------------------------------------------------------- generation


class _Generation:
    """Generation with a session, whose only inputs must be tokens, and optionally positions and masks.

    Raises:
        BundleError: The model has further inputs, or its logits are not found.
    """

    def __init__(
        self,
        session: Session,
        context: StepContext,
        sampling: Sampling,
        position: int | None,
        drop: int,
    ) -> None:
        import numpy as np

        self._session, self._context, self._sampling = session, context, sampling
        makers: Mapping[str, Callable[[int, int], Array]] = {
            "mask": lambda length, count: np.ones(length + count, np.int64),
            "position": lambda _, count: np.arange(self._position, self._position + count),
        }
        self._makers: dict[str, tuple[TensorSpec, Callable[[int, int], Array]]] = {}
        others = []
        for spec in session.inputs:
            maker = next((make for word, make in makers.items() if word in spec.name.lower()), None)
            if maker is None:
                others.append(spec)
            else:
                self._makers[spec.name] = spec, maker
        is_tokens = [s.dtype in ("int32", "int64") and len(s.shape) in (1, 2) for s in others]
        if is_tokens != [True]:
            names = ", ".join(spec.name for spec in others) or "none"
            raise BundleError(
                f"of the inputs of the model, one must be tokens, and others masks or positions: {names}",
                fix=_STEP_FIX,
            )
        [self._tokens] = others
        named = [spec for spec in session.outputs if spec.name == _LOGITS] or list(session.outputs)
        if len(named) != 1 or named[0].dtype != "float32" or len(named[0].shape) < 2:
            raise BundleError(
                "none of the outputs of the model is known to be logits: [batch, tokens, vocabulary] of float32",
                fix=f"name the output `{_LOGITS}` where the model is exported, as float32",
            )
        self._logits, self._vocabulary = named[0].name, named[0].shape[-1]
        self._step_tokens = self._find_step_tokens()
        if self._makers and session.length_dimension is None and position is None:
            raise BundleError(
                "the position of the first token is needed if no state grows with the tokens",
                fix="after a reset, give `position=0`",
            )
        self._drop = drop
        self._position = session.length + session.dropped if position is None else position

    def _find_step_tokens(self) -> int:
        """Return the maximum number of tokens that a step takes."""
        size = (self._tokens.sizes or self._tokens.shape)[-1]
        if not isinstance(size, str):
            return int(size)
        if not is_name(size):
            raise BundleError(
                f"the number of tokens of a step is {size}, which is not a dimension", fix=_STEP_FIX
            )
        return next(entry.max for entry in self._session.dimensions if entry.name == size)

    def run(self, tokens: Sequence[int], most: int | None, stop: frozenset[int]) -> Iterator[int]:
        """Yield the tokens that follow `tokens`, at most `most`, up to a token in `stop`."""
        import numpy as np

        known = [int(token) for token in tokens]
        if not known:
            raise BundleError(
                "there are no tokens to begin with",
                fix="give at least one, such as that of a beginning",
            )
        for start in range(0, len(known), self._step_tokens):
            logits = self._step(known[start : start + self._step_tokens])
        dimension = self._session.length_dimension
        is_penalized = self._sampling.repetition_penalty not in (0.0, 1.0)
        count = 0
        while most is None or count < most:
            recent = np.array(known if is_penalized else [], np.int64)
            token = self._context.sample(logits, self._sampling, recent)
            yield token
            known.append(token)
            count += 1
            is_full = dimension and not self._drop and self._session.length >= dimension.max
            if token in stop or count == most or is_full:
                return
            logits = self._step([token])

    def _step(self, tokens: Sequence[int]) -> Array:
        """Run a step with some tokens, and return the logits after the last token."""
        import numpy as np

        session, dimension = self._session, self._session.length_dimension
        excess = session.length + len(tokens) - dimension.max if dimension else 0
        if self._drop and excess > 0:
            session.drop(min(max(self._drop, excess), session.length))
        length = session.length if dimension else self._position
        feed = {self._tokens.name: _fit(np.array(tokens), self._tokens)}
        for name, (spec, make) in self._makers.items():
            feed[name] = _fit(make(length, len(tokens)), spec)
        logits = session.run(feed)[self._logits].reshape(-1, self._vocabulary)[-1]
        self._position += len(tokens)
        return np.array(logits)


def _fit(values: Array, spec: TensorSpec) -> Array:
    """Return values in an input's dtype and rank, along its last axis."""
    return values.astype(dtype_of(spec.dtype)).reshape((1,) * (len(spec.shape) - 1) + (-1,))
