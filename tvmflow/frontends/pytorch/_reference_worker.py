"""The reference process of PyTorch archives: `python -m tvmflow.frontends.pytorch._reference_worker`.

It runs nothing else, and loads archives as the export does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.formatting import last_line
from tvmflow.frontends._reference_process import (
    Array,
    LoadedReference,
    Message,
    ObservedNode,
    serve,
)
from tvmflow.frontends.pytorch._archive import copy_for_pytorch, read_archive

if TYPE_CHECKING:
    import torch
    import torch.fx

# ---------------------------------------------------------------- loading
# The types of inputs and outputs may come from packages that are not installed, such as transformers:
# containers of the same form stand in for them.


class CannotLoad(Exception):
    """PyTorch cannot load an archive."""


def import_torch() -> Any:
    """Return the module `torch`, which then loads no pickled objects but tensors.

    Raises:
        ImportError: whatever went wrong.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    warnings.simplefilter("ignore")
    try:
        import torch
        import torch.export
    except Exception as error:
        # A missing system library is an OSError.
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return torch


def open_program(path: str, containers: Mapping[str, Sequence[str]], tensors: Sequence[str]) -> Any:
    """Return the `ExportedProgram` of a `.pt2` file, with a flat tuple of outputs and inner tensors.

    The containers of `Archive` need not be importable.

    Raises:
        CannotLoad: when PyTorch rejects it.
        KeyError: when it has no tensor of such a name; the argument is the name.
    """
    torch = import_torch()
    for name, fields in containers.items():
        _register_stand_in(name, fields)
    _leave_out_example_inputs()
    logged = _LoggedErrors()
    logging.getLogger("torch.export").addHandler(logged)
    try:
        program = torch.export.load(path)
    except Exception as error:
        cause = logged.error or error
        raise CannotLoad(f"{type(cause).__name__}: {last_line(cause)}") from error
    _return_tensors(program, tensors)
    return program


