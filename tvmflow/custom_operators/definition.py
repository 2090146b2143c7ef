"""The API for operator files: the decorator `operator`, and the node that implementations receive."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tvmflow.core.version import page_url

Expr = Any
"""A Relax expression (TVM ships no types)."""

Implementation = Callable[..., Any]
"""Takes a `Node` and an expression for each input; returns an expression for each output."""

ReferenceFunction = Callable[..., Any]
"""Takes a `Node` and an array for each input; returns an array for each output."""

ADVICE: Final = f"see {page_url('custom-operators')}"
"""The advice in messages: a link to the documentation."""


def standard_domain(domain: str) -> str:
    """Return a domain as models write it: the empty domain for `ai.onnx`."""
    return "" if domain == "ai.onnx" else domain


class Tensor(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return `float32 [1, 3]`."""
        return f"{self.dtype} {list(self.shape)}"


class OperatorError(ValueError):
    """An operator is inconsistent, or contradicts its node."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a model that calls an operator.

    Attributes:
        operator: The name of the operator.
        version: The opset version of the operator's domain in the model.
        attributes: The node's attributes: numbers, strings, lists of them, arrays for tensors.
        inputs: Shape and dtype of each input; None for an omitted optional input.
        outputs: The number of outputs.
    """

    operator: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor | None, ...]
    outputs: int
    _builder: Any = field(default=None, repr=False, compare=False)
    _sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def te(
        self,
        compute: Callable[..., Any],
        *tensors: Expr,
        schedule: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the result of a tensor expression.

        Args:
            compute: Takes a `te.Tensor` for each tensor, and returns one `te.Tensor` or a list of them.
            *tensors: The inputs.
            schedule: Transforms the function `main` of the given `s_tir.Schedule`. Without it, tvmflow's rules
                schedule the kernel, which may be fused and tuned.
        """
        from tvm.relax.utils import gen_call_tir_inputs

        function = gen_call_tir_inputs(compute, *tensors)[0]
        return self.tir(function, *tensors, schedule=schedule, is_scheduled=False)

    def tir(
        self,
        function: Any,
        *tensors: Expr,
        schedule: Callable[[Any], Any] | None = None,
        is_scheduled: bool = True,
    ) -> Any:
        """Return the result of a TIR function.

        Args:
            function: A `T.prim_func`. Its parameters are buffers with fixed shapes: a buffer for each
                tensor, then one for each result.
            *tensors: The inputs.
            schedule: As for `te`.
            is_scheduled: True keeps the loops unchanged; False lets tvmflow's rules schedule the blocks.
        """
        buffers = [Tensor(*_spec_of_type(buffer.ty)) for buffer in function.params]
        count = len(tensors)
        for index, (buffer, spec) in enumerate(zip(buffers, map(_spec_of, tensors), strict=False)):
            if buffer != spec:
                raise OperatorError(
                    f"parameter {index} of its kernel is {buffer}, and the tensor is {spec}"
                )
        if len(buffers) <= count:
            raise OperatorError(
                f"its kernel has {len(buffers)} parameters for {count} tensors, and none for a result"
            )
        function = _with_root_block(function)
        if schedule is not None:
            from tvm import s_tir

            scheduled = s_tir.Schedule(function)
            schedule(scheduled)
            function, is_scheduled = scheduled.mod["main"], True
        if is_scheduled:
            # TVM's kOpaque: scheduled kernels are not fused.
            function = function.with_attrs({"tirx.is_scheduled": True, "op_pattern": 8})
        # The module chooses a unique symbol.
        return self._call(function.without_attr("global_symbol"), tensors, buffers[count:])

    def c(
        self,
        source: str,
        function: str,
        *tensors: Expr,
        outputs: Sequence[Tensor],
        arguments: Sequence[float] = (),
        tasks: int = 1,
    ) -> Any:
        """Return the result of a C11 function.

        The function returns void. Its parameters are a pointer for each tensor and each output, to dense memory with an
        alignment of 64 bytes; then, with several tasks, the task index as `int64_t`; then `arguments`. Several threads
        may call it, so it must not write to static variables.

        Args:
            source: A C file that `operators` in the recipe lists, or C code.
            function: The name of the function.
            *tensors: The inputs.
            outputs: Shape and dtype of each result.
            arguments: Numbers for the function: integers as `int64_t`, others as `double`.
            tasks: Number of parallel calls; each call computes its share of the outputs.
        """
        from tvmflow.graph.c_calls import KernelSource, c_kernel

        code = KernelSource(f"{self.operator}.c", source)
        if source.endswith(".c"):
            if source not in self._sources:
                listed = ", ".join(self._sources) or "no file of C"
                raise OperatorError(
                    f"'{source}' is not in `operators` of the recipe (there is {listed})"
                )
            code = KernelSource(source, self._sources[source])
        results = [Tensor(tuple(shape), dtype) for shape, dtype in outputs]
        specs = [_spec_of(tensor) for tensor in tensors]
        kernel = c_kernel(code, function, specs, results, arguments, tasks)
        return self.tir(kernel, *tensors)

    def _call(self, function: Any, tensors: Sequence[Expr], results: Sequence[Tensor]) -> Any:
        from tvm import relax

        if self._builder is None:
            raise OperatorError("its reference emits kernels, and has to compute with numpy")
        name = re.sub(r"\W+|(?<=[a-z0-9])(?=[A-Z])", "_", self.operator).lower()
        callee = self._builder.add_func(function, name)
        arguments = [self._builder.emit(tensor) for tensor in tensors]
        types = [relax.TensorType(spec.shape, spec.dtype) for spec in results]
        result = self._builder.emit(
            relax.call_tir(callee, arguments, types if len(types) > 1 else types[0])
        )
        if len(types) == 1:
            return result
        return [self._builder.emit(relax.TupleGetItem(result, i)) for i in range(len(types))]


def _with_root_block(function: Any) -> Any:
    from tvm import s_tir, tirx

    if isinstance(function.body, s_tir.SBlockRealize):
        return function
    block = s_tir.SBlock([], [], [], "root", function.body)
    return function.with_body(s_tir.SBlockRealize([], tirx.const(1, "bool"), block))


def _spec_of(tensor: Expr) -> Tensor:
    kind = getattr(tensor, "ty", None)
    if kind is None or not hasattr(kind, "dtype"):
        raise OperatorError(
            f"'{tensor}' is not a tensor; bind it first, or pass an input of the node"
        )
    return Tensor(*_spec_of_type(kind))


def _spec_of_type(kind: Any) -> tuple[tuple[int, ...], str]:
    dtype = getattr(kind.dtype, "dtype", kind.dtype)
    try:
        return tuple(int(extent) for extent in kind.shape), str(dtype)
    except TypeError:
        raise OperatorError("a shape is not fixed") from None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that was registered (see `operator`) at `where`, a `file:line`."""

    name: str
    domain: str
    since_version: int
    implement: Implementation
    reference: ReferenceFunction | None
    where: str

    def __str__(self) -> str:
        """Return `NAME (DOMAIN)`."""
        return f"{self.name} ({self.domain})" if self.domain else self.name


REGISTERED: Final[list[Operator]] = []
"""The operators registered by files in this process, in order."""


def operator(
    name: str, *, domain: str, since_version: int = 1, reference: ReferenceFunction | None = None
) -> Callable[[Implementation], Implementation]:
    """Return a decorator that registers the implementation of an operator.

    Args:
        name: The name of the operator in models.
        domain: The operator's domain: "" for standard ONNX operators, "mxnet" for MXNet's `Custom`.
        since_version: The first opset version of the domain that the implementation supports.
        reference: Takes the node and an array for each input, and returns an array for each output.
            `verify` uses it if the model's framework does not have the operator.
    """
    for text, what in ((name, "name"), (domain, "domain")):
        if not isinstance(text, str):
            raise OperatorError(f"the {what} of an operator is a string, not {text!r}")
    if not name:
        raise OperatorError("an operator needs a name")
    domain = standard_domain(domain)
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def register(implement: Implementation) -> Implementation:
        entry = Operator(
            name=name,
            domain=domain,
            since_version=since_version,
            implement=implement,
            reference=reference,
            where=where,
        )
        for other in REGISTERED:
            if (other.name, other.domain, other.since_version) == (name, domain, since_version):
                text = f"the operator {entry} is registered already, at {other.where}"
                raise OperatorError(text)
        REGISTERED.append(entry)
        return implement

    return register
