"""A part of a model: what lies between tensors that are given and tensors that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.errors import StageError
from tvmflow.passes._function import (
    Facts,
    is_straight,
    origin_of,
    outputs_of,
    shape_of,
    variables_of,
)
from tvmflow.values import TensorSpec

# of the tensors in a message
_SHOWN: Final = 3


class Signature(NamedTuple):
    """What an imported model takes and gives, in the order of `main`; `tensors` follow the outputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]


class Part(NamedTuple):
    """A module with one function `main`, and what that takes before its weights and gives."""

    mod: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def cut_out(
    mod: tvm.IRModule, signature: Signature, given: Sequence[str], until: Sequence[str]
) -> Part:
    """The part that computes `until` from the model's inputs and what is `given`; without `until` the rest of its outputs.

    Raises StageError when a name is none of the model's tensors, when the part would compute
    again what parts before it have computed, or when there is nothing for it to do.
    """
    if not is_straight(mod) or not _is_simple(mod["main"]):
        raise StageError(
            "a model with control flow cannot be cut", fix="build it for one target, without parts"
        )
    graph = _Graph(mod["main"], signature)
    wanted = list(until) or [spec.name for spec in signature.outputs if spec.name not in given]
    if not wanted:
        raise StageError(
            "the last part has nothing to do: those before it give all of the model's outputs",
            fix="cut the model earlier, or leave the last part out",
        )
    for name in given:
        graph.give(name)
    return graph.part(wanted, mod)


def _is_simple(main: relax.Function) -> bool:
    return all(isinstance(each, relax.VarBinding) for each in main.body.blocks[0].bindings)


class _Graph:
    """The bindings of a model's `main`, and what its inputs, outputs and tensors are called."""

    def __init__(self, main: relax.Function, signature: Signature) -> None:
        self._main = main
        self._facts = Facts(main)
        self._count = int(main.attrs["num_input"])
        self._specs = {spec.name: spec for part in signature for spec in part}
        named = (*signature.outputs, *signature.tensors)
        ends = zip(named, outputs_of(main), strict=True)
        self._vars = {spec.name: var for spec, var in ends}
        takes = zip(signature.inputs, main.params[: self._count], strict=True)
        self._inputs = {spec.name: var for spec, var in takes}
        self._given: dict[Any, str] = {}
        self._done: set[Any] = set()

    def give(self, name: str) -> None:
        """A part before this one computes a tensor, and all that it depends on."""
        var = self._vars[name]
        self._done |= self._before([var])
        self._given.setdefault(var, name)

    def part(self, wanted: Sequence[str], mod: tvm.IRModule) -> Part:
        """All that leads from what is given to what is wanted."""
        ends = [self._vars[name] for name in wanted]
        inside = self._before(ends)
        self._refuse_twice(inside)
        for name, var in zip(wanted, ends, strict=True):
            if var not in inside:
                raise StageError(
                    f"'{name}' is not computed by this part: it is an input of the model, or what a part before gives",
                    fix="cut at other tensors",
                )
        read = {self._origin(each) for var in inside for each in self._read_by(var)}
        inputs = [(name, var) for name, var in self._inputs.items() if var in read]
        inputs += [(name, var) for var, name in self._given.items() if var in read]
        weights = [var for var in self._main.params[self._count :] if var in read]
        made = tvm.IRModule(dict(mod.functions_items()), mod.attrs, mod.global_infos)
        made[mod.get_global_var("main")] = self._function(inside, inputs, weights, ends)
        passes = [
            relax.transform.CanonicalizeBindings(),
            relax.transform.DeadCodeElimination(["main"]),
        ]
        return Part(
            tvm.transform.Sequential(passes)(made),
            tuple(self._specs[name] for name, _ in inputs),
            tuple(self._specs[name] for name in wanted),
        )

    def _origin(self, var: Any) -> Any:
        return origin_of(var, self._facts.values.get)

    def _read_by(self, var: Any) -> list[Any]:
        return variables_of(self._facts.values[var])

    def _before(self, ends: Sequence[Any]) -> set[Any]:
        """The bound variables that these depend on, and they themselves, but for what is given and what is before that."""
        pending, found = list(ends), set()
        while pending:
            var = self._origin(pending.pop())
            if var not in found and var not in self._given and var in self._facts.values:
                found.add(var)
                pending += self._read_by(var)
        return found

    def _refuse_twice(self, inside: set[Any]) -> None:
        """Nothing but what can be computed when the library is built may stand in two parts."""
        again = {var for var in inside & self._done if not self._facts.is_weight(var)}
        if not again:
            return
        # those that this part would go on with
        ends = {
            self._origin(each)
            for var in inside - again
            for each in self._read_by(var)
            if self._origin(each) in again
        }
        shown = sorted(map(self._described, ends or again))
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise StageError(
            f"this part needs what a part before computes and does not give: {', '.join(shown[:_SHOWN])}{more}",
            fix="add these tensors to `until` of that part; netron.app shows what they are called",
        )

    def _described(self, var: Any) -> str:
        value = self._facts.values[var]
        operator = getattr(getattr(value, "op", None), "name", "a tuple").removeprefix("relax.")
        shape = shape_of(var)
        return f"the result of {operator}" + (f" of shape {list(shape)}" if shape else "")

    def _function(
        self,
        inside: set[Any],
        inputs: Sequence[tuple[str, Any]],
        weights: Sequence[Any],
        ends: Sequence[Any],
    ) -> relax.Function:
        """`main` of the part: the bindings inside as they stand, what it is given as arguments."""
        params, bindings = [], []
        for name, var in inputs:
            if var in self._given:
                params.append(relax.Var(name, var.ty))
                bindings.append(relax.VarBinding(var, params[-1]))
            else:
                params.append(var)
        known = {*inside, *self._given, *params, *weights}
        for binding in self._main.body.blocks[0].bindings:
            is_another_name = isinstance(binding.value, relax.Var)
            if binding.var in inside or (is_another_name and self._origin(binding.var) in known):
                bindings.append(binding)
        results = [relax.Var(f"out_{place}", var.ty) for place, var in enumerate(ends)]
        bindings += [relax.VarBinding(*each) for each in zip(results, ends, strict=True)]
        result = results[0] if len(results) == 1 else relax.Tuple(results)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        main = relax.Function([*params, *weights], body, result.ty, is_pure=True)
        return main.with_attrs({"num_input": len(params), "global_symbol": "main"})
