"""The arena: where tensors that live at different times share memory.

The plan is greedy by size: the largest tensor first, each at the lowest place where nothing lies that
lives at the same time (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference", 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tvmflow.compiler.c_library.kernels import padded
from tvmflow.compiler.c_library.program import Branch, Copy, KernelCall, Program, Step, Storage


class _Lifetime(NamedTuple):
    storage: Storage
    first: int
    last: int


def plan_memory(program: Program) -> None:
    """Give each tensor in the arena its offset, and the arena its size."""
    lifetimes = _find_lifetimes(program.steps)
    placed: list[_Lifetime] = []
    for lifetime in sorted(lifetimes, key=lambda entry: (-entry.storage.bytes, entry.first)):
        others = sorted(
            (other.storage.offset, other.storage.offset + padded(other.storage.bytes))
            for other in placed
            if other.first <= lifetime.last and lifetime.first <= other.last
        )
        lifetime.storage.offset = _find_gap(others, padded(lifetime.storage.bytes))
        placed.append(lifetime)
    program.arena = max(
        (entry.storage.offset + padded(entry.storage.bytes) for entry in placed), default=0
    )


def _find_gap(occupied: Sequence[tuple[int, int]], size: int) -> int:
    """Return the lowest offset at which `size` bytes are free, given ranges ordered by their begin."""
    offset = 0
    for begin, end in occupied:
        if offset + size <= begin:
            break
        offset = max(offset, end)
    return offset


def _find_lifetimes(steps: Sequence[Step]) -> list[_Lifetime]:
    """Return for each tensor in the arena the numbers of the first and the last step that touches it."""
    spans: dict[Storage, tuple[int, int]] = {}
    for number, touched in enumerate(_touched(steps)):
        for storage in touched:
            storage = storage.resolve()
            if storage.place == "arena":
                first, _ = spans.get(storage, (number, number))
                spans[storage] = (first, number)
    return [_Lifetime(storage, first, last) for storage, (first, last) in spans.items()]


def _touched(steps: Sequence[Step]) -> Iterator[tuple[Storage, ...]]:
    """Give the tensors of each step, those of branches one after the other."""
    for step in steps:
        if isinstance(step, KernelCall):
            yield step.tensors
        elif isinstance(step, Copy):
            yield (step.source, step.target)
        elif isinstance(step, Branch):
            yield (step.condition,)
            yield from _touched(step.if_true)
            yield from _touched(step.if_false)
