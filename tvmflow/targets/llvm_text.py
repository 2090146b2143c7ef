"""LLVM's IR of C code as text, made ready to become part of a kernel.

TVM's code generator copies each function into the kernel that calls it and keeps none by itself, and
two kernels of one object may come from different files. So names get a suffix of their own, and a
function that cannot be copied, because it calls itself or its address is taken, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_DEFINITION: Final = re.compile(
    r"^define (?P<linkage>.*?)@(?P<name>[\w$.]+)\((?P<parameters>.*)\)", re.MULTILINE
)
_VARIABLE: Final = re.compile(
    r"^@(?P<name>[\w$.]+) = (?P<linkage>.*?)(?=global |constant )", re.MULTILINE
)
_SYMBOL: Final = re.compile(r"@([\w$.]+)")
_CALL: Final = re.compile(r"\bcall [^@]*@([\w$.]+)\(")
_ATTRIBUTES: Final = re.compile(r"^attributes #\d+ = .*$", re.MULTILINE)
# CPU and features, which are those of the kernel, and what concerns debuggers.
_ATTRIBUTE_WITH_VALUE: Final = re.compile(r' "[\w.-]+"="[^"]*"')
_MODULE_METADATA: Final = re.compile(r"^!llvm\..*\n", re.MULTILINE)


class SourceFunctions(NamedTuple):
    """The functions of a file of C in LLVM's IR.

    Attributes:
        text: The IR, whose functions and variables have names of their own.
        names: The name in C of each function that other files can call -> its name in the IR.
        parameters: The same -> the LLVM types of its parameters.
    """

    text: str
    names: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]


class UnsupportedFunction(ValueError):
    """A function of C that cannot become part of a kernel; the message says why."""


def read_functions(text: str, suffix: str) -> SourceFunctions:
    """Return the functions in LLVM's IR of a file of C.

    Args:
        text: What clang wrote, unoptimized.
        suffix: What to append to the names of functions and variables; no other file has it.

    Raises:
        UnsupportedFunction: a function calls itself, or its address is taken.
    """
    functions = {match["name"]: match for match in _DEFINITION.finditer(text)}
    _check_calls(text, functions)
    public = {
        name: match
        for name, match in functions.items()
        if "internal" not in match["linkage"].split()
    }
    variables = {match["name"] for match in _VARIABLE.finditer(text)}
    own = {*functions, *variables}
    text = _MODULE_METADATA.sub("", text)
    text = _ATTRIBUTES.sub(lambda match: _ATTRIBUTE_WITH_VALUE.sub("", match[0]), text)
    text = _VARIABLE.sub(_make_internal, text)
    text = _SYMBOL.sub(lambda match: f"{match[0]}{suffix}" if match[1] in own else match[0], text)
    return SourceFunctions(
        text,
        {name: f"{name}{suffix}" for name in public},
        {name: tuple(_list_types(match["parameters"])) for name, match in public.items()},
    )


def _make_internal(match: re.Match[str]) -> str:
    """Return the beginning of a variable's definition, which no other object sees."""
    words = match["linkage"].split()
    if "external" in words or "private" in words or "internal" in words:
        return match[0]
    kept = " ".join(word for word in words if word not in ("dso_local", "common", "hidden"))
    return f"@{match['name']} = internal {f'{kept} ' if kept else ''}"


def _list_types(parameters: str) -> Iterator[str]:
    """Give the type of each parameter: the first word between commas that are in no brackets."""
    depth, start = 0, 0
    for index, character in enumerate(f"{parameters},"):
        depth += (character in "({[<") - (character in ")}]>")
        if character == "," and depth == 0:
            if piece := parameters[start:index].strip():
                yield piece.split()[0]
            start = index + 1


def _check_calls(text: str, functions: Mapping[str, re.Match[str]]) -> None:
    """Check that functions are only called, and none by itself.

    Raises:
        UnsupportedFunction: otherwise.
    """
    callees: dict[str, set[str]] = {name: set() for name in functions}
    caller = ""
    for line in text.splitlines():
        if match := _DEFINITION.match(line):
            caller = match["name"]
            continue
        if line == "}":
            caller = ""
        called = set(_CALL.findall(line)) & functions.keys()
        used = set(_SYMBOL.findall(line.partition("(")[2] if called else line)) & functions.keys()
        for name in sorted(used - called):
            raise UnsupportedFunction(f"the address of the function {name} is taken")
        if caller:
            callees[caller] |= called
    for name in functions:
        if name in _reachable(name, callees):
            raise UnsupportedFunction(f"the function {name} calls itself")


def _reachable(name: str, callees: Mapping[str, set[str]]) -> set[str]:
    """Return the functions that a function calls, and those that these call."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        for callee in callees[waiting.pop()] - reached:
            reached.add(callee)
            waiting.append(callee)
    return reached
