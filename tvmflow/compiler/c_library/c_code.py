"""The C code of a program: its steps as direct calls of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tvmflow.compiler.c_library.kernels import padded
from tvmflow.compiler.c_library.parallel_work import ParallelWork, count_useful_tasks
from tvmflow.compiler.c_library.program import (
    Branch,
    Copy,
    KernelCall,
    Program,
    Step,
    Storage,
    list_kernel_calls,
)


class KernelTraits(NamedTuple):
    """The needs of a call of a kernel.

    Attributes:
        symbol: Its name in C.
        work: Its work in parallel loops.
        scratch: The bytes of memory that it allocates.
    """

    symbol: str
    work: ParallelWork
    scratch: int


def place_constants(program: Program) -> list[int]:
    """Return the offset of each constant in the file of constants, and that file's size as the last one."""
    return [0, *accumulate(padded(array.nbytes) for array in program.constants)]


def generate_code(program: Program, kernels: Mapping[str, KernelTraits], prefix: str) -> str:
    """Return the C code of a program.

    Args:
        program: The program, with planned memory.
        kernels: The traits of the kernels that it calls, by name.
        prefix: The prefix of the library's symbols.
    """
    return _Writer(program, kernels, prefix).write()


def _define_sizes(direction: str, storages: Sequence[Storage]) -> list[str]:
    return [
        f"#define TF_{direction}_BYTES{index} {storage.bytes}u"
        for index, storage in enumerate(storages)
    ]


class _Writer:
    def __init__(self, program: Program, kernels: Mapping[str, KernelTraits], prefix: str) -> None:
        self._program = program
        self._kernels = kernels
        self._prefix = prefix
        self._offsets = place_constants(program)
        self._numbers: dict[str, int] = {}
        self._arities: dict[str, int] = {}
        self._tasks = count_useful_tasks(
            {name: kernel.work for name, kernel in kernels.items()},
            list_kernel_calls(program.steps),
        )

    def write(self) -> str:
        program, kernels = self._program, self._kernels
        steps = self._write_steps(program.steps, "  ")
        staging = sum(padded(storage.bytes) for storage in (*program.inputs, *program.outputs))
        declarations = [
            f"int32_t {kernels[name].symbol}({', '.join(['void *'] * arity) or 'void'});"
            for name, arity in self._arities.items()
        ]
        names = [f'    "{name}",' for name in self._numbers]
        return "\n".join(
            (
                f"#define TF_WEIGHTS {self._prefix}weights",
                f"#define TF_ARENA {program.arena}u",
                f"#define TF_STAGING {staging}u",
                f"#define TF_SCRATCH {max((kernel.scratch for kernel in kernels.values()), default=0)}u",
                f"#define TF_KERNELS {len(kernels)}u",
                f"#define TF_MOST_TASKS {max(self._tasks.values(), default=1)}u",
                *_define_sizes("INPUTS", program.inputs),
                *_define_sizes("OUTPUTS", program.outputs),
                *self._write_counts(),
                "",
                f"extern const unsigned char {self._prefix}weights[];",
                *declarations,
                "",
                "static const char *const tf_kernel_names[TF_KERNELS + 1] = {",
                *names,
                "    NULL,",
                "};",
                "",
                "static int tf_steps(tf_context *tf, unsigned char *arena, const unsigned char *weights,",
                "                    unsigned char *const *in, unsigned char *const *out) {",
                "  TF_BEGIN(tf, arena, weights, in, out);",
                *steps,
                "  return 0;",
                "}",
                "",
            )
        )

    def _write_counts(self) -> list[str]:
        """Return the code that says which outputs have a count; the counts are the last outputs."""
        entries = {entry.output: entry for entry in self._program.counts}
        number = 1 + max((entry.place for entry in entries.values()), default=-1)
        rows = [
            f"{{{entries[index].axis}, {entries[index].place}}}" if index in entries else "{-1, 0}"
            for index in range(len(self._program.outputs) - number)
        ]
        return [
            f"#define TF_COUNTS {number}u",
            f"static const tf_output_count tf_output_counts[] = {{{', '.join([*rows, '{-1, 0}'])}}};",
        ]

    def _write_steps(self, steps: Sequence[Step], indent: str) -> list[str]:
        lines: list[str] = []
        for step in steps:
            lines += self._write_step(step, indent)
        return lines

    def _write_step(self, step: Step, indent: str) -> list[str]:
        if isinstance(step, Copy):
            target, source = self._address(step.target), self._address(step.source)
            return [f"{indent}memcpy({target}, {source}, {step.source.bytes}u);"]
        if isinstance(step, Branch):
            condition = f"*(const unsigned char *)({self._address(step.condition)})"
            return [
                f"{indent}if ({condition}) {{",
                *self._write_steps(step.if_true, f"{indent}  "),
                f"{indent}}} else {{",
                *self._write_steps(step.if_false, f"{indent}  "),
                f"{indent}}}",
            ]
        return [f"{indent}{self._write_call(step)}"]

    def _write_call(self, call: KernelCall) -> str:
        kernel = self._kernels[call.kernel]
        number = self._numbers.setdefault(call.kernel, len(self._numbers))
        self._arities[call.kernel] = len(call.tensors)
        arguments = ", ".join(f"(void *)({self._address(tensor)})" for tensor in call.tensors)
        return f"TF_CALL({number}, {self._tasks[call.kernel]}, {kernel.symbol}({arguments}));"

    def _address(self, storage: Storage) -> str:
        storage = storage.resolve()
        if storage.place == "input":
            return f"in[{storage.index}]"
        if storage.place == "output":
            return f"out[{storage.index}]"
        if storage.place == "constant":
            return f"weights + {self._offsets[storage.index]}u"
        return f"arena + {storage.offset}u"
