"""Tells which branches of a program's piecewise operators inputs take, by running it node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx

from tvmflow.frontends._frames import ObservedNode

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
    """Return the branches that inputs take.

    Args:
        module: The module of an exported program.
        values: Its flat inputs.
    """
    observer = _Observer(module)
    observer.run(*values, enable_io_processing=False)
    return observer.observed


class _Observer(torch.fx.Interpreter):  # type: ignore[misc]  # PyTorch may be missing
    """Runs a program, and records what goes into its piecewise operators."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.observed: list[ObservedNode] = []
        self._dependent: set[torch.fx.Node] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node."""
        if n.op == "placeholder" or not self._dependent.isdisjoint(n.all_input_nodes):
            self._dependent.add(n)
            if n.op == "call_function":
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                if branches := _find_branches(n, args, kwargs, self._dependent):
                    operator = _name(n)
                    self.observed.append(ObservedNode(n.name, operator, branches))
        return super().run_node(n)


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