class _LoggedErrors(logging.Handler):
    """Keeps the last error that was logged: PyTorch logs the reason, and raises another error."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.error = record.exc_info[1]


def _register_stand_in(name: str, fields: Sequence[str]) -> None:
    """Register a container for a type that has not been imported: a named tuple if it has fields."""
    from torch.utils import _pytree as pytree

    if name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        return
    if fields:
        pytree._register_namedtuple(
            namedtuple("StandIn", fields, rename=True), serialized_type_name=name
        )
        return

    class StandIn:
        def __init__(self, children: Sequence[Any], context: Any) -> None:
            self.children, self.context = list(children), context

    def flatten_with_keys(value: StandIn) -> tuple[list[tuple[Any, Any]], Any]:
        keys = map(pytree.SequenceKey, range(len(value.children)))
        return list(zip(keys, value.children, strict=True)), value.context

    pytree.register_pytree_node(
        StandIn,
        lambda value: (value.children, value.context),
        StandIn,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=name,
        to_dumpable_context=json.dumps,
        from_dumpable_context=json.loads,
    )


def _leave_out_example_inputs() -> None:
    """Let PyTorch load an archive without its example inputs, where these are not tensors alone.

    They are pickled with the classes that they had, and nothing here needs them.
    """
    from torch._export.serde import serialize

    load: Callable[[Any], Any] = serialize.deserialize_torch_artifact

    def load_tensors(serialized: Any) -> Any:
        try:
            return load(serialized)
        except pickle.UnpicklingError:
            return None

    serialize.deserialize_torch_artifact = load_tensors


def _return_tensors(program: Any, tensors: Sequence[str]) -> None:
    """Change the outputs of a program to those that are tensors, and inner tensors, in a flat tuple."""
    from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
    from torch.utils import _pytree as pytree

    nodes = {node.name: node for node in program.graph.nodes}
    [output] = [node for node in nodes.values() if node.op == "output"]
    signature = program.graph_signature
    pairs = [
        (value, spec)
        for value, spec in zip(output.args[0], signature.output_specs, strict=True)
        if spec.kind != OutputKind.USER_OUTPUT or isinstance(spec.arg, TensorArgument)
    ]
    for name in tensors:
        argument = TensorArgument(name=nodes[name].name)
        pairs.append((nodes[name], OutputSpec(OutputKind.USER_OUTPUT, argument, None)))
    output.args = (tuple(value for value, _ in pairs),)
    signature.output_specs[:] = [spec for _, spec in pairs]
    count = sum(spec.kind == OutputKind.USER_OUTPUT for _, spec in pairs)
    flat = pytree.tree_flatten((0,) * count)[1]
    program.module_call_graph[0].signature.out_spec = flat


# ---------------------------------------------------------------- branches of piecewise operators


# Below the first and above the second number, operators compute something else than between them.
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(
        ("abs", "celu", "elu", "leaky_relu", "prelu", "_prelu_kernel", "relu", "selu"), (0.0, 0.0)
    ),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
    "relu6": (0.0, 6.0),
}
# The arguments that are their bounds.
_BOUND_ARGUMENTS: Final[Mapping[str, tuple[str, str]]] = {
    "clamp": ("min", "max"),
    "clamp_max": ("", "max"),
    "clamp_min": ("min", ""),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "threshold"),
}


def observe(module: torch.fx.GraphModule, values: Sequence[Any]) -> list[ObservedNode]:
    """Return the branches that the flat inputs of an exported program take, by running it node by node."""
    import torch.fx

    observed: list[ObservedNode] = []
    dependent: set[torch.fx.Node] = set()

    class Observer(torch.fx.Interpreter):  # type: ignore[misc]  # PyTorch may be missing
        def run_node(self, n: torch.fx.Node) -> Any:
            if n.op == "placeholder" or not dependent.isdisjoint(n.all_input_nodes):
                dependent.add(n)
                if n.op == "call_function":
                    args, kwargs = self.fetch_args_kwargs_from_env(n)
                    if branches := _find_branches(n, args, kwargs, dependent):
                        observed.append(ObservedNode(n.name, _name(n), branches))
            return super().run_node(n)

    Observer(module).run(*values, enable_io_processing=False)
    return observed


def _name(node: torch.fx.Node) -> str:
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).rstrip("_")


def _find_branches(
    node: torch.fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dependent: set[torch.fx.Node],
) -> dict[str, float]:
    """Return the share of elements that take each branch of a node; nothing for other operators."""
    import torch

    name = _name(node)
    if name in ("where", "cond") and node.args[0] in dependent:
        share = _share(torch.as_tensor(args[0]).bool())
        return {"true": share, "false": 1 - share}
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return {}
    bounds = _find_bounds(name, node, args, kwargs)
    if bounds is None or node.args[0] not in dependent:
        return {}
    low, high = bounds
    below, above = _share(args[0] < low), _share(args[0] > high)
    if low == high == 0:
        return {"negative inputs": below, "positive inputs": above}
    branches = {f"inputs below {low:g}": below} if math.isfinite(low) else {}
    if low != high:
        branches["inputs between its bounds"] = 1 - below - above
    return branches | ({f"inputs above {high:g}": above} if math.isfinite(high) else {})


def _find_bounds(
    name: str, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, float] | None:
    import torch

    if name in _BOUNDS:
        return _BOUNDS[name]
    if name not in _BOUND_ARGUMENTS:
        return None
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    bounds = []
    for argument, missing in zip(_BOUND_ARGUMENTS[name], (-math.inf, math.inf), strict=True):
        value = given.get(argument)
        if isinstance(value, torch.Tensor):
            return None
        bounds.append(missing if value is None else float(value))
    return bounds[0], bounds[1]


def _share(condition: torch.Tensor) -> float:
    return float(condition.double().mean()) if condition.numel() else 0.0


# ---------------------------------------------------------------- the reference


class _Program(LoadedReference):
    """The program of an archive, run operator by operator as PyTorch does by default."""

    def __init__(self, torch: Any, first: Message) -> None:
        self.name, self.can_observe = f"PyTorch {torch.__version__}", True
        self._torch = torch
        torch.set_num_threads(first["threads"])
        archive = Path(first["archive"])
        copy = copy_for_pytorch(archive, Path(first["scratch"]))
        program = open_program(str(copy), read_archive(archive).containers, first["tensors"])
        self._module = program.module()
        self._spec = program.call_spec.in_spec
        self._arguments = [
            (spec.arg.name, getattr(spec.arg, "value", None))
            for spec in program.graph_signature.input_specs
            if spec.kind.name == "USER_INPUT"
        ]

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        outputs = self.prepare(arrays)()
        return [output.numpy() for output in outputs]

    def observe(self, arrays: Mapping[str, Array]) -> Sequence[ObservedNode]:
        with self._torch.inference_mode():
            return observe(self._module, self._list_values(arrays))

    def _list_values(self, arrays: Mapping[str, Array]) -> list[Any]:
        tensors = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        return [tensors.get(name, constant) for name, constant in self._arguments]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], Sequence[Any]]:
        from torch.utils import _pytree as pytree

        values = self._list_values(arrays)
        positional, by_name = pytree.tree_unflatten(values, self._spec)

        def infer() -> Sequence[Any]:
            with self._torch.inference_mode():
                outputs: Sequence[Any] = self._module(*positional, **by_name)
                return outputs

        return infer


if __name__ == "__main__":
    serve(lambda first: _Program(import_torch(), first))
