"""Extraction of the part of a model between some input and output tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text
from tvmflow.core.types import TensorSpec
from tvmflow.graph import ir

_log = logging.getLogger(__name__)

_MAX_SHOWN: Final = 3
"""The number of tensors that a message lists."""


class Signature(NamedTuple):
    """Inputs and outputs of an imported model, in order; `tensors` are results that follow the outputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]


class Part(NamedTuple):
    """A module with one function `main`, its inputs (before its weights) and its outputs."""

    mod: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def extract_part(
    mod: tvm.IRModule, signature: Signature, earlier: Sequence[str], until: Sequence[str]
) -> Part:
    """Extract the part of a model that computes the tensors `until` from tensors of earlier parts.

    If `until` is empty, the part computes the remaining outputs of the model.

    Raises:
        StageError: The model has control flow, or the part would recompute tensors of earlier parts, or compute nothing.
    """
    bindings = ir.list_bindings(mod["main"].body)
    has_only_variables = all(isinstance(binding, relax.VarBinding) for binding in bindings)
    if not ir.is_straight_line(mod) or not has_only_variables:
        raise StageError(
            "a model with control flow cannot be partitioned",
            fix="build it for one target, without parts",
        )
    results = list(until) or [spec.name for spec in signature.outputs if spec.name not in earlier]
    if not results:
        raise StageError(
            "the last part has nothing to do: earlier parts compute all outputs of the model",
            fix="end the part before it at earlier tensors, or remove the last part",
        )
    return _Graph(mod["main"], signature, earlier).extract(results, mod)


class _Graph:
    """The bindings of a model's `main`, and the names of its inputs, outputs and tensors."""

    def __init__(self, main: relax.Function, signature: Signature, earlier: Sequence[str]) -> None:
        self._main = main
        self._flow = ir.DataFlow(main)
        self._count = int(main.attrs["num_input"])
        self._specs = {spec.name: spec for specs in signature for spec in specs}
        named = (spec.name for spec in (*signature.outputs, *signature.tensors))
        self._vars = dict(zip(named, ir.list_outputs(main), strict=True))
        inputs = (spec.name for spec in signature.inputs)
        self._inputs = dict(zip(inputs, main.params[: self._count], strict=True))
        self._earlier: dict[Any, str] = {}
        self._computed = self._find_dependencies([self._vars[name] for name in earlier])
        for name in earlier:
            self._earlier.setdefault(self._vars[name], name)

    def extract(self, names: Sequence[str], mod: tvm.IRModule) -> Part:
        """Extract the part that computes some tensors from the inputs and the tensors of earlier parts."""
        results = [self._vars[name] for name in names]
        inside = self._find_dependencies(results)
        self._check_not_repeated(inside)
        for name, var in zip(names, results, strict=True):
            if var not in inside:
                raise StageError(
                    f"'{name}' is not computed by this part: it is an input of the model, or computed by an earlier part",
                    fix="end the part at other tensors",
                )
        read = self._list_sources(inside)
        inputs = [(name, var) for name, var in self._inputs.items() if var in read]
        inputs += [(name, var) for var, name in self._earlier.items() if var in read]
        weights = [var for var in self._main.params[self._count :] if var in read]
        input_specs = tuple(self._specs[name] for name, _ in inputs)
        _log.debug("the part has %d bindings and reads %s", len(inside), input_specs)
        part = ir.copy_module(mod)
        part[mod.get_global_var("main")] = self._make_main(inside, inputs, weights, results)
        part = relax.transform.CanonicalizeBindings()(part)
        part = relax.transform.DeadCodeElimination(["main"])(part)
        return Part(part, input_specs, tuple(self._specs[name] for name in names))

    def _list_sources(self, bound: Iterable[Any]) -> set[Any]:
        values = [self._flow.values[var] for var in bound]
        return {self._flow.resolve(var) for value in values for var in ir.list_variables(value)}

    def _find_dependencies(self, results: Sequence[Any]) -> set[Any]:
        """Return the bound variables that some results depend on, without tensors of earlier parts."""
        pending, dependencies = list(results), set()
        while pending:
            var = self._flow.resolve(pending.pop())
            if var not in dependencies and var not in self._earlier and var in self._flow.values:
                dependencies.add(var)
                pending += self._list_sources([var])
        return dependencies

    def _check_not_repeated(self, inside: set[Any]) -> None:
        """Raise StageError if this part recomputes tensors of earlier parts; weights may be recomputed."""
        repeated = {var for var in inside & self._computed if not self._flow.is_weight(var)}
        if not repeated:
            return
        missing = self._list_sources(inside - repeated) & repeated
        tensors = sorted(map(self._describe, missing or repeated))
        hidden = len(tensors) - _MAX_SHOWN
        more = f" and {count_text(hidden, 'other tensor')}" if hidden > 0 else ""
        raise StageError(
            f"this part reads tensors that an earlier part computes but does not output: {', '.join(tensors[:_MAX_SHOWN])}{more}",
            fix="add these tensors to `until` of that part; netron.app shows their names",
        )

    def _describe(self, var: Any) -> str:
        operator = ir.operator_name(self._flow.values[var]) or "a tuple"
        shape = ir.shape_of(var)
        described = f"the result of {operator.removeprefix('relax.')}"
        return described + (f" of shape {list(shape)}" if shape else "")

    def _make_main(
        self, inside: set[Any], inputs: Any, weights: Sequence[Any], results: Sequence[Any]
    ) -> relax.Function:
        """Return `main` of the part: its bindings, with tensors of earlier parts as parameters."""
        params, bindings = [], []
        for name, var in inputs:
            params.append(relax.Var(name, var.ty) if var in self._earlier else var)
            if var in self._earlier:
                bindings.append(relax.VarBinding(var, params[-1]))
        known = {*inside, *self._earlier, *params, *weights}
        for binding in self._main.body.blocks[0].bindings:
            is_alias = isinstance(binding.value, relax.Var)
            if binding.var in inside or (is_alias and self._flow.resolve(binding.var) in known):
                bindings.append(binding)
        outputs = [relax.Var(f"out_{index}", var.ty) for index, var in enumerate(results)]
        bindings += [relax.VarBinding(*pair) for pair in zip(outputs, results, strict=True)]
        result = outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        main = relax.Function([*params, *weights], body, result.ty, is_pure=True)
        return main.with_attrs({"num_input": len(params), "global_symbol": "main"})
