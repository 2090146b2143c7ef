"""The branches of `If`: those whose condition is known are inlined, all others are simplified like a model.

Values in branches get names that are unique in the whole model, and constants in them become
weights of the main graph, which has the parameters of the library.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import GraphProto, ModelProto, NodeProto, helper

from tvmflow.frontends.onnx._graph import (
    all_graphs,
    attributes_of,
    captured_names,
    is_if,
    known_values,
    list_branches,
    rename_captured,
    replace_nodes,
)

_Simplify = Callable[[ModelProto], ModelProto]


def name_branch_values(model: ModelProto) -> ModelProto:
    """Give each value in a branch a name that no other graph of the model has, and move constants to the main graph."""
    taken = {tensor.name for tensor in model.graph.initializer}
    taken.update(value.name for value in model.graph.input)
    taken.update(name for node in model.graph.node for name in node.output)
    for branch in list_branches(model.graph):
        _name_values(branch, taken)
        _move_constants(branch, model)
    return model


def _name_values(graph: GraphProto, taken: set[str]) -> None:
    names: dict[str, str] = {}
    made = [tensor.name for tensor in graph.initializer]
    made += [name for node in graph.node for name in node.output if name]
    for name in made:
        unique, count = name, 0
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        names[name] = unique
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename_captured(graph, names)
    for branch in list_branches(graph):
        _name_values(branch, taken)


def _move_constants(graph: GraphProto, model: ModelProto) -> None:
    model.graph.initializer.extend(graph.initializer)
    del graph.initializer[:]
    for branch in list_branches(graph):
        _move_constants(branch, model)


def inline_known_branches(model: ModelProto) -> ModelProto:
    """Replace each If with a constant condition by the branch that is taken."""
    known = known_values(model)
    kept: list[NodeProto] = []
    for node in model.graph.node:
        condition = known.constants.get(node.input[0]) if is_if(node) else None
        if condition is None or condition.size != 1:
            kept.append(node)
            continue
        branch = attributes_of(node)["then_branch" if condition.item() else "else_branch"]
        kept.extend(branch.node)
        for inner, outer in zip(branch.output, node.output, strict=True):
            if outer:
                kept.append(helper.make_node("Identity", [inner.name], [outer]))
    replace_nodes(model, kept)
    return model


def simplify_branches(model: ModelProto, simplify: _Simplify) -> ModelProto:
    """Simplify every branch of a model as a model of its own, whose inputs are the values that it captures.

    Args:
        model: The model; it is changed.
        simplify: The function that simplifies a model.
    """
    values = {value.name: value for value in (*model.graph.input, *model.graph.value_info)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    branches = list(list_branches(model.graph))
    for branch in branches:
        captured = sorted(_captured(branch))
        single = helper.make_model(
            branch, opset_imports=model.opset_import, ir_version=model.ir_version
        )
        for name in captured:
            if name in constants:
                single.graph.initializer.append(constants[name])
            else:
                value = values.get(name) or helper.make_empty_tensor_value_info(name)
                single.graph.input.append(value)
        simple = simplify(single).graph
        new = [tensor for tensor in simple.initializer if tensor.name not in constants]
        constants.update((tensor.name, tensor) for tensor in new)
        model.graph.initializer.extend(new)
        del simple.initializer[:], simple.input[:]
        branch.CopyFrom(simple)
    return name_branch_values(model) if branches else model


def list_inputs_of(model: ModelProto, condition: str) -> list[str]:
    """Return the inputs of a model on which a condition depends."""
    makers = {name: n for graph in all_graphs(model.graph) for n in graph.node for name in n.output}
    pending, seen = [condition], {condition}
    while pending:
        node = makers.get(pending.pop())
        read = {*node.input, *captured_names(node)} if node else set()
        pending += read - seen
        seen |= read
    return [value.name for value in model.graph.input if value.name in seen]


def _captured(graph: GraphProto) -> set[str]:
    """Return the names that a branch reads, or returns, and does not make."""
    read = {value.name for value in graph.output}
    for node in graph.node:
        read.update(name for name in node.input if name)
    for branch in list_branches(graph):
        read |= _captured(branch)
    return read.difference(*(node.output for node in graph.node))
