"""Reads MXNet's `symbol.json`, of any version, into nodes as MXNet 1.9 would see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import ImportFailed

# Operators whose auxiliary states were not written before MXNet 0.9: name -> inputs that follow the written ones
_UNWRITTEN_STATES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "BatchNorm": (3, ("moving_mean", "moving_var")),
    "BatchNorm_v1": (3, ("moving_mean", "moving_var")),
    "CuDNNBatchNorm": (3, ("moving_mean", "moving_var")),
}
# A file without a version is of 0.8 or before
_OLDEST: Final = 800


class Node(NamedTuple):
    """One node: a variable when `op` is `null`. `inputs` are (node, output) pairs."""

    op: str
    name: str
    attrs: dict[str, str]
    inputs: tuple[tuple[int, int], ...]


class Symbol(NamedTuple):
    """A graph in topological order, and the (node, output) pairs that it returns."""

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]


def read_symbol(path: Path) -> Symbol:
    """The graph in a symbol file, upgraded as MXNet does it. Raises ImportFailed for any other file."""
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
        version = _version(graph)
        nodes = [_node(raw) for raw in graph["nodes"]]
        heads = tuple(_entry(head) for head in graph["heads"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ImportFailed(
            f"{path.name} is not an MXNet symbol: {type(error).__name__}: {error}",
            fix="name the checkpoint by its prefix and epoch: PREFIX-symbol.json and PREFIX-0000.params",
        ) from None
    if not heads:
        raise ImportFailed(f"{path.name}: the symbol has no outputs")
    _check_order(nodes, heads, path)
    if version < 900:
        nodes, heads = _with_auxiliary_states(nodes, heads)
    if version < 905:
        nodes = [_without_flat_axis(node) for node in nodes]
    return Symbol(tuple(nodes), heads)


def _version(graph: dict[str, Any]) -> int:
    """10901 for MXNet 1.9.1."""
    return int(graph.get("attrs", {}).get("mxnet_version", ["int", _OLDEST])[1])


def _node(raw: dict[str, Any]) -> Node:
    # 0.8 kept the operator's attributes in `param` and the user's in `attr`; since then `attr`, later `attrs`, is all
    keys = ("param",) if "param" in raw else ("attr", "attrs")
    attrs: dict[str, str] = {}
    for key in keys:
        attrs.update(raw.get(key) or {})
    return Node(
        str(raw["op"]), str(raw["name"]), attrs, tuple(_entry(entry) for entry in raw["inputs"])
    )


def _entry(raw: list[int]) -> tuple[int, int]:
    # [node, output] in old files, [node, output, version] in newer ones
    return int(raw[0]), int(raw[1])


def _with_auxiliary_states(
    nodes: list[Node], heads: tuple[tuple[int, int], ...]
) -> tuple[list[Node], tuple[tuple[int, int], ...]]:
    """Variables for the states that old files leave out (MXNet: `UpgradeJSON_000800_000900`)."""
    upgraded: list[Node] = []
    moved: list[int] = []
    for node in nodes:
        inputs = [(moved[index], output) for index, output in node.inputs]
        written, states = _UNWRITTEN_STATES.get(node.op, (-1, ()))
        if len(inputs) == written:
            for state in states:
                inputs.append((len(upgraded), 0))
                upgraded.append(Node("null", f"{node.name}_{state}", {}, ()))
        moved.append(len(upgraded))
        upgraded.append(node._replace(inputs=tuple(inputs)))
    return upgraded, tuple((moved[index], output) for index, output in heads)


def _without_flat_axis(node: Node) -> Node:
    """Before 0.9.5 axis -1 of argmax and argmin meant all axes (MXNet: `UpgradeJSON_000904_000905`)."""
    if node.op in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        return node._replace(attrs={k: v for k, v in node.attrs.items() if k != "axis"})
    return node


def _check_order(nodes: Sequence[Node], heads: Sequence[tuple[int, int]], path: Path) -> None:
    for position, node in enumerate(nodes):
        if any(not 0 <= index < position for index, _ in node.inputs):
            raise ImportFailed(
                f"{path.name} is damaged: node {position} ({node.op} {node.name!r}) reads a node that does not precede it"
            )
    if any(not 0 <= index < len(nodes) for index, _ in heads):
        raise ImportFailed(f"{path.name} is damaged: an output is not a node of the graph")
