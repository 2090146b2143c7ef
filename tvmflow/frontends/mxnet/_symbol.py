"""Reads MXNet's `symbol.json` of any version into nodes, upgraded as MXNet 1.9 does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, last_line, quoted

# Operators with two auxiliary states after their three inputs, which files before MXNet 0.9 omit.
_WITH_STATES: Final = frozenset({"BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm"})
_MAX_NODES: Final = 100_000
_MAX_BYTES: Final = 32 << 20
# Files without a version are from MXNet 0.8 or before.
_OLDEST: Final = 800


class Node(NamedTuple):
    """One node: a variable when `op` is `null`. `inputs` are (node, output) pairs."""

    op: str
    name: str
    attrs: dict[str, str]
    inputs: tuple[tuple[int, int], ...]


class Symbol(NamedTuple):
    """A graph in topological order, and its outputs as (node, output) pairs."""

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]


def read_symbol(path: Path) -> Symbol:
    """Return the graph in a symbol file.

    Raises:
        ImportFailed: when it is not a symbol file, or damaged.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise not_a_symbol(path, f"it has {size:,} bytes, and the limit is {_MAX_BYTES:,}")
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
        version = _version(graph)
        nodes = [_node(raw) for raw in graph["nodes"]]
        heads = tuple(_entry(head) for head in graph["heads"])
    except RecursionError:
        raise not_a_symbol(path, "it is nested too deep") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_a_symbol(path, f"{type(error).__name__}: {last_line(error)}") from None
    if len(nodes) > _MAX_NODES:
        raise not_a_symbol(path, f"it has {len(nodes):,} nodes, and the limit is {_MAX_NODES:,}")
    if not heads:
        raise ImportFailed(f"{path.name}: the symbol has no outputs")
    _check_order(nodes, heads, path)
    if version < 900:
        nodes, heads = _with_auxiliary_states(nodes, heads)
    if version < 905:
        nodes = [_without_flat_axis(node) for node in nodes]
    return Symbol(tuple(nodes), heads)


def not_a_symbol(path: Path, reason: str) -> ImportFailed:
    """Return the error for a file that is not a symbol."""
    return ImportFailed(
        f"{path.name} is not an MXNet symbol: {reason}",
        fix="name the checkpoint by its prefix and epoch: PREFIX-symbol.json and PREFIX-0000.params",
    )


def _version(graph: dict[str, Any]) -> int:
    """Return the version of MXNet that wrote the graph; 10901 is 1.9.1."""
    return int(graph.get("attrs", {}).get("mxnet_version", ["int", _OLDEST])[1])


def _node(raw: dict[str, Any]) -> Node:
    # 0.8 has the attributes of the operator in `param` and those of the user in `attr`; later versions
    # have all in `attr`, and then in `attrs`.
    keys = ("param",) if "param" in raw else ("attr", "attrs")
    attrs: dict[str, str] = {}
    for key in keys:
        attrs.update({str(name): str(value) for name, value in (raw.get(key) or {}).items()})
    if not (isinstance(raw["op"], str) and isinstance(raw["name"], str)):
        raise TypeError("the operator or the name of a node is not a string")
    return Node(raw["op"], raw["name"], attrs, tuple(_entry(entry) for entry in raw["inputs"]))


def _entry(raw: list[int]) -> tuple[int, int]:
    # [node, output] in old files, [node, output, version] in newer ones.
    return int(raw[0]), int(raw[1])


def _with_auxiliary_states(
    nodes: list[Node], heads: tuple[tuple[int, int], ...]
) -> tuple[list[Node], tuple[tuple[int, int], ...]]:
    """Add variables for the states that old files omit (MXNet: `UpgradeJSON_000800_000900`)."""
    upgraded: list[Node] = []
    moved: list[int] = []
    for node in nodes:
        inputs = [(moved[index], output) for index, output in node.inputs]
        if node.op in _WITH_STATES and len(inputs) == 3:
            for state in ("moving_mean", "moving_var"):
                inputs.append((len(upgraded), 0))
                upgraded.append(Node("null", f"{node.name}_{state}", {}, ()))
        moved.append(len(upgraded))
        upgraded.append(node._replace(inputs=tuple(inputs)))
    return upgraded, tuple((moved[index], output) for index, output in heads)


def _without_flat_axis(node: Node) -> Node:
    """Remove axis -1 of argmax and argmin, which before 0.9.5 meant all axes (MXNet: `UpgradeJSON_000904_000905`)."""
    if node.op in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        return node._replace(attrs={k: v for k, v in node.attrs.items() if k != "axis"})
    return node


def _check_order(nodes: Sequence[Node], heads: Sequence[tuple[int, int]], path: Path) -> None:
    for position, node in enumerate(nodes):
        if any(not 0 <= index < position or output < 0 for index, output in node.inputs):
            raise ImportFailed(
                f"{path.name} is damaged: node {position} ({excerpt(node.op)} {quoted(node.name)}) reads a node that does not precede it"
            )
    if any(not 0 <= index < len(nodes) or output < 0 for index, output in heads):
        raise ImportFailed(f"{path.name} is damaged: an output is not a node of the graph")
