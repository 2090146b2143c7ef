"""The code of a scheduled kernel as text: assembly for a CPU, CUDA C for a GPU.

Assembly comes without what only debuggers read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import tvm
from tvm import tirx

from tvmflow.compiler import code_generation
from tvmflow.compiler.c_program.c_kernels import generate_code, lower_kernels
from tvmflow.compiler.cpu_model import is_cpu

_LABEL: Final = re.compile(r"([^\s:#\"]+):\s*$")
_DIRECTIVE: Final = re.compile(r"\s*\.(\w+)")
_FUNCTION: Final = re.compile(r"^[ \t]*\.(?:globl|weak|type|def)\s+([^\s,;]+)", re.MULTILINE)
_WORD: Final = re.compile(r"[\w.$@?]+")
_SECTIONS: Final = ("section", "text", "data", "bss")
# Of other sections, none is code or a constant.
_KEPT_SECTIONS: Final = re.compile(r"\.text\b|\.rodata|\.rdata|__TEXT,__(text|const|literal)")
_DATA: Final = frozenset(
    "byte short value word hword long quad xword zero space skip ascii asciz string int8 int16 int32 int64".split()
)


def make_assembly(kernel: tirx.PrimFunc, target: tvm.target.Target, *, is_plain_c: bool) -> str:
    """Compile a scheduled kernel as `build` does, and return its code as text.

    Args:
        kernel: The kernel; its `global_symbol` is its name in the text.
        target: The target.
        is_plain_c: It is a plain C function, not one for TVM's runtime.
    """
    symbol = str(kernel.attrs["global_symbol"])
    functions = {tvm.ir.GlobalVar(symbol): kernel}
    if is_plain_c:
        library = generate_code(lower_kernels(functions, target), target)
    else:
        library = code_generation.build_kernels(tvm.IRModule(functions), target)
    if is_cpu(target):
        return strip_assembly(library.inspect_source("asm"), symbol)
    return "\n".join(module.inspect_source() for module in library.imports)


def strip_assembly(text: str, symbol: str) -> str:
    """Return the assembly of a function and of those that it calls.

    It has instructions, constants, and the labels that these use.

    Args:
        text: What LLVM writes for any system; TVM adds functions for others to share.
        symbol: The name of the function, before which systems and TVM put something.
    """
    functions = set(_FUNCTION.findall(text))
    lines = list(_keep_code(text.splitlines()))
    used = _find_used(lines)
    is_kept, section, kept = True, "", []
    for line in lines:
        label = _LABEL.match(line)
        directive = _DIRECTIVE.match(line)
        if directive and directive[1] in _SECTIONS:
            section = line
            continue
        if label and label[1] in functions:
            is_kept = label[1] in used or label[1].endswith(symbol)
        if is_kept and (not label or label[1] in functions or label[1] in used):
            kept += [text.expandtabs(8).rstrip() for text in (section, line) if text]
            section = ""
    return "\n".join(kept) + "\n"


def _find_used(lines: list[str]) -> set[str]:
    """Return the names in instructions and data."""
    words = set(_WORD.findall("\n".join(line for line in lines if not _LABEL.match(line))))
    # relocations append to a name: `.Lconstant@PAGEOFF`
    return words | {word.partition("@")[0] for word in words}


def _keep_code(lines: list[str]) -> Iterator[str]:
    """Yield labels, instructions and data of the sections with code and constants.

    The directive of a section is yielded too, unless the section is empty.
    """
    section, is_kept, is_new = "", True, False
    for line in lines:
        directive = _DIRECTIVE.match(line)
        if directive and directive[1] in _SECTIONS:
            is_kept = bool(_KEPT_SECTIONS.search(line))
            is_new, section = line != section, line
        elif is_kept and (_LABEL.match(line) or _is_code(line, directive and directive[1])):
            if is_new:
                yield section
            is_new = False
            yield line


def _is_code(line: str, directive: str | None) -> bool:
    """Return whether a line is an instruction or data: not empty, no assignment, and no other directive."""
    return directive in _DATA if directive else bool(line.strip()) and " = " not in line
