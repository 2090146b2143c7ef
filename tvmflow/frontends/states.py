"""States: inputs of a model that are outputs of the previous call."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn

from tvmflow.core.dimensions import is_name
from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, names_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import INT8_ROWS, Dimension, Size, State, TensorSpec

if TYPE_CHECKING:
    from tvmflow.frontends.base import LoadedModel
    from tvmflow.graph.states import GrowingState

COMPUTED: Final = "float32"
"""The dtype of states in a model that a library may store in another one."""

ANY = "*"
"""Placeholder for the common text in the names of an input and its output."""

_MAX_CONTENT_BYTES: Final = 1 << 16
"""Maximum bytes of nonzero initial values, which C libraries have in their source code."""

_FIX = "correct `state` in the recipe; `tvmflow inspect MODEL` lists inputs and outputs"


def pair_states(
    patterns: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    dimensions: Sequence[Dimension],
    dtypes: Mapping[str, str] = MappingProxyType({}),
) -> tuple[State, ...]:
    """Return the states of a model, in the order of its inputs.

    A pattern maps the name of an input to the name of an output; `*` stands for the same text in both. `dtypes` maps a
    pattern to the dtype in which a library stores its states; other states keep the dtype of the model.

    Raises:
        ImportFailed: If a pattern matches no input, an output is missing, or input and output are incompatible.
    """
    own, known = ({spec.name: spec for spec in specs} for specs in (inputs, outputs))
    states: dict[str, State] = {}
    for pattern, target in patterns.items():
        matches = _match(pattern, target, own)
        if not matches:
            hint = did_you_mean(pattern, list(own))
            raise ImportFailed(f"state: the model has no input {quoted(pattern)}{hint}", fix=_FIX)
        for name, output in matches.items():
            if output not in known:
                hint = did_you_mean(output, list(known))
                text = f"state: the model has no output {quoted(output)} for its input {quoted(name)}{hint}"
                raise ImportFailed(text, fix=_FIX)
            if name in states or output in {state.output for state in states.values()}:
                text = f"state: {quoted(name)} or {quoted(output)} is in two pairs"
                raise ImportFailed(text, fix=_FIX)
            state, dtype = _pair(own[name], known[output]), dtypes.get(pattern, "")
            if dtype:
                _check_dtype(state, own[name], dtype)
            states[name] = state._replace(stored_as=dtype)
    ordered = tuple(states[name] for name in own if name in states)
    _check_length(ordered, own, dimensions)
    return ordered


def suggest_states(inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Return patterns for states, recognized by exporters' naming conventions.

    >>> suggest_states(["x", "past_key_values.0.key"], ["y", "present.0.key"])
    {'past_key_values.*': 'present.*'}
    >>> suggest_states(["input", "state"], ["output", "stateN"])
    {'state': 'stateN'}
    """
    taken: set[str] = set()
    states = {}
    for pattern, target in zip(_KNOWN[::2], _KNOWN[1::2], strict=True):
        matches = _match(pattern, target, inputs)
        names = {*matches, *matches.values()}
        if matches and taken.isdisjoint(names) and set(matches.values()) <= set(outputs):
            taken |= names
            states[pattern] = target
    return states


# Naming conventions of exporters, as pairs of input and output.
_KNOWN = """
    past_key_values.* present.*  past_key_values.* present_key_values.*  past_key_values_* present_key_values_*
    past_* present_*  past.* present.*  state stateN  state new_state  h hn  c cn  h0 hn  c0 cn  h_0 h_n  c_0 c_n
    *_in *_out  initial_h Y_h  initial_c Y_c  cache_* new_cache_*""".split()


def encode_content(name: str, content: bytes) -> str:
    """Encode the initial content of a state for `State.initial`: base64, or empty for zeros.

    Raises:
        ValueError: If the content is too long.
    """
    if content.count(0) == len(content):
        return ""
    if len(content) > _MAX_CONTENT_BYTES:
        text = f"{quoted(name)} has {len(content):,} bytes of initial values that are not all 0, and the limit is {_MAX_CONTENT_BYTES:,}"
        raise ValueError(text)
    return base64.b64encode(content).decode()


def _match(pattern: str, target: str, names: Iterable[str]) -> dict[str, str]:
    """Return matching name -> `target` with the matched text in place of `*`."""
    before, star, after = map(re.escape, pattern.partition(ANY))
    fits = re.compile(f"{before}(.+){after}" if star else f"{before}()", re.DOTALL)
    matches = {name: match[1] for name in names if (match := fits.fullmatch(name))}
    return {name: target.replace(ANY, text) for name, text in matches.items()}


