"""States: which inputs of a model take the place of which outputs in the next call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvmflow.core.dimensions import is_name
from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, names_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Dimension, Size, State, TensorSpec

ANY = "*"
"""The placeholder of the common text in the names of an input and its output."""

_FIX = "correct `state` in the recipe; `tvmflow inspect MODEL` lists inputs and outputs"


def pair_states(
    patterns: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    dimensions: Sequence[Dimension],
) -> tuple[State, ...]:
    """Return the states of a model, in the order of its inputs.

    Args:
        patterns: The name of an input to that of an output; `*` in both stands for the same text.
        inputs: Those of the model.
        outputs: Those of the model.
        dimensions: Those of the model.

    Raises:
        ImportFailed: A pattern fits no input, an output is missing, or the two do not fit each other.
    """
    known = {spec.name: spec for spec in outputs}
    states: dict[str, State] = {}
    for pattern, target in patterns.items():
        matches = [
            (spec, text) for spec in inputs if (text := _match(pattern, spec.name)) is not None
        ]
        if not matches:
            hint = did_you_mean(pattern, [spec.name for spec in inputs])
            raise ImportFailed(f"state: the model has no input {quoted(pattern)}{hint}", fix=_FIX)
        for spec, text in matches:
            name = target.replace(ANY, text)
            if name not in known:
                hint = did_you_mean(name, list(known))
                text = f"state: the model has no output {quoted(name)} for its input {quoted(spec.name)}{hint}"
                raise ImportFailed(text, fix=_FIX)
            if spec.name in states or name in {state.output for state in states.values()}:
                text = f"state: {quoted(spec.name)} or {quoted(name)} is in two pairs"
                raise ImportFailed(text, fix=_FIX)
            states[spec.name] = _pair(spec, known[name])
    ordered = tuple(states[spec.name] for spec in inputs if spec.name in states)
    _check_length(ordered, {spec.name: spec for spec in inputs}, dimensions)
    return ordered


def suggest_states(inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Return the patterns of inputs and outputs that exporters name alike; none if no name is known.

    >>> suggest_states(["x", "past_key_values.0.key"], ["y", "present.0.key"])
    {'past_key_values.*': 'present.*'}
    >>> suggest_states(["input", "state"], ["output", "stateN"])
    {'state': 'stateN'}
    """
    return dict(_suggest(inputs, outputs))


_KNOWN = (
    *(("past_key_values.*", "present.*"), ("past_key_values.*", "present_key_values.*")),
    *(
        ("past_key_values_*", "present_key_values_*"),
        ("past_*", "present_*"),
        ("past.*", "present.*"),
    ),
    *(("state", "stateN"), ("state", "new_state"), ("h", "hn"), ("c", "cn")),
    *(("h0", "hn"), ("c0", "cn"), ("h_0", "h_n"), ("c_0", "c_n"), ("*_in", "*_out")),
    *(("initial_h", "Y_h"), ("initial_c", "Y_c"), ("cache_*", "new_cache_*")),
)


def _suggest(inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    taken: set[str] = set()
    for pattern, target in _KNOWN:
        matches = {
            name: target.replace(ANY, text)
            for name in inputs
            if (text := _match(pattern, name)) is not None
        }
        names = {*matches, *matches.values()}
        if matches and taken.isdisjoint(names) and set(matches.values()) <= set(outputs):
            taken |= names
            yield pattern, target


def _match(pattern: str, name: str) -> str | None:
    """Return the text that `*` stands for in a name, empty without one; None for another name."""
    before, star, after = pattern.partition(ANY)
    if not star:
        return "" if name == pattern else None
    is_match = name.startswith(before) and name.endswith(after)
    return (
        name[len(before) : len(name) - len(after)]
        if is_match and len(name) > len(before + after)
        else None
    )


def _pair(before: TensorSpec, after: TensorSpec) -> State:
    """Return the state of an input and an output, which must be alike but for one axis."""
    names = f"state: {quoted(before.name)} and {quoted(after.name)}"
    old, new = _sizes(before), _sizes(after)
    if before.dtype != after.dtype or len(old) != len(new):
        text = f"{names} are {before.dtype} {_shape(old)} and {after.dtype} {_shape(new)}: no call can hand one to the next"
        raise ImportFailed(text, fix=_FIX)
    if after.bounded_axis is not None:
        raise ImportFailed(f"{names}: the size of {quoted(after.name)} depends on values", fix=_FIX)
    grown = [axis for axis, sizes in enumerate(zip(old, new, strict=True)) if sizes[0] != sizes[1]]
    if len(grown) > 1 or (grown and not is_name(old[grown[0]])):
        text = f"{names} are {_shape(old)} and {_shape(new)}, which differ in more than one dynamic size"
        raise ImportFailed(text, fix=_FIX)
    axis = grown[0] if grown else None
    fixed = [size for place, size in enumerate(old) if place != axis]
    if dynamic := [str(size) for size in fixed if isinstance(size, str)]:
        raise ImportFailed(
            f"{names}: a state has fixed sizes but for that along which it grows, and {names_text(dynamic)} can change",
            fix=f"write a number in place of `{dynamic[0]}` under `inputs` in the recipe",
        )
    return State(before.name, after.name, axis)


def _check_length(
    states: Sequence[State], inputs: Mapping[str, TensorSpec], dimensions: Sequence[Dimension]
) -> None:
    """Check that all growing states have one length, which begins with 0."""
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


def _sizes(spec: TensorSpec) -> tuple[Size, ...]:
    return spec.sizes or spec.shape


def _shape(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
