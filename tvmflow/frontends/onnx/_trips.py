"""Counts the iterations of a Loop, as far as its condition is computed from constants and counters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from tvmflow.frontends.onnx._graph import KnownValues, attributes_of, is_standard
from tvmflow.frontends.onnx._large_tensors import array_of

# What computes counters and conditions; none of them makes much of little.
_OPERATORS: Final = frozenset(
    "Add And Cast Constant Div Equal Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul "
    "Neg Not Or Reshape Squeeze Sub Unsqueeze".split()
)
_MAX_COUNTER_ELEMENTS: Final = 1024

_Arrays = Mapping[str, np.ndarray[Any, Any]]
_Evaluator = Callable[[_Arrays], list[np.ndarray[Any, Any]]]


class Trips(NamedTuple):
    """The iterations of a loop.

    Attributes:
        most: How many there are at most.
        is_exact: Whether there are always so many.
    """

    most: int
    is_exact: bool


def count_trips(node: NodeProto, known: KnownValues, opset: int, limit: int) -> Trips | None:
    """Return how many iterations a Loop has; None where nothing that is known limits them.

    Args:
        node: The Loop.
        known: The constants of the model.
        opset: Its opset.
        limit: The number of iterations beyond which none are counted.
    """
    body = attributes_of(node)["body"]
    most, start = (known.constants.get(name) for name in node.input[:2])
    starts = not node.input[1] or (start is not None and bool(start.all()))
    if (most is not None and most.item() <= 0) or (start is not None and not starts):
        return Trips(0, is_exact=True)
    counters = _Counters(node, body, known)
    counts = [int(most.item())] if most is not None else []
    try:
        computed = counters.count(min([limit, *counts]), opset)
    except Exception:
        # The evaluator raises many kinds of errors for operands that do not fit.
        return None
    counts += [computed] if computed is not None else []
    return Trips(min(counts), is_exact=starts and counters.is_whole) if counts else None


class _Counters:
    """The states of a loop that are computed from constants alone, and what is known of its condition.

    Attributes:
        is_whole: Whether the whole condition is known, or else only some of what it combines by And.
    """

    def __init__(self, node: NodeProto, body: GraphProto, known: KnownValues) -> None:
        self._nodes = list(body.node)
        self._makers = {name: n for n in body.node for name in n.output if name}
        self._number, condition, *states = (value.name for value in body.input)
        last, *results = (value.name for value in body.output)
        self._constants = {n: a for n, a in known.constants.items() if n not in states}
        self._constants |= {tensor.name: array_of(tensor) for tensor in body.initializer}
        self._constants[condition] = np.asarray(True)
        initial = zip(states, node.input[2:], results, strict=False)
        self._initial = {s: known.constants[i] for s, i, _ in initial if i in known.constants}
        self._next = dict(zip(states, results, strict=False))
        while unknown := [s for s in self._initial if not self._is_known(self._next[s])]:
            for state in unknown:
                del self._initial[state]
        parts = list(self._conjuncts(last))
        self._parts = [part for part in parts if self._is_known(part)]
        self.is_whole = len(parts) == len(self._parts)

    def count(self, limit: int, opset: int) -> int | None:
        """Return after how many iterations, up to a limit, what is known of the condition is false; None for never."""
        if not self._parts:
            return None
        values = self._initial
        run = self._evaluator([*self._parts, *(self._next[state] for state in values)], opset)
        for step in range(limit):
            constants = {**self._constants, **values, self._number: np.asarray(step, np.int64)}
            results = run(constants)
            parts = results[: len(self._parts)]
            if not all(part.all() for part in parts):
                return step + 1
            values = dict(zip(values, results[len(parts) :], strict=True))
            if any(value.size > _MAX_COUNTER_ELEMENTS for value in values.values()):
                self.is_whole = False
                return None
        return None

    def _conjuncts(self, name: str) -> Iterator[str]:
        """Give the values of which a condition is the And."""
        node = self._makers.get(name)
        if node is not None and node.op_type in ("And", "Identity") and is_standard(node):
            for operand in node.input:
                yield from self._conjuncts(operand)
        else:
            yield name

    def _is_known(self, name: str) -> bool:
        """Return whether a value of the body is computed from constants, counters and the number of the iteration alone."""
        pending, seen = [name], {name}
        while pending:
            value = pending.pop()
            node = self._makers.get(value)
            if node is not None:
                if node.op_type not in _OPERATORS or not is_standard(node):
                    return False
                pending += [n for n in node.input if n and n not in seen]
                seen.update(node.input)
            elif value not in self._initial and value not in (*self._constants, self._number):
                return False
        return True

    def _evaluator(self, values: Sequence[str], opset: int) -> _Evaluator:
        """Return a function that computes values of the body from constants, counters and the number of the iteration."""
        needed, kept = set(values), []
        for node in reversed(self._nodes):
            if not needed.isdisjoint(node.output):
                kept.append(node)
                needed.update(name for name in node.input if name)
        # values that no node of the body computes need one to be outputs
        copies = [
            helper.make_node("Identity", [v], [f"{n} of trips"]) for n, v in enumerate(values)
        ]
        leaves = sorted(needed - self._makers.keys())
        model = helper.make_model(
            helper.make_graph(
                [*reversed(kept), *copies],
                "trips",
                [helper.make_empty_tensor_value_info(name) for name in leaves],
                [helper.make_empty_tensor_value_info(node.output[0]) for node in copies],
            ),
            opset_imports=[helper.make_opsetid("", opset)],
        )
        return _make_evaluator(model, leaves)


def _make_evaluator(model: ModelProto, inputs: Sequence[str]) -> _Evaluator:
    from onnx.reference import ReferenceEvaluator

    evaluator: Any = ReferenceEvaluator(model)

    def evaluate(values: _Arrays) -> list[np.ndarray[Any, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = evaluator.run(None, {name: values[name] for name in inputs})
        return [np.asarray(result) for result in results]

    return evaluate