def _pair(before: TensorSpec, after: TensorSpec) -> State:
    """Return the state of an input and an output, whose shapes may differ in one axis."""
    names = f"state: {quoted(before.name)} and {quoted(after.name)}"
    old, new = (spec.sizes or spec.shape for spec in (before, after))
    if before.dtype != after.dtype or len(old) != len(new):
        text = f"{names} are {before.dtype} {_shape(old)} and {after.dtype} {_shape(new)}: the output of a call cannot be the input of the next"
        raise ImportFailed(text, fix=_FIX)
    if after.bounded_axis is not None:
        raise ImportFailed(f"{names}: the size of {quoted(after.name)} depends on values", fix=_FIX)
    grown = [axis for axis, sizes in enumerate(zip(old, new, strict=True)) if sizes[0] != sizes[1]]
    if len(grown) > 1 or (grown and not is_name(old[grown[0]])):
        text = f"{names} are {_shape(old)} and {_shape(new)}, which differ in more than one dynamic size"
        raise ImportFailed(text, fix=_FIX)
    axis = grown[0] if grown else None
    fixed = [size for n, size in enumerate(old) if n != axis]
    if dynamic := [str(size) for size in fixed if isinstance(size, str)]:
        raise ImportFailed(
            f"{names}: a state has fixed sizes but for that along which it grows, and {names_text(dynamic)} can change",
            fix=f"write a number in place of `{dynamic[0]}` under `inputs` in the recipe",
        )
    return State(before.name, after.name, axis)


def _check_dtype(state: State, own: TensorSpec, dtype: str) -> None:
    """Check that a library can store a state in a dtype that differs from the model's."""
    if state.axis is None:
        reason = f"each step replaces it by {quoted(state.output)}, and errors would add up"
    elif dtype == INT8_ROWS and state.axis == len(own.shape) - 1:
        reason = "it grows along its last axis, which must be the values of one key, with one scale"
    elif own.dtype != COMPUTED:
        reason = f"it is {own.dtype}, and only {COMPUTED} states can be stored as {dtype}"
    else:
        return
    _refuse_dtype(state.input, dtype, reason)


def _refuse_dtype(name: str, dtype: str, reason: str) -> NoReturn:
    raise ImportFailed(
        f"state: {quoted(name)} cannot be stored as {dtype}: {reason}",
        fix=f"leave `dtype: {dtype}` out under `state` in the recipe",
    )


def list_growing(
    states: Iterable[State], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> list[GrowingState]:
    """Return the growing states, by the indices of their tensors."""
    from tvmflow.graph.states import GrowingState

    before, after = ([spec.name for spec in specs] for specs in (inputs, outputs))
    return [
        GrowingState(before.index(state.input), after.index(state.output), state.axis)
        for state in states
        if state.axis is not None
    ]


def store_states(loaded: LoadedModel, states: Sequence[State]) -> LoadedModel:
    """Return a model that takes and returns states in the dtypes in which a library stores them.

    Raises:
        ImportFailed: The model does not append to such a state.
    """
    for dtype in sorted({state.stored_as for state in states} - {""}):
        loaded = _store(loaded, [state for state in states if state.stored_as == dtype], dtype)
    return loaded


def _store(loaded: LoadedModel, stored: Sequence[State], dtype: str) -> LoadedModel:
    from tvmflow.graph import states as graph

    growing = list_growing(stored, loaded.inputs, loaded.outputs)
    try:
        mod, nodes = graph.store_states(loaded.mod, loaded.nodes, growing, dtype)
    except graph.NotStorable as error:
        _refuse_dtype(loaded.inputs[error.input].name, dtype, error.reason)
    names = {name for state in stored for name in (state.input, state.output)}
    inputs, outputs = (
        tuple(spec.stored_as(dtype) if spec.name in names else spec for spec in specs)
        for specs in (loaded.inputs, loaded.outputs)
    )
    return loaded._replace(mod=mod, nodes=nodes, inputs=inputs, outputs=outputs)


def _check_length(
    states: Sequence[State], inputs: Mapping[str, TensorSpec], dimensions: Sequence[Dimension]
) -> None:
    """Check that all growing states share one length dimension, and that its minimum is 0."""
    lengths = {
        str(inputs[state.input].sizes[state.axis]): state.input
        for state in states
        if state.axis is not None
    }
    if len(lengths) > 1:
        text = f"state: the growing states have several lengths, {names_text(sorted(lengths))}"
        raise ImportFailed(text, fix="write one name for all of them in the shapes of `inputs`")
    for entry in dimensions:
        if entry.name in lengths and entry.min:
            raise ImportFailed(
                f"state: {quoted(lengths[entry.name])} is empty at first, and {excerpt(entry.name)} is at least {entry.min}",
                fix=f"write `{entry.name}: {{min: 0, max: {entry.max}}}` under `dimensions`",
            )


def _shape(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
