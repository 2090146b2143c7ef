"""The arena of a C library: tensors that live at the same time never share memory."""

from __future__ import annotations

import itertools
import random

import pytest

from tvmflow.compiler.c_program.program import (
    Branch,
    KernelCall,
    Program,
    Step,
    Storage,
    plan_memory,
)


def chain(sizes: list[int]) -> tuple[Program, list[Storage]]:
    """A kernel for each tensor, which reads the one before."""
    tensors = [Storage("arena", size) for size in sizes]
    steps = [
        KernelCall("kernel", (source, target), 1) for source, target in itertools.pairwise(tensors)
    ]
    return Program(tuple(steps)), tensors


def test_a_chain_takes_the_two_largest_neighbours() -> None:
    """Equal tensors alternate between two places."""
    program, tensors = chain([100] * 7)
    plan_memory(program)
    assert program.arena == 256
    assert {tensor.offset for tensor in tensors} == {0, 128}


def test_branches_share_their_memory() -> None:
    """Only one of them runs; what both read stays, and the condition makes room for the result."""
    whole, result = Storage("arena", 64), Storage("arena", 64)
    inner = [Storage("arena", 640), Storage("arena", 640)]
    condition = Storage("arena", 1)
    sides = [
        (KernelCall("first", (whole, tensor), 1), KernelCall("second", (tensor, result), 1))
        for tensor in inner
    ]
    steps = (
        KernelCall("start", (whole, condition), 0),
        Branch(condition, *sides),
        KernelCall("end", (result, whole), 1),
    )
    program = Program(steps)
    plan_memory(program)
    assert inner[0].offset == inner[1].offset
    assert program.arena == 640 + 64 + 64


@pytest.mark.parametrize("seed", range(30))
def test_no_two_that_live_at_the_same_time_overlap(seed: int) -> None:
    """Random graphs; and what replaces a tensor is planned in its place."""
    draw = random.Random(seed)
    tensors = [Storage("arena", draw.choice([1, 4, 64, 65, 1000, 7777])) for _ in range(40)]
    tensors[7].replacement = Storage("output", tensors[7].bytes)
    steps: list[Step] = []
    for index in range(1, len(tensors)):
        sources = draw.sample(tensors[:index], min(index, draw.randint(1, 3)))
        steps.append(KernelCall("kernel", (*sources, tensors[index]), len(sources)))
    program = Program(tuple(steps))
    plan_memory(program)
    uses = {
        id(tensor): [
            number
            for number, step in enumerate(steps)
            if isinstance(step, KernelCall) and tensor in step.tensors
        ]
        for tensor in tensors
    }
    planned = [tensor for tensor in tensors if tensor.resolve().scope == "arena"]
    assert all(tensor.offset % 64 == 0 for tensor in planned)
    assert max(tensor.offset + tensor.bytes for tensor in planned) <= program.arena
    for one in planned:
        for other in planned:
            alive = max(uses[id(one)][0], uses[id(other)][0]) <= min(
                uses[id(one)][-1], uses[id(other)][-1]
            )
            if one is not other and alive:
                assert (
                    one.offset + one.bytes <= other.offset
                    or other.offset + other.bytes <= one.offset
                )
