"""Generates tokens with a language model, whose inputs are tokens, positions and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from tvmflow.core.dimensions import is_name
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Dimension, TensorSpec
from tvmflow.runtime.arrays import dtype_of
from tvmflow.runtime.c_loader import Sampling, StepContext


class Steps(Protocol):
    """The interface of a session that generation needs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: tuple[Dimension, ...]
    length_dimension: Dimension | None

    @property
    def length(self) -> int:
        """The length of the growing states."""

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        """Compute the next step."""


_FIX: Final = "call `session.run` with these inputs, token by token"
_LOGITS: Final = "logits"


class Generation:
    """Generation with a session, whose inputs must be tokens, and positions and masks of them.

    Raises:
        BundleError: The model has other inputs, or its logits are not found.
    """

    def __init__(self, session: Steps, context: StepContext, sampling: Sampling) -> None:
        self._session, self._context, self._sampling = session, context, sampling
        makers: Mapping[str, Callable[[int, int], Array]] = {
            "mask": lambda length, count: self._ones(length + count),
            "position": self._positions,
        }
        self._makers: dict[str, tuple[TensorSpec, Callable[[int, int], Array]]] = {}
        others = []
        for spec in session.inputs:
            maker = next((make for word, make in makers.items() if word in spec.name.lower()), None)
            if maker is None:
                others.append(spec)
            else:
                self._makers[spec.name] = spec, maker
        tokens = [
            spec
            for spec in others
            if spec.dtype in ("int32", "int64") and len(spec.shape) in (1, 2)
        ]
        if len(tokens) != 1 or len(others) != 1:
            names = ", ".join(spec.name for spec in others) or "none"
            raise BundleError(
                f"of the inputs of the model, one must be tokens, and others masks or positions: {names}",
                fix=_FIX,
            )
        [self._tokens] = tokens
        named = [spec for spec in session.outputs if spec.name == _LOGITS] or list(session.outputs)
        if len(named) != 1 or named[0].dtype != "float32" or len(named[0].shape) < 2:
            raise BundleError(
                "none of the outputs of the model is known to be logits: [batch, tokens, vocabulary] of float32",
                fix=f"name the output `{_LOGITS}` where the model is exported, as float32",
            )
        self._logits, self._vocabulary = named[0].name, named[0].shape[-1]
        self._most = self._count_at_once()

    def _count_at_once(self) -> int:
        """Return how many tokens a step takes at most."""
        size = (self._tokens.sizes or self._tokens.shape)[-1]
        if not isinstance(size, str):
            return int(size)
        if not is_name(size):
            raise BundleError(
                f"the number of tokens of a step is {size}, which is not a dimension", fix=_FIX
            )
        return next(entry.max for entry in self._session.dimensions if entry.name == size)

    def _ones(self, count: int) -> Array:
        import numpy as np

        return np.ones(count, np.int64)

    def _positions(self, length: int, count: int) -> Array:
        import numpy as np

        return np.arange(length, length + count)

    def run(self, tokens: Sequence[int], most: int | None, stop: frozenset[int]) -> Iterator[int]:
        """Yield the tokens that follow."""
        given = self._check(tokens)
        known = list(given)
        logits = self._prefill(given)
        count = 0
        while most is None or count < most:
            token = self._context.sample(logits, self._sampling, self._list_recent(known))
            yield token
            known.append(token)
            count += 1
            if token in stop or (most is not None and count >= most) or self._is_full():
                return
            logits = self._step([token])

    def _check(self, tokens: Sequence[int]) -> list[int]:
        given = [int(token) for token in tokens]
        if not given:
            raise BundleError(
                "there are no tokens to begin with",
                fix="give at least one, such as that of a beginning",
            )
        return given

    def _is_full(self) -> bool:
        """Return whether the states cannot take another token."""
        dimension = self._session.length_dimension
        return dimension is not None and self._session.length >= dimension.max

    def _list_recent(self, known: Sequence[int]) -> Array:
        import numpy as np

        is_penalized = self._sampling.repetition_penalty not in (0.0, 1.0)
        return np.array(known if is_penalized else [], np.int64)

    def _prefill(self, tokens: Sequence[int]) -> Array:
        """Return the logits after several tokens, in steps of as many as the model takes."""
        for start in range(0, len(tokens), self._most):
            logits = self._step(tokens[start : start + self._most])
        return logits

    def _step(self, tokens: Sequence[int]) -> Array:
        import numpy as np

        length, count = self._session.length, len(tokens)
        feed = {self._tokens.name: self._shaped(np.array(tokens), self._tokens)}
        for name, (spec, make) in self._makers.items():
            feed[name] = self._shaped(make(length, count), spec)
        return np.array(self._session.run(feed)[self._logits].reshape(-1, self._vocabulary)[-1])

    def _shaped(self, values: Array, spec: TensorSpec) -> Array:
        """Return values along the last axis of an input."""
        return values.astype(dtype_of(spec.dtype)).reshape((1,) * (len(spec.shape) - 1) + (-1,))
